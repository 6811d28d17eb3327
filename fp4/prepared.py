"""Prepared weights: one backend's bytes, with all that is needed to run them, to explain them and to undo them.

``fp4.prepare`` and ``fp4.prepare_moe`` make these objects; nothing else does. Array names are fixed, so that every backend and every
saved file speaks of the same things::

    Prepared     "codes" "scale" ["global_scale" "input_scale"]
    PreparedMoE  "w13.codes" "w13.scale" "w2.codes" "w2.scale" ["w13.global_scale" "w13.input_scale" "w2...." "bias13" "bias2"]

plus whatever a backend adds for itself (dotted under its own name). ``w13.global_scale`` is f32 [] or [experts], or [experts, 2]
(gate, up) when the two halves of an expert differ.
"""

from __future__ import annotations

import itertools
import os
import secrets
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from fp4 import check, formats
from fp4.errors import Fp4Error, LayoutMismatch
from fp4.formats import Format
from fp4.gpu import storage
from fp4.gpu.device import Device
from fp4.gpu.problem import Problem
from fp4.gpu.storage import Stored
from fp4.tensor import QuantizedTensor

__all__ = ["Packed", "Prepared", "PreparedMoE", "Weights", "load", "pack"]

_handles = itertools.count(1)
#: names this process in exported graphs
_PROCESS = secrets.randbits(30) | 1
#: name of a process that this one was forked from -> its first handle that is not a weight of this process too
_FORKED_FROM: dict[int, int] = {}
#: handle -> object, for the torch.library ops, which can carry an int but no object
_live: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def _forked() -> None:
    """In a forked child: parent and child count on from the same handle, and would both mean weights of their own by it."""
    global _PROCESS
    _FORKED_FROM[_PROCESS] = next(_handles)
    _PROCESS = secrets.randbits(30) | 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@dataclass(frozen=True)
class Weights:
    """What ``prepare`` hands to a backend: the logical tensors of one layer, local experts only.

    matmul: ``w [n, k]``. moe: ``w13 [experts, 2i, h]`` with rows in ``problem.gate_up`` order, ``w2 [experts, h, i]``,
    biases ``[experts, 2i]`` (same row order) and ``[experts, h]`` or None, and ``gate_up_scale`` f32 [experts, 2] (gate, up)
    when the halves have different global scales; ``w13.global_scale`` is None then.
    """

    w: QuantizedTensor | None = None
    w13: QuantizedTensor | None = None
    w2: QuantizedTensor | None = None
    bias13: torch.Tensor | None = None
    bias2: torch.Tensor | None = None
    gate_up_scale: torch.Tensor | None = None
    #: where the arrays must be; the tensors may still be elsewhere, ``storage.apply`` moves them expert by expert
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def named(self) -> dict[str, QuantizedTensor]:
        """prefix -> tensor: {"": w} or {"w13.": w13, "w2.": w2}."""
        pairs = {"": self.w, "w13.": self.w13, "w2.": self.w2}
        return {name: q for name, q in pairs.items() if q is not None}


@dataclass(frozen=True)
class Packed:
    """What a backend's ``prepare`` returns. ``layouts`` overrides the module's ``layouts(problem)`` when a probe decides a detail."""

    arrays: dict[str, torch.Tensor]
    layouts: dict[str, Stored] | None = None
    versions: dict[str, str] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    #: dtypes of x that these bytes serve, when the values narrow what ``supports`` promised
    act_dtypes: tuple[torch.dtype, ...] | None = None


