"""Gluon twins of ``decode.unpack_scales`` / ``unpack_words`` and of the fragment views, for layouts fixed by hand.

Importing this module needs ``triton.experimental.gluon``; ``available()`` in ``fp4.gpu.kernels.launch`` probes for it.
Names that moved between Triton releases are looked up by attribute.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy as _ac

from fp4.gpu.kernels import decode as _d

cp_async = getattr(_ac, "async_load", None) or _ac.async_copy_global_to_shared
cp_commit = _ac.commit_group
cp_wait = _ac.wait_group
barrier = getattr(gl, "thread_barrier", None) or gl.barrier
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

WB = gl.constexpr(_d.W_BF16)
WH = gl.constexpr(_d.W_FP16)
WC = gl.constexpr(_d.W_CONSTRAINTS)
SC = gl.constexpr(_d.S_CONSTRAINTS)
S16B = gl.constexpr(_d.S_E4M3_BF16)
S16H = gl.constexpr(_d.S_E4M3_FP16)
S16BA = gl.constexpr(_d.S_E4M3_BF16_ANY)
S16HA = gl.constexpr(_d.S_E4M3_FP16_ANY)
S32B = gl.constexpr(_d.S_UE8M0_BF16)
S32H = gl.constexpr(_d.S_UE8M0_FP16)
S32BA = gl.constexpr(_d.S_UE8M0_BF16_ANY)
S32HA = gl.constexpr(_d.S_UE8M0_FP16_ANY)
B4 = gl.constexpr((gl.bfloat16,) * 4)
H4 = gl.constexpr((gl.float16,) * 4)
B8 = gl.constexpr((gl.bfloat16,) * 8)
H8 = gl.constexpr((gl.float16,) * 8)
B2 = gl.constexpr((gl.bfloat16,) * 2)
H2 = gl.constexpr((gl.float16,) * 2)


@gluon.jit
def hold():
    """Loads above stay above: ptxas puts some of them off until after a wait that stands below, their values are wanted later still."""
    gl.inline_asm_elementwise("bar.warp.sync 0xffffffff; mov.u32 $0,0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def unpack_scales(s, oc, KIND: gl.constexpr, ANY: gl.constexpr, HALF: gl.constexpr):
    if KIND == 16:
        ASM: gl.constexpr = (S16HA if HALF else S16BA) if ANY else (S16H if HALF else S16B)
    else:
        ASM: gl.constexpr = (S32HA if HALF else S32BA) if ANY else (S32H if HALF else S32B)  # type: ignore[no-redef]
    return gl.inline_asm_elementwise(ASM, SC, [s, oc], dtype=H4 if HALF else B4, is_pure=True, pack=1)


@gluon.jit
def words_to_products(a, s0, s1, HALF: gl.constexpr):
    """a: i32 [...], s0, s1: scales of the same shape -> products [..., e, h, l]."""
    o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
        WH if HALF else WB, WC, [a, s0, s1], dtype=H8 if HALF else B8, is_pure=True, pack=1
    )
    return gl.join(gl.join(gl.join(o0, o4), gl.join(o2, o6)), gl.join(gl.join(o1, o5), gl.join(o3, o7)))


@gluon.jit
def frag_w(
    a,
    s,
    oc,
    WK: gl.constexpr,
    WN: gl.constexpr,
    R: gl.constexpr,
    U: gl.constexpr,
    KIND: gl.constexpr,
    ANY: gl.constexpr,
    HALF: gl.constexpr,
):
    """a: i32 [WK, WN, R*U*128], s: i32 [WK, WN, R*U*16] -> products [WK, WN, R, U, g, t, s, e, h, l]."""
    q0, q1, q2, q3 = unpack_scales(s, oc, KIND, ANY, HALF)
    if U >= 4:
        s0 = gl.join(q0, q1).reshape([WK, WN, R, 32, U // 4, 2, 2]).permute([0, 1, 2, 4, 5, 6, 3]).reshape([WK, WN, R, U, 32, 1])
        s1 = gl.join(q2, q3).reshape([WK, WN, R, 32, U // 4, 2, 2]).permute([0, 1, 2, 4, 5, 6, 3]).reshape([WK, WN, R, U, 32, 1])
    else:
        s0 = gl.join(q0, q1).reshape([WK, WN, R, 32, 2]).permute([0, 1, 2, 4, 3]).reshape([WK, WN, R, U, 32, 1])
        s1 = gl.join(q2, q3).reshape([WK, WN, R, 32, 2]).permute([0, 1, 2, 4, 3]).reshape([WK, WN, R, U, 32, 1])
    a6 = a.reshape([WK, WN, R, U, 32, 4])
    a6, s0 = gl.broadcast(a6, gl.convert_layout(s0, a6.type.layout, assert_trivial=True))
    a6, s1 = gl.broadcast(a6, gl.convert_layout(s1, a6.type.layout, assert_trivial=True))
    o = words_to_products(a6, s0, s1, HALF)
    return o.reshape([WK, WN, R, U, 8, 4, 4, 2, 2, 2])


@gluon.jit
def frag_a(
    a, s, oc, WK: gl.constexpr, WN: gl.constexpr, R: gl.constexpr, U: gl.constexpr, KIND: gl.constexpr, ANY: gl.constexpr,
    HALF: gl.constexpr, DOA: gl.constexpr,
):  # fmt: skip
    """The products as the A operand [WK, R*WN*16, U*64]; k runs (u, s, h, t, l), the order ``frag_x`` gives x."""
    o = frag_w(a, s, oc, WK, WN, R, U, KIND, ANY, HALF)
    # WK WN R U g t s e h l -> WK R WN e g U s h t l
    o = o.permute([0, 2, 1, 7, 4, 3, 6, 8, 5, 9]).reshape([WK, R * WN * 16, U * 64])
    return gl.convert_layout(o, DOA, assert_trivial=True)


@gluon.jit
def frag_x(x, WK: gl.constexpr, MT: gl.constexpr, U: gl.constexpr, HALF: gl.constexpr):
    """x: i32 [WK, MT, U*32] words of adjacent pairs -> [WK, U*64, MT], k order (u, s, h, t, l)."""
    o0, o1 = gl.inline_asm_elementwise("mov.b32 {$0,$1},$2;", "=h,=h,r", [x], dtype=H2 if HALF else B2, is_pure=True, pack=1)
    return gl.join(o0, o1).reshape([WK, MT, U, 4, 4, 2, 2]).permute([0, 2, 4, 5, 3, 6, 1]).reshape([WK, U * 64, MT])
