"""What ModelOpt's two config files say of each module: hf_quant_config.json (nested) and config.json quantization_config (flat).

Both are read and compared. A difference is a contradiction when it concerns a tensor that is quantised in the file: lists that are spelled
differently, or of which one is shorter, and a block that the source model's FP8 release left behind (nvidia/DeepSeek-V3-0324-FP4,
sglang#7593), say nothing else about the tensors that are there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from fp4.checkpoint.base import Plan
from fp4.checkpoint.config import check_keys, listed, mapping
from fp4.checkpoint.index import Store
from fp4.checkpoint.kv import KVConfig
from fp4.checkpoint.linear import shown
from fp4.checkpoint.patterns import Matches, Names, match_exact_or_prefix
from fp4.checkpoint.record import Spec
from fp4.errors import CheckpointDialect, CheckpointError

__all__ = ["ALGOS", "METHODS", "Settings", "has_names", "kv_scheme"]

#: quant_algo (upper case) -> (format, block of elements, calibrated activation scale in the file)
ALGOS: dict[str, tuple[str, int | None, bool]] = {
    "NVFP4": ("nvfp4", 16, True),
    "W4A16_NVFP4": ("nvfp4", 16, False),
    "NVFP4_AWQ": ("nvfp4", 16, True),
    "NVFP4_SVD": ("nvfp4", 16, True),
    "W4A8_NVFP4_FP8": ("nvfp4_b32", 32, True),
    "MXFP4": ("mxfp4", 32, False),
    "W4A16_MXFP4": ("mxfp4", 32, False),
    "W4A8_MXFP4_FP8": ("mxfp4", 32, False),
    "W4A8_MXFP4_MXFP8": ("mxfp4", 32, False),
    "FP8": ("fp8", None, False),
    "FP8_PB_WO": ("fp8", None, False),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8", None, False),
    "MXFP8": ("mxfp8", 32, False),
}
#: quant_algo -> format of the activations; weight-only where absent
_ACTS = {
    **dict.fromkeys(("NVFP4", "NVFP4_AWQ", "NVFP4_SVD"), "nvfp4"),
    **dict.fromkeys(("W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"), "fp8"),
    **{"MXFP4": "mxfp4", "MXFP8": "mxfp8", "W4A8_MXFP4_MXFP8": "mxfp8"},
}
METHODS = ("modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8", "nvfp4")
_NESTED_KEYS = frozenset(
    {"quant_algo", "kv_cache_quant_algo", "group_size", "has_zero_point", "pre_quant_scale", "exclude_modules", "quantized_layers"}
    | {"with_input_scale", "quant_method", "smoothquant_val", "clamp_val"}
)
_FLAT_KEYS = frozenset(
    {"quant_method", "producer", "quant_algo", "ignore", "exclude_modules", "config_groups", "kv_cache_scheme", "kv_cache_quant_algo"}
    | {"quantized_layers", "group_size", "has_zero_point", "pre_quant_scale", "with_input_scale"}
)
_GROUP_KEYS = frozenset({"weights", "input_activations", "output_activations", "targets", "has_zero_point", "pre_quant_scale"})
_SPEC_KEYS = frozenset({"dynamic", "num_bits", "type", "group_size", "strategy", "symmetric"})
_LAYER_KEYS = frozenset({"quant_algo", "group_size", "has_zero_point", "pre_quant_scale", "with_input_scale", "awq_block_size"})


def has_names(store: Store) -> bool:
    """Whether some module has ModelOpt's three NVFP4 tensors."""
    entries = store.entries
    for name in entries:
        if not name.endswith("weight_scale_2"):
            continue
        stem = name.removesuffix("_scale_2")
        codes = stem if stem in entries else stem.removesuffix("_weight")
        if codes in entries and entries[codes].dtype in ("U8", "I8", "F4") and f"{stem}_scale" in entries:
            return True
    return False


