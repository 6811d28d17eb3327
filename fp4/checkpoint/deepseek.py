"""``quant_method: fp8``: DeepSeek's block FP8 linears, with FP4 experts (V4: I8 codes and E8M0 ``.scale``) when the config says so.

Of the published V4 files whose experts ModelOpt quantised anew, config.json keeps the FP8 block and adds ``moe_quant_algo``, and
hf_quant_config.json (in newer files quantization_config too) lists the experts that are NVFP4 now. Those of the prediction layers
(``mtp.*``) often are not among them and stay MXFP4.
"""

from __future__ import annotations

import re
from typing import Any

from fp4.checkpoint.base import Plan
from fp4.checkpoint.config import Config, listed, mapping
from fp4.checkpoint.index import Store
from fp4.checkpoint.linear import Leaves, build
from fp4.checkpoint.modelopt_config import Settings
from fp4.checkpoint.patterns import Matches, match_exact_or_prefix
from fp4.checkpoint.record import MULTIPLY, Spec
from fp4.errors import CheckpointDialect, CheckpointError

__all__ = ["DeepSeek"]

#: ``weight_scale_inv`` is a multiplier in spite of its name
LEAVES = Leaves(
    scale=("scale", "weight_scale_inv", "weight_scale"),
    second={"weight_scale_2": MULTIPLY},
    input={"input_scale": MULTIPLY},
)
_EXPERT = re.compile(r"(^|\.)experts\.")


def expert_dtype(config: Config) -> Any:
    """``expert_dtype`` of config.json (V4) or of quantization_config (V4.1)."""
    return config.quant.get("expert_dtype", config.get("expert_dtype"))


class DeepSeek:
    name = "deepseek"

    def detect(self, store: Store, config: Config) -> str | None:
        if config.method == "fp8":
            kind = expert_dtype(config)
            return f"{config.quant_where}: quant_method is 'fp8'" + (f" and expert_dtype is {kind!r}" if kind else "")
        if not config.quant and not config.nested:
            packed = [n for n, e in store.entries.items() if n.endswith(".weight") and e.dtype in ("I8", "U8", "F4")]
            scales = (store.entries.get(f"{n.removesuffix('.weight')}.scale") for n in packed)
            if any(s is not None and s.dtype in ("F8_E8M0", "U8") for s in scales):
                return "no quantization config, but weight and scale (E8M0) are DeepSeek-V4's names and types"
        return None

    def plan(self, plan: Plan) -> None:
        config, where = plan.config, plan.config.quant_where
        if not config.quant:
            plan.has_config = False
            plan.warn("no quantization config; read by DeepSeek-V4's names")
            build(plan, LEAVES, lambda m: None, lambda m: "")
            return
        kind = expert_dtype(config)
        if kind not in (None, "fp4", "fp8", "bf16", "bfloat16"):
            raise CheckpointDialect(f"{plan.place}: {where}: expert_dtype {kind!r} is not known; need 'fp4' or 'fp8'")
        listed_experts = Settings.read(plan) if config.fp8_with_fp4_experts else None
        algo = listed_experts.experts if listed_experts else ""
        if algo not in ("", "NVFP4", "MXFP4"):
            raise CheckpointDialect(f"{plan.place}: moe_quant_algo {algo!r} is not known; need NVFP4 or MXFP4")
        if listed_experts is not None:
            listed_experts.resolve(plan)
            plan.kv_config = listed_experts.kv
            if listed_experts.algo not in ("", "MIXED_PRECISION", algo):
                raise CheckpointError(
                    f"{plan.place}: quant_algo contradicts: {listed_experts.where} says {listed_experts.algo!r}, {where} says "
                    f"quant_method 'fp8' and moe_quant_algo {algo!r}; need MIXED_PRECISION"
                )
        if config.quant.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise CheckpointError(f"{plan.place}: {where}: fmt is {config.quant['fmt']!r}; need e4m3")
        block = config.quant.get("weight_block_size")
        if block is not None and (not isinstance(block, list) or len(block) != 2 or not all(type(b) is int and b > 0 for b in block)):
            raise CheckpointError(f"{plan.place}: {where}: weight_block_size is {block!r}; need [rows, columns]")
        mapping(config.quant.get("activation_config"), f"{where} activation_config")
        patterns = listed(config.quant.get("modules_to_not_convert"), f"{where} modules_to_not_convert")
        excluded = match_exact_or_prefix(patterns, plan.names())
        plan.count("modules_to_not_convert pattern", excluded)
        plan.input_optional = True  # NVFP4 experts without any activation scale are weight-only, as in ModelOpt's files
        rules = _Rules(where, kind, algo, (block[0], block[1]) if block else None, excluded, listed_experts)
        build(plan, LEAVES, rules.bind(plan), rules.why_not)


class _Rules:
    """``algo``: moe_quant_algo or "". ``manifest``: what ModelOpt says of single modules."""

    def __init__(
        self, where: str, kind: Any, algo: str, block: tuple[int, int] | None, excluded: Matches, manifest: Settings | None
    ) -> None:
        self.where, self.excluded, self.algo, self.kind, self.manifest = where, excluded, algo, kind, manifest
        self.fp8 = Spec("fp8", f"{where} says fp8", block=block, act="fp8")

    def bind(self, plan: Plan) -> Any:
        entries, manifest = plan.store.entries, self.manifest

        def spec(module: str) -> Spec | None:
            if module in self.excluded.of:
                return None
            told = manifest.spec(module) if manifest is not None and manifest.layers else None
            if told is not None:
                return self.fp8 if told.format == "fp8" else told
            if not _EXPERT.search(module):
                # FP8 is not said of every linear: only those with a scale are, and the reader of V3 and V4 files knows no list
                weight = entries.get(f"{module}.weight")
                return self.fp8 if weight is not None and weight.dtype.startswith("F8") else None
            everywhere = self.algo if manifest is None or not (manifest.layers or module in manifest.excluded.of) else ""
            if self.kind != "fp4" and not everywhere:
                return self.fp8
            # V4's NVFP4 files keep expert_dtype fp4 and differ by type: I8 codes are MXFP4, U8 with weight_scale_2 NVFP4
            two_level = f"{module}.weight_scale_2" in entries and not (manifest is not None and manifest.layers)
            fmt = everywhere.lower() or ("nvfp4" if two_level else "mxfp4")
            return Spec(fmt, f"{self.where} says fp4 experts" + (f" in {everywhere}" if everywhere else ""), fmt == "nvfp4")

        return spec

    def why_not(self, module: str) -> str:
        if module in self.excluded.of:
            return f"{self.where} excludes {module!r} by {self.excluded.of[module]!r}"
        return f"{self.where} says fp8 for {module!r}"
