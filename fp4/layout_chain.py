"""Layouts in sequence (``a >> b``) and layouts by segments of rows (ragged activations). Both build on ``fp4.layout.Layout``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from fp4.errors import LayoutError
from fp4.layout import Layout, Orders
from fp4.layout_bytes import Bytes, as_bytes, as_given, as_storage, checked_index, whole, whole_list

__all__ = ["Chain", "Segmented"]


class Chain(Orders):
    """Layouts applied one after the other; made with ``>>``, which is associative. Each reads the previous one's padded shape."""

    def __init__(self, steps: Sequence[Layout]) -> None:
        if not steps:
            raise LayoutError("chain: no layouts; need at least one")
        self.steps = tuple(steps)
        self.name = " >> ".join(s.name for s in self.steps)

    def _steps(self) -> tuple[Layout, ...]:
        return self.steps

    def __eq__(self, other: object) -> bool:
        return self.steps == other._steps() if isinstance(other, (Layout, Chain)) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.steps)

    def __repr__(self) -> str:
        return f"Chain({self.name})"

    __str__ = __repr__

    def _shapes(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """The byte shape that each step reads, then the padded shape of the last."""
        shapes = [whole_list(f"chain {self.name}", shape, "shape")]
        for step in self.steps:
            shapes.append(step.padded(shapes[-1]))
        return shapes

    def padded(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Byte shape after the padding of every step."""
        return self._shapes(shape)[-1]

    def nbytes(self, shape: Sequence[int]) -> int:
        """Stored bytes, leading dimensions included."""
        return math.prod(self.padded(shape))

    def apply(self, x: Bytes) -> Bytes:
        """As ``Layout.apply``."""
        y, shape = x, tuple(x.shape)
        for step, read in zip(self.steps, self._shapes(shape), strict=False):
            y = step.apply(y.reshape(read))
        return y

    def invert(self, y: Bytes, shape: Sequence[int]) -> Bytes:
        """As ``Layout.invert``."""
        for step, read in zip(reversed(self.steps), reversed(self._shapes(shape)[:-1]), strict=True):
            y = step.invert(y, read)
        return y

    def offset(self, shape: Sequence[int], m: Any, k: Any, e: Any = 0) -> Any:
        """As ``Layout.offset``; all steps must have one unit."""
        if len({s.unit for s in self.steps}) > 1:
            raise LayoutError(f"chain {self.name}: offset needs one unit; its steps count bytes and nibbles")
        shapes = self._shapes(shape)
        off: Any = 0
        for i, step in enumerate(self.steps):
            off = step.offset(shapes[i][-2:], m, k)
            columns = step.geometry(shapes[i][-2:]).pcols
            m, k = off // max(columns, 1), off % max(columns, 1)
        return off + e * (math.prod(shapes[-1][-2:]) * self.steps[-1].units_per_byte)

    def formula(self, shape: Sequence[int], m: str = "m", k: str = "k") -> str:
        """The last step's offset with each step's row and column written as expressions of the step before."""
        shapes = self._shapes(shape)
        text = ""
        for i, step in enumerate(self.steps):
            text = step.formula(shapes[i], m, k)
            columns = step.geometry(shapes[i]).pcols
            m, k = f"(({text}) // {columns})", f"(({text}) % {columns})"
        return text


@dataclass(frozen=True)
class Segmented:
    """One layout applied to each segment of rows: the ragged activation scales of grouped GEMMs.

    ``starts`` [experts + 1]: first row of each expert, then the total. Expert e is stored at ``bases(columns)[e]``, the running sum of
    padded sizes: ``offset = base[e] + layout(row - start[e])``. ``capacity``: total stored rows; the rest is ``fill``.
    """

    layout: Layout
    starts: tuple[int, ...]
    capacity: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.layout, Layout):
            raise LayoutError(f"segmented: layout is {type(self.layout).__name__}; need a Layout")
        starts = whole_list(f"segmented {self.layout.name}", self.starts, "starts")
        if self.capacity is not None:
            whole(f"segmented {self.layout.name}", self.capacity, "capacity")
        object.__setattr__(self, "starts", starts)
        if len(starts) < 1 or starts[0] != 0 or any(a > b for a, b in pairwise(starts)):
            raise LayoutError(f"segmented {self.layout.name}: starts are {list(starts)[:8]}; need 0 first, then never falling row numbers")

    def _check(self, shape: Sequence[int]) -> tuple[int, int]:
        size = whole_list(f"segmented {self.layout.name}", shape, "shape")
        if len(size) != 2 or size[0] != self.starts[-1]:
            need = f"[{self.starts[-1]}, columns], the rows of starts"
            raise LayoutError(f"segmented {self.layout.name}: shape is {list(shape)}; need {need}")
        return size

    def bases(self, columns: int) -> tuple[int, ...]:
        """Byte offset of each expert's block, then the total of all of them."""
        at, out = 0, [0]
        for a, b in pairwise(self.starts):
            at += self.layout.nbytes((b - a, columns))
            out.append(at)
        return tuple(out)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Stored bytes of all segments and of the rest of ``capacity``. Raises LayoutError when they do not fit in it."""
        _, columns = self._check(shape)
        used = self.bases(columns)[-1]
        if self.capacity is None:
            return used
        total = self.layout.nbytes((self.capacity, columns))
        if total < used:
            raise LayoutError(f"segmented {self.layout.name}: capacity of {self.capacity} rows holds {total} bytes; need {used}")
        return total

    def apply(self, x: Bytes) -> Bytes:
        """x: u8 [rows, columns] -> u8 [nbytes]."""
        t = as_bytes(f"segmented {self.layout.name}", x)
        total = self.nbytes(t.shape)
        parts: list[torch.Tensor] = [self.layout.apply(t[a:b]) for a, b in pairwise(self.starts)]
        rest = total - sum(p.numel() for p in parts)
        return as_given(torch.cat([*parts, torch.full((rest,), self.layout.fill, dtype=torch.uint8, device=t.device)]), x)

    def invert(self, y: Bytes, shape: Sequence[int]) -> Bytes:
        """u8 [nbytes] -> u8 [rows, columns]."""
        _, columns = self._check(shape)
        flat = as_storage(f"segmented {self.layout.name}", y, self.nbytes(shape))
        bases = self.bases(columns)
        parts: list[torch.Tensor] = [
            self.layout.invert(flat[bases[i] : bases[i + 1]], (self.starts[i + 1] - self.starts[i], columns))
            for i in range(len(self.starts) - 1)
        ]
        return as_given(torch.cat([*parts, flat.new_empty((0, columns))]), y)

    def offset(self, shape: Sequence[int], m: int, k: int) -> int:
        """Unit offset of row m, column k; ints."""
        rows, columns = self._check(shape)
        m = int(checked_index(f"segmented {self.layout.name}", m, rows, "m"))
        e = max(i for i in range(len(self.starts) - 1) if self.starts[i] <= m)
        segment = (self.starts[e + 1] - self.starts[e], columns)
        return self.bases(columns)[e] * self.layout.units_per_byte + int(self.layout.offset(segment, m - self.starts[e], k))
