"""The config files beside a checkpoint, read once and kept with the place each value came from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp4.checkpoint.index import read_json
from fp4.errors import CheckpointError

__all__ = ["Config", "check_keys", "listed", "mapping"]

#: keys of config.json that hold a whole sub-model's config, where multimodal families put ``quantization_config``
NESTED = ("text_config", "llm_config", "language_config", "thinker_config")


def check_keys(block: Mapping[str, Any], known: frozenset[str] | set[str], where: str) -> None:
    """Raise CheckpointError for a key that fp4 does not know: an unknown key may change what the bytes mean."""
    unknown = sorted(str(k) for k in block if k not in known)
    if unknown:
        raise CheckpointError(
            f"{where}: unknown key {', '.join(unknown[:10])}; fp4 cannot tell what it changes; use trust='tensors' to go on"
        )


def mapping(value: Any, where: str) -> dict[str, Any]:
    """``value`` as an object; {} for null. Raises CheckpointError naming ``where``."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: is {type(value).__name__}; need an object")
    return value


def listed(value: Any, where: str) -> list[str]:
    """``value`` as a list of strings; [] for null. Raises CheckpointError naming ``where``."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise CheckpointError(f"{where}: need a list of strings")
    return value


@dataclass
class Config:
    """``model`` is config.json, ``quant`` its quantization_config, ``nested`` hf_quant_config.json; {} where absent."""

    model: dict[str, Any] = field(default_factory=dict)
    quant: dict[str, Any] = field(default_factory=dict)
    #: where ``quant`` was found, for messages
    quant_where: str = "config.json quantization_config"
    nested: dict[str, Any] = field(default_factory=dict)
    quant_cfg: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, root: Path) -> Config:
        """Read the config files of a folder. Raises CheckpointError for a damaged one, or two that contradict each other."""
        config = cls()
        for attribute, name in (("model", "config.json"), ("nested", "hf_quant_config.json"), ("quant_cfg", "quant_cfg.json")):
            if os.path.lexists(root / name):  # a link that leads nowhere, of a broken download, is no checkpoint without a config
                setattr(config, attribute, read_json(root / name))
        found: list[tuple[str, dict[str, Any]]] = []
        for key in (None, *NESTED):
            block = config.model if key is None else config.model.get(key)
            if isinstance(block, dict) and block.get("quantization_config") is not None:
                where = "config.json " + (f"{key}." if key else "") + "quantization_config"
                found.append((where, mapping(block["quantization_config"], where)))
        if found:
            (config.quant_where, config.quant) = found[0]
            for where, other in found[1:]:
                if other != config.quant:
                    raise CheckpointError(f"{root}: {config.quant_where} and {where} differ; need one of them")
        return config

    @property
    def method(self) -> str:
        """Lower-case quant_method, '' when absent."""
        method = self.quant.get("quant_method", "")
        if not isinstance(method, str):
            raise CheckpointError(f"{self.quant_where}: quant_method is {str(method)[:80]!r}; need a string")
        return method.lower()

    @property
    def fp8_with_fp4_experts(self) -> bool:
        """DeepSeek-V4's kind: quant_method fp8 for the linears, and a word about FP4 experts beside it."""
        nested = self.nested.get("quantization")
        places = (self.quant, nested if isinstance(nested, dict) else {})
        here = ("moe_quant_algo", "expert_dtype")
        return self.method == "fp8" and any(self.get(k) is not None or any(p.get(k) is not None for p in places) for k in here)

    @property
    def source_fp8(self) -> bool:
        """The quantization_config is that of a block FP8 release (DeepSeek-V3): the model that was quantised anew, when it is left over."""
        return (
            self.method == "fp8" and "weight_block_size" in self.quant and not self.fp8_with_fp4_experts and "quant_algo" not in self.quant
        )

    def get(self, key: str) -> Any:
        """A value of the model config, looked for in the sub-model configs too."""
        for block in (self.model, *(self.model.get(k) for k in NESTED)):
            if isinstance(block, dict) and key in block:
                return block[key]
        return None

    @property
    def model_type(self) -> str:
        value = self.get("model_type") if "model_type" not in self.model else self.model["model_type"]
        return value if isinstance(value, str) else ""

    @property
    def layers(self) -> int | None:
        """num_hidden_layers: layers from here on are extra prediction layers."""
        value = self.get("num_hidden_layers")
        return value if type(value) is int else None
