"""The layout algebra: one line says where every byte goes, and pack, unpack, offset, kernel, picture and shards follow.

A spec reads ``"(mo m4 m32) (ko k4) -> mo ko m32 m4 k4"``. Left of the arrow: one group for each logical dimension (rows m, columns
k), outer to inner. Right: storage order, outer to inner. A name that ends in a number is an axis of that size, a name without one is
free (at most one a dimension), ``~`` on the right stores an axis in descending order. Leading (expert) dimensions are untouched: each
expert is laid out alone, one after the other.

``shape`` is everywhere the shape of the byte tensor, ``[..., rows, columns]`` in bytes. Coordinates ``m``, ``k`` and offsets count
*units*: bytes, or nibbles (low nibble first, twice as many columns) when ``unit="nibble"``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from fp4 import check
from fp4.errors import LayoutError, shown
from fp4.layout_bytes import ByteRange, Bytes, Reason, as_bytes, as_given, as_storage, checked_index, map_words, whole, whole_list
from fp4.layout_spec import DIMS, Axis, Digit, WordProgram, canonical, digits, parse, word_program

__all__ = ["ByteRange", "Chain", "Layout", "Reason", "Segmented"]

#: bytes that the torch path moves in one go
_AT_ONCE = 1 << 26


class Geometry(NamedTuple):
    """A layout at one shape; rows and columns in units, padded and not, and the free extents (RO, CO)."""

    lead: tuple[int, ...]
    rows: int
    cols: int
    prows: int
    pcols: int
    free: tuple[int, int]


class Orders:
    """What Layout and Chain share."""

    name: str

    def __rshift__(self, other: Layout | Chain) -> Chain:
        """``a >> b``: store by ``a``, read the result as a matrix of ``a.padded(shape)``, store that by ``b``."""
        from fp4.layout_chain import Chain

        if not isinstance(other, Orders):
            return NotImplemented
        return Chain((*self._steps(), *other._steps()))

    def _steps(self) -> tuple[Layout, ...]:
        raise NotImplementedError

    def apply_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Reorder a per-row vector (a bias): any dtype [..., rows] -> the same dtype [..., rows], each item moved as one row.

        Only for row orders that do not pad, such as ``trtllm_rows_32`` or ``marlin_bias``.
        """
        if check.dense(f"layout {self.name}: apply_rows", "x", x, error=LayoutError).ndim < 1:
            raise LayoutError(f"layout {self.name}: apply_rows: x is a scalar; need [..., rows]")
        if not x.numel():
            return x.clone()
        size = x.element_size()
        as_rows = x.contiguous().unsqueeze(-1).view(torch.uint8)
        y = self.apply(as_rows)
        if y.numel() != x.numel() * size:
            raise LayoutError(f"layout {self.name}: it pads {list(x.shape)} rows; a per-row vector needs a row order without padding")
        out: torch.Tensor = y.view(x.dtype).reshape(x.shape)
        return out

    def apply(self, x: Bytes) -> Bytes:
        """One-byte x [..., rows, columns] -> u8 in storage order."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Layout(Orders):
    """A storage order.

    pad: for (rows, columns), in units: None = the shape must be a multiple of the tile, else it is rounded up to a multiple of the
    tile and of this number with ``fill`` bytes. word: 32 bit positions; bit j of each little-endian 32-bit storage word comes from bit
    ``word[j]`` (applied last). origin, holds: whose layout it is, and the library versions for which that was checked.

    Two layouts are equal when they give the same bytes for every shape: the names of layouts and axes do not count. Raises LayoutError
    for a malformed spec, a word table that is not a permutation, or a shape that does not fit.
    """

    name: str
    spec: str
    unit: str = "byte"
    word: tuple[int, ...] | None = None
    pad: tuple[int | None, int | None] | None = None
    fill: int = 0
    origin: str = ""
    holds: str = ""
    #: what it stores: "value", "scale" or "rows"
    role: str = ""
    axes: tuple[Axis, ...] = field(init=False, repr=False)
    order: tuple[int, ...] = field(init=False, repr=False)
    #: storage digits, outer to inner, of the canonical form; free extents for them: ``extents(shape)``
    digits: tuple[Digit, ...] = field(init=False, repr=False)
    #: fixed part of each dimension, in units, and the multiple to which shapes are padded
    tile: tuple[int, int] = field(init=False, repr=False)
    multiple: tuple[int, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise LayoutError(f"layout: name is {shown(self.name)}; need text")
        raw, raw_order = parse(self._where, self.spec)
        axes, order = canonical(raw, raw_order)
        tile = tuple(math.prod(a.size or 1 for a in raw if a.dim == d) for d in (0, 1))
        self._check_numbers()
        pad = self.pad or (None, None)
        if not isinstance(self.unit, str) or self.unit not in ("byte", "nibble"):
            raise LayoutError(f"{self._where}: unit is {shown(self.unit)}; need 'byte' or 'nibble'")
        for d in (0, 1):
            group = [a.size for a in raw if a.dim == d]
            if pad[d] is not None and (pad[d] or 0) < 1:
                raise LayoutError(f"{self._where}: pad is {pad}; need positive numbers or None")
            if pad[d] is not None and 0 in group and group[0] != 0:
                raise LayoutError(f"{self._where}: cannot pad {DIMS[d]}, their free axis is not outermost; pad each part yourself")
        multiple = tuple(math.lcm(t, p or 1) for t, p in zip(tile, pad, strict=True))
        if self.unit == "nibble" and tile[1] % 2:
            raise LayoutError(f"{self._where}: nibble columns come in pairs; need an even column tile, got {tile[1]}")
        for key, value in {"axes": axes, "order": order, "digits": digits(axes, order), "tile": tile, "multiple": multiple}.items():
            object.__setattr__(self, key, value)

    def _check_numbers(self) -> None:
        where = self._where
        if self.word is not None:
            object.__setattr__(self, "word", whole_list(where, self.word, "word table"))
            if sorted(self.word) != list(range(32)):
                raise LayoutError(f"{where}: word table is not a permutation of the bits 0..31")
        if not 0 <= whole(where, self.fill, "fill") <= 255:
            raise LayoutError(f"{where}: fill is {self.fill}; need a byte, 0..255")
        if self.pad is not None:
            if not isinstance(self.pad, (tuple, list)) or len(self.pad) != 2:
                raise LayoutError(f"{where}: pad is {shown(self.pad)}; need a number or None for rows and one for columns")
            object.__setattr__(self, "pad", tuple(p if p is None else whole(where, p, "pad") for p in self.pad))

    @property
    def _where(self) -> str:
        if self.name is self.spec:  # one text, by layouts.parse
            return f"layout {shown(self.spec)}"
        return f"layout {self.name if len(self.name) < 80 else shown(self.name)} {shown(self.spec)}"

    @property
    def units_per_byte(self) -> int:
        """2 for nibbles, 1 for bytes."""
        return 2 if self.unit == "nibble" else 1

    def _steps(self) -> tuple[Layout, ...]:
        return (self,)

    def _key(self) -> tuple[Any, ...]:
        word = None if self.word == tuple(range(32)) else self.word
        return (self.axes, self.order, self.unit, word, self.multiple, self.fill)

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Layout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def same_digits(self, other: Layout) -> bool:
        """Equal up to padding and fill: the same bytes for every shape that needs no padding."""
        return self._key()[:4] == other._key()[:4]

    # ---- sizes -------------------------------------------------------------------------------------------------------------

    def geometry(self, shape: Sequence[int]) -> Geometry:
        """Check a byte shape [..., rows, columns] and derive its padded form. Raises LayoutError when it does not fit."""
        size = whole_list(self._where, shape, "shape")
        if len(size) < 2 or min(size) < 0:
            raise LayoutError(f"{self._where}: shape is {list(size)}; need [..., rows, columns]")
        logical = (size[-2], size[-1] * self.units_per_byte)
        padded, free = [], []
        for d, n in enumerate(logical):
            multiple, has_free = self.multiple[d], any(a.dim == d and not a.size for a in self.axes)
            may_pad = self.pad is not None and self.pad[d] is not None
            up = -(-n // multiple) * multiple if may_pad else n
            if up % multiple or (not has_free and up != self.tile[d]):
                units = f"{self.unit}s" if d else "rows"
                need = "a multiple of" if has_free else "exactly"
                raise LayoutError(
                    f"{self._where}: {n} {units} in shape {list(size)} do not fit; need {need} {multiple}; "
                    f"pad to {-(-max(n, 1) // multiple) * multiple} {units}"
                )
            padded.append(up)
            free.append(up // math.prod([a.size or 1 for a in self.axes if a.dim == d]) if has_free else 1)  # a list: Dynamo traces it
        if math.prod(size[:-2]) * padded[0] * padded[1] >= 2**63:
            raise LayoutError(f"{self._where}: shape {list(size)} has 2^63 {self.unit}s or more, beyond 64-bit offsets")
        return Geometry(size[:-2], *logical, padded[0], padded[1], (free[0], free[1]))

    def extents(self, shape: Sequence[int]) -> tuple[int, int]:
        """The free extents (RO, CO) that go with ``digits``: run-time arguments of the Triton ``layout_offset``."""
        return self.geometry(shape).free

    def padded(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Byte shape after padding, leading dimensions included."""
        g = self.geometry(shape)
        return (*g.lead, g.prows, g.pcols // self.units_per_byte)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Stored bytes, leading dimensions included."""
        return math.prod(self.padded(shape))

    # ---- bytes -------------------------------------------------------------------------------------------------------------

    def apply(self, x: Bytes) -> Bytes:
        """x: one-byte dtype [..., rows, columns], torch or numpy, any strides -> u8 [..., nbytes of one expert] in storage order.

        CUDA tensors go through the Triton kernel (``fp4.gpu.kernels.permute``), which writes the same bytes.
        """
        t = as_bytes(self._where, x)
        g = self.geometry(t.shape)
        if t.is_cuda:
            from fp4.gpu.kernels import permute

            if permute.can(self):
                return as_given(permute.apply(self, t), x)
        return as_given(self._apply(t, g), x)

    def _apply(self, t: torch.Tensor, g: Geometry) -> torch.Tensor:
        self.check_words(g)
        if g.lead and t.numel() > _AT_ONCE:  # expert by expert: temporaries are several times the input
            flat = t.reshape(-1, *t.shape[-2:])
            y = torch.empty(len(flat), g.prows * g.pcols // self.units_per_byte, dtype=torch.uint8, device=t.device)
            for i, one in enumerate(flat):
                y[i] = self._apply(one, g._replace(lead=()))
            return y.reshape(*g.lead, -1)
        per_byte = self.units_per_byte
        right, down = (g.pcols - g.cols) // per_byte, g.prows - g.rows
        if right or down:
            t = torch.nn.functional.pad(t, (0, right, 0, down), value=self.fill)
        if per_byte == 2:
            t = torch.stack((t & 15, t >> 4), -1)
        lead = len(g.lead)
        t = t.reshape(*g.lead, *(a.size or g.free[a.dim] for a in self.axes))
        t = t.permute(*range(lead), *(lead + i for i in self.order))
        flips = [lead + at for at, i in enumerate(self.order) if self.axes[i].flip]
        t = (t.flip(flips) if flips else t).reshape(*g.lead, g.prows * g.pcols)
        if per_byte == 2:
            t = t[..., 0::2] | t[..., 1::2] << 4
        return t.contiguous() if self.word is None else map_words(t, self.word_program())

    def invert(self, y: Bytes, shape: Sequence[int]) -> Bytes:
        """Storage y of any shape and dtype, contiguous -> u8 ``shape`` [..., rows, columns]; padding is dropped, never read."""
        g = self.geometry(shape)
        flat = as_storage(self._where, y, math.prod(g.lead) * g.prows * g.pcols // self.units_per_byte)
        if flat.is_cuda:
            from fp4.gpu.kernels import permute

            if permute.can(self):
                return as_given(permute.invert(self, flat, whole_list(self._where, shape, "shape")), y)
        return as_given(self._invert(flat, g), y)

    def _invert(self, flat: torch.Tensor, g: Geometry) -> torch.Tensor:
        self.check_words(g)
        if g.lead and flat.numel() > _AT_ONCE:
            experts = flat.reshape(math.prod(g.lead), -1)
            return torch.stack([self._invert(one, g._replace(lead=())) for one in experts]).reshape(
                *g.lead, g.rows, g.cols // self.units_per_byte
            )
        if self.word is not None:
            flat = map_words(flat, self.word_program(inverse=True))
        if self.units_per_byte == 2:
            flat = torch.stack((flat & 15, flat >> 4), -1)
        lead = len(g.lead)
        t = flat.reshape(*g.lead, *(self.axes[i].size or g.free[self.axes[i].dim] for i in self.order))
        flips = [lead + at for at, i in enumerate(self.order) if self.axes[i].flip]
        t = t.flip(flips) if flips else t
        t = t.permute(*range(lead), *(lead + self.order.index(i) for i in range(len(self.axes)))).reshape(*g.lead, g.prows, g.pcols)
        if self.units_per_byte == 2:
            t = t[..., 0::2] | t[..., 1::2] << 4
        return t[..., : g.rows, : g.cols // self.units_per_byte].contiguous()

    def check_words(self, g: Geometry) -> None:
        """Raise LayoutError when the stored bytes are not whole 32-bit words although the layout has a word table."""
        if self.word is not None and g.prows * g.pcols // self.units_per_byte % 4:
            raise LayoutError(f"{self._where}: {g.prows * g.pcols} {self.unit}s are not whole 32-bit words, which the word table needs")

    def word_program(self, inverse: bool = False) -> WordProgram:
        """The word table as shifts and masks; empty without a table."""
        return WordProgram((), (), ()) if self.word is None else word_program(self.word, inverse)

    # ---- addresses ---------------------------------------------------------------------------------------------------------

    def offset(self, shape: Sequence[int], m: Any, k: Any, e: Any = 0) -> Any:
        """Where unit (m, k) of expert e is stored, in units from the start; ints, numpy or torch (int64), broadcast.

        With a word table this is the unit's place before the table permutes the bits of its 32-bit word (see ``bit_offset``).
        """
        g = self.geometry(shape)
        m, k, e = (
            checked_index(self._where, v, n, what) for v, n, what in ((m, g.prows, "m"), (k, g.pcols, "k"), (e, math.prod(g.lead), "e"))
        )
        off = e * (g.prows * g.pcols)
        for d in self.digits:
            at = (k if d.dim else m) // (d.div * (g.free[d.dim] if d.div_free else 1))
            size = d.size or g.free[d.dim]
            at = at % size if d.wrap else at
            at = size - 1 - at if d.flip else at
            off = off + at * (d.mul * (g.free[0] if d.mul_r else 1) * (g.free[1] if d.mul_c else 1))
        return off

    def bit_offset(self, shape: Sequence[int], m: Any, k: Any, bit: Any, e: Any = 0) -> Any:
        """Where bit ``bit`` of unit (m, k) is stored, in bits from the start, word table included."""
        at = self.offset(shape, m, k, e) * (8 // self.units_per_byte) + bit
        if self.word is None:
            return at
        place = [self.word.index(j) for j in range(32)]
        inside = at % 32
        if isinstance(at, torch.Tensor):
            return at - inside + torch.tensor(place, device=at.device)[inside]
        return at - inside + (np.asarray(place)[inside] if isinstance(at, np.ndarray) else place[inside])

    def shard(self, dim: int, n: int, shape: Sequence[int]) -> tuple[ByteRange, ...] | Reason:
        """Bytes of each of ``n`` equal parts of logical dimension ``dim`` (-2 or 0 rows, -1 or 1 columns) of one expert.

        Part i holds exactly the bytes that ``apply`` gives for the i-th slice. Returns a Reason (false) when no such bytes exist.
        """
        dim, n = whole(self._where, dim, "dim"), whole(self._where, n, "n")
        if dim not in (-2, -1, 0, 1) or n < 1:
            raise LayoutError(f"{self._where}: shard(dim={dim}, n={n}); need dim 0 (rows) or 1 (columns) and n >= 1")
        d, g = dim % 2, self.geometry(shape)
        size = (g.rows, g.cols)[d]
        total = g.prows * g.pcols // self.units_per_byte
        if n == 1:
            return (ByteRange(0, total),)
        group = [a for a in self.axes if a.dim == d]
        if not group or group[0].size:
            why = "its free axis is not outermost in its dimension" if any(not a.size for a in group) else "it has no free axis"
            return Reason(f"{self._where}: {DIMS[d]} cannot be split in storage: {why}")
        if size % (n * self.multiple[d]):
            what = f"{size} {DIMS[d]} ({self.unit}s)" if d else f"{size} rows"
            of = f", each a multiple of {self.multiple[d]}" if self.multiple[d] > 1 else ""
            return Reason(f"{self._where}: {what} do not split into {n} equal parts{of}")
        at = next(i for i, j in enumerate(self.order) if self.axes[j] is group[0])
        extent = [self.axes[j].size or g.free[self.axes[j].dim] for j in self.order]
        count, run = math.prod(extent[:at]), math.prod(extent[at:])
        if run // n % ((32 if self.word else 8) * self.units_per_byte // 8):
            return Reason(f"{self._where}: a part of {run // n} {self.unit}s is not a whole number of {'words' if self.word else 'bytes'}")
        run //= self.units_per_byte
        part = run // n
        place = [n - 1 - i if group[0].flip else i for i in range(n)]
        return tuple(ByteRange(i * part, part, count, run) for i in place)

    # ---- text --------------------------------------------------------------------------------------------------------------

    def formula(self, shape: Sequence[int] | None = None, m: str = "m", k: str = "k") -> str:
        """The offset as a Python expression in m and k; free extents are the names RO and CO when no shape is given."""
        from fp4 import layout_doc

        return layout_doc.formula(self, shape, m, k)

    def cute(self, shape: Sequence[int]) -> str:
        """The layout as CuTe writes it, ``(shapes):(strides)``, innermost mode first."""
        from fp4 import layout_doc

        return layout_doc.cute(self, shape)

    def picture(self, shape: Sequence[int] | None = None) -> str:
        """Text grid of storage offsets, one line a row, of ``shape`` or of one tile."""
        from fp4 import layout_doc

        return layout_doc.picture(self, shape)

    def svg(self, shape: Sequence[int] | None = None, limit: tuple[int, int] = (32, 16)) -> str:
        """The picture as SVG, at most ``limit`` rows and columns: cell (m, k) is labelled with its storage offset and coloured by it."""
        from fp4 import layout_doc

        return layout_doc.svg(self, shape, limit)

    def __str__(self) -> str:
        return self.name


def __getattr__(name: str) -> Any:
    """Chain and Segmented live in ``fp4.layout_chain``, which builds on this module."""
    if name in ("Chain", "Segmented"):
        from fp4 import layout_chain

        return getattr(layout_chain, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if TYPE_CHECKING:
    from fp4.layout_chain import Chain, Segmented
