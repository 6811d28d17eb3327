"""Portable W4A16 kernels in plain Triton: any M, N, K, SM80 and newer; the path where Gluon is missing or does not win."""

from __future__ import annotations

import triton
import triton.language as tl

from fp4.gpu.kernels.decode import unpack_scales, unpack_words


@triton.jit
def weight_tile(
    w_ptr,
    s_ptr,
    rt,
    kt,
    NT,
    KT,
    KB,
    oc,
    KIND: tl.constexpr,
    ANY: tl.constexpr,
    HALF: tl.constexpr,
    R: tl.constexpr,
    U: tl.constexpr,
):
    """Decode row tiles rt .. rt + R and k tiles kt .. kt + U (kt and U multiples of 4) to [R * 16, U * 64] in natural order.

    w_ptr: i32 ``frag_w`` words, 128 a 16 x 64 tile; s_ptr: i32 ``frag_sf16`` / ``frag_sf32`` words; NT, KT: tiles that exist
    along n and k, KB = ceil(KT / 4). Tiles outside read as zero codes and zero scale bytes.
    """
    r = tl.arange(0, R)[:, None, None, None, None]
    g = tl.arange(0, 8)[None, None, :, None, None]
    t = tl.arange(0, 4)[None, None, None, :, None]
    u = tl.arange(0, U)[None, :, None, None, None]
    c = tl.arange(0, 4)[None, None, None, None, :]
    live = (rt + r < NT) & (kt + u < KT)
    row = (rt + r).to(tl.int64)
    a = tl.load(w_ptr + (row * KT + kt + u) * 128 + (g * 16 + t * 4 + c), mask=live & (g >= 0) & (t >= 0) & (c >= 0), other=0)
    b = tl.arange(0, U // 4)[None, :, None, None, None]
    v = tl.arange(0, 2)[None, None, None, None, :]
    lane = g * 4 + t if KIND == 16 else g * 2 + t // 2
    L: tl.constexpr = 64 if KIND == 16 else 32
    ok = (rt + r < NT) & (kt // 4 + b < KB)
    s = tl.load(s_ptr + (row * KB + kt // 4 + b) * L + (lane * 2 + v), mask=ok & (g >= 0) & (t >= 0) & (v >= 0), other=0)
    q0, q1, q2, q3 = unpack_scales(s, oc, KIND, ANY, HALF)
    s0 = tl.join(q0, q1).permute([0, 1, 4, 5, 2, 3]).reshape([R, U, 8, 4, 1])
    s1 = tl.join(q2, q3).permute([0, 1, 4, 5, 2, 3]).reshape([R, U, 8, 4, 1])
    o = unpack_words(a, tl.broadcast_to(s0, [R, U, 8, 4, 4]), tl.broadcast_to(s1, [R, U, 8, 4, 4]), HALF)
    return o.permute([0, 5, 2, 1, 3, 4, 6, 7]).reshape([R * 16, U * 64])


@triton.jit
def dense_plain(
    x_ptr,
    w_ptr,
    s_ptr,
    alpha_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    K,
    NT,
    KT,
    KB,
    stride_xm,
    oc,
    KIND: tl.constexpr,
    ANY: tl.constexpr,
    HALF: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BM: tl.constexpr,
    R: tl.constexpr,
    U: tl.constexpr,
):
    """y[m, n] = alpha * sum_k x[m, k] * w[n, k] (+ bias[n]); one CTA a BM x (R * 16) tile, fp32 accumulation."""
    pn = tl.program_id(0)
    pm = tl.program_id(1)
    m = pm.to(tl.int64) * BM + tl.arange(0, BM)
    kk = tl.arange(0, U * 64)
    n = pn.to(tl.int64) * (R * 16) + tl.arange(0, R * 16)
    xp = x_ptr + m[:, None] * stride_xm + kk[None, :]
    acc = tl.zeros([BM, R * 16], dtype=tl.float32)
    for kt in range(0, KT, U):
        x = tl.load(xp + kt * 64, mask=(m < M)[:, None] & (kt * 64 + kk < K)[None, :], other=0.0)
        w = weight_tile(w_ptr, s_ptr, pn * R, kt, NT, KT, KB, oc, KIND, ANY, HALF, R, U)
        acc = tl.dot(x, tl.trans(w), acc)
    acc *= tl.load(alpha_ptr)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + m[:, None] * N + n[None, :], acc.to(y_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def dequantize_tiles(
    w_ptr,
    s_ptr,
    o_ptr,
    row0,
    N,
    K,
    NT,
    KT,
    KB,
    oc,
    KIND: tl.constexpr,
    ANY: tl.constexpr,
    HALF: tl.constexpr,
    R: tl.constexpr,
    U: tl.constexpr,
):
    """Stored rows from row0 (a multiple of 16) on as code * scale * 2^-left, bf16 / fp16 [rows, K]; grid (row blocks, k blocks)."""
    rt = row0 // 16 + tl.program_id(0) * R
    kt = tl.program_id(1) * U
    w = weight_tile(w_ptr, s_ptr, rt, kt, NT, KT, KB, oc, KIND, ANY, HALF, R, U)
    n = rt * 16 + tl.arange(0, R * 16)
    k = kt * 64 + tl.arange(0, U * 64)
    o = o_ptr + (n - row0).to(tl.int64)[:, None] * K + k[None, :]
    tl.store(o, w, mask=(n < N)[:, None] & (k < K)[None, :])
