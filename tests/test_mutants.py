"""Every one-step mutant of every layout must die, and the round trip alone kills none of them."""

from __future__ import annotations

import numpy as np
import pytest
from layout_formulas import FORMULAS, WORDS, published_bytes
from test_layout_vendors import CASES

from fp4 import layouts as catalogue
from fp4.errors import LayoutError
from fp4.layout import Layout
from fp4.layout_doc import sample_shape
from fp4.testing import mutants
from fp4.testing.goldens import counter_bytes

LAYOUTS = [layout for name in catalogue.names() for layout in catalogue.variants(name)]
IDS = [f"{layout.name}-{layout.multiple[0]}x{layout.multiple[1]}" for layout in LAYOUTS]
each = pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)


def tiles(layout: Layout) -> np.ndarray:
    """Three tiles each way, and not a square: neighbouring bytes differ, so that an exchange shows."""
    return counter_bytes(sample_shape(layout, 3 * layout.multiple[0], 5 * layout.multiple[1]))


@each
def test_published_formula_kills_every_mutant(layout: Layout) -> None:
    x = tiles(layout)
    want = published_bytes(layout, x)
    assert np.array_equal(layout.apply(x), want)
    found = mutants(layout)
    assert len(found) >= 2
    alive = [m.name for m in found if np.array_equal(m.apply(x), want)]
    assert not alive


#: recorded bytes with a single tile of columns cannot see the order of that axis; the formula of the same library does
ONE_TILE = {"marlin_mx_sf_single": " k", "aiter_w_gu": "ko", "aiter_w_a16w4": "ko"}


@each
def test_vendor_bytes_kill_every_mutant_where_there_are_any(layout: Layout) -> None:
    """Recorded bytes alone, without any formula, kill all mutants of the layouts that have them."""
    cases = [(x, want) for _, known, x, want in CASES if known == layout and known.name == layout.name]
    if not cases:
        pytest.skip("no recorded bytes; the published formula is the anchor")
    alive = []
    for mutant in mutants(layout):
        for x, want in cases:
            try:
                if not np.array_equal(mutant.apply(x), np.ascontiguousarray(want).reshape(-1).view(np.uint8)):
                    break
            except LayoutError:
                break
        else:
            alive.append(mutant.name)
    if layout.name in ONE_TILE:
        assert alive
        assert all(f"{ONE_TILE[layout.name]} " in name for name in alive)
    else:
        assert not alive


def test_round_trip_alone_kills_no_mutant() -> None:
    """The warning behind this file: ``invert(apply(x)) == x`` holds for every wrong layout as well."""
    total = killed = 0
    for layout in LAYOUTS:
        x = tiles(layout)[: 2 * layout.multiple[0]]
        for mutant in mutants(layout):
            total += 1
            killed += not np.array_equal(mutant.invert(mutant.apply(x), x.shape), x)
    assert total > 700
    assert killed == 0


def test_mutants_differ_and_do_not_repeat() -> None:
    for layout in LAYOUTS:
        found = mutants(layout)
        assert layout not in found
        assert len(set(found)) == len(found)
        assert all(m.multiple == layout.multiple and m.unit == layout.unit for m in found)


def test_every_layout_has_a_published_formula() -> None:
    assert {layout.name for layout in LAYOUTS} == set(FORMULAS)
    assert {layout.name for layout in LAYOUTS if layout.word is not None} == set(WORDS)
