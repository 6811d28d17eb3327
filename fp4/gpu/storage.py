"""Stored: how one array of a prepared weight lies in memory, as data, and the two verbs that follow from it.

A backend says ``{"codes": Stored("hopper_value_v3", ...), "scale": Stored("hopper_sf_w8", ...)}`` and owns no packing code: ``apply``
and ``invert`` are derived from the layout catalogue, one expert at a time, so that memory grows by the output and one expert.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fp4.errors import LayoutError, Unsupported
from fp4.tensor import GATE_UP_ORDERS

__all__ = ["PLAIN", "Stored", "apply", "invert", "nbytes", "owned", "reorder_bias", "reorder_gate_up", "shards"]


@dataclass(frozen=True)
class Stored:
    """From logical bytes ``u8 [(experts,) rows, cols]`` to stored bytes, in this order:

    1. ``order``: gate/up row order that the backend reads (one of GATE_UP_ORDERS; None: leave the rows alone);
    2. ``shape``: logical (rows, cols) to pad to with ``fill``; with an ``order`` of halves each half is padded on its own;
    3. ``encode``: names in ``fp4.encode``, value maps; one that loses bytes is refused, ``restore`` could not undo it;
    4. ``layout``: catalogue names joined with `` >> ``; "plain" is the identity;
       a layout whose padding differs between versions of a library takes it as a parameter, ``hopper_value_v3(pad_n=64)``.

    ``shape`` padding is zero codes (value 0 whatever the scale) and never reaches a result.
    """

    layout: str = "plain"
    order: str | None = None
    shape: tuple[int, int] | None = None
    encode: tuple[str, ...] = ()
    fill: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain values that ``from_json`` reads back."""
        return {f: getattr(self, f) for f in self.__dataclass_fields__}

    @staticmethod
    def from_json(d: dict[str, Any]) -> Stored:
        """What ``to_json`` gave."""
        return Stored(**{**d, "shape": None if d["shape"] is None else tuple(d["shape"]), "encode": tuple(d["encode"])})

    def __str__(self) -> str:
        steps = [f"rows {self.order}"] if self.order else []
        steps += [f"padded to {self.shape[0]} x {self.shape[1]}"] if self.shape else []
        return ", ".join([*steps, *self.encode, self.layout])


PLAIN = Stored()


#: catalogue name of each conversion of row order
_ORDERS = {
    ("gate_up", "interleaved"): "gate_up_pairs",
    ("up_gate", "interleaved"): "up_gate_pairs",
    ("interleaved", "gate_up"): "gate_up_halves",
    ("interleaved", "up_gate"): "up_gate_halves",
    ("gate_up", "up_gate"): "swap_halves",
    ("up_gate", "gate_up"): "swap_halves",
}


def reorder_gate_up(t: torch.Tensor, src: str, dst: str) -> torch.Tensor:
    """``t [..., 2i, c]`` with rows in order ``src`` -> order ``dst`` (GATE_UP_ORDERS). Its own inverse with the names exchanged."""
    for name in (src, dst):
        if name not in GATE_UP_ORDERS:
            raise LayoutError(f"gate/up order {name!r} is not known; need one of {', '.join(GATE_UP_ORDERS)}")
    if src == dst:
        return t
    if t.shape[-2] % 2:
        raise LayoutError(f"gate/up: {t.shape[-2]} rows cannot hold gate and up; need an even number")
    out: torch.Tensor = _chain(_ORDERS[src, dst]).apply(t.contiguous()).view(t.shape)
    return out


def reorder_bias(b: torch.Tensor, src: str, dst: str) -> torch.Tensor:
    """A bias ``[..., 2i]`` of any dtype from order ``src`` to ``dst``, like the rows that it belongs to."""
    if src == dst:
        return b
    out: torch.Tensor = _chain(_ORDERS[src, dst]).apply_rows(b)
    return out


