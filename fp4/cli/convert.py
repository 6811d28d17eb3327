"""``fp4 convert IN OUT --to DIALECT``: the progress bar and the report around ``fp4.checkpoint.convert``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp4.cli.table import count, progress, table

__all__ = ["render", "run"]


def run(
    source: Path, target: Path, to: str, format: str | None, lossy: bool, opening: Mapping[str, Any], quiet: bool
) -> tuple[dict[str, Any], str]:
    """(the report, the sentence of a refusal or ""). Nothing is left at ``target`` when it fails."""
    import fp4
    from fp4.checkpoint.convert import ConversionRefused, convert_checkpoint

    with fp4.open_checkpoint(source, **opening) as ck, progress("convert", len(ck), quiet) as step:

        def show(done: int, total: int, name: str) -> None:
            step(done * len(ck) // max(total, 1), name)

        try:
            report = convert_checkpoint(ck, target, to, format=format, lossy=lossy, progress=show)
        except ConversionRefused as error:
            return error.report.to_dict(), str(error)
    return report.to_dict(), ""


def render(report: dict[str, Any], refused: bool) -> str:
    """Rows of what is not bit-exact, up to 20, then one line of counts and one of what was written."""
    rows = [t for t in report["tensors"] if t["exactness"] != "bit-exact"]
    rows.sort(key=lambda t: t["exactness"] != "refused")
    lines = []
    if rows:
        cells = [(t["name"], t["exactness"], t["source"], t["target"], _what(t)) for t in rows[:20]]
        lines.append(table(("tensor", "exactness", "from", "to", "what"), cells))
        if len(rows) > 20:
            lines.append(f"... and {len(rows) - 20} more; --json lists all")
    counts = ", ".join(f"{n} {kind}" for kind, n in report["counts"].items() if n)
    lines.append(f"{report['source_dialect']} to {report['dialect']}: {counts}")
    if not refused:
        lines.append(f"{report['path']}: {report['bytes_out']:,} bytes written in {count(len(report['files']), 'file')}")
    return "\n".join([*lines, *(f"note: {text}" for text in report["notes"])])


def _what(t: dict[str, Any]) -> str:
    if t["reason"]:
        return str(t["reason"])
    parts = [f"{t['lost']} elements changed"] if t["lost"] else []
    parts += [f"scale by {t['scale_change']:.2g}"] if t["scale_change"] else []
    parts += [f"activation scale by {t['input_change']:.2g}"] if t["input_change"] else []
    return ", ".join(parts) or "equal values in other bytes"
