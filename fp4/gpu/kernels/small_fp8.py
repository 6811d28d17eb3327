"""W4A8 for few rows of x (decode): ``small_m`` on e4m3 x and the tables of ``decode_fp8``, products by 16-bit MMAs.

An e4m3 value is one of fp16, so weights and x become fp16 exactly, two at a time by a conversion, and the fp32 sums round less than an fp8
MMA's. 11 instructions for 8 codes; a scale costs nothing more, it is in the tables. Words (``frag_w8``) and scales go from device memory
straight to fragments, D steps ahead of use and before x is there; the WK partial sums of a block meet in shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from fp4.gpu.kernels import decode_fp8 as _d
from fp4.gpu.kernels.gluon_decode import H4, H8, barrier, cp_async, cp_commit, cp_wait
from fp4.gpu.kernels.pdl import gl_wait
from fp4.gpu.kernels.small_m import at_words, at_x, load_words

TABLES = gl.constexpr(_d.TABLES)
TABLES_C = gl.constexpr(_d.TABLES_CONSTRAINTS)
WORD = gl.constexpr(_d.WORD_FP16)
WORD_C = gl.constexpr(_d.WORD_FP16_CONSTRAINTS)
X = gl.constexpr(_d.X_FP16)
X_C = gl.constexpr(_d.X_FP16_CONSTRAINTS)
I8 = gl.constexpr((gl.int32,) * 8)


@gluon.jit
def _each_word(p0, p1, like, WK: gl.constexpr, WN: gl.constexpr, R: gl.constexpr, U: gl.constexpr):
    """A table register of tiles p = 0, 1, i32 [WK, WN, R*U*16] each -> one for every word, [WK, WN, R, U, 32, 4]."""
    t = gl.join(p0, p1).reshape([WK, WN, R, 32, U // 2, 2]).permute([0, 1, 2, 4, 5, 3]).reshape([WK, WN, R, U, 32, 1])
    _, t = gl.broadcast(like, gl.convert_layout(t, like.type.layout, assert_trivial=True))
    return t


@gluon.jit
def _operand_a(a, s, base, WK: gl.constexpr, WN: gl.constexpr, R: gl.constexpr, U: gl.constexpr, DOA: gl.constexpr):
    """a: i32 [WK, WN, R*U*128] words, s, base: i32 [WK, WN, R*U*16] -> fp16 [WK, R*WN*16, U*64]; k runs (u, s, h, t, l)."""
    a0, b0, a1, b1, c0, d0, c1, d1 = gl.inline_asm_elementwise(TABLES, TABLES_C, [s, base], dtype=I8, is_pure=True, pack=1)
    w = a.reshape([WK, WN, R, U, 32, 4])
    t = [
        w, _each_word(a0, a1, w, WK, WN, R, U), _each_word(b0, b1, w, WK, WN, R, U), _each_word(c0, c1, w, WK, WN, R, U),
        _each_word(d0, d1, w, WK, WN, R, U),
    ]  # fmt: skip
    o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(WORD, WORD_C, t, dtype=H8, is_pure=True, pack=1)
    o = gl.join(gl.join(gl.join(o0, o4), gl.join(o2, o6)), gl.join(gl.join(o1, o5), gl.join(o3, o7)))
    # WK WN R U g t s e h l -> WK R WN e g U s h t l
    o = o.reshape([WK, WN, R, U, 8, 4, 4, 2, 2, 2]).permute([0, 2, 1, 7, 4, 3, 6, 8, 5, 9]).reshape([WK, R * WN * 16, U * 64])
    return gl.convert_layout(o, DOA, assert_trivial=True)


@gluon.jit
def _operand_b(x, WK: gl.constexpr, MR: gl.constexpr, U: gl.constexpr):
    """x: i32 [WK, MR, U*16] words of four e4m3 -> fp16 [WK, U*64, MR] in the same order of k."""
    o0, o1, o2, o3 = gl.inline_asm_elementwise(X, X_C, [x], dtype=H4, is_pure=True, pack=1)
    o = gl.join(gl.join(o0, o2), gl.join(o1, o3))
    return o.reshape([WK, MR, U, 4, 4, 2, 2]).permute([0, 2, 4, 5, 3, 6, 1]).reshape([WK, U * 64, MR])


@gluon.jit
def small_fp8(
    x_ptr, xs_ptr, w_ptr, s_ptr, bias_ptr, y_ptr, base_ptr, ws_ptr, M, N,
    KT: gl.constexpr, HAS_BIAS: gl.constexpr, EVEN_N: gl.constexpr, WK: gl.constexpr, WN: gl.constexpr, R: gl.constexpr, U: gl.constexpr,
    MT: gl.constexpr, MR: gl.constexpr, D: gl.constexpr, XS: gl.constexpr,
):  # fmt: skip
    """x_ptr: i32 words of e4m3 x [M, KT * 64] in the order of k; MR: rows of x in shared memory (1, or MT); XS: slots of its ring, 0: x by
    global loads. xs: f32 [M]; base: i32 [NT, 8], ws: f32 [NT * 16] as in ``ws_fp8``. Grid (ceil(N / (16 R WN)),); D is 1 or 2.
    """
    LS: gl.constexpr = gl.BlockedLayout([1, 1, U // 2], [1, 1, 32], [WK, WN, 1], [2, 1, 0])
    LC: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 8 // U, 4 * U], [WK, WN, 1], [2, 1, 0])
    LX: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 1, 8, 4], [WK, WN, 1, 1], [3, 2, 1, 0])
    LX3: gl.constexpr = gl.SliceLayout(1, LX)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WK, WN, 1], [1, 16, 8])
    DOA: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    DOB: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    KB: gl.constexpr = (KT + 3) // 4
    ST: gl.constexpr = WK * U
    n: gl.constexpr = (KT + ST - 1) // ST
    EVEN_K: gl.constexpr = KT % ST == 0
    MASKED: gl.constexpr = not (EVEN_K and EVEN_N)
    rt0 = gl.program_id(0) * (WN * R)
    NT = (N + 15) // 16
    ap, ra, ka = at_words(w_ptr, rt0, KT, WK, WN, R, U)
    wks = gl.arange(0, WK, layout=gl.SliceLayout(1, gl.SliceLayout(2, LS)))[:, None, None]
    wns = gl.arange(0, WN, layout=gl.SliceLayout(0, gl.SliceLayout(2, LS)))[None, :, None]
    xs = gl.arange(0, R * U * 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, LS)))[None, None, :]
    rs = (xs // (U * 16)) * WN + wns
    lane = (xs % (U * 16)) // (U // 2)
    pair = wks * (U // 2) + xs % (U // 2)  # two tiles, one word of scales
    sp = s_ptr + rt0.to(gl.int64) * KB * 32 + (rs * (KB * 32) + pair // 2 * 32 + lane // 2 * 2 + pair % 2)
    live_a = (rt0 + ra < NT) & (ka >= 0)
    live_s = (rt0 + rs < NT) & (pair >= 0)
    a0 = load_words(ap, live_a & (ka < KT), MASKED)
    s0 = load_words(sp, live_s & (pair < 2 * KB), MASKED)
    a1 = a0
    s1 = s0
    a3 = a0
    s3 = s0
    if D > 1 and n > 1:
        a1 = load_words(ap + ST * 128, live_a & (ST + ka < KT), MASKED)
        s1 = load_words(sp + ST * 8, live_s & (ST // 2 + pair < 2 * KB), MASKED)
    base = gl.load(base_ptr + (rt0 + rs) * 8 + lane // 4, mask=live_s, other=0)
    gl_wait(True)  # x comes from the kernel in front
    if XS == 0:
        xp, mx, kx = at_x(x_ptr, M, KT * 16, U * 16, WK, MT, LX3)
        x0 = gl.load(xp) if EVEN_K else gl.load(xp, mask=(kx < KT * 16) & (mx >= 0), other=0)
    else:
        SX: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 2 if MR > 1 else 1, [2, 1, 0])
        sx = gl.allocate_shared_memory(gl.int32, [XS, WK, MR, U * 16], SX)
        xp, mx, kx = at_x(x_ptr, M, KT * 16, U * 16, WK, MR, LC)
    NPRE: gl.constexpr = 0 if XS == 0 else (n if n <= XS else XS - 1)
    for i in gl.static_range(NPRE):
        cp_async(sx.index(i), xp + i * (ST * 16), mask=(i * (ST * 16) + kx < KT * 16) & (mx >= 0))
        cp_commit()
    acc = gl.zeros([WK, WN * R * 16, MT], gl.float32, MMA)
    for i in gl.static_range(n):
        if i + D < n:
            a3 = load_words(ap + (i + D) * (ST * 128), live_a & ((i + D) * ST + ka < KT), MASKED)
            s3 = load_words(sp + (i + D) * (ST * 8), live_s & ((i + D) * (ST // 2) + pair < 2 * KB), MASKED)
        if XS == 0:
            x = x0
            if i + 1 < n:
                at = (i + 1) * (ST * 16)
                x0 = gl.load(xp + at) if EVEN_K else gl.load(xp + at, mask=(at + kx < KT * 16) & (mx >= 0), other=0)
        else:
            if n > XS:
                cp_wait(XS - 2)
                barrier()
            elif MR > 1:
                cp_wait(n - 1 - i)
                barrier()
            elif i == 0:
                cp_wait(0)
                barrier()
            x = sx.index(i % XS).load(LX3)
            if n > XS:
                if i + XS - 1 < n:
                    at = (i + XS - 1) * (ST * 16)
                    cp_async(sx.index((i + XS - 1) % XS), xp + at, mask=(at + kx < KT * 16) & (mx >= 0))
                cp_commit()
        if XS != 0 and MR == 1:
            one = _operand_b(x, WK, 1, U)
            b, _ = gl.broadcast(gl.convert_layout(one, DOB, assert_trivial=True), gl.zeros([WK, U * 64, MT], gl.float16, DOB))
        else:
            b = gl.convert_layout(_operand_b(x, WK, MT, U), DOB, assert_trivial=True)
        acc = mma_v2(_operand_a(a0, s0, base, WK, WN, R, U, DOA), b, acc)
        if D == 1:
            a0 = a3
            s0 = s3
        else:
            a0 = a1
            s0 = s1
            a1 = a3
            s1 = s3
    r = gl.sum(acc, axis=0)
    LR: gl.constexpr = r.type.layout
    rr = rt0 * 16 + gl.arange(0, WN * R * 16, layout=gl.SliceLayout(1, LR))
    rm = gl.arange(0, MT, layout=gl.SliceLayout(0, LR))
    r = r * gl.load(ws_ptr + rr, mask=rr < N, other=0.0)[:, None] * gl.load(xs_ptr + rm, mask=rm < M, other=0.0)[None, :]
    if HAS_BIAS:
        r += gl.load(bias_ptr + rr, mask=rr < N, other=0.0).to(gl.float32)[:, None]
    gl.store(y_ptr + rm.to(gl.int64)[None, :] * N + rr[:, None], r.to(y_ptr.dtype.element_ty), mask=(rm < M)[None, :] & (rr < N)[:, None])
