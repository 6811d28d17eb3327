"""``fp4 layout``: list the catalogue, show one layout at a shape, compare two. Exit status 0 equal or good, 1 different, 2 bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fp4.cli.table import dump, table

__all__ = ["app", "parse_shape", "same_as"]

app = typer.Typer(
    help="Storage layouts: list, show, equal.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Name = Annotated[str, typer.Argument(help="a catalogue name, name(parameter=value), 'a >> b', or a spec '(mo m4) k -> mo k m4'")]


def parse_shape(text: str) -> tuple[int, ...]:
    """``1024x64`` or ``8x1024x64``: bytes, leading numbers are experts. Raises LayoutError."""
    from fp4.errors import LayoutError

    try:
        shape = tuple(int(n) for n in text.lower().replace(",", "x").split("x"))
    except ValueError:
        shape = ()
    if len(shape) < 2 or min(shape) < 0:
        raise LayoutError(f"layout: shape {text!r} is not MxK; need rows and byte columns such as 1024x64, or experts first, 8x1024x64")
    return shape


def same_as(layout: Any) -> tuple[list[str], list[str]]:
    """(catalogue names that store the same bytes, names that differ in padding or fill only)."""
    from fp4 import layouts

    others = [v for name in layouts.names() for v in layouts.variants(name)[:1] if v is not layout and v.name != layout.name]
    return [v.name for v in others if v == layout], [v.name for v in others if v != layout and v.same_digits(layout)]


def _row(layout: Any) -> dict[str, Any]:
    pads = layout.pad or (None, None)
    return {
        "name": layout.name,
        "role": layout.role,
        "spec": layout.spec,
        "unit": layout.unit,
        "word": list(layout.word) if layout.word else None,
        "multiple": list(layout.multiple),
        "pads": ["yes" if p is not None else "no" for p in pads],
        "fill": layout.fill,
        "origin": layout.origin,
        "holds": layout.holds,
    }


@app.command("list")
def list_(json: Json = False) -> None:
    """The catalogue: name, what it stores, spec, padding, origin."""
    from fp4 import layouts

    rows = [_row(layouts.get(name)) for name in layouts.names()]
    if json:
        print(dump(rows))
        return
    cells = []
    for r in rows:
        pad = ",".join(f"{n}{'' if p == 'yes' else '!'}" for n, p in zip(r["multiple"], r["pads"], strict=True))
        extra = (
            (" nibbles" if r["unit"] == "nibble" else "") + (" +word" if r["word"] else "") + (f" fill {r['fill']:#x}" if r["fill"] else "")
        )
        cells.append((r["name"], r["role"], r["spec"] + extra, pad, r["origin"], r["holds"]))
    print(table(("name", "stores", "spec", "rows,columns", "origin", "versions"), cells))
    print("\nrows,columns: shapes are padded to these multiples; with '!' they must be multiples already.")


@app.command()
def show(
    name: Name,
    shape: Annotated[str, typer.Option("--shape", metavar="MxK", help="rows x byte columns; default: one tile")] = "",
    svg: Annotated[str, typer.Option("--svg", metavar="FILE", help="write the picture there")] = "",
    json: Json = False,
) -> None:
    """Where each byte of an M x K matrix is stored: formula, CuTe string, padding, picture."""
    from fp4.errors import LayoutError
    from fp4.layout import Layout
    from fp4.layout_doc import sample_shape
    from fp4.layouts import parse

    layout: Any = parse(name)
    single = isinstance(layout, Layout)
    size = parse_shape(shape) if shape else sample_shape(layout) if single else None
    if size is None:
        raise LayoutError(f"layout show: {layout.name} is a chain; give --shape MxK")
    report: dict[str, Any] = _row(layout) if single else {"name": layout.name, "steps": [_row(s) for s in layout.steps]}
    report |= {"shape": list(size), "padded": list(layout.padded(size)), "bytes": layout.nbytes(size), "formula": layout.formula(size)}
    if single:
        same, near = same_as(layout)
        report |= {"cute": layout.cute(size), "symbolic": layout.formula(), "same_as": same, "same_but_padding": near}
    if svg:
        if not single:
            raise LayoutError(f"layout show: {layout.name} is a chain; pictures are drawn of single layouts")
        Path(svg).write_text(layout.svg(size[-2:]))
        report["svg"] = svg
    if json:
        print(dump(report))
        return
    print("\n".join(f"{key:16} {_text(value)}" for key, value in report.items() if value not in (None, "", []) and key != "steps"))
    for step in report.get("steps", ()):
        print(f"{'step':16} {step['name']}: {step['spec']}")
    if single and min(size) > 0:
        print()
        print(layout.picture(size[-2:]))


def _text(value: Any) -> str:
    return (
        " x ".join(map(str, value))
        if isinstance(value, list) and value and isinstance(value[0], int) and len(value) < 8
        else (", ".join(map(str, value)) if isinstance(value, list) else str(value))
    )


@app.command()
def equal(a: Name, b: Name) -> None:
    """Whether two layouts store the same bytes for every shape: exit status 0 when they do, 1 when they do not."""
    from fp4.layouts import parse

    left, right = parse(a), parse(b)
    if left == right:
        print(f"equal: {left.name} and {right.name} store the same bytes for every shape")
        return
    print(f"different: {_difference(left, right)}")
    raise typer.Exit(1)


def _difference(left: Any, right: Any) -> str:
    """One sentence that says how two layouts differ, with a first byte that shows it."""
    from fp4.layout import Layout
    from fp4.layout_doc import sample_shape

    if not (isinstance(left, Layout) and isinstance(right, Layout)):
        return f"{left.name} and {right.name} are other steps"
    if left.unit != right.unit:
        return f"{left.name} moves {left.unit}s, {right.name} {right.unit}s"
    if left.same_digits(right):
        pads = f"{left.name} pads to {left.multiple}, {right.name} to {right.multiple}"
        fill = "" if left.fill == right.fill else f", fill {left.fill:#x} and {right.fill:#x}"
        return f"same order, other padding: {pads}{fill}"
    if (left.axes, left.order) == (right.axes, right.order):
        return f"same order, other word table: {left.name} and {right.name}"
    import math

    both = [math.lcm(x, y) for x, y in zip(left.multiple, right.multiple, strict=True)]
    shape = sample_shape(left, 2 * both[0], 2 * both[1])
    g = left.geometry(shape)
    for m in range(g.prows):
        for k in range(g.pcols):
            p, q = left.offset(shape, m, k), right.offset(shape, m, k)
            if p != q:
                return f"at {shape[0]} x {shape[1]}, {left.unit} ({m}, {k}) is stored at {p} by {left.name} and at {q} by {right.name}"
    return f"{left.name} pads to {left.multiple}, {right.name} to {right.multiple}"
