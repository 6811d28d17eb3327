"""Path of the ``triton`` backend: tuned W4A16 mixture of experts, weights in tensor-core fragment order (``fp4.gpu.kernels.grouped``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from fp4.errors import LayoutMismatch, Unsupported
from fp4.gpu.kernels import grouped, grouped_run, launch
from fp4.gpu.problem import Problem
from fp4.gpu.registry import No, Ok
from fp4.gpu.storage import Stored
from fp4.prepared import Packed, Prepared, PreparedMoE, Weights, pack
from fp4.ref import activation as activations


def supports(problem: Problem) -> Ok | No:
    p = problem
    if p.op != "moe" or p.act not in ("any", "keep"):
        return No("serves mixture-of-experts layers with 16-bit activations")
    if p.device.kind != "cuda" or p.device.cc is None:
        return No("runs on NVIDIA GPUs")
    if p.act_dtype not in (torch.bfloat16, torch.float16):
        return No(f"needs bfloat16 or float16 activations, got {str(p.act_dtype).removeprefix('torch.')}")
    cc = tuple(p.device.cc)
    why = (
        grouped.supports(
            format=p.format.name, hidden=p.hidden, intermediate=p.intermediate, activation=p.activation, capability=(cc[0], cc[1])
        )
        or launch.gluon_reason()
    )
    return No(why) if why else Ok(30, "tuned W4A16, fragment-order weights")


def _gated(problem: Problem) -> bool:
    return problem.activation is None or activations.get(problem.activation).gated


def layouts(problem: Problem) -> dict[str, Stored]:
    """As for an unpadded layer; ``prepare`` says how the padding of MXFP4 scales is filled."""
    wants = grouped.layouts(problem.format.block, _gated(problem), problem.hidden or 256, problem.intermediate or 256)
    return wants if problem.hidden and problem.intermediate else {n: replace(s, shape=None) for n, s in wants.items()}


def prepare(problem: Problem, weights: Weights) -> Packed:
    """Raises Unsupported when the block scales leave no exact window for products of the problem's activation dtype."""
    assert weights.w13 is not None, "a mixture of experts"
    assert weights.w2 is not None, "a mixture of experts"
    fill = (0, 0)
    if problem.format.block == 32:
        fill = (grouped.used_byte(weights.w13.scale), grouped.used_byte(weights.w2.scale))
    wants = grouped.layouts(problem.format.block, _gated(problem), weights.w13.k, weights.w2.k, fill)
    arrays = pack(problem, weights, wants)
    windows = grouped.windows(arrays, problem.format.block)
    found = windows.get(problem.act_dtype)
    if isinstance(found, Unsupported):
        raise found
    dtypes = tuple(d for d, w in windows.items() if not isinstance(w, Unsupported))
    return Packed(arrays, wants, act_dtypes=dtypes)


def _bind(prepared: PreparedMoE) -> grouped.Grouped:
    p = prepared.problem
    _, hidden, inter = prepared.shape
    first = 0 if p.local is None else p.local[0]
    return grouped.from_arrays(
        prepared.arrays,
        block=p.format.block,
        first=first,
        total=p.experts or 0,
        hidden=hidden,
        intermediate=inter,
        activation=p.activation,
        gate_up=p.gate_up,
    )


def run(prepared: Prepared | PreparedMoE) -> Callable[..., torch.Tensor]:
    assert isinstance(prepared, PreparedMoE), "a mixture of experts"
    if prepared.device.type != "cuda":

        def refuse(*_: object) -> torch.Tensor:
            where = f"prepared for {prepared.problem.device} and are on {prepared.device}"
            raise LayoutMismatch(f"moe: these bytes were {where}; prepare the experts on the device that shall run them")

        return refuse
    return grouped_run.Call(_bind(prepared))


def warmup(prepared: Prepared | PreparedMoE, m_max: int) -> None:
    call = prepared.bind()
    assert isinstance(call, grouped_run.Call), "bound on a GPU"
    grouped_run.warmup(call.g, m_max, prepared.problem.topk or 1, prepared.act_dtypes[0])
