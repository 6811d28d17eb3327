"""Route: one FlashInfer entry point with the devices, shapes and numerics that it serves. The routes are the rows of docs/flashinfer.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from fp4 import fuse
from fp4.errors import Unsupported
from fp4.gpu import storage
from fp4.gpu.backends import _flashinfer_bind as bind
from fp4.gpu.backends._flashinfer_scales import activation_kind, per_expert
from fp4.gpu.device import Capability
from fp4.gpu.problem import Problem
from fp4.gpu.storage import Stored
from fp4.prepared import Packed, PreparedMoE, Weights, pack, split_gate_up

__all__ = [
    "ONE_SCALE",
    "Route",
    "cc",
    "common_moe_reasons",
    "expert_partition",
    "local_routing",
    "narrow",
    "pack_folded",
    "pad_columns",
    "round_up",
    "stored_bias",
    "tune_tokens",
    "unfolded",
]


ONE_SCALE = (
    "has one w13 scale an expert; gate and up differ and do not fold exactly, and the larger one would change the weights (vllm#54974): "
    "use backend='flashinfer_trtllm', 'triton' or 'reference'"
)


@dataclass(frozen=True)
class Route:
    """``why_not(problem)`` is None when the route serves the problem, else the reason in words."""

    name: str
    #: "cutlass", "trtllm", "cudnn" or "cutedsl": the variant backend that this route belongs to
    library: str
    op: str
    format: str
    #: capabilities by name; never an order (sm_120 code does not run on 121-only features and the other way round)
    cc: frozenset[Capability]
    #: FlashInfer functions that must be there
    needs: tuple[str, ...]
    #: activation treatments that it can give: "keep" means that x stays 16 bit
    acts: tuple[str, ...]
    why_not: Callable[[Problem], str | None]
    layouts: Callable[[Problem], dict[str, Stored]]
    prepare: Callable[[Problem, Weights], Packed]
    run: Callable[[Any], Callable[..., torch.Tensor]]
    #: added to the backend's rank: 10 where triton_kernels comes first (Hopper)
    behind: int = 0

    def refuse(self, problem: Problem, assumed: bool = False) -> str | None:
        """The first reason why this route cannot serve the problem, or None; ``assumed``: as if FlashInfer were here."""
        if (problem.op, problem.format.name) != (self.op, self.format):
            return f"is for {self.op}/{self.format}"
        if problem.device.cc not in self.cc:
            names = ", ".join(str(c) for c in sorted(self.cc, key=tuple))
            return f"needs {names}, got {problem.device}"
        missing = [] if assumed else [n for n in self.needs if bind.find(n) is None]
        if missing:
            return f"flashinfer {bind.version()} has no {', '.join(missing)}"
        if problem.act not in ("any", *self.acts):
            return f"gives activations as {' or '.join(self.acts)}, asked for {problem.act}"
        if problem.act_dtype not in (torch.bfloat16, torch.float16):
            return f"takes bf16 or fp16 x, got {problem.act_dtype}"
        if problem.format.name == "mxfp4" and problem.global_scales != "none":  # no operand for it: it would be left out
            return "has no place for a global scale beside the block scales of mxfp4: use backend='triton' or 'reference'"
        return self.why_not(problem)


def cc(*numbers: int) -> frozenset[Capability]:
    """{Capability} from numbers such as 100 or 121."""
    return frozenset(Capability(n // 10, n % 10) for n in numbers)


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def tune_tokens(tokens: int) -> int:
    """The next power of two: FlashInfer's tuning buckets."""
    return 1 << max(tokens - 1, 0).bit_length()


def pad_columns(x: torch.Tensor, columns: int) -> torch.Tensor:
    """x [m, k] with zero columns up to ``columns``, with canonical strides.

    A one-row view may be contiguous and still have stride 1 in its rows, which FlashInfer's quantiser takes for column-major.
    """
    x = x if x.shape[-1] == columns else F.pad(x, (0, columns - x.shape[-1]))
    return x.contiguous().view(-1).view(x.shape)


