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


def mma_sums(products: np.ndarray, step: int, bits: int) -> np.ndarray:
    """products [terms, n] added as an fp8 MMA does: ``step`` terms and the running sum are aligned to the largest exponent among them and
    cut (toward zero) after ``bits`` bits."""
    acc = np.zeros(products.shape[1])
    for k in range(0, len(products), step):
        part = np.concatenate([products[k : k + step], acc[None]])
        top = np.maximum(np.abs(part).max(0), 1e-300)
        unit = 2.0 ** (np.floor(np.log2(top)) - bits + 1)
        acc = (np.trunc(part / unit) * unit).sum(0)
    return acc


@pytest.mark.parametrize("k", [32, 1024, 2880, 8192])
def test_sums_of_14_bits_stay_within_the_bound(k):
    """The bound of tests/gpu/test_dense.py (2e-3) leaves room for sums of 14 bits up to k = 8192 without a second accumulator; sums of
    8 bits break it."""
    g = torch.Generator().manual_seed(k)
    x = torch.randn(64, k, generator=g)
    x8 = (x / (x.abs().amax(-1, keepdim=True) / 448)).to(torch.float8_e4m3fn).double().numpy()
    code = torch.randint(0, 16, (k,), generator=g).numpy()
    span = torch.randint(0, 7, (k // 32,), generator=g).numpy().repeat(32)
    products = (x8 * (E2M1[code] * 2.0 ** (1 - span))).T
    size = np.abs(products).sum(0)
    error = {bits: (np.abs(mma_sums(products, 32, bits) - products.sum(0)) / size).max() for bits in (8, 14)}
    print(k, error)
    assert error[14] < 1e-3
    assert error[8] > 2e-3


@pytest.mark.parametrize("frag_order", [False, True])
def test_the_quantiser_is_the_formula(frag_order):
    """quantize_x byte for byte against x / (amax / 448) with IEEE divisions, in Triton's interpreter or on a GPU.

    A cast that goes through fp16, as Triton's does below SM90, rounds twice: one code in 400 was off by one on SM89's machine code.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    m, k, kt = 5, 4064, 64
    x = (torch.randn(m, k, generator=torch.Generator().manual_seed(1)) * torch.tensor([1e-3, 1, 50, 0, 1])[:, None]).bfloat16()
    x[0, :4] = torch.tensor([3.5, 0.2109375, 1.7578125e-2, -0.0])  # amax / 448 = 2^-7: ties
    grid = torch.arange(128, 256) / 128  # every bf16 mantissa as x and, doubled, as amax: the row with most codes that two roundings change
    ratio = grid / (2 * grid / torch.full_like(grid, 448.0))[:, None]
    changed = (ratio.to(torch.float8_e4m3fn).float() != ratio.half().to(torch.float8_e4m3fn).float()).sum(1)
    x[1] = grid.repeat(32)[:k]
    x[1, 0] = 2 * grid[changed.argmax()]
    x[4, 7] = torch.nan
    x[2, :2048] *= torch.logspace(-8, 0, 2048).bfloat16()  # subnormals of e4m3 and below
    q = torch.full((m, kt * 64), 0x55, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    xs = torch.zeros(m, device=device)
    plain_fp8.quantize_x[(m,)](x.to(device), q, xs, k, kt, B=32, FRAG=frag_order, PDL=False, ROUND=True)
    q = q.view(torch.uint8).cpu()
    if frag_order:
        q = q.reshape(m, kt, 4, 4, 4).transpose(2, 3).reshape(m, kt * 64)
    top = x.float().abs().amax(-1, keepdim=True)
    want = torch.where(top == 0, 1.0, top) / torch.full_like(top, 448.0)
    assert torch.equal(xs.cpu()[:4], want[:4, 0])
    assert torch.isnan(xs[4])
    assert torch.equal(q[:4, :k], (x.float() / want)[:4].to(torch.float8_e4m3fn).view(torch.uint8))
    assert (q[:4, k:] == 0).all()
    twice = (x.float() / want)[:4].half().to(torch.float8_e4m3fn).view(torch.uint8)
    assert (q[:4, :k] != twice).sum() > 10
