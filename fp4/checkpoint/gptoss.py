"""OpenAI GPT-OSS MXFP4: ``_blocks`` and ``_scales`` (transformers) or ``.blocks`` and ``.scales`` (OpenAI's own files)."""

from __future__ import annotations

from fp4.checkpoint.base import Plan
from fp4.checkpoint.config import Config, check_keys, listed
from fp4.checkpoint.index import Store
from fp4.checkpoint.linear import plural, shown
from fp4.checkpoint.patterns import match_path_prefix
from fp4.checkpoint.record import Record
from fp4.errors import CheckpointError
from fp4.formats import MXFP4

__all__ = ["GptOss"]

_KEYS = frozenset({"quant_method", "modules_to_not_convert", "dequantize"})


class GptOss:
    name = "gpt-oss"

    def detect(self, store: Store, config: Config) -> str | None:
        if config.method == "mxfp4":
            return f"{config.quant_where}: quant_method is 'mxfp4'"
        if not config.quant and not config.nested and any(n.endswith(("_blocks", ".blocks")) for n in store.entries):
            return "no quantization config, but blocks and scales are GPT-OSS's names"
        return None

    def plan(self, plan: Plan) -> None:
        config, entries = plan.config, plan.store.entries
        patterns: list[str] = []
        if config.quant:
            if not plan.trust_tensors:
                check_keys(config.quant, _KEYS, f"{plan.place}: {config.quant_where}")
            patterns = listed(config.quant.get("modules_to_not_convert"), f"{config.quant_where} modules_to_not_convert")
        excluded = match_path_prefix(patterns, plan.names())
        plan.count("modules_to_not_convert pattern", excluded)
        missing, wrong = [], []
        for name, entry in entries.items():
            dotted = name.endswith(".blocks")
            if not dotted and not name.endswith("_blocks"):
                continue
            stem = name[: -len("_blocks")]
            scales = f"{stem}.scales" if dotted else f"{stem}_scales"
            if scales not in entries:
                missing.append(scales)
                continue
            if stem in excluded.of or name in excluded.of:
                wrong.append(stem)
            place = f"{plan.file(name)}: tensor {name!r}"
            shape = entry.byte_shape
            if entry.dtype not in ("U8", "I8", "F4") or len(shape) < 3 or shape[-1] != 16:
                raise CheckpointError(f"{place}: is {entry.dtype} {list(entry.shape)}; need U8 [.., n, k / 32, 16]")
            scale = entries[scales]
            if scale.dtype not in ("U8", "F8_E8M0") or scale.shape != shape[:-1]:
                raise CheckpointError(
                    f"{plan.file(scales)}: tensor {scales!r}: is {scale.dtype} {list(scale.shape)}; "
                    f"blocks {list(shape)} need U8 {list(shape[:-1])}"
                )
            logical = (*shape[:-2], shape[-2] * 32)
            gate_up = stem.endswith(("gate_up_proj", "mlp1_weight"))
            plan.add(
                Record(
                    name=stem,
                    kind="block",
                    parts={"codes": name, "scale": scales},
                    # transformers holds [experts, in, out], OpenAI's model [experts, out, in]
                    shape=logical if dotted else (*logical[:-2], logical[-1], logical[-2]),
                    logical=logical,
                    format=MXFP4,
                    transposed=not dotted,
                    gate_up="interleaved" if gate_up else None,
                    origin=config.quant_where if config.quant else "the tensor names",
                )
            )
        if missing:
            raise CheckpointError(f"{plan.place}: {plural(len(missing), 'block-scale tensor')} not found: {shown(missing)}")
        if wrong:
            plan.disagree(f"{plural(len(wrong), 'module')} packed in the file though modules_to_not_convert excludes them: {shown(wrong)}")
        self._unpacked(plan, excluded.of)

    @staticmethod
    def _unpacked(plan: Plan, excluded: dict[str, str]) -> None:
        """Experts that the config means to be MXFP4 and the file holds as floats."""
        floats = [
            n
            for n, e in plan.store.entries.items()
            if n.endswith(("experts.gate_up_proj", "experts.down_proj")) and e.dtype in ("BF16", "F16", "F32") and n not in excluded
        ]
        if floats and plan.config.quant:
            plan.disagree(
                f"{plural(len(floats), 'tensor')} not quantised in the file though {plan.config.quant_where} says mxfp4: {shown(floats)}"
            )
