"""W4A8 in plain Triton: MXFP4 weights become e4m3 exactly, x is quantised to e4m3 with one scale a token; SM89 and newer.

What the Hopper kernels and the one here share: which weights fit, the quantiser of x. The kernel is an ordinary ``tl.dot`` of e4m3
tiles, ``mma.m16n8k32`` on SM89.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp4.errors import Unsupported
from fp4.gpu.kernels.decode_fp8 import SPAN, T8, T8C, W8, W8C
from fp4.gpu.kernels.pdl import trigger


def row_base(scale: torch.Tensor) -> torch.Tensor:
    """Largest scale byte of each row, u8 [n]. scale: ue8m0 bytes [n, k / 32]. Raises Unsupported when a row spans over SPAN binades."""
    s = scale.to(torch.int32)
    high, low = s.amax(-1), s.amin(-1)
    if bool((high == 255).any()):
        raise Unsupported("prepare: W4A8 needs finite scales; a scale byte is 255 (NaN); use act='keep'")
    wide = high - low > SPAN
    if bool(wide.any()):
        row = int(wide.to(torch.uint8).argmax())
        raise Unsupported(
            f"prepare: W4A8 keeps MXFP4 weights exact in e4m3 while the scales of a row span at most {SPAN} binades; "
            f"{int(wide.sum())} of {len(high)} rows span more (row {row}: {int(low[row]) - 127} .. {int(high[row]) - 127}); use act='keep'"
        )
    return high.to(torch.uint8)


@triton.jit
def round_e4m3(x):
    """fp32 x to the nearest value that e4m3 holds, ties to even, still fp32: any cast of the result is exact. |x| <= 448 or NaN."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (size + 0x7FFFF + ((size >> 20) & 1)) & 0x7FF00000
    small = (tl.abs(x) + 16384.0) - 16384.0  # the last bit of the sum is 2^-9, the step of the subnormals
    size = tl.where(tl.abs(x) < 0.015625, small.to(tl.int32, bitcast=True), normal) | (bits ^ size)
    return tl.where(x != x, x, size.to(tl.float32, bitcast=True))


@triton.jit
def _divide(x, scale, IEEE: tl.constexpr):
    """x / scale, rounded once. Without IEEE, for a scale within 2^80 of 1: the quotient by the reciprocal and one correction, the same e4m3
    (Markstein 1990), -0 included."""
    s = tl.zeros_like(x) + scale
    if IEEE:
        return tl.div_rn(x, s)
    else:
        r = tl.div_rn(1.0, scale)
        q = x * r
        return tl.fma(tl.fma(q, s, -x), tl.zeros_like(x) - r, q)


@triton.jit
def quantize_x(
    x_ptr, o_ptr, scale_ptr, count_ptr, K, KT,
    B: tl.constexpr, FRAG: tl.constexpr, PDL: tl.constexpr, ROUND: tl.constexpr, COUNTS: tl.constexpr, ONCE: tl.constexpr,
    IEEE: tl.constexpr,
):  # fmt: skip
    """x [M, K] -> e4m3 [M, KT * 64] and scale f32 [M] = amax / 448; one program a row. FRAG: words (t, s) of a tile go to (s, t).

    ROUND: the target has no cast from fp32 that rounds once (Triton casts through fp16 below SM90). ONCE: B >= KT, the row is read once,
    and unless IEEE without an IEEE division for each element. The first program also zeroes the COUNTS counters that a cut product uses.
    """
    trigger(PDL)
    m = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, B * 64)
    if ONCE:
        x = tl.load(x_ptr + m * K + k, mask=k < K, other=0.0).to(tl.float32)
        top = tl.abs(x)
    else:
        top = tl.zeros([B * 64], tl.float32)
        for first in range(0, K, B * 64):
            x = tl.load(x_ptr + m * K + first + k, mask=first + k < K, other=0.0).to(tl.float32)
            top = tl.maximum(top, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)
    amax = tl.reduce(top, 0, _nan_max)
    scale = tl.div_rn(tl.where(amax > 0, amax, 1.0), 448.0)  # IEEE division: the same bytes as the formula anywhere
    scale = tl.where(amax != amax, amax, scale)
    tl.store(scale_ptr + m, scale)
    if COUNTS > 0 and m == 0:
        c = tl.arange(0, COUNTS)
        tl.store(count_ptr + c, c * 0)
    if ONCE:
        if (not IEEE) & (scale > 2.0**-80) & (scale < 2.0**80):
            _store_e4m3(o_ptr + m * (KT * 64), _divide(x, scale, IEEE), k, KT, B, FRAG, ROUND)
        else:
            _store_e4m3(o_ptr + m * (KT * 64), _divide(x, scale, True), k, KT, B, FRAG, ROUND)
    else:
        for first in range(0, KT * 64, B * 64):
            x = tl.load(x_ptr + m * K + first + k, mask=first + k < K, other=0.0).to(tl.float32)
            _store_e4m3(o_ptr + m * (KT * 64), _divide(x, scale, True), first + k, KT, B, FRAG, ROUND)


