"""Wrong layouts that look right: each passes ``invert(apply(x)) == x``, so a test suite must have an anchor that notices them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from fp4.errors import LayoutError, shown
from fp4.layout import Layout

__all__ = ["mutants"]


def _try(layout: Layout, name: str, spec: str, word: tuple[int, ...] | None) -> Layout | None:
    try:
        return replace(layout, name=name, spec=spec, word=word)
    except LayoutError:
        return None


def mutants(layout: Layout) -> list[Layout]:
    """All one-step mutants of a layout that store different bytes, without duplicates.

    Steps: two storage axes exchanged; one axis stored backwards (or no longer so); two neighbouring entries of the word table
    exchanged, or the table left out.
    """
    if not isinstance(layout, Layout):
        raise LayoutError(f"mutants: got {shown(layout)}; need a Layout such as fp4.layouts['sf_128x4']")
    left, _, right = layout.spec.partition("->")
    tokens = right.split()
    out: list[Layout] = []

    def add(what: str, spec: str, word: tuple[int, ...] | None) -> None:
        found = _try(layout, f"{layout.name} with {what}", spec, word)
        if found is not None and found != layout and found not in out:
            out.append(found)

    for i, j in combinations(range(len(tokens)), 2):
        swapped = list(tokens)
        swapped[i], swapped[j] = tokens[j], tokens[i]
        add(f"{tokens[i]} and {tokens[j]} exchanged", f"{left}-> {' '.join(swapped)}", layout.word)
    for i, token in enumerate(tokens):
        flipped = [*tokens[:i], token.removeprefix("~") if token.startswith("~") else f"~{token}", *tokens[i + 1 :]]
        add(f"{token} reversed", f"{left}-> {' '.join(flipped)}", layout.word)
    if layout.word is not None:
        for i in range(31):
            w = list(layout.word)
            w[i], w[i + 1] = w[i + 1], w[i]
            add(f"word bits {i} and {i + 1} exchanged", layout.spec, tuple(w))
        add("no word table", layout.spec, None)
    return out
