"""From a block's amax to its scale byte, and from the byte to the factor that elements meet: the torch twins.

All arithmetic is float32, one rounding an operation, in the order that the Recipe names. ``triton_quantize`` repeats each step.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import torch

from fp4.formats import Format
from fp4.recipe import Recipe
from fp4.ref.codes import EXPONENT, INT32, MANTISSA, decode, encode_magnitude, kept

__all__ = ["block_factor", "default_global_scale", "encode_of", "rcp_approx", "scale_bytes"]

FLT_MAX = torch.finfo(torch.float32).max
_TABLE = Path(__file__).with_name("rcp_approx_sm90.gz")


@kept
def rcp_approx_table(device: torch.device) -> torch.Tensor:
    """u8 [2^21]: 2 bits for each mantissa, low bits first; value - 1 = ulps from the correctly rounded reciprocal.

    Measured on an H200 for ``rcp.approx.ftz.f32``, all 2^23 mantissas, the same for six exponents. Pinned by test_scales.py.
    """
    return torch.frombuffer(bytearray(gzip.decompress(_TABLE.read_bytes())), dtype=torch.uint8).to(device)


def rcp_approx(x: torch.Tensor) -> torch.Tensor:
    """``rcp.approx.ftz.f32`` of SM90, bit for bit. x: f32 [...], >= 0 or NaN -> f32 [...]; 0 and subnormals give infinity."""
    exact = torch.reciprocal(x)
    mantissa = x.view(INT32) & MANTISSA
    two_bits = (rcp_approx_table(x.device)[mantissa >> 2].to(INT32) >> ((mantissa & 3) * 2)) & 3
    value = (exact.view(INT32) + two_bits - 1).view(torch.float32)
    value = torch.where((exact < 2.0**-126) | (mantissa == 0), exact, value)
    value = torch.where(value < 2.0**-126, 0.0, value)  # .ftz: a subnormal result is zero
    return torch.where(x < 2.0**-126, torch.inf, value)


def reciprocal(x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """1 / x in float32: a scalar made without a dtype is what the process calls its default, which engines set to bfloat16."""
    x = x.to(torch.float32)
    return rcp_approx(x) if recipe.reciprocal == "rcp_approx_sm90" else torch.reciprocal(x)


def encode_of(g: torch.Tensor) -> torch.Tensor:
    """1 / g, at most the largest float32: below 2^-128 it would be infinity, and a zero block times that a NaN, whose byte is anything."""
    return torch.reciprocal(g).clamp(max=FLT_MAX)


def default_global_scale(amax: torch.Tensor, recipe: Recipe, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensor amax f32 [...] of x -> multiplier g and encode scale gs, f32 [...], both finite and positive.

    ``g = amax / L`` with ``L = 6 * scale_max``: 6 * 448 = 2688, the largest e2m1 times the largest e4m3. Some libraries compute gs
    first and ``g = 1 / gs`` from it, see ``CHOICES["global_rule"]``; ``dtype`` is that of x, for ``scale_dtype="input"``.
    A zero tensor gives ``recipe.global_zero``: 1 / 0 here is what serves NaN later (Model-Optimizer#1633, compressed-tensors PR #595).
    """
    limit = torch.full((), 6.0 * recipe.scale_max, dtype=torch.float32, device=amax.device)  # a fill: a graph may capture it
    if recipe.global_rule == "amax/L":
        g = torch.where(amax == 0, recipe.global_zero, (amax / limit).clamp(min=recipe.global_floor))
        return g, encode_of(g)
    step = _rounding(recipe, dtype)
    gs = step(limit / amax) if recipe.global_rule == "L/amax" else step(step(torch.reciprocal(amax)) * limit)
    gs = torch.where(amax == 0, 1.0 / recipe.global_zero, gs.clamp(max=FLT_MAX))
    return torch.reciprocal(gs), gs


