"""W4A16 for few rows of x (decode): warps split k inside the CTA, weights go from device memory straight to tensor-core fragments.

One CTA owns R * WN * 16 output rows and all of k. Per step each of the WK warp groups reads U tiles of 16 x 64
codes for each of its R row tiles with one 16-byte load a lane a tile, D steps ahead of use. x comes through shared memory
(XS >= 1: ring slots of cp.async, all of a single row at once) or through global loads (XS = 0). The WK partial sums meet in shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from fp4.gpu.kernels.gluon_decode import barrier, cp_async, cp_commit, cp_wait, frag_a, frag_x, hold, reinterpret


@gluon.jit
def at_words(w_ptr, rt0, KT: gl.constexpr, WK: gl.constexpr, WN: gl.constexpr, R: gl.constexpr, U: gl.constexpr):
    """Words of a step, i32 [WK, WN, R*U*128]: pointers, row tile counted from rt0, k tile."""
    LA: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 1, 32], [WK, WN, 1], [2, 1, 0])
    wk = gl.arange(0, WK, layout=gl.SliceLayout(1, gl.SliceLayout(2, LA)))[:, None, None]
    wn = gl.arange(0, WN, layout=gl.SliceLayout(0, gl.SliceLayout(2, LA)))[None, :, None]
    i = gl.arange(0, R * U * 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, LA)))[None, None, :]
    row = (i // (U * 128)) * WN + wn
    kt = wk * U + (i % (U * 128)) // 128
    return w_ptr + rt0.to(gl.int64) * (KT * 128) + (row * (KT * 128) + wk * (U * 128) + i % (U * 128)), row, kt


@gluon.jit
def at_x(x_ptr, M, ROW: gl.constexpr, STEP: gl.constexpr, WK: gl.constexpr, MR: gl.constexpr, LX: gl.constexpr):
    """Words of x of a step [WK, MR, STEP]: pointers, row, word in the row. ROW: words of a row; rows past M are row 0."""
    w = gl.arange(0, WK, layout=gl.SliceLayout(1, gl.SliceLayout(2, LX)))[:, None, None]
    m = gl.arange(0, MR, layout=gl.SliceLayout(0, gl.SliceLayout(2, LX)))[None, :, None]
    k = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(1, LX)))[None, None, :]
    k = w * STEP + k
    return x_ptr + (gl.where(m < M, m, 0) * ROW + k), m, k


@gluon.jit
def load_words(p, live, MASKED: gl.constexpr):
    if MASKED:
        return gl.load(p, mask=live, other=0, eviction_policy="evict_first")
    else:
        return gl.load(p, eviction_policy="evict_first")


@gluon.jit
def _scales(s, WK: gl.constexpr, WN: gl.constexpr, WORDS: gl.constexpr):
    """The two words of each 64-bit word of scales."""
    lo, hi = gl.inline_asm_elementwise("mov.b64 {$0,$1},$2;", "=r,=r,l", [s], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
    return gl.join(lo, hi).reshape([WK, WN, WORDS])


@gluon.jit
def small_m(
    x_ptr, w_ptr, s_ptr, alpha_ptr, bias_ptr, y_ptr, M, N, oc,
    K: gl.constexpr, KIND: gl.constexpr, ANY: gl.constexpr, HALF: gl.constexpr, HAS_BIAS: gl.constexpr, EVEN_N: gl.constexpr,
    WK: gl.constexpr, WN: gl.constexpr, R: gl.constexpr, U: gl.constexpr, MT: gl.constexpr, MR: gl.constexpr,
    D: gl.constexpr, XS: gl.constexpr,
):  # fmt: skip
    """x_ptr: i32 words of x [M, K/2]; MR: rows of x held in shared memory (1, or MT); grid (ceil(N / (16 R WN)),).

    s_ptr: i64 words of the scales if U >= 4, else i32. With one row of x, XS is a power of two if it covers all of x.
    """
    WK * WN
    EVEN_K: gl.constexpr = K % (64 * WK * U) == 0
    MASKED: gl.constexpr = not (EVEN_K and EVEN_N)
    P: gl.constexpr = 2 if U >= 4 else 1  # words of scales that a lane loads at a time
    LS: gl.constexpr = gl.BlockedLayout([1, 1, U // 2 // P], [1, 1, 32], [WK, WN, 1], [2, 1, 0])
    LXC: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 4 // U if U <= 4 else 1, 8 * U if U <= 4 else 32], [WK, WN, 1], [2, 1, 0])
    LX: gl.constexpr = gl.BlockedLayout([1, 1, 1, 8], [1, 1, 8, 4], [WK, WN, 1, 1], [3, 2, 1, 0])
    LX3: gl.constexpr = gl.SliceLayout(1, LX)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WK, WN, 1], [1, 16, 8])
    DOA: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    DOB: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    KT: gl.constexpr = (K + 63) // 64
    KB: gl.constexpr = (KT + 3) // 4
    ST: gl.constexpr = WK * U
    NR: gl.constexpr = WN * R * 16
    n: gl.constexpr = (KT + ST - 1) // ST
    WHOLE: gl.constexpr = MR == 1 and n <= XS
    L: gl.constexpr = (64 if KIND == 16 else 32) // P  # loads' worth of scales of 16 rows and 256 columns
    pn = gl.program_id(0)
    rt0 = pn * (WN * R)
    NT = (N + 15) // 16
    ap, ra, ka = at_words(w_ptr, rt0, KT, WK, WN, R, U)
    wks = gl.arange(0, WK, layout=gl.SliceLayout(1, gl.SliceLayout(2, LS)))[:, None, None]
    wns = gl.arange(0, WN, layout=gl.SliceLayout(0, gl.SliceLayout(2, LS)))[None, :, None]
    xs = gl.arange(0, R * U * 16 // P, layout=gl.SliceLayout(0, gl.SliceLayout(1, LS)))[None, None, :]
    rs = (xs // (U * 16 // P)) * WN + wns
    lane = (xs % (U * 16 // P)) // (U // 2 // P)
    if KIND == 32:
        lane = lane // 2
    if U == 2:
        bs = wks // 2 + lane * 0
        lane = lane * 2 + wks % 2
    else:
        bs = wks * (U // 4) + xs % (U // 4)
    sp = s_ptr + rt0.to(gl.int64) * (KB * L) + (rs * (KB * L) + bs * L + lane)
    live_a = (rt0 + ra < NT) & (ka >= 0)
    live_s = (rt0 + rs < NT) & (bs >= 0)
    if XS == 0:
        xp, mx, kx = at_x(x_ptr, M, K // 2, U * 32, WK, MT, LX3)
        x0 = gl.load(xp, mask=(kx < K // 2) & (mx >= 0), other=0) if not EVEN_K else gl.load(xp)
    elif WHOLE:
        # one copy, since Triton puts a barrier between two into one allocation
        LF: gl.constexpr = gl.BlockedLayout([4], [32], [WK * WN], [0])
        flat = gl.allocate_shared_memory(gl.int32, [XS * ST * 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        kx = gl.arange(0, XS * ST * 32, layout=LF)
    else:
        SX: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8 if MR > 1 else 1, [2, 1, 0])
        sx = gl.allocate_shared_memory(gl.int32, [XS, WK, MR, U * 32], SX)
        xp, mx, kx = at_x(x_ptr, M, K // 2, U * 32, WK, MR, LXC)
    a0 = load_words(ap, live_a & (ka < KT), MASKED)
    s0 = load_words(sp, live_s & (bs < KB), MASKED)
    a1 = a0
    s1 = s0
    a3 = a0
    s3 = s0
    if WHOLE:
        if EVEN_K and n == XS:
            cp_async(flat, x_ptr + kx)
        else:
            cp_async(flat, x_ptr + kx, mask=kx < K // 2)
        cp_commit()
        sx = reinterpret(flat, gl.int32, [XS, WK, 1, U * 32], gl.SwizzledSharedLayout(4, 1, 1, [2, 1, 0]))
    NPRE: gl.constexpr = 0 if XS == 0 or WHOLE else (n if n <= XS else XS - 1)
    for i in gl.static_range(NPRE):
        if EVEN_K:
            cp_async(sx.index(i), xp + i * (ST * 32))
        else:
            cp_async(sx.index(i), xp + i * (ST * 32), mask=(i * (ST * 32) + kx < K // 2) & (mx >= 0))
        cp_commit()
    if D > 1 and n > 1:
        a1 = load_words(ap + ST * 128, live_a & (ST + ka < KT), MASKED)
        s1 = load_words(sp + (ST * L) // 4, live_s & (ST // 4 + bs < KB), MASKED)
    acc = gl.zeros([WK, NR, MT], gl.float32, MMA)
    for i in gl.static_range(n):
        if i + D < n:
            a3 = load_words(ap + (i + D) * (ST * 128), live_a & ((i + D) * ST + ka < KT), MASKED)
            s3 = load_words(sp + (i + D) * ((ST * L) // 4), live_s & ((i + D) * ST // 4 + bs < KB), MASKED)
        if XS == 0:
            x = x0
            if i + 1 < n:
                if EVEN_K:
                    x0 = gl.load(xp + (i + 1) * (ST * 32))
                else:
                    x0 = gl.load(xp + (i + 1) * (ST * 32), mask=((i + 1) * (ST * 32) + kx < K // 2) & (mx >= 0), other=0)
        else:
            if WHOLE:
                if i == 0:
                    hold()
                    cp_wait(0)
                    barrier()
            elif n <= XS:
                cp_wait(n - 1 - i)
                barrier()
            else:
                cp_wait(XS - 2)
                barrier()
            x = sx.index(i % XS).load(LX3)
            if n > XS:
                if i + XS - 1 < n:
                    if EVEN_K:
                        cp_async(sx.index((i + XS - 1) % XS), xp + (i + XS - 1) * (ST * 32))
                    else:
                        cp_async(
                            sx.index((i + XS - 1) % XS),
                            xp + (i + XS - 1) * (ST * 32),
                            mask=((i + XS - 1) * (ST * 32) + kx < K // 2) & (mx >= 0),
                        )
                cp_commit()
        if XS != 0 and MR == 1:
            one = frag_x(x, WK, 1, U, HALF)
            b, _ = gl.broadcast(gl.convert_layout(one, DOB, assert_trivial=True), gl.zeros([WK, U * 64, MT], one.dtype, DOB))
        else:
            b = gl.convert_layout(frag_x(x, WK, MT, U, HALF), DOB, assert_trivial=True)
        if i == n - 1:
            al = gl.load(alpha_ptr)
        sc = _scales(s0, WK, WN, R * U * 16) if P == 2 else s0
        acc = mma_v2(frag_a(a0, sc, oc, WK, WN, R, U, KIND, ANY, HALF, DOA), b, acc)
        if D == 1:
            a0 = a3
            s0 = s3
        else:
            a0 = a1
            s0 = s1
            a1 = a3
            s1 = s3
    C: gl.constexpr = MT if MT <= 32 else 32
    LR: gl.constexpr = gl.BlockedLayout([1, 1], [32 // C, C], [WK * WN, 1], [1, 0])
    sums = gl.allocate_shared_memory(gl.float32, [WK * NR, MT], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), acc.reshape([WK * NR, MT]))
    barrier()
    r = sums.slice(0, NR, 0).load(LR)
    for i in gl.static_range(1, WK):
        r += sums.slice(i * NR, NR, 0).load(LR)
    rr = pn * NR + gl.arange(0, NR, layout=gl.SliceLayout(1, LR))
    rm = gl.arange(0, MT, layout=gl.SliceLayout(0, LR))
    t = r * al
    if HAS_BIAS:
        t += gl.load(bias_ptr + rr, mask=rr < N, other=0.0).to(gl.float32)[:, None]
    o = rm.to(gl.int64)[None, :] * N + rr[:, None]
    gl.store(y_ptr + o, t.to(y_ptr.dtype.element_ty), mask=(rm < M)[None, :] & (rr < N)[:, None])
