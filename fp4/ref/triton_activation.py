"""Activations of MoE layers as a Triton device function, in float32; the twin of ``fp4.ref.activation``."""

from __future__ import annotations

import triton
import triton.language as tl

from fp4.ref.activation import Activation, SiLU, SiTU, SwiGLU

__all__ = ["FREE", "RELU2", "SILU", "SITU", "SWIGLU", "activate", "constants"]

RELU2, SWIGLU, SILU, SITU, FREE = 0, 1, 2, 3, 4


def constants(act: Activation) -> tuple[int, tuple[float, float, float]]:
    """(ACT, (p0, p1, p2)) of ``activate`` for an activation value."""
    if isinstance(act, SwiGLU):
        return (FREE, (act.alpha, act.beta, 0.0)) if act.limit is None else (SWIGLU, (act.alpha, act.beta, act.limit))
    if isinstance(act, SiTU):
        return SITU, (act.beta, act.linear_beta or 0.0, 0.0)
    return (SILU if isinstance(act, SiLU) else RELU2), (0.0, 0.0, 0.0)


#: -1 / ln 2
_RATE: tl.constexpr = tl.constexpr(-1.4426950408889634)
#: 4 / (1 + 2^t) as Triton computes it, bit for bit: 1 + e forgets an e below 2^-126, so that may be flushed; a quarter of the sum, which is
#: exact, keeps the reciprocal of the largest sums from being flushed
_SIGMOID4: tl.constexpr = tl.constexpr("""{
    .reg .f32 t;
    ex2.approx.ftz.f32 t, $1;
    fma.rn.f32 t, t, 0f3E800000, 0f3E800000;
    rcp.approx.ftz.f32 $0, t;
}""")


@triton.jit
def _sigmoid4(t, NATIVE: tl.constexpr):
    """f32 -> 4 / (1 + 2^t): four times the sigmoid of -t ln 2. Multiplying by 4 and by 1/4 rounds nothing but subnormal numbers."""
    if NATIVE > 0:
        s = tl.inline_asm_elementwise(_SIGMOID4, "=f,f", [t], dtype=tl.float32, is_pure=True, pack=1)
    else:
        s = 1.0 / (tl.exp2(t) * 0.25 + 0.25)
    return s


@triton.jit
def _quarter_sum(u, beta, NATIVE: tl.constexpr):
    """(u + beta) / 4: a quarter of the rounded sum, unless the sum is a subnormal number of more digits than u and beta have."""
    if NATIVE > 0:
        ASM: tl.constexpr = "fma.rn.f32 $0, $1, 0f3E800000, $2;"
        y = tl.inline_asm_elementwise(ASM, "=f,f,f", [u, beta * 0.25], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = (u + beta) * 0.25
    return y


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
def activate(gate, up, p0, p1, p2, ACT: tl.constexpr, NATIVE: tl.constexpr = 0, CLAMPED: tl.constexpr = 0):
    """fp32 gate, up -> fp32. Comparisons keep NaN: a NaN gate or up gives NaN. NATIVE > 0: by instructions of SM80 and later, equal bits.

    0 ReLU2: max(gate, 0)^2, up is not used;
    1 SwiGLU(alpha = p0, beta = p1, limit = p2): g sigmoid(alpha g) (u + beta), g <= limit, |u| <= limit; 4 the same without a limit;
    2 SiLU: g sigmoid(g) u;
    3 SiTU(beta = p0, linear_beta = p1, 0 for none): beta tanh(g / beta) sigmoid(g) linear_beta tanh(u / linear_beta).

    CLAMPED: what the caller has clamped already: 1 g and u from above, 2 u from below as well.
    """
    if ACT == 0:
        y = tl.where(gate > 0, gate * gate, tl.where(gate == gate, 0.0, gate))
    elif ACT == 1:
        g, u = gate, up
        if NATIVE > 0:
            if CLAMPED == 0:
                g, u = _min_nan(g, p2), _min_nan(u, p2)
            if CLAMPED < 2:
                u = _max_nan(u, -p2)
        else:
            g = tl.where(g > p2, p2, g)
            u = tl.where(u > p2, p2, tl.where(u < -p2, -p2, u))
        # alpha and 1 / ln 2 are one factor; the quarter of the sum undoes the 4 and costs nothing. g is at most the limit, 4 g no infinity
        y = g * _sigmoid4(g * (p0 * _RATE), NATIVE) * _quarter_sum(u, p1, NATIVE)
    elif ACT == 4:
        y = gate * (_sigmoid4(gate * (p0 * _RATE), NATIVE) * 0.25) * (up + p1)
    elif ACT == 2:
        y = gate * (_sigmoid4(gate * _RATE, NATIVE) * 0.25) * up
    else:
        g = p0 * _tanh(gate / p0) * (_sigmoid4(gate * _RATE, NATIVE) * 0.25)
        y = g * tl.where(p1 > 0, p1 * _tanh(up / p1), up)
    return y
