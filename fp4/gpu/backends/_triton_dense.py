"""Path of the ``triton`` backend: tuned W4A16 (and, for act="fp8", W4A8) linear layers, weights in tensor-core fragment order."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fp4.errors import LayoutMismatch
from fp4.formats import MXFP4, NVFP4
from fp4.gpu.kernels import dense, dense_fp8
from fp4.gpu.problem import Problem
from fp4.gpu.registry import No, Ok
from fp4.gpu.storage import Stored
from fp4.prepared import Packed, Prepared, PreparedMoE, Weights, pack


def supports(problem: Problem) -> Ok | No:
    p = problem
    if p.op != "matmul" or p.format not in (NVFP4, MXFP4) or p.act not in ("any", "keep", "fp8"):
        return No("serves NVFP4 and MXFP4 linear layers with 16-bit activations, and act='fp8'")
    if p.device.kind != "cuda" or p.device.cc is None:
        return No("runs on NVIDIA GPUs")
    major, minor = p.device.cc
    why = dense.reason((major, minor), p.format.block, p.k, p.act_dtype)
    if p.act == "fp8":
        why = why or dense_fp8.reason((major, minor), p.format.block)
    return No(why) if why else Ok(30, f"tuned {'W4A8' if p.act == 'fp8' else 'W4A16'}, fragment-order weights")


def layouts(problem: Problem) -> dict[str, Stored]:
    codes, scale = dense_fp8.LAYOUT if problem.act == "fp8" else dense.LAYOUT[problem.format.block]
    return {"codes": Stored(codes), "scale": Stored(scale)}


def prepare(problem: Problem, weights: Weights) -> Packed:
    """Raises Unsupported when the block scales leave no exact window for bf16 products."""
    assert weights.w is not None, "a linear layer"
    wants = layouts(problem)
    if problem.act == "fp8":
        from fp4.gpu.kernels.plain_fp8 import row_base

        return Packed({**pack(problem, weights, wants), "triton.row_base": row_base(weights.w.scale).to(weights.device)}, wants)
    about = dense.facts(weights.w.scale, problem.format.block)
    return Packed(pack(problem, weights, wants), wants, meta={"facts": about})


def _bind(prepared: Prepared) -> dense.Dense | dense_fp8.Dense8:
    n, k = prepared.shape
    a = prepared.arrays
    if prepared.problem.act == "fp8":
        return dense_fp8.Dense8(a["codes"], a["scale"], a["triton.row_base"], a.get("global_scale"), n, k)
    return dense.Dense(a["codes"], a["scale"], a.get("global_scale"), n, k, prepared.format.block, dict(prepared.meta["facts"]))


def run(prepared: Prepared | PreparedMoE) -> Callable[..., torch.Tensor]:
    assert isinstance(prepared, Prepared), "a linear layer"
    if prepared.device.type != "cuda":

        def refuse(*_: object) -> torch.Tensor:
            where = f"prepared for {prepared.problem.device} and are on {prepared.device}"
            raise LayoutMismatch(f"matmul: these bytes were {where}; prepare the weight on the device that shall run it")

        return refuse
    return _bind(prepared)


def warmup(prepared: Prepared | PreparedMoE, m_max: int) -> None:
    call = prepared.bind()
    assert isinstance(call, dense.Dense | dense_fp8.Dense8), "bound on a GPU"
    dtypes = tuple(d for d in prepared.act_dtypes if d in dense.ACT_DTYPES)
    call.warmup(m_max, dtypes[:1])