class Settings:
    """The merged word of both config files. Raises CheckpointError when they contradict each other, naming the field."""

    def __init__(self, plan: Plan, where: str) -> None:
        self.place, self.where = plan.place, where
        self.algo = ""
        #: algorithm of all routed experts of a DeepSeek-V4 file
        self.experts = ""
        self.group: int | None = None
        self.exclude: list[str] = []
        self.layers: dict[str, tuple[str, int | None]] = {}
        self.with_input = True
        self.kv: KVConfig | None = None
        self.excluded = Matches()
        self.mapped: dict[str, str] = {}

    @classmethod
    def read(cls, plan: Plan) -> Settings | None:
        """The settings of a ModelOpt checkpoint, or of the experts of a DeepSeek-V4 one; None when neither file has any."""
        config = plan.config
        hybrid = config.fp8_with_fp4_experts
        flat_where, flat = config.quant_where, config.quant
        more = {"moe_quant_algo"} if hybrid else set()
        if hybrid:  # ModelOpt's keys stand beside those of the FP8 linears
            flat = {k: v for k, v in flat.items() if k in _FLAT_KEYS | more and k != "quant_method"}
            outer = config.get("moe_quant_algo")
            if outer is not None and flat.setdefault("moe_quant_algo", outer) != outer:
                plan.disagree(f"config.json says moe_quant_algo {outer!r}, its {flat_where} says {flat['moe_quant_algo']!r}")
        if not flat and "quant_algo" in config.model:  # the block itself saved as config.json
            flat_where, flat = "config.json", {k: v for k, v in config.model.items() if k in _FLAT_KEYS}
        if isinstance(flat.get("quantization"), dict):  # the nested file's content saved inside quantization_config
            flat = {**{k: v for k, v in flat.items() if k != "quantization"}, **flat["quantization"]}
        views: list[tuple[str, dict[str, Any]]] = []
        if config.nested:
            where = "hf_quant_config.json quantization"
            nested = mapping(config.nested.get("quantization"), where)
            cls._keys(plan, nested, _NESTED_KEYS | more, where)
            views.append((where, cls._view(nested, where, "exclude_modules")))
            if config.source_fp8 and has_names(plan.store) and not _block_fp8(plan.store):
                plan.warn(f"{flat_where}: quant_method 'fp8' was left over from the model that was quantised; read by hf_quant_config.json")
                flat = {}
        if flat:
            if config.method and config.method not in METHODS and not hybrid:
                raise CheckpointError(
                    f"{plan.place}: {flat_where} has quant_method {flat.get('quant_method')!r}, hf_quant_config.json is ModelOpt's; "
                    "need one of them: remove the leftover"
                )
            cls._keys(plan, flat, _FLAT_KEYS | more, flat_where)
            key = "ignore" if "ignore" in flat else "exclude_modules"
            views.append((flat_where, cls._view(flat, flat_where, key, plan)))
        if not views:
            return None
        merged = views[0][1]
        if len(views) == 2:
            merged = cls._merge(plan, views[0], views[1])
        return cls._from(plan, merged, views[0][0])

    @classmethod
    def _merge(cls, plan: Plan, one: tuple[str, dict[str, Any]], two: tuple[str, dict[str, Any]]) -> dict[str, Any]:
        """Both files' words. Raises CheckpointError for a key whose values differ about a tensor that is quantised in the file."""
        (where_a, a), (where_b, b) = one, two
        merged = {**b, **a}
        for key in sorted(a.keys() & b.keys()):
            if a[key] == b[key]:
                continue
            differ: list[str] | None = None
            joined: Any = None
            if key == "exclude_modules":
                differ, joined = _excluded_differently(a[key], b[key], plan), sorted({*a[key], *b[key]})
            elif key == "quantized_layers":
                differ, joined = _mapped_differently(a[key], b[key], plan), {**b[key], **a[key]}
            if differ != []:
                at = f" for {shown(differ)}" if differ else ""
                raise CheckpointError(
                    f"{plan.place}: {key} contradicts{at}: {where_a} says {_short(a[key])}, {where_b} says {_short(b[key])}; "
                    "make them agree"
                )
            merged[key] = joined
            plan.once(f"config-{key}", f"{key} of {where_a} and {where_b} differ, about no tensor that is quantised in the file")
        return merged

    @staticmethod
    def _keys(plan: Plan, block: dict[str, Any], known: frozenset[str], where: str) -> None:
        if not plan.trust_tensors:
            check_keys(block, known, where)

    @classmethod
    def _view(cls, block: dict[str, Any], where: str, exclude: str, plan: Plan | None = None) -> dict[str, Any]:
        """Comparable form of either file: only keys that are present."""
        view: dict[str, Any] = {}
        algo = block.get("quant_algo")
        if algo is not None and not isinstance(algo, str):
            raise CheckpointError(f"{where}: quant_algo is {algo!r}; need a string")
        if algo is not None:
            view["quant_algo"] = algo.upper()
        if block.get("moe_quant_algo") is not None:
            view["moe_quant_algo"] = str(block["moe_quant_algo"]).upper()
        if exclude in block:
            view["exclude_modules"] = sorted(set(listed(block[exclude], f"{where} {exclude}")))
        if block.get("quantized_layers") is not None:
            layers = mapping(block["quantized_layers"], f"{where} quantized_layers")
            view["quantized_layers"] = {k: mapping(v, f"{where} quantized_layers {k!r}") for k, v in layers.items()}
        if block.get("group_size") is not None:
            view["group_size"] = block["group_size"]
        if "with_input_scale" in block:
            if not isinstance(block["with_input_scale"], bool):
                raise CheckpointError(f"{where}: with_input_scale is {block['with_input_scale']!r}; need true or false")
            view["with_input_scale"] = block["with_input_scale"]
        if "kv_cache_quant_algo" in block:
            kv = block["kv_cache_quant_algo"]
            if kv is not None and not isinstance(kv, str):
                raise CheckpointError(f"{where}: kv_cache_quant_algo is {kv!r}; need a string or null")
            view["kv_cache_quant_algo"] = kv.upper() if kv else None
        if "kv_cache_scheme" in block:
            view["kv_cache_quant_algo"], view["kv_dynamic"] = kv_scheme(block["kv_cache_scheme"], f"{where} kv_cache_scheme")
        if block.get("config_groups") is not None:
            cls._groups(view, mapping(block["config_groups"], f"{where} config_groups"), where, plan)
        return view

    @staticmethod
    def _groups(view: dict[str, Any], groups: dict[str, Any], where: str, plan: Plan | None) -> None:
        sizes, inputs = set(), []
        for key, value in groups.items():
            place = f"{where} config_groups.{key}"
            group = mapping(value, place)
            weights = mapping(group.get("weights"), f"{place}.weights")
            if plan is not None and not plan.trust_tensors:
                check_keys(group, _GROUP_KEYS, place)
                for part in ("weights", "input_activations", "output_activations"):
                    check_keys(mapping(group.get(part), f"{place}.{part}"), _SPEC_KEYS, f"{place}.{part}")
            size = weights.get("group_size")
            if size is not None and type(size) is not int:
                raise CheckpointError(f"{place}.weights: group_size is {size!r}; need an integer")
            if size is not None:
                sizes.add(size)
            inputs.append(group.get("input_activations"))
        if len(sizes) == 1 and view.get("quant_algo") != "MIXED_PRECISION" and "group_size" not in view:
            view["group_size"] = sizes.pop()
        if inputs and not any(inputs):
            view["with_input_scale"] = False

    @classmethod
    def _from(cls, plan: Plan, view: dict[str, Any], where: str) -> Settings:
        self = cls(plan, where)
        self.algo = view.get("quant_algo") or ""
        self.experts = view.get("moe_quant_algo") or ""
        kv = view.get("kv_cache_quant_algo")
        if kv:
            self.kv = KVConfig(kv.lower(), not view.get("kv_dynamic", False), f"{where} says kv_cache_quant_algo {kv!r}")
        if not self.algo and (kv or plan.config.fp8_with_fp4_experts):  # only the cache is quantised; only moe_quant_algo is said
            return self
        if not self.algo:
            raise CheckpointError(f"{plan.place}: {where}: quant_algo is missing; need one of {', '.join(ALGOS)} or MIXED_PRECISION")
        if self.algo != "MIXED_PRECISION" and self.algo not in ALGOS:
            raise CheckpointDialect(
                f"{plan.place}: {where}: quant_algo {self.algo!r} is not known; need one of {', '.join(ALGOS)} or MIXED_PRECISION"
            )
        self.group = cls._group(plan, view.get("group_size"), self.algo, where)
        # ModelOpt's script for DeepSeek-V4 names some tensors instead of modules: embed.weight, head.weight
        self.exclude = [p.removesuffix(".weight") for p in view.get("exclude_modules", [])]
        self.with_input = view.get("with_input_scale", True) is not False
        for key, entry in view.get("quantized_layers", {}).items():
            place = f"{where} quantized_layers[{key!r}]"
            cls._keys(plan, entry, _LAYER_KEYS, f"{plan.place}: {place}")
            algo = str(entry.get("quant_algo") or "").upper()
            if algo not in ALGOS:
                raise CheckpointError(
                    f"{plan.place}: {place}: quant_algo {entry.get('quant_algo')!r} is not a layer's; need one of {', '.join(ALGOS)}"
                )
            self.layers[key] = (algo, cls._group(plan, entry.get("group_size"), algo, place))
        if self.layers and plan.config.fp8_with_fp4_experts:  # whatever it is called: what is not listed is not ModelOpt's
            self.algo = "MIXED_PRECISION"
        if self.algo == "MIXED_PRECISION" and not self.layers and not plan.config.fp8_with_fp4_experts:
            other = mapping(plan.config.quant_cfg.get("quantized_layers"), "quant_cfg.json quantized_layers")
            if not other:
                raise CheckpointError(f"{plan.place}: {where}: MIXED_PRECISION needs quantized_layers")
            return cls._from(plan, {**view, "quantized_layers": {k: mapping(v, f"quant_cfg.json {k!r}") for k, v in other.items()}}, where)
        return self

    @staticmethod
    def _group(plan: Plan, group: Any, algo: str, where: str) -> int | None:
        if group is None:
            return None
        want = ALGOS[algo][1] if algo in ALGOS else None
        if type(group) is not int or group <= 0 or (want is not None and group != want):
            need = f"{want} for {algo}" if want else "a positive integer"
            raise CheckpointError(f"{plan.place}: {where}: group_size is {group!r}; need {need}")
        return group

    def resolve(self, plan: Plan) -> None:
        """Match exclusions and the layer map with the file's modules."""
        names = plan.names()
        self.excluded = match_exact_or_prefix(self.exclude, names)
        plan.count("exclude pattern", self.excluded)
        if self.algo == "MIXED_PRECISION":
            self.mapped, counts = match_layers(self.layers, names)
            plan.patterns.update(counts)
            none = [k for k, n in counts.items() if not n]
            if none:
                plan.warn(f"{len(none)} entries of quantized_layers matched no module: {', '.join(none[:10])}")

    def spec(self, module: str) -> Spec | None:
        """Spec of a module (a dotted path), None when it is not quantised."""
        if module in self.excluded.of or not self.algo:
            return None
        algo = self.algo
        if algo == "MIXED_PRECISION":
            key = self.mapped.get(module)
            if key is None:
                return None
            algo = self.layers[key][0]
        fmt, _, static = ALGOS[algo]
        origin = f"{self.where} says quant_algo {algo}"
        return Spec(fmt, origin, static and self.with_input, act=_ACTS.get(algo) if self.with_input else None)

    def why_not(self, module: str) -> str:
        if module in self.excluded.of:
            return f"{self.where} excludes {module!r} by {self.excluded.of[module]!r}"
        return f"{self.where} quantized_layers does not list {module!r}" if self.algo else f"{self.where} has no quant_algo"


