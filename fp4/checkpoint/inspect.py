"""What a checkpoint holds, tensor by tensor, with the signs of a damaged or misread one. Reads scales, never codes."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from fp4.checkpoint.base import Checkpoint
from fp4.checkpoint.record import Reader, Record, multiplier
from fp4.errors import CheckpointError

__all__ = ["TensorReport", "inspect", "summary"]

_PAIR = re.compile(r"^(?P<head>.*\.)(?P<which>gate_proj|up_proj|w1|w3)(?P<tail>\.weight)$")
_PARTNER = {"up_proj": "gate_proj", "w3": "w1"}
#: dialects whose producers give gate and up of a layer one second-level scale, because their loaders keep one for both
_UNIFIES = frozenset({"modelopt", "compressed-tensors"})


@dataclass
class TensorReport:
    """One tensor: ``shape`` as the unquantised model holds it, scale statistics as values, ``signs`` of trouble in words."""

    name: str
    #: "nvfp4", "mxfp4", ..., "fp8", or the stored dtype of a tensor that is not quantised
    format: str
    shape: list[int]
    quantized: bool
    file: str
    nbytes: int
    bits_per_element: float
    parts: dict[str, str] = field(default_factory=dict)
    scale_min: float | None = None
    scale_max: float | None = None
    scale_mean: float | None = None
    #: number of different scale bytes
    scale_distinct: int | None = None
    #: multipliers, smallest and largest over experts
    global_scale: list[float] | None = None
    global_direction: str | None = None
    input_scale: list[float] | None = None
    gate_up: str | None = None
    #: "static" (its scale is in the file), "dynamic", or None where the file does not say
    activations: str | None = None
    #: format that the config wants activations in
    act: str | None = None
    signs: list[str] = field(default_factory=list)
    #: what is worth knowing and no trouble
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON can hold."""
        return asdict(self)


def inspect(ck: Checkpoint) -> list[TensorReport]:
    """A TensorReport for each name of ``ck``. Never raises for suspicious values: it lists them in ``signs``."""
    reports = [_one(ck, ck.record(name)) for name in ck]
    _compare_pairs({r.name: r for r in reports}, ck.dialect)
    return reports


def summary(ck: Checkpoint, reports: list[TensorReport] | None = None) -> dict[str, Any]:
    """Totals of a checkpoint, JSON-ready: dialect, reason, counts and bytes by format, warnings, cache scales, pattern matches."""
    reports = inspect(ck) if reports is None else reports
    formats: dict[str, dict[str, int]] = {}
    for r in reports:
        total = formats.setdefault(r.format, {"tensors": 0, "elements": 0, "bytes": 0})
        elements = 1
        for n in r.shape:
            elements *= n
        total["tensors"] += 1
        total["elements"] += elements
        total["bytes"] += r.nbytes
    kv: dict[str, Any] = {}
    for module, parts in ck._kv.items():
        kv[module] = {role: ck.store.tensor(name).float().flatten().tolist() for role, name in parts.items()}
    config = ck.kv_config
    return {
        "path": str(ck.path),
        "dialect": ck.dialect,
        "reason": ck.reason,
        "files": {name: f.size for name, f in ck.store.files.items()},
        "formats": formats,
        "kv_cache": {"config": {"dtype": config.dtype, "static": config.static} if config else None, "scales": kv},
        "patterns": ck.patterns,
        "warnings": list(ck.warnings),
        "notes": list(ck.notes),
        "suspicious": sum(bool(r.signs) for r in reports),
    }


def _one(ck: Checkpoint, record: Record) -> TensorReport:
    store = ck.store
    nbytes = sum(store.entries[p].nbytes for p in record.parts.values())
    elements = 1
    for n in record.shape:
        elements *= n
    first = next(iter(record.parts.values()))
    label = record.format.name if record.format else "fp8" if record.kind == "fp8" else store.entries[first].dtype.lower()
    report = TensorReport(
        name=record.name,
        format=label,
        shape=list(record.shape),
        quantized=record.kind != "plain",
        file=store.file_of(first),
        nbytes=nbytes,
        bits_per_element=round(8 * nbytes / elements, 4) if elements else 0.0,
        parts=dict(record.parts),
        gate_up=record.gate_up,
        activations=record.activations,
        act=record.act,
    )
    if record.kind == "block":
        _block(ck, record, report)
    elif record.kind == "fp8":
        value = store.tensor(record.parts["scale"])
        _statistics(report, (value.view(torch.float8_e8m0fnu) if value.dtype == torch.uint8 else value).float())
    return report


