"""Weights of a grouped (mixture of experts) product as the kernels read them: storage, exactness windows, prepare and restore.

``fp4.gpu.kernels.grouped_run`` runs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fp4.errors import FormatMismatch, Unsupported
from fp4.gpu import storage
from fp4.gpu.kernels import frag
from fp4.gpu.storage import Stored
from fp4.ref import activation as activations
from fp4.tensor import QuantizedTensor

__all__ = ["ACTS", "Grouped", "from_arrays", "layouts", "prepare", "restore", "supports", "used_byte", "windows"]

ACTS = {"relu2": 0, "swiglu": 1, "silu": 2, "situ": 3}
#: row order of a gated first matrix: eight gate rows, their eight up rows, and so on; the bias follows its rows
_ROWS, _BIAS_ROWS = "deepgemm_gate_up", Stored("deepgemm_gate_up", order="gate_up")


def supports(*, format: str, hidden: int | None, intermediate: int | None, activation: Any, capability: tuple[int, int]) -> str | None:
    """None when these kernels can serve the layer, else the reason. ``capability`` is (major, minor) of the device."""
    if format not in ("nvfp4", "mxfp4"):
        return f"reads nvfp4 and mxfp4 weights, got {format}"
    if capability < (8, 0):
        return f"needs SM80 or newer for 16-bit tensor cores, got SM{capability[0]}{capability[1]}"
    block = 16 if format == "nvfp4" else 32
    for what, value in (("hidden", hidden), ("intermediate", intermediate)):
        if value is not None and (value % block or value <= 0):
            return f"{what} = {value} is not a positive multiple of {block}"
    if activation is not None and getattr(activation, "name", activation) not in (*ACTS, "swiglu_oai"):
        return f"has no activation {activation!r}"
    return None


def layouts(block: int, gated: bool, hidden: int, inter: int, fill: tuple[int, int] = (0, 0)) -> dict[str, Stored]:
    """Storage of the four arrays. A gated first matrix alternates eight gate rows and their eight up rows.

    fill: scale bytes (w13, w2) that pad MXFP4 scale columns, one that the layer uses, so that padding widens no exponent window.
    """
    rows = f"{_ROWS} >> " if gated else ""
    order = "gate_up" if gated else None
    codes, scale = frag.CODES_LAYOUT, frag.SCALE_LAYOUT[block]
    n13 = inter * (2 if gated else 1)
    pad = [None, None] if block == 16 else [(n13, -(-hidden // 256) * 8), (hidden, -(-inter // 256) * 8)]
    return {
        "w13.codes": Stored(rows + codes, order=order),
        "w13.scale": Stored(rows + scale, order=order, shape=pad[0], fill=fill[0]),
        "w2.codes": Stored(codes),
        "w2.scale": Stored(scale, shape=pad[1], fill=fill[1]),
    }


def used_byte(scale: torch.Tensor) -> int:
    """A raw ue8m0 byte that occurs in ``scale``, the largest but NaN; 127 when there is none. One host read."""
    numbers = torch.where(scale == 0xFF, torch.zeros_like(scale), scale)
    return int(numbers.max()) if scale.numel() else 127


@dataclass(eq=False)
class Grouped:
    """Weights of the local experts as the kernels read them.

    w13, s13, w2, s2: bytes as ``layouts`` says, one leading entry an expert; alpha13, alpha2: f32 [experts, 2] per activation dtype, global
    scales (gate, up) times the power of two that the decode leaves over; bias13 f32 [experts, n] in stored row order, bias2 f32.
    total: experts that ids speak of, here or elsewhere (0: those that are here).
    """

    block: int
    experts: int
    first: int
    hidden: int
    inter: int
    act: Any
    w13: torch.Tensor
    s13: torch.Tensor
    w2: torch.Tensor
    s2: torch.Tensor
    bias13: torch.Tensor | None
    bias2: torch.Tensor | None
    windows: dict[torch.dtype, Any]
    total: int = 0
    logical: dict[str, Any] = field(default_factory=dict)
    calls: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.total = self.total or self.experts

    @property
    def n13(self) -> int:
        return self.inter * (2 if self.act.gated else 1)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.w13, self.s13, self.w2, self.s2, self.bias13, self.bias2) if t is not None)


def _alpha(scale: torch.Tensor | None, factor: float, experts: int, device: torch.device) -> torch.Tensor:
    """f32 [] | [experts] | [experts, 2] -> f32 [experts, 2] times a power of two."""
    g = torch.ones((), dtype=torch.float32, device=device) if scale is None else scale.to(device=device, dtype=torch.float32)
    if g.ndim < 2:
        g = g.reshape(-1, 1)
    return (g.expand(experts, 2) * factor).contiguous()


def windows(arrays: Mapping[str, torch.Tensor], block: int) -> dict[torch.dtype, Any]:
    """Activation dtype -> how the scale bytes of w13 and w2 are decoded for it, or the Unsupported that says why not."""
    found: dict[torch.dtype, Any] = {}
    for dtype in (torch.bfloat16, torch.float16):
        try:
            found[dtype] = tuple(frag.scale_window(arrays[f"{n}.scale"], block, dtype == torch.float16) for n in ("w13", "w2"))
        except Unsupported as e:
            found[dtype] = e
    return found


def from_arrays(
    arrays: Mapping[str, torch.Tensor],
    *,
    block: int,
    first: int,
    hidden: int,
    intermediate: int,
    activation: Any,
    gate_up: str | None,
    total: int = 0,
) -> Grouped:
    """The kernels' view of prepared arrays: names of ``PreparedMoE.arrays``, bytes as ``layouts``, bias13 in ``gate_up`` order.

    A dtype whose products would not be exact is refused when it is used.
    """
    act = activations.get(activation)
    w13, w2 = arrays["w13.codes"], arrays["w2.codes"]
    experts, device = w13.shape[0], w13.device
    found: dict[torch.dtype, Any] = {}
    for dtype, pair in windows(arrays, block).items():
        if isinstance(pair, Unsupported):
            found[dtype] = pair
            continue
        alphas = [_alpha(arrays.get(f"{n}.global_scale"), p.alpha, experts, device) for n, p in zip(("w13", "w2"), pair, strict=True)]
        found[dtype] = tuple((a, p.oc, p.any_byte) for a, p in zip(alphas, pair, strict=True))
    bias13, bias2 = arrays.get("bias13"), arrays.get("bias2")
    if bias13 is not None:
        bias13 = bias13.to(torch.float32).contiguous()
        if act.gated:  # the rows' own order
            raw = bias13.view(torch.uint8).reshape(experts, -1, 4)
            bias13 = storage.apply(raw, _BIAS_ROWS, gate_up).view(torch.float32).reshape(experts, -1)
    if bias2 is not None:
        bias2 = bias2.to(torch.float32).contiguous()
    parts = w13, arrays["w13.scale"], w2, arrays["w2.scale"]
    return Grouped(block, experts, first, hidden, intermediate, act, *parts, bias13, bias2, found, total)


def prepare(
    w13: QuantizedTensor,
    w2: QuantizedTensor,
    *,
    gate_up: str | None,
    activation: Any,
    bias13: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    gate_up_scale: torch.Tensor | None = None,
    first: int = 0,
    total: int = 0,
) -> Grouped:
    """w13 [experts, 2i (or i), h], w2 [experts, h, i], rows and bias13 in ``gate_up`` order -> Grouped, on the weights' device.

    gate_up_scale: f32 [experts, 2] (gate, up), instead of w13.global_scale. first: global id of expert 0 here; total:
    experts that ids speak of (0: those given).
    Raises FormatMismatch or Unsupported before anything is written.
    """
    act = activations.get(activation)
    hidden, inter, block = w13.k, w2.k, w13.format.block
    why = supports(format=w13.format.name, hidden=hidden, intermediate=inter, activation=act, capability=(8, 0))
    if why is not None or w2.format != w13.format:
        raise Unsupported("grouped", {"grouped": why or f"w13 is {w13.format} and w2 is {w2.format}"})
    rows = inter * (2 if act.gated else 1)
    if tuple(w13.codes.shape[:2]) != (w2.codes.shape[0], rows) or w2.codes.shape[1] != hidden:
        raise FormatMismatch(f"grouped: w13 is {list(w13.shape)}, w2 is {list(w2.shape)}; need [e, {rows}, h] and [e, h, {inter}]")
    order = (gate_up or w13.gate_up) if act.gated else None
    if act.gated and order is None:
        raise FormatMismatch("grouped: the row order of w13 is not known; pass gate_up")
    fill = (0, 0) if block == 16 else (used_byte(w13.scale), used_byte(w2.scale))
    stored = layouts(block, act.gated, hidden, inter, fill)
    arrays: dict[str, torch.Tensor] = {}
    for name, q in (("w13", w13), ("w2", w2)):
        for part in ("codes", "scale"):
            arrays[f"{name}.{part}"] = storage.apply(getattr(q, part), stored[f"{name}.{part}"], order if name == "w13" else None)
        if q.global_scale is not None:
            arrays[f"{name}.global_scale"] = q.global_scale
    if gate_up_scale is not None:
        arrays["w13.global_scale"] = gate_up_scale
    if bias13 is not None:
        arrays["bias13"] = bias13
    if bias2 is not None:
        arrays["bias2"] = bias2
    sizes = {"first": first, "total": total, "hidden": hidden, "intermediate": inter}
    g = from_arrays(arrays, block=block, activation=act, gate_up=order, **sizes)
    g.logical = {
        n: (q.format, tuple(q.codes.shape), tuple(q.scale.shape), q.global_scale, q.gate_up) for n, q in (("w13", w13), ("w2", w2))
    }
    g.logical["order"] = order
    return g


def restore(g: Grouped) -> tuple[QuantizedTensor, QuantizedTensor]:
    """(w13, w2) as ``prepare`` got them, bit for bit."""
    stored, out = layouts(g.block, g.act.gated, g.hidden, g.inter), []
    for name, codes, scale in (("w13", g.w13, g.s13), ("w2", g.w2, g.s2)):
        fmt, cs, ss, second, gate_up = g.logical[name]
        order = g.logical["order"] if name == "w13" else None
        c = storage.invert(codes, stored[f"{name}.codes"], cs, order)
        s = storage.invert(scale, stored[f"{name}.scale"], ss, order)
        out.append(QuantizedTensor(fmt, c, s, second, gate_up=gate_up))
    return out[0], out[1]