def _block_fp8(store: Store) -> bool:
    """Whether some FP8 weight has DeepSeek's block scales."""
    return any(n.endswith("weight_scale_inv") for n in store.entries)


def _quantised(modules: Iterable[str], plan: Plan) -> list[str]:
    """Those with a block scale of ModelOpt's in the file."""
    return sorted(m for m in modules if f"{m}.weight_scale" in plan.store.entries or f"{m}_weight_scale" in plan.store.entries)


def _excluded_differently(a: list[str], b: list[str], plan: Plan) -> list[str]:
    one, two = (set(match_exact_or_prefix(x, plan.names()).of) for x in (a, b))
    return _quantised(one ^ two, plan)


def _mapped_differently(a: dict[str, Any], b: dict[str, Any], plan: Plan) -> list[str]:
    def algos(layers: dict[str, Any]) -> dict[str, str]:
        found, _ = match_layers(layers, plan.names())
        return {module: json.dumps(layers[key], sort_keys=True, default=str).upper() for module, key in found.items()}

    one, two = algos(a), algos(b)
    return _quantised((m for m in one.keys() | two.keys() if one.get(m) != two.get(m)), plan)


def match_layers(keys: Iterable[str], names: Names) -> tuple[dict[str, str], dict[str, int]]:
    """module -> longest key that equals it or is a dotted prefix of it, and matches per key.

    A key that matches nothing is tried again without the wrapper segments ``model`` and ``language_model``.
    """
    of: dict[str, str] = {}
    counts: dict[str, int] = {}
    bare = names.canonical()
    for key in sorted(keys, key=len):  # longer keys overwrite shorter ones
        source = names
        spellings = names.under(key)
        if not spellings:
            from fp4.checkpoint.patterns import canonical

            source, spellings = bare, bare.under(canonical(key))
        modules = [m for s in spellings for m in source.by_spelling[s]]
        counts[key] = len(modules)
        of.update(dict.fromkeys(modules, key))
    return of, counts


def kv_scheme(value: Any, where: str) -> tuple[str | None, bool]:
    """(algorithm or None, dynamic) of a kv_cache_scheme: null, a bare string, or {num_bits, type, dynamic}."""
    if value is None:
        return None, False
    if isinstance(value, str):
        return value.upper(), False
    scheme = mapping(value, where)
    bits, kind = scheme.get("num_bits"), scheme.get("type")
    known = {"8 float": "FP8", "8 int": "INT8", "4 float": "NVFP4"}
    name = known.get(f"{bits} {kind}")
    if name is None:
        raise CheckpointDialect(f"{where}: num_bits {bits!r} with type {kind!r} is not known; need 8-bit float or int, or 4-bit float")
    return name, bool(scheme.get("dynamic", False))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