def pack(problem: Problem, weights: Weights, layouts: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
    """The arrays that ``layouts`` describes, with global scales, input scales and biases as they are (float32)."""
    out: dict[str, torch.Tensor] = {}
    for prefix, q in weights.named().items():
        order = problem.gate_up if prefix == "w13." else None
        for part in ("codes", "scale"):
            out[prefix + part] = storage.apply(getattr(q, part), layouts[prefix + part], order, weights.device)
        for part in ("global_scale", "input_scale"):
            if getattr(q, part) is not None:
                out[prefix + part] = storage.owned(getattr(q, part).to(weights.device))
    if weights.gate_up_scale is not None:
        out["w13.global_scale"] = storage.owned(weights.gate_up_scale.to(weights.device))
    for name in ("bias13", "bias2"):
        b = getattr(weights, name)
        if b is not None:
            out[name] = storage.owned(b.to(weights.device))
    return out


@dataclass(frozen=True)
class _Logical:
    """What a QuantizedTensor carries beside its bytes."""

    format: Format
    shape: tuple[int, ...]
    axis: int
    codes: tuple[int, ...]
    scale: tuple[int, ...]
    gate_up: str | None
    recipe: Any

    @staticmethod
    def of(q: QuantizedTensor) -> _Logical:
        return _Logical(q.format, q.shape, q.axis, tuple(q.codes.shape), tuple(q.scale.shape), q.gate_up, q.recipe)

    def to_json(self) -> dict[str, Any]:
        name = None if self.recipe is None else getattr(self.recipe, "name", None) or str(self.recipe)
        return {**{f: getattr(self, f) for f in self.__dataclass_fields__}, "format": self.format.name, "recipe": name}

    @staticmethod
    def from_json(d: dict[str, Any]) -> _Logical:
        shapes = {n: tuple(d[n]) for n in ("shape", "codes", "scale")}
        return _Logical(**{**d, **shapes, "format": formats.get(d["format"])})


@dataclass(frozen=True, eq=False, repr=False)
class _Base:
    backend: str
    problem: Problem
    arrays: Mapping[str, torch.Tensor]
    layouts: Mapping[str, Stored]
    logical: Mapping[str, _Logical]
    versions: Mapping[str, str] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    #: why this backend: the ranking when the choice was made
    reasons: str = ""
    #: dtypes of x that ``run`` takes
    act_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    handle: int = field(init=False, default=0)
    device: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        for name in ("arrays", "layouts", "logical", "versions", "meta"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        object.__setattr__(self, "handle", next(_handles))
        object.__setattr__(self, "device", next(iter(self.arrays.values())).device)
        object.__setattr__(self, "_call", None)
        self._sizes()
        _live[self.handle] = self

    @property
    def format(self) -> Format:
        return self.problem.format

    @property
    def encodes(self) -> dict[str, tuple[str, ...]]:
        """Array name -> value maps that were applied."""
        return {name: s.encode for name, s in self.layouts.items() if s.encode}

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(t.numel() * t.element_size() for t in self.arrays.values())

    def bind(self) -> Callable[..., torch.Tensor]:
        """The backend's callable, made once. Raises LayoutMismatch when these bytes cannot run on this device."""
        call = getattr(self, "_call", None)
        if call is None:
            from fp4.gpu import registry

            here = Device.of(self.device) if self.problem.device.index is not None or self.problem.device.kind == "cpu" else None
            if here is not None and not here.same_target(self.problem.device):
                raise LayoutMismatch(
                    f"{self._where}: these bytes were prepared for {self.problem.device} and are on {here}; "
                    "prepare again there: fp4.prepare(w.restore().to(device))"
                )
            call = registry.run(self)
            object.__setattr__(self, "_call", call)
        return call  # type: ignore[no-any-return]

    _where = "prepared"

    def _sizes(self) -> None:
        raise NotImplementedError

    def _restore(self, prefix: str) -> QuantizedTensor:
        shape, a = self.logical[prefix], self.arrays
        order = self.problem.gate_up if prefix == "w13." else None
        parts: dict[str, Any] = {
            p: storage.invert(a[prefix + p], self.layouts[prefix + p], getattr(shape, p), order) for p in ("codes", "scale")
        }
        second: dict[str, Any] = {p: a.get(prefix + p) for p in ("global_scale", "input_scale")}
        return QuantizedTensor(
            format=shape.format, **parts, **second, shape=shape.shape, axis=shape.axis, recipe=shape.recipe, gate_up=shape.gate_up
        )

    def explain(self) -> str:
        """Backend, reason, versions, and how each array is stored, in words."""
        lines = [f"{self.problem} -> {self.backend}"]
        lines += [f"  {name} {version}" for name, version in self.versions.items()]
        lines += [
            f"  {name}: {list(t.shape)} {str(t.dtype).removeprefix('torch.')} {self._as(name)}".rstrip() for name, t in self.arrays.items()
        ]
        if self.reasons:
            lines += ["  ranking:", *("  " + line for line in self.reasons.splitlines()[1:])]
        return "\n".join(lines)

    def shards(self, dim: str, size: int) -> dict[str, Any]:
        """Array name -> where ``size`` equal tensor-parallel shards lie in its stored bytes, or a Reason (false) why it cannot be cut.

        ``dim``: "n" (rows) or "k" (columns). Byte ranges are those of one expert; scales follow their own layout.
        """
        check.choice("shards", "dim", dim, ("n", "k"))
        size = check.whole("shards", "size", size, 1)
        out = {}
        for prefix, about in self.logical.items():
            for part in ("codes", "scale"):
                out[prefix + part] = storage.shards(self.layouts[prefix + part], getattr(about, part), int(dim == "k"), size)
        return out

    def _as(self, name: str) -> str:
        return str(self.layouts[name]) if name in self.layouts else ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.problem}, backend={self.backend!r}, {self.nbytes} bytes)"

    def __getstate__(self) -> dict[str, Any]:
        return {f: getattr(self, f) for f in self.__dataclass_fields__ if f not in ("handle", "device", "n", "shape", "experts")} | {
            n: dict(getattr(self, n)) for n in ("arrays", "layouts", "logical", "versions", "meta")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)
        self.__post_init__()

    def save(self, path: str | Path) -> None:
        """Write a .safetensors file: the arrays as stored, and in its metadata everything that ``load`` needs, layout names included."""
        from fp4.gpu import saved

        saved.write(self, path)


