"""W4A8 on Hopper: MXFP4 weights become e4m3 exactly, x is quantised to e4m3 with one scale a token, fp8 warp-group MMAs.

A weight code * 2^(s - 127) is e4m3(code * 2^(1 - d)) * 2^(base - 128) with base the largest scale byte of its row and d = base - s:
exact while d <= 9 (the last subnormal bit of e4m3 is 2^-9). ``row_base`` checks that; the fp32 epilogue multiplies by the token's and the
row's scale. k order inside 64 columns: an fp8 step of 32 wants four adjacent codes a lane, so words (t, s) of x go to (s, t).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from fp4.gpu.kernels.decode import _PAIRS_FP16
from fp4.gpu.kernels.gluon_decode import barrier, cp_async, cp_commit, cp_wait
from fp4.gpu.kernels.pdl import gl_wait
from fp4.gpu.kernels.plain_fp8 import SCALES_C, SCALES_ROW
from fp4.gpu.kernels.wide_m import _fetch


def _asm() -> str:
    """$0..$7: (word 0..3) x (row e): four e4m3; $8..$11 words, $12 scales of row 0 (packed twice), $14 scales of row 1."""
    out = "{ .reg .b32 t,u; .reg .b16 c0,c1;"
    for word in range(4):
        for pair, code in enumerate(_PAIRS_FP16):
            e, h = divmod(pair, 2)
            out += code.replace("$8", f"${8 + word}") + f" mul.rn.f16x2 t,t,${12 + 2 * e}; cvt.rn.satfinite.e4m3x2.f16x2 c{h},t;"
            if h:
                out += f" mov.b32 ${2 * word + e},{{c0,c1}};"
    return out + "}"


WORDS_E4M3 = gl.constexpr(_asm())
WORDS_C = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 8))
F8 = gl.constexpr((gl.float8e4nv,) * 8)
H4 = gl.constexpr((gl.float16,) * 4)


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
    x_ptr, xs_ptr, w_ptr, s_ptr, bias_ptr, y_ptr, oc_ptr, ws_ptr, M, N, KT,
    HAS_BIAS: gl.constexpr, EVEN: gl.constexpr, BT: gl.constexpr, R: gl.constexpr, U: gl.constexpr, XS: gl.constexpr, GM: gl.constexpr,
    NW: gl.constexpr,
):  # fmt: skip
    """x: e4m3 [M, KT * 64], xs: f32 [M]; oc: i32 [NT * 16] row biases for the scale asm; ws: f32 [NT * 16] row scales. As ``wide_m``."""
    BN: gl.constexpr = R * NW * 16
    LA: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [NW, 1], [1, 0])
    LS: gl.constexpr = gl.BlockedLayout([1, U // 2], [1, 32], [NW, 1], [1, 0])
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
    xs = gl.arange(0, R * U * 16, layout=gl.SliceLayout(0, LS))[None, :]
    rs = (xs // (U * 16)) * NW + ws
    quad = (xs % (U * 16)) // (U // 2)
    ks = xs * 0 + ws * 0
    sp = s_ptr + rt0.to(gl.int64) * KB * 32 + (rs * (KB * 32) + (quad // 2) * 2 + xs % (U // 2))
    live_a = (rt0 + ra < NT) & (ka >= 0)
    live_s = (rt0 + rs < NT) & (ks >= 0)
    row = (rt0 + rs) * 16 + quad // 4
    oc0 = gl.load(oc_ptr + row, mask=live_s, other=0)
    oc1 = gl.load(oc_ptr + row + 8, mask=live_s, other=0)
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
            q0, q1, q2, q3 = gl.inline_asm_elementwise(SCALES_ROW, SCALES_C, [scale, oc0, oc1], dtype=H4, is_pure=True, pack=1)
            if U >= 4:
                e0 = gl.join(q0, q1).reshape([NW, R, 32, U // 4, 2, 2]).permute([0, 1, 3, 4, 5, 2]).reshape([NW, R, U, 32, 1])
                e1 = gl.join(q2, q3).reshape([NW, R, 32, U // 4, 2, 2]).permute([0, 1, 3, 4, 5, 2]).reshape([NW, R, U, 32, 1])
            else:
                e0 = gl.join(q0, q1).reshape([NW, R, 32, 2]).permute([0, 1, 3, 2]).reshape([NW, R, U, 32, 1])
                e1 = gl.join(q2, q3).reshape([NW, R, 32, 2]).permute([0, 1, 3, 2]).reshape([NW, R, U, 32, 1])
            w5 = word.reshape([NW, R, U, 32, 4])
            w5, e0 = gl.broadcast(w5, gl.convert_layout(e0, w5.type.layout, assert_trivial=True))
            w5, e1 = gl.broadcast(w5, gl.convert_layout(e1, w5.type.layout, assert_trivial=True))
            # pack = 4: the four words of a lane; output i = (s, e), its four elements are the adjacent codes j
            o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(WORDS_E4M3, WORDS_C, [w5, e0, e1], dtype=F8, is_pure=True, pack=4)
            o = gl.join(gl.join(gl.join(o0, o1), gl.join(o4, o5)), gl.join(gl.join(o2, o3), gl.join(o6, o7)))
            # NW R U g t j e s1 s0 -> R NW e g U s1 s0 t j
            o = o.reshape([NW, R, U, 8, 4, 4, 2, 2, 2]).permute([1, 0, 6, 3, 2, 7, 8, 4, 5]).reshape([BN, U * 64])
            op = gl.convert_layout(o, DOA, assert_trivial=True)
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
