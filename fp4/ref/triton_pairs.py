"""Elements of bf16 or f16 in pairs, as 32-bit words: block amax, e2m1 and e4m3 codes with few instructions. Used by ``triton_quantize``.

Integer and half-word operations issue every other clock, float32 additions every clock: so rounding is done by float additions, the
signs of eight elements are moved together, and codes are packed by multiply-add. Words are i32 [n, 4], a thread holding a whole row.

NATIVE: 0 integers and float32 only, which Triton's interpreter runs too; 1 with instructions of SM80 (operations on both halves of a
word); 2 with SM89's conversion to e4m3. All three give the same bytes (``python benchmarks/quantize.py gpu`` compares them).
F16: the elements are f16, whose subnormals no recipe flushes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp4.ref.triton_activation import activate
from fp4.ref.triton_codes import bits_of, fields_of, from_bits, round_even

__all__ = ["join4", "load_pairs", "magnitudes", "pack8_e2m1", "pack8_e4m3", "top_of", "top_of_pairs"]


@triton.jit
def split4(w):
    """[n, 4] -> its four columns."""
    even, odd = tl.split(tl.reshape(w, [w.shape[0], 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def join4(a, b, c, d):
    """Four [n] -> [n, 4]."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [a.shape[0], 4])


@triton.jit
def _asm1(ASM: tl.constexpr, a):
    return tl.inline_asm_elementwise(ASM, "=r,r", [a], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _asm2(ASM: tl.constexpr, a, b):
    return tl.inline_asm_elementwise(ASM, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _asm4(ASM: tl.constexpr, a, b, c, d):
    return tl.inline_asm_elementwise(ASM, "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _halves(w, F16: tl.constexpr):
    """Pairs, i32 -> (even, odd) as f32, exact."""
    if F16:
        even = w.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        odd = (w >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        even, odd = from_bits(w << 16), from_bits(w & -65536)
    return even, odd


@triton.jit
def _pair(even, odd, F16: tl.constexpr, NATIVE: tl.constexpr):
    """f32, f32 -> the nearest bf16 or f16, ties to even, as a word."""
    if NATIVE > 0:
        ASM: tl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;" if F16 else "cvt.rn.bf16x2.f32 $0, $2, $1;"
        w = tl.inline_asm_elementwise(ASM, "=r,f,f", [even, odd], dtype=tl.int32, is_pure=True, pack=1)
    elif F16:
        e = even.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        w = (e & 0xFFFF) | (odd.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        e, o = bits_of(even), bits_of(odd)
        e = tl.where(even != even, 0x7FC00000, e + 0x7FFF + ((e >> 16) & 1))
        o = tl.where(odd != odd, 0x7FC00000, o + 0x7FFF + ((o >> 16) & 1))
        w = ((e >> 16) & 0xFFFF) | (o & -65536)
    return w


@triton.jit
def load_pairs(x, up, p0, p1, p2, ACT: tl.constexpr, BOTH: tl.constexpr, F16: tl.constexpr, NATIVE: tl.constexpr):
    """Four words of a thread's block: pointers i32 [n, 4] -> pairs i32 [n, 4], after the activation if there is one.

    BOTH: a word of x is (gate, up) of one element, and ``up`` points to the four words behind. Otherwise x are gates, up the other half.
    """
    w = tl.load(x)
    if ACT >= 0:
        if BOTH:
            v = tl.load(up)
            gate, other = _halves(w, F16)
            a, b, c, d = split4(activate(gate, other, p0, p1, p2, ACT, NATIVE > 0))
            gate, other = _halves(v, F16)
            e, f, g, h = split4(activate(gate, other, p0, p1, p2, ACT, NATIVE > 0))
            w = join4(_pair(a, b, F16, NATIVE), _pair(c, d, F16, NATIVE), _pair(e, f, F16, NATIVE), _pair(g, h, F16, NATIVE))
        else:
            even, odd = _halves(w, F16)
            up_even, up_odd = _halves(tl.load(up) if ACT > 0 else w, F16)
            even = activate(even, up_even, p0, p1, p2, ACT, NATIVE > 0)
            w = _pair(even, activate(odd, up_odd, p0, p1, p2, ACT, NATIVE > 0), F16, NATIVE)
    return w


@triton.jit
def magnitudes(w, FLUSH: tl.constexpr = False, F16: tl.constexpr = False):
    """Pairs, i32 -> bits of |even| and |odd| element as f32; with FLUSH subnormals are zero."""
    if F16:
        even, odd = _halves(w & 0x7FFF7FFF, True)
        even, odd = bits_of(even), bits_of(odd)
    else:
        even, odd = (w << 16) & 0x7FFF0000, w & 0x7FFF0000
        if FLUSH:
            even, odd = tl.where(even < 0x00800000, 0, even), tl.where(odd < 0x00800000, 0, odd)
    return even, odd


@triton.jit
def _max_pairs(a, b, NAN: tl.constexpr, F16: tl.constexpr):
    if F16:
        top = _asm2("max.f16x2 $0, $1, $2;" if NAN == 1 else "max.NaN.f16x2 $0, $1, $2;", a, b)
    else:
        top = _asm2("max.bf16x2 $0, $1, $2;" if NAN == 1 else "max.NaN.bf16x2 $0, $1, $2;", a, b)
    return top


@triton.jit
def top_of_pairs(w, NAN: tl.constexpr, FLUSH: tl.constexpr, F16: tl.constexpr, NATIVE: tl.constexpr):
    """Pairs, i32 [n, 4] -> what ``larger`` compares and ``top_of`` ends: the largest magnitude, i32 [n]."""
    if NATIVE > 0 and not FLUSH:
        a, b, c, d = split4(_asm1("abs.f16x2 $0, $1;" if F16 else "abs.bf16x2 $0, $1;", w))
        top = _max_pairs(_max_pairs(a, b, NAN, F16), _max_pairs(c, d, NAN, F16), NAN, F16)
    else:
        even, odd = magnitudes(w, FLUSH, F16)
        if NAN == 1:
            even = tl.where(even > 0x7F800000, -1, even)
            odd = tl.where(odd > 0x7F800000, -1, odd)
        a, b, c, d = split4(tl.maximum(even, odd))
        top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    return top


@triton.jit
def larger(a, b, NAN: tl.constexpr, FLUSH: tl.constexpr, F16: tl.constexpr, NATIVE: tl.constexpr):
    """Of two results of ``top_of_pairs``."""
    if NATIVE > 0 and not FLUSH:
        top = _max_pairs(a, b, NAN, F16)
    else:
        top = tl.maximum(a, b)
    return top


@triton.jit
def top_of(top, NAN: tl.constexpr, FLUSH: tl.constexpr, F16: tl.constexpr, NATIVE: tl.constexpr):
    """-> bits of the largest magnitude as f32, i32 [n]; NaN or -1 if NaN is ignored and there is nothing else."""
    if NATIVE > 0 and not FLUSH:
        top = _max_pairs(top, _asm1("prmt.b32 $0, $1, $1, 0x1032;", top), NAN, F16)
        if F16:
            top, _ = magnitudes(top, False, True)
        else:
            top = top & 0x7FFF0000
    return top


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


@triton.jit
def pack8_e2m1(
    w, factor, POWER: tl.constexpr, ZERO_SIGN: tl.constexpr, NAN_CODE: tl.constexpr, FLUSH: tl.constexpr, F16: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Pairs, i32 [n, 4], by the factor of each row -> 8 codes, i32 [n]. ZERO_SIGN keep or of_value, any NAN_CODE.

    POWER: the factor is a power of two, zero or NaN.
    """
    if NATIVE > 0 and POWER and ZERO_SIGN == 0 and NAN_CODE == 1 and not FLUSH and not F16:
        f = _asm1("prmt.b32 $0, $1, $1, 0x3232;", bits_of(factor))
        a, b, c, d = split4(_asm2(_HALVES, w, tl.broadcast_to(f[:, None], w.shape)))
        ab, cd = a + b * 256, c + d * 256  # bytes: even, even, odd, odd
        codes = _asm2("prmt.b32 $0, $1, $2, 0x5410;", ab, cd) + _asm2("prmt.b32 $0, $1, $2, 0x7632;", ab, cd) * 16
        codes += 1149715600  # -(0x83408340 + 16 * 0x83838383): what 0x43404340 left in the bytes
    else:
        if FLUSH:
            even, odd = magnitudes(w, FLUSH, F16)
            even, odd = from_bits(even), from_bits(odd)
        else:
            even, odd = _halves(w, F16)
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