def local_routing(topk_ids: torch.Tensor, topk_weights: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids i32, weights f32) for the fused kernels: -1 for every id outside [start, stop), and each expert once in a row.

    -1 is an expert that is nowhere: cutlass_fused_moe and trtllm-gen (tuple and packed routing) leave the pair out of the sort and of the
    sum, in every release from 0.6.11 to 0.7.4. A real expert with weight zero would not do: its row may overflow, and 0 * inf is NaN.
    Both keep one entry of an expert that a token names twice (trtllm-gen by a race, cutlass's large-batch prologue the first), so
    the first one takes the sum of the weights. Compared in the given integer type: 2^32 must not wrap to expert 0.
    """
    elsewhere = (topk_ids < start) | (topk_ids >= stop)
    weights = topk_weights.float()
    if topk_ids.shape[1] > 1:
        same = topk_ids.unsqueeze(2) == topk_ids.unsqueeze(1)
        weights = torch.where(same, weights.unsqueeze(1), 0.0).sum(2)
        elsewhere |= same.tril(-1).any(2)
    return topk_ids.masked_fill(elsewhere, -1).to(torch.int32).contiguous(), weights.masked_fill(elsewhere, 0.0)


def narrow(y: torch.Tensor, columns: int) -> torch.Tensor:
    """The first ``columns`` columns, contiguous."""
    return y if y.shape[-1] == columns else y[..., :columns].contiguous()


def expert_partition(problem: Problem) -> tuple[int, int] | None:
    """(ep_size, ep_rank) when the local range is one of equal contiguous parts, the only kind that cutlass_fused_moe can name."""
    if problem.experts is None or problem.local is None:
        return 1, 0
    start, stop = problem.local
    size = stop - start
    if size <= 0 or problem.experts % size or start % size:
        return None
    return problem.experts // size, start // size


def common_moe_reasons(problem: Problem, kinds: Iterable[str], input_scale: bool, biases: bool) -> str | None:
    """Reasons that the MoE routes share: activation, calibrated input scales, biases."""
    kind = activation_kind(problem)
    if kind not in kinds:
        return f"has no activation {kind}; it has {', '.join(kinds)}: use backend='triton' or 'reference' for this one"
    if input_scale and not problem.input_scale:
        return "quantises activations to NVFP4 and the weights carry no input_scale (weight-only): give one or use another backend"
    if problem.bias and not biases:
        return "has no bias"
    return None


def stored_bias(bias: torch.Tensor, stored: Stored, order: str | None, device: torch.device) -> torch.Tensor:
    """f32 [experts, rows] from a bias [experts, n]: the row order, padding and permutation of ``stored``, on rows of four bytes."""
    b = bias.detach().to(device=device, dtype=torch.float32).contiguous().unsqueeze(-1).view(torch.uint8)
    rows = stored.shape[0] if stored.shape is not None else b.shape[1]
    out = storage.apply(b, replace(stored, shape=(rows, 4), fill=0), order, device)
    return out.reshape(b.shape[0], rows * 4).view(torch.float32)


def pack_folded(problem: Problem, weights: Weights, layouts: dict[str, Stored]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """``pack`` for a kernel with one w13 scale an expert: the arrays and that scale, f32 [experts].

    Different gate and up scales were found to fold exactly (``global_scales == "gate_up_foldable"``): the block scales of one half are
    multiplied by a power of two, and ``flashinfer.exponents`` remembers which, for ``unfolded``.
    """
    w13 = weights.w13
    assert w13 is not None, "internal: prepare of experts without w13"
    if weights.gate_up_scale is None:
        return pack(problem, weights, layouts), per_expert(w13.global_scale, w13.codes.shape[0], weights.device)
    folded = fuse.fold_gate_up(w13, weights.gate_up_scale, str(problem.gate_up))
    if folded is None:
        raise Unsupported("prepare_moe: gate and up scales do not fold into one", {"flashinfer": ONE_SCALE})
    arrays = pack(problem, replace(weights, w13=replace(folded[0], global_scale=None)), layouts)
    arrays["flashinfer.exponents"] = folded[1].to(weights.device)
    return arrays, folded[0].global_scale.to(weights.device)  # type: ignore[union-attr]


def unfolded(p: PreparedMoE) -> Any:
    """((gate, up), w2) with the block scales as they were before ``pack_folded``; None when nothing was folded."""
    exponents = p.arrays.get("flashinfer.exponents")
    if exponents is None:
        return None
    both = p.arrays["w13.global_scale"]
    bare = replace(p, arrays={n: t for n, t in p.arrays.items() if n not in ("w13.global_scale", "flashinfer.exponents")})
    w13, order = bare._restore("w13."), str(p.problem.gate_up)
    halves = storage.reorder_gate_up(w13.scale, order, "gate_up")
    halves = halves.reshape(halves.shape[0], 2, halves.shape[1] // 2, halves.shape[2])
    scale = fuse.rescale(halves, -exponents.to(halves.device)[:, :, None, None])
    assert scale is not None, "internal: folding was exact, so undoing it is"
    w13 = replace(w13, scale=storage.reorder_gate_up(scale.flatten(1, 2), "gate_up", order))
    return split_gate_up(w13, order, both), bare._restore("w2.")
