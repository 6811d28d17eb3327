"""Activations of MoE layers as a Triton device function, in float32; the twin of ``fp4.ref.activation``."""

from __future__ import annotations

import triton
import triton.language as tl

from fp4.ref.activation import Activation, SiLU, SiTU, SwiGLU

__all__ = ["RELU2", "SILU", "SITU", "SWIGLU", "activate", "constants"]

RELU2, SWIGLU, SILU, SITU = 0, 1, 2, 3


def constants(act: Activation) -> tuple[int, tuple[float, float, float]]:
    """(ACT, (p0, p1, p2)) of ``activate`` for an activation value."""
    if isinstance(act, SwiGLU):
        return SWIGLU, (act.alpha, act.beta, float("inf") if act.limit is None else act.limit)
    if isinstance(act, SiTU):
        return SITU, (act.beta, act.linear_beta or 0.0, 0.0)
    return (SILU if isinstance(act, SiLU) else RELU2), (0.0, 0.0, 0.0)


#: 1 / (1 + exp(-v)) as Triton computes it, bit for bit: 1 + e forgets an e below 2^-126, so that may be flushed; a quarter of the sum,
#: which is exact, keeps the reciprocal of the largest sums from being flushed
_SIGMOID: tl.constexpr = tl.constexpr("""{
    .reg .f32 t;
    mul.rn.f32 t, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 t, t;
    fma.rn.f32 t, t, 0f3E800000, 0f3E800000;
    rcp.approx.ftz.f32 t, t;
    mul.rn.f32 $0, t, 0f3E800000;
}""")


@triton.jit
def _sigmoid(v, NATIVE: tl.constexpr):
    if NATIVE:
        s = tl.inline_asm_elementwise(_SIGMOID, "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1)
    else:
        s = 1.0 / (1.0 + tl.exp(-v))
    return s


@triton.jit
def _min_nan(a, b):
    return tl.inline_asm_elementwise("min.NaN.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _max_nan(a, b):
    return tl.inline_asm_elementwise("max.NaN.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _tanh(v):
    # right at both infinities; near zero the error is absolute (1e-7), far below the 16-bit rounding of the result
    return 1.0 - 2.0 / (tl.exp(2.0 * v) + 1.0)


@triton.jit
def activate(gate, up, p0, p1, p2, ACT: tl.constexpr, NATIVE: tl.constexpr = False):
    """fp32 gate, up -> fp32. Comparisons keep NaN: a NaN gate or up gives NaN. NATIVE: by instructions of SM80 and later, equal bits.

    0 ReLU2: max(gate, 0)^2, up is not used;
    1 SwiGLU(alpha = p0, beta = p1, limit = p2, infinity for none): g sigmoid(alpha g) (u + beta), g <= limit, |u| <= limit;
    2 SiLU: g sigmoid(g) u;
    3 SiTU(beta = p0, linear_beta = p1, 0 for none): beta tanh(g / beta) sigmoid(g) linear_beta tanh(u / linear_beta).
    """
    if ACT == 0:
        y = tl.where(gate > 0, gate * gate, tl.where(gate == gate, 0.0, gate))
    elif ACT == 1:
        if NATIVE:
            g = _min_nan(gate, p2)
            u = _max_nan(_min_nan(up, p2), -p2)
        else:
            g = tl.where(gate > p2, p2, gate)
            u = tl.where(up > p2, p2, tl.where(up < -p2, -p2, up))
        y = g * _sigmoid(p0 * g, NATIVE) * (u + p1)
    elif ACT == 2:
        y = gate * _sigmoid(gate, NATIVE) * up
    else:
        g = p0 * _tanh(gate / p0) * _sigmoid(gate, NATIVE)
        y = g * tl.where(p1 > 0, p1 * _tanh(up / p1), up)
    return y
