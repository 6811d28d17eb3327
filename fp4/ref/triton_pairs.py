"""Elements of bf16 or f16 in pairs, as 32-bit words: activation and block amax with few instructions. Used by ``triton_quantize``; the
codes of pairs are in ``triton_pair_codes``. Words are i32 [n, 4], a thread holding a whole row.

NATIVE: 0 integers and float32 only, which Triton's interpreter runs too; 1 with instructions of SM80 (operations on both halves of a
word); 2 with SM89's conversion to e4m3. All three give the same bytes (``python benchmarks/quantize.py gpu`` compares them).
F16: the elements are f16, whose subnormals no recipe flushes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp4.ref.triton_activation import activate
from fp4.ref.triton_codes import bits_of, from_bits

__all__ = ["asm1", "asm2", "halves", "join4", "larger", "load_pairs", "magnitudes", "split4", "top_of", "top_of_pairs"]


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
def asm1(ASM: tl.constexpr, a):
    return tl.inline_asm_elementwise(ASM, "=r,r", [a], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def asm2(ASM: tl.constexpr, a, b):
    return tl.inline_asm_elementwise(ASM, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def halves(w, F16: tl.constexpr):
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
def _limits(p2, F16: tl.constexpr):
    """The limit in both halves of a word, i32."""
    if F16:
        half = p2.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    else:
        half = bits_of(p2) >> 16
    return half * 65537


@triton.jit
def _at_most_pairs(w, limit, F16: tl.constexpr):
    """Both halves at most the limit (``_limits``), NaN kept."""
    ASM: tl.constexpr = "min.NaN.f16x2 $0, $1, $2;" if F16 else "min.NaN.bf16x2 $0, $1, $2;"
    return asm2(ASM, w, limit)


@triton.jit
def _within_pairs(w, limit, F16: tl.constexpr, NATIVE: tl.constexpr):
    """Both halves' magnitudes at most the limit, NaN kept. SM86 has it in one instruction."""
    if NATIVE > 1:
        ASM: tl.constexpr = "min.NaN.xorsign.abs.f16x2 $0, $1, $2;" if F16 else "min.NaN.xorsign.abs.bf16x2 $0, $1, $2;"
        w = asm2(ASM, w, limit)
    else:
        BELOW: tl.constexpr = "max.NaN.f16x2 $0, $1, $2;" if F16 else "max.NaN.bf16x2 $0, $1, $2;"
        w = asm2(BELOW, _at_most_pairs(w, limit, F16), limit ^ -2147450880)
    return w


@triton.jit
def load_pairs(x, up, p0, p1, p2, ACT: tl.constexpr, BOTH: tl.constexpr, F16: tl.constexpr, NATIVE: tl.constexpr, LIMIT: tl.constexpr):
    """Four words of a thread's block: pointers i32 [n, 4] -> pairs i32 [n, 4], after the activation if there is one.

    BOTH: a word of x is (gate, up) of one element, and ``up`` points to the four words behind. Otherwise x are gates, up the other half.
    LIMIT: SwiGLU's limit is a number of the elements' type: clamping two halves at once gives what clamping after widening does.
    """
    w = tl.load(x)
    if ACT >= 0:
        PACKED: tl.constexpr = LIMIT and ACT == 1 and NATIVE > 0
        if PACKED:
            limit = _limits(p2, F16)
        if BOTH:
            v = tl.load(up)
            if PACKED:
                w, v = _at_most_pairs(w, limit, F16), _at_most_pairs(v, limit, F16)
            CLAMPED: tl.constexpr = 1 if PACKED else 0
            gate, other = halves(w, F16)
            a, b, c, d = split4(activate(gate, other, p0, p1, p2, ACT, NATIVE, CLAMPED))
            gate, other = halves(v, F16)
            e, f, g, h = split4(activate(gate, other, p0, p1, p2, ACT, NATIVE, CLAMPED))
            w = join4(_pair(a, b, F16, NATIVE), _pair(c, d, F16, NATIVE), _pair(e, f, F16, NATIVE), _pair(g, h, F16, NATIVE))
        else:
            v = tl.load(up) if ACT > 0 else w
            if PACKED:
                w, v = _at_most_pairs(w, limit, F16), _within_pairs(v, limit, F16, NATIVE)
            WITHIN: tl.constexpr = 2 if PACKED else 0
            even, odd = halves(w, F16)
            up_even, up_odd = halves(v, F16)
            even = activate(even, up_even, p0, p1, p2, ACT, NATIVE, WITHIN)
            w = _pair(even, activate(odd, up_odd, p0, p1, p2, ACT, NATIVE, WITHIN), F16, NATIVE)
    return w


@triton.jit
def magnitudes(w, FLUSH: tl.constexpr = False, F16: tl.constexpr = False):
    """Pairs, i32 -> bits of |even| and |odd| element as f32; with FLUSH subnormals are zero."""
    if F16:
        even, odd = halves(w & 0x7FFF7FFF, True)
        even, odd = bits_of(even), bits_of(odd)
    else:
        even, odd = (w << 16) & 0x7FFF0000, w & 0x7FFF0000
        if FLUSH:
            even, odd = tl.where(even < 0x00800000, 0, even), tl.where(odd < 0x00800000, 0, odd)
    return even, odd


@triton.jit
def _max_pairs(a, b, NAN: tl.constexpr, F16: tl.constexpr, NATIVE: tl.constexpr):
    """The larger magnitude of each half; before SM86 of halves without a sign. Signs of the result mean nothing."""
    KEEP: tl.constexpr = "" if NAN == 1 else ".NaN"
    ABS: tl.constexpr = ".xorsign.abs" if NATIVE > 1 else ""
    TYPE: tl.constexpr = ".f16x2" if F16 else ".bf16x2"
    ASM: tl.constexpr = "max" + KEEP + ABS + TYPE + " $0, $1, $2;"
    return asm2(ASM, a, b)


@triton.jit
def top_of_pairs(w, NAN: tl.constexpr, FLUSH: tl.constexpr, F16: tl.constexpr, NATIVE: tl.constexpr):
    """Pairs, i32 [n, 4] -> what ``larger`` compares and ``top_of`` ends: the largest magnitude, i32 [n]."""
    if NATIVE > 0 and not FLUSH:
        if NATIVE == 1:
            w = asm1("abs.f16x2 $0, $1;" if F16 else "abs.bf16x2 $0, $1;", w)
        a, b, c, d = split4(w)
        top = _max_pairs(_max_pairs(a, b, NAN, F16, NATIVE), _max_pairs(c, d, NAN, F16, NATIVE), NAN, F16, NATIVE)
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
        top = _max_pairs(a, b, NAN, F16, NATIVE)
    else:
        top = tl.maximum(a, b)
    return top


@triton.jit
def top_of(top, NAN: tl.constexpr, FLUSH: tl.constexpr, F16: tl.constexpr, NATIVE: tl.constexpr):
    """-> bits of the largest magnitude as f32, i32 [n]; NaN or -1 if NaN is ignored and there is nothing else."""
    if NATIVE > 0 and not FLUSH:
        top = _max_pairs(top, asm1("prmt.b32 $0, $1, $1, 0x1032;", top), NAN, F16, NATIVE)
        if F16:
            top, _ = magnitudes(top, False, True)
        else:
            top = top & 0x7FFF0000
    return top
