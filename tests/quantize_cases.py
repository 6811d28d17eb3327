"""Inputs that the tests of quantisation share: ties, boundaries and specials, since random numbers never hit a tie."""

from __future__ import annotations

import math

import numpy as np
import torch

from fp4 import formats
from fp4.formats import Format
from fp4.recipe import Recipe
from fp4.ref import quantize as ref
from fp4.ref import triton_quantize as golden
from fp4.testing import assert_same_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = [formats.get(n) for n in formats.names()]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gen(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=gen(seed)).to(dtype)


def tie_aimed(shape: tuple[int, ...], fmt: Format, seed: int) -> torch.Tensor:
    """Blocks whose maximum fixes a known scale and whose other elements lie on, and one float32 step beside, the midpoints of codes."""
    g = gen(seed)
    values = np.unique(np.abs(fmt.elem.values[np.isfinite(fmt.elem.values)]))
    middle = torch.tensor((values[1:] + values[:-1]) / 2, dtype=torch.float32)
    n = math.prod(shape) // fmt.block
    x = middle[torch.randint(0, len(middle), (n, fmt.block), generator=g)]
    step = torch.randint(-1, 2, x.shape, generator=g, dtype=torch.int32) * (torch.rand(x.shape, generator=g) < 0.3)
    x = (x.view(torch.int32) + step.to(torch.int32)).view(torch.float32)
    x[:, 0] = fmt.elem.max
    x = x * torch.where(torch.rand(x.shape, generator=g) < 0.5, -1.0, 1.0)
    return (x * torch.exp2(torch.randint(-8, 9, (n, 1), generator=g).float())).reshape(shape)


def special(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Normal data of many magnitudes with zeros of both signs, subnormals, huge values, NaN, infinities and whole zero blocks."""
    g = gen(seed)
    x = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-30, 30, (*shape[:-1], 1), generator=g).float())
    values = torch.tensor([0.0, -0.0, 0.25, 5.0, -6.0, 1e-38, -1e-40, 3e38, 448.0, 65504.0, math.inf, -math.inf, math.nan])
    pick = values[torch.randint(0, len(values), shape, generator=g)]
    x = torch.where(torch.rand(shape, generator=g) < 0.02, pick, x)
    return torch.where(torch.rand((*shape[:-1], 1), generator=g) < 0.1, torch.zeros(()), x)


def both(x: torch.Tensor, fmt: Format, recipe: Recipe, g: torch.Tensor | None) -> None:
    g, gs = ref.resolve_global_scale(x, fmt, recipe, g, None, False)
    codes, scale = ref.quantize_blocks(x, fmt, recipe, g, gs)
    on = [None if t is None else t.to(DEVICE) for t in (g, gs)]
    t_codes, t_scale = golden.quantize_blocks(x.to(DEVICE), fmt, recipe, *on)
    assert_same_bytes(t_scale, scale, elem=fmt.scale, name=f"scale of {fmt} {recipe}")
    assert_same_bytes(t_codes, codes, name=f"codes of {fmt} {recipe}")
    for dtype in DTYPES:
        want = ref.dequantize_blocks(codes, scale, g, fmt, dtype)
        got = golden.dequantize_blocks(t_codes, t_scale, on[0], fmt, dtype).cpu()
        assert torch.equal(torch.isnan(got), torch.isnan(want))
        assert_same_bytes(got.nan_to_num(0.5), want.nan_to_num(0.5), name=f"values of {fmt} {dtype}")
