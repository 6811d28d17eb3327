# mypy: ignore-errors
"""What the grouped kernels share: entries of the schedule, activations in fp32, and on Hopper decode, gather of rows and epilogue."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fp4.gpu.kernels.gluon_decode import unpack_scales
from fp4.gpu.kernels.operand import operand

__all__ = ["RELU2", "SILU", "SITU", "SWIGLU", "activate", "decode", "entry", "epilogue", "finish", "gather"]

#: codes of the ACT parameter; 0 is the non-gated squared ReLU
RELU2, SWIGLU, SILU, SITU = 0, 1, 2, 3


@gluon.jit
def entry(sched_ptr, block):
    """(expert, first sorted row, rows) of a block of the schedule."""
    e = gl.load(sched_ptr + 1 + 3 * block)
    row0 = gl.load(sched_ptr + 2 + 3 * block)
    rows = gl.load(sched_ptr + 3 + 3 * block)
    return e, row0, rows


@gluon.jit
def _sigmoid(v):
    return 1.0 / (1.0 + gl.exp(-v))


@gluon.jit
def _tanh(v):
    # 1 - 2 / (e^2v + 1): right at both infinities; near zero the error is absolute (1e-7), far below the 16-bit rounding of the result
    return 1.0 - 2.0 / (gl.exp(2.0 * v) + 1.0)


@gluon.jit
def activate(gate, up, p0, p1, p2, ACT: gl.constexpr):
    """fp32 gate, up -> fp32. Comparisons keep NaN: a NaN gate or up gives NaN.

    0 squared ReLU of gate, whatever up is;
    1 SwiGLU(alpha = p0, beta = p1, limit = p2, infinity for none): g sigmoid(alpha g) (u + beta), g <= limit, |u| <= limit;
    2 SiLU: g sigmoid(g) u;
    3 SiTU(beta = p0, linear_beta = p1, 0 for none): beta tanh(g / beta) sigmoid(g) linear_beta tanh(u / linear_beta).
    """
    if ACT == 0:
        return gl.where(gate > 0, gate * gate, gl.where(gate == gate, 0.0, gate))
    elif ACT == 1:
        g = gl.where(gate > p2, p2, gate)
        u = gl.where(up > p2, p2, gl.where(up < -p2, -p2, up))
        return g * _sigmoid(p0 * g) * (u + p1)
    elif ACT == 2:
        return gate * _sigmoid(gate) * up
    else:
        g = p0 * _tanh(gate / p0) * _sigmoid(gate)
        return g * gl.where(p1 > 0, p1 * _tanh(up / p1), up)


@gluon.jit
def gather(
    x_ptr, order_ptr, row0, rows, topk,
    START: gl.constexpr, MT: gl.constexpr, KT: gl.constexpr, COLS: gl.constexpr, FIRST: gl.constexpr, LX: gl.constexpr,
):  # fmt: skip
    """Pointers [MT, COLS] to the first columns of a block's rows from START on, and whether each row exists, of the same shape.

    FIRST: rows of tokens, found through ``order``; else sorted rows. A row is 64 KT columns.
    """
    m = START + gl.arange(0, MT, layout=gl.SliceLayout(1, LX))
    k = gl.arange(0, COLS, layout=gl.SliceLayout(0, LX))[None, :]
    live = m < rows
    if FIRST:
        src = gl.load(order_ptr + row0 + m, mask=live, other=0) // topk
    else:
        src = gl.where(live, row0 + m, 0)
    return x_ptr + src.to(gl.int64)[:, None] * (KT * 64) + k, live[:, None] & (k >= 0)


@gluon.jit
def decode(
    a, s, oc, ODD: gl.constexpr, NW: gl.constexpr, R: gl.constexpr, KIND: gl.constexpr, ANY: gl.constexpr, HALF: gl.constexpr,
    DOA: gl.constexpr,
):  # fmt: skip
    """Words [NW, 128 R] and scale words [NW, 32 R] -> the A operand [16 R NW, 64]. ODD: which half of a scale word."""
    q0, q1, q2, q3 = unpack_scales(s.reshape([NW, R, 32]), oc, KIND, ANY, HALF)
    if ODD:
        w = operand(a.reshape([NW, R, 32, 4]), q1, q3, NW, R, HALF, DOA)
    else:
        w = operand(a.reshape([NW, R, 32, 4]), q0, q2, NW, R, HALF, DOA)
    return w


@gluon.jit
def epilogue(
    acc, alpha_ptr, bias_ptr, e, tile0, N: gl.constexpr, ACT: gl.constexpr, FIRST: gl.constexpr, BIAS: gl.constexpr, BN: gl.constexpr,
    MT: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """What ``finish`` multiplies acc [BN, MT] by and adds: global scales of expert e and biases, of gate and up if those differ."""
    a0 = gl.load(alpha_ptr + 2 * e)
    a1 = a0
    b0 = a0
    b1 = a0
    if FIRST and ACT != 0:
        gate, _ = gl.split(acc.reshape([BN // 16, 2, 8, MT]).permute([0, 2, 3, 1]))
        rt = gl.arange(0, BN // 16, layout=gl.SliceLayout(1, gl.SliceLayout(2, gate.type.layout)))[:, None, None]
        rg = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gate.type.layout)))[None, :, None]
        n = tile0 * 16 + rt * 16 + rg
        a1 = gl.load(alpha_ptr + 2 * e + 1)
        if BIAS:
            b0 = gl.load(bias_ptr + e * N + n, mask=n < N, other=0.0)
            b1 = gl.load(bias_ptr + e * N + n + 8, mask=n + 8 < N, other=0.0)
    else:
        if BIAS:
            n = tile0 * 16 + gl.arange(0, BN, layout=gl.SliceLayout(1, MMA))[:, None]
            b0 = gl.load(bias_ptr + e * N + n, mask=n < N, other=0.0)
    return a0, a1, b0, b1


@gluon.jit
def finish(
    acc, a0, a1, b0, b1, out_ptr, order_ptr, gamma_ptr, p0, p1, p2, row0, rows, tile0,
    N: gl.constexpr, ACT: gl.constexpr, FIRST: gl.constexpr, BIAS: gl.constexpr, HALF: gl.constexpr, NW: gl.constexpr, BN: gl.constexpr,
    MT: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """The epilogue of acc [BN, MT]: BN weight rows from row tile tile0 of an expert, sorted rows row0 .. row0 + rows; NW warps.

    a0, a1, b0, b1: ``epilogue``'s. FIRST: activation, in the fragments' k order of the next product, zeros up to its padded row. Else
    times gamma, to the pairs' rows.
    """
    DT: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    col = tile0 * 16
    if FIRST:
        if ACT != 0:
            gate, up = gl.split(acc.reshape([BN // 16, 2, 8, MT]).permute([0, 2, 3, 1]))
            gate = gate * a0
            up = up * a1
            if BIAS:
                gate += b0
                up += b1
            h = activate(gate, up, p0, p1, p2, ACT).to(DT)
            UN: gl.constexpr = BN // 2
            NO: gl.constexpr = N // 2
        else:
            acc = acc * a0
            if BIAS:
                acc += b0
            h = activate(acc, acc, p0, p1, p2, ACT).to(DT)
            UN: gl.constexpr = BN
            NO: gl.constexpr = N
        NP: gl.constexpr = (NO + 63) // 64 * 64
        unit = (col * UN) // BN
        # units t step h l -> fragment order step h t l
        if UN < 64:  # half of a 64-column tile: t = 0, 1 or t = 2, 3
            LH: gl.constexpr = gl.BlockedLayout([1, 1, 4], [4, 8, 1], [NW, 1, 1], [2, 1, 0])
            h = h.reshape([2, 4, 2, 2, MT]).permute([4, 1, 2, 0, 3]).reshape([MT, 8, 4])
            h = gl.convert_layout(h, LH)
            m = gl.arange(0, MT, layout=gl.SliceLayout(1, gl.SliceLayout(2, LH)))[:, None, None]
            sh = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, LH)))[None, :, None]
            tl = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, LH)))[None, None, :]
            place = (unit // 64) * 64 + (unit % 64) // 8 + sh * 8 + tl
        else:
            LO: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [NW, 1], [1, 0])
            h = h.reshape([UN // 64, 4, 4, 2, 2, MT]).permute([5, 0, 2, 3, 1, 4]).reshape([MT, UN])
            h = gl.convert_layout(h, LO)
            place = unit + gl.arange(0, UN, layout=gl.SliceLayout(0, LO))[None, :]
            m = gl.arange(0, MT, layout=gl.SliceLayout(1, LO))[:, None]
        gl.store(out_ptr + (row0 + m).to(gl.int64) * NP + place, h, mask=(m < rows) & (place < NP))
    else:
        m = gl.arange(0, MT, layout=gl.SliceLayout(0, MMA))
        acc = acc * a0
        if BIAS:
            acc += b0
        pair = gl.load(order_ptr + row0 + m, mask=m < rows, other=0)
        acc = acc * gl.load(gamma_ptr + pair, mask=m < rows, other=0.0).to(gl.float32)[None, :]
        LY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8] if BN == 64 else [2, 16], [NW, 1], [1, 0])
        y = gl.convert_layout(acc.to(out_ptr.dtype.element_ty).permute([1, 0]), LY)
        m = gl.arange(0, MT, layout=gl.SliceLayout(1, LY))
        n = col + gl.arange(0, BN, layout=gl.SliceLayout(0, LY))[None, :]
        pair = gl.load(order_ptr + row0 + m, mask=m < rows, other=0)[:, None]
        gl.store(out_ptr + pair.to(gl.int64) * N + n, y, mask=(m < rows)[:, None] & (n < N))
