"""Golden Triton kernels: block quantisation and dequantisation by Format and Recipe, byte-equal to ``quantize`` and ``scales``.

One program handles ``tile / block`` consecutive blocks of the row-major tensor; x is read once, 16 bytes a thread, codes and scales
are written once. The usual recipes take bf16 as pairs in 32-bit words, a whole block a thread (``triton_pairs``): fewer instructions
than the memory's time hides, and nothing passes between threads (benchmarks/notes/quantize.md counts them). Every choice of the Recipe
is a compile-time constant. Scale bytes go to any byte layout of the catalogue through ``layout_offset``, in the same pass. The kernels
hold no index arithmetic per element: strides and divisions are per block, divisions by multiplication.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from fp4.errors import FormatMismatch
from fp4.formats import Format
from fp4.layout import Layout
from fp4.recipe import Recipe
from fp4.ref.activation import Activation
from fp4.ref.scales import rcp_approx_table, reciprocal
from fp4.ref.triton_activation import activate, constants
from fp4.ref.triton_codes import (
    bits_of,
    decode_e2m1,
    decode_e4m3,
    decode_ue5m3,
    decode_ue8m0,
    encode_magnitude,
    fields_of,
    from_bits,
    pack_nibbles,
    round_even,
)
from fp4.ref.triton_layout import layout_offset
from fp4.ref.triton_pairs import join4, pack8_e2m1, pack8_e4m3, top_of_pairs

__all__ = ["dequantize_blocks", "quantize_blocks"]

#: elements a program, compiled and in the interpreter (where a launch costs more than its work)
TILE, TILE_INTERPRETED = 4096, 1 << 17
#: element offsets from here on need 64 bits
WIDE_FROM = 2**31
_ROUND = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SCALE = {"e4m3": 0, "ue5m3": 1, "ue8m0": 2}


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
def _load_f32(ptr, mask):
    """Values as f32; the interpreter's bf16 cast is not exact for subnormals, so there bf16 comes as its bits, i16."""
    raw = tl.load(ptr, mask=mask, other=0)
    if raw.dtype == tl.int16:
        value = from_bits(raw.to(tl.int32) << 16)
    else:
        value = raw.to(tl.float32)
    return value


