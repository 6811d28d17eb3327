"""compressed-tensors (llm-compressor, AutoRound's export, Kimi): divisors as second-level scales, groups with targets."""

from __future__ import annotations

from typing import Any

from fp4.checkpoint.base import Plan
from fp4.checkpoint.config import Config, check_keys, listed, mapping
from fp4.checkpoint.index import Store
from fp4.checkpoint.kv import KVConfig
from fp4.checkpoint.linear import Leaves, build
from fp4.checkpoint.modelopt_config import kv_scheme
from fp4.checkpoint.patterns import match_regex_or_exact
from fp4.checkpoint.record import DIVIDE, MULTIPLY, Spec
from fp4.errors import CheckpointDialect, CheckpointError

__all__ = ["CompressedTensors"]

_KEYS = frozenset(
    {"quant_method", "quantization_status", "version", "format", "config_groups", "ignore", "kv_cache_scheme", "sparsity_config"}
    | {"transform_config", "global_compression_ratio", "run_compressed", "compression_version"}
)
_GROUP_KEYS = frozenset({"format", "targets", "weights", "input_activations", "output_activations"})
_SPEC_KEYS = frozenset(
    {"num_bits", "type", "strategy", "group_size", "scale_dtype", "zp_dtype", "symmetric", "dynamic", "actorder", "block_structure"}
    | {"observer", "observer_kwargs", "is_mx"}
)
#: formats that fp4 reads, in a group or at the top; "mixed-precision" leaves the word to the groups
_FORMATS = (
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp8-quantized",
    "dense",
    "mixed-precision",
)

LEAVES = Leaves(
    codes=("weight_packed", "weight"),
    second={"weight_global_scale": DIVIDE},
    input={"input_global_scale": DIVIDE, "input_scale": MULTIPLY},
)


class CompressedTensors:
    name = "compressed-tensors"

    def detect(self, store: Store, config: Config) -> str | None:
        if config.method == "compressed-tensors":
            return f"{config.quant_where}: quant_method is 'compressed-tensors'"
        if not config.quant and not config.nested and any(n.endswith(".weight_packed") for n in store.entries):
            return "no config, but weight_packed is compressed-tensors' name"
        return None

    def plan(self, plan: Plan) -> None:
        if not plan.config.quant:
            plan.has_config = False
            plan.warn("no quantization config; read by compressed-tensors' names, without activation quantisation")
            build(plan, LEAVES, lambda m: None, lambda m: "")
            return
        groups = Groups(plan)
        build(plan, LEAVES, groups.spec, groups.why_not)


class Groups:
    """config_groups resolved for every module: an exact name beats a regex, a regex beats a class name."""

    def __init__(self, plan: Plan) -> None:
        block, self.where = plan.config.quant, plan.config.quant_where
        if not plan.trust_tensors:
            check_keys(block, _KEYS, f"{plan.place}: {self.where}")
        if block.get("transform_config"):
            raise CheckpointDialect(f"{plan.place}: {self.where}: transform_config is not empty; rotated weights are not read")
        if mapping(block.get("sparsity_config"), f"{self.where} sparsity_config").get("format", "dense") != "dense":
            raise CheckpointDialect(f"{plan.place}: {self.where}: sparsity_config is not dense; sparse weights are not read")
        status = block.get("quantization_status", "compressed")
        if status not in ("compressed", "frozen"):
            raise CheckpointError(f"{plan.place}: {self.where}: quantization_status is {status!r}; need 'compressed'")
        kv, dynamic = kv_scheme(block.get("kv_cache_scheme"), f"{self.where} kv_cache_scheme")
        if kv:
            plan.kv_config = KVConfig(kv.lower(), not dynamic, f"{self.where} has a kv_cache_scheme of {kv}")
        top = block.get("format", "mixed-precision")
        groups = mapping(block.get("config_groups"), f"{self.where} config_groups")
        if not groups and not kv:
            raise CheckpointError(f"{plan.place}: {self.where}: config_groups is empty; nothing says what is quantised")
        names = plan.names()
        self.ignored = match_regex_or_exact(listed(block.get("ignore"), f"{self.where} ignore"), names, self.where)
        plan.count("ignore pattern", self.ignored)
        self.exact: dict[str, Spec] = {}
        self.regex: dict[str, Spec] = {}
        self.classes: list[Spec] = []
        for key, value in groups.items():
            place = f"{plan.place}: {self.where} config_groups.{key}"
            group = mapping(value, place)
            if not plan.trust_tensors:
                check_keys(group, _GROUP_KEYS, place)
                for part in ("weights", "input_activations", "output_activations"):
                    check_keys(mapping(group.get(part), f"{place}.{part}"), _SPEC_KEYS, f"{place}.{part}")
            spec = _spec(group, group.get("format") or top, place, f"{self.where} config_groups.{key}")
            targets = listed(group.get("targets"), f"{place}.targets")
            # a class name is capitalised and has no dot; 'lm_head' is a module, under whatever wrapper the file puts it
            classes = [t for t in targets if t[:1].isupper() and "." not in t and t not in names.by_spelling]
            matches = match_regex_or_exact([t for t in targets if t not in classes], names, place)
            plan.count(f"target of {key}", matches)
            for module, pattern in matches.of.items():
                self._put(self.regex if pattern.startswith("re:") else self.exact, module, spec, place)
            if classes:
                self.classes.append(spec)
        if len({s.format for s in self.classes}) > 1:
            raise CheckpointError(
                f"{plan.place}: {self.where}: two groups target classes with different formats; fp4 cannot see classes in a file"
            )

    @staticmethod
    def _put(table: dict[str, Spec], module: str, spec: Spec, place: str) -> None:
        other = table.get(module)
        if other is not None and (other.format, other.static_input) != (spec.format, spec.static_input):
            raise CheckpointError(f"{place}: module {module!r} is also a target of {other.origin}, with another format; need one")
        table[module] = spec

    def spec(self, module: str) -> Spec | None:
        if module in self.ignored.of:
            return None
        return self.exact.get(module) or self.regex.get(module) or (self.classes[0] if self.classes else None)

    def why_not(self, module: str) -> str:
        if module in self.ignored.of:
            return f"{self.where} ignores {module!r} by {self.ignored.of[module]!r}"
        return f"no target of {self.where} config_groups matches {module!r}"


