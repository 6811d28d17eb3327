"""Layers for the contract tests, built so that a fault shows: every expert, half and block has its own scale, pads are poisoned.

``dense`` and ``reference`` decode the *logical* tensors with the formulas of ``spec`` (a test compares them with ``fp4.ref``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import spec
import torch

import fp4

F64 = torch.float64


def quantized(format: str, *shape: int, seed: int, low: int | None = None, high: int | None = None, **second: Any) -> fp4.QuantizedTensor:
    """A tensor of random codes and block scales; mxfp4 bytes 118..122 and nvfp4 bytes 0x20..0x3f keep values near one."""
    g = torch.Generator().manual_seed(seed)
    block = 16 if format == "nvfp4" else 32
    low, high = (low, high) if low is not None else ((0x20, 0x40) if format == "nvfp4" else (118, 123))
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, generator=g)
    scale = torch.randint(low, high, (*shape[:-1], shape[-1] // block), dtype=torch.uint8, generator=g)
    return fp4.QuantizedTensor(format=format, codes=codes, scale=scale, **second)


def dense(q: fp4.QuantizedTensor) -> torch.Tensor:
    """float64 values, global scale included."""
    to_value = spec.e4m3 if q.format.name == "nvfp4" else spec.ue8m0
    value = spec.blocks(spec.e2m1(q.codes), to_value(q.scale))
    if q.global_scale is None:
        return value
    g = q.global_scale.to(F64)
    return value * (g.view(-1, 1, 1) if g.ndim else g)


def uneven(n: int, low: float, high: float, seed: int) -> torch.Tensor:
    """n different float32 multipliers that are no powers of two."""
    g = torch.Generator().manual_seed(seed)
    return (low + (high - low) * torch.rand(n, generator=g)).to(torch.float32)


@dataclass
class Layer:
    """One MoE layer and one batch. ``ids`` are global; expert ``empty`` gets no token."""

    format: str
    order: str | None = "interleaved"
    experts: int = 4
    hidden: int = 160
    inter: int = 96
    tokens: int = 7
    topk: int = 2
    bias: bool = True
    activation: Any = field(default_factory=lambda: fp4.SwiGLU(alpha=1.702, beta=1.0, limit=7.0))
    local: tuple[int, int] | None = None
    pair: str | None = None
    per_expert_input: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        e, h, i, s = self.experts, self.hidden, self.inter, self.seed
        nv = self.format == "nvfp4"
        rows = 2 * i if self.order else i
        second13 = {"global_scale": uneven(e, 0.02, 0.06, s + 1), "input_scale": self._input(0.001, 0.003, s + 2)} if nv else {}
        second2 = {"global_scale": uneven(e, 0.02, 0.06, s + 3), "input_scale": self._input(0.01, 0.05, s + 4)} if nv else {}
        if self.pair:
            up = second13["global_scale"] * (
                torch.tensor([2.0, 0.5, 1.0, 4.0] * e)[:e] if self.pair == "foldable" else uneven(e, 0.2, 3.0, s + 9)
            )
            gate = quantized(self.format, e, i, h, seed=s + 5, **second13)
            self.w13: Any = (gate, quantized(self.format, e, i, h, seed=s + 10, **{**second13, "global_scale": up}))
            self.order = "gate_up"
        else:
            self.w13 = quantized(self.format, e, rows, h, seed=s + 5, **second13)
        self.w2 = quantized(self.format, e, h, i, seed=s + 6, **second2)
        g = torch.Generator().manual_seed(s + 7)
        self.bias13 = torch.randn(e, rows, generator=g).to(torch.bfloat16).float() if self.bias else None
        self.bias2 = torch.randn(e, h, generator=g).to(torch.bfloat16).float() if self.bias else None
        self.x = torch.randn(self.tokens, h, generator=g).to(torch.bfloat16)
        self.empty = 1
        others = torch.tensor([j for j in range(e) if j != self.empty])
        pick = torch.stack([torch.randperm(len(others), generator=g)[: self.topk] for _ in range(self.tokens)]) if self.tokens else None
        self.ids = others[pick] if pick is not None else torch.zeros(0, self.topk, dtype=torch.int64)
        self.weights = torch.rand(self.tokens, self.topk, generator=g) + 0.1

    def _input(self, low: float, high: float, seed: int) -> torch.Tensor:
        t = uneven(self.experts, low, high, seed)
        return t if self.per_expert_input else t[0]

    def prepare(self, backend: str, device: Any, **kw: Any) -> Any:
        order = None if self.pair else self.order
        return fp4.prepare_moe(
            self.w13, self.w2, gate_up=order, bias13=self.bias13, bias2=self.bias2, activation=self.activation, backend=backend,
            device=device, local_experts=self.local, **kw,
        )  # fmt: skip

    def halves(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(gate, up) of columns [..., 2 i] in this layer's order."""
        if self.order == "interleaved":
            return h[..., 0::2], h[..., 1::2]
        first, second = h.chunk(2, -1)
        return (first, second) if self.order == "gate_up" else (second, first)

    def reference(
        self, xs: Callable[[int], torch.Tensor], ids: torch.Tensor | None = None, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """float64 [t, h]; ``xs(e)`` is the activation that expert e sees."""
        ids, weights = self.ids if ids is None else ids, self.weights if weights is None else weights
        w13 = torch.cat([dense(q) for q in self.w13], 1) if self.pair else dense(self.w13)
        w2 = dense(self.w2)
        start, stop = self.local or (0, self.experts)
        y = torch.zeros(self.tokens, self.hidden, dtype=F64)
        for e in range(start, stop):
            t, j = (ids == e).nonzero(as_tuple=True)
            h = xs(e)[t] @ w13[e].T
            if self.bias13 is not None:
                h = h + self.bias13[e].to(F64)
            h = self.act(*self.halves(h)) if self.order else h.clamp(min=0) ** 2
            v = h @ w2[e].T
            v = v if self.bias2 is None else v + self.bias2[e].to(F64)
            y.index_add_(0, t, weights[t, j].to(F64).unsqueeze(-1) * v)
        return y

    def act(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        a = self.activation
        if a.name == "situ":
            return a.beta * torch.tanh(gate / a.beta) * torch.sigmoid(gate) * a.linear_beta * torch.tanh(up / a.linear_beta)
        if a.name == "silu":
            return gate * torch.sigmoid(gate) * up
        limit = float("inf") if a.limit is None else a.limit
        g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
        return g * torch.sigmoid(a.alpha * g) * (u + a.beta)

    # what the kernel's activation quantiser makes of x
    def plain(self, e: int) -> torch.Tensor:
        return self.x.to(F64)

    def nvfp4(self, e: int) -> torch.Tensor:
        scale = self._w13_input()
        s = scale[e] if scale.ndim else scale
        return self._quantised(s)

    def nvfp4_shared(self, e: int) -> torch.Tensor:
        start, stop = self.local or (0, self.experts)
        scale = self._w13_input()
        return self._quantised(scale[start:stop].amax() if scale.ndim else scale)

    def _w13_input(self) -> torch.Tensor:
        return self.w13[0].input_scale if self.pair else self.w13.input_scale

    def _quantised(self, s: torch.Tensor) -> torch.Tensor:
        codes, scale = spec.nvfp4(self.x, 1.0 / s)
        return spec.blocks(spec.E2M1[codes], spec.e4m3(scale)) * float(s)

    def mxfp8(self, e: int) -> torch.Tensor:
        q, scale = spec.mxfp8(self.x)
        return spec.blocks(spec.e4m3(q), spec.ue8m0(scale))


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference over the largest value; NaN counts as infinite."""
    if torch.isnan(got).any():
        return float("inf")
    return float((got.to(F64) - want).abs().max() / want.abs().max().clamp_min(1e-300))


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill uninitialised memory: NaN for floats, the largest integer (0xFF bytes) else."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