@triton.jit
def _store_e4m3(o_ptr, q, k, KT, B: tl.constexpr, FRAG: tl.constexpr, ROUND: tl.constexpr):
    if ROUND:
        q = round_e4m3(q)
    q = q.to(tl.float8e4nv)
    if FRAG:
        q = q.reshape([B, 4, 4, 4]).permute([0, 2, 1, 3]).reshape([B * 64])
    tl.store(o_ptr + k, q, mask=k < KT * 64)


@triton.jit
def _nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _each_word(p0, p1, R: tl.constexpr, U: tl.constexpr):
    """A table register of tiles p = 0, 1, i32 [R, U/4, g, t, v] each -> one for every word [R, U, g, t, s]."""
    t = tl.join(p0, p1).permute([0, 1, 4, 5, 2, 3]).reshape([R, U, 8, 4, 1])
    return tl.broadcast_to(t, [R, U, 8, 4, 4])


@triton.jit
def dense_fp8_plain(
    x_ptr, xs_ptr, w_ptr, s_ptr, bias_ptr, y_ptr, base_ptr, ws_ptr, M, N, NT, KT, KB,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, R: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """y[m, n] = xs[m] ws[n] sum_k x8[m, k] w8[n, k] (+ bias[n]). x: e4m3 [M, KT * 64]; a CTA owns BM rows of x and R * 16 of W; U % 4 == 0.

    Grid (tiles of N times tiles of M,): a second dimension ends at 65,535 blocks, which is 8 million rows of x.

    base: i32 [NT, 8] words of the largest scale bytes of rows g, g, g + 8, g + 8; ws: f32 [NT * 16] row scales; xs: f32 [M]. One sum
    over U * 64 columns is one dot; sums of dots are fp32 adds.
    """
    tiles_n = (NT + R - 1) // R
    pm = tl.program_id(0) // tiles_n
    rt = (tl.program_id(0) - pm * tiles_n) * R
    m = pm.to(tl.int64) * BM + tl.arange(0, BM)
    kk = tl.arange(0, U * 64)
    n = rt * 16 + tl.arange(0, R * 16)
    r = tl.arange(0, R)[:, None, None, None, None]
    g = tl.arange(0, 8)[None, None, :, None, None]
    t = tl.arange(0, 4)[None, None, None, :, None]
    u = tl.arange(0, U)[None, :, None, None, None]
    c = tl.arange(0, 4)[None, None, None, None, :]
    b = tl.arange(0, U // 4)[None, :, None, None, None]
    v = tl.arange(0, 2)[None, None, None, None, :]
    row = (rt + r).to(tl.int64)
    here = rt + r < NT
    base = tl.broadcast_to(tl.load(base_ptr + (rt + r) * 8 + g, mask=here & (g >= 0), other=0), [R, U // 4, 8, 4, 2])
    acc = tl.zeros([BM, R * 16], dtype=tl.float32)
    for kt in range(0, KT, U):
        x = tl.load(
            x_ptr + m[:, None] * (KT * 64) + (kt * 64 + kk)[None, :], mask=(m < M)[:, None] & (kt * 64 + kk < KT * 64)[None, :], other=0.0
        )
        live = here & (kt + u < KT) & (g >= 0) & (t >= 0) & (c >= 0)
        a = tl.load(w_ptr + (row * KT + kt + u) * 128 + (g * 16 + t * 4 + c), mask=live, other=0)
        ok = here & (kt // 4 + b < KB) & (g >= 0) & (t >= 0) & (v >= 0)
        s = tl.load(s_ptr + (row * KB + kt // 4 + b) * 32 + ((g * 2 + t // 2) * 2 + v), mask=ok, other=0)
        a0, b0, a1, b1, c0, d0, c1, d1 = tl.inline_asm_elementwise(T8, T8C, [s, base], dtype=(tl.int32,) * 8, is_pure=True, pack=1)
        lo0, hi0, lo1, hi1 = _each_word(a0, a1, R, U), _each_word(b0, b1, R, U), _each_word(c0, c1, R, U), _each_word(d0, d1, R, U)
        e0, e1 = tl.inline_asm_elementwise(W8, W8C, [a, lo0, hi0, lo1, hi1], dtype=(tl.int32,) * 2, is_pure=True, pack=1)
        o = tl.join(e0, e1)  # R U g t s e, four e4m3 a word
        o = tl.join(tl.join(o, o >> 16), tl.join(o >> 8, o >> 24)).to(tl.int8).to(tl.float8e4nv, bitcast=True)  # .. e j1 j0
        w = o.permute([0, 5, 2, 1, 3, 4, 6, 7]).reshape([R * 16, U * 64])
        acc += tl.dot(x, tl.trans(w))
    # in this order: the product of the two scales can leave the range of fp32 where y does not
    acc *= tl.load(ws_ptr + n, mask=n < N, other=0.0)[None, :]
    acc *= tl.load(xs_ptr + m, mask=m < M, other=0.0)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + m[:, None] * N + n[None, :], acc.to(y_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
