"""What a reader sees of a layout: the offset formula, the CuTe string, a text grid and an SVG picture. All derived from its digits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fp4.errors import LayoutError

if TYPE_CHECKING:
    from fp4.layout import Layout

__all__ = ["cute", "formula", "picture", "sample_shape", "svg"]


def _product(number: int, *names: str) -> str:
    """``4*RO``; a factor of 1 is left out."""
    return "*".join(([str(number)] if number != 1 or not any(names) else []) + [n for n in names if n])


def formula(layout: Layout, shape: Sequence[int] | None, m: str = "m", k: str = "k") -> str:
    """A Python expression equal to ``layout.offset(shape, m, k)``."""
    free: tuple[object, object] = ("RO", "CO") if shape is None else layout.extents(shape)
    extent = {d: str(free[d]) for d in (0, 1)}
    terms = []
    for d in sorted(layout.digits, key=lambda d: (d.dim, d.div_free, d.div)):
        number, divisor, factor = d.mul, d.div, ""
        names = [extent[i] for i, has in ((0, d.mul_r), (1, d.mul_c)) if has]
        if shape is None:
            place, stride = _product(divisor, extent[d.dim] if d.div_free else ""), _product(number, *names)
        else:
            place = str(divisor * (int(extent[d.dim]) if d.div_free else 1))
            stride = str(math.prod((number, *(int(n) for n in names))))
        size = str(d.size) if d.size else extent[d.dim]
        text = (m, k)[d.dim]
        text = text if place == "1" else f"{text}//{place if '*' not in place else f'({place})'}"
        if d.wrap:
            text = f"({text}) % {size}" if "//" in text else f"{text} % {size}"
        if d.flip:
            text = f"{int(size) - 1 if size.isdigit() else size + ' - 1'} - {f'({text})' if '%' in text or '//' in text else text}"
        factor = "" if stride == "1" else f"*{stride}"
        bare = not factor and "%" not in text and "//" not in text and not d.flip
        terms.append(text + factor if text in (m, k) and (factor or bare) else f"({text}){factor}")
    return " + ".join(terms) or "0"


def cute(layout: Layout, shape: Sequence[int]) -> str:
    """``((32,4,8),(4,16)):((16,4,8192),(1,512))``: for each dimension its modes, innermost first, and their strides in units.

    A reversed axis has a negative stride and moves the start, written as ``start + ``.
    """
    free = layout.extents(shape)
    sizes: list[list[int]] = [[], []]
    strides: list[list[int]] = [[], []]
    start = 0
    for d in sorted(layout.digits, key=lambda d: (d.div_free, d.div)):
        size = d.size or free[d.dim]
        stride = d.mul * (free[0] if d.mul_r else 1) * (free[1] if d.mul_c else 1)
        start += (size - 1) * stride if d.flip else 0
        sizes[d.dim].append(size)
        strides[d.dim].append(-stride if d.flip else stride)

    def mode(values: list[int], empty: int) -> str:
        return str(values[0] if values else empty) if len(values) < 2 else f"({','.join(map(str, values))})"

    text = f"({mode(sizes[0], 1)},{mode(sizes[1], 1)}):({mode(strides[0], 0)},{mode(strides[1], 0)})"
    return f"{start} + {text}" if start else text


def sample_shape(layout: Layout, rows: int = 0, cols: int = 0) -> tuple[int, int]:
    """A byte shape of whole tiles, at least ``rows`` x ``cols`` units: what pictures show."""
    out = []
    for d, least in ((0, rows), (1, cols)):
        has_free = any(a.dim == d and not a.size for a in layout.axes)
        out.append(-(-max(least, 1) // layout.multiple[d]) * layout.multiple[d] if has_free else layout.tile[d])
    return out[0], out[1] // layout.units_per_byte if out[1] % layout.units_per_byte == 0 else out[1]


def _grid(layout: Layout, shape: Sequence[int] | None, limit: int) -> tuple[tuple[int, int], np.ndarray]:  # type: ignore[type-arg]
    shape = tuple(shape) if shape is not None else sample_shape(layout)
    g = layout.geometry(shape)
    m, k = np.arange(min(g.prows, limit))[:, None], np.arange(min(g.pcols, limit))[None, :]
    if not m.size or not k.size:
        raise LayoutError(f"layout {layout.name}: shape {list(shape)} is empty; a picture needs at least one {layout.unit}")
    return (g.prows, g.pcols), np.asarray(layout.offset((g.prows, g.pcols // layout.units_per_byte), m, k))


def picture(layout: Layout, shape: Sequence[int] | None = None, limit: int = 32) -> str:
    """Rows of storage offsets in units, at most ``limit`` rows and columns; ``..`` marks what was cut."""
    (rows, cols), grid = _grid(layout, shape, limit)
    width = max(3, len(str(int(grid.max()))))
    lines = [" ".join(f"{v:{width}d}" for v in line) + (" .." if cols > limit else "") for line in grid.tolist()]
    head = f"{layout.name}: offset of {layout.unit} (m, k); m down 0..{rows - 1}, k right 0..{cols - 1}"
    return "\n".join([head, *lines, *([".."] if rows > limit else [])])


def _colour(fraction: float) -> str:
    """Storage order from pale yellow through green to blue, three hex digits; readable without colour too, the number is printed."""
    stops = ((15, 15, 11), (8, 13, 8), (3, 7, 12))
    i = 0 if fraction < 0.5 else 1
    f = fraction * 2 - i
    return "#" + "".join(f"{round(a + (b - a) * f):x}" for a, b in zip(stops[i], stops[i + 1], strict=True))


def svg(layout: Layout, shape: Sequence[int] | None = None, limit: int | tuple[int, int] = 32) -> str:
    """One cell a unit, at most ``limit`` rows and columns; colour and label are the storage offset."""
    limits = (limit, limit) if isinstance(limit, int) else limit
    (rows, cols), grid = _grid(layout, shape, max(limits))
    grid = grid[: limits[0], : limits[1]]
    w, h, top = 8 + 6 * len(str(int(grid.max()))), 14, 30
    n = max(rows * cols - 1, 1)
    part = ", part" if rows > limits[0] or cols > limits[1] else ""
    width = max(w * grid.shape[1] + 2, 6 * len(layout.spec) + 8)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{h * grid.shape[0] + top + 2}" font-family="monospace" '
        f'font-size="9" text-anchor="middle"><defs><path id="c" d="M0 0h{w - 1}v{h - 1}h{1 - w}z"/></defs>',
        f'<g text-anchor="start" font-size="10"><text x="2" y="11">{layout.name} ({rows} x {cols} {layout.unit}s{part})</text>'
        f'<text x="2" y="24">{layout.spec.replace("->", "&#8594;")}</text></g>',
    ]
    for i, line in enumerate(grid.tolist()):
        y = top + i * h
        parts += [f'<use href="#c" x="{1 + j * w}" y="{y}" fill="{_colour(min(v / n, 1.0))}"/>' for j, v in enumerate(line)]
        parts += [f'<text x="{1 + j * w + w // 2}" y="{y + 10}">{v}</text>' for j, v in enumerate(line)]
    return "\n".join([*parts, "</svg>\n"])
