"""Quantised weights on their way from one checkpoint dialect to another: which stored rows, which scalars, which format.

A ``Weight`` is one tensor of the output. Its rows come from one record, from a part of one (an expert's gate of a stacked
tensor) or from many (experts to be stacked), so a conversion never holds more than one expert beside the mapped files.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from fp4.checkpoint.base import Checkpoint
from fp4.checkpoint.output import Blob, stored
from fp4.checkpoint.record import Record, multiplier
from fp4.ref import codes as ref

__all__ = ["Loader", "Scalar", "View", "Weight", "read_scalars", "scalar_blob"]

#: exponents that an e4m3 scale holds as powers of two: 2^-9 (subnormal) to 2^8
E4M3_LOW, E4M3_HIGH = -9, 8


@dataclass(frozen=True)
class Scalar:
    """A second-level scale: the multiplier that fp4 reads, and the divisor when that is what the file stores."""

    multiplier: float
    divisor: float | None = None

    def stored(self, divide: bool) -> tuple[float, float]:
        """(f32 number to write, relative change of the scale that it means). A divisor of a zero scale is 1: its codes are zero."""
        if self.multiplier == 0:
            return (1.0 if divide else 0.0), 0.0
        if divide:
            if self.divisor is not None:
                return self.divisor, 0.0
            with np.errstate(over="ignore"):
                number = float(np.float32(1) / np.float32(self.multiplier))
        else:
            if self.divisor is None:
                return self.multiplier, 0.0
            number = self.multiplier
        # the product of two 24-bit numbers is exact in float64, and so is its distance from 1
        return number, abs(number * (self.multiplier if divide else self.divisor or 0.0) - 1.0)


def read_scalars(ck: Checkpoint, record: Record, role: str) -> list[Scalar] | None:
    """The scalars of one role: one, one an expert, or two an expert. Raises CheckpointError for a bad value."""
    if role not in record.parts:
        return None
    rule = record.global_rule if role == "global" else record.input_rule
    if role == "global" and rule.over_448 is not None:
        value = ck._reader(record).scales()[1]
    else:
        value = multiplier(ck.store, record, role)
    assert value is not None
    numbers = [float(v) for v in value.reshape(-1)]
    if not rule.divide or rule.factor != 1.0:
        return [Scalar(v) for v in numbers]
    divisors = ck.store.tensor(record.parts[role]).to(torch.float32).reshape(-1).tolist()
    return [Scalar(m, float(d)) for m, d in zip(numbers, divisors, strict=True)]


class View(NamedTuple):
    """Rows of one record: of expert ``expert`` (0 for a matrix), ``rows`` of its n; ``half`` picks its second-level scale."""

    record: Record
    expert: int = 0
    rows: slice = slice(None)
    half: int = 0


@dataclass
class Weight:
    """One quantised tensor of the output.

    ``views[e]`` makes up expert e (or the matrix): one view, or two whose rows alternate (gate, up). ``shape`` is [n, k],
    or [experts, n, k] when ``stacked``. ``cast`` is the exponent of the second-level scale of a cast to NVFP4.
    """

    module: str
    kind: str  # "block", "fp8"
    format: str
    shape: tuple[int, ...]
    views: list[tuple[View, ...]]
    stacked: bool = False
    second: Scalar | None = None
    input: Scalar | None = None
    act: str | None = None
    cast: int | None = None
    lost: int = 0
    #: why it cannot be written, "" when it can
    refused: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def record(self) -> Record:
        return self.views[0][0].record

    @property
    def records(self) -> list[Record]:
        return list({v.record.name: v.record for views in self.views for v in views}.values())


class _Loaded(NamedTuple):
    codes: torch.Tensor  # u8 [experts, n, k / codes per byte]
    scale: torch.Tensor  # u8 [experts, n, k / block]
    zero: torch.Tensor | None  # bool [experts, 1 or 2]


class Loader:
    """Reads the bytes of weights; keeps the scales of the last two records, which experts of a stacked pair share."""

    def __init__(self, ck: Checkpoint) -> None:
        self.ck = ck
        self._kept: OrderedDict[str, _Loaded] = OrderedDict()

    def _load(self, record: Record) -> _Loaded:
        kept = self._kept.get(record.name)
        if kept is not None:
            self._kept.move_to_end(record.name)
            return kept
        reader = self.ck._reader(record)
        scale, _, zero = reader.scales()
        codes = reader.codes()
        experts, n = math.prod(record.logical[:-2]), record.logical[-2]
        zeros = None if zero is None else zero.reshape(1, 1).expand(experts, 1) if zero.numel() == 1 else zero.reshape(experts, -1)
        loaded = _Loaded(codes.reshape(experts, n, codes.shape[-1]), scale.reshape(experts, n, scale.shape[-1]), zeros)
        self._kept[record.name] = loaded
        while len(self._kept) > 2:
            self._kept.popitem(last=False)
        return loaded

    def _codes(self, view: View) -> torch.Tensor:
        loaded = self._load(view.record)
        codes = loaded.codes[view.expert, view.rows]
        if loaded.zero is not None:
            zero = loaded.zero[view.expert]
            if bool(zero.all()) or (view.rows != slice(None) and bool(zero[min(view.half, zero.numel() - 1)])):
                return torch.zeros_like(codes)
        return codes

    def codes(self, weight: Weight, e: int) -> torch.Tensor:
        """u8 [n, k / codes per byte] of expert e, before a cast."""
        return _alternate([self._codes(v) for v in weight.views[e]])

    def scale(self, weight: Weight, e: int) -> torch.Tensor:
        """u8 [n, k / block] of expert e, before a cast."""
        return _alternate([self._load(v.record).scale[v.expert, v.rows] for v in weight.views[e]])

    def code_blob(self, weight: Weight, name: str, shape: tuple[int, ...], transpose: bool = False) -> Blob:
        """Codes under ``name``; ``transpose`` writes each expert as [k / 2, n]."""

        def part(e: int) -> torch.Tensor:
            codes = self.codes(weight, e)
            return cast_codes(codes, self.scale(weight, e), weight.cast)[0] if weight.cast is not None and weight.lost else codes

        return self._blob(weight, part, name, "U8" if weight.format != "mxfp8" else "F8_E4M3", shape, transpose)

    def scale_blob(self, weight: Weight, name: str, dtype: str, shape: tuple[int, ...], transpose: bool = False) -> Blob:
        """Block scales under ``name``; ``transpose`` writes each expert as [k / block, n]."""

        def part(e: int) -> torch.Tensor:
            scale = self.scale(weight, e)
            return scale if weight.cast is None else cast_scale(scale, weight.cast)

        return self._blob(weight, part, name, dtype, shape, transpose)

    def _blob(
        self, weight: Weight, part: Callable[[int], torch.Tensor], name: str, dtype: str, shape: tuple[int, ...], transpose: bool
    ) -> Blob:
        def chunks() -> Iterator[torch.Tensor]:
            for e in range(len(weight.views)):
                data = part(e)
                yield data.T.contiguous() if transpose else data
                self.ck.store.release()

        return Blob(name, dtype, shape, chunks)


def _alternate(parts: list[torch.Tensor]) -> torch.Tensor:
    """The rows of one part, or of several in turn: the order that GPT-OSS's experts have."""
    return parts[0].contiguous() if len(parts) == 1 else torch.stack(parts, 1).reshape(-1, parts[0].shape[-1])


