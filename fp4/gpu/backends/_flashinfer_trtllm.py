"""MoE through ``trtllm_fp4_block_scale(_routed)_moe``: NVFP4 x NVFP4, bf16 x MXFP4 and MXFP8 x MXFP4 on datacenter Blackwell.

w13 rows are (up, gate) pairs, then the epilogue's row shuffle; block scales take the same rows and then the 128x4 order; biases take
the same rows in float32. With NVFP4 the kernel adds biases and compares the clamp on raw accumulators, so they are divided by the
product of the scales here, as is beta.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fp4.errors import FormatMismatch, Unsupported
from fp4.gpu.backends import _flashinfer_bind as bind
from fp4.gpu.backends import _flashinfer_scales as scales
from fp4.gpu.backends._flashinfer_route import (
    Route,
    cc,
    common_moe_reasons,
    local_routing,
    narrow,
    pad_columns,
    round_up,
    stored_bias,
    tune_tokens,
)
from fp4.gpu.problem import Problem
from fp4.gpu.storage import Stored
from fp4.prepared import Packed, PreparedMoE, Weights, pack

__all__ = ["ROUTES", "deferred", "from_logits", "routed"]

#: hidden: 128 gives wrong results with NVFP4, 256 is right for both; intermediate: the scale shuffle works on whole 128-row tiles
_HIDDEN, _INTER = 256, 128
_FILL = {"nvfp4": 0, "mxfp4": 127}
_ROWS13, _ROWS2 = "gate_up_pairs >> trtllm_rows_32", "trtllm_rows_32"

#: stands for the global scale 0 of an all-zero expert, by which a bias cannot be divided: products (below 2^34) vanish beside the bias
_NOTHING = 2.0**-80

#: routing method names of FlashInfer's RoutingMethodType, by what they compute
ROUTING = {
    "softmax": "Default",
    "renormalize": "Renormalize",
    "deepseek_v3": "DeepSeekV3",
    "llama4": "Llama4",
    "topk": "TopK",
}


def _sizes(problem: Problem) -> tuple[int, int]:
    """(hidden, intermediate), padded."""
    return round_up(problem.hidden or 0, _HIDDEN), round_up(problem.intermediate or 0, _INTER)


def _layouts(problem: Problem) -> dict[str, Stored]:
    hidden, inter = _sizes(problem)
    block, fill = problem.format.block, _FILL[problem.format.name]
    return {
        "w13.codes": Stored(_ROWS13, order="up_gate", shape=(2 * inter, hidden // 2)),
        "w13.scale": Stored(f"{_ROWS13} >> sf_128x4", order="up_gate", shape=(2 * inter, hidden // block), fill=fill),
        "w2.codes": Stored(_ROWS2, shape=(hidden, inter // 2)),
        "w2.scale": Stored(f"{_ROWS2} >> sf_128x4", shape=(hidden, inter // block), fill=fill),
    }


def _why_not(problem: Problem, kinds: tuple[str, ...], input_scale: bool) -> str | None:
    if (problem.act_dtype, problem.out_dtype or problem.act_dtype) != (torch.bfloat16, torch.bfloat16):
        return f"takes and gives bf16 only, got {problem.act_dtype} -> {problem.out_dtype or problem.act_dtype}"
    act = problem.activation
    if problem.global_scales in ("gate_up", "gate_up_foldable") and scales.activation_kind(problem) == "swiglu" and act.limit is not None:
        return "compares gate and up with one clamp limit in accumulator units, which cannot serve different gate and up global scales"
    if scales.activation_kind(problem) == "situ":
        if act.linear_beta is None:
            return "has no SiTU with a plain up half"
        moe = bind.find("cutlass_fused_moe")  # without FlashInfer the question is that of a release which has them
        if bind.probe() and (moe is None or not moe.has("situ_beta")):  # the generation of releases whose kernels know SiTU
            return f"flashinfer {bind.version()} has no SiTU kernels"
    return common_moe_reasons(problem, kinds, input_scale, biases=True)


def _prepare(problem: Problem, weights: Weights, route: str) -> Packed:
    w13, w2 = weights.w13, weights.w2
    assert w13 is not None
    assert w2 is not None
    experts, device = w13.codes.shape[0], weights.device
    layouts = _layouts(problem)
    arrays = pack(problem, weights, layouts)
    unit = {
        "gate": torch.ones(experts, device=device),
        "up": torch.ones(experts, device=device),
        "down": torch.ones(experts, device=device),
    }
    if problem.format.name == "nvfp4":
        in13, in2 = scales.check_nvfp4_pair(w13, w2, device)
        if bool((in13 != in13[:1]).any()):
            # x is quantised once for all experts: the largest scale is the one that clips nothing
            in13 = in13.amax().expand(experts)
        gate, up = scales.gate_up_scales(arrays.get("w13.global_scale"), experts, device)
        unit = {"gate": in13 * gate, "up": in13 * up, "down": in2 * scales.per_expert(w2.global_scale, experts, device)}
        unit = {n: torch.where(t == 0, _NOTHING, t) for n, t in unit.items()}
        arrays["flashinfer.quant13"] = (1.0 / in13[:1]).contiguous() if experts else in13
        arrays["flashinfer.output1_gate"] = unit["gate"]
        arrays["flashinfer.output1"] = unit["up"] / in2
        arrays["flashinfer.output2"] = unit["down"]
    for name, t in scales.activation_arrays(problem, experts, device).items():
        by = {"limit": unit["gate"], "beta": unit["up"]}.get(name)
        arrays[f"flashinfer.act_{name}"] = t if by is None else t / by
    if weights.bias13 is not None:
        b = stored_bias(weights.bias13, Stored(order="gate_up"), problem.gate_up, device)
        b = b.reshape(experts, 2, b.shape[1] // 2) / torch.stack([unit["gate"], unit["up"]], 1).unsqueeze(-1)
        arrays["flashinfer.bias13"] = stored_bias(b.flatten(1), layouts["w13.codes"], "gate_up", device)
    if weights.bias2 is not None:
        b = weights.bias2.to(device, torch.float32) / unit["down"].unsqueeze(-1)
        arrays["flashinfer.bias2"] = stored_bias(b, layouts["w2.codes"], None, device)
    return Packed(arrays, versions={"flashinfer": bind.version()}, meta={"route": route})


def _operands(p: Any) -> dict[str, Any]:
    """Everything that does not depend on the call."""
    a, problem = p.arrays, p.problem
    hidden, inter = _sizes(problem)
    experts, block = a["w13.codes"].shape[0], problem.format.block
    start, _ = problem.local or (0, problem.experts or experts)
    e4m3 = torch.float8_e4m3fn  # the dtype that the wrapper wants for scale bytes of either kind
    member = "Situ" if scales.activation_kind(problem) == "situ" else "Swiglu"
    return {
        "routing_bias": None,
        "gemm1_weights": a["w13.codes"].view(experts, 2 * inter, hidden // 2),
        "gemm1_weights_scale": a["w13.scale"].view(experts, 2 * inter, hidden // block).view(e4m3),
        "gemm1_bias": a.get("flashinfer.bias13"),
        "gemm1_alpha": a.get("flashinfer.act_alpha"),
        "gemm1_beta": a.get("flashinfer.act_beta"),
        "gemm1_clamp_limit": a.get("flashinfer.act_limit"),
        "gemm2_weights": a["w2.codes"].view(experts, hidden, inter // 2),
        "gemm2_weights_scale": a["w2.scale"].view(experts, hidden, inter // block).view(e4m3),
        "gemm2_bias": a.get("flashinfer.bias2"),
        "output1_scale_scalar": a.get("flashinfer.output1"),
        "output1_scale_gate_scalar": a.get("flashinfer.output1_gate"),
        "output2_scale_scalar": a.get("flashinfer.output2"),
        "num_experts": problem.experts or experts,
        "n_group": None,
        "topk_group": None,
        "intermediate_size": inter,
        "local_expert_offset": start,
        "local_num_experts": experts,
        "routed_scaling_factor": None,
        "activation_type": int(bind.enum("ActivationType", member)),
    }


def _quantizer(p: Any) -> Callable[[torch.Tensor], dict[str, torch.Tensor | None]]:
    """x [t, hidden padded] bf16 -> hidden_states and hidden_states_scale (linear, two-dimensional)."""
    route = p.meta["route"]
    if route == "mxfp4_moe_trtllm_bf16":
        return lambda x: {"hidden_states": x, "hidden_states_scale": None}
    if route == "mxfp4_moe_trtllm_mxfp8":
        mx = bind.need("mxfp8_quantize").bind(("input", "is_sf_swizzled_layout", "alignment"))

        def mxfp8(x: torch.Tensor) -> dict[str, torch.Tensor | None]:
            codes, scale = mx(input=x, is_sf_swizzled_layout=False, alignment=32)
            scale = scale.view(torch.uint8).view(x.shape[0], x.shape[1] // 32)
            return {"hidden_states": codes.view(torch.float8_e4m3fn), "hidden_states_scale": scale.view(torch.float8_e4m3fn)}

        return mxfp8
    nv = bind.need("fp4_quantize").bind(("input", "global_scale", "sf_vec_size", "is_sf_swizzled_layout"), {"nvfp4_4over6": None})
    global_scale = p.arrays["flashinfer.quant13"]

    def nvfp4(x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        codes, scale = nv(input=x, global_scale=global_scale, sf_vec_size=16, is_sf_swizzled_layout=False)
        scale = scale.view(torch.uint8).view(x.shape[0], x.shape[1] // 16)
        return {"hidden_states": codes, "hidden_states_scale": scale.view(torch.float8_e4m3fn)}

    return nvfp4


def _function(name: str, first: str) -> bind.Function:
    function = bind.need(name)
    function.bind((first, "routing_bias", "hidden_states", "gemm1_weights", "num_experts", "top_k", "do_finalize", "tune_max_num_tokens"))
    return function


_OPTIONAL = {"nvfp4_4over6": None}


def _linear_scales(function: bind.Function) -> dict[str, Any]:
    """Say that the activation scales are linear, where the release asks."""
    layout = bind.enum("SfLayout", "layout_linear")
    return {"hidden_states_scale_layout": layout} if function.has("hidden_states_scale_layout") else {}


def routed(p: PreparedMoE, form: str | None = None, finalize: bool = True) -> Callable[..., Any]:
    """``(x [t, h], topk_ids [t, k], topk_weights [t, k]) -> y [t, h]``.

    ``form``: how the routing is handed over. "tuple" keeps float32 weights; "packed" (id and bf16 weight in one int32) is what releases
    before 0.6.13 have and rounds the weights to bf16; None takes the best that is there. ``finalize=False`` gives FlashInfer's
    three unreduced tensors instead, see ``deferred``.
    """
    function = _function("trtllm_fp4_block_scale_routed_moe", "topk_ids")
    if form is None:
        form = "tuple" if function.takes_tuple("topk_ids") else "packed"
    if form not in ("tuple", "packed"):
        raise FormatMismatch(f"moe: routing form {form!r} is not known; need 'tuple' or 'packed'")
    moe = function.bind((), {**_OPTIONAL, **_linear_scales(function)})
    operands, quantize = _operands(p), _quantizer(p)
    hidden, _ = _sizes(p.problem)
    logical_hidden, method = p.shape[1], int(bind.enum("RoutingMethodType", "Renormalize"))
    start = operands["local_expert_offset"]

    def run(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Any:
        tokens, topk = x.shape[0], topk_ids.shape[1]
        if tokens == 0 or operands["local_num_experts"] == 0:
            return x.new_zeros((tokens, logical_hidden), dtype=out_dtype)
        ids, weights = local_routing(topk_ids, topk_weights, start, start + operands["local_num_experts"])
        if form == "packed":
            bits = weights.to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0xFFFF
            route: Any = (ids << 16) | bits
        else:
            route = (ids, weights)
        out = torch.empty((tokens, hidden), dtype=torch.bfloat16, device=x.device) if finalize else None
        result = moe(
            topk_ids=route,
            **quantize(pad_columns(x, hidden)),
            **operands,
            top_k=topk,
            routing_method_type=method,
            do_finalize=finalize,
            output=out,
            tune_max_num_tokens=tune_tokens(tokens),
        )
        return narrow(out, logical_hidden).to(out_dtype) if out is not None else result

    return run


def deferred(p: PreparedMoE) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """``(x, topk_ids, topk_weights) -> (rows [r, hidden padded], weights [t, k], index [t, k])``: the reduction is left to the caller.

    ``y[t] = sum_j weights[t, j] * rows[index[t, j]]`` over the j with ``index >= 0``. The sizes are FlashInfer's own; the rows keep
    the padded hidden size.
    """
    run = routed(p, finalize=False)

    def call(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if x.shape[0] == 0:
            raise FormatMismatch("moe: deferred finalize of zero tokens; got x [0, h]; need at least one token")
        rows, weights, index = run(x, topk_ids, topk_weights)
        return rows, weights, index.view(topk_ids.shape)

    return call


def from_logits(
    p: PreparedMoE, routing: str = "renormalize", routing_bias: torch.Tensor | None = None, **options: Any
) -> Callable[..., Any]:
    """``(x [t, h], logits [t, experts], topk) -> y [t, h]``: routing inside the kernel, by one of ``ROUTING``.

    ``options``: n_group, topk_group, routed_scaling_factor of the deepseek_v3 method. Logits are bf16 or float32 over all experts,
    not only the local ones.
    """
    if routing not in ROUTING:
        raise FormatMismatch(f"moe: routing {routing!r} is not known; need one of {', '.join(ROUTING)}")
    unknown = set(options) - {"n_group", "topk_group", "routed_scaling_factor"}
    if unknown:
        raise FormatMismatch(f"moe: option {', '.join(sorted(unknown))} is not known; need n_group, topk_group or routed_scaling_factor")
    method = bind.enum("RoutingMethodType", ROUTING[routing])
    if method is None:
        raise Unsupported(f"moe: flashinfer {bind.version()} has no routing method {ROUTING[routing]}")
    function = _function("trtllm_fp4_block_scale_moe", "routing_logits")
    moe = function.bind((), {**_OPTIONAL, **_linear_scales(function)})
    operands, quantize = {**_operands(p), **options, "routing_bias": routing_bias}, _quantizer(p)
    hidden, _ = _sizes(p.problem)
    experts, logical_hidden = operands["num_experts"], p.shape[1]

    def run(x: torch.Tensor, logits: torch.Tensor, topk: int) -> torch.Tensor:
        tokens = x.shape[0]
        if tuple(logits.shape) != (tokens, experts):
            raise FormatMismatch(f"moe: logits are {list(logits.shape)}; need [{tokens}, {experts}] (all experts, not only the local ones)")
        if tokens == 0 or operands["local_num_experts"] == 0:
            return x.new_zeros((tokens, logical_hidden))
        dtype = logits.dtype if logits.dtype in (torch.float32, torch.bfloat16) else torch.float32
        out = torch.empty((tokens, hidden), dtype=torch.bfloat16, device=x.device)
        moe(
            routing_logits=logits.to(dtype).contiguous(),  # the kernel reads dense rows
            **quantize(pad_columns(x, hidden)),
            **operands,
            top_k=topk,
            routing_method_type=int(method),
            do_finalize=True,
            output=out,
            tune_max_num_tokens=tune_tokens(tokens),
        )
        return narrow(out, logical_hidden)

    return run


def _route(name: str, format: str, acts: tuple[str, ...], quantizer: str | None, kinds: tuple[str, ...]) -> Route:
    return Route(
        name=name,
        library="trtllm",
        op="moe",
        format=format,
        cc=cc(100, 103, 107),
        needs=("trtllm_fp4_block_scale_routed_moe", *((quantizer,) if quantizer else ())),
        acts=acts,
        why_not=partial(_why_not, kinds=kinds, input_scale=format == "nvfp4"),
        layouts=_layouts,
        prepare=partial(_prepare, route=name),
        run=routed,
    )


ROUTES = (
    _route("mxfp4_moe_trtllm_bf16", "mxfp4", ("keep",), None, ("silu", "swiglu", "situ")),
    _route("mxfp4_moe_trtllm_mxfp8", "mxfp4", ("mxfp8",), "mxfp8_quantize", ("silu", "swiglu", "situ")),
    # squared ReLU is corrupt (vllm#52308) and SiTU gives zeros (flashinfer#5053) with NVFP4
    _route("nvfp4_moe_trtllm", "nvfp4", ("nvfp4",), "fp4_quantize", ("silu", "swiglu")),
)
