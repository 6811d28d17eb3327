"""Writer of compressed-tensors: divisors as second-level scales, one config group a scheme, exact names in ``ignore``."""

from __future__ import annotations

from typing import Any

from fp4.checkpoint.base import Checkpoint
from fp4.checkpoint.output import Blob
from fp4.checkpoint.weights import Loader, Weight, fp8_blobs, fp8_scheme, scalar_blob

__all__ = ["CompressedTensorsWriter"]

_FORMATS = {
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "mxfp8": "mxfp8-quantized",
    "fp8": "float-quantized",
}


class CompressedTensorsWriter:
    name = "compressed-tensors"
    kv_shape: tuple[int, ...] = (1,)
    divides = True

    def stacks(self, ck: Checkpoint) -> bool | None:
        return False

    def refuse(self, ck: Checkpoint, weight: Weight) -> str:
        if weight.stacked:
            return "is a stacked tensor; compressed-tensors has one matrix an expert"
        if weight.format == "mxfp4" and weight.act in ("fp8", "mxfp8"):
            weight.notes.append(f"the source quantises activations to {weight.act}, which this dialect cannot say; written as weight-only")
            weight.act = weight.input = None
        return ""

    def blobs(self, loader: Loader, weight: Weight) -> list[Blob]:
        module = weight.module
        if weight.kind == "fp8":
            shapes = {"tensor": (1,), "channel": (weight.shape[0], 1), "block": None}
            return fp8_blobs(loader.ck, weight, shapes[fp8_scheme(loader.ck, weight)[0]], (1,))
        n, k = weight.shape
        if weight.format == "mxfp8":
            return [
                loader.code_blob(weight, f"{module}.weight", (n, k)),
                loader.scale_blob(weight, f"{module}.weight_scale", "U8", (n, k // 32)),
            ]
        block, dtype = (16, "F8_E4M3") if weight.format == "nvfp4" else (32, "U8")
        out = [
            loader.code_blob(weight, f"{module}.weight_packed", (n, k // 2)),
            loader.scale_blob(weight, f"{module}.weight_scale", dtype, (n, k // block)),
        ]
        for leaf, scalar in (("weight_global_scale", weight.second), ("input_global_scale", weight.input)):
            if scalar is not None:
                out.append(scalar_blob(f"{module}.{leaf}", scalar.stored(True)[0], (1,)))
        return out

    def kv(self, module: str, role: str, stored: str) -> str | None:
        return f"{module}.{role}_scale" if role in ("k", "v") else stored

    def refuse_kv(self, ck: Checkpoint) -> str:
        if ck.kv_config and ck.kv_config.dtype != "fp8":
            return f"the cache is {ck.kv_config.dtype}; compressed-tensors has an FP8 cache only"
        if any(role.endswith("_bias") for parts in ck._kv.values() for role in parts):
            return "affine cache scales have no name in compressed-tensors"
        return ""

    def configs(self, ck: Checkpoint, weights: list[Weight], plain: list[str]) -> dict[str, dict[str, Any]]:
        schemes: dict[tuple[Any, ...], list[str]] = {}
        for w in weights:
            strategy, block = fp8_scheme(ck, w) if w.kind == "fp8" else ("tensor_group" if w.format == "nvfp4" else "group", None)
            inputs = "static" if w.input is not None or (w.kind == "fp8" and "input" in w.record.parts) else "dynamic" if w.act else None
            schemes.setdefault((w.format, strategy, block, inputs), []).append(w.module)
        groups = {}
        for i, (key, modules) in enumerate(schemes.items()):
            groups[f"group_{i}"] = _group(key, ["Linear"] if len(schemes) == 1 else modules)
            formats = {g["format"] for g in groups.values()}
        kv = None
        if ck.kv_config:
            kv = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": not ck.kv_config.static}
        quant = {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "config_groups": groups,
            "ignore": plain,
            "kv_cache_scheme": kv,
            "sparsity_config": {},
            "transform_config": {},
        }
        return {"config.json": quant}


def _spec(bits: int, strategy: str, size: int | None, dynamic: bool | str, **more: Any) -> dict[str, Any]:
    scale = {("tensor_group", 4): "torch.float8_e4m3fn", ("group", 4): "torch.uint8"}.get((strategy, bits))
    spec: dict[str, Any] = {"num_bits": bits, "type": "float", "strategy": strategy, "group_size": size, "symmetric": True}
    spec |= {"dynamic": dynamic, "actorder": None, "block_structure": None, "scale_dtype": scale, "zp_dtype": None}
    return {**spec, **more}


def _group(scheme: tuple[Any, ...], targets: list[str]) -> dict[str, Any]:
    """One entry of config_groups, from (format, strategy, FP8 block, "static" | "dynamic" | None)."""
    fmt, strategy, block, inputs = scheme
    bits, size = (8 if fmt in ("fp8", "mxfp8") else 4), {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}.get(fmt)
    weights = _spec(bits, strategy, size, False, **({"block_structure": list(block)} if block else {}))
    acts = None
    if inputs is not None and fmt == "fp8":
        kind, width = ("tensor", None) if inputs == "static" else ("group", block[1]) if block else ("token", None)
        acts = _spec(8, kind, width, inputs == "dynamic")
    elif inputs is not None and (fmt != "nvfp4" or inputs == "static"):
        acts = _spec(bits, strategy, size, "local" if fmt == "nvfp4" else True)
    return {"format": _FORMATS[fmt], "targets": targets, "weights": weights, "input_activations": acts, "output_activations": None}
