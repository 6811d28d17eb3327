"""Records of checkpoints whose linears are a module path plus suffixes: ModelOpt, compressed-tensors, Quark, DeepSeek.

The config says what each module should be, the tensors say what it is, and both must agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from fp4.checkpoint.module_record import FLOATS, FP8, PACKED, Leaves, infer_format, make_record, plural, shown
from fp4.checkpoint.record import Record, Spec
from fp4.checkpoint.safetensors_file import Entry
from fp4.errors import CheckpointError

if TYPE_CHECKING:
    from fp4.checkpoint.base import Plan

__all__ = ["FLOATS", "FP8", "PACKED", "Leaves", "build", "infer_format", "plural", "shown"]

#: modules that a config without an exclusion for them certainly means: in a main layer, they are FP4 or the config lies
_EXPECTED = re.compile(
    r"(^|\.)((self_attn|self_attention|attn|attention)\.(q|k|v|o|qkv)_proj|mlp\.(gate|up|down|gate_up)_proj"
    r"|experts(\.\d+)?(\.(gate|up|down|gate_up)_proj|\.w[123])|experts\.(gate_up_proj|down_proj))$"
)
#: side models and extra prediction layers, which quantisers leave alone without saying so
_ASIDE = re.compile(
    r"(^|\.)(mtp|nextn|eagle|medusa|visual|vision\w*|audio\w*|image\w*|siglip|clip|vit|multi_modal_projector|mm_projector)(\.|_|$)"
)
#: not linear layers, though their weight may have two dimensions
_NEVER = re.compile(r"(embed\w*|wte|wpe|\w*norm\w*|conv1d)$")
_LAYER = re.compile(r"(?:^|\.)layers?\.(\d+)(?:\.|$)")


def build(plan: Plan, leaves: Leaves, spec_of: Callable[[str], Spec | None], why_not: Callable[[str], str]) -> None:
    """Add records for all tensors of ``plan`` that have ``leaves`` suffixes, and plain records for modules without companions.

    ``spec_of(module)``: the config's word on a module, None when it is not quantised. ``why_not(module)``: the sentence part
    that says why it is not. Raises CheckpointError for a missing companion or a disagreement; ``plan.trust`` softens the latter.
    """
    modules: dict[str, dict[str, str]] = {}
    for name in plan.free():
        module, _, leaf = name.rpartition(".")
        if leaf[:1] == "_" and module.endswith("_quantizer"):  # X.weight_quantizer._svdquant_lora_a belongs to X
            module, _, quantizer = module.rpartition(".")
            leaf = f"{quantizer}.{leaf}"
        modules.setdefault(module, {})[leaf] = name
    _Builder(plan, leaves, spec_of, why_not, modules).run()


class _Builder:
    def __init__(
        self,
        plan: Plan,
        leaves: Leaves,
        spec_of: Callable[[str], Spec | None],
        why_not: Callable[[str], str],
        modules: dict[str, dict[str, str]],
    ) -> None:
        self.plan, self.leaves, self.spec_of, self.why_not, self.modules = plan, leaves, spec_of, why_not, modules
        self.missing_scale: list[str] = []
        self.missing_input: list[str] = []
        self.have_input = 0
        self.excluded: list[str] = []
        self.not_quantised: list[str] = []
        self.aside: dict[str, list[str]] = {}
        self.fp8_aside: dict[str, list[str]] = {}

    def run(self) -> None:
        for module, have in self.modules.items():
            codes = next((have[c] for c in self.leaves.codes if c in have), None)
            if codes is None:
                continue
            entry = self.plan.store.entries[codes]
            if entry.dtype in FLOATS:
                self.float_weight(module, have, entry)
            elif entry.dtype in PACKED or entry.dtype in FP8:
                self.quantised(module, have, entry)
        self.report()

    def float_weight(self, module: str, have: dict[str, str], entry: Entry) -> None:
        spec = self.spec_of(module)
        if spec is None or len(entry.shape) < 2:
            return
        if not any(s in have for s in self.leaves.scale):
            self.unquantised(module, entry.name)

    def unquantised(self, module: str, name: str) -> None:
        layer = _LAYER.search(module)
        extra = layer is not None and self.plan.layers is not None and int(layer[1]) >= self.plan.layers
        if _EXPECTED.search(module) and not _ASIDE.search(module) and not extra:
            self.not_quantised.append(name)
        elif not _NEVER.search(module):
            self.aside.setdefault(re.sub(r"\d+", "*", name), []).append(name)

    def quantised(self, module: str, have: dict[str, str], entry: Entry) -> None:
        plan, leaves = self.plan, self.leaves
        found = [s for s in leaves.scale if s in have]
        if len(found) > 1:
            raise CheckpointError(f"{plan.file(entry.name)}: module {module!r} has both {found[0]} and {found[1]}; need one of them")
        spec = self.spec_of(module)
        if not found:
            if entry.dtype in PACKED or spec is not None:
                self.missing_scale.append(f"{module}.{leaves.scale[0]}")
            return
        if spec is None and entry.dtype in PACKED and plan.has_config:
            self.excluded.append(module)
            if not plan.trust_tensors:
                return
        scale = plan.store.entries[have[found[0]]]
        record = make_record(plan, module, entry, scale, spec, leaves, have)
        if spec is None and plan.has_config and record.kind == "fp8":
            self.fp8_aside.setdefault(re.sub(r"\d+", "*", entry.name), []).append(entry.name)
        if record.kind == "block" and spec is not None and spec.static_input and plan.activations is None:
            self.input_present(module, record)
        plan.add(record, used=[n for leaf, n in have.items() if leaf in leaves.ignored])
        if record.kind == "block":
            unused = [have[i] for i in leaves.input if i in have and have[i] not in record.parts.values()]
            plan.consume(unused)
            if unused:
                plan.once("input-unused", f"{unused[0]}: a weight-only or dynamic activation does not use it; such scales are ignored")

    def input_present(self, module: str, record: Record) -> None:
        if "input" in record.parts:
            self.have_input += 1
        else:
            self.missing_input.append(f"{module}.{next(iter(self.leaves.input))}")

    def report(self) -> None:
        plan = self.plan
        if self.missing_scale:
            rest = [n for n in plan.free() if "scale" in n.rpartition(".")[2] and n.rpartition(".")[0] in self.modules]
            rest = [n for n in rest if n.rpartition(".")[2] not in {*self.leaves.scale, *self.leaves.second, *self.leaves.input}]
            hint = f"; the file has {shown(rest)}, which no rule uses" if rest else ""
            raise CheckpointError(
                f"{plan.place}: {plural(len(self.missing_scale), 'block-scale tensor')} not found: {shown(self.missing_scale)}{hint}; "
                "quantised weights cannot be read without them"
            )
        if self.excluded:
            first = self.excluded[0]
            plan.disagree(
                f"{plural(len(self.excluded), 'module')} packed as FP4 in the file though {self.why_not(first)}: {shown(self.excluded)}"
            )
        if self.not_quantised:
            spec = self.spec_of(self.not_quantised[0].rpartition(".")[0])
            origin = spec.origin if spec else "the config"
            plan.disagree(
                f"{plural(len(self.not_quantised), 'tensor')} not quantised in the file though {origin}: {shown(self.not_quantised)}"
            )
        for pattern, names in self.aside.items():
            plan.warn(f"{pattern}: {plural(len(names), 'weight')} without scales and not listed as excluded; read as unquantised")
        for pattern, names in self.fp8_aside.items():
            plan.warn(f"{pattern}: {plural(len(names), 'FP8 weight')} though the config leaves them unquantised; read as FP8")
        self.report_inputs()

    def report_inputs(self) -> None:
        plan, missing = self.plan, self.missing_input
        if not missing:
            return
        if not self.have_input and plan.input_optional:
            plan.warn(f"no activation scale in the file though the config asks for them ({shown(missing[:3])} ...); read as weight-only")
            return
        raise CheckpointError(
            f"{plan.place}: {plural(len(missing), 'activation scale')} not found: {shown(missing)}; the config asks for static ones; "
            "open with activations='weight_only' or activations='dynamic' to go on without"
        )
