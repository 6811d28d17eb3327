"""Warp-specialised W4A16 product on Hopper: one warp brings x by TMA, NW warps decode W and multiply.

As in ``wide_m``, y^T = W x^T with the decoded weight as the register operand and x in the order that ``permute_x`` writes. What differs:

* x comes through a ring of XS slots (SK tiles of 64 columns each) with a full and an empty mbarrier a slot. No thread of the multiplying
  warps copies x, and none waits for another warp's copy or for the last reader of a slot.
* A grid of G blocks (``share``) takes all steps: the steps (tile, k) in one line are cut into G runs. A block whose run ends inside a tile
  leaves fp32 sums in its part of a workspace; the last block to arrive adds them in the order of k, so the result does not depend on the
  order of arrival. Runs of whole tiles need no workspace.
* NAT: x stays as it is, and W comes into its order in registers (``natural``).

Triton puts a barrier of the partition between two waits on the ring, so SK = 2 halves them. A second warp group as a partition of its own
would need none, but ptxas then serialises its MMAs: with the loop over partitions around them it counts their registers against the
smallest ``setmaxnreg`` of all partitions (C7512).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy as _ac
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from fp4.gpu.kernels.gluon_decode import barrier, unpack_scales
from fp4.gpu.kernels.natural import natural_operand, quad_lane, quad_scales
from fp4.gpu.kernels.pdl import gl_wait
from fp4.gpu.kernels.wide_m import _operand, _split_scales

arrive = _ac.mbarrier_arrive
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


def share(tiles: int, steps: int, room: int, cut: int, most: int) -> tuple[int, bool]:
    """(blocks, whether their runs cut tiles) for tiles of so many steps and room for so many blocks at a time.

    cut 0: runs of whole tiles. 1: all blocks get the same number of steps. 2: where a tile can have several blocks it is cut into as many
    equal parts, at most ``most`` (one block reads the sums of all parts, which takes time that grows with the tile), else as 0.
    """
    if cut == 1 and tiles % room:
        return min(room, tiles * steps), True
    parts = min(room // tiles, most, steps) if cut == 2 else 1
    return (parts * tiles, True) if parts > 1 else (min(room, tiles), False)


@gluon.jit
def _start(c, total, blocks):
    """The first unit of block c: total units in runs whose lengths differ by at most one, long runs first."""
    q = total // blocks
    return c * q + gl.minimum(c, total - q * blocks)


@gluon.jit
def _owner(w, total, blocks):
    """The block that has unit w."""
    q = total // blocks
    r = total - q * blocks
    cut = r * (q + 1)
    return gl.where(w < cut, w // (q + 1), r + (w - cut) // q)


@gluon.jit
def _produce(
    xd, sx, full, empty, w0, w1, nk, tiles_m, BT: gl.constexpr, U: gl.constexpr, SK: gl.constexpr, XS: gl.constexpr, COLS: gl.constexpr
):  # fmt: skip
    """Fill slot after slot with the tiles of x of steps w0 .. w1, U tiles of COLS columns (128 bytes) each; zeros outside x."""
    gl_wait(True)  # x comes from the kernel in front
    tile = w0 // nk
    column = (w0 - tile * nk) * (U * COLS)
    columns = nk * (U * COLS)
    row = (tile % tiles_m) * BT
    slot = 0
    phase = 1
    for _ in range(0, (w1 - w0) * (U // SK)):
        mbarrier.wait(empty.index(slot), phase)
        mbarrier.expect(full.index(slot), SK * BT * 128)
        for j in gl.static_range(SK):
            tma_load(xd, [row, column + j * COLS], full.index(slot), sx.index(slot * SK + j))
        slot += 1
        if slot == XS:
            slot = 0
            phase ^= 1
        column += SK * COLS
        if column == columns:
            column = 0
            row += BT
            if row == tiles_m * BT:
                row = 0


@gluon.jit
def _fetch(base, offset, live, more, EVEN: gl.constexpr):
    """Words at base + offset, streamed; zeros where this step does not exist (more) or, unless EVEN, the row does not (live)."""
    on = gl.full(offset.shape, more, gl.int1, layout=offset.type.layout)
    if not EVEN:
        on = on & live
    return gl.load(base + offset, mask=on, other=0, eviction_policy="evict_first")


@gluon.jit
def at_scales(KB, KIND: gl.constexpr, NAT: gl.constexpr, NW: gl.constexpr, R: gl.constexpr):
    """Row tile, offset of the scale word in four steps: of a lane's own columns, or (NAT) of all columns of its rows."""
    G: gl.constexpr = 64 // KIND
    W: gl.constexpr = 2 * G if NAT else 2
    LS: gl.constexpr = gl.BlockedLayout([1, W], [1, 32], [NW, 1], [1, 0])
    warp = gl.arange(0, NW, layout=gl.SliceLayout(1, LS))[:, None]
    i = gl.arange(0, R * 32 * W, layout=gl.SliceLayout(0, LS))[None, :]
    row = (i // (32 * W)) * NW + warp
    first = i % (32 * W) // W
    if NAT:
        first = first // 4
    elif KIND == 32:
        first = first // 2
    return row, row * (KB * 16 * G) + first * W + i % W


@gluon.jit
def tile_operand(a, e0, e1, lane, NAT: gl.constexpr, HALF: gl.constexpr, NW: gl.constexpr, R: gl.constexpr, DOA: gl.constexpr):
    """The words of a step as operand A, in the order of x."""
    if NAT:
        return natural_operand(a, e0, e1, lane, HALF, NW, R, DOA)
    else:
        return _operand(a.reshape([NW, R, 32, 4]), e0, e1, NW, R, HALF, DOA)


@gluon.jit
def _release(empty, slot, XS: gl.constexpr):
    """Hand the slot in front of ``slot`` back to the producer.

    Its number comes from ``slot``, not from a variable that remembers it: Triton carries a variable through a loop only if tracing the body
    once changes it, and with one slot a round ``last = slot`` is an alias of the slot in front of the loop. All rounds then released
    that one, and the producer waited for ever.
    """
    arrive(empty.index(gl.where(slot == 0, XS - 1, slot - 1)), increment_count=False)


@gluon.jit
def _consume(
    sx, full, empty, w_ptr, s_ptr, alpha_ptr, bias_ptr, y_ptr, part_ptr, count_ptr, M, N, KT, oc, pid, blocks, unit, w0, w1, nk, tiles_m,
    NW: gl.constexpr, KIND: gl.constexpr, ANY: gl.constexpr, HALF: gl.constexpr, HAS_BIAS: gl.constexpr, EVEN: gl.constexpr,
    BT: gl.constexpr, R: gl.constexpr, U: gl.constexpr, SK: gl.constexpr, XS: gl.constexpr, NAT: gl.constexpr,
):  # fmt: skip
    """The NW warps that decode and multiply: R * NW * 16 rows of W, BT rows of x a tile."""
    BN: gl.constexpr = R * NW * 16
    DT: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    LA: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [NW, 1], [1, 0])
    LS: gl.constexpr = gl.BlockedLayout([1, U // 2], [1, 32], [NW, 1], [1, 0])
    LY: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, NW], [0, 1])
    LP: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, NW], [0, 1])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, BT, 16])
    DOA: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    L: gl.constexpr = 64 if KIND == 16 else 32
    KB = (KT + 3) // 4
    NT = (N + 15) // 16
    wn = gl.arange(0, NW, layout=gl.SliceLayout(1, LA))[:, None]
    xa = gl.arange(0, R * 128, layout=gl.SliceLayout(0, LA))[None, :]
    ra = (xa // 128) * NW + wn
    oa = ra * (KT * 128) + xa % 128
    ws = gl.arange(0, NW, layout=gl.SliceLayout(1, LS))[:, None]
    xs = gl.arange(0, R * U * 16, layout=gl.SliceLayout(0, LS))[None, :]
    rs = (xs // (U * 16)) * NW + ws
    lane = (xs % (U * 16)) // (U // 2)
    if KIND == 32:
        lane = lane // 2
    os = rs * (KB * L) + lane * 2 + xs % (U // 2)
    quad = ra
    if NAT:
        rs, os = at_scales(KB, KIND, NAT, NW, R)
        quad = quad_lane(xa % 128 + wn * 0, NW, R)
    tile = w0 // nk
    k = w0 - tile * nk
    pn = tile // tiles_m
    pm = tile - pn * tiles_m
    rt = pn * (R * NW)
    kt = k * U
    wp = w_ptr + (rt.to(gl.int64) * KT + kt) * 128
    a0 = _fetch(wp, oa, rt + ra < NT, kt < KT, EVEN)
    a1 = _fetch(wp + 128, oa, rt + ra < NT, kt + 1 < KT, EVEN)
    a2 = a0
    a3 = a1
    if U == 4:
        a2 = _fetch(wp + 256, oa, rt + ra < NT, kt + 2 < KT, EVEN)
        a3 = _fetch(wp + 384, oa, rt + ra < NT, kt + 3 < KT, EVEN)
    s = _fetch(s_ptr + (rt.to(gl.int64) * KB * L + (kt // 4) * L + (kt % 4) // 2), os, rt + rs < NT, kt < KT, EVEN)
    slot = 0
    phase = 0
    w = w0
    for _ in range(tile, (w1 - 1) // nk + 1):
        kend = gl.minimum(nk, k + w1 - w)
        more = w + (kend - k) < w1
        turn = pm == tiles_m - 1
        npm = gl.where(turn, 0, pm + 1)
        npn = gl.where(turn, pn + 1, pn)
        acc = gl.zeros([BN, BT], gl.float32, MMA)
        before = gl.zeros([BN, 64], DT, DOA)
        for kk in range(k, kend):
            scale = s
            end = kk == kend - 1
            kt = gl.where(end, 0, (kk + 1) * U)
            rt = gl.where(end, npn, pn) * (R * NW)
            go = more | (kk < kend - 1)
            wp = w_ptr + (rt.to(gl.int64) * KT + kt) * 128
            live = rt + ra < NT
            s = _fetch(s_ptr + (rt.to(gl.int64) * KB * L + (kt // 4) * L + (kt % 4) // 2), os, rt + rs < NT, go & (kt < KT), EVEN)
            s0, s1 = quad_scales(scale, NW, R, 64 // KIND) if NAT else _split_scales(scale, NW, R, U)
            q0, q1, q2, q3 = unpack_scales(s0, oc, KIND, ANY, HALF)
            for u in gl.static_range(U):
                # decode the words of this step and fetch those of the same step of the next round in their place
                if u == 2:
                    q0, q1, q2, q3 = unpack_scales(s1, oc, KIND, ANY, HALF)
                if u == 0:
                    op = tile_operand(a0, q0, q2, quad, NAT, HALF, NW, R, DOA)
                    a0 = _fetch(wp, oa, live, go & (kt < KT), EVEN)
                if u == 1:
                    op = tile_operand(a1, q1, q3, quad, NAT, HALF, NW, R, DOA)
                    a1 = _fetch(wp + 128, oa, live, go & (kt + 1 < KT), EVEN)
                if u == 2:
                    op = tile_operand(a2, q0, q2, quad, NAT, HALF, NW, R, DOA)
                    a2 = _fetch(wp + 256, oa, live, go & (kt + 2 < KT), EVEN)
                if u == 3:
                    op = tile_operand(a3, q1, q3, quad, NAT, HALF, NW, R, DOA)
                    a3 = _fetch(wp + 384, oa, live, go & (kt + 3 < KT), EVEN)
                if u % SK == 0:
                    mbarrier.wait(full.index(slot), phase)
                acc = warpgroup_mma(op, sx.index(slot * SK + u % SK).permute([1, 0]), acc, is_async=True)
                acc, before = warpgroup_mma_wait(num_outstanding=1, deps=[acc, before])
                if u % SK == 0:  # noqa: SIM102 - one condition is known at compile time
                    if (kk > k) | (u > 0):
                        _release(empty, slot, XS)
                before = op
                if u % SK == SK - 1:
                    wrap = slot == XS - 1
                    slot = gl.where(wrap, 0, slot + 1)
                    phase = gl.where(wrap, phase ^ 1, phase)
        r, before = warpgroup_mma_wait(num_outstanding=0, deps=[acc, before])
        _release(empty, slot, XS)
        # sizes and pointers meet a scalar before they meet a tensor: Triton 3.6 knows nothing of the bare arguments of a partition
        rn0 = pn * BN
        live_n = N - rn0
        live_m = M - pm * BT
        step = N * 1
        yp = y_ptr + ((pm * BT).to(gl.int64) * N + rn0)
        bp = bias_ptr + rn0
        if (k == 0) & (kend == nk):
            r = r * gl.load(alpha_ptr)
            if HAS_BIAS:
                rb = gl.arange(0, BN, layout=gl.SliceLayout(1, MMA))
                r += gl.load(bp + rb, mask=rb < live_n, other=0.0).to(gl.float32)[:, None]
            t = gl.convert_layout(r.to(y_ptr.dtype.element_ty), LY)
            rn = gl.arange(0, BN, layout=gl.SliceLayout(1, LY))
            rm = gl.arange(0, BT, layout=gl.SliceLayout(0, LY))
            gl.store(yp + (rm * step)[None, :] + rn[:, None], t, mask=(rm < live_m)[None, :] & (rn < live_n)[:, None])
        else:
            mine = gl.where(w == w0, 2 * pid, 2 * pid + 1)
            pr = gl.arange(0, BN, layout=gl.SliceLayout(1, MMA))
            pc = gl.arange(0, BT, layout=gl.SliceLayout(0, MMA))
            gl.store(part_ptr + mine.to(gl.int64) * (BN * BT) + (pc * BN)[None, :] + pr[:, None], r)
            barrier()
            tile = pn * tiles_m + pm
            units = nk * tiles_m * ((N + BN - 1) // BN) // unit
            lo = _owner(tile * nk // unit, units, blocks)
            hi = _owner((tile * nk + nk - 1) // unit, units, blocks)
            old = gl.atomic_add(count_ptr + tile, 1, sem="acq_rel")
            if old == hi - lo:
                # the run of the first block may have begun in an earlier tile, the others begin here
                early = _start(lo, units, blocks) * unit < tile * nk
                p0 = part_ptr + gl.where(early, 2 * lo + 1, 2 * lo).to(gl.int64) * (BN * BT)
                al = gl.load(alpha_ptr)
                rn = gl.arange(0, BN, layout=gl.SliceLayout(1, LP))
                # 32 registers a thread at a time: each round of loads waits for L2 once
                COLS: gl.constexpr = min(BT, 1024 * NW // BN)
                for c in range(0, BT, COLS):
                    rm = c + gl.arange(0, COLS, layout=gl.SliceLayout(0, LP))
                    o = (rm * BN)[None, :] + rn[:, None]
                    t = gl.load(p0 + o, cache_modifier=".cg")
                    pj = part_ptr + lo.to(gl.int64) * (2 * BN * BT)
                    for _ in range(lo, hi):
                        pj += 2 * BN * BT
                        t += gl.load(pj + o, cache_modifier=".cg")
                    t = t * al
                    if HAS_BIAS:
                        t += gl.load(bp + rn, mask=rn < live_n, other=0.0).to(gl.float32)[:, None]
                    mk = (rm < live_m)[None, :] & (rn < live_n)[:, None]
                    gl.store(yp + (rm * step)[None, :] + rn[:, None], t.to(y_ptr.dtype.element_ty), mask=mk)
        w += kend - k
        k = 0
        pm = npm
        pn = npn


@gluon.jit
def ws_m(
    xd, w_ptr, s_ptr, alpha_ptr, bias_ptr, y_ptr, part_ptr, count_ptr, M, N, KT, oc, unit,
    KIND: gl.constexpr, ANY: gl.constexpr, HALF: gl.constexpr, HAS_BIAS: gl.constexpr, EVEN: gl.constexpr, BT: gl.constexpr,
    R: gl.constexpr, U: gl.constexpr, SK: gl.constexpr, XS: gl.constexpr, NAT: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """xd: descriptor of x [M, KT * 64] as ``permute_x`` wrote it or (NAT, U == 4) of x [M, K] as it is, boxes [BT, 64].

    A tile is R * NW * 16 rows of W times BT rows of x. Grid (G,), G <= tiles * ceil(KT / U) / unit. unit: steps of U * 64 columns that
    stay together, a divisor of ceil(KT / U); equal to it, runs are whole tiles, else part_ptr has 2 G R NW 16 BT floats and count_ptr
    as many zeros as tiles. Neighbours in a run share W. EVEN: N % (R NW 16) == 0 and KT % U == 0.
    """
    DT: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    SX: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    pid = gl.program_id(0)
    blocks = gl.num_programs(0)
    nk = (KT + U - 1) // U
    tiles_m = (M + BT - 1) // BT
    units = nk * tiles_m * ((N + R * NW * 16 - 1) // (R * NW * 16)) // unit
    w0 = _start(pid, units, blocks) * unit
    w1 = _start(pid + 1, units, blocks) * unit
    sx = gl.allocate_shared_memory(DT, [XS * SK, BT, 64], SX)
    full = gl.allocate_shared_memory(gl.int64, [XS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [XS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(XS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=NW * 32)
    gl.warp_specialize(
        [
            (_consume, (sx, full, empty, w_ptr, s_ptr, alpha_ptr, bias_ptr, y_ptr, part_ptr, count_ptr, M, N, KT, oc, pid, blocks, unit,
                        w0, w1, nk, tiles_m, NW, KIND, ANY, HALF, HAS_BIAS, EVEN, BT, R, U, SK, XS, NAT)),
            (_produce, (xd, sx, full, empty, w0, w1, nk, tiles_m, BT, U, SK, XS, 64)),
        ],
        [1],
        [24],
    )  # fmt: skip