def _resize(t: torch.Tensor, rows: int, cols: int, order: str | None, fill: int) -> torch.Tensor:
    """Pad or crop ``t [rows0, cols0]`` at the end of its rows (of each half for an order of halves) and columns."""
    if tuple(t.shape) == (rows, cols):
        return t
    if order in ("gate_up", "up_gate"):
        t, half = t.reshape(2, t.shape[0] // 2, t.shape[1]), rows // 2
        return F.pad(t, (0, cols - t.shape[2], 0, half - t.shape[1]), value=fill).flatten(0, 1)
    return F.pad(t, (0, cols - t.shape[1], 0, rows - t.shape[0]), value=fill)


@functools.lru_cache(maxsize=256)
def _chain(spec: str) -> Any:
    """The Layout (or chain) of a spec."""
    from fp4.layouts import parse

    return parse(spec)


def _encodes(names: tuple[str, ...], t: torch.Tensor, backward: bool = False) -> torch.Tensor:
    if not names:
        return t
    from fp4 import encode

    for name in reversed(names) if backward else names:
        step = encode.get(name)
        if not backward:
            if not step.lossless:
                why = f"{name} does not keep every scale byte, so restore could not give them back"
                raise Unsupported("prepare: a value map loses bytes", {name: why})
            t, factor = step.forward(t)
            if factor != 1.0:
                raise LayoutError(
                    f"prepare: encode {name!r} multiplies the scales by {factor:g}; the backend must fold it into its global scale"
                )
        elif step.inverse is None:
            raise LayoutError(f"restore: encode {name!r} has no inverse; keep the checkpoint tensor")
        else:
            t = step.inverse(encode.Encoded(t, 1.0))
    return t


def _one(t: torch.Tensor, s: Stored, order: str | None) -> torch.Tensor:
    if s.order is not None:
        t = reorder_gate_up(t, order or s.order, s.order)
    if s.shape is not None:
        t = _resize(t, *s.shape, s.order, s.fill)
    t = _encodes(s.encode, t)
    out: torch.Tensor = t if s.layout == "plain" else _chain(s.layout).apply(t.contiguous())
    return out


def owned(t: torch.Tensor) -> torch.Tensor:
    """``t``, contiguous, and a copy when it is a part of a larger storage: the local experts must not keep the others in memory, nor a
    pickle of them carry the others along."""
    t = t.contiguous()
    return t.clone() if t.untyped_storage().nbytes() > t.numel() * t.element_size() else t


def apply(t: torch.Tensor, s: Stored, order: str | None = None, device: torch.device | None = None) -> torch.Tensor:
    """``t u8 [(experts,) rows, cols]`` -> its stored bytes on ``device``, one leading entry an expert.

    ``order`` is the gate/up order of the rows of ``t``. The result is ``t`` itself where nothing had to change and ``t`` is no part of a
    larger tensor.
    """
    device = device or t.device
    if s == PLAIN or (s.layout == "plain" and not s.encode and s.shape in (None, tuple(t.shape[-2:])) and s.order in (None, order)):
        return owned(t.to(device))
    if t.ndim == 2:
        return _one(t.to(device), s, order).contiguous()
    out: torch.Tensor | None = None
    for e in range(t.shape[0]):
        one = _one(t[e].to(device), s, order)
        if out is None:
            out = one.new_empty((t.shape[0], *one.shape))
        out[e] = one
    if out is None:  # no local experts: the storage of one expert tells the shape
        one = _one(torch.zeros(t.shape[1:], dtype=t.dtype, device=device), s, order)
        out = one.new_empty((0, *one.shape))
    return out


def invert(t: torch.Tensor, s: Stored, shape: tuple[int, ...], order: str | None = None) -> torch.Tensor:
    """Stored bytes -> logical ``u8 [(experts,) rows, cols]`` of ``shape``, rows in gate/up order ``order``. Plain storage is a view."""
    if s.layout == "plain" and not s.encode and s.shape in (None, tuple(shape[-2:])) and s.order in (None, order):
        return t.view(shape)
    if len(shape) == 3:
        parts = [invert(t[e], s, shape[1:], order) for e in range(shape[0])]
        return torch.stack(parts) if parts else torch.empty(shape, dtype=torch.uint8, device=t.device)
    stored_as = s.shape or (shape[0], shape[1])
    if s.layout != "plain":
        t = _chain(s.layout).invert(t, shape=stored_as)
    t = _encodes(s.encode, t.reshape(stored_as), backward=True)
    t = _resize(t, shape[0], shape[1], s.order, s.fill)
    if s.order is not None:
        t = reorder_gate_up(t, s.order, order or s.order)
    return t.contiguous()


def nbytes(s: Stored, shape: tuple[int, ...]) -> int:
    """Stored bytes of a logical ``[(experts,) rows, cols]``."""
    one = s.shape or (shape[-2], shape[-1])
    return math.prod(shape[:-2]) * (math.prod(one) if s.layout == "plain" else int(_chain(s.layout).nbytes(one)))


def shards(s: Stored, shape: tuple[int, ...], dim: int, size: int) -> Any:
    """Where ``size`` equal shards along ``dim`` (0 rows, 1 columns) of one expert's logical ``shape`` lie in its stored bytes.

    A tuple of ``fp4.layout.ByteRange``, or a Reason (false) that says why stored bytes cannot be cut there: shard the logical tensor then,
    ``fp4.fuse.shard``, and prepare the shards.
    """
    from fp4.layout import Reason

    rows, cols = shape[-2:]
    if s.order is not None and dim == 0:
        return Reason(f"rows are stored as {s.order}: gate and up of one shard are not together")
    if s.shape not in (None, (rows, cols)):
        return Reason(f"{rows} x {cols} is padded to {s.shape[0]} x {s.shape[1]} before it is stored" if s.shape else "padded")
    if s.encode:
        return Reason(f"bytes are encoded by {', '.join(s.encode)}, which may look at the whole tensor")
    if ">>" in s.layout:
        return Reason(f"{s.layout} is a chain of row orders; a shard of it is no shard of the rows")
    return _chain(s.layout).shard(dim, size, (rows, cols))
