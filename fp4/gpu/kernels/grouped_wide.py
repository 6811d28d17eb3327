# mypy: ignore-errors
"""Grouped product with one warp group that fetches and C that multiply (Hopper): as many blocks as stay resident take all tiles in turn.

A tile is 64 C weight rows of one expert times up to MT + EX of its rows. The fetching warp group copies x and stored words by
cp.async, XS chunks of 64 U columns ahead and on into the next tile; each multiplying warp group decodes its own 64 weight rows and runs
wgmma with them as the register operand. They meet only at the ring of slots: ``ready`` counts the fetching threads, ``empty`` the
multiplying ones, so that decode, tensor cores and copies of different warp groups overlap. x crosses from L2 once for 64 C rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from fp4.gpu.kernels.gluon_decode import cp_async, frag_w
from fp4.gpu.kernels.grouped_device import decode, entry, epilogue, finish, gather
from fp4.gpu.kernels.operand import at_scales
from fp4.gpu.kernels.pdl import gl_trigger, gl_wait
from fp4.gpu.kernels.ring import arrive, mbarriers

__all__ = ["grouped_wide"]


@gluon.constexpr_function
def row_tiles(n, first, gated):
    """16-row tiles of weights that tiles of a product cover: the first product also writes zeros up to 64 columns of its output."""
    if first:
        return (n + 127) // 128 * 8 if gated else (n + 63) // 64 * 4
    return (n + 15) // 16


@gluon.jit
def _decode(
    a, s, oc, ODD: gl.constexpr, U: gl.constexpr, KIND: gl.constexpr, ANY: gl.constexpr, HALF: gl.constexpr,
    DOA: gl.constexpr,
):  # fmt: skip
    """Words [4, U 128] and scale words [4, 32] -> the A operand [64, 64 U]. ODD: which tile of the scale word's pair (U = 1)."""
    if U == 1:
        w = decode(a, s, oc, ODD, 4, 1, KIND, ANY, HALF, DOA)
    else:
        w = frag_w(a.reshape([1, 4, U * 128]), s.reshape([1, 4, U * 16]), oc, 1, 4, 1, U, KIND, ANY, HALF)
        w = w.permute([0, 2, 1, 7, 4, 3, 6, 8, 5, 9]).reshape([64, U * 64])  # warp e g, U s h t l
        w = gl.convert_layout(w, DOA, assert_trivial=True)
    return w


@gluon.jit
def _next(slot, phase, XS: gl.constexpr):
    slot += 1
    phase = gl.where(slot == XS, phase ^ 1, phase)
    return gl.where(slot == XS, 0, slot), phase


@gluon.jit
def _fetch(
    x, y, a, s, slot, phase, live, livey, more, tile0, sx, sy, sa, ss, ready, empty,
    NT: gl.constexpr, KT: gl.constexpr, KB: gl.constexpr, SW: gl.constexpr, C: gl.constexpr, EX: gl.constexpr, XS: gl.constexpr,
    EVEN: gl.constexpr, LEFT: gl.constexpr, LA: gl.constexpr, LS: gl.constexpr, LX: gl.constexpr,
):  # fmt: skip
    """Copy a chunk into the ring's slot: MT rows from x, EX further ones from y if ``more``, words from a and s. Returns the next slot.

    LEFT: columns before K ends, if that is inside the chunk, else 0. EVEN: all row tiles of the C warp groups exist.
    """
    mbarrier.wait(empty.index(slot), phase)
    if LEFT > 0:
        k = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, LX))[None, :]
        live = live & (k < LEFT)
        livey = livey & (k < LEFT)
    cp_async(sx.index(slot), x, mask=live)
    if EX > 0:  # noqa: SIM102 (known at compile time)
        if more:
            cp_async(sy.index(slot), y, mask=livey)
    wa = gl.arange(0, 4, layout=gl.SliceLayout(1, LA))[:, None]
    ia = gl.arange(0, a.shape[1], layout=gl.SliceLayout(0, LA))[None, :]
    ws = gl.arange(0, 4, layout=gl.SliceLayout(1, LS))[:, None] + gl.arange(0, 32, layout=gl.SliceLayout(0, LS))[None, :] * 0
    for c in gl.static_range(C):
        if EVEN and LEFT == 0:
            cp_async(sa[c].index(slot), a + c * 4 * KT * 128)
        else:
            cp_async(sa[c].index(slot), a + c * 4 * KT * 128, mask=(tile0 + c * 4 + wa < NT) & ((ia < LEFT * 2) | (LEFT == 0)))
        if EVEN:
            cp_async(ss[c].index(slot), s + c * 4 * KB * SW)
        else:
            cp_async(ss[c].index(slot), s + c * 4 * KB * SW, mask=tile0 + c * 4 + ws < NT)
    arrive(ready.index(slot), increment_count=False)
    return _next(slot, phase, XS)


