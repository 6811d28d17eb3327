"""Weights of the fragment layouts brought into the natural order of k inside the registers of a warp, so that x can stay as it is.

``frag_w`` gives lane t of a quad the columns 16 t .. 16 t + 15 of each 64: words s = 0..3 of the columns 16 t + 4 s + 2 h + l. A step of 16
columns of an MMA wants of lane t the columns 2 t + l and 8 + 2 t + l of its 16. So lane t, with t = 2 t1 + t0, needs the halves h = t0 of
the words s = t1 and s = 2 + t1 of all four lanes: two exchanges between lanes, of t1 with s (whole words) and of t0 with h. The second
leaves the halves in their words: a rotation by a number of bits that depends on t0 brings either half under the same masks.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fp4.gpu.kernels.gluon_decode import B4, H4

#: $0..$3: words (2 h' + t1) of lanes 0..3 of the quad; $4, $5: this lane's words 2 h', 2 h' + 1; $6: its number in the quad
EXCHANGE = (
    "{ .reg .pred p,q; .reg .b32 a,b,c,d,e,f; and.b32 a,$6,1; and.b32 b,$6,2; setp.ne.u32 p,a,0; setp.ne.u32 q,b,0;"
    "selp.b32 a,$4,$5,q; selp.b32 b,$5,$4,q; shfl.sync.bfly.b32 a,a,2,31,0xffffffff; selp.b32 c,a,b,q; selp.b32 d,b,a,q;"
    "shfl.sync.bfly.b32 e,c,1,31,0xffffffff; shfl.sync.bfly.b32 f,d,1,31,0xffffffff;"
    "selp.b32 $0,e,c,p; selp.b32 $1,c,e,p; selp.b32 $2,f,d,p; selp.b32 $3,d,f,p; }"
)
EXCHANGE_CONSTRAINTS = "=r,=r,=r,=r,r,r,r"

#: code asm of the half t0 of a word: $0..$3 products (e, l); $4 word; $5, $6 scales of rows e = 0, 1; $7.. rotations to the left
HALF_BF16 = (
    "{ .reg .b32 t,u,s0,s1,z; mov.b32 z,0; mov.b32 s0,{$5,$5}; mov.b32 s1,{$6,$6};"
    "shf.l.wrap.b32 t,$4,$4,$7; and.b32 t,t,0x81C081C0; fma.rn.bf16x2 t,t,s0,z; mov.b32 {$0,$1},t;"
    "shf.l.wrap.b32 t,$4,$4,$8; and.b32 t,t,0x01C001C0; shf.l.wrap.b32 u,$4,$4,$9; and.b32 u,u,0x80008000; or.b32 t,t,u;"
    "fma.rn.bf16x2 t,t,s1,z; mov.b32 {$2,$3},t; }"
)
HALF_FP16 = (
    "{ .reg .b32 t,u,s0,s1; mov.b32 s0,{$5,$5}; mov.b32 s1,{$6,$6};"
    "shf.l.wrap.b32 t,$4,$4,$8; and.b32 t,t,0x0E000E00; shf.l.wrap.b32 u,$4,$4,$7; and.b32 u,u,0x80008000; or.b32 t,t,u;"
    "mul.rn.f16x2 t,t,s0; mov.b32 {$0,$1},t;"
    "shf.l.wrap.b32 t,$4,$4,$10; and.b32 t,t,0x0E000E00; shf.l.wrap.b32 u,$4,$4,$9; and.b32 u,u,0x80008000; or.b32 t,t,u;"
    "mul.rn.f16x2 t,t,s1; mov.b32 {$2,$3},t; }"
)
#: rotations (t0 = 0, t0 = 1) behind the scales: bf16 both of e0, magnitude of e1, sign of e1; fp16 sign and magnitude of e0, sign and
#: magnitude of e1
ROTATIONS = {False: ((0, 3), (29, 6), (2, 1)), True: ((0, 3), (3, 6), (2, 1), (0, 9))}

_EX, _EC = gl.constexpr(EXCHANGE), gl.constexpr(EXCHANGE_CONSTRAINTS)
_HB, _HBC = gl.constexpr(HALF_BF16), gl.constexpr("=&h,=&h,=&h,=&h,r,h,h,r,r,r")
_HH, _HHC = gl.constexpr(HALF_FP16), gl.constexpr("=&h,=&h,=&h,=&h,r,h,h,r,r,r,r")
_W4 = gl.constexpr((gl.int32,) * 4)


@gluon.jit
def natural_operand(a, e0, e1, lane, HALF: gl.constexpr, NW: gl.constexpr, R: gl.constexpr, DOA: gl.constexpr):
    """a: i32 [NW, R*128] as stored; e0, e1: scales [NW, R, 32, G] of the quad's G = 4 or 2 groups; lane: ``quad_lane``.

    -> [R*NW*16, 64] as operand A, k in natural order. All lanes of a warp must come here together.
    """
    G: gl.constexpr = e0.shape[3]
    w0, w1 = a.reshape([NW, R, 32, 2, 2]).split()
    d0, d1, d2, d3 = gl.inline_asm_elementwise(_EX, _EC, [w0, w1, lane], dtype=_W4, is_pure=False, pack=1)
    # NW R 32 h' j0 j1 -> NW R 32 j h'
    d = gl.join(gl.join(d0, d1), gl.join(d2, d3)).permute([0, 1, 2, 5, 4, 3])
    d = d.reshape([NW, R, 32, G, 4 // G, 2])
    t0 = gl.convert_layout(lane.reshape([NW, R, 32, 1, 1, 2]) & 1, d.type.layout, assert_trivial=True)
    d, t0 = gl.broadcast(d, t0)
    d, s0 = gl.broadcast(d, gl.convert_layout(e0.reshape([NW, R, 32, G, 1, 1]), d.type.layout, assert_trivial=True))
    d, s1 = gl.broadcast(d, gl.convert_layout(e1.reshape([NW, R, 32, G, 1, 1]), d.type.layout, assert_trivial=True))
    if HALF:
        o0, o1, o2, o3 = gl.inline_asm_elementwise(
            _HH, _HHC, [d, s0, s1, 3 * t0, 3 + 3 * t0, 2 - t0, 9 * t0], dtype=H4, is_pure=True, pack=1
        )
    else:
        o0, o1, o2, o3 = gl.inline_asm_elementwise(_HB, _HBC, [d, s0, s1, 3 * t0, 29 - 23 * t0, 2 - t0], dtype=B4, is_pure=True, pack=1)
    o = gl.join(gl.join(o0, o2), gl.join(o1, o3))
    # NW R (g t) j h' e l -> R NW e g j h' t l
    o = o.reshape([NW, R, 8, 4, 4, 2, 2, 2]).permute([1, 0, 6, 2, 4, 5, 3, 7]).reshape([R * NW * 16, 64])
    return gl.convert_layout(o, DOA, assert_trivial=True)


@gluon.jit
def quad_lane(i, NW: gl.constexpr, R: gl.constexpr):
    """i: i32 [NW, R*128], 0 .. 127 in each row tile -> number of the lane in its quad, [NW, R, 32, 2]."""
    lane, _ = (i // 4 % 4).reshape([NW, R, 32, 2, 2]).split()
    return lane


@gluon.jit
def quad_scales(s, NW: gl.constexpr, R: gl.constexpr, G: gl.constexpr):
    """i32 [NW, R*32*2 G], all scales of a lane's rows for 256 columns -> the words of steps (0, 1) and of (2, 3), each [NW, R, 32, G]."""
    return s.reshape([NW, R, 32, G, 2]).split()
