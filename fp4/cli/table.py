"""Plain text tables, JSON and a progress bar. rich draws the bar when it is installed and stderr is a terminal; nothing needs it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["count", "dump", "number", "progress", "table"]


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], indent: str = "", right: Sequence[int] = ()) -> str:
    """Columns padded to equal width, numbers (and the columns ``right``) to the right. Floats get four significant digits."""
    cells = [[number(c) for c in row] for row in rows]
    to_right = [
        i in right or (bool(rows) and all(isinstance(row[i], (int, float)) or row[i] is None for row in rows)) for i in range(len(head))
    ]
    width = [max([len(h), *(len(row[i]) for row in cells)]) for i, h in enumerate(head)]

    def line(row: Sequence[str]) -> str:
        return indent + "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, width, to_right, strict=True)).rstrip()

    return "\n".join([line(list(head)), indent + "  ".join("-" * w for w in width), *(line(row) for row in cells)])


def count(n: int, what: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{n:,} {what}{'s' * (n != 1)}"


def number(value: Any) -> str:
    """A cell's text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def dump(value: Any) -> str:
    """JSON that every reader accepts: a NaN or infinite number becomes a string."""

    def clean(v: Any) -> Any:
        if isinstance(v, dict):
            return {str(k): clean(w) for k, w in v.items()}
        if isinstance(v, (list, tuple)):
            return [clean(w) for w in v]
        if isinstance(v, float) and not math.isfinite(v):
            return str(v)
        return v

    return json.dumps(clean(value), indent=2, default=str)


@contextmanager
def progress(label: str, total: int, quiet: bool = False) -> Iterator[Callable[[int, str], None]]:
    """Yields ``step(done, what)``: a bar on a terminal, about ten lines on a pipe, nothing when quiet; always on stderr."""
    if quiet:
        yield lambda done, what: None
        return
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        except ImportError:
            pass
        else:
            columns = (TextColumn(label), BarColumn(), TextColumn("{task.percentage:3.0f}% {task.description}"), TimeRemainingColumn())
            with Progress(*columns, console=Console(stderr=True)) as bar:
                task = bar.add_task("", total=max(total, 1))
                yield lambda done, what: bar.update(task, completed=done, description=what[-60:])
            return
    shown = -1

    def step(done: int, what: str) -> None:
        nonlocal shown
        tenth = 10 * done // max(total, 1)
        if tenth != shown:
            shown = tenth
            print(f"{label} {100 * done // max(total, 1):3d}% {what}", file=sys.stderr, flush=True)

    yield step
