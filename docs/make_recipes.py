"""Write the tables of ``docs/recipes.md`` from ``fp4.recipes`` and ``fp4.Recipe``: ``python docs/make_recipes.py``. A test checks that they
are current."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import fp4
from fp4 import formats
from fp4.recipe import CHOICES, MEANING

PAGE = Path(__file__).with_name("recipes.md")
START, END = "<!-- {} made by docs/make_recipes.py -->\n", "<!-- end -->\n"


def table() -> str:
    """Preset by format, what was compared."""
    columns = formats.names()
    rows = [["preset", *columns], ["---"] * (len(columns) + 1)]
    for name in fp4.recipes.names():
        compared = fp4.recipes.compared(name)
        rows.append([f"`{name}`", *(compared.get(c, "") for c in columns)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _values(name: str) -> tuple[str, str]:
    """(what a field decides, its values): a value with its own meaning where MEANING gives one for each."""
    text, _, rest = MEANING[name].partition(": ")
    parts = rest.split(" | ")
    if name not in CHOICES:
        return MEANING[name], ""
    if len(parts) != len(CHOICES[name]):
        return MEANING[name], ", ".join(f"`{v}`" for v in CHOICES[name])
    return text, "; ".join(f"`{v}`: {part}" for v, part in zip(CHOICES[name], parts, strict=True))


def field_table() -> str:
    """Field, default, values, what it decides."""
    rows = [["field", "default", "decides", "values"], ["---"] * 4]
    for f in fields(fp4.Recipe):
        default = f"{f.default:g}" if isinstance(f.default, float) else str(f.default)
        rows.append([f"`{f.name}`", f"`{default}`", *_values(f.name)])
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|').replace('``', '`') for cell in row)} |\n" for row in rows)


def page(text: str) -> str:
    """The page with its tables made anew."""
    for name, made in (("presets", table()), ("fields", field_table())):
        start = START.format(name)
        before, rest = text.split(start)
        text = before + start + made + END + rest.split(END, 1)[1]
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
