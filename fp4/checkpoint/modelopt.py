"""NVIDIA ModelOpt: hf_quant_config.json (nested) and config.json quantization_config (flat), and FastDeploy's names for both."""

from __future__ import annotations

from fp4.checkpoint.base import Plan
from fp4.checkpoint.config import Config
from fp4.checkpoint.fused import build_fused
from fp4.checkpoint.index import Store
from fp4.checkpoint.linear import Leaves, build
from fp4.checkpoint.modelopt_config import METHODS, Settings, has_names

__all__ = ["LEAVES", "ModelOpt"]

LEAVES = Leaves(
    scale=("weight_scale", "weight_scale_inv"),
    others={
        "pre_quant_scale": "pre_quant_scale",
        "weight_quantizer._svdquant_lora_a": "lora_a",
        "weight_quantizer._svdquant_lora_b": "lora_b",
    },
)


class ModelOpt:
    name = "modelopt"

    def detect(self, store: Store, config: Config) -> str | None:
        producer = config.nested.get("producer")
        producer = producer.get("name") if isinstance(producer, dict) else None
        if config.fp8_with_fp4_experts:  # DeepSeek-V4's file; ModelOpt's words are about its experts
            return None
        if config.method in METHODS:
            return f"{config.quant_where}: quant_method is {config.quant['quant_method']!r}"
        if producer == "modelopt" or "quantization" in config.nested:
            return "hf_quant_config.json" + (f": producer is {producer!r}" if producer else " is there")
        if not config.quant and "quant_algo" in config.model:
            return "config.json: has quant_algo"
        if not config.quant and "quantization" not in config.model and has_names(store):
            return "no config, but weight, weight_scale and weight_scale_2 have ModelOpt's names and types"
        return None

    def plan(self, plan: Plan) -> None:
        settings = Settings.read(plan)
        plan.input_optional = True
        if settings is None:
            plan.has_config = False
            plan.warn("no quantization config; read by ModelOpt's names, without activation quantisation")
            build_fused(plan, lambda m: None, lambda m: "")
            build(plan, LEAVES, lambda m: None, lambda m: "")
            return
        plan.kv_config = settings.kv
        settings.resolve(plan)
        build_fused(plan, settings.spec, settings.why_not)
        build(plan, LEAVES, settings.spec, settings.why_not)
