"""Writer of GPT-OSS's MXFP4: stacked experts as ``_blocks`` and ``_scales``; nothing else can be quantised."""

from __future__ import annotations

import re
from typing import Any

from fp4.checkpoint.base import Checkpoint
from fp4.checkpoint.output import Blob
from fp4.checkpoint.patterns import Names, match_path_prefix
from fp4.checkpoint.weights import Loader, Weight

__all__ = ["GptOssWriter"]


class GptOssWriter:
    name = "gpt-oss"
    kv_shape: tuple[int, ...] = ()
    divides = False

    def stacks(self, ck: Checkpoint) -> bool | None:
        return True

    def refuse(self, ck: Checkpoint, weight: Weight) -> str:
        kind = ck.config.model_type
        if weight.kind != "block" or weight.format != "mxfp4":
            return f"is {weight.format}; gpt-oss holds MXFP4 experts only"
        if not weight.stacked:
            return "is not a stacked expert tensor; gpt-oss quantises nothing else"
        if kind and not kind.startswith("gpt_oss"):
            return f"belongs to a {kind!r} model; the gpt-oss dialect is read for that family alone"
        if weight.act:
            weight.notes.append(f"the source quantises activations to {weight.act}; gpt-oss's config does not say such a thing")
        return ""

    def blobs(self, loader: Loader, weight: Weight) -> list[Blob]:
        experts, n, k = weight.shape
        dot = "." if weight.record.parts["codes"].endswith(".blocks") else "_"
        return [
            loader.code_blob(weight, f"{weight.module}{dot}blocks", (experts, n, k // 32, 16)),
            loader.scale_blob(weight, f"{weight.module}{dot}scales", "U8", (experts, n, k // 32)),
        ]

    def kv(self, module: str, role: str, stored: str) -> str | None:
        return None

    def refuse_kv(self, ck: Checkpoint) -> str:
        if ck._kv or ck.kv_config:
            return "its config has no key/value cache scales"
        return ""

    def configs(self, ck: Checkpoint, weights: list[Weight], plain: list[str]) -> dict[str, dict[str, Any]]:
        names = Names([*plain, *(w.module for w in weights)])
        quantised = {w.module for w in weights}
        patterns: dict[str, None] = {}
        for module in plain:
            wide = re.sub(r"(?<=\.)\d+(?=\.)", "*", module)
            reaches = set(match_path_prefix([wide], names).of)
            patterns[module if reaches & quantised else wide] = None
        return {"config.json": {"quant_method": "mxfp4", "modules_to_not_convert": list(patterns)}}
