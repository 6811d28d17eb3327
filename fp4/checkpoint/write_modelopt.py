"""Writer of ModelOpt: multipliers as second-level scales; hf_quant_config.json and config.json say the same."""

from __future__ import annotations

from typing import Any

from fp4 import __version__
from fp4.checkpoint.base import Checkpoint
from fp4.checkpoint.output import Blob
from fp4.checkpoint.weights import Loader, Weight, fp8_blobs, fp8_scheme, scalar_blob

__all__ = ["ModelOptWriter"]

_MX = {None: "W4A16_MXFP4", "mxfp4": "mxfp4", "fp8": "W4A8_MXFP4_FP8", "mxfp8": "W4A8_MXFP4_MXFP8"}
#: algorithms that ModelOpt's flat config describes in config_groups: (bits, group size, activations)
_GROUPS = {"NVFP4": (4, 16, True), "W4A16_NVFP4": (4, 16, False), "FP8": (8, None, True)}


class ModelOptWriter:
    name = "modelopt"
    kv_shape: tuple[int, ...] = ()
    divides = False

    def stacks(self, ck: Checkpoint) -> bool | None:
        """GPT-OSS's experts are stacked; those that ModelOpt itself stacked stay so (None: as the source has them)."""
        return True if ck.config.model_type.startswith("gpt_oss") else None

    def refuse(self, ck: Checkpoint, weight: Weight) -> str:
        if weight.kind == "fp8":
            strategy, block = fp8_scheme(ck, weight)
            static = "input" in weight.record.parts
            if strategy == "block" and block != (128, 128):
                return f"has FP8 blocks of {list(block or ())}; ModelOpt's FP8_PB_WO has 128 x 128"
            if strategy == "block" and static:
                return "has a static activation scale beside FP8 blocks; ModelOpt's FP8_PB_WO has none"
            if strategy == "tensor" and not static:
                return "is FP8 with one scale and no activation scale; ModelOpt's FP8 has both"
            if strategy == "channel" and (static or not weight.act):
                return "is FP8 with one scale a row; ModelOpt's FP8_PER_CHANNEL_PER_TOKEN quantises activations at run time"
        elif weight.format != "nvfp4" and weight.input is not None:
            algo = self.algo(ck, weight)
            weight.notes.append(
                f"the source has static activation scales, which {algo} does not use; left out, activations are scaled at run time"
            )
            weight.input = None
        return ""

    def algo(self, ck: Checkpoint, weight: Weight) -> str:
        if weight.kind == "fp8":
            return {"tensor": "FP8", "channel": "FP8_PER_CHANNEL_PER_TOKEN", "block": "FP8_PB_WO"}[fp8_scheme(ck, weight)[0]]
        if weight.format == "nvfp4":
            return "W4A16_NVFP4" if weight.input is None else "NVFP4"
        return _MX[weight.act] if weight.format == "mxfp4" else "MXFP8"

    def blobs(self, loader: Loader, weight: Weight) -> list[Blob]:
        module = weight.module
        if weight.kind == "fp8":
            n, k = weight.shape
            shapes = {"tensor": (), "channel": (n,), "block": (-(-n // 128), 1, -(-k // 128), 1)}
            return fp8_blobs(loader.ck, weight, shapes[fp8_scheme(loader.ck, weight)[0]], ())
        block, dtype = (16, "F8_E4M3") if weight.format == "nvfp4" else (32, "U8")
        if weight.stacked:  # packed along dimension 1, names with underscores
            experts, n, k = weight.shape
            names = (module, f"{module}_weight_scale", f"{module}_weight_scale_2", f"{module}_input_scale")
            out = [
                loader.code_blob(weight, names[0], (experts, k // 2, n), transpose=True),
                loader.scale_blob(weight, names[1], dtype, (experts, k // block, n), transpose=True),
            ]
        else:
            n, k = weight.shape
            names = (f"{module}.weight", f"{module}.weight_scale", f"{module}.weight_scale_2", f"{module}.input_scale")
            width = k if weight.format == "mxfp8" else k // 2
            out = [loader.code_blob(weight, names[0], (n, width)), loader.scale_blob(weight, names[1], dtype, (n, k // block))]
        for name, scalar in zip(names[2:], (weight.second, weight.input), strict=True):
            if scalar is not None:
                out.append(scalar_blob(name, scalar.stored(False)[0]))
        return out

    def kv(self, module: str, role: str, stored: str) -> str | None:
        if role in ("k", "v"):
            return f"{module}.{role}_proj.{role}_scale"
        return stored

    def refuse_kv(self, ck: Checkpoint) -> str:
        if ck.kv_config and ck.kv_config.dtype not in ("fp8", "nvfp4", "int8"):
            return f"the cache is {ck.kv_config.dtype}, which ModelOpt's config cannot say"
        return ""

    def configs(self, ck: Checkpoint, weights: list[Weight], plain: list[str]) -> dict[str, dict[str, Any]]:
        modules = {w.module: self.algo(ck, w) for w in weights}
        algos = list(dict.fromkeys(modules.values()))
        mixed = len(algos) > 1
        producer = ck.config.nested.get("producer") or ck.config.quant.get("producer")
        if not isinstance(producer, dict) or producer.get("name") != "modelopt":
            producer = {"name": "modelopt", "version": f"fp4-{__version__}"}
        kv = ck.kv_config.dtype.upper() if ck.kv_config else None
        nested: dict[str, Any] = {"quant_algo": "MIXED_PRECISION" if mixed else algos[0], "kv_cache_quant_algo": kv}
        group = {a: 16 if "NVFP4" in a else 32 if a.startswith("W4A8") else None for a in algos}
        layers = {m: {"quant_algo": a, **({"group_size": group[a]} if group[a] else {})} for m, a in modules.items()}
        if not mixed and group[algos[0]]:
            nested["group_size"] = group[algos[0]]
        if mixed:
            nested["quantized_layers"] = layers
        nested["exclude_modules"] = plain
        flat: dict[str, Any] = {}
        if all(a in _GROUPS for a in algos):
            flat["config_groups"] = {
                f"group_{i}": _group(a, [m for m, b in modules.items() if b == a] if mixed else ["Linear"]) for i, a in enumerate(algos)
            }
        if mixed:
            flat["quantized_layers"] = layers
        flat |= {"ignore": plain, "quant_algo": nested["quant_algo"], "producer": producer, "quant_method": "modelopt"}
        if kv:
            flat["kv_cache_scheme"] = "NVFP4" if kv == "NVFP4" else _cache(kv, not (ck.kv_config and ck.kv_config.static))
        return {"hf_quant_config.json": {"producer": producer, "quantization": nested}, "config.json": flat}


def _cache(kv: str, dynamic: bool) -> dict[str, Any]:
    return {"dynamic": dynamic, "num_bits": 8, "type": "float" if kv == "FP8" else "int"}


def _group(algo: str, targets: list[str]) -> dict[str, Any]:
    bits, size, inputs = _GROUPS[algo]
    spec: dict[str, Any] = {"dynamic": False, "num_bits": bits, "type": "float", **({"group_size": size} if size else {})}
    return {"weights": spec, **({"input_activations": dict(spec)} if inputs else {"input_activations": None}), "targets": targets}