def _rounding(recipe: Recipe, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    if recipe.scale_dtype == "float32" or dtype == torch.float32:
        return lambda t: t
    return lambda t: t.to(dtype).to(torch.float32)


def scale_bytes(
    amax: torch.Tensor,
    fmt: Format,
    recipe: Recipe,
    g: torch.Tensor,
    gs: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    boost: float = 1.0,
) -> torch.Tensor:
    """Block amax f32 [...] (NaN or infinity if the block holds one) -> scale byte, i32 [...] in 0..255."""
    byte = _ue8m0(amax, fmt, recipe) if fmt.scale.name == "ue8m0" else _e4m3(amax, fmt, recipe, g, gs, dtype, boost)
    bad = amax != amax
    if recipe.inf != "saturate":
        bad |= amax == torch.inf
    return byte.masked_fill_(bad, fmt.scale.nan_codes[0])


def _ue8m0(amax: torch.Tensor, fmt: Format, recipe: Recipe) -> torch.Tensor:
    """byte = exponent + 127, exact, on the bits of amax = 1.f * 2^e: its exponent field is e + 127.

    The largest element is (1 + fraction / 2^23) * 2^emax: ceil(log2(amax / largest)) is e - emax, plus 1 if f is above fraction, and
    floor(log2(amax / largest)) is e - emax, minus 1 if f is below it. A float32 division gives the same byte except next to 2^-127.
    """
    if recipe.amax_floor:
        amax = amax.clamp(min=recipe.amax_floor)
    elem, bits = fmt.elem, amax.view(INT32)
    emax, fraction = (2, 0x400000) if elem.name == "e2m1" else (8, 0x600000)  # 6 = 1.5 * 2^2, 448 = 1.75 * 2^8
    if recipe.scale_rule == "ocp_floor":
        byte = (bits >> 23) - emax
    elif recipe.scale_rule == "ceil":
        byte = ((bits + MANTISSA) >> 23) - emax
    elif recipe.scale_rule == "even":  # amax rounded to the element's mantissa, half away from zero
        byte = ((bits + (1 << (22 - elem.man_bits))) >> 23) - emax
    elif recipe.scale_rule == "rceil":
        byte = ((bits + (MANTISSA - fraction)) >> 23) - emax
        if recipe.inf == "saturate":  # infinity / largest is infinity, rounded up to the largest scale
            byte = torch.where(bits == EXPONENT, 254, byte)
        if recipe.ue8m0_floor:  # float32(amax / largest) > 0
            byte = torch.where(bits > int(elem.max) // 2, byte.clamp(min=recipe.ue8m0_floor), byte)
    else:
        byte = ((bits + (MANTISSA + 1 - fraction)) >> 23) - (emax + 1)
    return byte.clamp_(0, 254)


def _e4m3(
    amax: torch.Tensor, fmt: Format, recipe: Recipe, g: torch.Tensor, gs: torch.Tensor, dtype: torch.dtype, boost: float
) -> torch.Tensor:
    v = scale_value(amax, recipe, g, gs, dtype) * boost
    byte = encode_magnitude(v, fmt.scale)
    if recipe.underflow_byte:
        byte = byte.masked_fill_(byte == 0, recipe.underflow_byte)
    if recipe.zero_byte != recipe.underflow_byte or recipe.scale_floor or recipe.amax_floor:
        byte = byte.masked_fill_(amax == 0, recipe.zero_byte)
    return byte


def scale_value(amax: torch.Tensor, recipe: Recipe, g: torch.Tensor, gs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The block scale before it is rounded to a byte, f32 [...]; about ``amax / (elem_max * g)``."""
    step = _rounding(recipe, dtype)
    if recipe.amax_floor:
        amax = amax.clamp(min=recipe.amax_floor)
    top = torch.full((), recipe.elem_max, dtype=torch.float32, device=amax.device)
    if recipe.scale_order == "amax/(max*g)":
        v = amax / (top * g)
    elif recipe.scale_order == "(amax/max)/g":
        v = step(amax / top) / g
    elif recipe.scale_order == "(amax/max)*gs":
        v = step(amax / top) * gs
    elif recipe.scale_order == "amax*(gs*(1/max))":
        v = amax * (gs * reciprocal(top, recipe))
    else:
        share = amax * reciprocal(top, recipe)
        v = gs * (torch.where(share < 2.0**-126, 0.0, share) if recipe.flush else share)
    return v.clamp(min=recipe.scale_floor) if recipe.scale_floor else v


def block_factor(
    byte: torch.Tensor, amax: torch.Tensor, fmt: Format, recipe: Recipe, g: torch.Tensor, gs: torch.Tensor
) -> tuple[torch.Tensor, bool]:
    """Scale byte i32 [...] and amax f32 [...] -> (factor f32 [...], divide).

    A scaled element is ``x * factor``, or ``x / factor`` if ``divide``.

    A NaN byte gives a NaN factor, so that every element of the block becomes the NaN code.
    """
    if fmt.scale.name == "ue8m0":
        # 2^(127 - byte), exact; for byte 254 that is the subnormal 2^-127
        bits = torch.where(byte == 254, 0x00400000, (254 - byte) << 23)
        if recipe.ue8m0_zero:
            bits = torch.where(byte == 0, 0, bits)
        return torch.where(byte == 255, 0x7FC00000, bits).view(torch.float32), False
    d = decode(byte.to(torch.uint8), fmt.scale)
    divide = recipe.encode_order.startswith("x/")
    if recipe.encode_order == "x*min(1/(d*g),FLT_MAX)":
        factor = torch.reciprocal(d * g).clamp(max=FLT_MAX)
    elif recipe.encode_order == "x/(d*g)":
        factor = d * g
    elif recipe.encode_order == "x*(gs/d)":
        factor = gs / d
    elif recipe.encode_order == "x/(d/gs)":
        factor = d / gs
    else:
        factor = reciprocal(d * reciprocal(gs, recipe), recipe)
    zero = amax == 0  # whatever its byte: 0 times a factor that overflowed would be a NaN
    if recipe.underflow == "zero":
        zero = zero | (byte == 0)
    factor = factor.masked_fill_(zero, torch.inf if divide else 0.0)
    return factor, divide
