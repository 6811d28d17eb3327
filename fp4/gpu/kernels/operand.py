"""W as the register operand of warp-group MMAs: where its words and scales lie in the fragment layouts, and their decode.

NW warps, one above the other in W, each with R row tiles that stand NW tiles apart; steps of 64 columns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fp4.gpu.kernels.gluon_decode import words_to_products
from fp4.gpu.kernels.natural import natural_operand, quad_lane


@gluon.jit
def at_words(KT, NW: gl.constexpr, R: gl.constexpr):
    """i32 [NW, R*128]: row tile, offset of the word in a step; and the number of a word's lane in its quad."""
    LA: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [NW, 1], [1, 0])
    warp = gl.arange(0, NW, layout=gl.SliceLayout(1, LA))[:, None]
    i = gl.arange(0, R * 128, layout=gl.SliceLayout(0, LA))[None, :]
    row = (i // 128) * NW + warp
    return row, row * (KT * 128) + i % 128, quad_lane(i % 128 + warp * 0, NW, R)


@gluon.jit
def at_scales(KB, KIND: gl.constexpr, U: gl.constexpr, NAT: gl.constexpr, NW: gl.constexpr, R: gl.constexpr):
    """Row tile, offset of the scale word in four steps: of a lane's own columns in U steps, or (NAT, U = 4) of all columns of its rows."""
    G: gl.constexpr = 64 // KIND
    W: gl.constexpr = 2 * G if NAT else U // 2
    LS: gl.constexpr = gl.BlockedLayout([1, W], [1, 32], [NW, 1], [1, 0])
    warp = gl.arange(0, NW, layout=gl.SliceLayout(1, LS))[:, None]
    i = gl.arange(0, R * 32 * W, layout=gl.SliceLayout(0, LS))[None, :]
    row = (i // (32 * W)) * NW + warp
    first = i % (32 * W) // W
    if NAT:
        first = first // 4
    elif KIND == 32:
        first = first // 2
    return row, row * (KB * 16 * G) + first * (W if NAT else 2) + i % W


@gluon.jit
def split_scales(s, NW: gl.constexpr, R: gl.constexpr, U: gl.constexpr):
    """i32 [NW, R*U*16] -> the word of step pair (0, 1) and of (2, 3), each [NW, R, 32]."""
    if U == 2:
        w0 = s.reshape([NW, R, 32])
        return w0, w0
    else:
        w0, w1 = s.reshape([NW, R, 32, 2]).split()
        return w0, w1


@gluon.jit
def operand(a, e0, e1, NW: gl.constexpr, R: gl.constexpr, HALF: gl.constexpr, DOA: gl.constexpr):
    """a: i32 [NW, R, 32, 4], e0, e1: scales [NW, R, 32] -> [R*NW*16, 64] as operand A, k order (s, h, t, l)."""
    s0 = e0.reshape([NW, R, 32, 1])
    s1 = e1.reshape([NW, R, 32, 1])
    a, s0 = gl.broadcast(a, gl.convert_layout(s0, a.type.layout, assert_trivial=True))
    a, s1 = gl.broadcast(a, gl.convert_layout(s1, a.type.layout, assert_trivial=True))
    o = words_to_products(a, s0, s1, HALF)
    # NW R (g t) s e h l -> R NW e g s h t l
    o = o.reshape([NW, R, 8, 4, 4, 2, 2, 2]).permute([1, 0, 5, 2, 4, 6, 3, 7]).reshape([R * NW * 16, 64])
    return gl.convert_layout(o, DOA, assert_trivial=True)


@gluon.jit
def tile_operand(a, e0, e1, lane, NAT: gl.constexpr, HALF: gl.constexpr, NW: gl.constexpr, R: gl.constexpr, DOA: gl.constexpr):
    """The words of a step, i32 [NW, R*128], as operand A: in the order of ``operand``, or (NAT) of x as it is."""
    if NAT:
        return natural_operand(a, e0, e1, lane, HALF, NW, R, DOA)
    else:
        return operand(a.reshape([NW, R, 32, 4]), e0, e1, NW, R, HALF, DOA)
