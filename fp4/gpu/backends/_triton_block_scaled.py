"""Path of the ``triton`` backend: W4A4 on block-scaled tensor cores. Only where the caller asks for 4-bit activations by name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fp4.formats import MXFP4, NVFP4
from fp4.gpu.device import SM100, SM120
from fp4.gpu.problem import Problem
from fp4.gpu.registry import No, Ok
from fp4.gpu.scale_range import EVERY
from fp4.gpu.storage import PLAIN, Stored
from fp4.prepared import Packed, Prepared, PreparedMoE, Weights, pack


def supports(problem: Problem) -> Ok | No:
    p = problem
    if p.op != "matmul" or p.format not in (NVFP4, MXFP4) or p.act != p.format.name:
        return No("serves act='nvfp4' with NVFP4 and act='mxfp4' with MXFP4 linear weights")
    if p.device.cc not in SM100 | SM120:
        return No(f"{p.device} has no block-scaled tensor cores")
    return Ok(45, f"W4A4, {p.act} activations; compiled for this device, never run on one")


def exact_scale_range(problem: Problem) -> tuple[int, int]:
    """The tensor cores take e4m3 scales without a sign (ue4m3); every ue8m0 byte is what the format says."""
    return (0x00, 0x7E) if problem.format == NVFP4 else EVERY


def layouts(problem: Problem) -> dict[str, Stored]:
    return {"codes": PLAIN, "scale": PLAIN}


def prepare(problem: Problem, weights: Weights) -> Packed:
    wants = layouts(problem)
    return Packed(pack(problem, weights, wants), wants)


def run(prepared: Prepared | PreparedMoE) -> Callable[..., torch.Tensor]:
    """x is quantised with the checkpoint's input scale when there is one, else with a scale taken from x on the device."""
    from fp4.gpu.kernels.block_scaled import matmul
    from fp4.ops import quantize

    a, fmt = prepared.arrays, prepared.problem.format
    w = a["codes"], a["scale"]
    one = torch.ones(1, device=prepared.device)
    g = a.get("global_scale", one).reshape(1)
    given = a.get("input_scale") if fmt.tensor_scale else None

    def call(x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        q = quantize(x, fmt, global_scale=given)
        alpha = g if q.global_scale is None else g * q.global_scale
        return matmul((q.codes, q.scale), w, alpha, bias, fmt.block, out_dtype)

    return call
