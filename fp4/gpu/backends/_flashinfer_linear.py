"""NVFP4 linear layers through ``mm_fp4``: cutlass, cuDNN, TRT-LLM (row shuffle) and CuTe-DSL.

``y = alpha * (codes_x scale_x) (codes_w scale_w)^T`` with ``alpha = input_scale * global_scale``; x is quantised by
``fp4_quantize`` with ``1 / input_scale``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fp4.gpu.backends import _flashinfer_bind as bind
from fp4.gpu.backends._flashinfer_route import Route, cc, narrow, pad_columns, round_up
from fp4.gpu.problem import Problem
from fp4.gpu.storage import Stored
from fp4.prepared import Packed, Weights, pack
from fp4.recipe import recipes
from fp4.ref.quantize import tensor_amax
from fp4.ref.scales import default_global_scale

__all__ = ["ROUTES"]

#: x without a calibrated scale: g = amax / 2688, 6 * 448 being the largest e2m1 times the largest e4m3
_DEFAULT = recipes["default"]

#: rows of the 8x4 scale layout's tile times four: below this the TRT-LLM kernels for small batches read 8x4 scales
_SMALL_M = 32

#: mm_fp4 backend -> (n multiple, k multiple). cutlass: K % 32 and N % 32; cute-dsl: N % 8 and 16-byte rows, K % 32;
#: trtllm: N % 128 (the row shuffle of the scales) and whole 128-byte k tiles; cudnn: as cutlass
_ALIGN = {"cutlass": (32, 32), "cudnn": (32, 32), "trtllm": (128, 128), "cute-dsl": (8, 32)}


def _padded(problem: Problem, backend: str) -> tuple[int, int]:
    n_to, k_to = _ALIGN[backend]
    return round_up(problem.n or 0, n_to), round_up(problem.k or 0, k_to)


def _layouts(problem: Problem, backend: str) -> dict[str, Stored]:
    n, k = _padded(problem, backend)
    rows = "trtllm_rows_32" if backend == "trtllm" else "plain"
    scale = "trtllm_rows_32 >> sf_128x4" if backend == "trtllm" else "sf_128x4"
    return {"codes": Stored(rows, shape=(n, k // 2)), "scale": Stored(scale, shape=(n, k // problem.format.block))}


def _why_not(problem: Problem, backend: str) -> str | None:
    out = problem.out_dtype or problem.act_dtype
    if out not in (torch.bfloat16, torch.float16):
        return f"writes bf16 or fp16, asked for {out}"
    if backend == "trtllm" and out != torch.bfloat16:
        return "writes bf16 only"
    if not problem.input_scale and problem.act != "nvfp4":
        return (
            "quantises activations to NVFP4 and the weight carries no input_scale (a weight-only checkpoint); "
            "pass act='nvfp4' for one scale a call, or use another backend"
        )
    return None


def _prepare(problem: Problem, weights: Weights, backend: str) -> Packed:
    w = weights.w
    assert w is not None, "internal: prepare of a matmul without w"
    arrays = pack(problem, weights, _layouts(problem, backend))
    one = torch.ones((), dtype=torch.float32, device=weights.device)
    weight_scale = arrays["global_scale"].reshape(()) if "global_scale" in arrays else one
    arrays["flashinfer.weight_scale"] = weight_scale.reshape(1).clone()
    if "input_scale" in arrays:
        input_scale = arrays["input_scale"].reshape(())
        arrays["flashinfer.alpha"] = (input_scale * weight_scale).reshape(1)
        arrays["flashinfer.quant_scale"] = (1.0 / input_scale).reshape(1)
    return Packed(arrays, versions={"flashinfer": bind.version()}, meta={"route": f"nvfp4_linear_{backend.replace('-', '_')}"})


def _run(p: Any, backend: str) -> Callable[..., torch.Tensor]:
    n, k = _padded(p.problem, backend)
    rows, columns = round_up(n, 128), round_up(k // p.problem.format.block, 4)
    a = p.arrays
    b, b_scale = a["codes"].view(n, k // 2).T, a["scale"].view(rows, columns).T
    alpha, quant_scale, weight_scale = a.get("flashinfer.alpha"), a.get("flashinfer.quant_scale"), a["flashinfer.weight_scale"]
    logical_n, writes = p.problem.n, (torch.bfloat16,) if backend == "trtllm" else (torch.bfloat16, torch.float16)
    quantize = bind.need("fp4_quantize").bind(
        ("input", "global_scale", "sf_vec_size", "sf_use_ue8m0", "is_sf_swizzled_layout", "is_sf_8x4_layout"), {"nvfp4_4over6": None}
    )
    mm = bind.need("mm_fp4").bind(
        ("a", "b", "a_descale", "b_descale", "alpha", "out_dtype", "block_size", "use_8x4_sf_layout", "backend", "use_nvfp4")
    )

    def matmul(x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        m, dtype = x.shape[0], out_dtype if out_dtype in writes else x.dtype
        if m == 0:
            return x.new_empty((0, logical_n), dtype=out_dtype)
        x = pad_columns(x, k)
        scale_in, scale_out = quant_scale, alpha
        if scale_in is None or scale_out is None:
            # of finite values, as quantize does: one infinity must not take every token along
            given, encode = default_global_scale(tensor_amax(x), _DEFAULT)
            scale_in, scale_out = encode.reshape(1), weight_scale * given
        small = backend == "trtllm" and m <= _SMALL_M
        codes, scale = quantize(
            input=x,
            global_scale=scale_in,
            sf_vec_size=16,
            sf_use_ue8m0=False,
            is_sf_swizzled_layout=True,
            is_sf_8x4_layout=small,
        )
        y = mm(
            a=codes,
            b=b,
            a_descale=scale.view(torch.uint8),
            b_descale=b_scale,
            alpha=scale_out,
            out_dtype=dtype,
            block_size=16,
            use_8x4_sf_layout=small,
            backend=backend,
            use_nvfp4=True,
        )
        y = narrow(y, logical_n)
        # added in float32: a bias of 257 is 256 in bfloat16, and the sum would be rounded from there
        return y.to(out_dtype) if bias is None else (y.float() + bias.float()).to(out_dtype)

    return matmul


def _route(backend: str, capabilities: tuple[int, ...]) -> Route:
    return Route(
        name=f"nvfp4_linear_{backend.replace('-', '_')}",
        library=backend.replace("-", ""),
        op="matmul",
        format="nvfp4",
        cc=cc(*capabilities),
        needs=("fp4_quantize", "mm_fp4"),
        acts=("nvfp4",),
        why_not=partial(_why_not, backend=backend),
        layouts=partial(_layouts, backend=backend),
        prepare=partial(_prepare, backend=backend),
        run=partial(_run, backend=backend),
    )


ROUTES = (
    _route("cutlass", (100, 103, 107, 110, 120, 121)),
    _route("cudnn", (100, 103, 107, 110, 120, 121)),
    _route("cute-dsl", (100, 103, 107)),
    _route("trtllm", (100, 103, 107)),
)