@gluon.jit
def _produce(
    x_ptr, w_ptr, s_ptr, order_ptr, sched_ptr, topk, tiles, sx, sy, sa, ss, ready, empty,
    N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, ACT: gl.constexpr, FIRST: gl.constexpr,
    C: gl.constexpr, U: gl.constexpr, MT: gl.constexpr, EX: gl.constexpr, XS: gl.constexpr, TURN: gl.constexpr,
):  # fmt: skip
    LA: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    LS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    LX: gl.constexpr = gl.BlockedLayout([1, 8], [4 // U, 8 * U], [4, 1], [1, 0])
    NT: gl.constexpr = (N + 15) // 16
    KT: gl.constexpr = (K + 63) // 64
    KB: gl.constexpr = (KT + 3) // 4
    SW: gl.constexpr = 64 if KIND == 16 else 32
    COVER: gl.constexpr = row_tiles(N, FIRST, ACT != 0)
    GROUPS: gl.constexpr = (COVER + 4 * C - 1) // (4 * C)
    EVEN: gl.constexpr = NT % (4 * C) == 0 and NT == COVER
    TURNS: gl.constexpr = KT // (TURN * U)
    gl.static_assert(TURN == 1 or TURN * U == 4)

    wa = gl.arange(0, 4, layout=gl.SliceLayout(1, LA))[:, None]
    ia = gl.arange(0, U * 128, layout=gl.SliceLayout(0, LA))[None, :]
    oa = wa * (KT * 128) + ia
    _, os = at_scales(KB, KIND, 2, False, 4, 1)
    slot = 0
    phase = 1
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        block = t // GROUPS
        tile0 = (t % GROUPS) * (4 * C)
        e, row0, rows = entry(sched_ptr, block)
        more = rows > MT
        xp, live = gather(x_ptr, order_ptr, row0, rows, topk, 0, MT, KT, U * 64, FIRST, LX)
        if EX > 0:
            yp, livey = gather(x_ptr, order_ptr, row0, rows, topk, MT, EX, KT, U * 64, FIRST, LX)
        else:
            yp = xp
            livey = live
        ap = w_ptr + (e.to(gl.int64) * NT + tile0) * (KT * 128) + oa
        sp = s_ptr + (e.to(gl.int64) * NT + tile0) * (KB * SW) + os
        # TURN chunks a turn: pointers move once for them, the copies have constant offsets. Scales of four 64-column tiles lie together
        for n in range(TURNS):
            if TURN * U == 4:
                sn = sp
            else:
                sn = sp + (n * U // 4) * SW + n * U % 4 // 2
            for j in gl.static_range(TURN):
                slot, phase = _fetch(
                    xp + j * (U * 64), yp + j * (U * 64), ap + j * (U * 128), sn + j * U // 2, slot, phase, live, livey, more, tile0,
                    sx, sy, sa, ss, ready, empty, NT, KT, KB, SW, C, EX, XS, EVEN, 0, LA, LS, LX,
                )  # fmt: skip
            xp += TURN * U * 64
            if EX > 0:
                yp += TURN * U * 64
            ap += TURN * U * 128
            if TURN * U == 4:
                sp += SW
        if TURN * U != 4:
            sp += TURNS * U // 4 * SW + TURNS * U % 4 // 2
        for j in gl.static_range((KT % (TURN * U) + U - 1) // U):
            slot, phase = _fetch(
                xp + j * (U * 64), yp + j * (U * 64), ap + j * (U * 128), sp + j * U // 2, slot, phase, live, livey, more, tile0,
                sx, sy, sa, ss, ready, empty, NT, KT, KB, SW, C, EX, XS, EVEN, 64 if KT % (TURN * U) - j * U < U else 0, LA, LS, LX,
            )  # fmt: skip


@gluon.jit
def _words(slot, phase, sa, ss, ready):
    """Wait for a slot and read its words."""
    LA: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    LS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    mbarrier.wait(ready.index(slot), phase)
    return sa.index(slot).load(LA), ss.index(slot).load(LS)


@gluon.jit
def _multiply(acc, acc2, w, slot, sx, sy, U: gl.constexpr, P: gl.constexpr, MT: gl.constexpr, E: gl.constexpr):
    """Start the products of operand w with a slot's rows, of which w may have the first columns only."""
    x = sx.index(slot)
    if P < MT:
        x = x.slice(0, P)
    if w.shape[1] < U * 64:
        x = x.slice(0, w.shape[1], 1)
    acc = warpgroup_mma(w, x.permute([1, 0]), acc, is_async=True)
    if E > 0:
        y = sy.index(slot)
        if w.shape[1] < U * 64:
            y = y.slice(0, w.shape[1], 1)
        acc2 = warpgroup_mma(w, y.permute([1, 0]), acc2, is_async=True)
    return acc, acc2


@gluon.jit
def _wait(acc, acc2, w, E: gl.constexpr):
    """For the products that ``_multiply`` has started."""
    if E > 0:
        acc, acc2, w = warpgroup_mma_wait(0, deps=(acc, acc2, w))
    else:
        acc, w = warpgroup_mma_wait(0, deps=(acc, w))
    return acc, acc2, w


@gluon.jit
def _tile(
    alpha_ptr, bias_ptr, out_ptr, order_ptr, gamma_ptr, oc, p0, p1, p2, e, row0, rows, tile0, slot, phase, sx, sy, sa, ss, ready, empty,
    N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, ANY: gl.constexpr, ACT: gl.constexpr, FIRST: gl.constexpr, BIAS: gl.constexpr,
    HALF: gl.constexpr, U: gl.constexpr, P: gl.constexpr, MT: gl.constexpr, E: gl.constexpr, XS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """64 weight rows from row tile tile0 times P + E rows. Returns the ring's next slot and phase."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, P, 16])
    DOA: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    ITER: gl.constexpr = (K + 63) // 64 // U  # whole chunks
    acc = gl.zeros([64, P], gl.float32, MMA)
    if E > 0:
        MMB: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
        acc2 = gl.zeros([64, E], gl.float32, MMB)
    else:
        acc2 = acc
    LOOP: gl.constexpr = (ITER - 1) // 2 * 2 if ITER > 0 else 0
    if AHEAD and ITER > 0:
        a, s = _words(slot, phase, sa, ss, ready)
    # two chunks a turn, so that which half of a scale word a chunk uses is known at compile time. w is the register operand of a running
    # product and stays until that product has been waited for
    if LOOP > 0:
        for _ in range(0, LOOP, 2):
            for j in gl.static_range(2):
                if not AHEAD:
                    a, s = _words(slot, phase, sa, ss, ready)
                w = _decode(a, s, oc, j == 1, U, KIND, ANY, HALF, DOA)
                acc, acc2 = _multiply(acc, acc2, w, slot, sx, sy, U, P, MT, E)
                here = slot
                slot, phase = _next(slot, phase, XS)
                if AHEAD:
                    a, s = _words(slot, phase, sa, ss, ready)
                acc, acc2, w = _wait(acc, acc2, w, E)
                arrive(empty.index(here), increment_count=False)  # each thread for itself: no barrier of the warp group
    # what the epilogue wants is on its way while the last chunks are multiplied
    a0, a1, b0, b1 = epilogue(acc, alpha_ptr, bias_ptr, e, tile0, N, ACT, FIRST, BIAS, 64, P, MMA)
    if E > 0:
        _, _, c0, c1 = epilogue(acc2, alpha_ptr, bias_ptr, e, tile0, N, ACT, FIRST, BIAS, 64, E, MMB)
    for j in gl.static_range(ITER - LOOP):
        if not AHEAD:
            a, s = _words(slot, phase, sa, ss, ready)
        w = _decode(a, s, oc, j == 1, U, KIND, ANY, HALF, DOA)
        acc, acc2 = _multiply(acc, acc2, w, slot, sx, sy, U, P, MT, E)
        here = slot
        slot, phase = _next(slot, phase, XS)
        if AHEAD and j < ITER - LOOP - 1:
            a, s = _words(slot, phase, sa, ss, ready)
        acc, acc2, w = _wait(acc, acc2, w, E)
        arrive(empty.index(here), increment_count=False)
    if (K + 63) // 64 % U != 0:  # half a chunk
        mbarrier.wait(ready.index(slot), phase)
        a = sa.index(slot).slice(0, 128, 1).load(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
        s = ss.index(slot).load(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
        w = _decode(a, s, oc, False, 1, KIND, ANY, HALF, DOA)
        acc, acc2 = _multiply(acc, acc2, w, slot, sx, sy, U, P, MT, E)
        acc, acc2, w = _wait(acc, acc2, w, E)
        arrive(empty.index(slot), increment_count=False)
        slot, phase = _next(slot, phase, XS)
    finish(
        acc, a0, a1, b0, b1, out_ptr, order_ptr, gamma_ptr, p0, p1, p2, row0, gl.minimum(rows, P), tile0,
        N, ACT, FIRST, BIAS, HALF, 4, 64, P, MMA,
    )  # fmt: skip
    if E > 0:
        finish(
            acc2, a0, a1, c0, c1, out_ptr, order_ptr, gamma_ptr, p0, p1, p2, row0 + P, rows - P, tile0,
            N, ACT, FIRST, BIAS, HALF, 4, 64, E, MMB,
        )  # fmt: skip
    return slot, phase


@gluon.jit
def _consume(
    alpha_ptr, bias_ptr, out_ptr, order_ptr, sched_ptr, gamma_ptr, oc, p0, p1, p2, tiles, sx, sy, sa, ss, ready, empty,
    N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, ANY: gl.constexpr, ACT: gl.constexpr, FIRST: gl.constexpr, BIAS: gl.constexpr,
    HALF: gl.constexpr, WHO: gl.constexpr, C: gl.constexpr, U: gl.constexpr, MT: gl.constexpr, LOW: gl.constexpr,
    EX: gl.constexpr, XS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Multiplying warp group WHO of C."""
    GROUPS: gl.constexpr = (row_tiles(N, FIRST, ACT != 0) + 4 * C - 1) // (4 * C)
    slot = 0
    phase = 0
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        block = t // GROUPS
        tile0 = (t % GROUPS) * (4 * C) + WHO * 4
        e, row0, rows = entry(sched_ptr, block)
        if EX > 0 and rows > MT:
            slot, phase = _tile(
                alpha_ptr, bias_ptr, out_ptr, order_ptr, gamma_ptr, oc, p0, p1, p2, e, row0, rows, tile0, slot, phase,
                sx, sy, sa, ss, ready, empty, N, K, KIND, ANY, ACT, FIRST, BIAS, HALF, U, MT, MT, EX, XS, AHEAD,
            )  # fmt: skip
        elif LOW < MT and rows <= LOW:
            slot, phase = _tile(
                alpha_ptr, bias_ptr, out_ptr, order_ptr, gamma_ptr, oc, p0, p1, p2, e, row0, rows, tile0, slot, phase,
                sx, sy, sa, ss, ready, empty, N, K, KIND, ANY, ACT, FIRST, BIAS, HALF, U, LOW, MT, 0, XS, AHEAD,
            )  # fmt: skip
        else:
            slot, phase = _tile(
                alpha_ptr, bias_ptr, out_ptr, order_ptr, gamma_ptr, oc, p0, p1, p2, e, row0, rows, tile0, slot, phase,
                sx, sy, sa, ss, ready, empty, N, K, KIND, ANY, ACT, FIRST, BIAS, HALF, U, MT, MT, 0, XS, AHEAD,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["oc", "topk"], do_not_specialize_on_alignment=["gamma_ptr"])
def grouped_wide(
    x_ptr, w_ptr, s_ptr, alpha_ptr, bias_ptr, out_ptr, order_ptr, sched_ptr, gamma_ptr, oc, p0, p1, p2, topk,
    N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, ANY: gl.constexpr, ACT: gl.constexpr, FIRST: gl.constexpr, BIAS: gl.constexpr,
    HALF: gl.constexpr, C: gl.constexpr, U: gl.constexpr, MT: gl.constexpr, LOW: gl.constexpr, EX: gl.constexpr,
    XS: gl.constexpr, AHEAD: gl.constexpr, TURN: gl.constexpr, RC: gl.constexpr, RP: gl.constexpr, PDL: gl.constexpr = False,
):  # fmt: skip
    """As ``grouped_large``, but the schedule's blocks hold up to MT + EX rows. Any grid: programs take tiles in turn.

    LOW: rows of the smaller tile that a block of at most LOW rows uses (MT for none). RC, RP: registers of threads that multiply and that
    fetch. AHEAD: read a chunk's words before waiting for the product of the one before. TURN: chunks that the fetching warp group takes
    in one turn of its loop, 1 or 4 // U. C: 2 or 3.
    """
    DT: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    SX: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    SP: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    GROUPS: gl.constexpr = (row_tiles(N, FIRST, ACT != 0) + 4 * C - 1) // (4 * C)
    gl_trigger(PDL)
    sx = gl.allocate_shared_memory(DT, [XS, MT, U * 64], SX)
    if EX > 0:
        sy = gl.allocate_shared_memory(DT, [XS, EX, U * 64], SX)
    else:
        sy = sx
    sa = ()
    ss = ()
    for _ in gl.static_range(C):
        sa = sa + (gl.allocate_shared_memory(gl.int32, [XS, 4, U * 128], SP),)  # noqa: RUF005
        ss = ss + (gl.allocate_shared_memory(gl.int32, [XS, 4, 32], SP),)  # noqa: RUF005
    ready, empty = mbarriers(XS, 128, C * 128)
    gl_wait(PDL)
    tiles = gl.load(sched_ptr) * GROUPS
    # a tuple of compile-time values must be written where it is used: bound to a name, they would become run-time values
    if C == 2:
        gl.warp_specialize(
            [
                (_consume, (alpha_ptr, bias_ptr, out_ptr, order_ptr, sched_ptr, gamma_ptr, oc, p0, p1, p2, tiles, sx, sy, sa[0], ss[0],
                            ready, empty, N, K, KIND, ANY, ACT, FIRST, BIAS, HALF, 0, C, U, MT, LOW, EX, XS, AHEAD)),
                (_consume, (alpha_ptr, bias_ptr, out_ptr, order_ptr, sched_ptr, gamma_ptr, oc, p0, p1, p2, tiles, sx, sy, sa[1], ss[1],
                            ready, empty, N, K, KIND, ANY, ACT, FIRST, BIAS, HALF, 1, C, U, MT, LOW, EX, XS, AHEAD)),
                (_produce, (x_ptr, w_ptr, s_ptr, order_ptr, sched_ptr, topk, tiles, sx, sy, sa, ss, ready, empty,
                            N, K, KIND, ACT, FIRST, C, U, MT, EX, XS, TURN)),
            ], [4, 4], [RC, RP],
        )  # fmt: skip
    else:
        gl.static_assert(C == 3)
        gl.warp_specialize(
            [
                (_consume, (alpha_ptr, bias_ptr, out_ptr, order_ptr, sched_ptr, gamma_ptr, oc, p0, p1, p2, tiles, sx, sy, sa[0], ss[0],
                            ready, empty, N, K, KIND, ANY, ACT, FIRST, BIAS, HALF, 0, C, U, MT, LOW, EX, XS, AHEAD)),
                (_consume, (alpha_ptr, bias_ptr, out_ptr, order_ptr, sched_ptr, gamma_ptr, oc, p0, p1, p2, tiles, sx, sy, sa[1], ss[1],
                            ready, empty, N, K, KIND, ANY, ACT, FIRST, BIAS, HALF, 1, C, U, MT, LOW, EX, XS, AHEAD)),
                (_consume, (alpha_ptr, bias_ptr, out_ptr, order_ptr, sched_ptr, gamma_ptr, oc, p0, p1, p2, tiles, sx, sy, sa[2], ss[2],
                            ready, empty, N, K, KIND, ANY, ACT, FIRST, BIAS, HALF, 2, C, U, MT, LOW, EX, XS, AHEAD)),
                (_produce, (x_ptr, w_ptr, s_ptr, order_ptr, sched_ptr, topk, tiles, sx, sy, sa, ss, ready, empty,
                            N, K, KIND, ACT, FIRST, C, U, MT, EX, XS, TURN)),
            ], [4, 4, 4], [RC, RC, RP],
        )  # fmt: skip
