"""Path of the ``triton`` backend: tuned W4A16 mixture of experts (``fp4.gpu.kernels.grouped``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp4.errors import LayoutMismatch
from fp4.formats import MXFP4, NVFP4
from fp4.gpu.kernels import grouped
from fp4.gpu.problem import Problem
from fp4.gpu.registry import No, Ok
from fp4.gpu.storage import Stored
from fp4.prepared import Packed, Prepared, PreparedMoE, Weights, pack


def supports(problem: Problem) -> Ok | No:
    p = problem
    if p.op != "moe" or p.format not in (NVFP4, MXFP4) or p.act not in ("any", "keep"):
        return No("serves NVFP4 and MXFP4 experts with 16-bit activations")
    if p.device.kind != "cuda" or p.device.cc is None:
        return No("runs on NVIDIA GPUs")
    if p.act_dtype not in (torch.bfloat16, torch.float16):
        return No(f"needs bf16 or fp16 activations, got {p.act_dtype}")
    major, minor = p.device.cc
    why = grouped.supports(
        format=p.format.name, hidden=p.hidden, intermediate=p.intermediate, activation=p.activation, capability=(major, minor)
    )
    return No(why) if why else Ok(30, "tuned W4A16, fragment-order weights")


def _stored(p: Problem, fill: tuple[int, int] = (0, 0)) -> dict[str, Stored]:
    return grouped.layouts(p.format.block, p.activation.gated, int(p.hidden or 0), int(p.intermediate or 0), fill)


def layouts(problem: Problem) -> dict[str, Stored]:
    return _stored(problem)


def prepare(problem: Problem, weights: Weights) -> Packed:
    """Raises Unsupported when the block scales leave no exact window for bf16 products."""
    assert weights.w13 is not None, "a MoE layer"
    assert weights.w2 is not None, "a MoE layer"
    fill = (0, 0) if problem.format == NVFP4 else (grouped.used_byte(weights.w13.scale), grouped.used_byte(weights.w2.scale))
    wants = _stored(problem, fill)
    arrays = pack(problem, weights, wants)
    windows = _bind(problem, arrays).windows
    return Packed(arrays, wants, act_dtypes=tuple(d for d, w in windows.items() if not isinstance(w, Exception)))


def _bind(p: Problem, arrays: Any) -> grouped.Grouped:
    return grouped.from_arrays(
        arrays, block=p.format.block, first=p.local[0] if p.local else 0, hidden=int(p.hidden or 0),
        intermediate=int(p.intermediate or 0), activation=p.activation, gate_up=p.gate_up,
    )  # fmt: skip


class _Call:
    """The bound layer."""

    def __init__(self, g: grouped.Grouped) -> None:
        self.g = g

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        y = grouped.run(x, self.g, ids, weights)
        return y if y.dtype == out_dtype else y.to(out_dtype)


def run(prepared: Prepared | PreparedMoE) -> Callable[..., torch.Tensor]:
    if prepared.device.type != "cuda":

        def refuse(*_: object) -> torch.Tensor:
            where = f"prepared for {prepared.problem.device} and are on {prepared.device}"
            raise LayoutMismatch(f"moe: these bytes were {where}; prepare the experts on the device that shall run them")

        return refuse
    return _Call(_bind(prepared.problem, prepared.arrays))


def warmup(prepared: Prepared | PreparedMoE, m_max: int) -> None:
    call = prepared.bind()
    assert isinstance(call, _Call), "bound on a GPU"
    for dtype in prepared.act_dtypes:
        grouped.warmup(call.g, m_max, prepared.problem.topk or 4, dtype)
