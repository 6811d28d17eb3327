"""W4A16 for many rows of x on Hopper: the arithmetic and the ring of ``ws_m``, whole tiles in an order that suits L2, output by TMA.

What differs from ``ws_m``:

* Blocks take every G-th tile of an order in which G neighbours share GM tiles of rows of x and few tiles of rows of W, so that each is
  read from memory once a group and by the other blocks from L2.
* The sums leave through a buffer that the TMA unit writes out while the block is at its next tile. ``ws_m`` stores them itself, through 16
  barriers, with nothing beside it.
* NAT: x stays as it is, and W comes into its order in registers (``natural``), for about 45 instructions more in 64 columns of a warp.
* HELP: the first blocks multiply nothing: on multiprocessors that whole waves of tiles leave without work they bring x into the fragments'
  order, chunk after chunk as the others come to it. ``permute_x`` in front does only the chunks that are needed at once. Blocks
  start in the order of their numbers, so those that others wait for run before them, whatever else the GPU does.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from fp4.gpu.kernels.gluon_decode import barrier, unpack_scales
from fp4.gpu.kernels.natural import quad_scales
from fp4.gpu.kernels.operand import at_scales, at_words, split_scales, tile_operand
from fp4.gpu.kernels.pdl import gl_wait
from fp4.gpu.kernels.ring import following, into_buffer, mbarriers, release, tma_load, tma_store

#: rows and words of x that a helper brings into order at a time, 64 KiB; ``CHUNK`` tiles of 64 columns
HELP_ROWS, HELP_WORDS = 16, 1024
CHUNK = HELP_WORDS // 32
_ROWS, _WORDS, _CHUNK = gl.constexpr(HELP_ROWS), gl.constexpr(HELP_WORDS), gl.constexpr(CHUNK)


@gluon.jit
def _place(i, tiles_m, tiles_n, GM: gl.constexpr):
    """Tile i of the order: (tile of rows of x, tile of rows of W)."""
    group = i // (GM * tiles_n)
    size = gl.minimum(tiles_m - group * GM, GM)
    j = i - group * (GM * tiles_n)
    return group * GM + j % size, j // size


@gluon.jit
def _await(flag_ptr, target):
    """Wait until the counter has reached the target; the TMA unit then sees what was written in front of its increments."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; again: ld.acquire.gpu.global.b32 $0,[$1]; setp.lt.s32 p,$0,$2; @p bra again; fence.proxy.async; }",
        "=&r,l,r", [flag_ptr, target], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _item(item, chunks, BT: gl.constexpr, GM: gl.constexpr):
    """(first row, chunk of the columns) of an item: groups of GM tiles of rows, in one chunk after chunk, in a chunk tile after tile."""
    PART: gl.constexpr = GM * (BT // _ROWS)
    part = item // PART
    group = part // chunks
    return (group * PART + item - part * PART) * _ROWS, part - group * chunks


@gluon.jit
def _in_order(x_ptr, item, M, words, chunks, BT: gl.constexpr, GM: gl.constexpr, LO: gl.constexpr):
    """The words of an item in the fragments' order; zeros outside x. 16 bytes a load; the words change lanes through shared memory."""
    row0, chunk = _item(item, chunks, BT, GM)
    row = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, LO))[:, None]
    w = chunk * _WORDS + gl.arange(0, _WORDS, layout=gl.SliceLayout(0, LO))[None, :]
    v = gl.load(x_ptr + row0.to(gl.int64) * words + (row * words + w), mask=(row < M - row0) & (w < words), other=0)
    v = v.reshape([_ROWS, _WORDS // 32, 4, 8]).permute([0, 1, 3, 2]).reshape([_ROWS, _WORDS])
    return gl.convert_layout(v, LO)


@gluon.jit
def _order_x(
    x_ptr, o_ptr, flag_ptr, item0, items, step, M, words, KT, chunks, BT: gl.constexpr, GM: gl.constexpr, NW: gl.constexpr
):  # fmt: skip
    """What ``permute_x`` does, in the order in which it is needed: items item0, item0 + step, ... of HELP_ROWS rows and HELP_WORDS words.

    The next item is read while this one is written.
    """
    LO: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [NW, 1], [1, 0])
    row = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, LO))[:, None]
    word = gl.arange(0, _WORDS, layout=gl.SliceLayout(0, LO))[None, :]
    v = _in_order(x_ptr, item0, M, words, chunks, BT, GM, LO)
    for item in range(item0, items, step):
        row0, chunk = _item(item, chunks, BT, GM)
        o = chunk * _WORDS + word
        gl.store(o_ptr + row0.to(gl.int64) * (KT * 32) + (row * (KT * 32) + o), v, mask=(row < M - row0) & (o < KT * 32))
        v = _in_order(x_ptr, item + step, M, words, chunks, BT, GM, LO)  # behind the last item: rows that do not exist
        gl_wait(True)  # the counters are zeroed by permute_x
        # the TMA unit of another multiprocessor reads this: a fence here and one behind its wait
        gl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0,0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        barrier()
        gl.atomic_add(flag_ptr + row0 // BT * chunks + chunk, 1, sem="release")


@gluon.jit
def _produce_tiles(
    xd, sx, full, empty, flag_ptr, front, ready, i0, tiles, step, nk, tiles_m, tiles_n, chunks,
    HELP: gl.constexpr, BT: gl.constexpr, U: gl.constexpr, XS: gl.constexpr, GM: gl.constexpr,
):  # fmt: skip
    """Fill slot after slot with the boxes [BT, 64] of x of tiles i0, i0 + step, ...; zeros outside x."""
    gl_wait(True)  # x comes from the kernel in front
    slot = 0
    phase = 1
    for i in range(i0, tiles, step):
        pm, _ = _place(i, tiles_m, tiles_n, GM)
        done = gl.where(pm < front, ready, 0)
        for chunk in range(0, chunks):
            if HELP:
                _await(flag_ptr + (pm * chunks + chunk), gl.where(chunk < done, 0, BT // _ROWS))
            for k in range(chunk * _CHUNK, gl.minimum(chunk * _CHUNK + _CHUNK, nk * U)):
                mbarrier.wait(empty.index(slot), phase)
                mbarrier.expect(full.index(slot), BT * 128)
                tma_load(xd, [pm * BT, k * 64], full.index(slot), sx.index(slot))
                slot, phase = following(slot, phase, XS)


@gluon.jit
def _words(p, offset, live, on, EVEN: gl.constexpr):
    """Words at p + offset, streamed; unless EVEN, zeros where this step (on) or the row (live) does not exist."""
    if EVEN:
        return gl.load(p + offset, eviction_policy="evict_first")
    else:
        mask = live & gl.full(offset.shape, on, gl.int1, layout=offset.type.layout)
        return gl.load(p + offset, mask=mask, other=0, eviction_policy="evict_first")


@gluon.jit
def _consume_tiles(
    sx, sy, full, empty, yd, w_ptr, s_ptr, alpha_ptr, bias_ptr, N, KT, oc, i0, tiles, step, nk, tiles_m, tiles_n,
    NW: gl.constexpr, KIND: gl.constexpr, ANY: gl.constexpr, HALF: gl.constexpr, HAS_BIAS: gl.constexpr, EVEN: gl.constexpr,
    BT: gl.constexpr, R: gl.constexpr, XS: gl.constexpr, GM: gl.constexpr, NAT: gl.constexpr,
):  # fmt: skip
    """The NW warps that decode and multiply: R * NW * 16 rows of W, BT rows of x a tile; rounds of four steps of 64 columns."""
    U: gl.constexpr = 4
    BN: gl.constexpr = R * NW * 16
    DT: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    G: gl.constexpr = 64 // KIND  # groups of 64 columns
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, BT, 16])
    DOA: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    L: gl.constexpr = 64 if KIND == 16 else 32
    KB = (KT + 3) // 4
    NT = (N + 15) // 16
    ra, oa, lane = at_words(KT, NW, R)
    rs, os = at_scales(KB, KIND, U, NAT, NW, R)
    # helpers have no tile: they read the first one and use nothing of it
    pm, pn = _place(gl.where(i0 < tiles, i0, 0), tiles_m, tiles_n, GM)
    rt = pn * (R * NW)
    wp = w_ptr + rt.to(gl.int64) * KT * 128
    sp = s_ptr + rt.to(gl.int64) * KB * L
    a0 = _words(wp, oa, rt + ra < NT, True, EVEN)
    a1 = _words(wp + 128, oa, rt + ra < NT, KT > 1, EVEN)
    a2 = _words(wp + 256, oa, rt + ra < NT, KT > 2, EVEN)
    a3 = _words(wp + 384, oa, rt + ra < NT, KT > 3, EVEN)
    s = _words(sp, os, rt + rs < NT, True, EVEN)
    slot = 0
    phase = 0
    for i in range(i0, tiles, step):
        # the tile behind this one, whose first words are fetched at the end of this one; behind the last one, this one again
        npm, npn = _place(gl.where(i + step < tiles, i + step, i), tiles_m, tiles_n, GM)
        wq = w_ptr + (npn * (R * NW)).to(gl.int64) * KT * 128
        sq = s_ptr + (npn * (R * NW)).to(gl.int64) * KB * L
        acc = gl.zeros([BN, BT], gl.float32, MMA)
        before = gl.zeros([BN, 64], DT, DOA)
        for kk in range(0, nk):
            scale = s
            end = kk == nk - 1
            wp = gl.where(end, wq, wp + U * 128)
            sp = gl.where(end, sq, sp + L)
            kt = gl.where(end, 0, (kk + 1) * U)
            rt = gl.where(end, npn, pn) * (R * NW)
            live = rt + ra < NT
            s = _words(sp, os, rt + rs < NT, True, EVEN)
            s0, s1 = quad_scales(scale, NW, R, G) if NAT else split_scales(scale, NW, R, U)
            q0, q1, q2, q3 = unpack_scales(s0, oc, KIND, ANY, HALF)
            for u in gl.static_range(U):
                # decode the words of this step and fetch those of the same step of the next round in their place
                if u == 2:
                    q0, q1, q2, q3 = unpack_scales(s1, oc, KIND, ANY, HALF)
                if u == 0:
                    op = tile_operand(a0, q0, q2, lane, NAT, HALF, NW, R, DOA)
                    a0 = _words(wp, oa, live, kt < KT, EVEN)
                if u == 1:
                    op = tile_operand(a1, q1, q3, lane, NAT, HALF, NW, R, DOA)
                    a1 = _words(wp + 128, oa, live, kt + 1 < KT, EVEN)
                if u == 2:
                    op = tile_operand(a2, q0, q2, lane, NAT, HALF, NW, R, DOA)
                    a2 = _words(wp + 256, oa, live, kt + 2 < KT, EVEN)
                if u == 3:
                    op = tile_operand(a3, q1, q3, lane, NAT, HALF, NW, R, DOA)
                    a3 = _words(wp + 384, oa, live, kt + 3 < KT, EVEN)
                mbarrier.wait(full.index(slot), phase)
                acc = warpgroup_mma(op, sx.index(slot).permute([1, 0]), acc, is_async=True)
                acc, before = warpgroup_mma_wait(num_outstanding=1, deps=[acc, before])
                if (kk > 0) | (u > 0):
                    release(empty, slot, XS)
                before = op
                slot, phase = following(slot, phase, XS)
        r, before = warpgroup_mma_wait(num_outstanding=0, deps=[acc, before])
        release(empty, slot, XS)
        r = r * gl.load(alpha_ptr)
        if HAS_BIAS:
            rb = gl.arange(0, BN, layout=gl.SliceLayout(1, MMA))
            r += gl.load(bias_ptr + pn * BN + rb, mask=rb < N - pn * BN, other=0.0).to(gl.float32)[:, None]
        into_buffer(sy, r)
        tma_store(yd, [pm * BT, pn * BN], sy)
        pm = npm
        pn = npn
    tma.store_wait(0)


@gluon.jit
def ws_tiles(
    xd, yd, x_ptr, o_ptr, flag_ptr, w_ptr, s_ptr, alpha_ptr, bias_ptr, M, N, KT, words, oc, helpers, front, ready,
    KIND: gl.constexpr, ANY: gl.constexpr, HALF: gl.constexpr, HAS_BIAS: gl.constexpr, EVEN: gl.constexpr, HELP: gl.constexpr,
    BT: gl.constexpr, R: gl.constexpr, XS: gl.constexpr, GM: gl.constexpr, NAT: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """xd: descriptor of x [M, K] as it is (NAT) or [M, KT * 64] in the order of ``permute_x``, boxes [BT, 64]; yd: of y
    [M, N], boxes [BT, R * NW * 16].

    Grid (helpers + G,), G <= tiles. HELP: the helpers bring x (x_ptr, words a row) into order at o_ptr, the memory of xd, all but the first
    ``ready`` chunks of CHUNK tiles of the first ``front`` tiles of rows (GM, or more groups of GM with all their chunks); they count in
    flag_ptr, zeroed i32 [tiles of rows, rounded up to GM, times chunks of a row].
    EVEN: N % (R NW 16) == 0 and KT % 4 == 0. y has 16 bits a number and N % 8 == 0.
    """
    DT: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    SX: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BN: gl.constexpr = R * NW * 16
    pid = gl.program_id(0)
    step = gl.num_programs(0) - helpers
    nk = (KT + 3) // 4
    tiles_m = (M + BT - 1) // BT
    tiles_n = (N + BN - 1) // BN
    tiles = tiles_m * tiles_n
    i0 = gl.where(pid < helpers, tiles, pid - helpers)
    chunks = (KT + _CHUNK - 1) // _CHUNK
    if HELP:
        part: gl.constexpr = GM * (BT // _ROWS)
        items = (tiles_m + GM - 1) // GM * chunks * part
        # no other block may write here by threads what the TMA unit writes: the words change lanes through the ring's memory
        if pid < helpers:
            first = front // GM * ready * part + pid
            _order_x(x_ptr, o_ptr, flag_ptr, first, items, helpers, M, words, KT, chunks, BT, GM, NW)
    sx = gl.allocate_shared_memory(DT, [XS, BT, 64], SX)
    sy = gl.allocate_shared_memory(yd.dtype, [BT, BN], SX)
    full, empty = mbarriers(XS, 1, NW * 32)
    gl.warp_specialize(
        [
            (_consume_tiles, (sx, sy, full, empty, yd, w_ptr, s_ptr, alpha_ptr, bias_ptr, N, KT, oc, i0, tiles, step, nk, tiles_m, tiles_n,
                              NW, KIND, ANY, HALF, HAS_BIAS, EVEN, BT, R, XS, GM, NAT)),
            (_produce_tiles, (xd, sx, full, empty, flag_ptr, front, ready, i0, tiles, step, nk, tiles_m, tiles_n, chunks, HELP, BT, 4,
                              XS, GM)),
        ],
        [1],
        [24],
    )  # fmt: skip
