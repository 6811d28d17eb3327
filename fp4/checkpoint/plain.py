"""A checkpoint that is not quantised, and the formats that fp4 refuses, with the reason."""

from __future__ import annotations

from fp4.checkpoint.base import Plan
from fp4.checkpoint.config import Config
from fp4.checkpoint.index import Store
from fp4.errors import CheckpointDialect

__all__ = ["Plain", "Refused"]

#: quant_method -> why it is not read
REASONS = {
    "bitsandbytes": "its 'fp4' is another format: "
    "a 16-value table of its own with float32 absmax per 64 values, not e2m1 with block scales",
    "fp_quant": "its weights are rotated by forward_hadamard_matrix and the input must be rotated too; fp4 does not apply rotations",
    "auto-round": "AutoRound's own method keeps formats in extra_config; export it as compressed-tensors (mxfp4 or nvfp4) instead",
    "gptq": "it is an integer format",
    "awq": "it is an integer format",
    "hqq": "it is an integer format",
    "aqlm": "it is a codebook format",
    "eetq": "it is an integer format",
    "quanto": "it is an integer format",
    "bitnet": "it is a ternary format",
    "vptq": "it is a codebook format",
    "higgs": "it is a codebook format with rotations",
}
_BITSANDBYTES = ("quant_state.bitsandbytes__", ".absmax", ".quant_map", ".nested_absmax")


class Refused:
    """Never a dialect: raises for what fp4 must not read."""

    name = "refused"

    def detect(self, store: Store, config: Config) -> str | None:
        method = config.method
        if method in REASONS:
            raise CheckpointDialect(
                f"{store.root}: {config.quant_where}: quant_method {config.quant['quant_method']!r} is refused: {REASONS[method]}"
            )
        if config.quant.get("load_in_4bit") or config.quant.get("bnb_4bit_quant_type"):
            raise CheckpointDialect(f"{store.root}: {config.quant_where}: bitsandbytes is refused: {REASONS['bitsandbytes']}")
        text = "\n".join(store.entries)
        if any(mark in text for mark in _BITSANDBYTES):
            name = next(n for n in store.entries if any(mark in n for mark in _BITSANDBYTES))
            raise CheckpointDialect(f"{store.root}: tensor {name!r} is bitsandbytes': refused: {REASONS['bitsandbytes']}")
        return None

    def plan(self, plan: Plan) -> None:
        raise CheckpointDialect(f"{plan.place}: refused")


class Plain:
    name = "plain"

    def detect(self, store: Store, config: Config) -> str | None:
        if config.quant:
            raise CheckpointDialect(
                f"{store.root}: {config.quant_where}: quant_method {config.quant.get('quant_method')!r} is not known; need modelopt, "
                "compressed-tensors, mxfp4, quark, torchao or fp8"
            )
        return "no quantization config and no tensor that a quantiser names"

    def plan(self, plan: Plan) -> None:
        plan.has_config = False
