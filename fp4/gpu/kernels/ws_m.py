"""Warp-specialised W4A16 product on Hopper: one warp brings x by TMA, NW warps decode W and multiply.

As in ``wide_m``, y^T = W x^T with the decoded weight as the register operand and x in the order that ``permute_x`` writes. What differs:

* x comes through a ring of XS slots (SK tiles of 64 columns each) with a full and an empty mbarrier a slot. No thread of the multiplying
  warps copies x, and none waits for another warp's copy or for the last reader of a slot.
* A grid of G blocks (``dense_plans.share``) takes all steps: the steps (tile, k) in one line are cut into G runs. A block whose run ends
  inside a tile leaves fp32 sums in its part of a workspace; the last block to arrive adds them in the order of k, so the result does not
  depend on the order of arrival. Runs of whole tiles need no workspace.
* NAT: x stays as it is, and W comes into its order in registers (``natural``).

Triton puts a barrier of the partition between two waits on the ring, so SK = 2 halves them. A second warp group as a partition of its own
would need none, but ptxas then serialises its MMAs: with the loop over partitions around them it counts their registers against the
smallest ``setmaxnreg`` of all partitions (C7512).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from fp4.gpu.kernels.gluon_decode import barrier, unpack_scales
from fp4.gpu.kernels.natural import quad_scales
from fp4.gpu.kernels.operand import at_scales, at_words, split_scales, tile_operand
from fp4.gpu.kernels.pdl import gl_wait
from fp4.gpu.kernels.ring import following, mbarriers, release, tma_load


@gluon.jit
def start(c, total, blocks):
    """The first unit of block c: total units in runs whose lengths differ by at most one, long runs first."""
    q = total // blocks
    return c * q + gl.minimum(c, total - q * blocks)


@gluon.jit
def owner(w, total, blocks):
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
def fetch(base, offset, live, more, EVEN: gl.constexpr):
    """Words at base + offset, streamed; zeros where this step does not exist (more) or, unless EVEN, the row does not (live)."""
    on = gl.full(offset.shape, more, gl.int1, layout=offset.type.layout)
    if not EVEN:
        on = on & live
    return gl.load(base + offset, mask=on, other=0, eviction_policy="evict_first")


@gluon.jit
def store_tile(r, yp, step, live_n, live_m, BT: gl.constexpr, BN: gl.constexpr, NW: gl.constexpr):
    """A tile r [BN rows of W, BT rows of x] of y, whose rows are ``step`` numbers apart, to yp; live: rows that exist."""
    LY: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, NW], [0, 1])
    t = gl.convert_layout(r, LY)
    rn = gl.arange(0, BN, layout=gl.SliceLayout(1, LY))
    rm = gl.arange(0, BT, layout=gl.SliceLayout(0, LY))
    gl.store(yp + (rm * step)[None, :] + rn[:, None], t, mask=(rm < live_m)[None, :] & (rn < live_n)[:, None])


@gluon.jit
def keep_part(r, part_ptr, mine, BT: gl.constexpr, BN: gl.constexpr, MMA: gl.constexpr):
    """The sums r of a piece of a tile to place ``mine`` of the workspace; all of it is there when this returns."""
    pr = gl.arange(0, BN, layout=gl.SliceLayout(1, MMA))
    pc = gl.arange(0, BT, layout=gl.SliceLayout(0, MMA))
    gl.store(part_ptr + mine.to(gl.int64) * (BN * BT) + (pc * BN)[None, :] + pr[:, None], r)
    barrier()


@gluon.jit
def add_parts(p0, part_ptr, o, lo, hi, BT: gl.constexpr, BN: gl.constexpr):
    """At offsets o of a tile the pieces that blocks lo .. hi have kept, that of lo at p0, added in the order of k."""
    t = gl.load(p0 + o, cache_modifier=".cg")
    pj = part_ptr + lo.to(gl.int64) * (2 * BN * BT)
    for _ in range(lo, hi):
        pj += 2 * BN * BT
        t += gl.load(pj + o, cache_modifier=".cg")
    return t


@gluon.jit
def _consume(
    sx, full, empty, w_ptr, s_ptr, alpha_ptr, bias_ptr, y_ptr, part_ptr, count_ptr, M, N, KT, oc, pid, blocks, unit, w0, w1, nk, tiles_m,
    NW: gl.constexpr, KIND: gl.constexpr, ANY: gl.constexpr, HALF: gl.constexpr, HAS_BIAS: gl.constexpr, EVEN: gl.constexpr,
    BT: gl.constexpr, R: gl.constexpr, U: gl.constexpr, SK: gl.constexpr, XS: gl.constexpr, NAT: gl.constexpr,
):  # fmt: skip
    """The NW warps that decode and multiply: R * NW * 16 rows of W, BT rows of x a tile."""
    BN: gl.constexpr = R * NW * 16
    DT: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    LP: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, NW], [0, 1])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, BT, 16])
    DOA: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    L: gl.constexpr = 64 if KIND == 16 else 32
    KB = (KT + 3) // 4
    NT = (N + 15) // 16
    ra, oa, quad = at_words(KT, NW, R)
    rs, os = at_scales(KB, KIND, U, NAT, NW, R)
    tile = w0 // nk
    k = w0 - tile * nk
    pn = tile // tiles_m
    pm = tile - pn * tiles_m
    rt = pn * (R * NW)
    kt = k * U
    wp = w_ptr + (rt.to(gl.int64) * KT + kt) * 128
    a0 = fetch(wp, oa, rt + ra < NT, kt < KT, EVEN)
    a1 = fetch(wp + 128, oa, rt + ra < NT, kt + 1 < KT, EVEN)
    a2 = a0
    a3 = a1
    if U == 4:
        a2 = fetch(wp + 256, oa, rt + ra < NT, kt + 2 < KT, EVEN)
        a3 = fetch(wp + 384, oa, rt + ra < NT, kt + 3 < KT, EVEN)
    s = fetch(s_ptr + (rt.to(gl.int64) * KB * L + (kt // 4) * L + (kt % 4) // 2), os, rt + rs < NT, kt < KT, EVEN)
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
            s = fetch(s_ptr + (rt.to(gl.int64) * KB * L + (kt // 4) * L + (kt % 4) // 2), os, rt + rs < NT, go & (kt < KT), EVEN)
            s0, s1 = quad_scales(scale, NW, R, 64 // KIND) if NAT else split_scales(scale, NW, R, U)
            q0, q1, q2, q3 = unpack_scales(s0, oc, KIND, ANY, HALF)
            for u in gl.static_range(U):
                # decode the words of this step and fetch those of the same step of the next round in their place
                if u == 2:
                    q0, q1, q2, q3 = unpack_scales(s1, oc, KIND, ANY, HALF)
                if u == 0:
                    op = tile_operand(a0, q0, q2, quad, NAT, HALF, NW, R, DOA)
                    a0 = fetch(wp, oa, live, go & (kt < KT), EVEN)
                if u == 1:
                    op = tile_operand(a1, q1, q3, quad, NAT, HALF, NW, R, DOA)
                    a1 = fetch(wp + 128, oa, live, go & (kt + 1 < KT), EVEN)
                if u == 2:
                    op = tile_operand(a2, q0, q2, quad, NAT, HALF, NW, R, DOA)
                    a2 = fetch(wp + 256, oa, live, go & (kt + 2 < KT), EVEN)
                if u == 3:
                    op = tile_operand(a3, q1, q3, quad, NAT, HALF, NW, R, DOA)
                    a3 = fetch(wp + 384, oa, live, go & (kt + 3 < KT), EVEN)
                if u % SK == 0:
                    mbarrier.wait(full.index(slot), phase)
                acc = warpgroup_mma(op, sx.index(slot * SK + u % SK).permute([1, 0]), acc, is_async=True)
                acc, before = warpgroup_mma_wait(num_outstanding=1, deps=[acc, before])
                if u % SK == 0:  # noqa: SIM102 - one condition is known at compile time
                    if (kk > k) | (u > 0):
                        release(empty, slot, XS)
                before = op
                if u % SK == SK - 1:
                    slot, phase = following(slot, phase, XS)
        r, before = warpgroup_mma_wait(num_outstanding=0, deps=[acc, before])
        release(empty, slot, XS)
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
            store_tile(r.to(y_ptr.dtype.element_ty), yp, step, live_n, live_m, BT, BN, NW)
        else:
            mine = gl.where(w == w0, 2 * pid, 2 * pid + 1)
            keep_part(r, part_ptr, mine, BT, BN, MMA)
            tile = pn * tiles_m + pm
            units = nk * tiles_m * ((N + BN - 1) // BN) // unit
            lo = owner(tile * nk // unit, units, blocks)
            hi = owner((tile * nk + nk - 1) // unit, units, blocks)
            old = gl.atomic_add(count_ptr + tile, 1, sem="acq_rel")
            if old == hi - lo:
                # the run of the first block may have begun in an earlier tile, the others begin here
                early = start(lo, units, blocks) * unit < tile * nk
                p0 = part_ptr + gl.where(early, 2 * lo + 1, 2 * lo).to(gl.int64) * (BN * BT)
                al = gl.load(alpha_ptr)
                rn = gl.arange(0, BN, layout=gl.SliceLayout(1, LP))
                # 32 registers a thread at a time: each round of loads waits for L2 once
                COLS: gl.constexpr = min(BT, 1024 * NW // BN)
                for c in range(0, BT, COLS):
                    rm = c + gl.arange(0, COLS, layout=gl.SliceLayout(0, LP))
                    t = add_parts(p0, part_ptr, (rm * BN)[None, :] + rn[:, None], lo, hi, BT, BN)
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
    w0 = start(pid, units, blocks) * unit
    w1 = start(pid + 1, units, blocks) * unit
    sx = gl.allocate_shared_memory(DT, [XS * SK, BT, 64], SX)
    full, empty = mbarriers(XS, 1, NW * 32)
    gl.warp_specialize(
        [
            (_consume, (sx, full, empty, w_ptr, s_ptr, alpha_ptr, bias_ptr, y_ptr, part_ptr, count_ptr, M, N, KT, oc, pid, blocks, unit,
                        w0, w1, nk, tiles_m, NW, KIND, ANY, HALF, HAS_BIAS, EVEN, BT, R, U, SK, XS, NAT)),
            (_produce, (xd, sx, full, empty, w0, w1, nk, tiles_m, BT, U, SK, XS, 64)),
        ],
        [1],
        [24],
    )  # fmt: skip
