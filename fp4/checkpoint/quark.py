"""AMD Quark: fp4 weights with E8M0, E4M3 or unsigned E5M3 scales, fnmatch exclusions and per-layer overrides."""

from __future__ import annotations

from typing import Any

from fp4.checkpoint.base import Plan
from fp4.checkpoint.config import Config, check_keys, listed, mapping
from fp4.checkpoint.fused import fused_floats
from fp4.checkpoint.index import Store
from fp4.checkpoint.kv import KVConfig
from fp4.checkpoint.linear import Leaves, build
from fp4.checkpoint.patterns import match_fnmatch
from fp4.checkpoint.record import MULTIPLY, Spec
from fp4.errors import CheckpointDialect, CheckpointError

__all__ = ["Quark"]

_KEYS = frozenset(
    {"quant_method", "version", "quark_version", "exclude", "global_quant_config", "layer_quant_config", "layer_type_quant_config"}
    | {"kv_cache_quant_config", "kv_cache_post_rope", "export", "algo_config", "quant_mode", "softmax_quant_spec", "log_severity_level"}
    | {"min_kv_scale", "pack_method", "custom_mode"}
)
_LAYER_KEYS = frozenset({"weight", "input_tensors", "output_tensors", "bias", "target_device"})
_SPEC_KEYS = frozenset(
    {"dtype", "qscheme", "group_size", "ch_axis", "is_dynamic", "scale_format", "scale_calculation_mode", "round_method", "is_scale_quant"}
    | {"block_size", "enable_buffer_reuse", "max_input_numel", "mx_element_dtype", "observer_cls", "scale_type", "symmetric"}
    | {"zero_point_type"}
)

#: Quark writes ``input_scale_2`` for NVFP4; re-exports of block FP8 say ``weight_scale`` or ``weight_scale_inv``, both multipliers
LEAVES = Leaves(
    scale=("weight_scale", "weight_scale_inv"),
    input={"input_scale_2": MULTIPLY, "input_scale": MULTIPLY},
)


class Quark:
    name = "quark"

    def detect(self, store: Store, config: Config) -> str | None:
        return f"{config.quant_where}: quant_method is 'quark'" if config.method == "quark" else None

    def plan(self, plan: Plan) -> None:
        settings = _Settings(plan)
        fused_floats(plan, settings.spec)
        build(plan, LEAVES, settings.spec, settings.why_not)


