"""How the permute kernel tiles a layout: everything that the compiler sees, derived from the layout and the alignment alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from fp4.layout import Layout
from fp4.layout_spec import HALVES, Axis, Digit, digits

__all__ = ["RANK", "Plan", "Words", "plan", "whole_rows", "words"]

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
    #: the storage has all rows of a column before the next: programs beside each other write beside each other, with twice the warps
    rows_first: bool
    #: items of a tile that are contiguous in storage
    run: int
    #: items that make one stored element: 2 nibbles, 4 bytes or 8 nibbles of a word, else 1
    group: int
    place_cols: int
    #: storage ends in whole, unsplit rows: their length in items is the column extent
    whole_rows: int
    #: see ``Words``; the exchanged axes are the last of ``gather``
    exchange: tuple[tuple[int, int, int], ...]
    exchanged: int
    gather: tuple[int, ...]
    inside: tuple[tuple[int, int], ...]
    split_cols: int
    halves: bool


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


class Words(NamedTuple):
    """A layout seen as 32-bit words: index bits inside the logical word change places with tile axes of two until the stored word is whole.

    ``axes`` (logical order) and ``order`` are the axes outside words. An axis of ``outer`` is an axis of the logical tile, and after its
    exchanges another one of the stored tile: ``place`` describes the former, ``store`` the latter.
    """

    axes: tuple[Axis, ...]
    order: tuple[int, ...]
    #: digits of the outer axes by logical place, and by storage place, in units of words
    place: tuple[Digit, ...]
    store: tuple[Digit, ...]
    #: axes that are exchanged
    outer: tuple[int, ...]
    #: steps (place in ``outer``, shift, mask of the index bit inside the word)
    exchange: tuple[tuple[int, int, int], ...]
    #: delta swaps (shift, mask) that follow
    inside: tuple[tuple[int, int], ...]
    #: by what the free column axis was divided
    split_cols: int
    #: the exchanges have sorted a word's nibbles by halves already, which the word program begins with
    halves: bool


def _low_bits(axes: Sequence[Axis], places: Sequence[int], bits: int) -> dict[int, int] | None:
    """How many low index bits of which axis lie in the innermost ``2^bits`` units of an order (``places``, outer to inner)."""
    found: dict[int, int] = {}
    for i in reversed(places):
        if not bits:
            break
        take = min(bits, axes[i].size.bit_length() - 1) if axes[i].size else bits
        found[i] = take
        bits -= take
    return None if bits else found


def _unit_mask(bits: int, width: int, keep: Callable[[int], bool]) -> int:
    return sum(((1 << width) - 1) << (n * width) for n in range(1 << bits) if keep(n))


def _exchanges(
    now: list[int], want: list[int], bits: int, width: int
) -> tuple[list[tuple[int, int, tuple[tuple[int, int], ...]]], tuple[tuple[int, int], ...]]:
    """From index bits ``now`` of a word (innermost first) to ``want``.

    Returns for each bit that enters (bit, bit that its axis holds in the end, exchanges), and the delta swaps that remain.
    """
    now, chains = list(now), []
    for enter in [bit for bit in want if bit not in now]:
        held, steps = enter, []
        while held in want:
            at = want.index(held)
            now[at], held = held, now[at]
            steps.append((width << at, _unit_mask(bits, width, lambda n: not n >> at & 1)))  # noqa: B023
        chains.append((enter, held, tuple(steps)))
    inside = []
    for i in range(bits):
        if now[i] != want[i]:
            j = now.index(want[i])
            now[i], now[j] = now[j], now[i]
            inside.append((((1 << j) - (1 << i)) * width, _unit_mask(bits, width, lambda n: bool(n >> i & 1) and not n >> j & 1)))  # noqa: B023
    return chains, tuple(inside)


@lru_cache(maxsize=1024)
def words(layout: Layout) -> Words | None:
    """The layout on 32-bit words; None where a stored word reaches across a free axis, or is the logical one."""
    axes, order, width = list(layout.axes), list(layout.order), 4 if layout.unit == "nibble" else 8
    halves = layout.word_program().before == HALVES
    if halves and width == 8:
        width = 4
        order.append(len(axes))
        axes.append(Axis(1, 2))
    bits = 3 if width == 4 else 2
    columns = [i for i, a in enumerate(axes) if a.dim == 1]
    if not all(_power_of_two(a.size or 1) for a in axes) or not all(axes[i].size for i in columns[1:]):
        return None
    logical, stored = _low_bits(axes, columns, bits), _low_bits(axes, order, bits)
    if logical is None or stored is None or not all(axes[i].size and not axes[i].flip for i in stored):
        return None
    if any(axes[i].flip and not axes[i].size for i in logical):
        return None
    fine: list[Axis] = []  # every index bit of a word as an axis of two
    parts: list[list[int]] = []
    for i, a in enumerate(axes):
        low = max(logical.get(i, 0), stored.get(i, 0))
        sizes = [a.size >> low] * (a.size >> low != 1) + [2] * low
        parts.append(list(range(len(fine), len(fine) + len(sizes))))
        fine += [a._replace(size=size) for size in sizes]

    def innermost(places: Sequence[int]) -> list[int]:
        return [part for i in reversed(places) for part in reversed(parts[i])][:bits]

    now, want = innermost(columns), innermost(order)
    if now == want:
        return None
    want = [want[1], want[2], want[0]] if halves else want
    chains, inside = _exchanges(now, want, bits, width)
    fine_order = [part for i in order for part in parts[i]]
    digit = dict(zip(fine_order, digits(fine, fine_order), strict=True))
    keep = [part for part in range(len(fine)) if part not in now]
    stored_keep = [part for part in fine_order if part not in want]
    standing = {held: enter for enter, held, _ in chains}
    return Words(
        axes=tuple(fine[part] for part in keep),
        order=tuple(keep.index(standing.get(part, part)) for part in stored_keep),
        place=tuple(digit[part]._replace(div=digit[part].div >> (bits if fine[part].dim else 0)) for part in keep),
        store=tuple(digit[part]._replace(mul=digit[part].mul >> bits) for part in stored_keep),
        outer=tuple(keep.index(enter) for enter, _, _ in chains),
        exchange=tuple((at, *step) for at, (_, _, steps) in enumerate(chains) for step in steps),
        inside=inside,
        split_cols=math.prod(1 << n for i, n in logical.items() if not axes[i].size),
        halves=halves,
    )


@lru_cache(maxsize=4096)
def plan(layout: Layout, align: int, tile_bytes: int, far: bool = False) -> Plan | None:
    """How to tile a layout whose rows are multiples of ``align`` bytes; None when its axes are not powers of two.

    far: the tensor is large and its storage is written. Bytes stored column by column then want longer runs, side by side: by
    benchmarks/permute.py, Marlin's scales gain 1.5% at 256 MiB and lose as much at 64.
    """
    item, axes = _split(layout, align)
    nibble = int(layout.unit == "nibble")
    w = words(layout) if item < 4 <= align else None
    if w is not None:
        item, nibble, axes = 4, 0, list(w.axes)
    cols = [a for a in axes if a.dim == 1]
    if len(axes) > RANK or not all(_power_of_two(a.size or 1) for a in axes) or any(not a.size for a in cols[1:]):
        return None
    free = [next((i for i, a in enumerate(axes) if a.dim == d and not a.size), None) for d in (0, 1)]
    order = layout.order if w is None else w.order
    apart = far and layout.unit != "nibble" and [axes[i].dim for i in order if not axes[i].size] == [1, 0]
    tile_bytes, run_bytes = (2 * tile_bytes, 256) if apart else (tile_bytes, 128)
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
        return run() * item >> nibble < run_bytes or width() < 128

    while math.prod(tile(i) for i in range(len(axes))) * item >> nibble < (2 * tile_bytes if short() else tile_bytes):
        inner_free = next((axes[i].dim for i in reversed(order) if not axes[i].size), None)
        if inner_free is None:
            break
        if free[1] is not None and width() < 128:
            chunk[1] *= 2
        elif run() * item >> nibble < run_bytes:
            chunk[inner_free] *= 2
        else:
            other = free[0] is not None and (free[1] is None or width() >= 512 or (inner_free == 0 and width() >= 256))
            chunk[0 if other else 1] *= 2
    group = 1 if w is not None or item > 1 else (4 if layout.word is not None else 1) << nibble
    tail = 1  # items below the innermost free axis: its extent is any number, so a stored element must not reach across it
    for i in reversed(order):
        if axes[i].flip or not axes[i].size:
            break
        tail *= axes[i].size
    if tail % group:
        return None
    d = digits(axes, order) if w is None else w.store
    place = {i: d[at] for at, i in enumerate(order)} if w is None else dict(enumerate(w.place))
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
                d[at].dim,
                tile(i),
                math.prod(tile(j) for j in order[at + 1 :]),
                d[at].mul,
                d[at].mul_r,
                d[at].mul_c,
                int(not axes[i].size),
                d[at].flip,
                d[at].size,
            )
            for at, i in enumerate(order)
        ),
        rows_first=apart,
        run=run(),
        group=group,
        place_cols=place[free[1]].div if free[1] is not None else 0,
        whole_rows=int(whole_rows(layout)),
        exchange=w.exchange if w is not None else (),
        exchanged=len(w.outer) if w is not None else 0,
        gather=tuple(i for i in range(len(axes)) if i not in w.outer) + w.outer if w is not None else tuple(range(len(axes))),
        inside=w.inside if w is not None else (),
        split_cols=w.split_cols if w is not None else 1,
        halves=w is not None and w.halves,
    )
