"""``fp4 inspect``: a checkpoint's summary and one line a tensor, with suspicious signs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp4.cli.table import number, table

__all__ = ["collect", "render"]


def collect(path: Path, trust: str) -> dict[str, Any]:
    """The checkpoint's summary plus ``tensors``, one dictionary each. Scales are read, codes are not."""
    import fp4
    from fp4.checkpoint import inspect as reader

    with fp4.open_checkpoint(path, trust=trust) as ck:
        reports = reader.inspect(ck)
        return {**reader.summary(ck, reports), "tensors": [r.to_dict() for r in reports]}


def _range(value: Sequence[float] | None) -> str:
    if not value:
        return "-"
    low, high = number(float(value[0])), number(float(value[-1]))
    return low if low == high else f"{low} .. {high}"


def render(report: dict[str, Any]) -> str:
    lines = [f"{report['path']}: {report['dialect']} ({report['reason']})", ""]
    totals = [(name, t["tensors"], t["elements"], t["bytes"]) for name, t in report["formats"].items()]
    lines += [table(("format", "tensors", "elements", "bytes"), totals), ""]
    rows = []
    for t in report["tensors"]:
        scales = "-" if t["scale_min"] is None else _range((t["scale_min"], t["scale_max"]))
        rows.append((t["name"], t["format"], "x".join(map(str, t["shape"])), scales, _range(t["global_scale"]), t["gate_up"] or "-"))
    lines += [table(("tensor", "format", "shape", "block scales", "global scale", "gate/up"), rows)]
    kv = report["kv_cache"]
    if kv["config"] or kv["scales"]:
        dtype = (kv["config"] or {}).get("dtype", "not in the config")
        lines += ["", f"key/value cache: {dtype}, scales of {len(kv['scales'])} attention modules"]
    lines += [f"note: {text}" for text in report["notes"]]
    lines += [f"warning: {text}" for text in report["warnings"]]
    noted = [(t["name"], text) for t in report["tensors"] for text in t["notes"]]
    if noted:
        more = "" if len(noted) == 1 else f"; {len(noted)} tensors have such a note (--json lists them)"
        lines += [f"note: {noted[0][0]}: {noted[0][1]}{more}"]
    signs = [(t["name"], s) for t in report["tensors"] for s in t["signs"]]
    lines += ["", f"suspicious signs: {len(signs)}", *(f"  {name}: {sign}" for name, sign in signs)]
    return "\n".join(lines)
