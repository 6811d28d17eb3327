"""One comparison for bytes, with a message that says where and what, not only that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fp4.formats import ElemFormat
from fp4.layout import Layout

__all__ = ["assert_same_bytes"]


def __dir__() -> list[str]:
    return __all__


#: logical positions searched for the unit behind a storage byte; larger tensors only get the flat index
_SEARCH = 1 << 24


def _raw(x: Any) -> tuple[npt.NDArray[np.uint8], tuple[int, ...], int]:
    """Bytes of x, its shape, and the bytes of one item."""
    if isinstance(x, torch.Tensor):
        t = x.detach().cpu().contiguous()
        return t.reshape(-1).view(torch.uint8).numpy(), tuple(x.shape), x.element_size()
    a = np.ascontiguousarray(x)
    return a.reshape(-1).view(np.uint8), a.shape, a.dtype.itemsize


def _decoded(byte: int, elem: ElemFormat | None) -> str:
    if elem is None:
        return ""
    if elem.bits == 4:
        return f" = ({elem.values[byte & 15]:g}, {elem.values[byte >> 4]:g})"
    return f" = {elem.values[byte]:g}"


def _logical(layout: Layout, shape: Sequence[int], at: int) -> str:
    """Which logical unit is stored at byte ``at``."""
    g = layout.geometry(shape)
    each = g.prows * g.pcols // layout.units_per_byte
    expert, inside = divmod(at, max(each, 1))
    if g.prows * g.pcols > _SEARCH:
        return ""
    grid = np.asarray(layout.offset((g.prows, g.pcols // layout.units_per_byte), np.arange(g.prows)[:, None], np.arange(g.pcols)[None]))
    m, k = (int(v) for v in np.argwhere(grid // layout.units_per_byte == inside)[0])
    padding = " (padding)" if m >= g.rows or k >= g.cols else ""
    word = ", before its word table" if layout.word else ""
    return f", logical (expert {expert}, row {m}, {layout.unit} column {k}){padding}{word}"


def assert_same_bytes(
    got: Any,
    want: Any,
    *,
    layout: Layout | None = None,
    shape: Sequence[int] | None = None,
    elem: ElemFormat | None = None,
    name: str = "bytes",
) -> None:
    """Raise AssertionError unless ``got`` and ``want`` (torch or numpy, any dtype) hold the same shape and the same bytes.

    The message gives the count, the first coordinate, both bytes, both decoded values (with ``elem``, such as ``formats.E2M1``) and,
    when the arguments are storage of ``layout`` at the logical byte ``shape``, which logical unit is wrong.
    """
    a, a_shape, a_item = _raw(got)
    b, b_shape, b_item = _raw(want)
    if a_shape != b_shape or a_item != b_item:
        if layout is None or a.size != b.size:
            raise AssertionError(f"{name}: got shape {list(a_shape)} of {a_item}-byte items, want {list(b_shape)} of {b_item}")
        a_shape, a_item = (a.size,), 1  # storage: the container does not count
    wrong = np.flatnonzero(a != b)
    if not wrong.size:
        return
    at = int(wrong[0])
    where = tuple(int(i) for i in np.unravel_index(at // a_item, a_shape)) if a_shape else ()
    byte = f", byte {at % a_item} of the item" if a_item > 1 else ""
    logical = _logical(layout, shape, at) if layout is not None and shape is not None else ""
    raise AssertionError(
        f"{name}: {wrong.size} of {a.size} bytes differ ({wrong.size / a.size:.2%}); first at {where}{byte}{logical}: "
        f"got 0x{int(a[at]):02x}{_decoded(int(a[at]), elem)}, want 0x{int(b[at]):02x}{_decoded(int(b[at]), elem)}"
    )
