"""ComfyUI: ModelOpt's three names with scales already in 128x4 tiles, told by a JSON marker a layer or in the metadata."""

from __future__ import annotations

import json
from typing import Any

from fp4.checkpoint.base import Plan
from fp4.checkpoint.config import Config, mapping
from fp4.checkpoint.index import Store
from fp4.checkpoint.linear import Leaves, build
from fp4.checkpoint.record import MULTIPLY, Spec
from fp4.errors import CheckpointDialect, CheckpointError

__all__ = ["Comfy"]

_MARKER = ".comfy_quant"
_METADATA = "_quantization_metadata"
_FORMATS = {"nvfp4": "nvfp4", "float8_e4m3fn": "fp8", "mxfp8": "mxfp8"}
LEAVES = Leaves(input={"input_scale": MULTIPLY}, ignored=frozenset({"comfy_quant"}))


def _object(text: bytes | str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{where}: is not JSON") from None
    return mapping(value, where)


class Comfy:
    name = "comfyui"

    def detect(self, store: Store, config: Config) -> str | None:
        marked = next((n for n in store.entries if n.endswith(_MARKER)), None)
        if marked is not None:
            return f"{marked!r} is ComfyUI's marker"
        if _METADATA in store.metadata:
            return f"the file's metadata has ComfyUI's {_METADATA}"
        return None

    def plan(self, plan: Plan) -> None:
        store = plan.store
        formats: dict[str, str] = {}
        if _METADATA in store.metadata:
            block = _object(store.metadata[_METADATA], f"{plan.place}: metadata {_METADATA}")
            for module, value in mapping(block.get("layers"), f"{plan.place}: metadata {_METADATA} layers").items():
                formats[module] = self._format(mapping(value, f"{plan.place}: {module}"), f"{plan.place}: metadata of {module!r}")
        for name in store.entries:
            if name.endswith(_MARKER):
                where = f"{plan.file(name)}: tensor {name!r}"
                value = _object(bytes(store.bytes(name).tolist()), where)
                formats[name.removesuffix(_MARKER)] = self._format(value, where)
        plan.swizzled.update(f"{m}.weight" for m, f in formats.items() if f in ("nvfp4", "mxfp8"))

        def spec(module: str) -> Spec | None:
            return Spec(formats[module], f"ComfyUI's marker says {formats[module]}") if module in formats else None

        build(plan, LEAVES, spec, lambda module: f"ComfyUI has no marker for {module!r}")

    @staticmethod
    def _format(value: dict[str, Any], where: str) -> str:
        found = _FORMATS.get(str(value.get("format")))
        if found is None:
            raise CheckpointDialect(f"{where}: format {value.get('format')!r} is not read; need one of {', '.join(_FORMATS)}")
        return found
