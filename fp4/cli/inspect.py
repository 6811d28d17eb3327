"""``fp4 inspect``: a checkpoint's summary and one line a tensor, with suspicious signs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fp4.cli.table import number, table

__all__ = ["collect", "render"]


def collect(path: Path, opening: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The checkpoint's summary plus ``tensors``, one dictionary each. Scales are read, codes are not. ``opening``: for open_checkpoint."""
    import fp4
    from fp4.checkpoint import inspect as reader
    from fp4.checkpoint.base import CheckpointWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)  # the report has them
        with fp4.open_checkpoint(path, **opening) as ck:
            reports = reader.inspect(ck)
            return {**reader.summary(ck, reports), "tensors": [r.to_dict() for r in reports]}


def _range(value: Sequence[float] | None) -> str:
    if not value:
        return "-"
    low, high = number(float(value[0])), number(float(value[-1]))
    return low if low == high else f"{low} .. {high}"


def _activations(t: Mapping[str, Any]) -> str:
    """How the checkpoint wants x: the format, and its calibrated scale where the file has one; "-" where it asks for nothing."""
    kind = t["act"] or t["activations"]
    if t["input_scale"] is not None:
        return f"{kind} scale {_range(t['input_scale'])}"
    return "nvfp4, no scale" if kind == "nvfp4" else kind or "-"  # NVFP4 alone has a scale that calibration finds


def render(report: dict[str, Any]) -> str:
    lines = [f"{report['path']}: {report['dialect']} ({report['reason']})", ""]
    totals = [(name, t["tensors"], t["elements"], t["bytes"]) for name, t in report["formats"].items()]
    lines += [table(("format", "tensors", "elements", "bytes"), totals), ""]
    head = ["tensor", "format", "shape", "block scales", "global scale", "activations", "gate/up", "beside the codes"]
    rows = []
    for t in report["tensors"]:
        scales = "-" if t["scale_min"] is None else _range((t["scale_min"], t["scale_max"]))
        kept = [t["name"], t["format"], "x".join(map(str, t["shape"])), scales, _range(t["global_scale"])]
        beside = ", ".join(part for part in ("pre_quant_scale", "lora_a", "lora_b") if part in t["parts"])
        rows.append([*kept, _activations(t), t["gate_up"] or "-", beside or "-"])
    used = [i for i in range(len(head)) if i < 5 or any(row[i] != "-" for row in rows)]
    lines += [table([head[i] for i in used], [[row[i] for i in used] for row in rows])]
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
