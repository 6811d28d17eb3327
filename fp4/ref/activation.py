"""Activations of MoE layers, as frozen values: a backend compares them, refuses those it cannot serve, or calls them.

A gated activation takes the two halves of the first product, gate and up; a plain one takes its single output. All compute in the dtype
of their input (float32 or float64 in the reference) and round nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Union

import torch

from fp4.errors import FormatMismatch, shown
from fp4.tensor import GATE_UP_ORDERS

__all__ = ["Activation", "ReLU2", "SiLU", "SiTU", "SwiGLU", "apply", "get", "names", "split_gate_up"]


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf and abs(value) < 2.0**1023


def _positive(where: str, name: str, value: Any, optional: str = "") -> None:
    if value is None and optional:
        return
    if not _finite(value) or value <= 0:
        hint = f", or None for {optional}" if optional else ""
        raise FormatMismatch(f"{where}: {name} is {shown(value)}; need a positive finite number{hint}")


@dataclass(frozen=True)
class SwiGLU:
    """``g = min(gate, limit); u = clamp(up, -limit, limit); y = g * sigmoid(alpha * g) * (u + beta)``.

    The gate is clamped from above only. ``limit=None`` clamps nothing. The defaults are GPT-OSS: alpha 1.702, beta 1, limit 7
    (openai/gpt-oss ``swiglu``, FlashInfer ``gemm1_alpha``, ``gemm1_beta``, ``gemm1_clamp_limit``).
    """

    alpha: float = 1.702
    beta: float = 1.0
    limit: float | None = 7.0

    name: ClassVar[str] = "swiglu"
    gated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        # 0 is refused: some kernels read it as "no clamp", others clamp everything to 0
        _positive("SwiGLU", "limit", self.limit, optional="no clamp")
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if not _finite(value):
                raise FormatMismatch(f"SwiGLU: {name} is {shown(value)}; need a finite number")

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.beta)


@dataclass(frozen=True)
class SiLU:
    """``y = gate * sigmoid(gate) * up`` (SwiGLU with alpha 1, beta 0 and no limit; Llama, Qwen, Mixtral, DeepSeek)."""

    name: ClassVar[str] = "silu"
    gated: ClassVar[bool] = True

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return gate * torch.sigmoid(gate) * up


@dataclass(frozen=True)
class SiTU:
    """``y = beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)`` (Kimi-K3: beta 4, linear_beta 25).

    ``linear_beta=None`` leaves ``up`` as it is.
    """

    beta: float = 4.0
    linear_beta: float | None = 25.0

    name: ClassVar[str] = "situ"
    gated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _positive("SiTU", "beta", self.beta)
        _positive("SiTU", "linear_beta", self.linear_beta, optional="a plain up half")

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.linear_beta is not None:
            up = self.linear_beta * torch.tanh(up / self.linear_beta)
        return self.beta * torch.tanh(gate / self.beta) * torch.sigmoid(gate) * up


@dataclass(frozen=True)
class ReLU2:
    """``y = max(x, 0)^2``; not gated: the first matrix has I rows, not 2I (Nemotron)."""

    name: ClassVar[str] = "relu2"
    gated: ClassVar[bool] = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        positive = x.clamp(min=0)
        return positive * positive


Activation = Union[SwiGLU, SiLU, SiTU, ReLU2]  # noqa: UP007  (a runtime value for isinstance on Python 3.10)

_BY_NAME: dict[str, Activation] = {"silu": SiLU(), "swiglu_oai": SwiGLU(), "situ": SiTU(), "relu2": ReLU2()}


def names() -> list[str]:
    """Names that ``get`` accepts, each with its published default parameters."""
    return list(_BY_NAME)


def get(activation: Activation | str) -> Activation:
    """The activation of a name; a value is returned as it is.

    Raises FormatMismatch for anything else: an unknown activation never becomes SiLU (tokenspeed issue 749).
    """
    if isinstance(activation, (SwiGLU, SiLU, SiTU, ReLU2)):
        return activation
    found = _BY_NAME.get(activation) if isinstance(activation, str) else None
    if found is None:
        need = "fp4.SwiGLU(...), fp4.SiLU(), fp4.SiTU(...), fp4.ReLU2() or one of " + ", ".join(_BY_NAME)
        raise FormatMismatch(f"activation: {shown(activation)} is not known; need {need}")
    return found


def split_gate_up(h: torch.Tensor, order: str) -> tuple[torch.Tensor, torch.Tensor]:
    """``[..., 2i] -> gate [..., i], up [..., i]`` for one of ``GATE_UP_ORDERS``; views, nothing is copied."""
    if h.shape[-1] % 2:
        raise FormatMismatch(f"gate/up: the last dimension is {h.shape[-1]}; need an even number of gate and up columns")
    half = h.shape[-1] // 2
    if order == "interleaved":
        return h[..., 0::2], h[..., 1::2]
    if order == "gate_up":
        return h[..., :half], h[..., half:]
    if order == "up_gate":
        return h[..., half:], h[..., :half]
    raise FormatMismatch(f"gate/up: order {shown(order)} is not known; need one of {', '.join(GATE_UP_ORDERS)}")


def apply(activation: Activation | str, h: torch.Tensor, order: str | None) -> torch.Tensor:
    """The activation on the whole first product: ``[..., 2i] -> [..., i]`` when gated, else ``[..., i] -> [..., i]``."""
    act = get(activation)
    if isinstance(act, ReLU2):
        return act(h)
    if order is None:
        raise FormatMismatch(f"{act.name}: no gate/up order was given; need one of {', '.join(GATE_UP_ORDERS)}")
    return act(*split_gate_up(h, order))
