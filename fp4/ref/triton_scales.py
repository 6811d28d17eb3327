"""From a block's amax to its scale byte and to the factor of its elements, as Triton device functions; the twins of ``scales``."""

from __future__ import annotations

import triton
import triton.language as tl

from fp4.ref.triton_codes import bits_of, decode_e4m3, decode_ue5m3, fields_of, from_bits, round_even

__all__ = ["bf16_bits", "e4m3_scale", "encode_of", "scale_value", "step_of", "ue8m0_byte"]


@triton.jit
def _rcp(x, table, APPROX: tl.constexpr):
    """Correctly rounded 1/x, or SM90's rcp.approx.ftz by its measured table, see ``scales.rcp_approx``."""
    exact = tl.div_rn(1.0, x)
    if APPROX:
        mantissa = bits_of(x) & 0x007FFFFF
        two = (tl.load(table + (mantissa >> 2)).to(tl.int32) >> ((mantissa & 3) * 2)) & 3
        value = from_bits(bits_of(exact) + two - 1)
        value = tl.where((exact < 1.1754943508222875e-38) | (mantissa == 0), exact, value)
        value = tl.where(value < 1.1754943508222875e-38, 0.0, value)
        exact = tl.where(x < 1.1754943508222875e-38, float("inf"), value)
    return exact


@triton.jit
def bf16_bits(x):
    """f32 -> bits of the nearest bf16, ties to even, in the low half of an i32; NaN stays NaN."""
    b = bits_of(x)
    rounded = (b + 0x7FFF + ((b >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded)


@triton.jit
def step_of(x, ROUND: tl.constexpr):
    """f32 rounded to float32 (0), bf16 (1) or fp16 (2), as f32."""
    if ROUND == 1:
        x = from_bits(bf16_bits(x) << 16)
    elif ROUND == 2:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def ue8m0_byte(amax, RULE: tl.constexpr, EMAX: tl.constexpr, MAN: tl.constexpr, TOP: tl.constexpr, FLOOR: tl.constexpr, INF: tl.constexpr):
    """amax f32 -> byte i32; RULE in the order of ``CHOICES["scale_rule"]``: ocp_floor, rceil, ceil, even, floor_amax_over_6."""
    b = bits_of(amax)
    FRACTION: tl.constexpr = 0x400000 if MAN == 1 else 0x600000  # of the largest value: 6 = 1.5 * 2^2, 448 = 1.75 * 2^8
    if RULE == 0:
        byte = (b >> 23) - EMAX
    elif RULE == 1:
        byte = ((b + (0x7FFFFF - FRACTION)) >> 23) - EMAX
    elif RULE == 2:
        byte = ((b + 0x7FFFFF) >> 23) - EMAX
    elif RULE == 3:
        byte = ((b + (1 << (22 - MAN))) >> 23) - EMAX
    else:
        byte = ((b + (0x800000 - FRACTION)) >> 23) - (EMAX + 1)
    if RULE == 1 and INF == 1:
        byte = tl.where(b == 0x7F800000, 254, byte)
    if RULE == 1 and FLOOR > 0:
        byte = tl.where(b > TOP // 2, tl.maximum(byte, FLOOR), byte)
    return tl.minimum(tl.maximum(byte, 0), 254)


@triton.jit
def encode_of(g):
    """1 / g, at most the largest float32, as ``scales.encode_of``."""
    gs = tl.div_rn(1.0, g)
    return tl.where(gs > 3.4028234663852886e38, 3.4028234663852886e38, gs)


@triton.jit
def scale_value(amax, g, gs, ORDER: tl.constexpr, TOP: tl.constexpr, RCP_TOP: tl.constexpr, ROUND: tl.constexpr, FLUSH: tl.constexpr):
    """The block scale before rounding; ORDER in the order of ``CHOICES["scale_order"]``."""
    if ORDER == 0:
        v = tl.div_rn(amax, g * TOP)
    elif ORDER == 1:
        v = tl.div_rn(step_of(tl.div_rn(amax, TOP), ROUND), g)
    elif ORDER == 2:
        v = step_of(tl.div_rn(amax, TOP), ROUND) * gs
    elif ORDER == 3:
        v = amax * (gs * RCP_TOP)
    else:
        share = amax * RCP_TOP
        if FLUSH:
            share = tl.where(share < 1.1754943508222875e-38, 0.0, share)
        v = gs * share
    return v


@triton.jit
def e4m3_scale(
    v, amax, bad, g, gs, table, SCALE: tl.constexpr, ENCODE_ORDER: tl.constexpr, ZERO_BYTE: tl.constexpr, UNDERFLOW_BYTE: tl.constexpr,
    UNDERFLOW: tl.constexpr, FLOORS: tl.constexpr, APPROX: tl.constexpr,
):  # fmt: skip
    """Block scale before rounding, f32 -> (byte i32, factor of the elements f32, decoded byte f32)."""
    EMIN: tl.constexpr = -6 if SCALE == 0 else -14
    TOP_CODE: tl.constexpr = 0x7E if SCALE == 0 else 0xFE
    fields = fields_of(round_even(v, 3, EMIN), 3, EMIN, TOP_CODE)
    byte = (fields >> 20).to(tl.int32)
    UNDO: tl.constexpr = 2.0 ** (126 + EMIN)
    d = fields.to(tl.float32, bitcast=True) * UNDO
    if UNDERFLOW_BYTE != 0:
        byte = tl.where(byte == 0, UNDERFLOW_BYTE, byte)
    if (ZERO_BYTE != UNDERFLOW_BYTE) or FLOORS:
        byte = tl.where(amax == 0, ZERO_BYTE, byte)
    byte = tl.where(bad, 0x7F if SCALE == 0 else 0xFF, byte)
    if (UNDERFLOW_BYTE != 0) or (ZERO_BYTE != 0) or FLOORS:
        d = decode_e4m3(byte) if SCALE == 0 else decode_ue5m3(byte)
    DIVIDE: tl.constexpr = (ENCODE_ORDER == 1) or (ENCODE_ORDER == 3)
    if ENCODE_ORDER == 0:
        factor = tl.div_rn(1.0, d * g)
        factor = tl.where(factor > 3.4028234663852886e38, 3.4028234663852886e38, factor)
    elif ENCODE_ORDER == 1:
        factor = d * g
    elif ENCODE_ORDER == 2:
        factor = tl.div_rn(gs, d)
    elif ENCODE_ORDER == 3:
        factor = tl.div_rn(d, gs)
    else:
        factor = _rcp(d * _rcp(gs, table, APPROX), table, APPROX)
    if UNDERFLOW == 1:
        zero = amax == 0  # whatever its byte: 0 times a factor that overflowed would be a NaN
    elif (ZERO_BYTE != 0) or FLOORS:
        zero = (byte == 0) | (amax == 0)
    else:
        zero = byte == 0
    factor = tl.where(zero, float("inf") if DIVIDE else 0.0, factor)
    return byte, tl.where(bad, float("nan"), factor), d
