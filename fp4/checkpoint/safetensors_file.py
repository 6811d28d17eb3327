"""One .safetensors file: a header that is checked before it is believed, and tensors as views of the mapped file.

The safetensors library cannot slice F4 tensors and cannot load F8_E8M0 from bytes (specs: checkpoint dtypes), so the header
is parsed here: 8 bytes little-endian length, JSON, then the data. Nothing is read from the data until a tensor is asked for.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import torch

from fp4.errors import CheckpointError

__all__ = ["DTYPE_BITS", "Entry", "SafetensorsFile"]

#: bits an element of each dtype name that the format defines
DTYPE_BITS: dict[str, int] = {
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}

_TORCH: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}

#: the reference implementation refuses larger headers too
_MAX_HEADER = 100_000_000


class Entry(NamedTuple):
    """Where one tensor lies. ``shape`` is the header's; for F4 its last dimension counts elements, two a byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """Shape of the tensor as bytes-per-element storage: F4 [.., k] is [.., k / 2]."""
        return (*self.shape[:-1], self.shape[-1] // 2) if self.dtype == "F4" and self.shape else self.shape


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise CheckpointError(f"key {twice[:200]!r} appears twice")
    return found


def _constant(name: str) -> NoReturn:
    raise CheckpointError(f"number {name} is not JSON")


class SafetensorsFile:
    """A validated header and a private read map of the file.

    ``entries``: tensor name -> Entry. ``metadata``: the header's string map. Raises CheckpointError, naming the file, for a
    missing or truncated file, a header that is not what the format says, or data offsets that leave the file, overlap or
    leave holes.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.metadata: dict[str, str] = {}
        self.entries: dict[str, Entry] = {}
        self._map: mmap.mmap | None = None
        try:
            if not self.path.is_file() and self.path.exists():  # a pipe would block for ever, a device has no size
                raise self._error("is not a regular file; give a .safetensors file")
            with open(self.path, "rb") as handle:
                self.size = os.fstat(handle.fileno()).st_size
                self._parse(handle)
                self._map = self._mapped(handle.fileno())
        except OSError as error:
            raise self._error(f"cannot be read: {error.strerror or error}") from None

    def _error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {text}")

    def _parse(self, handle: BinaryIO) -> None:
        if self.size < 8:
            raise self._error(f"is truncated; got {self.size} bytes; need at least the 8 bytes of the header length")
        (length,) = struct.unpack("<Q", handle.read(8))
        if length > _MAX_HEADER:
            raise self._error(f"header length {length} is above {_MAX_HEADER}; this is not a safetensors file, or it is corrupt")
        if 8 + length > self.size:
            raise self._error(f"is truncated inside its header; header says {length} bytes, file has {self.size - 8} after the length")
        raw = handle.read(length)
        try:
            header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_constant)
        except CheckpointError as error:
            raise self._error(f"corrupt header: {error}") from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise self._error(f"corrupt header: not UTF-8 JSON ({type(error).__name__})") from None
        if not isinstance(header, dict):
            raise self._error(f"corrupt header: top level is {type(header).__name__}; need an object")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise self._error("corrupt header: __metadata__ must map strings to strings")
        self.metadata = metadata
        self._start = 8 + length
        self._collect(header)

    def _collect(self, header: dict[str, Any]) -> None:
        entries = self.entries
        for name, value in header.items():
            entries[name] = self._entry(name, value)
        position = 0
        for entry in sorted(entries.values(), key=lambda e: (e.begin, e.end)):
            if entry.begin < position:
                raise self._error(
                    f"tensor {entry.name[:200]!r} overlaps another; starts at {entry.begin}, previous data ends at {position}"
                )
            if entry.begin > position:
                raise self._error(
                    f"hole in the data before tensor {entry.name[:200]!r}; bytes {position} to {entry.begin} belong to no tensor"
                )
            position = entry.end
        have = self.size - self._start
        if position > have:
            raise self._error(f"is truncated; header describes {position} bytes of data, file has {have}; download it again")
        if position < have:
            raise self._error(f"has {have - position} bytes after the last tensor; header describes {position}, file has {have}")

    def _entry(self, name: str, value: Any) -> Entry:
        """The checked Entry. The usual case is decided here, quickly; ``_explain`` finds the words for the others."""
        try:
            dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
            bits = DTYPE_BITS[dtype]
            numel = extent = 1
            for n in shape:
                if type(n) is not int or n < 0:
                    raise ValueError
                numel *= n
                extent *= n or 1
            good = extent < 1 << 63 and type(begin) is int and type(end) is int and 0 <= begin <= end and numel * bits == (end - begin) * 8
            if (
                not good
                or not name.isprintable()
                or len(value) != 3
                or type(shape) is not list
                or len(shape) > 64
                or (bits == 4 and shape and shape[-1] % 2)
            ):
                raise ValueError
        except (TypeError, KeyError, ValueError):
            raise self._explain(name, value) from None
        return Entry(name, dtype, tuple(shape), begin, end)

    def _explain(self, name: str, value: Any) -> CheckpointError:
        """What is wrong with the header's entry of one tensor."""
        where = f"corrupt header: tensor {name[:200]!r}"
        if not name.isprintable():
            return self._error(f"{where} has a name with control characters or lone surrogates")
        if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
            return self._error(f"{where} needs exactly dtype, shape and data_offsets")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
            return self._error(f"tensor {name[:200]!r} has dtype {str(dtype)[:40]!r}; need one of {', '.join(DTYPE_BITS)}")
        if not isinstance(shape, list) or len(shape) > 64 or not all(type(n) is int and 0 <= n < 1 << 63 for n in shape):
            return self._error(f"{where} has shape {str(shape)[:80]}; need a list of at most 64 integers from 0 to 2^63 - 1")
        if not math.prod(shape) and math.prod(n or 1 for n in shape) >= 1 << 63:
            return self._error(f"{where} has shape {str(shape)[:80]}; it is empty, but its other dimensions overflow 64 bits")
        whole = isinstance(offsets, list) and len(offsets) == 2 and all(type(o) is int for o in offsets)
        if not whole or not 0 <= offsets[0] <= offsets[1]:
            return self._error(f"{where} has data_offsets {str(offsets)[:80]}; need [begin, end] with 0 <= begin <= end")
        bits = DTYPE_BITS[dtype]
        if bits == 4 and shape and shape[-1] % 2:
            return self._error(f"tensor {name[:200]!r} is F4 with an odd last dimension {shape[-1]}; two codes share a byte")
        size = math.prod(shape) * bits
        return self._error(
            f"tensor {name[:200]!r} says {dtype} {str(shape)[:80]}, {str(size // 8)[:40]} bytes, "
            f"but its data_offsets hold {offsets[1] - offsets[0]} bytes"
        )

    def _mapped(self, fileno: int) -> mmap.mmap:
        try:
            if sys.platform == "linux":
                # private and writable, as torch wants a writable buffer; NORESERVE so that a file larger than memory maps
                flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
                return mmap.mmap(fileno, self.size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            return mmap.mmap(fileno, self.size, access=mmap.ACCESS_COPY)
        except ValueError as error:
            raise self._error(f"cannot be mapped: {error}") from None

    def bytes(self, name: str) -> torch.Tensor:
        """u8 [nbytes]: the tensor's bytes, a view of the mapped file."""
        entry = self.entries[name]
        if entry.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        if self._map is None:
            raise self._error(f"is closed; open the checkpoint again to read {name[:200]!r}")
        return torch.frombuffer(self._map, dtype=torch.uint8, count=entry.nbytes, offset=self._start + entry.begin)

    def raw(self, name: str) -> torch.Tensor:
        """u8 ``byte_shape``: an 8-bit or F4 tensor as bytes, a view of the mapped file."""
        entry = self.entries[name]
        if DTYPE_BITS[entry.dtype] not in (4, 8):
            raise self._error(f"tensor {name[:200]!r} is {entry.dtype}; need an 8-bit or 4-bit dtype to read raw bytes")
        return self.bytes(name).reshape(entry.byte_shape)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor in its torch dtype; F4 comes as raw u8 bytes, two codes each. A view where alignment allows."""
        entry = self.entries[name]
        if entry.dtype == "F4":
            return self.raw(name)
        dtype = _TORCH.get(entry.dtype)
        if dtype is None:
            raise self._error(f"tensor {name[:200]!r} has dtype {entry.dtype}, which torch cannot hold")
        data = self.bytes(name)
        if data.data_ptr() % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).reshape(entry.shape)

    def release(self) -> None:
        """Give resident pages of the map back to the system (contents stay readable). Drops edits made to views."""
        if self._map is not None and hasattr(self._map, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Close the file. Views that were handed out keep the map alive."""
        self._map = None

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())
