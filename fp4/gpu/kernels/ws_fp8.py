"""W4A8 on Hopper with TMA and a warp for it: the decode of ``decode_fp8``, the pipeline of ``ws_m``.

y^T = W x^T as there, with e4m3 x in the order that ``quantize_x`` writes. A step is 128 columns (two tiles of W, 128 bytes of a row of x);
a round is two steps, so that two sets of operand registers alternate. A run is either whole tiles, one in ``blocks`` of them, or (CUT) a
piece of the line of all (tile, step), whose sums of cut tiles meet in a workspace as in ``ws_m``.

Tiles go by groups of GM rows of tiles of x, inside a group down x first: what runs at one time shares few tiles of x and of W.
TS: y leaves by TMA from shared memory of its own, behind the back of the next tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from fp4.gpu.kernels import decode_fp8 as _d
from fp4.gpu.kernels.pdl import gl_wait
from fp4.gpu.kernels.ring import following, into_buffer, mbarriers, release, tma_load, tma_store
from fp4.gpu.kernels.ws_m import add_parts, fetch, keep_part, owner, start, store_tile

TABLES = gl.constexpr(_d.TABLES)
TABLES_C = gl.constexpr(_d.TABLES_CONSTRAINTS)
WORDS = gl.constexpr(_d.WORDS)
WORDS_C = gl.constexpr(_d.WORDS_CONSTRAINTS)
I8 = gl.constexpr((gl.int32,) * 8)
F8 = gl.constexpr((gl.float8e4nv,) * 8)


@gluon.jit
def _each_word(p0, p1, like, NW: gl.constexpr, R: gl.constexpr):
    """A table register of tiles p = 0, 1, i32 [NW, R*32] each -> one for every word, [NW, R, 2, 32, 4]."""
    t = gl.join(p0, p1).reshape([NW, R, 32, 2]).permute([0, 1, 3, 2]).reshape([NW, R, 2, 32, 1])
    _, t = gl.broadcast(like, gl.convert_layout(t, like.type.layout, assert_trivial=True))
    return t


@gluon.jit
def operand8(a, scale, base, NW: gl.constexpr, R: gl.constexpr, DOA: gl.constexpr):
    """a: i32 [NW, R*2*128] words, scale, base: i32 [NW, R*32] words -> e4m3 [R*NW*16, 128] as operand A."""
    a0, b0, a1, b1, c0, d0, c1, d1 = gl.inline_asm_elementwise(TABLES, TABLES_C, [scale, base], dtype=I8, is_pure=True, pack=1)
    w = a.reshape([NW, R, 2, 32, 4])
    t = [w, _each_word(a0, a1, w, NW, R), _each_word(b0, b1, w, NW, R), _each_word(c0, c1, w, NW, R), _each_word(d0, d1, w, NW, R)]
    # pack = 4: the four words of a lane; output i = (s, e), its four elements are the adjacent codes j
    o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(WORDS, WORDS_C, t, dtype=F8, is_pure=True, pack=4)
    o = gl.join(gl.join(gl.join(o0, o1), gl.join(o4, o5)), gl.join(gl.join(o2, o3), gl.join(o6, o7)))
    # NW R U g t j e s1 s0 -> R NW e g U s1 s0 t j
    o = o.reshape([NW, R, 2, 8, 4, 4, 2, 2, 2]).permute([1, 0, 6, 3, 2, 7, 8, 4, 5]).reshape([R * NW * 16, 128])
    return gl.convert_layout(o, DOA, assert_trivial=True)


@gluon.jit
def _place(tile, tiles_m, tiles_n, GM: gl.constexpr):
    """Tile of x and tile of W of the tile of y of that number."""
    group = tile // (tiles_n * GM)
    rest = tile - group * (tiles_n * GM)
    size = gl.minimum(tiles_m - group * GM, GM)
    pn = rest // size
    return group * GM + rest - pn * size, pn


@gluon.jit
def _prefetch(w_ptr, s_ptr, rt, round_, N, KT, live, TILES: gl.constexpr):
    """Bring the words and scales of one round of TILES row tiles from rt on into L2, a row tile a lane; only a hint."""
    LANE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, 32, layout=LANE)
    on = ((lane < TILES) & (rt + lane < (N + 15) // 16) & live).to(gl.int32)
    row = (rt + lane).to(gl.int64)
    w = w_ptr + (row * KT + round_ * 4) * 128
    s = s_ptr + (row * ((KT + 3) // 4) + round_) * 32
    size = lane * 0 + gl.minimum(KT - round_ * 4, 4) * 512
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p,$4,0; @p cp.async.bulk.prefetch.L2.global [$1],$3; @p prefetch.global.L2 [$2]; mov.u32 $0,0; }",
        "=r,l,l,r,r", [w, s, size, on], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _produce8(
    xd, sx, full, empty, w_ptr, s_ptr, N, KT, tile, hop, k, left, nk, tiles_m, tiles_n,
    BT: gl.constexpr, TILES: gl.constexpr, SK: gl.constexpr, XS: gl.constexpr, GM: gl.constexpr, PF: gl.constexpr,
):  # fmt: skip
    """Fill slot after slot with the boxes of x of ``left`` rounds, the first of them round k of ``tile``; W's part of a round, which the
    warps that multiply load themselves, comes into L2 meanwhile, PF rounds ahead of x."""
    slot = 0
    phase = 1
    pm, pn = _place(tile, tiles_m, tiles_n, GM)
    if PF >= 0:
        for i in gl.static_range(PF):
            _prefetch(w_ptr, s_ptr, pn * TILES, k + i, N, KT, (k + i < nk) & (i < left), TILES)
    gl_wait(True)  # x comes from the kernel in front
    ahead = k + PF
    ptile = tile
    ppn = pn
    for i in range(0, left):
        if PF >= 0:
            if ahead >= nk:
                ahead -= nk
                ptile += hop
                _, ppn = _place(gl.minimum(ptile, tiles_m * tiles_n - 1), tiles_m, tiles_n, GM)
            _prefetch(w_ptr, s_ptr, ppn * TILES, ahead, N, KT, i + PF < left, TILES)
            ahead += 1
        for h in gl.static_range(2 // SK):
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(full.index(slot), SK * BT * 128)
            for j in gl.static_range(SK):
                tma_load(xd, [pm * BT, k * 256 + (h * SK + j) * 128], full.index(slot), sx.index(slot * SK + j))
            slot += 1
            if slot == XS:
                slot = 0
                phase ^= 1
        k += 1
        if k == nk:
            k = 0
            tile += hop
            pm, pn = _place(gl.minimum(tile, tiles_m * tiles_n - 1), tiles_m, tiles_n, GM)


@gluon.jit
def _store_tile(
    r, sy, yd, yp, bp, ws_ptr, xs_ptr, rn0, rm0, live_n, live_m, step, Y: gl.constexpr, HAS_BIAS: gl.constexpr, TS: gl.constexpr,
    BT: gl.constexpr, BN: gl.constexpr, NW: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """The sums r of a whole tile, scaled, to y."""
    rb = gl.arange(0, BN, layout=gl.SliceLayout(1, MMA))
    cb = gl.arange(0, BT, layout=gl.SliceLayout(0, MMA))
    r = r * gl.load(ws_ptr + rn0 + rb, mask=rb < live_n, other=0.0)[:, None]
    r = r * gl.load(xs_ptr + rm0 + cb, mask=cb < live_m, other=0.0)[None, :]
    if HAS_BIAS:
        r += gl.load(bp + rb, mask=rb < live_n, other=0.0).to(gl.float32)[:, None]
    if TS:
        into_buffer(sy, r)
        tma_store(yd, [rm0, rn0], sy)
    else:
        store_tile(r.to(Y), yp, step, live_n, live_m, BT, BN, NW)


@gluon.jit
def _store_part(
    r, part_ptr, count_ptr, mine, lo, hi, early, yp, bp, ws_ptr, xs_ptr, rn0, rm0, live_n, live_m, step, Y: gl.constexpr,
    HAS_BIAS: gl.constexpr, BT: gl.constexpr, BN: gl.constexpr, NW: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """The sums r of a piece of a tile to place ``mine``; the last of blocks lo .. hi adds all pieces in the order of k and stores to y."""
    LP: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, NW], [0, 1])
    keep_part(r, part_ptr, mine, BT, BN, MMA)
    old = gl.atomic_add(count_ptr, 1, sem="acq_rel")
    if old == hi - lo:
        p0 = part_ptr + gl.where(early, 2 * lo + 1, 2 * lo).to(gl.int64) * (BN * BT)
        rn = gl.arange(0, BN, layout=gl.SliceLayout(1, LP))
        al = gl.load(ws_ptr + rn0 + rn, mask=rn < live_n, other=0.0)[:, None]
        # 32 registers a thread at a time: each round of loads waits for L2 once
        COLS: gl.constexpr = min(BT, 1024 * NW // BN)
        for c in range(0, BT, COLS):
            rm = c + gl.arange(0, COLS, layout=gl.SliceLayout(0, LP))
            t = add_parts(p0, part_ptr, (rm * BN)[None, :] + rn[:, None], lo, hi, BT, BN)
            t = t * al
            t = t * gl.load(xs_ptr + rm0 + rm, mask=rm < live_m, other=0.0)[None, :]
            if HAS_BIAS:
                t += gl.load(bp + rn, mask=rn < live_n, other=0.0).to(gl.float32)[:, None]
            mk = (rm < live_m)[None, :] & (rn < live_n)[:, None]
            gl.store(yp + (rm * step)[None, :] + rn[:, None], t.to(Y), mask=mk)


@gluon.jit
def _consume8(
    sx, sy, full, empty, yd, xs_ptr, w_ptr, s_ptr, bias_ptr, y_ptr, base_ptr, ws_ptr, part_ptr, count_ptr, M, N, KT,
    pid, blocks, unit, tile, hop, k, left, nk, tiles_m, tiles_n,
    HAS_BIAS: gl.constexpr, EVEN: gl.constexpr, CUT: gl.constexpr, TS: gl.constexpr, BT: gl.constexpr, R: gl.constexpr, SK: gl.constexpr,
    XS: gl.constexpr, GM: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """The NW warps that decode and multiply: R * NW * 16 rows of W, BT rows of x a tile."""
    BN: gl.constexpr = R * NW * 16
    LA: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [NW, 1], [1, 0])
    LS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [NW, 1], [1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, BT, 32])
    DOA: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    KB = (KT + 3) // 4
    NT = (N + 15) // 16
    wn = gl.arange(0, NW, layout=gl.SliceLayout(1, LA))[:, None]
    xa = gl.arange(0, R * 256, layout=gl.SliceLayout(0, LA))[None, :]
    ra = (xa // 256) * NW + wn
    ka = (xa % 256) // 128 + wn * 0
    oa = ra * (KT * 128) + xa % 256
    ws = gl.arange(0, NW, layout=gl.SliceLayout(1, LS))[:, None]
    xs = gl.arange(0, R * 32, layout=gl.SliceLayout(0, LS))[None, :]
    rs = (xs // 32) * NW + ws
    os = rs * (KB * 32) + (xs % 32) // 2 * 2
    ob = rs * 8 + (xs % 32) // 4
    pm, pn = _place(tile, tiles_m, tiles_n, GM)
    rt = pn * (R * NW)
    kt = k * 4
    wp = w_ptr + (rt.to(gl.int64) * KT + kt) * 128
    sp = s_ptr + (rt.to(gl.int64) * KB + k) * 32
    live = rt + ra < NT
    lives = rt + rs < NT
    a0 = fetch(wp, oa, live & (kt + ka < KT), left > 0, EVEN)
    a1 = fetch(wp + 256, oa, live & (kt + 2 + ka < KT), kt + 2 < KT, EVEN)
    s0 = fetch(sp, os, lives, left > 0, EVEN)
    s1 = fetch(sp + 1, os, lives, kt + 2 < KT, EVEN)
    nbase = fetch(base_ptr + rt * 8, ob, lives, left > 0, EVEN)
    slot = 0
    phase = 0
    first = 1
    for _ in range(0, (k + left + nk - 1) // nk):
        rounds = gl.minimum(nk - k, left)
        more = left > rounds
        nt = gl.where(more, tile + hop, tile)
        npm, npn = _place(nt, tiles_m, tiles_n, GM)
        base = nbase
        rt = npn * (R * NW)
        nbase = fetch(base_ptr + rt * 8, ob, rt + rs < NT, more, EVEN)
        acc = gl.zeros([BN, BT], gl.float32, MMA)
        before = gl.zeros([BN, 128], gl.float8e4nv, DOA)
        for kk in range(k, k + rounds):
            end = kk == k + rounds - 1
            kt = gl.where(end, 0, (kk + 1) * 4)
            rt = gl.where(end, npn, pn) * (R * NW)
            go = more | (kk < k + rounds - 1)
            wp = w_ptr + (rt.to(gl.int64) * KT + kt) * 128
            sp = s_ptr + (rt.to(gl.int64) * KB + kt // 4) * 32
            live = rt + ra < NT
            lives = rt + rs < NT
            for u in gl.static_range(2):
                # decode the words of this step and fetch those of the same step of the next round in their place
                if u == 0:
                    op = operand8(a0, s0, base, NW, R, DOA)
                    a0 = fetch(wp, oa, live & (kt + ka < KT), go & (kt < KT), EVEN)
                    s0 = fetch(sp, os, lives, go & (kt < KT), EVEN)
                else:
                    op = operand8(a1, s1, base, NW, R, DOA)
                    a1 = fetch(wp + 256, oa, live & (kt + 2 + ka < KT), go & (kt + 2 < KT), EVEN)
                    s1 = fetch(sp + 1, os, lives, go & (kt + 2 < KT), EVEN)
                if u % SK == 0:
                    mbarrier.wait(full.index(slot), phase)
                acc = warpgroup_mma(op, sx.index(slot * SK + u % SK).permute([1, 0]), acc, is_async=True)
                acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])
                # the wait takes no 8-bit operand: this copy keeps the registers of the last one until here
                gl.inline_asm_elementwise("mov.b32 $0,$1;", "=r,r", [before], dtype=gl.float8e4nv, is_pure=False, pack=4)
                if u % SK == 0:  # noqa: SIM102 - one condition is known at compile time
                    if (kk > k) | (u > 0):
                        release(empty, slot, XS)
                before = op
                if u % SK == SK - 1:
                    slot, phase = following(slot, phase, XS)
        r = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        gl.inline_asm_elementwise("mov.b32 $0,$1;", "=r,r", [before], dtype=gl.float8e4nv, is_pure=False, pack=4)
        release(empty, slot, XS)
        # sizes and pointers meet a scalar before they meet a tensor: Triton 3.6 knows nothing of the bare arguments of a partition
        rn0 = pn * BN
        rm0 = pm * BT
        live_n = N - rn0
        live_m = M - rm0
        step = N * 1
        yp = y_ptr + (rm0.to(gl.int64) * N + rn0)
        bp = bias_ptr + rn0
        if CUT:
            if rounds == nk:
                _store_tile(
                    r, sy, yd, yp, bp, ws_ptr, xs_ptr, rn0, rm0, live_n, live_m, step, y_ptr.dtype.element_ty, HAS_BIAS, TS, BT, BN, NW, MMA
                )
            else:
                mine = 2 * pid + 1 - first
                units = nk * tiles_m * tiles_n // unit
                lo = owner(tile * nk // unit, units, blocks)
                hi = owner((tile * nk + nk - 1) // unit, units, blocks)
                # the run of the first block may have begun in an earlier tile, the others begin here
                early = start(lo, units, blocks) * unit < tile * nk
                _store_part(r, part_ptr, count_ptr + tile, mine, lo, hi, early, yp, bp, ws_ptr, xs_ptr, rn0, rm0, live_n, live_m, step,
                            y_ptr.dtype.element_ty, HAS_BIAS, BT, BN, NW, MMA)  # fmt: skip
        else:
            _store_tile(
                r, sy, yd, yp, bp, ws_ptr, xs_ptr, rn0, rm0, live_n, live_m, step, y_ptr.dtype.element_ty, HAS_BIAS, TS, BT, BN, NW, MMA
            )
        left -= rounds
        first = 0
        k = 0
        tile = nt
        pm = npm
        pn = npn
    if TS:
        tma.store_wait(0)


@gluon.jit
def ws_fp8(
    xd, yd, xs_ptr, w_ptr, s_ptr, bias_ptr, y_ptr, base_ptr, ws_ptr, part_ptr, count_ptr, M, N, KT, unit,
    HAS_BIAS: gl.constexpr, EVEN: gl.constexpr, CUT: gl.constexpr, TS: gl.constexpr, BT: gl.constexpr, R: gl.constexpr, SK: gl.constexpr,
    XS: gl.constexpr, GM: gl.constexpr, PF: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """xd: descriptor of e4m3 x [M, KT * 64] in boxes [BT, 128]; yd: of y in boxes [BT, R NW 16], used if TS; xs: f32 [M]; base: i32
    [NT, 8] words of the largest scale bytes of rows g, g, g + 8, g + 8; ws: f32 [NT * 16] row scales.

    Grid (G,), G <= tiles * rounds / unit with ceil(KT / 4) rounds a tile. unit: rounds that stay together, a divisor of the rounds of a
    tile; without CUT it is all of them, else part_ptr has 2 G R NW 16 BT floats and count_ptr as many zeros as tiles.
    EVEN: N % (R NW 16) == 0 and KT % 4 == 0. PF: rounds that W is brought into L2 ahead of x, -1: not.
    """
    BN: gl.constexpr = R * NW * 16
    SX: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    SY: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    pid = gl.program_id(0)
    blocks = gl.num_programs(0)
    nk = (KT + 3) // 4
    tiles_m = (M + BT - 1) // BT
    tiles_n = (N + BN - 1) // BN
    units = nk * tiles_m * tiles_n // unit
    w0 = start(pid, units, blocks) * unit
    left = start(pid + 1, units, blocks) * unit - w0
    tile = pid
    hop = blocks
    k = pid * 0
    if CUT:
        whole = unit == nk
        tile = gl.where(whole, pid, w0 // nk)
        hop = gl.where(whole, blocks, 1)
        k = gl.where(whole, 0, w0 - w0 // nk * nk)
    sx = gl.allocate_shared_memory(gl.float8e4nv, [XS * SK, BT, 128], SX)
    sy = sx
    if TS:
        sy = gl.allocate_shared_memory(y_ptr.dtype.element_ty, [BT, BN], SY)
    full, empty = mbarriers(XS, 1, NW * 32)
    gl.warp_specialize(
        [
            (_consume8, (sx, sy, full, empty, yd, xs_ptr, w_ptr, s_ptr, bias_ptr, y_ptr, base_ptr, ws_ptr, part_ptr, count_ptr, M, N, KT,
                         pid, blocks, unit, tile, hop, k, left, nk, tiles_m, tiles_n, HAS_BIAS, EVEN, CUT, TS, BT, R, SK, XS, GM, NW)),
            (_produce8, (xd, sx, full, empty, w_ptr, s_ptr, N, KT, tile, hop, k, left, nk, tiles_m, tiles_n, BT, R * NW, SK, XS, GM, PF)),
        ],
        [1],
        [24],
    )  # fmt: skip