@dataclass(frozen=True, eq=False, repr=False)
class Prepared(_Base):
    """A linear weight as one backend eats it. Made by ``fp4.prepare``; run by ``fp4.matmul``.

    ::

        w.restore() -> QuantizedTensor   what it was made from, bit for bit
        w.save(path)                     the stored bytes; fp4.load_prepared(path) reads them back
        w.shards("n" or "k", size)       where tensor-parallel shards lie in the stored bytes
        w.explain() -> str               backend, ranking, versions, how each array is stored
        fp4.warmup(w, m_max)             compile and allocate before the first call or a graph capture

    Attributes: ``backend``, ``problem``, ``format``, ``shape`` (n, k), ``device``, ``act_dtypes`` (dtypes of x that it takes), ``nbytes``,
    ``arrays`` and ``layouts`` by name, ``encodes``, ``versions``, ``reasons``.
    """

    _where = "matmul"

    n: int = field(init=False, default=0)
    #: (n, k), logical
    shape: tuple[int, int] = field(init=False, default=(0, 0))

    def _sizes(self) -> None:
        shape = (int(self.problem.n or 0), int(self.problem.k or 0))
        object.__setattr__(self, "n", shape[0])
        object.__setattr__(self, "shape", shape)

    def restore(self) -> QuantizedTensor:
        """The QuantizedTensor it was made from, bit for bit."""
        own = _own_restore(self)
        return own if own is not None else self._restore("")


