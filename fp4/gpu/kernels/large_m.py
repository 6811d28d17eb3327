"""W4A16 for many rows of x on Hopper: weights are decoded into shared memory and multiplied by asynchronous warp-group MMAs.

One CTA makes a BM x BN tile of y = x wT. Step j (64 columns of k): decode the weight tile that was fetched a macro step (U steps)
earlier from registers into ring slot j % 3, fence, one barrier, start the MMA of step j, then wait until the MMA of step j - 1 is done.
So the decode of step j + 1 runs under the MMA of step j. Slot reuse: at the barrier of step j every warp has waited for MMA j - 2, so the
x slot of step j - 2 may be refilled; a weight slot is rewritten three steps later, after that same guarantee.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from fp4.gpu.kernels.gluon_decode import barrier, cp_async, cp_commit, cp_wait, unpack_scales, words_to_products


@gluon.jit
def _fetch(p, live, step, k_tiles, ka, EVEN: gl.constexpr):
    if EVEN:
        on = gl.full(p.shape, step < k_tiles, gl.int1, layout=p.type.layout)
        return gl.load(p, mask=on, other=0, eviction_policy="evict_first")
    else:
        return gl.load(p, mask=live & (step + ka < k_tiles), other=0, eviction_policy="evict_first")


@gluon.jit
def _split_words(a, WN: gl.constexpr, R: gl.constexpr, U: gl.constexpr):
    """i32 [WN, R*U*128] -> U tensors [WN, R, 32, 4]."""
    if U == 2:
        a0, a1 = a.reshape([WN, R, 2, 32, 4]).permute([0, 1, 3, 4, 2]).split()
        return a0, a1, a0, a1
    else:
        lo, hi = a.reshape([WN, R, 2, 2, 32, 4]).permute([0, 1, 3, 4, 5, 2]).split()
        a0, a1 = lo.permute([0, 1, 3, 4, 2]).split()
        a2, a3 = hi.permute([0, 1, 3, 4, 2]).split()
        return a0, a1, a2, a3


@gluon.jit
def _split_scales(s, WN: gl.constexpr, R: gl.constexpr, U: gl.constexpr):
    """i32 [WN, R*U*16] -> the word of step pair (0, 1) and of (2, 3), each [WN, R, 32]."""
    if U == 2:
        w0 = s.reshape([WN, R, 32])
        return w0, w0
    else:
        w0, w1 = s.reshape([WN, R, 32, 2]).split()
        return w0, w1


@gluon.jit
def _decode_to(slot, a, e0, e1, WN: gl.constexpr, R: gl.constexpr, HALF: gl.constexpr):
    """a: i32 [WN, R, 32, 4], e0, e1: scales [WN, R, 32] -> slot [R*WN*16, 64], natural order."""
    s0 = e0.reshape([WN, R, 32, 1])
    s1 = e1.reshape([WN, R, 32, 1])
    a, s0 = gl.broadcast(a, gl.convert_layout(s0, a.type.layout, assert_trivial=True))
    a, s1 = gl.broadcast(a, gl.convert_layout(s1, a.type.layout, assert_trivial=True))
    o = words_to_products(a, s0, s1, HALF)
    # WN R (g t) s e h l -> R WN e g t s h l
    o = o.reshape([WN, R, 8, 4, 4, 2, 2, 2]).permute([1, 0, 5, 2, 3, 4, 6, 7]).reshape([R * WN * 16, 64])
    slot.store(o)


@gluon.jit
def large_m(
    x_ptr, w_ptr, s_ptr, alpha_ptr, bias_ptr, y_ptr, part_ptr, count_ptr, M, N, K, oc,
    KIND: gl.constexpr, ANY: gl.constexpr, HALF: gl.constexpr, HAS_BIAS: gl.constexpr, EVEN: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, U: gl.constexpr, XS: gl.constexpr, GM: gl.constexpr, SPLIT: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """x: bf16 / fp16 [M, K] contiguous; grid (tiles of N times tiles of M, SPLIT), tiles of M in groups of GM for reuse in L2.

    EVEN: N % BN == 0 and K % (64 U SPLIT) == 0.
    """
    WM: gl.constexpr = 4 if BM == 64 else NW
    R: gl.constexpr = BN // (16 * NW)
    DT: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    LA: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [NW, 1], [1, 0])
    LS: gl.constexpr = gl.BlockedLayout([1, U // 2], [1, 32], [NW, 1], [1, 0])
    LX: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [NW, 1], [1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WM, NW // WM], [16, BN * WM // NW, 16])
    SX: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    L: gl.constexpr = 64 if KIND == 16 else 32
    KT = (K + 63) // 64
    KB = (KT + 3) // 4
    NT = (N + 15) // 16
    tiles_n = (N + BN - 1) // BN
    tiles_m = (M + BM - 1) // BM
    pid = gl.program_id(0)
    pk = gl.program_id(1)
    first = (pid // (GM * tiles_n)) * GM
    size = gl.minimum(tiles_m - first, GM)
    pm = first + (pid % (GM * tiles_n)) % size
    pn = (pid % (GM * tiles_n)) // size
    n = (KT + U * SPLIT - 1) // (U * SPLIT)
    kt0 = pk * (n * U)
    kend = gl.minimum(kt0 + n * U, KT)
    rt0 = pn * (R * NW)
    wn = gl.arange(0, NW, layout=gl.SliceLayout(1, LA))[:, None]
    xa = gl.arange(0, R * U * 128, layout=gl.SliceLayout(0, LA))[None, :]
    ra = (xa // (U * 128)) * NW + wn
    ka = (xa % (U * 128)) // 128 + wn * 0
    ap = w_ptr + (rt0.to(gl.int64) * KT + kt0) * 128 + (ra * (KT * 128) + xa % (U * 128))
    ws = gl.arange(0, NW, layout=gl.SliceLayout(1, LS))[:, None]
    xs = gl.arange(0, R * U * 16, layout=gl.SliceLayout(0, LS))[None, :]
    rs = (xs // (U * 16)) * NW + ws
    lane = (xs % (U * 16)) // (U // 2)
    if KIND == 32:
        lane = lane // 2
    ks = xs * 0 + ws * 0
    sp = s_ptr + (rt0.to(gl.int64) * KB) * L + (rs * (KB * L) + lane * 2 + xs % (U // 2))
    live_a = (rt0 + ra < NT) & (ka >= 0)
    live_s = (rt0 + rs < NT) & (ks >= 0)
    mx = pm * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, LX))
    kx = gl.arange(0, 64, layout=gl.SliceLayout(0, LX))
    xp = x_ptr + gl.minimum(mx, M - 1).to(gl.int64)[:, None] * K + kx[None, :]
    okx = (mx >= 0)[:, None]
    sx = gl.allocate_shared_memory(DT, [XS, BM, 64], SX)
    sw = gl.allocate_shared_memory(DT, [3, BN, 64], SX)
    a = _fetch(ap, live_a, kt0, kend, ka, EVEN)
    s = _fetch(sp + ((kt0 // 4) * L + (kt0 % 4) // 2), live_s, kt0, kend, ks, EVEN)
    for i in gl.static_range(XS - 2):
        cp_async(sx.index(i), xp + (kt0 + i) * 64, mask=okx & (kx < K - (kt0 + i) * 64)[None, :] & (kt0 + i < kend))
        cp_commit()
    acc = gl.zeros([BM, BN], gl.float32, MMA)
    slot_w = 0
    slot_r = 0
    slot_x = XS - 2
    for kt in range(kt0, kt0 + n * U, U):
        a0, a1, a2, a3 = _split_words(a, NW, R, U)
        s0, s1 = _split_scales(s, NW, R, U)
        nx = kt + U
        ap += U * 128
        a = _fetch(ap, live_a, nx, kend, ka, EVEN)
        s = _fetch(sp + ((nx // 4) * L + (nx % 4) // 2), live_s, nx, kend, ks, EVEN)
        q0, q1, q2, q3 = unpack_scales(s0, oc, KIND, ANY, HALF)
        for u in gl.static_range(U):
            if u == 2:
                q0, q1, q2, q3 = unpack_scales(s1, oc, KIND, ANY, HALF)
            w = a0
            if u == 1:
                w = a1
            if u == 2:
                w = a2
            if u == 3:
                w = a3
            if u % 2 == 0:
                _decode_to(sw.index(slot_w), w, q0, q2, NW, R, HALF)
            else:
                _decode_to(sw.index(slot_w), w, q1, q3, NW, R, HALF)
            cp_wait(XS - 3)
            fence_async_shared()
            barrier()
            acc = warpgroup_mma(sx.index(slot_r), sw.index(slot_w).permute([1, 0]), acc, is_async=True)
            jb = kt + u + (XS - 2)
            cp_async(sx.index(slot_x), xp + jb * 64, mask=okx & (kx < K - jb * 64)[None, :] & (jb < kend))
            cp_commit()
            acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])
            slot_w = gl.where(slot_w == 2, 0, slot_w + 1)
            slot_r = gl.where(slot_r == XS - 1, 0, slot_r + 1)
            slot_x = gl.where(slot_x == XS - 1, 0, slot_x + 1)
    r = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    cp_wait(0)
    LR: gl.constexpr = r.type.layout
    rm = pm * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, LR))
    rn = pn * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, LR))
    al = gl.load(alpha_ptr)
    mk = (rm < M)[:, None] & (rn < N)[None, :]
    o = rm.to(gl.int64)[:, None] * N + rn[None, :]
    if SPLIT > 1:
        mn = M.to(gl.int64) * N
        gl.store(part_ptr + pk * mn + o, r, mask=mk)
        barrier()
        old = gl.atomic_add(count_ptr + pid, 1, sem="acq_rel")
        if old == SPLIT - 1:
            r = gl.load(part_ptr + o, mask=mk, other=0.0, cache_modifier=".cg")
            for j in gl.static_range(1, SPLIT):
                r += gl.load(part_ptr + j * mn + o, mask=mk, other=0.0, cache_modifier=".cg")
            r = r * al
            if HAS_BIAS:
                r += gl.load(bias_ptr + rn, mask=rn < N, other=0.0).to(gl.float32)[None, :]
            gl.store(y_ptr + o, r.to(y_ptr.dtype.element_ty), mask=mk)
            gl.store(count_ptr + pid, 0)
    else:
        r = r * al
        if HAS_BIAS:
            r += gl.load(bias_ptr + rn, mask=rn < N, other=0.0).to(gl.float32)[None, :]
        gl.store(y_ptr + o, r.to(y_ptr.dtype.element_ty), mask=mk)