def cast_scale(scale: torch.Tensor, second: int) -> torch.Tensor:
    """u8 [n, k / 16]: e4m3 bytes of MXFP4's scales [n, k / 32] under the second-level scale 2^second.

    A block's 2^e becomes the scale 2^(e - second) twice, clamped to what e4m3 holds, 2^-9 to 2^8.
    """
    held = (scale.to(torch.int32) - 127 - second).clamp(E4M3_LOW, E4M3_HIGH)
    return torch.where(held >= -6, (held + 7) << 3, 1 << (held + 9).clamp(0, 2)).to(torch.uint8).repeat_interleave(2, -1)


def cast_codes(codes: torch.Tensor, scale: torch.Tensor, second: int) -> tuple[torch.Tensor, int]:
    """(codes, elements whose value changed): those of blocks whose scale ``cast_scale`` raised, rounded to its grid, ties to even.

    All other codes stay, and so does the value of a raised or lowered block whose codes are all zero.
    """
    exponent = scale.to(torch.int32) - 127 - second
    low = exponent < E4M3_LOW
    if not bool(low.any()):
        return codes, 0
    blocks = codes.reshape(*scale.shape, 16).clone()
    down = (exponent[low] - E4M3_LOW).clamp(min=-100).unsqueeze(-1)  # 2^-100 of a code is still a normal float32
    shrunk = torch.ldexp(ref.decode_e2m1(ref.unpack_nibbles(blocks[low])), down)
    rounded = ref.encode_e2m1(shrunk)
    blocks[low] = ref.pack_nibbles(rounded)
    return blocks.reshape(codes.shape), int((ref.decode_e2m1(rounded) != shrunk).sum())


