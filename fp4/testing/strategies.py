"""Hypothesis strategies: layouts, shapes that fit them, and raw bytes. Needs ``hypothesis``."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from fp4 import layouts as catalogue
from fp4.layout import Layout

__all__ = ["byte_arrays", "byte_tensors", "catalogue_layouts", "finite_floats", "layouts", "shapes"]


def __dir__() -> list[str]:
    return __all__


def catalogue_layouts() -> st.SearchStrategy[Layout]:
    """Any layout of the catalogue, families with each of their usual parameters."""
    return st.sampled_from([layout for name in catalogue.names() for layout in catalogue.variants(name)])


@st.composite
def layouts(draw: st.DrawFn, unit: str | None = None) -> Layout:
    """A random layout: up to four axes a dimension, any storage order, sometimes reversed axes, padding and a word table."""
    unit = unit or draw(st.sampled_from(["byte", "nibble"]))
    names, groups, pads = [], [], []
    for dim in "rc":
        sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=0, max_size=3))
        if dim == "c" and unit == "nibble":
            sizes.append(2)
        at = draw(st.integers(0, len(sizes)))
        group = [f"{dim}{'abcdef'[i]}{n}" for i, n in enumerate(sizes)]
        group.insert(at, f"{dim}x")
        names += group
        groups.append("(" + " ".join(group) + ")")
        pads.append(draw(st.sampled_from([None, 1, 2, 6])) if at == 0 else None)
    order = draw(st.permutations(names))
    right = " ".join(("~" if draw(st.integers(0, 9)) == 0 else "") + n for n in order)
    word = tuple(draw(st.permutations(range(32)))) if draw(st.integers(0, 4)) == 0 else None
    pad = (pads[0], pads[1]) if any(pads) else None
    return Layout("random", f"{' '.join(groups)} -> {right}", unit=unit, word=word, pad=pad, fill=draw(st.integers(0, 255)))


@st.composite
def shapes(draw: st.DrawFn, layout: Layout, tiles: int = 3, experts: bool = True, ragged: bool = True) -> tuple[int, ...]:
    """Byte shapes that fit ``layout``: 0 to ``tiles`` + 1 tiles a dimension, ragged where it pads, sometimes with expert dimensions."""
    out = []
    for d in (0, 1):
        multiple, per_byte = layout.multiple[d], layout.units_per_byte if d else 1
        if not any(a.dim == d and not a.size for a in layout.axes):
            n = layout.tile[d]
        else:
            n = multiple * draw(st.integers(0, tiles + 1))
        if ragged and n and layout.pad is not None and layout.pad[d] is not None:
            n -= draw(st.integers(0, multiple - 1))
        n = -(-n // per_byte)
        if layout.word is not None and d and not ragged:
            n = -(-n // 4) * 4
        out.append(n)
    lead = draw(st.lists(st.integers(0, 3), max_size=2)) if experts else []
    return (*lead, *out)


def byte_arrays(shape: tuple[int, ...]) -> st.SearchStrategy[npt.NDArray[np.uint8]]:
    """u8 arrays of ``shape``: random bytes from a drawn seed, so that large shapes stay cheap and neighbouring bytes differ."""

    def make(seed: int) -> npt.NDArray[np.uint8]:
        return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)

    return st.integers(0, 2**32 - 1).map(make)


def byte_tensors(shape: tuple[int, ...]) -> st.SearchStrategy[torch.Tensor]:
    """``byte_arrays`` as torch tensors."""
    return byte_arrays(shape).map(torch.from_numpy)


@st.composite
def finite_floats(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Finite tensors of ``shape`` over many magnitudes, with zeros, ties of e2m1 and whole zero blocks among them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = draw(st.sampled_from([1.0, 2.0**-14, 2.0**10, 3.0]))
    kind = draw(st.sampled_from(["normal", "wide", "grid", "sparse"]))
    x: Any = rng.standard_normal(shape)
    if kind == "wide":
        x = x * 2.0 ** rng.integers(-20, 20, shape)
    elif kind == "grid":
        x = rng.choice([-6, -5, -3.5, -2.5, -1.75, -0.75, -0.25, 0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6], shape)
    elif kind == "sparse":
        x = x * (rng.random(shape) < 0.05)
    limit = 0.5 * torch.finfo(dtype).max
    return torch.from_numpy(np.clip(x * scale, -limit, limit)).to(dtype)
