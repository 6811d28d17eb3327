# mypy: ignore-errors
"""Activations of the grouped kernels, in fp32."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["RELU2", "SILU", "SITU", "SWIGLU", "activate"]

#: codes of the ACT parameter; 0 is the non-gated squared ReLU
RELU2, SWIGLU, SILU, SITU = 0, 1, 2, 3


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

    1 SwiGLU(alpha = p0, beta = p1, limit = p2, infinity for none): g sigmoid(alpha g) (u + beta), g <= limit, |u| <= limit;
    2 SiLU: g sigmoid(g) u;
    3 SiTU(beta = p0, linear_beta = p1, 0 for none): beta tanh(g / beta) sigmoid(g) linear_beta tanh(u / linear_beta).
    """
    if ACT == 1:
        g = gl.where(gate > p2, p2, gate)
        u = gl.where(up > p2, p2, gl.where(up < -p2, -p2, up))
        return g * _sigmoid(p0 * g) * (u + p1)
    elif ACT == 2:
        return gate * _sigmoid(gate) * up
    else:
        g = p0 * _tanh(gate / p0) * _sigmoid(gate)
        return g * gl.where(p1 > 0, p1 * _tanh(up / p1), up)