@triton.jit
def _bf16_bits(x):
    """f32 -> bits of the nearest bf16, ties to even, in the low half of an i32; NaN stays NaN."""
    b = bits_of(x)
    rounded = (b + 0x7FFF + ((b >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded)


@triton.jit
def _step(x, ROUND: tl.constexpr):
    """f32 rounded to float32 (0), bf16 (1) or fp16 (2), as f32."""
    if ROUND == 1:
        x = from_bits(_bf16_bits(x) << 16)
    elif ROUND == 2:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def _ue8m0_byte(amax, RULE: tl.constexpr, EMAX: tl.constexpr, MAN: tl.constexpr, TOP: tl.constexpr, FLOOR: tl.constexpr, INF: tl.constexpr):
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
def _scale_value(amax, g, gs, ORDER: tl.constexpr, TOP: tl.constexpr, RCP_TOP: tl.constexpr, ROUND: tl.constexpr, FLUSH: tl.constexpr):
    """The block scale before rounding; ORDER in the order of ``CHOICES["scale_order"]``."""
    if ORDER == 0:
        v = tl.div_rn(amax, g * TOP)
    elif ORDER == 1:
        v = tl.div_rn(_step(tl.div_rn(amax, TOP), ROUND), g)
    elif ORDER == 2:
        v = _step(tl.div_rn(amax, TOP), ROUND) * gs
    elif ORDER == 3:
        v = amax * (gs * RCP_TOP)
    else:
        share = amax * RCP_TOP
        if FLUSH:
            share = tl.where(share < 1.1754943508222875e-38, 0.0, share)
        v = gs * share
    return v


@triton.jit
def _sign(code, x, y, RULE: tl.constexpr, TOP_BIT: tl.constexpr, SHIFT: tl.constexpr):
    """``CHOICES["zero_sign"]``: keep, of_value, positive, negative."""
    if RULE == 0:
        code = code | ((bits_of(x) >> SHIFT) & TOP_BIT)
    elif RULE == 1:
        code = code | tl.where(y < 0, TOP_BIT, 0)
    elif RULE == 2:
        code = code | tl.where((y < 0) & (code != 0), TOP_BIT, 0)
    else:
        code = code | tl.where(y <= 0, TOP_BIT, 0)
    return code


@triton.jit
def _e4m3_scale(
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
    zero = byte == 0
    if UNDERFLOW == 1:
        zero = zero & (amax == 0)
    factor = tl.where(zero, float("inf") if DIVIDE else 0.0, factor)
    return byte, tl.where(bad, float("nan"), factor), d


@triton.jit
def _scaled(x, factor, DIVIDE: tl.constexpr):
    """x [n, block] by the factor of each row."""
    if DIVIDE:
        y = tl.div_rn(x, tl.broadcast_to(factor[:, None], x.shape))
    else:
        y = x * factor[:, None]
    return y


@triton.jit
def _codes(
    x, y, PACK: tl.constexpr, MAN: tl.constexpr, EMIN: tl.constexpr, TOP: tl.constexpr, TOP_CODE: tl.constexpr, TIE: tl.constexpr,
    ZERO_SIGN: tl.constexpr, NAN_CODE: tl.constexpr,
):  # fmt: skip
    """Codes of the scaled elements y of x, i32, one an element, by any recipe."""
    TOP_BIT: tl.constexpr = 8 if PACK else 128
    SHIFT: tl.constexpr = 28 if PACK else 24
    NAN_MAX: tl.constexpr = 7 if PACK else 127
    code = _sign(encode_magnitude(y, MAN, EMIN, TOP, TOP_CODE, TIE), x, y, ZERO_SIGN, TOP_BIT, SHIFT)
    if NAN_CODE == 0:
        code = tl.where(y != y, NAN_MAX, code)
    elif NAN_CODE == 1:
        code = tl.where(y != y, NAN_MAX | ((bits_of(x) >> SHIFT) & TOP_BIT), code)
    else:
        code = tl.where(y != y, 0, code)
    return code


@triton.jit
def _bounded(a):
    """f32 >= 0 or NaN -> at most the largest finite float32; through the integers."""
    return from_bits(tl.minimum(bits_of(a), 0x7F7FFFFF))


@triton.jit
def _error(code, d, g, x, RULE: tl.constexpr, BLOCK: tl.constexpr):
    """Error of a block's codes, f32 [n]: sum of squares (1), of magnitudes (2), or the largest magnitude (3).

    Neighbours are added pairwise, level by level: the same order of sums everywhere. ``_bounded`` stands between each product and the
    sum that follows, so that no compiler fuses the two (ptxas of Triton 3.6 does for SM120, even when told not to).
    """
    e = tl.abs(_bounded(decode_e2m1(code & 7) * (d * g)[:, None]) - tl.abs(x))
    if RULE == 1:
        e = _bounded(e * e)
    for _ in tl.static_range(4 if BLOCK == 16 else 5):  # unrolled: a loop may not change the shape of what it carries
        a, b = tl.split(tl.reshape(e, [e.shape[0], e.shape[1] // 2, 2]))
        if RULE == 3:
            e = tl.where(a > b, a, b)
        else:
            e = a + b
    return tl.reshape(e, [e.shape[0]])


@triton.jit
def _quotient(n, factor, shift):
    """n // d for 0 <= n < 2^31, u32, by the two numbers of ``divider(d)``."""
    return tl.umulhi(n.to(tl.uint32) << 1, factor.to(tl.uint32)) >> shift.to(tl.uint32)


@triton.jit
def _row_col(b, blocks_row, rows_mat, by_row, row_shift, by_mat, mat_shift, WIDE: tl.constexpr, ONE: tl.constexpr):
    """(matrix, row, column) of block b; ONE matrix needs no division for it."""
    if WIDE:
        row = b // blocks_row
        col = b - row * blocks_row
        mat = row // rows_mat
    else:
        row = _quotient(b, by_row, row_shift)
        col = b.to(tl.uint32) - row * blocks_row.to(tl.uint32)
        mat = row * 0 if ONE else _quotient(row, by_mat, mat_shift)
    row = row if ONE else row - mat * rows_mat.to(mat.dtype)
    return mat, row, col


@triton.jit(do_not_specialize=["blocks", "blocks_row", "rows_mat", "by_row", "row_shift", "by_mat", "mat_shift", "RO", "CO", "bytes_mat"])
def _quantize_kernel(
    x_ptr, up_ptr, codes_ptr, scale_ptr, g_ptr, gs_ptr, table_ptr, p0, p1, p2,
    blocks, blocks_row, rows_mat, by_row, row_shift, by_mat, mat_shift, s_mat, s_row, s_k, RO, CO, bytes_mat,
    PAIRS: tl.constexpr, CONVERT: tl.constexpr, ONE: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr, PACK: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, EXPERTS: tl.constexpr,
    DIGITS: tl.constexpr, MAN: tl.constexpr, EMIN: tl.constexpr, TOP: tl.constexpr, TOP_CODE: tl.constexpr,
    EMAX: tl.constexpr, SCALE: tl.constexpr,
    TIE: tl.constexpr, ZERO_SIGN: tl.constexpr, NAN_CODE: tl.constexpr, NAN: tl.constexpr, INF: tl.constexpr,
    RULE: tl.constexpr, UE8M0_FLOOR: tl.constexpr, UE8M0_ZERO: tl.constexpr, SCALE_ORDER: tl.constexpr, ENCODE_ORDER: tl.constexpr,
    TARGET: tl.constexpr, RCP_TARGET: tl.constexpr,
    SCALE_FLOOR: tl.constexpr, ZERO_BYTE: tl.constexpr, UNDERFLOW_BYTE: tl.constexpr, UNDERFLOW: tl.constexpr,
    APPROX: tl.constexpr, AMAX_FLOOR: tl.constexpr, ROUND: tl.constexpr, FLUSH: tl.constexpr, FOUR_OVER_SIX: tl.constexpr,
    ACT: tl.constexpr, ACT_ROUND: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * N if WIDE else tl.program_id(0) * N
    b = first + tl.arange(0, N)
    live = b < blocks
    mat, row, col = _row_col(b, blocks_row, rows_mat, by_row, row_shift, by_mat, mat_shift, WIDE, ONE)
    if FLAT:
        start = b * BLOCK
    else:
        start = mat.to(b.dtype) * s_mat + row.to(b.dtype) * s_row + col.to(b.dtype) * (s_k * BLOCK)
    if PAIRS:  # a thread holds a whole block, so nothing moves between threads
        p = x_ptr + (start // 2)[:, None] + tl.arange(0, 4)[None, :]
        w0 = tl.load(p, mask=live[:, None], other=0)
        w1 = tl.load(p + 4, mask=live[:, None], other=0)
        top = tl.maximum(top_of_pairs(w0, NAN, FLUSH), top_of_pairs(w1, NAN, FLUSH))
        if BLOCK == 32:
            w2 = tl.load(p + 8, mask=live[:, None], other=0)
            w3 = tl.load(p + 12, mask=live[:, None], other=0)
            top = tl.maximum(top, tl.maximum(top_of_pairs(w2, NAN, FLUSH), top_of_pairs(w3, NAN, FLUSH)))
    else:
        e = tl.arange(0, BLOCK)
        step = e if FLAT else e * s_k
        x = _load_f32(x_ptr + start[:, None] + step[None, :], live[:, None])
        if ACT >= 0:
            up = _load_f32(up_ptr + start[:, None] + step[None, :], live[:, None]) if ACT > 0 else x
            x = _step(activate(x, up, p0, p1, p2, ACT), ACT_ROUND)
        if FLUSH:
            x = tl.where(tl.abs(x) < 1.1754943508222875e-38, x * 0.0, x)
        # amax on the bits of |x|: the order of magnitudes is that of their bits, infinity and NaN come last
        magnitude = bits_of(x) & 0x7FFFFFFF
        if NAN == 1:  # ignore: -1 is below every magnitude and stays only if all are NaN
            magnitude = tl.where(magnitude > 0x7F800000, -1, magnitude)
        top = tl.max(magnitude, 1)
    if NAN == 1:
        top = tl.where(top < 0, 0x7FC00000, top)
    amax = from_bits(top)
    bad = amax != amax
    if INF != 1:
        bad = bits_of(amax) >= 0x7F800000
    floored = tl.where(amax < AMAX_FLOOR, AMAX_FLOOR, amax) if AMAX_FLOOR > 0 else amax

    if SCALE == 2:
        TOP_INT: tl.constexpr = 6 if PACK else 448
        byte = _ue8m0_byte(floored, RULE, EMAX, MAN, TOP_INT, UE8M0_FLOOR, INF)
        byte = tl.where(bad, 255, byte)
        power = tl.where(byte == 254, 0x00400000, (254 - byte) << 23)
        if UE8M0_ZERO:
            power = tl.where(byte == 0, 0, power)
        factor = from_bits(tl.where(bad, 0x7FC00000, power))
    else:
        if EXPERTS:
            g = tl.load(g_ptr + mat, mask=live, other=1.0)
            gs = tl.load(gs_ptr + mat, mask=live, other=1.0)
        else:
            g = tl.load(g_ptr + tl.zeros([1], tl.int32))
            gs = tl.load(gs_ptr + tl.zeros([1], tl.int32))
        v = _scale_value(floored, g, gs, SCALE_ORDER, TARGET, RCP_TARGET, ROUND, FLUSH)
        if SCALE_FLOOR > 0:
            v = tl.where(v < SCALE_FLOOR, SCALE_FLOOR, v)
        FLOORS: tl.constexpr = (SCALE_FLOOR > 0) or (AMAX_FLOOR > 0)
        byte, factor, d = _e4m3_scale(
            v, amax, bad, g, gs, table_ptr, SCALE, ENCODE_ORDER, ZERO_BYTE, UNDERFLOW_BYTE, UNDERFLOW, FLOORS, APPROX
        )

    DIVIDE: tl.constexpr = (SCALE != 2) and ((ENCODE_ORDER == 1) or (ENCODE_ORDER == 3))
    if PAIRS:
        if PACK:
            q = codes_ptr + (b * (BLOCK // 8))[:, None]
            c0 = pack8_e2m1(w0, factor, ZERO_SIGN, NAN_CODE, FLUSH)
            c1 = pack8_e2m1(w1, factor, ZERO_SIGN, NAN_CODE, FLUSH)
            if BLOCK == 32:
                c2 = pack8_e2m1(w2, factor, ZERO_SIGN, NAN_CODE, FLUSH)
                c3 = pack8_e2m1(w3, factor, ZERO_SIGN, NAN_CODE, FLUSH)
                tl.store(q + tl.arange(0, 4)[None, :], join4(c0, c1, c2, c3), mask=live[:, None])
            else:
                tl.store(q + tl.arange(0, 2)[None, :], tl.join(c0, c1), mask=live[:, None])
        else:
            q = codes_ptr + (b * (BLOCK // 4))[:, None]
            c0, c1 = pack8_e4m3(w0, factor, CONVERT)
            c2, c3 = pack8_e4m3(w1, factor, CONVERT)
            if BLOCK == 32:  # one store: two of 16 bytes each would reach the memory in halves of its 32-byte sectors
                c4, c5 = pack8_e4m3(w2, factor, CONVERT)
                c6, c7 = pack8_e4m3(w3, factor, CONVERT)
                words = tl.reshape(tl.join(join4(c0, c2, c4, c6), join4(c1, c3, c5, c7)), [N, 8])
                tl.store(q + tl.arange(0, 8)[None, :], words, mask=live[:, None])
            else:
                tl.store(q + tl.arange(0, 4)[None, :], join4(c0, c1, c2, c3), mask=live[:, None])
    else:
        y = _scaled(x, factor, DIVIDE)
        if PACK and TIE == 0 and ZERO_SIGN == 0 and NAN_CODE == 1 and FOUR_OVER_SIX == 0:
            # the usual case, with the fewest instructions: NaN has become 7 by itself; signs join while codes still are at bit 22
            fields = fields_of(round_even(y, MAN, EMIN), MAN, EMIN, TOP_CODE) | ((bits_of(x) >> 6) & 0x02000000).to(tl.uint32, bitcast=True)
            even, odd = tl.split(tl.reshape(fields, [N, BLOCK // 2, 2]))
            packed = ((even + (odd << 4)) >> 22).to(tl.uint8)
        else:
            code = _codes(x, y, PACK, MAN, EMIN, TOP, TOP_CODE, TIE, ZERO_SIGN, NAN_CODE)
            if FOUR_OVER_SIX != 0:
                byte4, factor4, d4 = _e4m3_scale(
                    v * 1.5, amax, bad, g, gs, table_ptr, SCALE, ENCODE_ORDER, ZERO_BYTE, UNDERFLOW_BYTE, UNDERFLOW, FLOORS, APPROX
                )
                code4 = _codes(x, _scaled(x, factor4, DIVIDE), PACK, MAN, EMIN, TOP, TOP_CODE, TIE, ZERO_SIGN, NAN_CODE)
                four = _error(code4, d4, g, x, FOUR_OVER_SIX, BLOCK) < _error(code, d, g, x, FOUR_OVER_SIX, BLOCK)
                byte = tl.where(four, byte4, byte)
                code = tl.where(four[:, None], code4, code)
            packed = pack_nibbles(code) if PACK else code.to(tl.uint8)
        WIDTH: tl.constexpr = BLOCK // 2 if PACK else BLOCK
        place = (b * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
        tl.store(codes_ptr + place, packed, mask=live[:, None])

    if len(DIGITS) == 0:
        at = b
    elif WIDE:
        at = layout_offset(row, col, RO, CO, DIGITS) + mat * bytes_mat
    else:  # unsigned: divisions by powers of two are single shifts
        at = layout_offset(row, col, RO.to(tl.uint32), CO.to(tl.uint32), DIGITS)
        at = at if ONE else at + mat * bytes_mat.to(tl.uint32)
    tl.store(scale_ptr + at, byte.to(tl.uint8), mask=live)


@triton.jit(do_not_specialize=["groups", "groups_mat"])
def _dequantize_kernel(
    codes_ptr, scale_ptr, g_ptr, out_ptr, groups, groups_mat,
    N: tl.constexpr, GROUP: tl.constexpr, PER_BLOCK: tl.constexpr, PACK: tl.constexpr, SCALE: tl.constexpr,
    TENSOR_SCALE: tl.constexpr, EXPERTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A group is 16 bytes of output (a thread's store); PER_BLOCK groups share a scale byte."""
    first = tl.program_id(0).to(tl.int64) * N if WIDE else tl.program_id(0) * N
    r = first + tl.arange(0, N)
    live = r < groups
    byte = tl.load(scale_ptr + r // PER_BLOCK, mask=live, other=0)
    if SCALE == 0:
        s = decode_e4m3(byte)
    elif SCALE == 1:
        s = decode_ue5m3(byte)
    else:
        s = decode_ue8m0(byte)
    if TENSOR_SCALE:
        if EXPERTS:
            s = s * tl.load(g_ptr + r // groups_mat, mask=live, other=1.0)
        else:
            s = s * tl.load(g_ptr + tl.zeros([1], tl.int32))
    if PACK:
        h = tl.arange(0, GROUP // 2)
        packed = tl.load(codes_ptr + (r * (GROUP // 2))[:, None] + h[None, :], mask=live[:, None], other=0).to(tl.int32)
        value = tl.reshape(tl.join(decode_e2m1(packed), decode_e2m1(packed >> 4)), [N, GROUP])
    else:
        h = tl.arange(0, GROUP)
        value = decode_e4m3(tl.load(codes_ptr + (r * GROUP)[:, None] + h[None, :], mask=live[:, None], other=0))
    e = tl.arange(0, GROUP)
    out = value * s[:, None]
    if out_ptr.dtype.element_ty == tl.int16:  # bf16 where the cast cannot be trusted, see dequantize_blocks
        cast = _bf16_bits(out).to(tl.int16)
    else:
        cast = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (r * GROUP)[:, None] + e[None, :], cast, mask=live[:, None])


def interpreted() -> bool:
    """Whether these kernels were decorated for Triton's interpreter."""
    return not hasattr(_quantize_kernel, "warmup") or type(_quantize_kernel).__name__ == "InterpretedFunction"


def _same_device(where: str, to: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Refuse operands that the kernel could not read. A CPU pointer in a launch is an opaque error of Triton, or a fault."""
    for name, t in others.items():
        if t is not None and t.device != to.device:
            raise FormatMismatch(f"{where}: {name} is on {t.device}, the data on {to.device}; move it there")


def strides(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """x [..., k] as [matrices, rows, k] with (s_mat, s_row, s_k); copied only when its leading dimensions do not collapse to two."""
    if x.ndim <= 2:
        rows = x.reshape(1, -1, x.shape[-1])
    elif x.ndim == 3:
        rows = x
    else:
        try:
            rows = x.view(x.shape[0], -1, x.shape[-1])
        except RuntimeError:
            rows = x.contiguous().view(x.shape[0], -1, x.shape[-1])
    return rows, rows.stride(0), rows.stride(1), rows.stride(2)


def quantize_blocks(
    x: torch.Tensor,
    fmt: Format,
    recipe: Recipe,
    global_scale: torch.Tensor | None = None,
    encode_scale: torch.Tensor | None = None,
    scale_layout: Layout | None = None,
    tile: int | None = None,
    num_warps: int = 4,
    activation: Activation | None = None,
    up: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``quantize.quantize_blocks``, by Triton; with ``activation`` of ``activation(x, up)``, rounded to x's dtype, in the same pass.

    Shapes::

        x:            f32, bf16 or f16 [..., k], any strides, on a GPU (or a CPU in the interpreter)
        up:           as x, with the same strides, for a gated activation (x is the gate)
        global_scale: f32 [] or [x.shape[0]], or None = 1; encode_scale likewise, None = 1 / global_scale
        -> codes u8 [..., k / codes_per_byte]; scale u8 [..., k / block], or, with ``scale_layout``, u8 [..., nbytes of one expert]
           in its storage order, padding filled with its fill byte

    With ``recipe.nan`` or ``inf`` = "error" the check reads x on the host side once (a synchronisation). Layouts with a word table or
    nibble units raise LayoutError: their scales go through ``Layout.apply``.
    """
    _same_device("quantize", x, global_scale=global_scale, encode_scale=encode_scale, up=up)
    rows, s_mat, s_row, s_k = strides(x)
    mats, rows_mat, k = rows.shape
    blocks_row = k // fmt.block
    blocks = mats * rows_mat * blocks_row
    if "error" in (recipe.nan, recipe.inf):
        _refuse(x, recipe)
    codes = torch.empty(*x.shape[:-1], k // fmt.codes_per_byte, dtype=torch.uint8, device=x.device)
    digits, free, bytes_mat, scale = _scale_storage(x, fmt, scale_layout, mats, rows_mat, blocks_row)
    if not blocks:
        return codes, scale
    one = torch.ones(1, dtype=torch.float32, device=x.device)
    g = one if global_scale is None else global_scale.to(torch.float32).reshape(-1)
    gs = torch.reciprocal(g) if encode_scale is None else encode_scale.to(torch.float32).reshape(-1)
    approx = recipe.reciprocal != "exact"
    flat = s_k == 1 and s_row == k and (mats == 1 or s_mat == rows_mat * k)
    reach = max(codes.numel() * fmt.codes_per_byte, scale.numel(), (mats - 1) * s_mat + (rows_mat - 1) * s_row + (k - 1) * s_k)
    act, params = (-1, (0.0, 0.0, 0.0)) if activation is None else constants(activation)
    other = rows if up is None else strides(up)[0]
    chosen = _constants(fmt, recipe, x.dtype)
    wide = reach >= WIDE_FROM - (tile or TILE_INTERPRETED)
    pairs = act < 0 and chosen["PAIRS"] and s_k == 1 and (s_row | s_mat) % 2 == 0 and rows.data_ptr() % 4 == 0
    if tile is None and pairs and not interpreted():
        size = 32 * num_warps * fmt.block
    else:
        size = tile or (TILE_INTERPRETED if interpreted() else TILE)
    n = min(size // fmt.block, triton.next_power_of_2(blocks))
    view = torch.int32 if pairs else torch.int16 if interpreted() and rows.dtype == torch.bfloat16 else rows.dtype
    _quantize_kernel[(triton.cdiv(blocks, n),)](
        rows.view(view), rows.view(view) if up is None else other.view(view),
        codes.view(torch.int32) if pairs else codes, scale, g, gs, rcp_approx_table(x.device) if approx else one, *params,
        blocks, blocks_row, rows_mat, *divider(blocks_row), *divider(rows_mat), s_mat, s_row, s_k, *free, bytes_mat,
        CONVERT=HARDWARE_E4M3 and pairs and fmt.codes_per_byte == 1 and _has_e4m3(x.device), ONE=mats == 1,
        N=n, FLAT=flat, WIDE=wide, EXPERTS=g.numel() > 1, DIGITS=digits, num_warps=num_warps,
        ACT=act, ACT_ROUND=_ROUND[x.dtype], **(chosen | {"PAIRS": pairs}),
    )  # fmt: skip
    return codes, scale


#: e4m3 codes by the conversion instruction of SM89 and later: 17.6 -> 6.8 instructions an element of MXFP8. Off: it has been compiled, but
#: its bytes have not been compared on a device, and the golden rule is integer arithmetic, which the interpreter proves.
HARDWARE_E4M3 = False


@lru_cache(maxsize=4096)
def divider(d: int) -> tuple[int, int]:
    """(multiplier as i32, shift) so that n // d = n * multiplier >> (31 + shift) for 0 <= n < 2^31 (Granlund and Montgomery 1994)."""
    shift = (d - 1).bit_length()
    return (1 << (31 + shift)) // d + 1 - (1 << 32), shift


@lru_cache(maxsize=64)
def _has_e4m3(device: torch.device) -> bool:
    """Whether the device converts float32 to e4m3 by an instruction: SM89 and later."""
    return not interpreted() and int(triton.runtime.driver.active.get_current_target().arch) >= 89


@lru_cache(maxsize=256)
def _constants(fmt: Format, recipe: Recipe, dtype: torch.dtype) -> dict[str, Any]:
    """The format and the recipe as the kernel's compile-time constants."""
    elem = fmt.elem
    choices = {name.upper(): recipe.code(name) for name in ("tie", "zero_sign", "nan_code", "nan", "inf", "underflow")}
    # recipes whose elements are rounded pairwise: bf16, ties to even, one scale, a product
    pairs = dtype == torch.bfloat16 and (recipe.tie, recipe.four_over_six) == ("even", "off") and not recipe.encode_order.startswith("x/")
    pairs = pairs and recipe.zero_sign in (("keep", "of_value") if elem.bits == 4 else ("keep",))
    choices["PAIRS"] = pairs and (elem.bits == 4 or (recipe.nan_code, recipe.flush) == ("signed_max", False))
    return choices | {
        "BLOCK": fmt.block,
        "PACK": fmt.codes_per_byte == 2,
        "MAN": elem.man_bits,
        "EMIN": 1 - elem.bias,
        "TOP": elem.max,
        "TOP_CODE": 7 if elem.bits == 4 else 0x7E,
        "EMAX": 2 if elem.bits == 4 else 8,
        "SCALE": _SCALE[fmt.scale.name],
        "RULE": recipe.code("scale_rule"),
        "UE8M0_FLOOR": recipe.ue8m0_floor,
        "UE8M0_ZERO": recipe.ue8m0_zero,
        "SCALE_ORDER": recipe.code("scale_order"),
        "ENCODE_ORDER": recipe.code("encode_order"),
        "TARGET": recipe.elem_max,
        "RCP_TARGET": float(reciprocal(torch.tensor(recipe.elem_max), recipe)),
        "SCALE_FLOOR": recipe.scale_floor,
        "ZERO_BYTE": recipe.zero_byte,
        "UNDERFLOW_BYTE": recipe.underflow_byte,
        "APPROX": recipe.reciprocal != "exact",
        "AMAX_FLOOR": recipe.amax_floor,
        "FLUSH": recipe.flush,
        "FOUR_OVER_SIX": recipe.code("four_over_six") if fmt.elem.bits == 4 and fmt.scale.name != "ue8m0" else 0,
        "ROUND": _ROUND[dtype] if recipe.scale_dtype == "input" else 0,
    }


def _scale_storage(
    x: torch.Tensor, fmt: Format, layout: Layout | None, mats: int, rows_mat: int, blocks_row: int
) -> tuple[tuple[Any, ...], tuple[int, int], int, torch.Tensor]:
    """(digits, free extents, bytes a matrix, buffer) of the scales; plain order has no digits."""
    if layout is None:
        return (), (1, 1), 0, torch.empty(*x.shape[:-1], blocks_row, dtype=torch.uint8, device=x.device)
    from fp4.errors import LayoutError

    if getattr(layout, "word", None) is not None or getattr(layout, "unit", "") != "byte":
        raise LayoutError(f"quantize: layout {layout} permutes bits or nibbles; need a byte layout; quantise plain, then fp4.to_layout")
    shape = (rows_mat, blocks_row)
    bytes_mat = layout.nbytes(shape)
    make = torch.empty if layout.padded(shape) == shape else lambda *a, **kw: torch.full(a, layout.fill, **kw)
    lead = x.shape[:1] if x.ndim >= 3 else ()
    buffer = make(*lead, bytes_mat, dtype=torch.uint8, device=x.device)
    return tuple(layout.digits), layout.extents(shape), bytes_mat, buffer


def _refuse(x: torch.Tensor, recipe: Recipe) -> None:
    from fp4.ref.quantize import refuse_nonfinite

    refuse_nonfinite(x, recipe)


def dequantize_blocks(
    codes: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    fmt: Format,
    dtype: torch.dtype = torch.float32,
    tile: int | None = None,
    num_warps: int = 4,
) -> torch.Tensor:
    """As ``quantize.dequantize_blocks``, by Triton: ``elem[code] * (scale * global_scale)``, rounded once to ``dtype``."""
    _same_device("dequantize", codes, scale=scale, global_scale=global_scale)
    codes, scale = codes.contiguous(), scale.contiguous()
    out = torch.empty(*codes.shape[:-1], codes.shape[-1] * fmt.codes_per_byte, dtype=dtype, device=codes.device)
    if not out.numel():
        return out
    group = 16 // dtype.itemsize
    groups = out.numel() // group
    size = tile or (TILE_INTERPRETED if interpreted() else TILE)
    n = min(size // group, triton.next_power_of_2(groups))
    g = scale if global_scale is None else global_scale.to(torch.float32).reshape(-1)
    _dequantize_kernel[(triton.cdiv(groups, n),)](
        # cvt.rn.bf16.f32 is IEEE on SM80 and later; the interpreter's cast is not, there the kernel rounds by integers
        codes, scale, g, out.view(torch.int16) if interpreted() and dtype == torch.bfloat16 else out, groups, groups // max(1, g.numel()),
        N=n, GROUP=group, PER_BLOCK=fmt.block // group, PACK=fmt.codes_per_byte == 2, SCALE=_SCALE[fmt.scale.name],
        TENSOR_SCALE=global_scale is not None, EXPERTS=global_scale is not None and g.numel() > 1, WIDE=out.numel() >= WIDE_FROM - size,
        num_warps=num_warps,
    )  # fmt: skip
    return out
