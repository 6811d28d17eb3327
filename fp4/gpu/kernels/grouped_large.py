# mypy: ignore-errors
"""Grouped product of many rows an expert: y^T = W x^T on wgmma, the decoded 4-bit weight as the register operand (Hopper).

The fragment order of ``fp4.gpu.kernels.frag`` is also the register order of a wgmma A operand, so weights go from memory to the
tensor cores without shared memory. Rows of x come through shared memory by cp.async (a gather costs nothing more), already in
the k order of the fragments: ``permute_rows`` makes it for the first product, the first product's epilogue for the second.
Stored words and rows both arrive by cp.async, XS chunks of 64 columns deep; the next chunk is decoded while a product runs.

No proxy fence follows cp.async: like Triton's own pipelines (its fence pass asks for one only after register stores to shared memory). A
fence there waits for every copy in flight and costs the whole pipeline.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from fp4.gpu.kernels.gluon_decode import barrier, cp_async, cp_commit, cp_wait
from fp4.gpu.kernels.grouped_device import decode, entry, epilogue, finish, gather
from fp4.gpu.kernels.pdl import gl_trigger, gl_wait, trigger, wait

__all__ = ["grouped_large", "permute_rows"]


@triton.jit(do_not_specialize=["rows"])
def permute_rows(x_ptr, out_ptr, rows, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False):
    """x [rows, K] of 16-bit values, as i32 words -> out [rows, 64 ceil(K / 64)] in the k order of the fragments, zero past K.

    Of each 32 words of a row, word (step, h, t) of out is word (t, step, h) of x.
    """
    trigger(PDL)
    KW: tl.constexpr = (K + 63) // 64 * 32
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, col = i // KW, (i % KW).to(tl.int32)
    v = col % 32
    src = col - v + (v % 4) * 8 + v // 4
    ok = row < rows
    tl.store(out_ptr + i, tl.load(x_ptr + row * (K // 2) + src, mask=ok & (src < K // 2), other=0), mask=ok)
    wait(PDL)  # the route in front ends before this kernel does


@gluon.jit
def _fetch(slot, n, sx, sa, ss, xp, ap, sp, live, ma, ms, KT: gl.constexpr, SW: gl.constexpr):
    """Copy chunk n (64 columns) into a slot; chunks past the end are zeros that no product reads."""
    on = n < KT
    cp_async(sa[slot], ap + n * 128, mask=ma & on)
    cp_async(sx[slot], xp + n * 64, mask=live & on)
    cp_async(ss[slot], sp + (n // 4) * SW + (n // 2) % 2, mask=ms & on)
    cp_commit()


@gluon.jit
def _tile(
    x_ptr,
    w_ptr,
    s_ptr,
    alpha_ptr,
    bias_ptr,
    out_ptr,
    order_ptr,
    gamma_ptr,
    oc,
    p0,
    p1,
    p2,
    topk,
    e,
    row0,
    rows,
    tile0,
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
    """Row tiles tile0 .. tile0 + WN R of expert e times rows row0 .. row0 + rows (at most MT)."""
    DT: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    BN: gl.constexpr = 16 * WN * R
    LA: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WN, 1], [1, 0])
    LS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WN, 1], [1, 0])
    LX: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WN, 1], [1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WN, 1], [16, MT, 16])
    DOA: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    SX: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    SP: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    NT: gl.constexpr = (N + 15) // 16
    KT: gl.constexpr = (K + 63) // 64
    KB: gl.constexpr = (KT + 3) // 4
    SW: gl.constexpr = 64 if KIND == 16 else 32

    wa = gl.arange(0, WN, layout=gl.SliceLayout(1, LA))[:, None]
    ia = gl.arange(0, R * 128, layout=gl.SliceLayout(0, LA))[None, :]
    ta = (ia // 128) * WN + wa
    ma = tile0 + ta < NT
    ws = gl.arange(0, WN, layout=gl.SliceLayout(1, LS))[:, None]
    js = gl.arange(0, R * 32, layout=gl.SliceLayout(0, LS))[None, :]
    lane = js % 32
    if KIND == 32:
        lane = lane // 2
    ts = (js // 32) * WN + ws
    ms = tile0 + ts < NT
    xp, live = gather(x_ptr, order_ptr, row0, rows, topk, 0, MT, KT, 64, FIRST, LX)
    ap = w_ptr + (e.to(gl.int64) * NT + tile0) * (KT * 128) + (ta * (KT * 128) + ia % 128)
    sp = s_ptr + (e.to(gl.int64) * NT + tile0) * (KB * SW) + (ts * (KB * SW) + lane * 2)

    sx = ()
    sa = ()
    ss = ()
    for _ in gl.static_range(XS):  # one buffer a stage, so that the compiler sees which stages a copy and a product touch
        sx = sx + (gl.allocate_shared_memory(DT, [MT, 64], SX),)  # noqa: RUF005
        sa = sa + (gl.allocate_shared_memory(gl.int32, [WN, R * 128], SP),)  # noqa: RUF005
        ss = ss + (gl.allocate_shared_memory(gl.int32, [WN, R * 32], SP),)  # noqa: RUF005
    for q in gl.static_range(XS - 1):
        _fetch(q, q, sx, sa, ss, xp, ap, sp, live, ma, ms, KT, SW)
    cp_wait(XS - 2)
    barrier()
    w = decode(sa[0].load(LA), ss[0].load(LS), oc, False, WN, R, KIND, ANY, HALF, DOA)
    acc = gl.zeros([BN, MT], gl.float32, MMA)
    gl.static_assert(XS % 2 == 0)  # so that which half of a scale word a chunk uses is known at compile time
    for i0 in range(0, KT // XS * XS, XS):
        # w is the register operand of a running product and must stay until that product is waited for; nothing runs across the loop's edge
        for j in gl.static_range(XS):
            acc = warpgroup_mma(w, sx[j].permute([1, 0]), acc, is_async=True)
            if j > 0:
                acc, old = warpgroup_mma_wait(1, deps=(acc, old))  # noqa: F821
            cp_wait(XS - 3)
            barrier()  # chunk i + 1 is here for every warp, and every warp is done with chunk i - 1
            _fetch((j + XS - 1) % XS, i0 + (j + XS - 1), sx, sa, ss, xp, ap, sp, live, ma, ms, KT, SW)
            old = w
            w = decode(sa[(j + 1) % XS].load(LA), ss[(j + 1) % XS].load(LS), oc, j % 2 == 0, WN, R, KIND, ANY, HALF, DOA)
        acc, old = warpgroup_mma_wait(0, deps=(acc, old))
    i0 = KT // XS * XS
    for j in gl.static_range(KT % XS):
        acc = warpgroup_mma(w, sx[j].permute([1, 0]), acc, is_async=True)
        if j > 0:
            acc, old = warpgroup_mma_wait(1, deps=(acc, old))
        cp_wait(XS - 3)
        barrier()  # chunk i + 1 is here for every warp, and every warp is done with chunk i - 1
        _fetch((j + XS - 1) % XS, i0 + (j + XS - 1), sx, sa, ss, xp, ap, sp, live, ma, ms, KT, SW)
        old = w
        w = decode(sa[(j + 1) % XS].load(LA), ss[(j + 1) % XS].load(LS), oc, j % 2 == 0, WN, R, KIND, ANY, HALF, DOA)
    if KT % XS != 0:
        acc, old = warpgroup_mma_wait(0, deps=(acc, old))
    cp_wait(0)
    a0, a1, b0, b1 = epilogue(acc, alpha_ptr, bias_ptr, e, tile0, N, ACT, FIRST, BIAS, BN, MT, MMA)
    finish(
        acc, a0, a1, b0, b1, out_ptr, order_ptr, gamma_ptr, p0, p1, p2, row0, rows, tile0,
        N, ACT, FIRST, BIAS, HALF, WN, BN, MT, MMA,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["oc", "topk"])
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
    LOW: gl.constexpr,
    XS: gl.constexpr,
    PDL: gl.constexpr = False,
):
    """As ``grouped_small``, with x and the first product's output in fragment k order, K padded to 64 there (row stride 64 KT).

    LOW: rows of the smaller tile that a block of at most LOW rows uses; MT for none.
    Grid: (row-tile groups * max_blocks,), tile group fastest.
    """
    gl_trigger(PDL)
    gl_wait(PDL)
    GROUPS: gl.constexpr = ((N + 15) // 16 + WN * R - 1) // (WN * R)
    pid = gl.program_id(0)
    block = pid // GROUPS
    tile0 = (pid % GROUPS) * (WN * R)
    if block >= gl.load(sched_ptr):
        return
    e, row0, rows = entry(sched_ptr, block)
    if LOW == MT:
        _tile(
            x_ptr, w_ptr, s_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr, gamma_ptr, oc, p0, p1, p2, topk, e, row0, rows, tile0,
            N, K, KIND, ANY, ACT, FIRST, BIAS, HALF, WN, R, MT, XS,
        )  # fmt: skip
    elif rows <= LOW:
        _tile(
            x_ptr, w_ptr, s_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr, gamma_ptr, oc, p0, p1, p2, topk, e, row0, rows, tile0,
            N, K, KIND, ANY, ACT, FIRST, BIAS, HALF, WN, R, LOW, XS,
        )  # fmt: skip
    else:
        _tile(
            x_ptr, w_ptr, s_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr, gamma_ptr, oc, p0, p1, p2, topk, e, row0, rows, tile0,
            N, K, KIND, ANY, ACT, FIRST, BIAS, HALF, WN, R, MT, XS,
        )  # fmt: skip
