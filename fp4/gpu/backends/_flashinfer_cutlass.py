"""MoE through ``cutlass_fused_moe``: NVFP4 on Blackwell, MXFP8 x MXFP4 on Blackwell, bf16 x MXFP4 (mixed input) on Hopper.

All three read w13 as [up; gate] (first half linear, second half through the activation), which is the other way round from
a checkpoint's [gate; up]; nothing in the kernel can notice a mistake. Hidden and intermediate sizes are padded to 128 with zero codes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fp4.errors import BackendUnavailable
from fp4.gpu import storage
from fp4.gpu.backends import _flashinfer_bind as bind
from fp4.gpu.backends import _flashinfer_scales as scales
from fp4.gpu.backends._flashinfer_route import (
    ONE_SCALE,
    Route,
    cc,
    common_moe_reasons,
    expert_partition,
    local_routing,
    narrow,
    pack_folded,
    pad_columns,
    round_up,
    stored_bias,
    tune_tokens,
)
from fp4.gpu.problem import Problem
from fp4.gpu.storage import Stored
from fp4.prepared import Packed, Weights, pack

__all__ = ["ROUTES", "sm90_layout"]

_TILE = 128
_OUT = (torch.bfloat16, torch.float16)
#: neutral block scales for padding: their codes are zero, so any finite byte is right; 127 is 2^0
_FILL = {"nvfp4": 0, "mxfp4": 127}


def _sizes(problem: Problem) -> tuple[int, int, int]:
    """(rows of w13, hidden, intermediate), padded."""
    hidden, inter = round_up(problem.hidden or 0, _TILE), round_up(problem.intermediate or 0, _TILE)
    return (inter if _plain_rows(problem) else 2 * inter), hidden, inter


def _plain_rows(problem: Problem) -> bool:
    """w13 has no gate (squared ReLU)."""
    return scales.activation_kind(problem) == "relu2"


def _layouts(problem: Problem, codes: str, scale: str) -> dict[str, Stored]:
    rows, hidden, inter = _sizes(problem)
    order = None if _plain_rows(problem) else "up_gate"
    block, fill = problem.format.block, _FILL[problem.format.name]
    return {
        "w13.codes": Stored(codes, order=order, shape=(rows, hidden // 2)),
        "w13.scale": Stored(scale, order=order, shape=(rows, hidden // block), fill=fill),
        "w2.codes": Stored(codes, shape=(hidden, inter // 2)),
        "w2.scale": Stored(scale, shape=(hidden, inter // block), fill=fill),
    }


def _add_common(arrays: dict[str, torch.Tensor], problem: Problem, weights: Weights) -> None:
    """Biases (both or neither, in the output dtype) and activation parameters."""
    assert weights.w13 is not None
    device, experts = weights.device, weights.w13.codes.shape[0]
    rows, hidden, _ = _sizes(problem)
    dtype = problem.out_dtype or problem.act_dtype
    if weights.bias13 is not None or weights.bias2 is not None:
        order = None if _plain_rows(problem) else "up_gate"
        for name, bias, stored, n in (
            ("bias13", weights.bias13, Stored(order=order, shape=(rows, 4)), rows),
            ("bias2", weights.bias2, Stored(shape=(hidden, 4)), hidden),
        ):
            given = problem.gate_up if name == "bias13" else None
            b = torch.zeros(experts, n, device=device) if bias is None else stored_bias(bias, stored, given, device)
            arrays[f"flashinfer.{name}"] = b.to(dtype)
    for name, t in scales.activation_arrays(problem, experts, device).items():
        arrays[f"flashinfer.act_{name}"] = t


def _why_not(problem: Problem, kinds: tuple[str, ...], input_scale: bool, biases: bool = True, only_bf16: bool = False) -> str | None:
    if expert_partition(problem) is None:
        return f"names expert ranges as equal parts only; {problem.local} of {problem.experts} is none"
    if problem.global_scales == "gate_up":
        return ONE_SCALE
    if only_bf16 and (problem.act_dtype, problem.out_dtype or problem.act_dtype) != (torch.bfloat16, torch.bfloat16):
        return f"takes and gives bf16 only, got {problem.act_dtype} -> {problem.out_dtype or problem.act_dtype}"
    return common_moe_reasons(problem, kinds, input_scale, biases)


def _base(p: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """cutlass_fused_moe with everything that does not depend on the call filled in, and the activation arguments."""
    a, problem = p.arrays, p.problem
    ep_size, ep_rank = expert_partition(problem) or (1, 0)
    tp_rank, tp_size = problem.tp
    kind = scales.activation_kind(problem)
    fixed: dict[str, Any] = {
        "activation_type": bind.enum("ActivationType", "Relu2" if kind == "relu2" else "Swiglu"),
        "ep_size": ep_size,
        "ep_rank": ep_rank,
        "tp_size": tp_size,
        "tp_rank": tp_rank,
        "swiglu_alpha": a.get("flashinfer.act_alpha"),
        "swiglu_beta": a.get("flashinfer.act_beta"),
        "swiglu_limit": a.get("flashinfer.act_limit"),
    }
    function = bind.need("cutlass_fused_moe")
    required = (
        "input",
        "token_selected_experts",
        "token_final_scales",
        "fc1_expert_weights",
        "fc2_expert_weights",
        "output_dtype",
        "quant_scales",
        "fc1_expert_biases",
        "fc2_expert_biases",
        "output",
        "tune_max_num_tokens",
    )
    # use_fused_finalize=False: the fused epilogue adds with atomics, so its sums differ from run to run (vllm#54945)
    optional = {"use_fused_finalize": False, "nvfp4_4over6": None}
    return function.bind((*required, *fixed), optional), fixed


def _call(
    p: Any, weight_dtype: torch.dtype, quant_scales: list[torch.Tensor], extra: dict[str, Any], quantize: Callable[..., Any] | None
) -> Any:
    """The callable ``(x, topk_ids, topk_weights) -> y`` of one prepared layer."""
    problem, a = p.problem, p.arrays
    rows, hidden, inter = _sizes(problem)
    experts = a["w13.codes"].shape[0]
    w13 = a["w13.codes"].view(experts, rows, hidden // 2).view(weight_dtype)
    w2 = a["w2.codes"].view(experts, hidden, inter // 2).view(weight_dtype)
    moe, fixed = _base(p)
    bias13, bias2 = a.get("flashinfer.bias13"), a.get("flashinfer.bias2")
    logical_hidden, start = problem.hidden, problem.local[0] if problem.local else 0

    def run(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        tokens, dtype = x.shape[0], out_dtype if out_dtype in _OUT else x.dtype
        if tokens == 0 or experts == 0:  # the kernel crashes without tokens (sglang#38773)
            return x.new_zeros((tokens, logical_hidden), dtype=out_dtype)
        x = pad_columns(x, hidden)
        given = {"input": x} if quantize is None else quantize(x)
        ids, weights = local_routing(topk_ids, topk_weights, start, start + experts)
        out = torch.empty((tokens, hidden), dtype=dtype, device=x.device)
        moe(
            **given,
            token_selected_experts=ids,
            token_final_scales=weights,
            fc1_expert_weights=w13,
            fc2_expert_weights=w2,
            output_dtype=dtype,
            quant_scales=quant_scales,
            output=out,
            tune_max_num_tokens=tune_tokens(tokens),
            fc1_expert_biases=None if bias13 is None else bias13.to(dtype),
            fc2_expert_biases=None if bias2 is None else bias2.to(dtype),
            **fixed,
            **extra,
        )
        return narrow(out, logical_hidden).to(out_dtype)

    return run


# --- NVFP4 x NVFP4 -------------------------------------------------------------------------------------------------------------------


def _nvfp4_prepare(problem: Problem, weights: Weights) -> Packed:
    w13, w2 = weights.w13, weights.w2
    assert w13 is not None
    assert w2 is not None
    experts, device = w13.codes.shape[0], weights.device
    in13, in2 = scales.check_nvfp4_pair(w13, w2, device)
    arrays, w13_scale = pack_folded(problem, weights, _layouts(problem, "plain", "sf_128x4"))
    arrays["flashinfer.quant13"], arrays["flashinfer.quant2"] = 1.0 / in13, 1.0 / in2
    arrays["flashinfer.alpha13"] = in13 * w13_scale
    arrays["flashinfer.alpha2"] = in2 * scales.per_expert(w2.global_scale, experts, device)
    _add_common(arrays, problem, weights)
    return Packed(arrays, versions={"flashinfer": bind.version()}, meta={"route": "nvfp4_moe_cutlass"})


def _nvfp4_run(p: Any) -> Callable[..., torch.Tensor]:
    a = p.arrays
    rows, hidden, inter = _sizes(p.problem)
    experts = a["w13.codes"].shape[0]
    sf13 = a["w13.scale"].view(experts, rows, hidden // 16).view(torch.int32)
    sf2 = a["w2.scale"].view(experts, hidden, inter // 16).view(torch.int32)
    quant_scales = [a["flashinfer.quant13"], sf13, a["flashinfer.alpha13"], a["flashinfer.quant2"], sf2, a["flashinfer.alpha2"]]
    return _call(p, torch.int64, quant_scales, {}, None)  # type: ignore[no-any-return]


# --- MXFP8 x MXFP4 -------------------------------------------------------------------------------------------------------------------


def _mxfp4_prepare(problem: Problem, weights: Weights, route: str, codes: str | None = None, scale: str | None = None) -> Packed:
    assert weights.w13 is not None
    assert weights.w2 is not None
    layouts = _layouts(problem, codes, scale) if codes and scale else _sm90_layouts(problem)
    arrays = pack(problem, weights, layouts)
    _add_common(arrays, problem, weights)
    meta = {"route": route} if codes else {"route": route, "sm90_layout": sm90_layout()}
    return Packed(arrays, layouts=layouts, versions={"flashinfer": bind.version()}, meta=meta)


def _mxfp8_run(p: Any) -> Callable[..., torch.Tensor]:
    a = p.arrays
    rows, hidden, inter = _sizes(p.problem)
    experts = a["w13.codes"].shape[0]
    ones = torch.ones(experts, dtype=torch.float32, device=a["w13.codes"].device)
    sf13 = a["w13.scale"].view(experts, rows, hidden // 32).view(torch.int32)
    sf2 = a["w2.scale"].view(experts, hidden, inter // 32).view(torch.int32)
    quantizer = bind.need("mxfp8_quantize").bind(("input", "is_sf_swizzled_layout", "alignment"))

    def quantize(x: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, scale = quantizer(input=x, is_sf_swizzled_layout=True, alignment=32)
        return {"input": codes.view(torch.float8_e4m3fn), "input_sf": scale.view(torch.uint8)}

    return _call(p, torch.int64, [sf13, ones, sf2, ones], {"use_mxfp8_act_scaling": True}, quantize)  # type: ignore[no-any-return]


# --- bf16 x MXFP4 on Hopper ----------------------------------------------------------------------------------------------------------

#: layout tag -> (values, scales) in the catalogue
_SM90 = {"A": ("sm90_mixed_fp4_a", "sm90_mixed_sf_a"), "B": ("sm90_mixed_fp4", "sm90_mixed_sf")}


@functools.lru_cache(maxsize=1)
def sm90_layout() -> str:
    """ "A" or "B": which of its two incompatible SM90 layouts the installed FlashInfer reads.

    Releases interleave them (0.6.16 reads B, 0.6.16.post3 A, 0.6.17 A, 0.6.18 B), so the version cannot tell. The installation's own
    scale helper can: it gives 3 dimensions for A and 5 for B. The helper's bytes for a random scale matrix are compared with
    our layout, so that a third layout is refused rather than fed to a GEMM that checks nothing.
    """
    helper = bind.need("interleave_moe_scales_for_sm90_mixed_gemm").bind(("scales",), {"group_size": 32})
    known = torch.Generator("cpu").manual_seed(90)
    sample = torch.randint(0, 256, (1, 128, 8), dtype=torch.uint8, generator=known, device="cpu")
    theirs = helper(scales=sample)
    tag = {3: "A", 5: "B"}.get(theirs.ndim)
    if tag is not None:
        ours = storage.apply(sample, Stored(_SM90[tag][1]))
        if torch.equal(ours.reshape(-1), theirs.reshape(-1)):
            return tag
    raise BackendUnavailable(
        f"flashinfer {bind.version()}: its SM90 scale layout ({theirs.ndim} dimensions) is neither of the two that fp4 knows; "
        "use backend='triton_kernels' or 'triton' on this GPU"
    )


def _sm90_layouts(problem: Problem) -> dict[str, Stored]:
    return _layouts(problem, *_SM90[sm90_layout()])


def _sm90_run(p: Any) -> Callable[..., torch.Tensor]:
    a = p.arrays
    rows, hidden, inter = _sizes(p.problem)
    prepared, installed = p.meta["sm90_layout"], sm90_layout()
    if prepared != installed:
        raise BackendUnavailable(
            f"moe: these bytes are in FlashInfer's SM90 layout {prepared}, the installed {bind.version()} reads {installed}; "
            "prepare again: fp4.prepare_moe(*p.restore(), ...)"
        )
    experts = a["w13.codes"].shape[0]
    groups = ((rows, hidden, "w13.scale"), (hidden, inter, "w2.scale"))
    if installed == "B":
        folded = [a[name].view(experts, n // 64, k // 128, 16, 16).view(torch.int32) for n, k, name in groups]
    else:
        folded = [a[name].view(experts, k // 128, 4 * n).view(torch.int32) for n, k, name in groups]
    return _call(p, torch.uint8, folded, {"use_w4_group_scaling": True}, None)  # type: ignore[no-any-return]


ROUTES = (
    Route(
        name="nvfp4_moe_cutlass",
        library="cutlass",
        op="moe",
        format="nvfp4",
        cc=cc(100, 103, 110, 120, 121),
        needs=("cutlass_fused_moe",),
        acts=("nvfp4",),
        why_not=partial(_why_not, kinds=("silu", "swiglu", "relu2"), input_scale=True),
        layouts=partial(_layouts, codes="plain", scale="sf_128x4"),
        prepare=_nvfp4_prepare,
        run=_nvfp4_run,
    ),
    Route(
        name="mxfp4_moe_cutlass_mxfp8",
        library="cutlass",
        op="moe",
        format="mxfp4",
        cc=cc(100, 103, 110, 120, 121),
        needs=("cutlass_fused_moe", "mxfp8_quantize"),
        acts=("mxfp8",),
        why_not=partial(_why_not, kinds=("silu", "swiglu"), input_scale=False),
        layouts=partial(_layouts, codes="plain", scale="sf_128x4"),
        prepare=partial(_mxfp4_prepare, route="mxfp4_moe_cutlass_mxfp8", codes="plain", scale="sf_128x4"),
        run=_mxfp8_run,
    ),
    Route(
        name="mxfp4_moe_cutlass_sm90",
        library="cutlass",
        op="moe",
        format="mxfp4",
        cc=cc(90),
        needs=("cutlass_fused_moe", "interleave_moe_scales_for_sm90_mixed_gemm"),
        acts=("keep",),
        why_not=partial(_why_not, kinds=("silu", "swiglu"), input_scale=False, only_bf16=True),
        layouts=_sm90_layouts,
        prepare=partial(_mxfp4_prepare, route="mxfp4_moe_cutlass_sm90"),
        run=_sm90_run,
        behind=10,
    ),
)
