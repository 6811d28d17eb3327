"""fouroversix's files hold an amax instead of a scale, and not which of its two modes wrote it: the largest block scale tells."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fp4


@pytest.mark.parametrize(("byte", "over"), [(0x78, 6 * 256), (0x7C, 6 * 256), (0x7D, 6 * 448), (0x7E, 6 * 448)])
@pytest.mark.parametrize("style", ["", "quantized_weight_"])
def test_the_mode_is_read_from_the_largest_scale(tmp_path: Path, byte: int, over: int, style: str) -> None:
    """256 and 384 are the largest of the adaptive mode, 448 of the static one; rows are padded to 128, which is not read."""
    g = torch.Generator().manual_seed(byte)
    codes = torch.randint(0, 256, (128, 32), dtype=torch.uint8, generator=g)
    scale = torch.randint(0x20, 0x70, (128, 4), dtype=torch.uint8, generator=g)
    scale[17, 2] = byte
    codes[100:], scale[100:] = 0, 0
    stored = fp4.layouts["sf_128x4"].apply(scale)
    names = [f"layer.{style}{leaf}" for leaf in ("values", "scale_factors", "amax")]
    path = tmp_path / "model.safetensors"
    save_file(dict(zip(names, (codes, stored.view(torch.float8_e4m3fn), torch.tensor(3.5)), strict=True)), path)
    ck = fp4.open_checkpoint(path)
    (name,) = ck.names()
    assert (ck.dialect, name) == ("fouroversix", "layer.weight" if style else "layer")
    q = ck[name]
    assert isinstance(q, fp4.QuantizedTensor)
    assert torch.equal(q.codes, codes[:100])
    assert torch.equal(q.scale, scale[:100])
    assert q.global_scale is not None
    assert float(q.global_scale) == pytest.approx(3.5 / over, rel=3e-7)
    assert torch.equal(ck.dequantize(name), fp4.dequantize(q))
