"""What layouts need of tensors: raw bytes of any input, contiguous storage, checked coordinates, word tables, byte ranges of shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from fp4 import check
from fp4.errors import LayoutError, shown
from fp4.layout_spec import WordProgram

__all__ = ["ByteRange", "Bytes", "Reason", "as_bytes", "as_given", "as_storage", "checked_index", "map_words", "whole", "whole_list"]

#: a torch tensor in gives a torch tensor back, a numpy array a numpy array
Bytes = TypeVar("Bytes", torch.Tensor, npt.NDArray[Any])


@dataclass(frozen=True)
class ByteRange:
    """Bytes of one shard inside one expert: ``length`` bytes at ``start``, repeated ``count`` times, ``stride`` bytes apart."""

    start: int
    length: int
    count: int = 1
    stride: int = 0

    @property
    def nbytes(self) -> int:
        return self.length * self.count

    def take(self, y: torch.Tensor) -> torch.Tensor:
        """The shard's bytes out of storage ``y`` u8 [..., nbytes], in the order the shard itself would be stored."""
        runs = [y[..., self.start + i * self.stride : self.start + i * self.stride + self.length] for i in range(self.count)]
        return torch.cat(runs, -1) if len(runs) != 1 else runs[0]


@dataclass(frozen=True)
class Reason:
    """Why something is not possible; false in a condition."""

    text: str

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return self.text


def whole(where: str, value: Any, what: str) -> int:
    """``value`` as an int, or LayoutError."""
    return check.whole(where, what, value, error=LayoutError)


def whole_list(where: str, values: Any, what: str) -> tuple[int, ...]:
    """``values`` as ints. Raises LayoutError as ``whole`` does, and for what is not a sequence."""
    try:
        items = () if isinstance(values, (str, bytes)) else tuple(values)
    except Exception:  # a nested tensor has errors of its own
        raise LayoutError(f"{where}: {what} is {shown(values)}; need a sequence of whole numbers") from None
    return tuple(whole(where, v, what) for v in items)


def map_words(y: torch.Tensor, program: WordProgram) -> torch.Tensor:
    if not y.numel():
        return y
    w = y.contiguous().view(torch.int32)

    def swap(w: torch.Tensor, shift: int, mask: int) -> torch.Tensor:
        t = (w ^ (w >> shift)) & mask
        return w ^ t ^ (t << shift)

    for shift, mask in program.before:
        w = swap(w, shift, mask)
    out = torch.zeros_like(w)
    for shift, mask in program.pairs:
        out |= (w >> shift if shift >= 0 else w << -shift) & mask
    for shift, mask in program.after:
        out = swap(out, shift, mask)
    return out.view(torch.uint8)


def as_bytes(where: str, x: Any) -> torch.Tensor:
    """x as a u8 torch tensor."""
    if isinstance(x, np.ndarray):
        if x.dtype.itemsize != 1 or x.dtype == np.bool_:
            raise LayoutError(f"{where}: input has dtype {x.dtype}; need raw bytes, pass x.view(np.uint8)")
        return torch.from_numpy(np.ascontiguousarray(x).view(np.uint8))
    if not isinstance(x, torch.Tensor):
        raise LayoutError(f"{where}: input is {type(x).__name__}; need a torch tensor or a numpy array of bytes")
    return check.raw_bytes(where, "input", x, LayoutError)


def as_given(t: torch.Tensor, given: Bytes) -> Bytes:
    """t, as a numpy array where that is what the caller gave."""
    return t.numpy() if isinstance(given, np.ndarray) else t


def as_storage(where: str, y: Any, need: int) -> torch.Tensor:
    """Flat u8 bytes of storage of any dtype."""
    numpy = isinstance(y, np.ndarray)
    if not numpy and not isinstance(y, torch.Tensor):
        raise LayoutError(f"{where}: storage is {type(y).__name__}; need a torch tensor or a numpy array")
    if not numpy:
        check.dense(where, "storage", y, error=LayoutError)
    if not (y.flags.c_contiguous if numpy else y.is_contiguous()):
        raise LayoutError(f"{where}: storage has strides; bytes are read in memory order, pass the contiguous storage tensor")
    if numpy and y.dtype.hasobject:
        raise LayoutError(f"{where}: storage has dtype {y.dtype}; need raw bytes")
    t = torch.from_numpy(y.reshape(-1).view(np.uint8)) if numpy else y.reshape(-1).view(torch.uint8)
    if t.numel() != need:
        raise LayoutError(f"{where}: storage has {t.numel()} bytes; need {need} for this shape")
    return t


def checked_index(where: str, value: Any, size: int, what: str) -> Any:
    if isinstance(value, torch.Tensor):
        check.dense(where, what, value, error=LayoutError)
        if value.dtype == torch.bool or value.is_floating_point() or value.is_complex():
            raise LayoutError(f"{where}: {what} has dtype {value.dtype}; need whole numbers")
        value = value.to(torch.int64)
        low, high = (int(value.min()), int(value.max())) if value.numel() and not value.is_cuda else (0, -1)
    elif isinstance(value, np.ndarray):
        if value.dtype.kind not in "iu":
            raise LayoutError(f"{where}: {what} has dtype {value.dtype}; need whole numbers")
        value = value.astype(np.int64)
        low, high = (int(value.min()), int(value.max())) if value.size else (0, -1)
    else:
        low = high = value = whole(where, value, what)
    if low < 0 or high >= size:
        raise LayoutError(f"{where}: {what} = {low if low < 0 else high} is outside 0..{size - 1}")
    return value
