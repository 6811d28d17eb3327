"""NVFP4 MoE through the CuTe-DSL masked grouped GEMM, with the permutation around it (FastDeploy's and SGLang's composition).

Tokens are laid out expert by expert, ``[experts, rows, hidden]``; ``masked_m[e]`` rows are valid. quantise -> GEMM 1 -> silu(gate) * up
and quantise -> GEMM 2 -> weighted sum back to tokens. **w13 is [gate; up] here**, the other way round from ``cutlass_fused_moe``.
No number depends on the host: ``rows`` is the number of tokens, the most that one expert can get.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp4.gpu.backends import _flashinfer_bind as bind
from fp4.gpu.backends import _flashinfer_scales as scales
from fp4.gpu.backends._flashinfer_route import ONE_SCALE, Route, cc, common_moe_reasons, narrow, pack_folded, pad_columns, round_up
from fp4.gpu.problem import Problem
from fp4.gpu.storage import Stored
from fp4.prepared import Packed, Weights

__all__ = ["ROUTES", "depermute", "permute"]

#: k % 32 (16-byte rows of packed FP4) and n % 8 for bf16 output; 128 keeps whole scale tiles
_TILE = 128


def permute(x: torch.Tensor, topk_ids: torch.Tensor, start: int, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token rows sorted by local expert: (y [experts, t, h], masked_m i32 [experts], slot i64 [t, k]).

    ``slot[t, j]`` is the row of ``y.flatten(0, 1)`` that holds token t for its j-th expert, -1 when that expert is not here. Rows beyond
    ``masked_m`` are zero. The order inside an expert is token order (stable), so results do not depend on timing. A token that names
    one expert several times takes one row, so t rows an expert are always enough.
    """
    tokens, topk = topk_ids.shape
    earlier = (topk_ids.unsqueeze(2) == topk_ids.unsqueeze(1)).to(torch.int8).argmax(2)  # the first j with the same expert
    again = earlier != torch.arange(topk, device=x.device)
    local = topk_ids.long() - start
    placed = (local >= 0) & (local < experts) & ~again
    local = torch.where(placed, local, experts).flatten()
    order = torch.argsort(local, stable=True)
    counts = torch.zeros(experts + 1, dtype=torch.long, device=x.device).scatter_add_(0, local, torch.ones_like(local))
    first = counts.cumsum(0) - counts
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=x.device) - first[local[order]]
    placed = placed.flatten()
    slot = torch.where(placed, local * tokens + rank, -1)
    rows = x.new_zeros(experts * tokens + 1, x.shape[1])  # the last row takes what is not here
    rows[torch.where(placed, slot, experts * tokens)] = x.repeat_interleave(topk, 0)
    return rows[:-1].view(experts, tokens, -1), counts[:-1].to(torch.int32), slot.view(tokens, topk).gather(1, earlier)


