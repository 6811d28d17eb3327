"""Writing a checkpoint: streamed, one tensor at a time, under its final name only when it is whole."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fp4.checkpoint.base import CheckpointWarning
from fp4.checkpoint.config import NESTED
from fp4.checkpoint.index import Store
from fp4.checkpoint.safetensors_file import DTYPE_BITS
from fp4.errors import CheckpointError

__all__ = ["Blob", "check_target", "stored", "strip_quantization", "write_model"]

#: keys of config.json that say how the weights were quantised
QUANT_KEYS = (
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
_CHUNK = 1 << 26


@dataclass(frozen=True)
class Blob:
    """One tensor to be written: ``dtype`` is a safetensors name, ``chunks()`` yields its bytes in order, as u8 tensors."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def stored(store: Store, name: str, rename: str | None = None, shape: tuple[int, ...] | None = None) -> Blob:
    """A stored tensor, byte for byte, perhaps under another name or shape of as many elements."""
    entry = store.entries[name]

    def chunks() -> Iterator[torch.Tensor]:
        data = store.bytes(name)
        for a in range(0, data.numel(), _CHUNK):
            yield data[a : a + _CHUNK]
            store.release()

    return Blob(rename or name, entry.dtype, entry.shape if shape is None else shape, chunks)


def strip_quantization(model: Mapping[str, Any]) -> dict[str, Any]:
    """config.json without what it says about quantisation, sub-model configs included."""
    out = {k: v for k, v in model.items() if k not in QUANT_KEYS}
    for key in NESTED:
        if isinstance(out.get(key), dict):
            out[key] = strip_quantization(out[key])
    return out


def check_target(verb: str, target: Path) -> None:
    """Raise CheckpointError when something is at ``target``, a dangling link included, or another run is writing it.

    The hidden folder of a run that was killed is removed, with a warning.
    """
    _free(verb, target)
    try:
        siblings = list(target.parent.iterdir())
    except OSError:  # not there yet, or not readable: write_model says so
        return
    mine = re.compile(re.escape(f".{target.name}.partial-") + "[0-9a-f]{8}")
    for work in siblings:
        if not mine.fullmatch(work.name) or work.is_symlink() or not work.is_dir():
            continue
        lock = _lock(work)
        if lock is None:
            raise CheckpointError(f"{verb}: another run is writing {target} ({work.name}); wait for it, or give another name")
        shutil.rmtree(work, ignore_errors=True)
        os.close(lock)
        gone = "removed" if not work.exists() else "cannot be removed; remove it yourself"
        warnings.warn(CheckpointWarning(f"{verb}: {work} was left by a run that was killed; {gone}"), stacklevel=3)


def _free(verb: str, target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{verb}: {target} exists; give a new name, or remove it")


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock until it is closed, by a kill too; None when another process holds it.

    Where folders cannot be locked nothing is known of the other process, and it counts as alive.
    """
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def write_model(
    verb: str,
    target: Path,
    blobs: list[Blob],
    source: Store,
    configs: Mapping[str, Mapping[str, Any]],
    shard_bytes: int,
    done: Callable[[Blob], None] = lambda blob: None,
) -> tuple[list[str], int]:
    """Write the folder ``target`` (or one file, when it ends in .safetensors) and return (file names, bytes of tensors).

    Everything is made in a hidden folder beside the target, shards under temporary names, ``configs`` (name -> content) last in
    the given order, and then renamed at once. Raises CheckpointError, and then nothing is left.
    """
    names_ = [blob.name for blob in blobs]
    if len(set(names_)) != len(names_):
        twice = next(n for n in names_ if names_.count(n) > 1)
        raise CheckpointError(f"{verb}: two tensors of the source would both be written as {twice!r}")
    single, lock = target.suffix == ".safetensors", None
    work = target.parent / f".{target.name}.partial-{uuid.uuid4().hex[:8]}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir()
        lock = _lock(work)
        shards = _shards(blobs, 1 << 62 if single else shard_bytes)
        names = [_file_name(i, len(shards)) for i in range(len(shards))]
        for name, shard in zip(names, shards, strict=True):
            _write_shard(work / f"{name}.part", shard, source, done)
        for name in names:
            (work / f"{name}.part").rename(work / name)
        if single:
            _free(verb, target)
            (work / names[0]).rename(target)
            work.rmdir()
            files = [target.name]
        else:
            files = names + _side_files(source, work, names, shards, configs)
            _free(verb, target)
            work.rename(target)
    except OSError as error:
        raise CheckpointError(f"{verb}: cannot write {target}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if lock is not None:
            os.close(lock)
    return files, sum(b.nbytes for b in blobs)


def _shards(blobs: list[Blob], limit: int) -> list[list[Blob]]:
    """Blobs in files of at most ``limit`` bytes, each sorted so that wide elements come first and stay aligned."""
    shards: list[list[Blob]] = [[]]
    size = 0
    for blob in blobs:
        if shards[-1] and size + blob.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(blob)
        size += blob.nbytes
    for shard in shards:
        shard.sort(key=lambda b: -DTYPE_BITS[b.dtype])
    return shards


def _file_name(i: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"


def _write_shard(path: Path, shard: list[Blob], source: Store, done: Callable[[Blob], None]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for blob in shard:
        header[blob.name] = {"dtype": blob.dtype, "shape": list(blob.shape), "data_offsets": [position, position + blob.nbytes]}
        position += blob.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as handle:
        _write(handle, struct.pack("<Q", len(text)) + text)
        for blob in shard:
            written = 0
            for data in blob.chunks():
                flat = data.contiguous().reshape(-1)
                written += flat.numel()
                for a in range(0, flat.numel(), _CHUNK):
                    _write(handle, flat[a : a + _CHUNK].numpy())
                del data, flat  # or two tensors would be held while the next is made
            if written != blob.nbytes:
                raise RuntimeError(f"{blob.name}: {written} bytes made, {blob.nbytes} announced")
            source.release()
            done(blob)


def _write(handle: BinaryIO, data: Any) -> None:
    view = memoryview(data)
    while view.nbytes:
        view = view[handle.write(view) :]


def _side_files(
    source: Store, work: Path, names: list[str], shards: list[list[Blob]], configs: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Tokenizer files, index and configs, config.json last: a folder without it does not look whole."""
    written: list[str] = []
    root = source.root
    if source.with_config and (root / "config.json").is_file():
        for path in sorted(root.iterdir()):
            skip = path.name in _NOT_COPIED or path.name.endswith(".index.json") or path.name.startswith(".")
            if path.suffix in _COPIED and not skip and path.is_file() and path.stat().st_size < 1 << 28:
                shutil.copyfile(path, work / path.name)
                written.append(path.name)
    files: dict[str, Mapping[str, Any]] = {}
    if len(names) > 1:
        where = {b.name: name for name, shard in zip(names, shards, strict=True) for b in shard}
        files["model.safetensors.index.json"] = {"metadata": {"total_size": sum(b.nbytes for s in shards for b in s)}, "weight_map": where}
    for name, content in {**files, **configs}.items():
        (work / name).write_text(json.dumps(content, indent=2) + "\n")
        written.append(name)
    return written
