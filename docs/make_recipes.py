"""Write the table of ``docs/recipes.md`` from ``fp4.recipes``: ``python docs/make_recipes.py``. A test checks that it is current."""

from __future__ import annotations

from pathlib import Path

import fp4
from fp4 import formats

PAGE = Path(__file__).with_name("recipes.md")
START, END = "<!-- made by docs/make_recipes.py -->\n", "<!-- end -->\n"


def table() -> str:
    """Preset by format, what was compared."""
    columns = formats.names()
    rows = [["preset", *columns], ["---"] * (len(columns) + 1)]
    for name in fp4.recipes.names():
        compared = fp4.recipes.compared(name)
        rows.append([f"`{name}`", *(compared.get(c, "") for c in columns)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def page(text: str) -> str:
    """The page with its table made anew."""
    before, rest = text.split(START)
    return before + START + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