@dataclass(frozen=True, eq=False, repr=False)
class PreparedMoE(_Base):
    """The experts of one MoE layer as one backend eats them. Made by ``fp4.prepare_moe``; run by ``fp4.moe``.

    As Prepared: ``restore`` gives (w13, w2), ``restore_bias`` (bias13, bias2), and ``save``, ``shards``, ``explain`` and
    ``fp4.warmup`` are the same. ``shape`` is (local experts, hidden, intermediate), ``experts`` what top-k ids speak of.
    """

    _where = "moe"

    #: number of experts that top-k ids speak of
    experts: int = field(init=False, default=0)
    #: (local experts, hidden, intermediate), logical
    shape: tuple[int, int, int] = field(init=False, default=(0, 0, 0))

    def _sizes(self) -> None:
        p = self.problem
        object.__setattr__(self, "experts", int(p.experts or 0))
        object.__setattr__(self, "shape", (int(p.local_experts or 0), int(p.hidden or 0), int(p.intermediate or 0)))

    def restore(self) -> tuple[QuantizedTensor, QuantizedTensor]:
        """(w13, w2) as they were given (local experts), bit for bit.

        When gate and up have different global scales, w13 comes back as the pair (gate, up) that ``prepare_moe`` accepts.
        """
        own = _own_restore(self)
        if own is not None:
            return own  # type: ignore[no-any-return]
        second = self.arrays.get("w13.global_scale")
        if second is None or second.ndim != 2:
            return self._restore("w13."), self._restore("w2.")
        bare = replace(self, arrays={n: t for n, t in self.arrays.items() if n != "w13.global_scale"})
        return split_gate_up(bare._restore("w13."), str(self.problem.gate_up), second), self._restore("w2.")  # type: ignore[return-value]

    def restore_bias(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(bias13, bias2) as they were given, or None."""
        return self.arrays.get("bias13"), self.arrays.get("bias2")


def split_gate_up(w13: QuantizedTensor, order: str, scales: torch.Tensor) -> tuple[QuantizedTensor, QuantizedTensor]:
    """w13 [e, 2i, h] in ``order`` and scales [e, 2] (gate, up) -> the tensors (gate, up), each [e, i, h]."""
    half = {}
    codes, scale = (storage.reorder_gate_up(t, order, "gate_up") for t in (w13.codes, w13.scale))
    i = codes.shape[1] // 2
    for n, part in enumerate(("gate", "up")):
        rows = slice(n * i, (n + 1) * i)
        bytes_ = codes[:, rows].contiguous(), scale[:, rows].contiguous()
        half[part] = QuantizedTensor(w13.format, *bytes_, scales[:, n].contiguous(), recipe=w13.recipe, input_scale=w13.input_scale)
    return half["gate"], half["up"]


def _own_restore(p: _Base) -> Any:
    """The backend's own ``restore`` when it has one, else None. A backend that is not installed leaves it to the layouts."""
    from fp4.gpu import registry

    module = registry.module(p.backend)
    own = getattr(module, "restore", None)
    return None if own is None else own(p)


def exported_handle(handle: int) -> int:
    """The handle for a graph that may be saved: it also names this process, where alone the number means this weight."""
    return handle | _PROCESS << 32


def by_handle(handle: int) -> Any:
    """The live object of a handle. Raises Fp4Error when it was collected: the owner of a compiled graph must keep its weights.

    Compiled graphs hold plain numbers, so that compile caches hit again in the next process, which traces the numbers anew. An
    exported program is not traced again; its numbers carry their process, and another process refuses them.
    """
    process, handle = int(handle) >> 32, int(handle) & 0xFFFFFFFF
    if process not in (0, _PROCESS) and handle >= _FORKED_FROM.get(process, 0):
        raise LayoutMismatch(
            f"fp4 op: this graph was exported in another process, where prepared weight {handle} was; export it again here, "
            "or save the weight (Prepared.save) and trace the graph after loading"
        )
    found = _live.get(handle)
    if found is None:
        raise Fp4Error(f"fp4 op: prepared weight {handle} no longer exists; keep the Prepared object alive as long as the compiled graph")
    return found


def load(path: str | Path, device: torch.device | str | None = None) -> Prepared | PreparedMoE:
    """Read what ``save`` wrote, onto ``device`` (default: where it was prepared for, when such a device is here, else the CPU).

    Bytes whose layouts the installed backend still wants are used as they are; otherwise they are restored by their layout names and
    prepared again for that backend. On another kind of device the object can only be restored: running it raises LayoutMismatch.
    Raises CheckpointError when the file is not one of ours, was changed after it was written, or contradicts itself.
    """
    from fp4.gpu import saved

    return saved.read(path, device)  # type: ignore[no-any-return]