def _act(inputs: dict[str, Any]) -> str | None:
    """The format that a group's input_activations ask for."""
    bits, size = inputs.get("num_bits"), inputs.get("group_size")
    if bits == 8:
        return "mxfp8" if size == 32 else "fp8"
    return ("mxfp4" if size == 32 else "nvfp4") if bits == 4 else None


def _spec(group: dict[str, Any], fmt: Any, place: str, origin: str) -> Spec:
    if fmt not in _FORMATS:
        raise CheckpointDialect(f"{place}: format {fmt!r} is not known; need one of {', '.join(_FORMATS)}")
    weights = mapping(group.get("weights"), f"{place}.weights")
    inputs = mapping(group.get("input_activations"), f"{place}.input_activations")
    bits, kind, strategy, size = (weights.get(k) for k in ("num_bits", "type", "strategy", "group_size"))
    if kind != "float" or bits not in (4, 8):
        raise CheckpointError(f"{place}: weights are {bits!r}-bit {kind!r}; need 4-bit or 8-bit float")
    if weights.get("actorder"):
        raise CheckpointDialect(f"{place}: weights have actorder {weights['actorder']!r}; reordered columns are not read")
    static = bool(inputs) and inputs.get("dynamic", False) is not True
    act = _act(inputs)
    if bits == 8:
        if strategy == "group" and size == 32:
            return Spec("mxfp8", f"{origin} says 8-bit float, one scale for 32", False, act=act)
        if strategy not in ("tensor", "channel", "block", None):
            raise CheckpointDialect(f"{place}: 8-bit strategy {strategy!r} is not read; need tensor, channel or block")
        block = weights.get("block_structure")
        if block is not None and (not isinstance(block, list) or len(block) != 2 or not all(type(b) is int and b > 0 for b in block)):
            raise CheckpointError(f"{place}: block_structure is {block!r}; need [rows, columns]")
        return Spec("fp8", f"{origin} says 8-bit float", False, tuple(block) if block else None, act)
    want = {"tensor_group": (16, "nvfp4"), "group": (32, "mxfp4")}.get(strategy) if isinstance(strategy, str) else None
    if want is None or size != want[0]:
        raise CheckpointError(
            f"{place}: 4-bit float with strategy {strategy!r} and group_size {size!r}; need tensor_group of 16 or group of 32"
        )
    named = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4"}.get(fmt, want[1])
    if named != want[1]:
        raise CheckpointError(f"{place}: format {fmt!r} contradicts strategy {strategy!r}, which is {want[1]}")
    return Spec(want[1], f"{origin} says {want[1]}", static and want[1] == "nvfp4", act=act)
