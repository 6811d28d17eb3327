"""Reading a layout spec: axes, canonical form, symbolic digits, word tables. Pure integers, no tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from fp4.errors import LayoutError, shown

__all__ = ["DIMS", "HALVES", "Axis", "Digit", "WordProgram", "canonical", "digits", "parse", "word_program"]

_TOKEN = re.compile(r"([A-Za-z_]+)([0-9]*)\Z")
_GROUP = re.compile(r"\(([^()]*)\)|([^\s()]+)")
DIMS = ("rows", "columns")


class Axis(NamedTuple):
    """One digit of the mixed-radix address: logical dimension, size (0 = free) and whether storage runs backwards."""

    dim: int
    size: int
    flip: bool = False


class Digit(NamedTuple):
    """One storage digit, symbolic in the free extents RO, CO of the two dimensions; all plain ints, so Triton takes it as constexpr.

    ``d = index[dim] // (div * free[dim]^div_free)``, then ``% (size or free[dim])`` if ``wrap``, then ``size - 1 - d`` if ``flip``;
    the offset is the sum of ``d * mul * RO^mul_r * CO^mul_c``.
    """

    dim: int
    size: int
    div: int
    div_free: int
    wrap: int
    mul: int
    mul_r: int
    mul_c: int
    flip: int


def parse(where: str, spec: str) -> tuple[list[Axis], list[int]]:
    """(logical axes, row axes first) and, for each storage position, the index of its axis."""
    if not isinstance(spec, str):
        raise LayoutError(f"{where}: spec is {type(spec).__name__}; need text such as '(mo m4) k -> mo k m4'")
    left, arrow, right = spec.partition("->")
    groups = _GROUP.findall(left)
    if not arrow or len(groups) != 2 or "(" in right or ")" in right or _GROUP.sub("", left).strip():
        raise LayoutError(f"{where}: spec must read '(rows) (columns) -> storage order' with two groups on the left")
    axes: list[Axis] = []
    index: dict[str, int] = {}
    for dim, (inside, bare) in enumerate(groups):
        free = 0
        for token in (inside or bare).split():
            match = _TOKEN.match(token)
            if match is None or token in index or (match[2] and int(match[2]) < 1):
                raise LayoutError(f"{where}: {shown(token)} is not an axis; need a new name such as 'mo' (free) or 'm4' (size 4)")
            free += not match[2]
            index[token] = len(axes)
            axes.append(Axis(dim, int(match[2] or 0)))
        if free > 1:
            raise LayoutError(f"{where}: {free} free axes in the {DIMS[dim]} group; need at most one, give the others a size")
    order: list[int] = []
    for token in right.split():
        name = token.removeprefix("~")
        if name not in index:
            raise LayoutError(f"{where}: unknown axis {shown(name)} on the right; the left has {shown(', '.join(index))[1:-1]}")
        at = index[name]
        if at in order:
            raise LayoutError(f"{where}: axis {shown(name)} is stored twice")
        order.append(at)
        axes[at] = axes[at]._replace(flip=token.startswith("~"))
    if len(order) != len(axes):
        missing = [name for name, at in index.items() if at not in order]
        raise LayoutError(f"{where}: axis {shown(', '.join(missing))[1:-1]} of the left is not stored on the right")
    return axes, order


def canonical(axes: list[Axis], order: list[int]) -> tuple[tuple[Axis, ...], tuple[int, ...]]:
    """Drop axes of size 1 and fuse axes that are neighbours both logically and in storage, until nothing changes."""
    keep = [i for i in range(len(axes)) if axes[i].size != 1]
    order = [keep.index(i) for i in order if i in keep]
    axes = [axes[i] for i in keep]
    i = 0
    while i + 1 < len(order):
        a, b = order[i], order[i + 1]
        if b == a + 1 and axes[a].dim == axes[b].dim and axes[a].flip == axes[b].flip:
            axes[a] = axes[a]._replace(size=axes[a].size * axes[b].size)  # free (0) stays free
            del axes[b], order[i + 1]
            order = [x - (x > b) for x in order]
            i = max(i - 1, 0)
        else:
            i += 1
    return tuple(axes), tuple(order)


def digits(axes: Sequence[Axis], order: Sequence[int]) -> tuple[Digit, ...]:
    out = []
    for at, i in enumerate(order):
        inner = [a for a in axes[i + 1 :] if a.dim == axes[i].dim]
        outer = [a for a in axes[:i] if a.dim == axes[i].dim]
        after = [axes[j] for j in order[at + 1 :]]
        out.append(
            Digit(
                axes[i].dim,
                axes[i].size,
                math.prod(a.size or 1 for a in inner),
                int(any(not a.size for a in inner)),
                int(bool(outer)),
                math.prod(a.size or 1 for a in after),
                int(any(not a.size and a.dim == 0 for a in after)),
                int(any(not a.size and a.dim == 1 for a in after)),
                int(axes[i].flip),
            )
        )
    return tuple(out)


#: delta swaps (shift, mask) that bring the even nibbles of a 32-bit word into its low half and the odd ones into its high half
HALVES = ((4, 0x00F000F0), (8, 0x0000FF00))


class WordProgram(NamedTuple):
    """A word table as int32 operations, in this order.

    before, after: delta swaps ``t = (w ^ (w >> s)) & m; w ^= t ^ (t << s)``. pairs: ``w = OR of ((w >> s) & m)``, a negative s shifts
    left. Tables that treat both halves alike (all of bf16 pair decoding) need half as many shifts once the nibbles are sorted by halves.
    """

    before: tuple[tuple[int, int], ...]
    pairs: tuple[tuple[int, int], ...]
    after: tuple[tuple[int, int], ...]


def _pairs(word: Sequence[int]) -> tuple[tuple[int, int], ...]:
    masks: dict[int, int] = {}
    for out, src in enumerate(word):
        masks[src - out] = masks.get(src - out, 0) | 1 << out
    return tuple((s, m - (1 << 32) if m >> 31 else m) for s, m in sorted(masks.items()))


def word_program(word: Sequence[int], inverse: bool = False) -> WordProgram:
    """Operations for ``out bit j = in bit word[j]``, or for the inverse, by the shorter of two ways."""
    table = [list(word).index(j) for j in range(32)] if inverse else list(word)
    direct = WordProgram((), _pairs(table), ())
    # where bit i of a word lies after HALVES: nibble n of eight goes to n // 2, odd ones 4 further
    sorted_at = [((n % 2) * 4 + n // 2) * 4 + b for n in range(8) for b in range(4)]
    if inverse:
        halves = WordProgram((), _pairs([table[sorted_at.index(j)] for j in range(32)]), HALVES[::-1])
    else:
        halves = WordProgram(HALVES, _pairs([sorted_at[j] for j in table]), ())
    return halves if len(halves.pairs) + 4 < len(direct.pairs) else direct
