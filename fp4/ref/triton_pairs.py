"""Elements of bf16 in pairs, as 32-bit words: block amax, e2m1 and e4m3 codes with few instructions. Used by ``triton_quantize``.

Integer and half-word operations issue every other clock, float32 additions every clock: so rounding is done by float additions, the
signs of a pair are moved together, and codes are packed by multiply-add. Words are i32 [n, 4], a thread holding a whole row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp4.ref.triton_codes import bits_of, fields_of, from_bits, round_even

__all__ = ["join4", "magnitudes", "pack8_e2m1", "pack8_e4m3", "top_of_pairs"]


@triton.jit
def split4(w):
    """[n, 4] -> its four columns."""
    even, odd = tl.split(tl.reshape(w, [w.shape[0], 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def magnitudes(w, FLUSH: tl.constexpr = False):
    """Pairs of bf16, i32 -> bits of |even| and |odd| element as f32; with FLUSH subnormals are zero."""
    even, odd = (w << 16) & 0x7FFF0000, w & 0x7FFF0000
    if FLUSH:
        even, odd = tl.where(even < 0x00800000, 0, even), tl.where(odd < 0x00800000, 0, odd)
    return even, odd


@triton.jit
def top_of_pairs(w, NAN: tl.constexpr, FLUSH: tl.constexpr):
    """Pairs of bf16, i32 [n, 4] -> the largest bits of a magnitude, i32 [n]; -1 if NaN is ignored and there is nothing else."""
    even, odd = magnitudes(w, FLUSH)
    if NAN == 1:
        even = tl.where(even > 0x7F800000, -1, even)
        odd = tl.where(odd > 0x7F800000, -1, odd)
    a, b, c, d = split4(tl.maximum(even, odd))
    return tl.maximum(tl.maximum(a, b), tl.maximum(c, d))


@triton.jit
def _at_most(y, TOP: tl.constexpr):
    """f32 of sign plus, or NaN of any sign -> at most TOP, NaN too. No compiler may fuse a product before it with a sum after it."""
    return tl.minimum(y.to(tl.uint32, bitcast=True), bits_of(tl.full([], TOP, tl.float32)).to(tl.uint32)).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1_up(y):
    """f32 from 0 to 6 -> its e2m1 code, ties to even, in the low 3 bits of 0x4B400000, i32.

    The code is the concave function min(2 y, y + 2, y / 2 + 4) rounded to an integer: each line by one addition, exact until it rounds.
    """
    low = bits_of(y * 2.0 + 12582912.0)  # 1.5 * 2^23: its neighbours are integers
    middle = bits_of(y + 12582914.0)
    high = bits_of(y * 0.5 + 12582916.0)
    return tl.minimum(tl.minimum(low, middle), high)


@triton.jit
def _e2m1(m, factor, ZERO_SIGN: tl.constexpr, NAN_CODE: tl.constexpr):
    """Bits of f32 magnitudes by the factor of each row -> (``_e2m1_up``, mask of a sign bit at bit 3 or -1 = keep it)."""
    y = from_bits(m) * factor[:, None]
    sign = tl.full([], -1, tl.int32)
    if ZERO_SIGN == 1:
        sign = tl.where((y != 0) if NAN_CODE == 1 else (y > 0), 8, 0)
    elif NAN_CODE != 1:
        sign = tl.where(y == y, 8, 0)
    if NAN_CODE == 2:
        y = tl.where(y == y, y, 0.0)
    return _e2m1_up(_at_most(y, 6.0)), sign


@triton.jit
def pack8_e2m1(w, factor, ZERO_SIGN: tl.constexpr, NAN_CODE: tl.constexpr, FLUSH: tl.constexpr):
    """Pairs of bf16, i32 [n, 4], by the factor of each row -> 8 codes, i32 [n]. ZERO_SIGN keep or of_value, any NAN_CODE."""
    even, odd = magnitudes(w, FLUSH)
    c_even, s_even = _e2m1(even, factor, ZERO_SIGN, NAN_CODE)
    c_odd, s_odd = _e2m1(odd, factor, ZERO_SIGN, NAN_CODE)
    signs = (w >> 12) & 0x00080008
    if (ZERO_SIGN != 0) or (NAN_CODE != 1):
        signs = signs & (s_even | (s_odd << 16))
    # codes at bits 0 and 16; the bits of 0x4B40 stay clear of them
    a, b, c, d = split4((c_even + c_odd * 65536) | signs)
    ab, cd = a + b * 256, c + d * 256
    evens = (ab & 0xFFFF) | (cd << 16)
    odds = ((ab >> 16) & 0xFFFF) | (cd & -65536)
    return evens + odds * 16 + 0x4BF74C00  # -16 * 0x8B408B40: what 0x4B40 left in the high halves


@triton.jit
def _e4m3_field(m, factor):
    """Bits of f32 magnitudes by the factor of each row -> e4m3 code at bit 20, i32; 0x7F for NaN."""
    y = from_bits(m) * factor[:, None]
    code = fields_of(round_even(y, 3, -6), 3, -6, 0x7E).to(tl.int32)
    return tl.where(y != y, 0x07F00000, code)


@triton.jit
def pack8_e4m3(w, factor, CONVERT: tl.constexpr):
    """As ``pack8_e2m1``: two words i32 [n] of four e4m3 codes each. CONVERT: by the instruction of SM89 and later."""
    if CONVERT:
        even, odd = magnitudes(w)
        e0, e1, e2, e3 = split4(from_bits(even) * factor[:, None])
        o0, o1, o2, o3 = split4(from_bits(odd) * factor[:, None])
        w0, w1, w2, w3 = split4(w)
        ASM: tl.constexpr = """{
            .reg .b16 l, h;
            .reg .b32 p, s;
            cvt.rn.satfinite.e4m3x2.f32 l, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 h, $4, $3;
            mov.b32 p, {l, h};
            prmt.b32 s, $5, $6, 0x7531;
            lop3.b32 $0, s, 0x80808080, p, 0xEA;
        }"""
        first = tl.inline_asm_elementwise(ASM, "=r,f,f,f,f,r,r", [e0, o0, e1, o1, w0, w1], dtype=tl.int32, is_pure=True, pack=1)
        second = tl.inline_asm_elementwise(ASM, "=r,f,f,f,f,r,r", [e2, o2, e3, o3, w2, w3], dtype=tl.int32, is_pure=True, pack=1)
    else:
        even, odd = magnitudes(w)
        codes = (_e4m3_field(even, factor) >> 20) | (_e4m3_field(odd, factor) >> 12) | ((w >> 8) & 0x80) | ((w >> 16) & 0x8000)
        a, b, c, d = split4(codes)
        first, second = a | (b << 16), c | (d << 16)
    return first, second


@triton.jit
def join4(a, b, c, d):
    """Four [n] -> [n, 4]."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [a.shape[0], 4])
