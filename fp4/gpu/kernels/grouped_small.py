# mypy: ignore-errors
"""Grouped product of few rows an expert: 4-bit weights times 16-bit rows on ``mma.m16n8k16``, bound by reading the weights once.

One program computes 16 R weight rows times up to MT activation rows of one expert. Its WK warps share K; each holds 16 x 64 weight tiles in
the fragment order of ``fp4.gpu.kernels.frag`` (one 16-byte load a lane, no conversion), and the partial sums meet in shared memory
at the end. Row order inside a tile pair of a gated first product: eight gate rows, then the eight up rows of the same units, so that
the activation needs no data from another lane.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from fp4.gpu.kernels.gluon_decode import frag_a, frag_x
from fp4.gpu.kernels.grouped_device import activate, entry
from fp4.gpu.kernels.pdl import gl_trigger, gl_wait

__all__ = ["grouped_small"]


@gluon.jit(do_not_specialize=["oc", "topk"], do_not_specialize_on_alignment=["gamma_ptr"])
def grouped_small(
    x_ptr,
    w_ptr,
    s_ptr,
    alpha_ptr,
    bias_ptr,
    out_ptr,
    order_ptr,
    sched_ptr,
    gamma_ptr,
    oc,
    p0,
    p1,
    p2,
    topk,
    N: gl.constexpr,
    K: gl.constexpr,
    KIND: gl.constexpr,
    ANY: gl.constexpr,
    ACT: gl.constexpr,
    FIRST: gl.constexpr,
    BIAS: gl.constexpr,
    HALF: gl.constexpr,
    WK: gl.constexpr,
    R: gl.constexpr,
    U: gl.constexpr,
    MT: gl.constexpr,
    PDL: gl.constexpr = False,
):
    """One product of the chain.

    FIRST: x [tokens, K] gathered through order, activation ACT in the epilogue, out [sorted row, N or N / 2] in x's dtype.
    else:  x [sorted row, K], out [pair, N] = gamma[pair] * (x w^T + bias), in out's dtype.
    alpha f32 [experts, 2] (gate, up; both equal when not gated), bias f32 [experts, N] in stored row order.
    Grid: (row-tile groups * max_blocks,), tile group fastest.
    """
    LA: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WK, 1], [1, 0])
    V: gl.constexpr = 2 if U % 4 == 0 else 1
    LS: gl.constexpr = gl.BlockedLayout([1, V], [1, 32], [WK, 1], [1, 0])
    LX: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [WK, 1, 1], [2, 1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WK, 1, 1], [1, 16, 8])
    DOA: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    DOB: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    DT: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    NT: gl.constexpr = (N + 15) // 16
    KT: gl.constexpr = (K + 63) // 64
    KB: gl.constexpr = (KT + 3) // 4
    SW: gl.constexpr = 64 if KIND == 16 else 32
    GROUPS: gl.constexpr = (NT + R - 1) // R
    STEP: gl.constexpr = WK * U
    ITER: gl.constexpr = (KT + STEP - 1) // STEP

    gl_trigger(PDL)
    gl_wait(PDL)
    pid = gl.program_id(0)
    block = pid // GROUPS
    tile0 = (pid % GROUPS) * R
    if block >= gl.load(sched_ptr):
        return
    e, row0, rows = entry(sched_ptr, block)

    wa = gl.arange(0, WK, layout=gl.SliceLayout(1, LA))[:, None]
    ia = gl.arange(0, R * U * 128, layout=gl.SliceLayout(0, LA))[None, :]
    ua = wa * U + (ia // 128) % U
    oa = (ia // (U * 128)) * (KT * 128) + ua * 128 + ia % 128
    ma = (tile0 + ia // (U * 128) < NT) & (ua >= 0)
    ws = gl.arange(0, WK, layout=gl.SliceLayout(1, LS))[:, None]
    js = gl.arange(0, R * U * 16, layout=gl.SliceLayout(0, LS))[None, :]
    us = ws * (U // 2) + (js // (32 * V)) % (U // 2 // V) * V  # index of a word: two k tiles
    lane = (js // V) % 32
    if KIND == 32:
        lane = lane // 2
    os = (js // (U * 16)) * (KB * SW) + lane * 2 + js % V
    ms = (tile0 + js // (U * 16) < NT) & (us >= 0)
    wx = gl.arange(0, WK, layout=gl.SliceLayout(1, gl.SliceLayout(2, LX)))[:, None, None]
    mx = gl.arange(0, MT, layout=gl.SliceLayout(0, gl.SliceLayout(2, LX)))
    kx = gl.arange(0, U * 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, LX)))[None, None, :]
    live = mx < rows
    if FIRST:
        src = gl.load(order_ptr + row0 + mx, mask=live, other=0) // topk
    else:
        src = row0 + mx
    kk = wx * (U * 32) + kx
    ox = src.to(gl.int64)[None, :, None] * (K // 2) + kk
    live = live[None, :, None]

    ap = w_ptr + (e.to(gl.int64) * NT + tile0) * (KT * 128) + oa
    sp = s_ptr + (e.to(gl.int64) * NT + tile0) * (KB * SW) + os
    xp = x_ptr.cast(gl.pointer_type(gl.int32), bitcast=True) + ox

    a = gl.load(ap, mask=ma & (ua < KT), other=0, eviction_policy="evict_first")
    s = gl.load(sp + (us // 2) * SW + us % 2, mask=ms & (us < KB * 2), other=0, eviction_policy="evict_first")
    acc = gl.zeros([WK, R * 16, MT], gl.float32, MMA)
    for i in range(ITER):
        nxt = (i + 1) * STEP
        x = gl.load(xp + i * (STEP * 32), mask=live & (kk + i * (STEP * 32) < K // 2), other=0)
        a1 = gl.load(ap + nxt * 128, mask=ma & (ua + nxt < KT), other=0, eviction_policy="evict_first")
        u1 = us + nxt // 2
        s1 = gl.load(sp + (u1 // 2) * SW + u1 % 2, mask=ms & (u1 < KB * 2), other=0, eviction_policy="evict_first")
        w = frag_a(a.reshape([WK, 1, R * U * 128]), s.reshape([WK, 1, R * U * 16]), oc, WK, 1, R, U, KIND, ANY, HALF, DOA)
        acc = mma_v2(w, gl.convert_layout(frag_x(x, WK, MT, U, HALF), DOB, assert_trivial=True), acc)
        a = a1
        s = s1
    r = gl.sum(acc, axis=0)
    col = tile0 * 16
    if FIRST and ACT != 0:
        LR: gl.constexpr = gl.BlockedLayout([1, 2, 1, 1], [1, 1, 8, 4], [1, 1, 1, WK], [3, 2, 1, 0])
        r = gl.convert_layout(r.reshape([R, 2, 8, MT]), LR)
        gate, up = gl.split(r.permute([0, 2, 3, 1]))
        LO: gl.constexpr = gate.type.layout
        rt = gl.arange(0, R, layout=gl.SliceLayout(1, gl.SliceLayout(2, LO)))[:, None, None]
        rg = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, LO)))[None, :, None]
        rm = gl.arange(0, MT, layout=gl.SliceLayout(0, gl.SliceLayout(1, LO)))[None, None, :]
        n = col + rt * 16 + rg
        gate = gate * gl.load(alpha_ptr + 2 * e)
        up = up * gl.load(alpha_ptr + 2 * e + 1)
        if BIAS:
            gate += gl.load(bias_ptr + e * N + n, mask=n < N, other=0.0)
            up += gl.load(bias_ptr + e * N + n + 8, mask=n + 8 < N, other=0.0)
        h = activate(gate, up, p0, p1, p2, ACT)
        unit = (col // 2) + rt * 8 + rg
        gl.store(out_ptr + (row0 + rm).to(gl.int64) * (N // 2) + unit, h.to(DT), mask=(rm < rows) & (n < N))
    else:
        LR2: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, WK], [1, 0])
        r = gl.convert_layout(r, LR2)
        n = col + gl.arange(0, R * 16, layout=gl.SliceLayout(1, LR2))
        m = gl.arange(0, MT, layout=gl.SliceLayout(0, LR2))
        r = r * gl.load(alpha_ptr + 2 * e)
        if BIAS:
            r += gl.load(bias_ptr + e * N + n, mask=n < N, other=0.0)[:, None]
        mk = (m < rows)[None, :] & (n < N)[:, None]
        if FIRST:
            r = activate(r, r, p0, p1, p2, ACT)
            gl.store(out_ptr + (row0 + m).to(gl.int64)[None, :] * N + n[:, None], r.to(DT), mask=mk)
        else:
            pair = gl.load(order_ptr + row0 + m, mask=m < rows, other=0)
            r = r * gl.load(gamma_ptr + pair, mask=m < rows, other=0.0).to(gl.float32)[None, :]
            gl.store(out_ptr + pair.to(gl.int64)[None, :] * N + n[:, None], r.to(out_ptr.dtype.element_ty), mask=mk)
