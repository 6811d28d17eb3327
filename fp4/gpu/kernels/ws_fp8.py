"""W4A8 on Hopper with TMA and a warp for it: the arithmetic of ``wide_fp8``, the pipeline of ``ws_m``, runs of whole tiles.

A step is 128 columns (two tiles of W, 128 bytes of a row of x); a round is two steps, so that two sets of operand registers alternate.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from fp4.gpu.kernels.plain_fp8 import SCALES_C, SCALES_ROW
from fp4.gpu.kernels.wide_fp8 import F8, H4, WORDS_C, WORDS_E4M3
from fp4.gpu.kernels.ws_m import _fetch, _produce, _release, _start


@gluon.jit
def _operand8(a, scale, oc0, oc1, NW: gl.constexpr, R: gl.constexpr, DOA: gl.constexpr):
    """a: i32 [NW, R*2*128] words, scale: i32 [NW, R*32] words -> e4m3 [R*NW*16, 128] as operand A."""
    q0, q1, q2, q3 = gl.inline_asm_elementwise(SCALES_ROW, SCALES_C, [scale, oc0, oc1], dtype=H4, is_pure=True, pack=1)
    e0 = gl.join(q0, q1).reshape([NW, R, 32, 2]).permute([0, 1, 3, 2]).reshape([NW, R, 2, 32, 1])
    e1 = gl.join(q2, q3).reshape([NW, R, 32, 2]).permute([0, 1, 3, 2]).reshape([NW, R, 2, 32, 1])
    w5 = a.reshape([NW, R, 2, 32, 4])
    w5, e0 = gl.broadcast(w5, gl.convert_layout(e0, w5.type.layout, assert_trivial=True))
    w5, e1 = gl.broadcast(w5, gl.convert_layout(e1, w5.type.layout, assert_trivial=True))
    # pack = 4: the four words of a lane; output i = (s, e), its four elements are the adjacent codes j
    o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(WORDS_E4M3, WORDS_C, [w5, e0, e1], dtype=F8, is_pure=True, pack=4)
    o = gl.join(gl.join(gl.join(o0, o1), gl.join(o4, o5)), gl.join(gl.join(o2, o3), gl.join(o6, o7)))
    # NW R U g t j e s1 s0 -> R NW e g U s1 s0 t j
    o = o.reshape([NW, R, 2, 8, 4, 4, 2, 2, 2]).permute([1, 0, 6, 3, 2, 7, 8, 4, 5]).reshape([R * NW * 16, 128])
    return gl.convert_layout(o, DOA, assert_trivial=True)


@gluon.jit
def _consume8(
    sx, full, empty, xs_ptr, w_ptr, s_ptr, bias_ptr, y_ptr, oc_ptr, ws_ptr, M, N, KT, t0, t1, nk, tiles_m,
    NW: gl.constexpr, HAS_BIAS: gl.constexpr, EVEN: gl.constexpr, BT: gl.constexpr, R: gl.constexpr, SK: gl.constexpr, XS: gl.constexpr,
):  # fmt: skip
    BN: gl.constexpr = R * NW * 16
    LA: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [NW, 1], [1, 0])
    LS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [NW, 1], [1, 0])
    LY: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, NW], [0, 1])
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
    row = rs * 16 + (xs % 32) // 4
    pn = t0 // tiles_m
    pm = t0 - pn * tiles_m
    rt = pn * (R * NW)
    wp = w_ptr + rt.to(gl.int64) * KT * 128
    sp = s_ptr + rt.to(gl.int64) * KB * 32
    live = rt + ra < NT
    lives = rt + rs < NT
    a0 = _fetch(wp, oa, live & (ka < KT), True, EVEN)
    a1 = _fetch(wp + 256, oa, live & (2 + ka < KT), KT > 2, EVEN)
    s0 = _fetch(sp, os, lives, True, EVEN)
    s1 = _fetch(sp + 1, os, lives, KT > 2, EVEN)
    noc0 = _fetch(oc_ptr + rt * 16, row, lives, True, EVEN)
    noc1 = _fetch(oc_ptr + rt * 16 + 8, row, lives, True, EVEN)
    slot = 0
    phase = 0
    for tile in range(t0, t1):
        more = tile + 1 < t1
        turn = pm == tiles_m - 1
        npm = gl.where(turn, 0, pm + 1)
        npn = gl.where(turn, pn + 1, pn)
        oc0 = noc0
        oc1 = noc1
        rt = npn * (R * NW)
        noc0 = _fetch(oc_ptr + rt * 16, row, rt + rs < NT, more, EVEN)
        noc1 = _fetch(oc_ptr + rt * 16 + 8, row, rt + rs < NT, more, EVEN)
        acc = gl.zeros([BN, BT], gl.float32, MMA)
        before = gl.zeros([BN, 128], gl.float8e4nv, DOA)
        for kk in range(0, nk):
            end = kk == nk - 1
            kt = gl.where(end, 0, (kk + 1) * 4)
            rt = gl.where(end, npn, pn) * (R * NW)
            go = more | (kk < nk - 1)
            wp = w_ptr + (rt.to(gl.int64) * KT + kt) * 128
            sp = s_ptr + (rt.to(gl.int64) * KB + kt // 4) * 32
            live = rt + ra < NT
            lives = rt + rs < NT
            for u in gl.static_range(2):
                if u == 0:
                    op = _operand8(a0, s0, oc0, oc1, NW, R, DOA)
                    a0 = _fetch(wp, oa, live & (kt + ka < KT), go & (kt < KT), EVEN)
                    s0 = _fetch(sp, os, lives, go & (kt < KT), EVEN)
                else:
                    op = _operand8(a1, s1, oc0, oc1, NW, R, DOA)
                    a1 = _fetch(wp + 256, oa, live & (kt + 2 + ka < KT), go & (kt + 2 < KT), EVEN)
                    s1 = _fetch(sp + 1, os, lives, go & (kt + 2 < KT), EVEN)
                if u % SK == 0:
                    mbarrier.wait(full.index(slot), phase)
                acc = warpgroup_mma(op, sx.index(slot * SK + u % SK).permute([1, 0]), acc, is_async=True)
                acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])
                # the wait takes no 8-bit operand: this copy keeps the registers of the last one until here
                gl.inline_asm_elementwise("mov.b32 $0,$1;", "=r,r", [before], dtype=gl.float8e4nv, is_pure=False, pack=4)
                if u % SK == 0:  # noqa: SIM102 - one condition is known at compile time
                    if (kk > 0) | (u > 0):
                        _release(empty, slot, XS)
                before = op
                if u % SK == SK - 1:
                    wrap = slot == XS - 1
                    slot = gl.where(wrap, 0, slot + 1)
                    phase = gl.where(wrap, phase ^ 1, phase)
        r = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        gl.inline_asm_elementwise("mov.b32 $0,$1;", "=r,r", [before], dtype=gl.float8e4nv, is_pure=False, pack=4)
        _release(empty, slot, XS)
        rn0 = pn * BN
        rm0 = pm * BT
        live_n = N - rn0
        live_m = M - rm0
        step = N * 1
        rb = gl.arange(0, BN, layout=gl.SliceLayout(1, MMA))
        cb = gl.arange(0, BT, layout=gl.SliceLayout(0, MMA))
        r = r * gl.load(ws_ptr + rn0 + rb, mask=rb < live_n, other=0.0)[:, None]
        r = r * gl.load(xs_ptr + rm0 + cb, mask=cb < live_m, other=0.0)[None, :]
        if HAS_BIAS:
            r += gl.load(bias_ptr + rn0 + rb, mask=rb < live_n, other=0.0).to(gl.float32)[:, None]
        t = gl.convert_layout(r.to(y_ptr.dtype.element_ty), LY)
        rn = gl.arange(0, BN, layout=gl.SliceLayout(1, LY))
        rm = gl.arange(0, BT, layout=gl.SliceLayout(0, LY))
        yp = y_ptr + (rm0.to(gl.int64) * N + rn0)
        gl.store(yp + (rm * step)[None, :] + rn[:, None], t, mask=(rm < live_m)[None, :] & (rn < live_n)[:, None])
        pm = npm
        pn = npn


@gluon.jit
def ws_fp8(
    xd, xs_ptr, w_ptr, s_ptr, bias_ptr, y_ptr, oc_ptr, ws_ptr, M, N, KT,
    HAS_BIAS: gl.constexpr, EVEN: gl.constexpr, BT: gl.constexpr, R: gl.constexpr, SK: gl.constexpr, XS: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """xd: descriptor of e4m3 x [M, KT * 64] in boxes [BT, 128]; xs: f32 [M]; oc: i32 [NT * 16]; ws: f32 [NT * 16]. As ``wide_fp8``.

    Grid (G,), G <= tiles. EVEN: N % (R NW 16) == 0 and KT % 4 == 0.
    """
    SX: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    nk = (KT + 3) // 4
    tiles_m = (M + BT - 1) // BT
    tiles = tiles_m * ((N + R * NW * 16 - 1) // (R * NW * 16))
    t0 = _start(gl.program_id(0), tiles, gl.num_programs(0))
    t1 = _start(gl.program_id(0) + 1, tiles, gl.num_programs(0))
    sx = gl.allocate_shared_memory(gl.float8e4nv, [XS * SK, BT, 128], SX)
    full = gl.allocate_shared_memory(gl.int64, [XS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [XS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(XS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=NW * 32)
    gl.warp_specialize(
        [
            (_consume8, (sx, full, empty, xs_ptr, w_ptr, s_ptr, bias_ptr, y_ptr, oc_ptr, ws_ptr, M, N, KT, t0, t1, nk, tiles_m, NW,
                         HAS_BIAS, EVEN, BT, R, SK, XS)),
            (_produce, (xd, sx, full, empty, t0 * nk, t1 * nk, nk, tiles_m, BT, 2, SK, XS, 128)),
        ],
        [1],
        [24],
    )  # fmt: skip
