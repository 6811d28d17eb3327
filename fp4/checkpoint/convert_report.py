"""What a conversion did, or would have done, to each tensor."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from fp4.errors import CheckpointError

__all__ = ["ConversionRefused", "ConvertReport", "TensorReport"]


@dataclass
class TensorReport:
    """One tensor of the source. ``exactness``:

    "bit-exact": codes, block scales and the second level mean the same, bit for bit. "value-exact": other bytes, equal values.
    "rounded": the reciprocal of a second-level scale is not a float32; ``scale_change`` and ``input_change`` are the largest
    relative changes. "lossy": ``lost`` elements changed. "refused": ``reason`` says why it cannot be written.
    """

    name: str
    exactness: str
    source: str
    target: str
    scale_change: float = 0.0
    input_change: float = 0.0
    lost: int = 0
    reason: str = ""


@dataclass
class ConvertReport:
    """What was, or would have been, written."""

    path: str
    source_dialect: str
    dialect: str
    tensors: list[TensorReport] = field(default_factory=list)
    copied: int = 0
    files: list[str] = field(default_factory=list)
    bytes_out: int = 0
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def count(self, exactness: str) -> int:
        return sum(t.exactness == exactness for t in self.tensors)

    def to_dict(self) -> dict[str, Any]:
        counts = {k: self.count(k) for k in ("bit-exact", "value-exact", "rounded", "lossy", "refused")}
        return {**asdict(self), "counts": counts, "max_scale_change": max((t.scale_change for t in self.tensors), default=0.0)}


class ConversionRefused(CheckpointError):
    """The target cannot hold what the source means. Nothing was written; ``report`` has the reason of each tensor."""

    def __init__(self, message: str, report: ConvertReport) -> None:
        self.report = report
        super().__init__(message)
