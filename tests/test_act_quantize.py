"""act_and_quantize against the activation followed by the golden quantiser, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

import fp4
from fp4.errors import FormatMismatch
from fp4.gpu.kernels.act_quantize import act_and_quantize
from fp4.layouts import layouts
from fp4.ref.activation import ReLU2, SiLU, SiTU, SwiGLU, apply
from fp4.ref.quantize import quantize_blocks

pytestmark = pytest.mark.kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPE = fp4.recipes["default"]


def inputs(shape, dtype, seed=0):
    torch.manual_seed(seed)
    return (torch.randn(*shape) * 2).to(dtype).to(DEVICE)


def golden(h, act, order, fmt, g=None):
    y = apply(act, h.float(), order).to(h.dtype)
    return y, *quantize_blocks(y, fp4.formats.get(fmt), RECIPE, g)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("order", ["interleaved", "gate_up", "up_gate"])
def test_exact_activation_gives_equal_bytes(fmt, dtype, order):
    """alpha = 0 makes the sigmoid exactly 1/2, so that nothing but order, rounding and blocks is left to differ."""
    act, h = SwiGLU(alpha=0.0, beta=1.0, limit=1.5), inputs((6, 192), dtype)
    g = torch.tensor(0.037, device=DEVICE) if fmt == "nvfp4" else None
    _, codes, scale = golden(h, act, order, fmt, g)
    got = act_and_quantize(h, act, order, fmt, RECIPE, g)
    assert torch.equal(got[0], codes)
    assert torch.equal(got[1], scale)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
def test_plain_activation_gives_equal_bytes(fmt):
    h = inputs((5, 64), torch.bfloat16)
    _, codes, scale = golden(h, ReLU2(), None, fmt)
    got = act_and_quantize(h, ReLU2(), None, fmt, RECIPE)
    assert torch.equal(got[0], codes)
    assert torch.equal(got[1], scale)


@pytest.mark.parametrize("act", [SwiGLU(), SwiGLU(limit=None), SiLU(), SiTU(), SiTU(linear_beta=None)], ids=str)
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp8"])
def test_transcendental_activations(act, fmt):
    """exp and tanh differ in their last float32 bit between libraries; after rounding to bf16 few values do, by one step."""
    h = inputs((32, 256), torch.bfloat16, 1)
    y, codes, scale = golden(h, act, "gate_up", fmt)
    got_codes, got_scale = act_and_quantize(h, act, "gate_up", fmt, RECIPE)
    assert (got_scale != scale).float().mean() <= 0.005
    assert (got_codes != codes).float().mean() <= 0.01
    q = fp4.QuantizedTensor(format=fmt, codes=got_codes, scale=got_scale)
    want = fp4.QuantizedTensor(format=fmt, codes=codes, scale=scale)
    a, b = fp4.dequantize(q).double(), fp4.dequantize(want).double()
    assert ((a - b).norm() / b.norm()) < 0.01
    assert ((b - y.double()).norm() / y.double().norm()) < 0.2


def test_scales_in_any_layout_and_one_global_scale_an_expert():
    h, g = inputs((3, 40, 128), torch.bfloat16), torch.tensor([0.01, 0.5, 3.0], device=DEVICE)
    act, layout = SwiGLU(alpha=0.0), layouts["sf_128x4"]
    _, codes, scale = golden(h, act, "gate_up", "nvfp4", g)
    got = act_and_quantize(h, act, "gate_up", "nvfp4", RECIPE, g, layout)
    assert torch.equal(got[0], codes)
    for e in range(3):
        assert torch.equal(got[1][e].cpu(), layout.apply(scale[e].cpu()).reshape(-1))


def test_nan_stays_in_its_block():
    h = inputs((4, 128), torch.bfloat16)
    clean = act_and_quantize(h, SiLU(), "gate_up", "mxfp8", RECIPE)
    h[1, 5] = float("nan")
    codes, scale = act_and_quantize(h, SiLU(), "gate_up", "mxfp8", RECIPE)
    touched = torch.zeros_like(clean[1], dtype=torch.bool)
    touched[1, 0] = True
    assert torch.equal(scale[~touched], clean[1][~touched])
    assert torch.equal(codes.view(4, 2, 32)[~touched], clean[0].view(4, 2, 32)[~touched])


def test_refusals():
    h = inputs((2, 128), torch.bfloat16)
    for args in (
        (h, SiLU(), None, "nvfp4"),
        (h, ReLU2(), "gate_up", "nvfp4"),
        (h[:, :72], SiLU(), "gate_up", "mxfp4"),
        (h.double(), SiLU(), "gate_up", "nvfp4"),
    ):
        with pytest.raises(FormatMismatch):
            act_and_quantize(*args, RECIPE)