def _statistics(report: TensorReport, value: torch.Tensor) -> None:
    finite = value[torch.isfinite(value)]
    if finite.numel():
        report.scale_min, report.scale_max, report.scale_mean = (float(f(finite)) for f in (torch.min, torch.max, torch.mean))
    if finite.numel() < value.numel():
        report.signs.append(f"{value.numel() - finite.numel()} scales are not finite")
    if bool((value < 0).any()):
        report.signs.append(f"{int((value < 0).sum())} scales are negative")


def _block(ck: Checkpoint, record: Record, report: TensorReport) -> None:
    assert record.format is not None
    kind = record.format.scale
    scale = Reader(ck.store, record, lambda text: None, True).stored_scale()
    counts = torch.bincount(scale.reshape(-1).to(torch.int64), minlength=256) if scale.numel() else scale.new_zeros(256, dtype=torch.int64)
    values = torch.from_numpy(kind.values.copy()).double()
    used = (counts > 0) & ~values.isnan()
    if bool(used.any()):
        report.scale_min, report.scale_max = float(values[used].min()), float(values[used].max())
        report.scale_mean = float((values[used] * counts[used]).sum() / counts[used].sum())
    report.scale_distinct = int((counts > 0).sum())
    nan = int(counts[values.isnan()].sum())
    if nan:
        index = [int(i) for i in (values.isnan()[scale.to(torch.int64)]).nonzero()[0]]
        report.signs.append(f"{nan} scale bytes are NaN, the first at {index}")
    negative = int(counts[128:].sum() - counts[255]) if kind.signed else 0
    if negative:
        report.signs.append(f"{negative} block scales are negative")
    if scale.numel() >= 16 and report.scale_distinct == 1:
        report.signs.append(f"all {scale.numel()} block scales are the same byte 0x{int(counts.argmax()):02X}")
    if not nan and not int(counts[1:].sum()) and scale.numel():
        report.signs.append("all block scales are byte 0")
    _second_level(ck, record, report)


def _second_level(ck: Checkpoint, record: Record, report: TensorReport) -> None:
    for role in ("global", "input"):
        if role not in record.parts:
            continue
        try:
            value = multiplier(ck.store, record, role)
        except CheckpointError as error:
            report.signs.append(str(error))
            continue
        assert value is not None
        low, high = float(value.min()), float(value.max())
        if role == "input":
            report.input_scale = [low, high]
            if low <= 0:
                report.signs.append(f"activation scale is {low:g}; 1 / scale is infinite")
            continue
        report.global_scale, report.global_direction = [low, high], str(record.global_rule)
        if low == 0:
            report.signs.append("second-level scale is 0; the tensor is read as zero")
        if high > 1e2 or 0 < low < 1e-9:
            worst = high if high > 1e2 else low
            report.signs.append(f"second-level scale gives the factor {worst:g}, outside 1e-9 to 100: it looks like its own reciprocal")
        if value.ndim and record.gate_up and value.numel() == 2 * record.logical[0] and not bool((value[::2] == value[1::2]).all()):
            report.signs.append("gate and up have different second-level scales")


def _compare_pairs(reports: dict[str, TensorReport], dialect: str) -> None:
    """Gate and up of one layer with different second-level scales: a sign of trouble where the producer makes them equal and the loaders
    keep one for both; a note where each tensor has its own (torchao, fouroversix)."""
    for name, report in reports.items():
        match = _PAIR.match(name)
        if match is None or match["which"] not in _PARTNER or report.global_scale is None:
            continue
        other = reports.get(f"{match['head']}{_PARTNER[match['which']]}{match['tail']}")
        if other is None or other.global_scale is None or other.global_scale == report.global_scale:
            continue
        a, b = other.global_scale[0], report.global_scale[0]
        text = f"gate and up have different second-level scales ({a:g} and {b:g})"
        for each in (report, other):
            if dialect in _UNIFIES:
                each.signs.append(text)
            else:
                each.notes.append(f"{text}, as {dialect} writes them: keep both when the two are joined")
