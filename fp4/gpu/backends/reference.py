"""``reference``: the golden torch products, on a CPU and on any GPU. Plain logical bytes; slow and exact to the definition."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fp4.gpu.problem import Problem
from fp4.gpu.registry import No, Ok
from fp4.gpu.storage import PLAIN, Stored
from fp4.prepared import Prepared, PreparedMoE

name = "reference"


def probe() -> Ok | No:
    return Ok()


def supports(problem: Problem) -> Ok | No:
    if problem.act not in ("any", "keep"):
        return No(f"keeps activations as they are; quantise x to {problem.act} yourself, or use act='keep'")
    return Ok(90, "torch, float32 accumulation")


def layouts(problem: Problem) -> dict[str, Stored]:
    if problem.op == "matmul":
        return {"codes": PLAIN, "scale": PLAIN}
    return {f"{w}.{part}": PLAIN for w in ("w13", "w2") for part in ("codes", "scale")}


def run(prepared: Prepared | PreparedMoE) -> Callable[..., torch.Tensor]:
    if isinstance(prepared, PreparedMoE):
        return _moe(prepared)
    from fp4.ref.matmul import matmul

    q = prepared.restore()

    def call(x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        return matmul(x, q, bias=bias, out_dtype=out_dtype)

    return call


def _moe(prepared: PreparedMoE) -> Callable[..., torch.Tensor]:
    from fp4.ref.moe import moe

    problem = prepared.problem
    w13, w2 = prepared.restore()
    bias13, bias2 = prepared.restore_bias()
    order = "gate_up" if isinstance(w13, tuple) else problem.gate_up

    def call(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        return moe(
            x, w13, w2, ids, weights, gate_up=order, activation=problem.activation, bias13=bias13, bias2=bias2,
            local_experts=None if problem.local is None else range(*problem.local), out_dtype=out_dtype,
        )  # fmt: skip

    return call