def cast_exponent(loader: Loader, weights: list[Weight]) -> int:
    """Exponent of the second-level scale that weights of one fused layer share: the largest block exponent becomes 2^8.

    Blocks of zero codes do not count when the scales of all blocks span more than e4m3 holds.
    """
    low, high = 255, 0
    parts = [(w, e) for w in weights for e in range(len(w.views))]
    for w, e in parts:
        scale = loader.scale(w, e)
        if scale.numel():
            low, high = min(low, int(scale.min())), max(high, int(scale.max()))
    if high - low > E4M3_HIGH - E4M3_LOW:
        high = 0
        for w, e in parts:
            codes, scale = loader.codes(w, e), loader.scale(w, e)
            used = (codes.reshape(*scale.shape, 16) & 0x77).ne(0).any(-1)
            high = max(high, int(torch.where(used, scale, torch.zeros_like(scale)).max()))
            loader.ck.store.release()
    return high - 127 - E4M3_HIGH


def scalar_blob(name: str, value: float, shape: tuple[int, ...] = ()) -> Blob:
    """F32 scalar of shape [] or [1]."""
    return Blob(name, "F32", shape, lambda: [torch.tensor([value], dtype=torch.float32, device="cpu").view(torch.uint8)])


def fp8_scheme(ck: Checkpoint, weight: Weight) -> tuple[str, tuple[int, int] | None]:
    """("tensor" | "channel" | "block", the block) of an FP8 weight. One scale in a [1, 1] matrix is one block of 128 x 128."""
    record = weight.record
    n, k = record.logical[-2:]
    scale = ck.store.entries[record.parts["scale"]]
    if scale.shape == (1, 1) and n <= 128 and k <= 128 and "input" not in record.parts:
        return "block", (128, 128)
    if record.block == (n, k):
        return "tensor", None
    return ("channel", None) if record.block == (1, k) else ("block", record.block)


def fp8_blobs(ck: Checkpoint, weight: Weight, scale_shape: tuple[int, ...] | None, input_shape: tuple[int, ...]) -> list[Blob]:
    """weight, weight_scale and input_scale of an FP8 neighbour; scales that are not floats become F32, by value."""
    parts, store, module = weight.record.parts, ck.store, weight.module
    entry = store.entries[parts["scale"]]
    shape = scale_shape if scale_shape is not None else entry.shape
    out = [stored(store, parts["weight"], f"{module}.weight")]
    if entry.dtype in ("U8", "F8_E8M0"):
        value = store.bytes(parts["scale"]).view(torch.float8_e8m0fnu)
        out.append(Blob(f"{module}.weight_scale", "F32", shape, lambda: [value.to(torch.float32).reshape(-1).view(torch.uint8)]))
    else:
        out.append(stored(store, parts["scale"], f"{module}.weight_scale", shape))
    if "input" in parts:
        out.append(stored(store, parts["input"], f"{module}.input_scale", input_shape))
    return out
