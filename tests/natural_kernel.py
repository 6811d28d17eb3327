"""A kernel that writes the operand that ``ws_tiles`` hands to the tensor cores (NAT), in the order of rows and columns of W."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fp4.gpu.kernels.gluon_decode import unpack_scales
from fp4.gpu.kernels.natural import quad_scales
from fp4.gpu.kernels.operand import at_scales, at_words, tile_operand


@gluon.jit
def operand(
    w_ptr, s_ptr, o_ptr, oc, KT: gl.constexpr, KIND: gl.constexpr, ANY: gl.constexpr, HALF: gl.constexpr, NW: gl.constexpr, R: gl.constexpr
):  # fmt: skip
    """R * NW * 16 rows of W, KT * 64 columns."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, 256, 16])
    DOA: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    _, oa, lane = at_words(KT, NW, R)
    _, os = at_scales(KT // 4, KIND, 4, True, NW, R)
    row = gl.arange(0, R * NW * 16, layout=gl.SliceLayout(1, DOA))[:, None]
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, DOA))[None, :]
    for k in gl.static_range(KT // 4):
        s = gl.load(s_ptr + k * (1024 // KIND) + os)
        s0, s1 = quad_scales(s, NW, R, 64 // KIND)
        for u in gl.static_range(4):
            q0, q1, q2, q3 = unpack_scales(s0 if u < 2 else s1, oc, KIND, ANY, HALF)
            a = gl.load(w_ptr + (k * 4 + u) * 128 + oa)
            if u % 2 == 0:
                op = tile_operand(a, q0, q2, lane, True, HALF, NW, R, DOA)
            else:
                op = tile_operand(a, q1, q3, lane, True, HALF, NW, R, DOA)
            gl.store(o_ptr + row * (KT * 64) + (k * 4 + u) * 64 + column, op)
