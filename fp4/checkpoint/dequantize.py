"""Writing the unquantised model: streamed, one tensor at a time, under its final name only when it is whole."""

from __future__ import annotations

import json
import os
import shutil
import struct
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fp4.checkpoint.base import Checkpoint
from fp4.checkpoint.config import NESTED
from fp4.checkpoint.record import Record
from fp4.checkpoint.safetensors_file import DTYPE_BITS
from fp4.errors import CheckpointError

__all__ = ["DequantizeReport", "dequantize_checkpoint"]

_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}
_TORCH_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32", torch.float64: "float64"}
#: keys of config.json that say how the weights were quantised
_QUANT_KEYS = (
    "quantization_config",
    "quantization",
    "expert_dtype",
    "moe_quant_algo",
    "quant_algo",
    "kv_cache_quant_algo",
    "compression_config",
)
_COPIED = (".json", ".txt", ".model", ".jinja", ".md", ".py", ".tiktoken")
_NOT_COPIED = ("config.json", "hf_quant_config.json", "quant_cfg.json")

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
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"dequantize: {target} exists; give a new name, or remove it")
    if isinstance(src, Checkpoint):
        return _run(src, target, dtype, progress, shard_bytes, fold)
    from fp4.checkpoint import open_checkpoint

    with open_checkpoint(src, trust=trust, activations=activations, rename=rename) as ck:
        return _run(ck, target, dtype, progress, shard_bytes, fold)


def _run(ck: Checkpoint, target: Path, dtype: torch.dtype, progress: Progress | None, shard_bytes: int, fold: bool) -> DequantizeReport:
    single = target.suffix == ".safetensors"
    work = target.parent / f".{target.name}.partial-{uuid.uuid4().hex[:8]}"
    report = DequantizeReport(str(target), ck.dialect)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir()
        shards = _shards(ck, dtype, 1 << 62 if single else shard_bytes)
        names = [_file_name(i, len(shards)) for i in range(len(shards))]
        for name, shard in zip(names, shards, strict=True):
            _write_shard(ck, work / f"{name}.part", shard, dtype, fold, report, progress)
        _report_side_tensors(ck, fold, report)
        for name in names:
            (work / f"{name}.part").rename(work / name)
        if single:
            (work / names[0]).rename(target)
            work.rmdir()
            report.files = [target.name]
        else:
            report.files = names + _side_files(ck, work, names, shards, dtype, report.bytes_out)
            if target.exists():
                raise CheckpointError(f"dequantize: {target} appeared while writing; nothing was replaced")
            work.rename(target)
    except OSError as error:
        raise CheckpointError(f"dequantize: cannot write {target}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    report.warnings = list(ck.warnings)
    return report


def _header_entry(ck: Checkpoint, record: Record, dtype: torch.dtype) -> tuple[str, list[int], int]:
    """(dtype name, shape, bytes) of a tensor of the output."""
    if record.kind != "plain":
        numel = 1
        for n in record.shape:
            numel *= n
        return _NAMES[dtype], list(record.shape), numel * dtype.itemsize
    entry = ck.store.entries[record.parts["weight"]]
    return entry.dtype, list(entry.shape), entry.nbytes


def _shards(ck: Checkpoint, dtype: torch.dtype, limit: int) -> list[list[Record]]:
    """Records in files of at most ``limit`` bytes, each sorted so that wide elements come first and stay aligned."""
    shards: list[list[Record]] = [[]]
    size = 0
    for name in ck:
        record = ck.record(name)
        nbytes = _header_entry(ck, record, dtype)[2]
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(record)
        size += nbytes
    for shard in shards:
        shard.sort(key=lambda r: -DTYPE_BITS[_header_entry(ck, r, dtype)[0]])
    return shards


def _file_name(i: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"


def _write_shard(
    ck: Checkpoint, path: Path, shard: list[Record], dtype: torch.dtype, fold: bool, report: DequantizeReport, progress: Progress | None
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for record in shard:
        name, shape, nbytes = _header_entry(ck, record, dtype)
        header[record.name] = {"dtype": name, "shape": shape, "data_offsets": [position, position + nbytes]}
        position += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as handle:
        _write(handle, struct.pack("<Q", len(text)) + text)
        for record in shard:
            report.bytes_in += sum(ck.store.entries[p].nbytes for p in record.parts.values())
            if record.kind == "plain":
                _write_bytes(handle, ck.store.bytes(record.parts["weight"]), ck.store.release)
            else:
                _write_bytes(handle, ck._values(record, dtype, fold, ck.store.release).view(torch.uint8).reshape(-1), None)
                report.dequantized += 1
            ck.store.release()
            report.tensors += 1
            if progress is not None:
                progress(report.tensors, len(ck), record.name)
    report.bytes_out += position


def _write_bytes(handle: BinaryIO, data: torch.Tensor, after: Callable[[], None] | None) -> None:
    step = 1 << 26
    for a in range(0, data.numel(), step):
        _write(handle, data[a : a + step].numpy())
        if after is not None:
            after()


def _write(handle: BinaryIO, data: Any) -> None:
    view = memoryview(data)
    while view.nbytes:
        view = view[handle.write(view) :]


def _report_side_tensors(ck: Checkpoint, fold: bool, report: DequantizeReport) -> None:
    folded = sum("pre_quant_scale" in ck.record(n).parts or "lora_a" in ck.record(n).parts for n in ck)
    if folded and fold:
        report.notes.append(f"{folded} weights have their pre_quant_scale and low-rank branch folded in")
    if folded and not fold:
        report.notes.append(f"{folded} weights had a pre_quant_scale or low-rank branch, which are not in the output")
    kv = sum(len(parts) for parts in ck._kv.values())
    if kv:
        report.notes.append(f"{kv} key/value cache scales are not in the output: an unquantised cache has none")


def _side_files(ck: Checkpoint, work: Path, names: list[str], shards: list[list[Record]], dtype: torch.dtype, total: int) -> list[str]:
    """Index, tokenizer files and config.json, the last one last: a folder without it does not look whole."""
    written: list[str] = []
    root = ck.store.root
    if ck.store.with_config and (root / "config.json").is_file():
        for path in sorted(root.iterdir()):
            skip = path.name in _NOT_COPIED or path.name.endswith(".index.json") or path.name.startswith(".")
            if path.suffix in _COPIED and not skip and path.is_file() and path.stat().st_size < 1 << 28:
                shutil.copyfile(path, work / path.name)
                written.append(path.name)
    if len(names) > 1:
        where = {r.name: name for name, shard in zip(names, shards, strict=True) for r in shard}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (work / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        written.append("model.safetensors.index.json")
    if ck.config.model:
        (work / "config.json").write_text(json.dumps(_plain_config(ck.config.model, dtype), indent=2) + "\n")
        written.append("config.json")
    return written


def _plain_config(model: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    out = {k: v for k, v in model.items() if k not in _QUANT_KEYS}
    for key in NESTED:
        if isinstance(out.get(key), dict):
            out[key] = _plain_config(out[key], dtype)
    for key in ("torch_dtype", "dtype"):
        if key in out:
            out[key] = _TORCH_NAMES[dtype]
    return out