def depermute(y: torch.Tensor, slot: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """f32 [t, h]: ``sum_j topk_weights[t, j] * y.flatten(0, 1)[slot[t, j]]`` over the j with a slot.

    Rows without a slot are never read into the sum, so garbage or NaN beyond ``masked_m`` (flashinfer#1632) stays outside.
    """
    flat, here = y.flatten(0, 1), slot >= 0
    out = torch.zeros(slot.shape[0], y.shape[2], dtype=torch.float32, device=y.device)
    for j in range(slot.shape[1]):
        row = flat[slot[:, j].clamp(min=0)].float() * topk_weights[:, j : j + 1]
        out += torch.where(here[:, j : j + 1], row, 0.0)
    return out


def _sizes(problem: Problem) -> tuple[int, int]:
    return round_up(problem.hidden or 0, _TILE), round_up(problem.intermediate or 0, _TILE)


def _layouts(problem: Problem) -> dict[str, Stored]:
    hidden, inter = _sizes(problem)
    return {
        "w13.codes": Stored(order="gate_up", shape=(2 * inter, hidden // 2)),
        "w13.scale": Stored("sf_128x4", order="gate_up", shape=(2 * inter, hidden // 16)),
        "w2.codes": Stored(shape=(hidden, inter // 2)),
        "w2.scale": Stored("sf_128x4", shape=(hidden, inter // 16)),
    }


def _why_not(problem: Problem) -> str | None:
    if problem.act_dtype != torch.bfloat16:
        return f"takes bf16 x, got {problem.act_dtype}"
    if problem.global_scales == "gate_up":
        return ONE_SCALE
    return common_moe_reasons(problem, ("silu",), input_scale=True, biases=False)


def _prepare(problem: Problem, weights: Weights) -> Packed:
    w13, w2 = weights.w13, weights.w2
    assert w13 is not None
    assert w2 is not None
    in13, in2 = scales.check_nvfp4_pair(w13, w2, weights.device)
    arrays, w13_scale = pack_folded(problem, weights, _layouts(problem))
    arrays["flashinfer.quant13"], arrays["flashinfer.quant2"] = 1.0 / in13, 1.0 / in2
    arrays["flashinfer.alpha13"] = in13 * w13_scale
    arrays["flashinfer.alpha2"] = in2 * scales.per_expert(w2.global_scale, w2.codes.shape[0], weights.device)
    return Packed(arrays, versions={"flashinfer": bind.version()}, meta={"route": "nvfp4_moe_masked"})


def _run(p: Any) -> Callable[..., torch.Tensor]:
    a, problem = p.arrays, p.problem
    hidden, inter = _sizes(problem)
    experts = a["w13.codes"].shape[0]
    start = problem.local[0] if problem.local else 0
    # logical (n, k/2, experts) over memory (experts, n, k/2); scale tiles (experts, n/128, k/64, 32, 4, 4)
    w13 = a["w13.codes"].view(experts, 2 * inter, hidden // 2).permute(1, 2, 0)
    w2 = a["w2.codes"].view(experts, hidden, inter // 2).permute(1, 2, 0)
    sf13, sf2 = (
        a[name].view(torch.float8_e4m3fn).view(experts, n // 128, k // 64, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)
        for name, n, k in (("w13.scale", 2 * inter, hidden), ("w2.scale", hidden, inter))
    )
    off = {"nvfp4_4over6": None}
    quantize = bind.need("scaled_fp4_grouped_quantize").bind(("a", "mask", "a_global_sf"), off)
    activate = bind.need("silu_and_mul_scaled_nvfp4_experts_quantize").bind(("a", "mask", "a_global_sf"), off)
    gemm = bind.need("grouped_gemm_nt_masked").bind(("lhs", "rhs", "out", "masked_m", "ab_dtype", "sf_dtype", "c_dtype", "sf_vec_size"))
    kinds = {"ab_dtype": "float4_e2m1fn", "sf_dtype": "float8_e4m3fn", "c_dtype": "bfloat16", "sf_vec_size": 16, "alpha_dtype": "float32"}

    def product(lhs: Any, rhs: Any, n: int, rows: int, masked_m: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
        """bf16 [experts, rows, n]; rows beyond masked_m stay zero, the GEMM does not write them."""
        out = torch.zeros((experts, rows, n), dtype=torch.bfloat16, device=masked_m.device)
        gemm(lhs=lhs, rhs=rhs, out=out.permute(1, 2, 0), masked_m=masked_m, alpha=alpha.view(1, 1, experts), **kinds)
        return out

    def run(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        tokens = x.shape[0]
        if tokens == 0 or experts == 0:
            return x.new_zeros((tokens, problem.hidden), dtype=out_dtype)
        rows, masked_m, slot = permute(pad_columns(x, hidden), topk_ids, start, experts)
        lhs = quantize(a=rows, mask=masked_m, a_global_sf=a["flashinfer.quant13"])
        h = product(lhs, (w13, sf13), 2 * inter, tokens, masked_m, a["flashinfer.alpha13"])
        lhs = activate(a=h, mask=masked_m, a_global_sf=a["flashinfer.quant2"])
        y = product(lhs, (w2, sf2), hidden, tokens, masked_m, a["flashinfer.alpha2"])
        return narrow(depermute(y, slot, topk_weights), problem.hidden).to(out_dtype)

    return run


ROUTES = (
    Route(
        name="nvfp4_moe_masked",
        library="cutedsl",
        op="moe",
        format="nvfp4",
        cc=cc(100, 103, 107),
        needs=("scaled_fp4_grouped_quantize", "silu_and_mul_scaled_nvfp4_experts_quantize", "grouped_gemm_nt_masked"),
        acts=("nvfp4",),
        why_not=_why_not,
        layouts=_layouts,
        prepare=_prepare,
        run=_run,
    ),
)