class _Settings:
    def __init__(self, plan: Plan) -> None:
        block, self.where, self.plan = plan.config.quant, plan.config.quant_where, plan
        self.strict = not plan.trust_tensors
        if self.strict:
            check_keys(block, _KEYS, f"{plan.place}: {self.where}")
        export = mapping(block.get("export"), f"{self.where} export")
        if export.get("weight_format", "real_quantized") != "real_quantized":
            raise CheckpointError(
                f"{plan.place}: {self.where}: weight_format is {export['weight_format']!r}; fake-quantised weights hold no FP4 bytes"
            )
        if block.get("layer_type_quant_config"):
            raise CheckpointError(f"{plan.place}: {self.where}: layer_type_quant_config is not empty; a file does not tell layer types")
        names = plan.names()
        self.excluded = match_fnmatch(listed(block.get("exclude"), f"{self.where} exclude"), names, f"{self.where} exclude")
        plan.count("exclude pattern", self.excluded)
        layers = mapping(block.get("layer_quant_config"), f"{self.where} layer_quant_config")
        self.layer_of = match_fnmatch(list(layers), names, f"{self.where} layer_quant_config")
        plan.count("layer_quant_config pattern", self.layer_of)
        outputs: list[Any] = []
        self.specs = {key: self._spec(value, f"layer_quant_config[{key!r}]", outputs) for key, value in layers.items()}
        self.default = self._spec(block.get("global_quant_config"), "global_quant_config", [])
        self._kv(block, outputs)

    def _spec(self, value: Any, name: str, outputs: list[Any]) -> Spec | None:
        where = f"{self.where} {name}"
        place = f"{self.plan.place}: {where}"
        config = mapping(value, place)
        if self.strict:
            check_keys(config, _LAYER_KEYS, place)
        outputs.append(config.get("output_tensors"))
        weights, inputs = (self._list(config.get(k), f"{place} {k}") for k in ("weight", "input_tensors"))
        if not weights:
            return None
        weight = weights[0]
        dtype, scheme, group, scale = (weight.get(k) for k in ("dtype", "qscheme", "group_size", "scale_format"))
        act = None
        if inputs:
            act = "fp8" if inputs[0].get("dtype") == "fp8_e4m3" else "mxfp4" if inputs[0].get("group_size") == 32 else "nvfp4"
        static = any(not spec.get("is_dynamic", False) for spec in inputs)
        if dtype == "fp8_e4m3":
            size = weight.get("block_size")
            if scheme not in ("per_tensor", "per_channel", "per_block", "per_group", None):
                raise CheckpointDialect(f"{place}: fp8_e4m3 with qscheme {scheme!r} is not read")
            square = (
                (size[0], size[1]) if isinstance(size, list) and len(size) == 2 and all(type(b) is int and b > 0 for b in size) else None
            )
            return Spec("fp8", f"{where} says fp8_e4m3", block=square, act=act)
        if dtype == "mx":
            raise CheckpointError(f"{place}: dtype 'mx' is Quark's legacy packing of 17 bytes for 32 values; export it again as fp4")
        if dtype != "fp4":
            raise CheckpointDialect(f"{place}: weight dtype {dtype!r} is not read; need fp4 or fp8_e4m3")
        if scheme != "per_group":
            raise CheckpointError(f"{place}: fp4 with qscheme {scheme!r}; need per_group")
        two_level = len(weights) == 2 and weights[1].get("dtype") == "fp8_e4m3"
        formats = {("e8m0", 32, False): "mxfp4", ("e5m3", 16, False): "amdfp4", ("float32", 16, True): "nvfp4"}
        fmt = formats.get((scale, group, two_level)) if isinstance(scale, str) and isinstance(group, int) else None
        if fmt is None:
            raise CheckpointError(
                f"{place}: fp4 with scale_format {scale!r}, group_size {group!r} and {len(weights)} specs; need e8m0 of 32, e5m3 of 16, "
                "or float32 of 16 with an fp8_e4m3 spec of the scale"
            )
        needs = static and (fmt == "nvfp4" or (fmt == "mxfp4" and any(i.get("dtype") == "fp8_e4m3" for i in inputs)))
        return Spec(fmt, f"{where} says fp4 with {scale} scales", needs, act=act)

    def _list(self, value: Any, place: str) -> list[dict[str, Any]]:
        values = value if isinstance(value, list) else [] if value is None else [value]
        out = [mapping(v, place) for v in values]
        if len(out) > 2:
            raise CheckpointError(f"{place}: has {len(out)} specs; need one, or two with the second for the scale")
        for spec in out if self.strict else []:
            check_keys(spec, _SPEC_KEYS, place)
        return out

    def _kv(self, block: dict[str, Any], outputs: list[Any]) -> None:
        caches = mapping(block.get("kv_cache_quant_config"), f"{self.where} kv_cache_quant_config")
        outputs = outputs + [mapping(c, f"{self.where} kv_cache_quant_config").get("output_tensors") for c in caches.values()]
        specs = [s for o in outputs for s in self._list(o, f"{self.plan.place}: {self.where} output_tensors")]
        if specs:
            name = {"fp8_e4m3": "fp8"}.get(str(specs[0].get("dtype")), str(specs[0].get("dtype")))
            self.plan.kv_config = KVConfig(name, not specs[0].get("is_dynamic", False), f"{self.where} quantises k_proj and v_proj outputs")

    def spec(self, module: str) -> Spec | None:
        if module in self.excluded.of:
            return None
        pattern = self.layer_of.of.get(module)
        return self.default if pattern is None else self.specs[pattern]

    def why_not(self, module: str) -> str:
        if module in self.excluded.of:
            return f"{self.where} excludes {module!r} by {self.excluded.of[module]!r}"
        return f"{self.where} has no weight spec for {module!r}"
