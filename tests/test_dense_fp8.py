"""W4A8 without a GPU: the e4m3 bytes of every code under every offset, by the instruction string; what prepare refuses."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import ptx_model
import pytest
import torch
from test_dense_decode import E2M1, words

from fp4.errors import Unsupported
from fp4.gpu.kernels import dense_fp8, frag, plain_fp8

pytestmark = pytest.mark.kernel
wide_fp8 = pytest.importorskip("fp4.gpu.kernels.wide_fp8")


@pytest.mark.parametrize("base", [9, 120, 254])
def test_codes_become_e4m3_exactly(base):
    word = frag.Window(1.0, 30 - base, False, True).oc & 0xFFFFFFFF
    for d in range(plain_fp8.SPAN + 1):
        s = np.full(2, (base - d) * 0x01010101, np.uint32)
        oc = np.full(2, word, np.uint32)
        scales = ptx_model.run(plain_fp8.SCALES_ROW.value, {4: s, 5: oc, 6: oc}, 4)
        codes = np.stack([np.arange(16), np.arange(16)[::-1]]).reshape(2, 2, 2, 2, 2)  # lane, word, e, h, l
        w = [words(codes[:, i]) for i in range(2)]
        pair = scales[0].astype(np.uint32) * np.uint32(0x10001)
        inputs = {8: w[0], 9: w[1], 10: w[0], 11: w[1], 12: pair, 13: pair, 14: pair, 15: pair}
        out = ptx_model.run(wide_fp8.WORDS_E4M3.value, inputs, 8, wide=True)
        for i in range(2):
            for e in range(2):
                got = out[2 * i + e].view(np.uint8).reshape(2, 4).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
                np.testing.assert_array_equal(got, E2M1[codes[:, i, e].reshape(2, 4)] * 2.0 ** (1 - d))


def test_row_base_refuses_wide_rows_and_nan():
    scale = torch.full((4, 8), 120, dtype=torch.uint8)
    scale[2, 3] = 111
    assert plain_fp8.row_base(scale).tolist() == [120, 120, 120, 120]
    scale[2, 3] = 110
    with pytest.raises(Unsupported, match=r"1 of 4 rows span more \(row 2: -17 .. -7\)"):
        plain_fp8.row_base(scale)
    scale[2, 3] = 255
    with pytest.raises(Unsupported, match="NaN"):
        plain_fp8.row_base(scale)


def test_reasons():
    assert "6 significant bits" in str(dense_fp8.reason((9, 0), 16))
    assert "need SM89" in str(dense_fp8.reason((8, 6), 32))
    assert all(dense_fp8.reason(cc, 32) is None for cc in ((8, 9), (9, 0), (10, 0), (12, 0)))


def test_prepare_for_fp8_activations_restores_and_refuses():
    """Through prepare, for a Hopper GPU that is not here: the bytes come back; NVFP4 and wide rows are refused with the reason."""
    import fp4
    from fp4.gpu.device import Device

    g = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (48, 80), dtype=torch.uint8, generator=g)
    scale = torch.randint(115, 122, (48, 5), dtype=torch.uint8, generator=g)
    q = fp4.QuantizedTensor(format="mxfp4", codes=codes, scale=scale)
    sm90 = Device.of("sm90")
    p = fp4.prepare(q, backend="triton", device=sm90, act="fp8")
    assert p.meta["path"] == "dense"
    assert torch.equal(p.arrays["triton.row_base"], scale.amax(-1))
    assert torch.equal(p.restore().codes, codes)
    assert torch.equal(p.restore().scale, scale)
    wide = scale.clone()
    wide[3, 1] = 90
    with pytest.raises(Unsupported, match="span at most 9 binades"):
        fp4.prepare(fp4.QuantizedTensor(format="mxfp4", codes=codes, scale=wide), backend="triton", device=sm90, act="fp8")
    nv = fp4.QuantizedTensor(format="nvfp4", codes=codes, scale=scale.repeat_interleave(2, -1))
    with pytest.raises(ValueError, match=r"6 significant bits|fp8"):
        fp4.prepare(nv, backend="triton", device=sm90, act="fp8")
