"""W4A8 on Hopper: MXFP4 weights become e4m3 exactly (``decode_fp8``), x is quantised to e4m3 with one scale a token, fp8 warp-group MMAs.

The fp32 epilogue multiplies by the token's and the row's scale. k order inside 64 columns: an fp8 step of 32 wants four adjacent codes a
lane, so words (t, s) of x go to (s, t).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from fp4.gpu.kernels.gluon_decode import barrier, cp_async, cp_commit, cp_wait
from fp4.gpu.kernels.pdl import gl_wait
from fp4.gpu.kernels.wide_m import _fetch
from fp4.gpu.kernels.ws_fp8 import operand8


@gluon.jit
def _step8(sx, op, before, acc, xp, okx, tx, kt, kend, slot_r, slot_x, U: gl.constexpr, XS: gl.constexpr):
    """``wide_m._step`` for 8-bit operands, which the wait op does not take: the copy keeps the registers of the last operand until here."""
    cp_wait(XS - 3)
    barrier()
    acc = warpgroup_mma(op, sx.index(slot_r).permute([1, 0]), acc, is_async=True)
    jb = kt + (XS - 2) * U
    cp_async(sx.index(slot_x), xp + jb * 64, mask=okx & (jb + tx < kend)[None, :])
    cp_commit()
    acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])
    gl.inline_asm_elementwise("mov.b32 $0,$1;", "=r,r", [before], dtype=gl.float8e4nv, is_pure=False, pack=4)
    slot_r = gl.where(slot_r == XS - 1, 0, slot_r + 1)
    slot_x = gl.where(slot_x == XS - 1, 0, slot_x + 1)
    return acc, op, slot_r, slot_x


@gluon.jit
def wide_fp8(
    x_ptr, xs_ptr, w_ptr, s_ptr, bias_ptr, y_ptr, base_ptr, ws_ptr, M, N, KT,
    HAS_BIAS: gl.constexpr, EVEN: gl.constexpr, BT: gl.constexpr, R: gl.constexpr, U: gl.constexpr, XS: gl.constexpr, GM: gl.constexpr,
    NW: gl.constexpr,
):  # fmt: skip
    """x: e4m3 [M, KT * 64], xs: f32 [M]; base: i32 [NT, 8], ws: f32 [NT * 16] as in ``ws_fp8``.

    As ``wide_m``; U = 2.
    """
    BN: gl.constexpr = R * NW * 16
    LA: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [NW, 1], [1, 0])
    LS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [NW, 1], [1, 0])
    LX: gl.constexpr = gl.BlockedLayout([1, 16], [32 // (4 * U), 4 * U], [NW, 1], [1, 0])
    LY: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, NW], [0, 1])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, BT, 32])
    DOA: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    SX: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    KB = (KT + 3) // 4
    NT = (N + 15) // 16
    tiles_n = (N + BN - 1) // BN
    tiles_m = (M + BT - 1) // BT
    pid = gl.program_id(0)
    first = (pid // (GM * tiles_n)) * GM
    size = gl.minimum(tiles_m - first, GM)
    pm = first + (pid % (GM * tiles_n)) % size
    pn = (pid % (GM * tiles_n)) // size
    rt0 = pn * (R * NW)
    wn = gl.arange(0, NW, layout=gl.SliceLayout(1, LA))[:, None]
    xa = gl.arange(0, R * U * 128, layout=gl.SliceLayout(0, LA))[None, :]
    ra = (xa // (U * 128)) * NW + wn
    ka = (xa % (U * 128)) // 128 + wn * 0
    ap = w_ptr + rt0.to(gl.int64) * KT * 128 + (ra * (KT * 128) + xa % (U * 128))
    ws = gl.arange(0, NW, layout=gl.SliceLayout(1, LS))[:, None]
    xs = gl.arange(0, R * 32, layout=gl.SliceLayout(0, LS))[None, :]
    rs = (xs // 32) * NW + ws
    ks = xs * 0 + ws * 0
    sp = s_ptr + rt0.to(gl.int64) * KB * 32 + (rs * (KB * 32) + (xs % 32) // 2 * 2)
    live_a = (rt0 + ra < NT) & (ka >= 0)
    live_s = (rt0 + rs < NT) & (ks >= 0)
    base = gl.load(base_ptr + (rt0 + rs) * 8 + (xs % 32) // 4, mask=live_s, other=0)
    mx = pm * BT + gl.arange(0, BT, layout=gl.SliceLayout(1, LX))
    kx = gl.arange(0, 64 * U, layout=gl.SliceLayout(0, LX))
    tx = kx // 64
    xp = x_ptr + mx.to(gl.int64)[:, None] * (KT * 64) + kx[None, :]
    okx = (mx < M)[:, None]
    sx = gl.allocate_shared_memory(gl.float8e4nv, [XS, BT, 64 * U], SX)
    a = _fetch(ap, live_a, 0, KT, ka, EVEN)
    s = _fetch(sp, live_s, 0, KT, ks, EVEN)
    gl_wait(True)
    for i in gl.static_range(XS - 2):
        cp_async(sx.index(i), xp + i * U * 64, mask=okx & (i * U + tx < KT)[None, :])
        cp_commit()
    acc = gl.zeros([BN, BT], gl.float32, MMA)
    before = gl.zeros([BN, 64 * U], gl.float8e4nv, DOA)
    slot_r = 0
    slot_x = XS - 2
    for pair in range(0, KT, 2 * U):
        for half in gl.static_range(2):
            kt = pair + half * U
            word = a
            scale = s
            nx = kt + U
            ap += U * 128
            a = _fetch(ap, live_a, nx, KT, ka, EVEN)
            s = _fetch(sp + ((nx // 4) * 32 + (nx % 4) // 2), live_s, nx, KT, ks, EVEN)
            op = operand8(word, scale, base, NW, R, DOA)
            acc, before, slot_r, slot_x = _step8(sx, op, before, acc, xp, okx, tx, kt, KT, slot_r, slot_x, U, XS)
    r = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    gl.inline_asm_elementwise("mov.b32 $0,$1;", "=r,r", [before], dtype=gl.float8e4nv, is_pure=False, pack=4)
    cp_wait(0)
    rb = pn * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, MMA))
    cb = pm * BT + gl.arange(0, BT, layout=gl.SliceLayout(0, MMA))
    r = r * gl.load(ws_ptr + rb, mask=rb < N, other=0.0)[:, None] * gl.load(xs_ptr + cb, mask=cb < M, other=0.0)[None, :]
    if HAS_BIAS:
        r += gl.load(bias_ptr + rb, mask=rb < N, other=0.0).to(gl.float32)[:, None]
    t = gl.convert_layout(r.to(y_ptr.dtype.element_ty), LY)
    rn = pn * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, LY))
    rm = pm * BT + gl.arange(0, BT, layout=gl.SliceLayout(0, LY))
    gl.store(y_ptr + rm.to(gl.int64)[None, :] * N + rn[:, None], t, mask=(rm < M)[None, :] & (rn < N)[:, None])
