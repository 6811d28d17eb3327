"""W4A16 for 17 and more rows of x on Hopper: y^T = W x^T, decoded weights stay in registers as the A operand of warp-group MMAs.

Both operands in shared memory would need 1,150 cycles of shared-memory traffic for 1,024 cycles of tensor work (benchmarks/NOTES.md);
with W in registers it is 770, and there is no store, fence and barrier between decode and MMA. The price is that x must come in the
fragments' k order: ``permute_x`` writes that order once a call (k in each 64 columns from (t, s, h, l) to (s, h, t, l)), padded to
whole tiles with zeros.

Step j (64 columns): decode the weight words fetched a macro step (U steps) earlier, one barrier for x slot j, start the MMA, refill the x
slot that MMA j - 2 has left, wait for MMA j - 1. The decode of step j + 1 runs under MMA j.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from fp4.gpu.kernels.gluon_decode import barrier, cp_async, cp_commit, cp_wait, unpack_scales
from fp4.gpu.kernels.operand import operand, split_scales
from fp4.gpu.kernels.pdl import gl_wait, trigger


@triton.jit
def permute_x(x_ptr, o_ptr, count_ptr, words, tiles, B: tl.constexpr, COUNTS: tl.constexpr):
    """x: i32 words [M, words] -> o: i32 [M, tiles * 32], words (t, s, h) of a tile to (s, h, t); zeros past ``words``.

    Grid (M, ceil(tiles / B)). The first program also zeroes the COUNTS counters that a split product uses.
    """
    trigger(True)
    m = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * (B * 32) + tl.arange(0, B * 32)
    x = tl.load(x_ptr + m * words + w, mask=w < words, other=0)
    y = x.reshape([B, 4, 4, 2]).permute([0, 2, 3, 1]).reshape([B * 32])
    tl.store(o_ptr + m * (tiles * 32) + w, y, mask=w < tiles * 32)
    if COUNTS > 0 and tl.program_id(0) + tl.program_id(1) == 0:
        c = tl.arange(0, COUNTS)
        tl.store(count_ptr + c, c * 0)


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
def _step(sx, op, before, acc, xp, okx, kt, kend, slot_r, slot_x, XS: gl.constexpr):
    """One MMA: wait for its x slot, start it, refill the slot that the MMA before the last has left, wait for the last one.

    ``before``, the operand of the last MMA, must stay in its registers until that wait: it is a dependency of it, and the steps of an
    even number are unrolled so that two sets of registers alternate without copies (``tests/sass.py`` checks the machine code).
    """
    cp_wait(XS - 3)
    barrier()
    acc = warpgroup_mma(op, sx.index(slot_r).permute([1, 0]), acc, is_async=True)
    jb = kt + (XS - 2)
    cp_async(sx.index(slot_x), xp + jb * 64, mask=okx & (jb < kend))
    cp_commit()
    acc, before = warpgroup_mma_wait(num_outstanding=1, deps=[acc, before])
    slot_r = gl.where(slot_r == XS - 1, 0, slot_r + 1)
    slot_x = gl.where(slot_x == XS - 1, 0, slot_x + 1)
    return acc, op, slot_r, slot_x


@gluon.jit
def wide_m(
    x_ptr, w_ptr, s_ptr, alpha_ptr, bias_ptr, y_ptr, part_ptr, count_ptr, M, N, KT, oc,
    KIND: gl.constexpr, ANY: gl.constexpr, HALF: gl.constexpr, HAS_BIAS: gl.constexpr, EVEN: gl.constexpr,
    BT: gl.constexpr, R: gl.constexpr, U: gl.constexpr, XS: gl.constexpr, GM: gl.constexpr, SPLIT: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """x_ptr: bf16 / fp16 [M, KT * 64] as ``permute_x`` wrote it; a CTA owns R * NW * 16 rows of W and BT rows of x.

    Grid (tiles of N times tiles of M, SPLIT), tiles of M in groups of GM. EVEN: N % (R NW 16) == 0 and KT % (U SPLIT) == 0.
    """
    BN: gl.constexpr = R * NW * 16
    DT: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    LA: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [NW, 1], [1, 0])
    LS: gl.constexpr = gl.BlockedLayout([1, U // 2], [1, 32], [NW, 1], [1, 0])
    LX: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [NW, 1], [1, 0])
    LY: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, NW], [0, 1])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, BT, 16])
    DOA: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    SX: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    L: gl.constexpr = 64 if KIND == 16 else 32
    KB = (KT + 3) // 4
    NT = (N + 15) // 16
    tiles_n = (N + BN - 1) // BN
    tiles_m = (M + BT - 1) // BT
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
    mx = pm * BT + gl.arange(0, BT, layout=gl.SliceLayout(1, LX))
    kx = gl.arange(0, 64, layout=gl.SliceLayout(0, LX))
    xp = x_ptr + mx.to(gl.int64)[:, None] * (KT * 64) + kx[None, :]
    okx = (mx < M)[:, None] & (kx >= 0)[None, :]
    sx = gl.allocate_shared_memory(DT, [XS, BT, 64], SX)
    a = _fetch(ap, live_a, kt0, kend, ka, EVEN)
    s = _fetch(sp + ((kt0 // 4) * L + (kt0 % 4) // 2), live_s, kt0, kend, ks, EVEN)
    gl_wait(True)  # x and the counters come from permute_x, the weights do not
    for i in gl.static_range(XS - 2):
        cp_async(sx.index(i), xp + (kt0 + i) * 64, mask=okx & (kt0 + i < kend))
        cp_commit()
    acc = gl.zeros([BN, BT], gl.float32, MMA)
    before = gl.zeros([BN, 64], DT, DOA)
    slot_r = 0
    slot_x = XS - 2
    for kt in range(kt0, kt0 + n * U, U):
        word = a
        scale = s
        nx = kt + U
        ap += U * 128
        a = _fetch(ap, live_a, nx, kend, ka, EVEN)
        s = _fetch(sp + ((nx // 4) * L + (nx % 4) // 2), live_s, nx, kend, ks, EVEN)
        a0, a1, a2, a3 = _split_words(word, NW, R, U)
        s0, s1 = split_scales(scale, NW, R, U)
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
                op = operand(w, q0, q2, NW, R, HALF, DOA)
            else:
                op = operand(w, q1, q3, NW, R, HALF, DOA)
            acc, before, slot_r, slot_x = _step(sx, op, before, acc, xp, okx, kt + u, kend, slot_r, slot_x, XS)
    r, before = warpgroup_mma_wait(num_outstanding=0, deps=[acc, before])
    cp_wait(0)
    if SPLIT == 1:
        r = r * gl.load(alpha_ptr)
        if HAS_BIAS:
            rb = pn * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, MMA))
            r += gl.load(bias_ptr + rb, mask=rb < N, other=0.0).to(gl.float32)[:, None]
        t = gl.convert_layout(r.to(y_ptr.dtype.element_ty), LY)
    else:
        t = gl.convert_layout(r, LY)
    rn = pn * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, LY))
    rm = pm * BT + gl.arange(0, BT, layout=gl.SliceLayout(0, LY))
    mk = (rm < M)[None, :] & (rn < N)[:, None]
    o = rm.to(gl.int64)[None, :] * N + rn[:, None]
    if SPLIT == 1:
        gl.store(y_ptr + o, t, mask=mk)
    else:
        mn = M.to(gl.int64) * N
        gl.store(part_ptr + pk * mn + o, t, mask=mk)
        barrier()
        old = gl.atomic_add(count_ptr + pid, 1, sem="acq_rel")
        if old == SPLIT - 1:
            t = gl.load(part_ptr + o, mask=mk, other=0.0, cache_modifier=".cg")
            for j in gl.static_range(1, SPLIT):
                t += gl.load(part_ptr + j * mn + o, mask=mk, other=0.0, cache_modifier=".cg")
            t = t * gl.load(alpha_ptr)
            if HAS_BIAS:
                t += gl.load(bias_ptr + rn, mask=rn < N, other=0.0).to(gl.float32)[:, None]
            gl.store(y_ptr + o, t.to(y_ptr.dtype.element_ty), mask=mk)
            gl.store(count_ptr + pid, 0)
