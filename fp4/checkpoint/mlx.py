"""MLX: config key ``quantization`` with a mode, U32 words of eight codes, U8 ``scales``, no second-level scale."""

from __future__ import annotations

from typing import Any

from fp4 import formats
from fp4.checkpoint.base import Plan
from fp4.checkpoint.config import Config, check_keys, mapping
from fp4.checkpoint.index import Store
from fp4.checkpoint.linear import plural, shown
from fp4.checkpoint.record import Record
from fp4.errors import CheckpointError
from fp4.formats import Format

__all__ = ["MLX"]

_MODES = {"mxfp4": formats.MXFP4, "nvfp4": formats.NVFP4, "mxfp8": formats.MXFP8}
_KEYS = frozenset({"group_size", "bits", "mode"})


class MLX:
    name = "mlx"

    def detect(self, store: Store, config: Config) -> str | None:
        block = config.model.get("quantization")
        if not isinstance(block, dict) or not {"group_size", "bits"} <= block.keys():
            return None
        mode = block.get("mode", "affine")
        return f"config.json quantization: mode is {mode!r}"

    def plan(self, plan: Plan) -> None:
        block = mapping(plan.config.model["quantization"], "config.json quantization")
        entries = plan.store.entries
        overrides = {k: v for k, v in block.items() if isinstance(v, (dict, bool)) and k not in _KEYS}
        if not plan.trust_tensors:
            check_keys({k: v for k, v in block.items() if k not in overrides}, _KEYS, f"{plan.place}: config.json quantization")
        default = self._format(block, f"{plan.place}: config.json quantization")
        missing, wrong = [], []
        for name in plan.free():
            if not name.endswith(".weight") or entries[name].dtype != "U32":
                continue
            module = name.removesuffix(".weight")
            other = overrides.get(module, True)
            if other is False:
                wrong.append(module)
            fmt = self._format(other, f"{plan.place}: config.json quantization[{module!r}]") if isinstance(other, dict) else default
            scales = f"{module}.scales"
            if scales not in entries:
                missing.append(scales)
                continue
            plan.add(self._record(plan, name, scales, fmt))
        biased = [f"{module}.biases" for module in (n.removesuffix(".weight") for n in plan.records) if f"{module}.biases" in entries]
        if biased:
            raise CheckpointError(
                f"{plan.place}: {plural(len(biased), 'tensor')} of MLX's affine integer mode though config.json quantization says "
                f"{block.get('mode')!r}, which has none: {shown(biased)}"
            )
        if missing:
            raise CheckpointError(f"{plan.place}: {plural(len(missing), 'block-scale tensor')} not found: {shown(missing)}")
        if wrong:
            plan.disagree(
                f"{plural(len(wrong), 'module')} packed in the file though config.json quantization excludes them: {shown(wrong)}"
            )

    @staticmethod
    def _format(block: dict[str, Any], where: str) -> Format:
        mode = block.get("mode", "affine")
        fmt = _MODES.get(mode) if isinstance(mode, str) else None
        if fmt is None:
            raise CheckpointError(f"{where}: mode is {mode!r}; need one of {', '.join(_MODES)} (affine is an integer format)")
        if block.get("group_size") != fmt.block or block.get("bits") != fmt.elem.bits:
            raise CheckpointError(
                f"{where}: group_size {block.get('group_size')!r} and bits {block.get('bits')!r}; {fmt} has {fmt.block} and {fmt.elem.bits}"
            )
        return fmt

    @staticmethod
    def _record(plan: Plan, name: str, scales: str, fmt: Format) -> Record:
        codes, scale = plan.store.entries[name], plan.store.entries[scales]
        where = f"{plan.file(name)}: tensor {name!r}"
        if len(codes.shape) < 2:
            raise CheckpointError(f"{where}: has shape {list(codes.shape)}; need [.., n, k / {32 // fmt.elem.bits}]")
        logical = (*codes.shape[:-1], codes.shape[-1] * (32 // fmt.elem.bits))
        if logical[-1] % fmt.block:
            raise CheckpointError(f"{where}: holds k = {logical[-1]}, not a multiple of the {fmt} block {fmt.block}")
        want = (*logical[:-1], logical[-1] // fmt.block)
        if scale.dtype not in ("U8", "F8_E8M0", "F8_E4M3") or scale.shape != want:
            raise CheckpointError(f"{where}: {scales} is {scale.dtype} {list(scale.shape)}; need U8 {list(want)}")
        parts = {"codes": name, "scale": scales}
        return Record(name, "block", parts, logical, logical, fmt, origin="config.json quantization", activations=None)
