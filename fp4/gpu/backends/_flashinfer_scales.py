"""Second-level scales, activation parameters and biases in the units that FlashInfer's kernels want.

``global_scale`` and ``input_scale`` are multipliers here (``weight_scale_2``, ``input_scale`` of a ModelOpt file); FlashInfer's
quantisers take the reciprocal of ``input_scale``. A GEMM's ``alpha`` is ``input_scale * global_scale``.
"""

from __future__ import annotations

import torch

from fp4.errors import FormatMismatch
from fp4.gpu.problem import Problem
from fp4.gpu.scale_range import EVERY
from fp4.tensor import QuantizedTensor

__all__ = [
    "activation_arrays",
    "activation_kind",
    "check_nvfp4_pair",
    "exact_scale_range",
    "gate_up_scales",
    "per_expert",
]


def exact_scale_range(problem: Problem) -> tuple[int, int]:
    """Block-scale bytes that every FlashInfer kernel decodes to the value that the format gives them.

    e4m3: not negative, not NaN. ue8m0: not 255 (NaN; the SM90 kernel makes it infinity), nor 0 (2^-127; the SM90 kernel and FlashInfer's
    own dequantiser make it 0).
    """
    return {"nvfp4": (0x00, 0x7E), "mxfp4": (0x01, 0xFE)}.get(problem.format.name, EVERY)


def check_nvfp4_pair(w13: QuantizedTensor, w2: QuantizedTensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Check that both carry input_scale; (w13's, w2's) input_scale as f32 [experts].

    A missing input_scale raises FormatMismatch; one of zero, which would become an infinite quantisation scale for the experts that
    calibration never reached (vllm#45212), ``prepare_moe`` has refused before.
    """
    out = []
    for name, q in (("w13", w13), ("w2", w2)):
        if q.input_scale is None:
            raise FormatMismatch(
                f"prepare_moe: {name} has no input_scale; this kernel quantises its input: give one or use another backend"
            )
        out.append(per_expert(q.input_scale, q.codes.shape[0], device))
    return out[0], out[1]


def per_expert(t: torch.Tensor | None, experts: int, device: torch.device) -> torch.Tensor:
    """f32 [experts] from a multiplier [] or [experts]; ones where there is none."""
    if t is None:
        return torch.ones(experts, dtype=torch.float32, device=device)
    return t.to(device=device, dtype=torch.float32).expand(experts).contiguous()


def gate_up_scales(w13: torch.Tensor | None, experts: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate, up), each f32 [experts], from ``w13.global_scale`` of shape [], [experts] or [experts, 2]."""
    if w13 is not None and w13.ndim == 2:
        t = w13.to(device=device, dtype=torch.float32)
        return t[:, 0].contiguous(), t[:, 1].contiguous()
    one = per_expert(w13, experts, device)
    return one, one.clone()


def activation_kind(problem: Problem) -> str:
    """Name of the activation: "silu" (also a SwiGLU without parameters), "swiglu", "situ", "relu2"."""
    act = problem.activation
    if act is None:
        return "silu"
    if act.name == "swiglu" and (act.alpha, act.beta, act.limit) == (1.0, 0.0, None):
        return "silu"
    return str(act.name)


def activation_arrays(problem: Problem, experts: int, device: torch.device) -> dict[str, torch.Tensor]:
    """f32 [experts] tensors "alpha", "beta" and, where there is a clamp, "limit"; empty for plain SiLU.

    ``y = g * sigmoid(alpha * g) * (u + beta)`` with ``g = min(gate, limit)``, ``u = clamp(up, -limit, limit)``.
    """
    kind, act = activation_kind(problem), problem.activation
    if kind == "swiglu":
        values = {"alpha": act.alpha, "beta": act.beta, "limit": act.limit}
    elif kind == "situ":
        values = {"alpha": act.beta, "beta": act.linear_beta}
    else:
        values = {}
    return {n: torch.full((experts,), float(v), dtype=torch.float32, device=device) for n, v in values.items() if v is not None}
