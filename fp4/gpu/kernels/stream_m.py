"""W4A16 for few rows of x (decode), one block a multiprocessor: every warp walks along its own rows of W.

``small_m`` gives a block 16 or 32 rows of W, so an H200 takes 1,792 blocks for N = 28672: each of them fetches x, waits for it, and adds
up what its warps found. Here the grid is what the GPU holds at once. A block takes a run of row tiles (16 rows each), all runs are equal or
differ by one, warp (wk, wn) of it the tiles wn, wn + WN, .. of the run and every WK-th 256 columns; x comes once a block. Weights go
from device memory to fragments through registers, D steps ahead, and never wait for a barrier: at the end the WK sums of a tile meet.

x of one row is held whole. More rows come through a ring of XS slots of S steps, copied by all threads and read by all warps.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from fp4.gpu.kernels.gluon_decode import B2, H2, barrier, cp_async, cp_commit, cp_wait, frag_a, frag_x, hold


@gluon.jit
def _policy():
    """The L2 policy of data that is read once. Made once: ``gl.load`` makes it for every load anew, of six uniform instructions."""
    return gl.inline_asm_elementwise("createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", "=l", [], dtype=gl.int64, is_pure=True, pack=1)


@gluon.jit
def _codes_bare(p, live, policy, WK: gl.constexpr, WN: gl.constexpr, R: gl.constexpr):
    """i32 [WK, WN, R * 512]: 16 bytes at each address, nothing where it is not live (``gl.load`` would write zeros first)."""
    a, b, c, d = gl.inline_asm_elementwise(
        "@$5 ld.global.L1::evict_first.L2::cache_hint.v4.b32 {$0,$1,$2,$3}, [$4], $6;", "=r,=r,=r,=r,l,b,l",
        [p.to(gl.int64), live, policy], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    return gl.join(gl.join(a, c), gl.join(b, d)).reshape([WK, WN, R * 512])


@gluon.jit
def _scales_bare(p, live, policy):
    return gl.inline_asm_elementwise(
        "@$2 ld.global.L1::evict_first.L2::cache_hint.b64 $0, [$1], $3;", "=l,l,b,l", [p.to(gl.int64), live, policy],
        dtype=gl.int64, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _words(p, live, mine, step, end, EVEN: gl.constexpr):
    """Words of a step where its row is live; beyond the end of k zeros stand for them, which nobody needs if rounds fit k (EVEN)."""
    if EVEN:
        return gl.load(p, mask=live, eviction_policy="evict_first")
    else:
        return gl.load(p, mask=live & (mine + step < end), other=0, eviction_policy="evict_first")


@gluon.jit
def _ahead(p, on, BYTES: gl.constexpr):
    """Ask the L2 cache for BYTES at each address that is on, best one a warp: the instruction is not one of lanes."""
    gl.inline_asm_elementwise(
        "{ .reg .pred q; setp.ne.b32 q,$2,0; @q cp.async.bulk.prefetch.L2.global [$1], $3; } mov.u32 $0,0;", "=r,l,r,r",
        [p.to(gl.int64), on.to(gl.int32), BYTES], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def stream_m(
    x_ptr, w_ptr, s_ptr, alpha_ptr, bias_ptr, y_ptr, M, N, oc,
    K: gl.constexpr, KIND: gl.constexpr, ANY: gl.constexpr, HALF: gl.constexpr, HAS_BIAS: gl.constexpr, WK: gl.constexpr,
    WN: gl.constexpr, R: gl.constexpr, MT: gl.constexpr, MR: gl.constexpr, D: gl.constexpr, S: gl.constexpr, XS: gl.constexpr,
    LOOP: gl.constexpr, PF: gl.constexpr, BARE: gl.constexpr,
):  # fmt: skip
    """x_ptr: i32 words of x [M, K/2]; s_ptr: i64 words of the scales. Grid (G,) with ceil(ceil(N / 16) / G) <= R * WN.

    A step is 256 columns; S steps make a round, D of them are under way (D divides S). MR: rows of x in shared memory, 1 (then all
    of x is there and XS does not count) or MT.
    """
    E: gl.constexpr = 4 if BARE else 1  # words at an address
    LA: gl.constexpr = gl.BlockedLayout([1, 1, 4 // E], [1, 1, 32], [WK, WN, 1], [2, 1, 0])
    LS: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 1, 32], [WK, WN, 1], [2, 1, 0])
    LX: gl.constexpr = gl.BlockedLayout([1, 1, 1, 8], [1, 1, 8, 4], [WK, WN, 1, 1], [3, 2, 1, 0])
    LX3: gl.constexpr = gl.SliceLayout(1, LX)
    # a copy of a round: S * 32 pieces of 16 bytes a row
    CW: gl.constexpr = min(WN, max(S, WN // MR))
    LC: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 1, 32], [WK, WN // CW, CW], [2, 1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WK, WN, 1], [1, 16, 8])
    DOA: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    DOB: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    KT: gl.constexpr = (K + 63) // 64
    KB: gl.constexpr = (KT + 3) // 4
    ROUNDS: gl.constexpr = (KB + S * WK - 1) // (S * WK)
    EVEN: gl.constexpr = KB == ROUNDS * S * WK and K % 256 == 0
    L: gl.constexpr = 32 if KIND == 16 else 16  # 64-bit words of scales of 16 rows and 256 columns
    NT = (N + 15) // 16
    q = NT // gl.num_programs(0)
    extra = NT - q * gl.num_programs(0)
    pid = gl.program_id(0)
    rt0 = pid * q + gl.minimum(pid, extra)
    count = gl.where(pid < extra, q + 1, q)

    wk = gl.arange(0, WK, layout=gl.SliceLayout(1, gl.SliceLayout(2, LA)))[:, None, None]
    wn = gl.arange(0, WN, layout=gl.SliceLayout(0, gl.SliceLayout(2, LA)))[None, :, None]
    xa = gl.arange(0, R * 512 // E, layout=gl.SliceLayout(0, gl.SliceLayout(1, LA)))[None, None, :] * E
    ra = (xa // 512) * WN + wn
    ka = wk * (4 * S) + (xa % 512) // 128
    ap = w_ptr + rt0.to(gl.int64) * (KT * 128) + (ra * (KT * 128) + wk * (512 * S) + xa % 512)
    live = (ra < count) & (ka >= 0)
    ws = gl.arange(0, WK, layout=gl.SliceLayout(1, gl.SliceLayout(2, LS)))[:, None, None]
    wr = gl.arange(0, WN, layout=gl.SliceLayout(0, gl.SliceLayout(2, LS)))[None, :, None]
    xs = gl.arange(0, R * 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, LS)))[None, None, :]
    rs = (xs // 32) * WN + wr
    lane = xs % 32
    if KIND == 32:
        lane = lane // 2
    sp = s_ptr + rt0.to(gl.int64) * (KB * L) + (rs * (KB * L) + ws * (L * S) + lane)
    live_s = (rs < count) & (ws >= 0)

    A = ()
    Q = ()
    pol = _policy() if BARE else 0
    for d in gl.static_range(D):
        if BARE:
            A = A + (_codes_bare(ap + d * 512, live, pol, WK, WN, R),)  # noqa: RUF005
            Q = Q + (_scales_bare(sp + d * L, live_s, pol),)  # noqa: RUF005
        else:
            A = A + (_words(ap + d * 512, live, ka, 4 * d, KT, EVEN),)  # noqa: RUF005
            Q = Q + (_words(sp + d * L, live_s, ws * S, d, KB, EVEN),)  # noqa: RUF005

    if PF > 0:
        lp = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, LS)))[None, None, :]
        pp = w_ptr + rt0.to(gl.int64) * (KT * 128) + (wr * (KT * 128) + ws * (512 * S))
        for f in gl.static_range(1, min(PF + 1, ROUNDS)):
            _ahead(pp + f * (WK * S * 512), (wr < count) & (lp == 0) & ((ws + f * WK + 1) * (S * 4) <= KT), S * 2048)
    # one copy a round: Triton puts a barrier between two copies into one allocation
    SX: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8 if MR > 1 else 1, [2, 1, 0])
    FIRST: gl.constexpr = ROUNDS if MR == 1 else XS - 1
    sx = gl.allocate_shared_memory(gl.int32, [ROUNDS if MR == 1 else XS, WK, MR, S * 128], SX)
    wc = gl.arange(0, WK, layout=gl.SliceLayout(1, gl.SliceLayout(2, LC)))[:, None, None]
    mc = gl.arange(0, MR, layout=gl.SliceLayout(0, gl.SliceLayout(2, LC)))[None, :, None]
    kc = gl.arange(0, S * 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, LC)))[None, None, :]
    kc = wc * (S * 128) + kc
    xp = x_ptr + (mc * (K // 2) + kc)
    for f in gl.static_range(FIRST):
        cp_async(sx.index(f), xp + (f % ROUNDS) * (S * WK * 128), mask=((f % ROUNDS) * (S * WK * 128) + kc < K // 2) & (mc < M))
        cp_commit()
    if MR == 1:
        cp_wait(0)
        barrier()
    passes = (count + WN * R - 1) // (WN * R) if LOOP else 1
    slot = 0
    fill = XS - 1
    want = (XS - 1) % ROUNDS  # the round that the next copy into the ring brings
    for p in range(0, passes):
        acc = gl.zeros([WK, WN * R * 16, MT], gl.float32, MMA)
        for i in range(0, ROUNDS):
            if MR > 1:
                cp_wait(XS - 2)
                barrier()
                word = want * (S * WK * 128)
                needed = (i + XS - 1) // ROUNDS + p < passes
                cp_async(sx.index(fill), xp + word, mask=(word + kc < K // 2) & (mc < M) & needed)
                cp_commit()
                fill = slot
            # this round, and the next: in this pass or the first of the following one
            here = i * (WK * S)
            next = here + WK * S
            if LOOP:
                last = i == ROUNDS - 1
                next = gl.where(last, 0, next)
                np = gl.where(last, p + 1, p)
                ah = ap + p.to(gl.int64) * (WN * R * KT * 128) + here * 512  # type: ignore[attr-defined]
                sh = sp + p.to(gl.int64) * (WN * R * KB * L) + here * L  # type: ignore[attr-defined]
                an = ap + np.to(gl.int64) * (WN * R * KT * 128) + next * 512
                sn = sp + np.to(gl.int64) * (WN * R * KB * L) + next * L
                live_h = (ra + p * (WN * R) < count) & (ka >= 0)
                live_sh = (rs + p * (WN * R) < count) & (ws >= 0)
                live_n = (ra + np * (WN * R) < count) & (ka >= 0)
                live_sn = (rs + np * (WN * R) < count) & (ws >= 0)
            else:
                ah = ap + here * 512
                sh = sp + here * L
                an = ap + next * 512
                sn = sp + next * L
                live_h = live
                live_sh = live_s
                live_n = live & (i < ROUNDS - 1)
                live_sn = live_s & (i < ROUNDS - 1)
                if PF > 0 and PF + 1 < ROUNDS:
                    far = i + (PF + 1)
                    _ahead(pp + far * (WK * S * 512), (wr < count) & (lp == 0) & ((ws + far * WK + 1) * (S * 4) <= KT), S * 2048)
            for j in gl.static_range(S):
                if MR == 1:
                    x = sx.index(i).slice(j * 128, 128, 2).load(LX3)
                    x = x.reshape([WK, 1, 128])
                    b0, b1 = gl.inline_asm_elementwise(
                        "mov.b32 {$0,$1},$2;", "=h,=h,r", [x], dtype=H2 if HALF else B2, is_pure=True, pack=1
                    )
                    bb = gl.join(b0, b1).reshape([WK, 1, 4, 4, 4, 2, 2]).permute([0, 2, 4, 5, 3, 6, 1]).reshape([WK, 256, 1])
                    zz = gl.zeros([WK, 256, MT], bb.dtype, DOB)
                    b, zz = gl.broadcast(gl.convert_layout(bb, DOB, assert_trivial=True), zz)
                else:
                    x = sx.index(slot).slice(j * 128, 128, 2).load(LX3)
                    b = frag_x(x.reshape([WK, MT, 128]), WK, MT, 4, HALF)
                    b = gl.convert_layout(b, DOB, assert_trivial=True)
                s0, s1 = gl.inline_asm_elementwise(
                    "mov.b64 {$0,$1},$2;", "=r,=r,l", [Q[0]], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
                )
                sc = gl.join(s0, s1).reshape([WK, WN, R * 64])
                op = frag_a(A[0], sc, oc, WK, WN, R, 4, KIND, ANY, HALF, DOA)
                # what takes its place: D steps ahead
                pa, ps, on, ons, at = (ah + (j + D) * 512, sh + (j + D) * L, live_h, live_sh, here + j + D)
                if j + D >= S:
                    pa, ps, on, ons, at = (an + (j + D - S) * 512, sn + (j + D - S) * L, live_n, live_sn, next + j + D - S)
                if BARE:
                    a = _codes_bare(pa, on, pol, WK, WN, R)
                    s = _scales_bare(ps, ons, pol)
                else:
                    a = _words(pa, on, ka, 4 * at, KT, EVEN)
                    s = _words(ps, ons, ws * S, at, KB, EVEN)
                hold()
                A = A[1:] + (a,)  # noqa: RUF005
                Q = Q[1:] + (s,)  # noqa: RUF005
                acc = mma_v2(op, b, acc)
            if MR > 1:
                slot = gl.where(slot == XS - 1, 0, slot + 1)
                want = gl.where(want == ROUNDS - 1, 0, want + 1)

        r = gl.sum(acc, axis=0)
        LR: gl.constexpr = r.type.layout
        rr = p * (WN * R * 16) + gl.arange(0, WN * R * 16, layout=gl.SliceLayout(1, LR))
        rm = gl.arange(0, MT, layout=gl.SliceLayout(0, LR))
        rn = rt0 * 16 + rr
        on = (rr < count * 16) & (rn < N)
        t = r * gl.load(alpha_ptr)
        if HAS_BIAS:
            t += gl.load(bias_ptr + rn, mask=on, other=0.0).to(gl.float32)[:, None]
        o = rm.to(gl.int64)[None, :] * N + rn[:, None]
        gl.store(y_ptr + o, t.to(y_ptr.dtype.element_ty), mask=(rm < M)[None, :] & on[:, None])
