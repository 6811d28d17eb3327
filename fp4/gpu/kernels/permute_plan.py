"""How the permute kernel tiles a layout: everything that the compiler sees, derived from the layout and the alignment alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from fp4.layout import Layout
from fp4.layout_spec import Axis, digits

__all__ = ["RANK", "Plan", "plan", "whole_rows"]

#: axes of the tile tensors; shorter layouts are filled up with axes of one item
RANK = 10


@dataclass(frozen=True)
class Plan:
    """Compile-time half of a launch; everything here is an int or a tuple of ints. Sizes count items of ``item`` bytes (or nibbles)."""

    item: int
    nibble: int
    #: (tile extent, inner tile product, place, place has the free extent, is free) for each row axis, outer to inner
    rows: tuple[tuple[int, ...], ...]
    #: the free row axis is outermost: tile rows are neighbours
    plain_rows: int
    tile_rows: int
    tile_cols: int
    chunk_rows: int
    chunk_cols: int
    logical: tuple[int, ...]
    perm: tuple[int, ...]
    #: (dim, tile extent, inner tile product, mul, mul_r, mul_c, is free, flip, size) for each storage axis, outer to inner
    store: tuple[tuple[int, ...], ...]
    #: items of a tile that are contiguous in storage
    run: int
    #: items that make one stored element: 2 nibbles, 4 bytes or 8 nibbles of a word, else 1
    group: int
    place_cols: int
    #: storage ends in whole, unsplit rows: their length in items is the column extent
    whole_rows: int


def _power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def _split(layout: Layout, align: int) -> tuple[int, list[Axis]]:
    """Bytes that always move together (1, 2, 4 or 8, at most ``align``), and the axes counted in such items."""
    axes = list(layout.axes)
    last = layout.order[-1] if axes else 0
    together = bool(axes) and last == len(axes) - 1 and axes[last].dim == 1 and not axes[last].flip and layout.unit == "byte"
    if not together:
        return 1, axes
    size = axes[last].size
    item = min(8 if layout.word is None else 4, align, size & -size if size else 8)
    if layout.word is not None and item < 4:
        item = 1
    if size:
        axes[last] = axes[last]._replace(size=size // item)
    return item, axes


def whole_rows(layout: Layout) -> bool:
    """Storage ends in whole, unsplit rows, which may be of any length."""
    last = layout.order[-1] if layout.order else -1
    return last == len(layout.axes) - 1 and layout.axes[last] == Axis(1, 0) and [a.dim for a in layout.axes].count(1) == 1


@lru_cache(maxsize=4096)
def plan(layout: Layout, align: int, tile_bytes: int) -> Plan | None:
    """How to tile a layout whose rows are multiples of ``align`` bytes; None when its axes are not powers of two."""
    item, axes = _split(layout, align)
    nibble = int(layout.unit == "nibble")
    cols = [a for a in axes if a.dim == 1]
    if len(axes) > RANK or not all(_power_of_two(a.size or 1) for a in axes) or any(not a.size for a in cols[1:]):
        return None
    free = [next((i for i, a in enumerate(axes) if a.dim == d and not a.size), None) for d in (0, 1)]
    order = layout.order
    chunk = [1, 1]

    def tile(i: int) -> int:
        return axes[i].size or chunk[axes[i].dim]

    def width() -> int:  # bytes of one tile row
        return math.prod(tile(i) for i in range(len(axes)) if axes[i].dim == 1) * item >> nibble

    def run() -> int:  # items that are contiguous in storage: trailing axes up to and including the first free one
        n = 1
        for i in reversed(order):
            if axes[i].flip:
                break
            n *= tile(i)
            if not axes[i].size:
                break
        return n

    def short() -> bool:
        return run() * item >> nibble < 128 or width() < 128

    while math.prod(tile(i) for i in range(len(axes))) * item >> nibble < (2 * tile_bytes if short() else tile_bytes):
        inner_free = next((axes[i].dim for i in reversed(order) if not axes[i].size), None)
        if inner_free is None:
            break
        if free[1] is not None and width() < 128:
            chunk[1] *= 2
        elif run() * item >> nibble < 128:
            chunk[inner_free] *= 2
        else:
            other = free[0] is not None and (free[1] is None or width() >= 512 or (inner_free == 0 and width() >= 256))
            chunk[0 if other else 1] *= 2
    group = 1 if item > 1 else (4 if layout.word is not None else 1) << nibble
    tail = 1  # items below the innermost free axis: its extent is any number, so a stored element must not reach across it
    for i in reversed(order):
        if axes[i].flip or not axes[i].size:
            break
        tail *= axes[i].size
    if tail % group:
        return None
    d = digits(axes, order)
    place = {i: d[at] for at, i in enumerate(order)}
    rows = [i for i in range(len(axes)) if axes[i].dim == 0]
    tiles = [tile(i) for i in range(len(axes))]
    return Plan(
        item=item,
        nibble=nibble,
        rows=tuple(
            (tile(i), math.prod(tile(j) for j in rows if j > i), place[i].div, place[i].div_free, int(not axes[i].size)) for i in rows
        ),
        plain_rows=int(not rows or all(axes[i].size for i in rows[1:])),
        tile_rows=math.prod(tile(i) for i in rows),
        tile_cols=math.prod(tile(i) for i in range(len(axes)) if axes[i].dim == 1),
        chunk_rows=chunk[0],
        chunk_cols=chunk[1],
        logical=tuple(tiles),
        perm=tuple(order),
        store=tuple(
            (
                axes[i].dim,
                tile(i),
                math.prod(tile(j) for j in order[at + 1 :]),
                d[at].mul,
                d[at].mul_r,
                d[at].mul_c,
                int(not axes[i].size),
                d[at].flip,
                axes[i].size,
            )
            for at, i in enumerate(order)
        ),
        run=run(),
        group=group,
        place_cols=place[free[1]].div if free[1] is not None else 0,
        whole_rows=int(whole_rows(layout)),
    )
