"""Problem: everything that a backend may look at when it says whether it can serve a layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import torch

from fp4 import check, formats
from fp4.formats import Format
from fp4.gpu.device import Device
from fp4.tensor import GATE_UP_ORDERS

__all__ = ["ACTS", "OPS", "SCALES", "Problem"]

OPS = ("matmul", "moe")
#: what may happen to the activations: the backend's choice | stay 16 or 32 bit | be quantised to that format before the product
ACTS = ("any", "keep", "nvfp4", "mxfp4", "mxfp8", "fp8")
#: second-level scales: absent | one a tensor | one an expert | gate and up differ by powers of two that fold | they differ
SCALES = ("none", "tensor", "expert", "gate_up_foldable", "gate_up")

#: dtypes of x and of the result
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Problem:
    """One layer on one device. ``None`` for a size means "not known yet" (``explain`` without sizes): do not refuse for it.

    matmul: ``y[m, n] = x[m, k] @ W[n, k]^T + bias[n]``.
    moe:    ``W13 [experts, 2 * intermediate (or intermediate when not gated), hidden]``, ``W2 [experts, hidden, intermediate]``.

    ``experts`` counts the experts that top-k ids speak of; ``local`` is the range [start, stop) whose weights are here, so
    ``stop - start`` is the leading size of every array and ids outside it contribute zero.
    ``global_scales`` is one of SCALES and speaks of w13 and w2 together: "gate_up" means that the gate and up rows of an expert have
    different global scales (``Weights.gate_up_scale``); "gate_up_foldable" the same, but ``fp4.fuse.fold_gate_up`` makes them one
    exactly. A kernel with one alpha an expert must refuse "gate_up".
    """

    op: str
    format: Format
    device: Device
    act: str = "any"
    act_dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None
    bias: bool = False
    # matmul
    n: int | None = None
    k: int | None = None
    # moe
    experts: int | None = None
    local: tuple[int, int] | None = None
    hidden: int | None = None
    intermediate: int | None = None
    topk: int | None = None
    activation: Any = None
    gate_up: str | None = None
    global_scales: str = "none"
    #: the weight carries a calibrated input_scale
    input_scale: bool = False
    #: this shard of a tensor-parallel layer, (rank, size)
    tp: tuple[int, int] = (0, 1)
    #: ranks that share the experts, (rank, size)
    ep: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", formats.get(self.format))
        for what, value, known in (("op", self.op, OPS), ("act", self.act, ACTS), ("global_scales", self.global_scales, SCALES)):
            check.choice("problem", what, value, known)
        for what, dtype in (("act_dtype", self.act_dtype), ("out_dtype", self.out_dtype)):
            check.float_dtype("problem", what, dtype, optional=what == "out_dtype")
        for what in ("tp", "ep"):
            object.__setattr__(self, what, check.share("problem", what, getattr(self, what)))
        check.choice("problem", "gate_up", self.gate_up, GATE_UP_ORDERS, optional=True)

    @property
    def local_experts(self) -> int | None:
        """Number of experts whose weights are here."""
        return self.experts if self.local is None else self.local[1] - self.local[0]

    def __str__(self) -> str:
        sizes = {"n": self.n, "k": self.k, "experts": self.experts, "hidden": self.hidden, "intermediate": self.intermediate}
        text = " ".join(f"{name}={value}" for name, value in sizes.items() if value is not None)
        return f"{self.op}/{self.format} on {self.device}" + (f" {text}" if text else "")

    def to_json(self) -> dict[str, Any]:
        """Plain values that ``from_json`` reads back."""
        out: dict[str, Any] = {f: getattr(self, f) for f in self.__dataclass_fields__}
        out["format"] = self.format.name
        out["device"] = self.device.to_json()
        for name in ("act_dtype", "out_dtype"):
            out[name] = None if out[name] is None else str(out[name]).removeprefix("torch.")
        if is_dataclass(self.activation) and not isinstance(self.activation, type):
            out["activation"] = {"class": type(self.activation).__name__, **asdict(self.activation)}
        return out

    @staticmethod
    def from_json(d: dict[str, Any]) -> Problem:
        """What ``to_json`` gave."""
        d = dict(d)
        d["device"] = Device.from_json(d["device"])
        for name in ("act_dtype", "out_dtype"):
            d[name] = None if d[name] is None else getattr(torch, d[name])
        for name in ("local", "tp", "ep"):
            d[name] = None if d[name] is None else tuple(d[name])
        if isinstance(d["activation"], dict):
            import fp4.ref.activation as activations

            fields = dict(d["activation"])
            known = {cls.__name__: cls for cls in (activations.SwiGLU, activations.SiLU, activations.SiTU, activations.ReLU2)}
            d["activation"] = known[fields.pop("class")](**fields)
        return Problem(**d)
