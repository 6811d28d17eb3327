"""Writing the unquantised model: streamed, one tensor at a time, under its final name only when it is whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fp4.checkpoint.base import Checkpoint
from fp4.checkpoint.config import NESTED
from fp4.checkpoint.output import Blob, check_target, stored, strip_quantization, write_model
from fp4.checkpoint.record import Record
from fp4.errors import CheckpointError

__all__ = ["DequantizeReport", "dequantize_checkpoint"]

_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}
_TORCH_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32", torch.float64: "float64"}
Progress = Callable[[int, int, str], None]


@dataclass
class DequantizeReport:
    """What was written: ``files`` relative to ``path``, counts, bytes, and what the reader warned of."""

    path: str
    dialect: str
    files: list[str] = field(default_factory=list)
    tensors: int = 0
    dequantized: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def dequantize_checkpoint(
    src: str | os.PathLike[str] | Checkpoint,
    dst: str | os.PathLike[str],
    dtype: torch.dtype = torch.bfloat16,
    progress: Progress | None = None,
    *,
    shard_bytes: int = 5 << 30,
    trust: str = "config",
    activations: str | None = None,
    rename: Mapping[str, str] | None = None,
    fold: bool = True,
) -> DequantizeReport:
    """Write the unquantised model of checkpoint ``src`` to the new folder ``dst`` (or one file, when it ends in .safetensors).

    Quantised tensors become ``dtype``, all others keep theirs. ``fold`` applies pre_quant_scale and low-rank branches, which a
    plain linear would lose. ``progress(done, total, name)`` is called after each tensor. Memory: one output tensor and about
    100 MB. Raises CheckpointError for a bad source or a target that exists; then nothing is left at ``dst``.
    """
    if dtype not in _NAMES:
        raise CheckpointError(f"dequantize: dtype {dtype} is not written; need one of {', '.join(map(str, _NAMES))}")
    if shard_bytes < 1:
        raise CheckpointError(f"dequantize: shard_bytes is {shard_bytes}; need a positive number")
    target = Path(dst)
    check_target("dequantize", target)
    if isinstance(src, Checkpoint):
        return _run(src, target, dtype, progress, shard_bytes, fold)
    from fp4.checkpoint import open_checkpoint

    with open_checkpoint(src, trust=trust, activations=activations, rename=rename) as ck:
        return _run(ck, target, dtype, progress, shard_bytes, fold)


def _run(ck: Checkpoint, target: Path, dtype: torch.dtype, progress: Progress | None, shard_bytes: int, fold: bool) -> DequantizeReport:
    report = DequantizeReport(str(target), ck.dialect)
    blobs = [_blob(ck, ck.record(name), dtype, fold) for name in ck]

    def done(blob: Blob) -> None:
        record = ck.record(blob.name)
        report.bytes_in += sum(ck.store.entries[p].nbytes for p in record.parts.values())
        report.dequantized += record.kind != "plain"
        report.tensors += 1
        if progress is not None:
            progress(report.tensors, len(blobs), blob.name)

    configs = {"config.json": _plain_config(ck.config.model, dtype)} if ck.config.model else {}
    report.files, report.bytes_out = write_model("dequantize", target, blobs, ck.store, configs, shard_bytes, done)
    _report_side_tensors(ck, fold, report)
    report.warnings = list(ck.warnings)
    return report


def _blob(ck: Checkpoint, record: Record, dtype: torch.dtype, fold: bool) -> Blob:
    if record.kind == "plain":
        return stored(ck.store, record.parts["weight"], record.name)

    def chunks() -> list[torch.Tensor]:
        return [ck._values(record, dtype, fold, ck.store.release).view(torch.uint8).reshape(-1)]

    return Blob(record.name, _NAMES[dtype], record.shape, chunks)


def _report_side_tensors(ck: Checkpoint, fold: bool, report: DequantizeReport) -> None:
    folded = sum("pre_quant_scale" in ck.record(n).parts or "lora_a" in ck.record(n).parts for n in ck)
    if folded and fold:
        report.notes.append(f"{folded} weights have their pre_quant_scale and low-rank branch folded in")
    if folded and not fold:
        report.notes.append(f"{folded} weights had a pre_quant_scale or low-rank branch, which are not in the output")
    kv = sum(len(parts) for parts in ck._kv.values())
    if kv:
        report.notes.append(f"{kv} key/value cache scales are not in the output: an unquantised cache has none")


def _plain_config(model: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """config.json of the unquantised model: no word of quantisation, every dtype the output's."""

    def retype(block: dict[str, Any]) -> dict[str, Any]:
        out = {k: retype(v) if k in NESTED and isinstance(v, dict) else v for k, v in block.items()}
        return {k: _TORCH_NAMES[dtype] if k in ("torch_dtype", "dtype") else v for k, v in out.items()}

    return retype(strip_quantization(model))
