"""e2m1 and e4m3 codes of elements in pairs (``triton_pairs``), packed eight at a time, with few instructions.

Integer and half-word operations issue every other clock, float32 additions every clock: so rounding is done by float additions, the
signs of eight elements are moved together, and codes are packed by multiply-add. Words, NATIVE and F16 as in ``triton_pairs``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp4.ref.triton_codes import bits_of, fields_of, from_bits, round_even
from fp4.ref.triton_pairs import asm1, asm2, halves, magnitudes, split4

__all__ = ["pack8_e2m1", "pack8_e4m3", "pack16_e2m1"]


@triton.jit
def _asm4(ASM: tl.constexpr, a, b, c, d):
    return tl.inline_asm_elementwise(ASM, "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)


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
def _scaled(m, factor, NATIVE: tl.constexpr):
    """|m| by the factor of each row, f32; the instruction takes the magnitude for nothing."""
    f = tl.broadcast_to(factor[:, None], m.shape)
    if NATIVE > 0:
        ASM: tl.constexpr = "{ .reg .f32 m; abs.f32 m, $1; mul.rn.f32 $0, m, $2; }"
        y = tl.inline_asm_elementwise(ASM, "=f,f,f", [m, f], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = from_bits(bits_of(m) & 0x7FFFFFFF) * f
    return y


@triton.jit
def _e2m1(y, ZERO_SIGN: tl.constexpr, NAN_CODE: tl.constexpr):
    """Scaled magnitudes, f32 -> (``_e2m1_up``, mask of a sign in bit 0, -1 = keep it)."""
    sign = tl.full([], -1, tl.int32)
    if ZERO_SIGN == 1:
        sign = tl.where((y != 0) if NAN_CODE == 1 else (y > 0), 1, 0)
    elif NAN_CODE != 1:
        sign = tl.where(y == y, 1, 0)
    if NAN_CODE == 2:
        y = tl.where(y == y, y, 0.0)
    return _e2m1_up(_at_most(y, 6.0)), sign


@triton.jit
def _signs8(w, NATIVE: tl.constexpr):
    """Bits 15 and 31 of i32 [n, 4] -> bits 3 and 7 of the four bytes, i32 [n]."""
    if NATIVE > 0:
        a, b, c, d = split4(w)
        ASM: tl.constexpr = """{
            .reg .b32 p, q, e, o;
            prmt.b32 p, $1, $2, 0x7351;
            prmt.b32 q, $3, $4, 0x7351;
            prmt.b32 e, p, q, 0xDC98;
            prmt.b32 o, p, q, 0xFEBA;
            and.b32 o, o, 0x80808080;
            lop3.b32 $0, e, 0x08080808, o, 0xEA;
        }"""
        signs = _asm4(ASM, a, b, c, d)
    else:
        a, b, c, d = split4(((w >> 12) & 8) | ((w >> 24) & 128))
        signs = (a | (b << 8)) | ((c << 16) | (d << 24))
    return signs


#: e2m1 of both halves of a word by a power of two: the lines of ``_e2m1_up`` round to 8 bits at 1.5 * 2^7. The product is exact; below the
#: smallest bf16 it is not, but there every code is 0. Result: codes at bits 0 and 16 of 0x43404340
_HALVES: tl.constexpr = tl.constexpr("""{
    .reg .b32 y, l, m, zero, six, two, one, half, c0, c2, c4;
    mov.b32 zero, 0x80008000;
    mov.b32 six, 0x40C040C0;
    mov.b32 two, 0x40004000;
    mov.b32 one, 0x3F803F80;
    mov.b32 half, 0x3F003F00;
    mov.b32 c0, 0x43404340;
    mov.b32 c2, 0x43424342;
    mov.b32 c4, 0x43444344;
    abs.bf16x2 y, $1;
    fma.rn.bf16x2 y, y, $2, zero;
    min.bf16x2 y, y, six;
    fma.rn.bf16x2 l, y, two, c0;
    fma.rn.bf16x2 m, y, one, c2;
    fma.rn.bf16x2 y, y, half, c4;
    min.bf16x2 l, l, m;
    min.bf16x2 $0, l, y;
}""")


#: slope and height of the middle and the upper line, as f32 bits: (1 - 2^-22) / 2 and (2 + 3 2^-22) 2^-9; (1/4 + 2^-25) / 2 and 5.25 2^-9
_MIDDLE, _UPPER = "0f3EFFFFFC, 0f3B800003", "0f3E000001, 0f3C280000"


def _by_lines(even: str, odd: str) -> str:
    """e2m1 codes of 16 elements ($2 to $9: pairs; $10 the factor, $11 the block's amax) as two words $0 and $1, for SM89 and later.

    In units of 2^-9 the smallest e4m3 numbers are the integers 0 to 16, so that one conversion rounds two elements'
    min(2 y, y + 2, y / 4 + 5.25) to their codes and packs them. The sums round before that, to 24 bits; slopes differ from 1 and 1/4 by as
    little as it takes for a y next to 2.5, 3.5 and 5 to stay on its side (``test_e2m1_by_lines``). Slow where that does not hold: in blocks
    with a y of 8.5 or more (a scale that saturates), NaN or infinity, or so large that the factor in these units would be subnormal. There
    as in ``_e2m1_up``. ``even`` and ``odd`` widen an element of a pair.
    """
    lines = ["{ .reg .pred p; .reg .b16 r<4>; .reg .b32 f, m, h, y<4>;"]
    lines += ["mul.rn.f32 f, $11, $10; setp.lt.f32 p, f, 0f41080000; setp.lt.and.f32 p, $11, 0f77800000, p; @!p bra SLOW;"]
    lines += ["mul.rn.f32 f, $10, 0f3B800000;"]
    for i in range(2):
        for part, widen in enumerate((even, odd)):
            for j in range(4):
                lines += [widen.format(f"y{j}", f"${2 + 4 * i + j}"), f"abs.f32 y{j}, y{j}; mul.rn.f32 y{j}, y{j}, f;"]
                lines += [f"fma.rn.f32 m, y{j}, {_MIDDLE}; fma.rn.f32 h, y{j}, {_UPPER}; min.s32 m, y{j}, m; min.s32 y{j}, m, h;"]
            lines += ["cvt.rn.satfinite.e4m3x2.f32 r0, y1, y0; cvt.rn.satfinite.e4m3x2.f32 r1, y3, y2;"]
            lines += [f"mov.b32 ${i}, {{r0, r1}};" if part == 0 else f"mov.b32 m, {{r0, r1}}; mad.lo.s32 ${i}, m, 16, ${i};"]
    lines += ["bra DONE; SLOW:"]
    for i in range(2):
        lines += [f"mov.b32 ${i}, -1061158912;"]  # as in ``pack8_e2m1``
        for j in range(8):
            lines += [(odd if j % 2 else even).format("y0", f"${2 + 4 * i + j // 2}"), "abs.f32 y0, y0; mul.rn.f32 y0, y0, $10;"]
            lines += ["min.u32 y0, y0, 0x40C00000; fma.rn.f32 m, y0, 0f40000000, 0f4B400000; add.rn.f32 h, y0, 0f4B400002;"]
            lines += ["min.s32 m, m, h; fma.rn.f32 h, y0, 0f3F000000, 0f4B400004; min.s32 m, m, h;"]
            lines += [f"mad.lo.s32 ${i}, m, {16**j}, ${i};"]
    return "\n".join([*lines, "DONE: }"])


#: e2m1 by lines, of pairs of bf16 and of f16
_LINES: tl.constexpr = tl.constexpr(_by_lines("shl.b32 {0}, {1}, 16;", "and.b32 {0}, {1}, 0xFFFF0000;"))
_LINES_F16: tl.constexpr = tl.constexpr(
    _by_lines("mov.b32 {{r2, r3}}, {1}; cvt.f32.f16 {0}, r2;", "mov.b32 {{r2, r3}}, {1}; cvt.f32.f16 {0}, r3;")
)


@triton.jit
def pack16_e2m1(w0, w1, factor, amax, F16: tl.constexpr):
    """``pack8_e2m1`` of the two halves of a block of 16, or of half a block of 32, at once, for SM89 and later."""
    a, b, c, d = split4(w0)
    e, f, g, h = split4(w1)
    codes = tl.inline_asm_elementwise(
        _LINES_F16 if F16 else _LINES, "=&r,=&r,r,r,r,r,r,r,r,r,f,f", [a, b, c, d, e, f, g, h, factor, amax],
        dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return codes[0] | _signs8(w0, 1), codes[1] | _signs8(w1, 1)


@triton.jit
def pack8_e2m1(
    w, factor, POWER: tl.constexpr, ZERO_SIGN: tl.constexpr, NAN_CODE: tl.constexpr, FLUSH: tl.constexpr, F16: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Pairs, i32 [n, 4], by the factor of each row -> 8 codes, i32 [n]. ZERO_SIGN keep or of_value, any NAN_CODE.

    POWER: the factor is a power of two, zero or NaN.
    """
    if NATIVE > 0 and POWER and ZERO_SIGN == 0 and NAN_CODE == 1 and not FLUSH and not F16:
        f = asm1("prmt.b32 $0, $1, $1, 0x3232;", bits_of(factor))
        a, b, c, d = split4(asm2(_HALVES, w, tl.broadcast_to(f[:, None], w.shape)))
        ab, cd = a + b * 256, c + d * 256  # bytes: even, even, odd, odd
        codes = asm2("prmt.b32 $0, $1, $2, 0x5410;", ab, cd) + asm2("prmt.b32 $0, $1, $2, 0x7632;", ab, cd) * 16
        codes += 1149715600  # -(0x83408340 + 16 * 0x83838383): what 0x43404340 left in the bytes
    else:
        if FLUSH:
            even, odd = magnitudes(w, FLUSH, F16)
            even, odd = from_bits(even), from_bits(odd)
        else:
            even, odd = halves(w, F16)
        c_even, s_even = _e2m1(_scaled(even, factor, NATIVE), ZERO_SIGN, NAN_CODE)
        c_odd, s_odd = _e2m1(_scaled(odd, factor, NATIVE), ZERO_SIGN, NAN_CODE)
        if (ZERO_SIGN != 0) or (NAN_CODE != 1):
            w = w & ((s_even << 15) | (s_odd << 31))
        a, b, c, d = split4(c_even + c_odd * 16)
        codes = (a + b * 256) + (c + d * 256) * 65536
        codes += -1061158912  # -17 * 257 * 0x4B400000: what 1.5 * 2^23 left
    return codes | _signs8(w, NATIVE)


@triton.jit
def _e4m3_field(m, factor):
    """Bits of f32 magnitudes by the factor of each row -> e4m3 code at bit 20, i32; 0x7F for NaN."""
    y = from_bits(m) * factor[:, None]
    code = fields_of(round_even(y, 3, -6), 3, -6, 0x7E).to(tl.int32)
    return tl.where(y != y, 0x07F00000, code)


@triton.jit
def pack8_e4m3(w, factor, F16: tl.constexpr, NATIVE: tl.constexpr):
    """As ``pack8_e2m1``: two words i32 [n] of four e4m3 codes each."""
    if NATIVE > 1:
        even, odd = magnitudes(w, False, F16)
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
        even, odd = magnitudes(w, False, F16)
        codes = (_e4m3_field(even, factor) >> 20) | (_e4m3_field(odd, factor) >> 12) | ((w >> 8) & 0x80) | ((w >> 16) & 0x8000)
        a, b, c, d = split4(codes)
        first, second = a | (b << 16), c | (d << 16)
    return first, second
