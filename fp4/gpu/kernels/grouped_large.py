"""Grouped product of many rows an expert: y^T = W x^T on wgmma, the decoded 4-bit weight as the register operand (Hopper).

The fragment order of ``fp4.gpu.kernels.frag`` is also the register order of a wgmma A operand, so weights go from memory to the
tensor cores without shared memory. Rows of x come through shared memory by cp.async (a gather costs nothing more), already in
the k order of the fragments: ``permute_rows`` makes it for the first product, the first product's epilogue for the second.
One product is always in flight while the next chunk of weights is decoded.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from fp4.gpu.kernels.gluon_decode import barrier, cp_async, cp_commit, cp_wait, frag_w
from fp4.gpu.kernels.grouped_device import activate

__all__ = ["grouped_large", "permute_rows"]


@triton.jit(do_not_specialize=["rows"])
def permute_rows(x_ptr, out_ptr, rows, K: tl.constexpr, BLOCK: tl.constexpr):
    """x [rows, K] of 16-bit values, as i32 words -> out [rows, 64 ceil(K / 64)] in the k order of the fragments, zero past K.

    Of each 32 words of a row, word (step, h, t) of out is word (t, step, h) of x.
    """
    KW: tl.constexpr = (K + 63) // 64 * 32
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, col = i // KW, (i % KW).to(tl.int32)
    v = col % 32
    src = col - v + (v % 4) * 8 + v // 4
    ok = row < rows
    tl.store(out_ptr + i, tl.load(x_ptr + row * (K // 2) + src, mask=ok & (src < K // 2), other=0), mask=ok)


@gluon.jit(do_not_specialize=["oc", "topk"], do_not_specialize_on_alignment=["gamma_ptr"])
def grouped_large(
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
    WN: gl.constexpr,
    R: gl.constexpr,
    MT: gl.constexpr,
    XS: gl.constexpr,
):
    """As ``grouped_small``, with x and the first product's output in fragment k order, K padded to 64 there (row stride 64 KT).

    Grid: (row-tile groups * max_blocks,), tile group fastest.
    """
    DT: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    U: gl.constexpr = 2
    BN: gl.constexpr = 16 * WN * R
    LA: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WN, 1], [1, 0])
    LS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WN, 1], [1, 0])
    LX: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WN, 1], [1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WN, 1], [16, MT, 16])
    DOA: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    SX: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    NT: gl.constexpr = (N + 15) // 16
    KT: gl.constexpr = (K + 63) // 64
    KB: gl.constexpr = (KT + 3) // 4
    SW: gl.constexpr = 64 if KIND == 16 else 32
    GROUPS: gl.constexpr = (NT + WN * R - 1) // (WN * R)
    ITER: gl.constexpr = (KT + U - 1) // U

    pid = gl.program_id(0)
    block = pid // GROUPS
    tile0 = (pid % GROUPS) * (WN * R)
    if block >= gl.load(sched_ptr):
        return
    e = gl.load(sched_ptr + 1 + 3 * block)
    row0 = gl.load(sched_ptr + 2 + 3 * block)
    rows = gl.load(sched_ptr + 3 + 3 * block)

    wa = gl.arange(0, WN, layout=gl.SliceLayout(1, LA))[:, None]
    ia = gl.arange(0, R * U * 128, layout=gl.SliceLayout(0, LA))[None, :]
    ta = (ia // (U * 128)) * WN + wa
    oa = ta * (KT * 128) + ia % (U * 128)
    ka = (ia // 128) % U
    ma = tile0 + ta < NT
    ws = gl.arange(0, WN, layout=gl.SliceLayout(1, LS))[:, None]
    js = gl.arange(0, R * 32, layout=gl.SliceLayout(0, LS))[None, :]
    lane = js % 32
    if KIND == 32:
        lane = (lane // 4) * 2 + (lane % 4) // 2
    ts = (js // 32) * WN + ws
    os = ts * (KB * SW) + lane * 2
    ms = tile0 + ts < NT
    mx = gl.arange(0, MT, layout=gl.SliceLayout(1, LX))
    kx = gl.arange(0, U * 64, layout=gl.SliceLayout(0, LX))[None, :]
    live = mx < rows
    if FIRST:
        src = gl.load(order_ptr + row0 + mx, mask=live, other=0) // topk
    else:
        src = gl.where(live, row0 + mx, 0)
    ap = w_ptr + (e.to(gl.int64) * NT + tile0) * (KT * 128) + oa
    sp = s_ptr + (e.to(gl.int64) * NT + tile0) * (KB * SW) + os
    xp = x_ptr + src.to(gl.int64)[:, None] * (KT * 64) + kx
    live = live[:, None]

    sx = gl.allocate_shared_memory(DT, [XS, MT, U * 64], SX)
    for i in gl.static_range(XS - 2):
        cp_async(sx.index(i), xp + i * (U * 64), mask=live & (kx + i * (U * 64) < KT * 64))
        cp_commit()
    a = gl.load(ap, mask=ma & (ka < KT), other=0)
    s = gl.load(sp, mask=ms, other=0)
    acc = gl.zeros([BN, MT], gl.float32, MMA)
    old = gl.zeros([BN, U * 64], DT, DOA)
    for i in range(ITER):
        nxt = (i + 1) * U
        a1 = gl.load(ap + nxt * 128, mask=ma & (ka + nxt < KT), other=0)
        s1 = gl.load(sp + ((i + 1) // 2) * SW + (i + 1) % 2, mask=ms & (nxt < KT), other=0)
        w = frag_w(a.reshape([1, WN, R * U * 128]), s.reshape([1, WN, R * U * 16]), oc, 1, WN, R, U, KIND, ANY, HALF)
        w = w.permute([0, 2, 1, 7, 4, 3, 6, 8, 5, 9]).reshape([BN, U * 64])  # R WN e g, U s h t l
        w = gl.convert_layout(w, DOA, assert_trivial=True)
        cp_wait(XS - 3)
        fence_async_shared()
        barrier()  # every warp sees chunk i, and every warp's product i - 2 is done, so its slot is free
        ahead = i + XS - 2
        cp_async(sx.index(ahead % XS), xp + ahead * (U * 64), mask=live & (kx + ahead * (U * 64) < KT * 64))
        cp_commit()
        acc = warpgroup_mma(w, sx.index(i % XS).permute([1, 0]), acc, is_async=True)
        acc, old = warpgroup_mma_wait(1, deps=(acc, old))
        old = w
        a = a1
        s = s1
    acc, old = warpgroup_mma_wait(0, deps=(acc, old))
    cp_wait(0)
    col = tile0 * 16
    if FIRST:
        LO: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WN, 1], [1, 0])
        if ACT != 0:
            gate, up = gl.split(acc.reshape([WN * R, 2, 8, MT]).permute([0, 2, 3, 1]))
            rt = gl.arange(0, WN * R, layout=gl.SliceLayout(1, gl.SliceLayout(2, gate.type.layout)))[:, None, None]
            rg = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gate.type.layout)))[None, :, None]
            n = col + rt * 16 + rg
            gate = gate * gl.load(alpha_ptr + 2 * e)
            up = up * gl.load(alpha_ptr + 2 * e + 1)
            if BIAS:
                gate += gl.load(bias_ptr + e * N + n, mask=n < N, other=0.0)
                up += gl.load(bias_ptr + e * N + n + 8, mask=n + 8 < N, other=0.0)
            h = activate(gate, up, p0, p1, p2, ACT).to(DT)
            UN: gl.constexpr = BN // 2
            NO: gl.constexpr = N // 2
        else:
            n = col + gl.arange(0, BN, layout=gl.SliceLayout(1, MMA))[:, None]
            acc = acc * gl.load(alpha_ptr + 2 * e)
            if BIAS:
                acc += gl.load(bias_ptr + e * N + n, mask=n < N, other=0.0)
            h = gl.where(acc > 0, acc * acc, gl.where(acc == acc, 0.0, acc)).to(DT)
            UN: gl.constexpr = BN
            NO: gl.constexpr = N
        # units t step h l -> fragment order step h t l of the next product; units past NO are written as zero up to its padded row
        h = h.reshape([UN // 64, 4, 4, 2, 2, MT]).permute([5, 0, 2, 3, 1, 4]).reshape([MT, UN])
        h = gl.convert_layout(h, LO)
        NP: gl.constexpr = (NO + 63) // 64 * 64
        unit = (col * UN) // BN + gl.arange(0, UN, layout=gl.SliceLayout(0, LO))[None, :]
        m = gl.arange(0, MT, layout=gl.SliceLayout(1, LO))[:, None]
        gl.store(out_ptr + (row0 + m).to(gl.int64) * NP + unit, h, mask=(m < rows) & (unit < NP))
    else:
        n = col + gl.arange(0, BN, layout=gl.SliceLayout(1, MMA))
        m = gl.arange(0, MT, layout=gl.SliceLayout(0, MMA))
        acc = acc * gl.load(alpha_ptr + 2 * e)
        if BIAS:
            acc += gl.load(bias_ptr + e * N + n, mask=n < N, other=0.0)[:, None]
        pair = gl.load(order_ptr + row0 + m, mask=m < rows, other=0)
        acc = acc * gl.load(gamma_ptr + pair, mask=m < rows, other=0.0).to(gl.float32)[None, :]
        LY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WN, 1], [1, 0])
        y = gl.convert_layout(acc.to(out_ptr.dtype.element_ty).permute([1, 0]), LY)
        m = gl.arange(0, MT, layout=gl.SliceLayout(1, LY))
        n = col + gl.arange(0, BN, layout=gl.SliceLayout(0, LY))[None, :]
        pair = gl.load(order_ptr + row0 + m, mask=m < rows, other=0)[:, None]
        gl.store(out_ptr + pair.to(gl.int64) * N + n, y, mask=(m < rows)[:, None] & (n < N))
