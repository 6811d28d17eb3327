"""``fp4 verify A B``: do two checkpoints mean the same values?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

import fp4
from fp4.checkpoint.base import Checkpoint
from fp4.checkpoint.experts import apart
from fp4.cli.table import table
from fp4.errors import Fp4Error
from fp4.tensor import QuantizedTensor

__all__ = ["collect", "compare", "render"]


#: companions that make the effective weight more than codes and scales
_BRANCHES = {"pre_quant_scale", "lora_a", "lora_b"}


def _same_bytes(a: Any, b: Any) -> bool:
    if not isinstance(a, QuantizedTensor) or not isinstance(b, QuantizedTensor) or a.format != b.format or a.shape != b.shape:
        return False
    if a.axis % len(a.shape) != b.axis % len(b.shape) or not torch.equal(a.codes, b.codes) or not torch.equal(a.scale, b.scale):
        return False
    ga, gb = (torch.ones((), device=q.device) if q.global_scale is None else q.global_scale for q in (a, b))
    return bool((ga == gb).all())


def _activation_scales(a: Any, b: Any, tolerance: float) -> str | None:
    """What differs when both tensors carry a calibrated activation scale; a missing one is no difference."""
    if not isinstance(a, QuantizedTensor) or not isinstance(b, QuantizedTensor) or a.input_scale is None or b.input_scale is None:
        return None
    x, y = torch.broadcast_tensors(a.input_scale, b.input_scale)  # type: ignore[no-untyped-call]
    same, what = compare(x, y, tolerance)
    return None if same else f"input_scale: {what}"


def compare(x: torch.Tensor, y: torch.Tensor, tolerance: float) -> tuple[bool, str]:
    """(equal within tolerance, what differs): count of different values, the first index, the relative Frobenius error."""
    if x.shape != y.shape:
        return False, f"shape {list(x.shape)} and {list(y.shape)}"
    x, y = x.double(), y.double()
    # NaN equals NaN; -0 equals 0: the values are compared, not the bits
    unequal = ~((x == y) | (x.isnan() & y.isnan()))
    count = int(unequal.sum())
    if not count:
        return True, "equal values"
    finite = x.isfinite() & y.isfinite()
    norm = float(torch.where(finite, x, 0.0).norm())
    error = float(torch.where(finite, x - y, 0.0).norm()) / norm if norm else float("inf")
    if bool((unequal & ~finite).any()):
        error = float("inf")
    at = [int(i) for i in unequal.nonzero()[0]] if unequal.ndim else []
    where = f"{count} of {x.numel()} values differ, first at {at}: {float(x[tuple(at)]):.9g} and {float(y[tuple(at)]):.9g}"
    return error <= tolerance, f"{where}; relative error {error:.3g}"


def _taken_apart(stacked: Checkpoint, single: Checkpoint) -> dict[str, dict[str, tuple[int, slice]]]:
    """Stacked experts' tensor -> the tensors of single experts that the other checkpoint holds in its place."""
    out = {}
    for name in stacked.names():
        parts = {} if name in single else apart(stacked, name)
        if parts and all(part in single and part not in stacked for part in parts):
            out[name] = parts
    return out


def _compare_parts(
    stacked: Checkpoint, name: str, single: Checkpoint, parts: dict[str, tuple[int, slice]], tolerance: float, fold: bool
) -> tuple[bool, str]:
    """As ``compare``, of a stacked tensor with its parts; what differs names the first part that does."""
    q = stacked[name]
    whole = fp4.dequantize(q).movedim(q.axis, -1) if isinstance(q, QuantizedTensor) else q
    worst = "equal values"
    for part, (expert, rows) in parts.items():
        same, what = compare(whole[expert][rows], single.dequantize(part, fold=fold), tolerance)
        one = single[part]
        if same and isinstance(q, QuantizedTensor) and isinstance(one, QuantizedTensor) and None not in (q.input_scale, one.input_scale):
            x, y = q.input_scale, one.input_scale
            assert x is not None
            assert y is not None
            same, other = compare(x.expand(len(whole))[expert], y, tolerance)
            what = what if same else f"input_scale: {other}"
        if not same:
            return False, f"{part}: {what}"
        worst = worst if what.startswith("equal") else what
    return True, worst


def collect(a: Path, b: Path, tolerance: float, fold: bool = True, opening: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Compare every tensor of both; nothing is skipped in silence. Stacked experts are compared with single ones.

    ``opening``: for open_checkpoint, of both.
    ``fold``: compare the effective weights, smoothing vector and low-rank branch applied, as ``fp4 dequantize`` writes them.
    """
    if not 0 <= tolerance < math.inf:  # no error is within NaN, none outside infinity
        raise Fp4Error(f"verify: --tolerance is {tolerance:g}; need a finite number of 0 or more")
    rows: list[dict[str, Any]] = []
    with fp4.open_checkpoint(a, **opening) as left, fp4.open_checkpoint(b, **opening) as right:
        names = [*left.names(), *(n for n in right.names() if n not in left)]
        for stacked, single in ((left, right), (right, left)):
            for name, parts in _taken_apart(stacked, single).items():
                same, what = _compare_parts(stacked, name, single, parts, tolerance, fold)
                rows.append({"name": name, "same": same, "what": what})
                names = [n for n in names if n != name and n not in parts]
        for name in names:
            if name not in left or name not in right:
                rows.append({"name": name, "same": False, "missing": True, "what": f"only in {a if name in left else b}"})
                continue
            p, q = left[name], right[name]
            more = fold and any(_BRANCHES & set(ck.record(name).parts) for ck in (left, right))
            if not more and _same_bytes(p, q):
                same, what = True, "equal bytes"
            else:
                same, what = compare(left.dequantize(name, fold=fold), right.dequantize(name, fold=fold), tolerance)
            other = _activation_scales(p, q, tolerance) if same else None
            rows.append({"name": name, "same": same and other is None, "what": other or what})
        dialects = [left.dialect, right.dialect]
    different = sum(not r["same"] for r in rows)
    return {"a": str(a), "b": str(b), "dialects": dialects, "tolerance": tolerance, "tensors": rows, "different": different}


def render(report: dict[str, Any]) -> str:
    shown = [r for r in report["tensors"] if not r["same"]]
    total = len(report["tensors"])
    kinds: dict[str, int] = {}
    for r in report["tensors"]:
        if r["same"]:
            kind = r["what"] if r["what"].startswith("equal") else f"within {report['tolerance']:g}"
            kinds[kind] = kinds.get(kind, 0) + 1
    lines = [f"{report['a']} ({report['dialects'][0]}) against {report['b']} ({report['dialects'][1]})"]
    if shown:
        lines.append(table(("tensor", "difference"), [(r["name"], r["what"]) for r in shown]))
    agree = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none agree"
    missing = sum(r.get("missing", False) for r in shown)
    alone = f"; {missing} in one of the two only" if missing else ""
    lines.append(f"{total} tensors: {agree}; {report['different'] - missing} differ{alone}")
    return "\n".join(lines)
