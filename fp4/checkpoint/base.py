"""The Checkpoint object, the plan that a dialect fills, and the accounting that lets no tensor disappear."""

from __future__ import annotations

import difflib
import gc
import logging
import math
import os
import re
import warnings as python_warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch

from fp4 import errors
from fp4.checkpoint.config import Config
from fp4.checkpoint.index import Store
from fp4.checkpoint.kv import KVConfig, KVScale, collect_kv, read_kv, require_kv
from fp4.checkpoint.linear import FP8, PACKED, plural, shown
from fp4.checkpoint.patterns import Matches, Names
from fp4.checkpoint.record import Reader, Record, dequantize_record
from fp4.errors import CheckpointDialect, CheckpointError
from fp4.tensor import QuantizedTensor

__all__ = ["Checkpoint", "CheckpointWarning", "Dialect", "Plan"]

_log = logging.getLogger("fp4.checkpoint")

#: last segments that only a quantiser writes; one of them left over means that something was not understood
_COMPANION = re.compile(
    r"(^|[._])(weight_(scale|packed|global_scale|zero_point|shape|g_idx|scale_inv)\w*|input_(scale|global_scale|zero_point)\w*|output_scale"
    r"|pre_quant_scale|_double_scale|_weight_qdata|_weight_scale|_weight_per_tensor_scale|_weight_act_per_tensor_scale|scale_factors"
    r"|qweight|qzeros|absmax|quant_map|nested_absmax|nested_quant_map|g_idx|act_global_scale|weight_scale_\w+|scale_inv"
    r"|[kvq]_scale|kv_scale|prob_scale|\w+_quantizer)(\.|$)"
)
#: names of single-valued cache scales; a vector of that name is a parameter of the model (a norm of queries or keys)
_VECTOR = re.compile(r"(^|[._])([kvq]_scale|kv_scale)$")
_DIGITS = re.compile(r"(\d+)")


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key: layer 2 before layer 10."""
    return [(int(part), "") if part.isdecimal() and len(part) < 19 else (-1, part) for part in _DIGITS.split(name)]


class CheckpointWarning(UserWarning):
    """Something about a checkpoint that does not stop it from being read."""


class Dialect(Protocol):
    """One producer's way to store a model."""

    name: str

    def detect(self, store: Store, config: Config) -> str | None:
        """The reason why a checkpoint is of this dialect, or None."""

    def plan(self, plan: Plan) -> None:
        """Add a record for each quantised tensor and consume the companions. Raises CheckpointError."""


class Options(NamedTuple):
    """Arguments of ``open_checkpoint``."""

    trust: str = "config"
    activations: str | None = None
    rename: Mapping[str, str] | None = None
    repair: bool = False


class Plan:
    """Work sheet of ``open_checkpoint``: tensors not explained yet, records made, patterns counted, warnings."""

    def __init__(self, store: Store, config: Config, options: Options) -> None:
        self.store, self.config, self.rename = store, config, options.rename
        self.trust_tensors = options.trust == "tensors"
        self.activations = options.activations
        self.repair = options.repair
        self.layers = config.layers
        self.place = str(store.root)
        self.records: dict[str, Record] = {}
        self.used: set[str] = set()
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.patterns: dict[str, int] = {}
        self.swizzled: set[str] = set()
        #: a file without any activation scale is read as weight-only with a warning
        self.input_optional = False
        self.has_config = True
        self.kv_config: KVConfig | None = None
        self.kv: dict[str, dict[str, str]] = {}
        self._once: set[str] = set()
        self._names: Names | None = None

    def free(self) -> list[str]:
        """Stored tensors that nothing has explained yet."""
        return [n for n in self.store.entries if n not in self.used]

    def file(self, tensor: str) -> str:
        """The file that holds a stored tensor."""
        return str(self.store.where[tensor].path)

    def names(self) -> Names:
        """Modules of the file (tensor names without their last segment, and the tensors themselves), in the config's spelling."""
        if self._names is None:
            tensors = self.free()
            modules = dict.fromkeys(n.rpartition(".")[0] for n in tensors)
            modules.update(dict.fromkeys(n for n in tensors if not n.endswith((".weight", ".bias", "_scale", "_scale_2"))))
            modules.pop("", None)
            self._names = Names(modules, self.rename)
        return self._names

    def consume(self, names: Iterable[str]) -> None:
        """Stored tensors that are explained, without a record of their own."""
        self.used.update(names)

    def add(self, record: Record, used: Iterable[str] = ()) -> None:
        """A tensor of the model, with the stored ones that it is made of. Raises CheckpointError for a name that is taken."""
        if record.name in self.records:
            raise CheckpointError(f"{self.place}: two tensors of the file both stand for {record.name!r}: {shown(record.parts.values())}")
        self.records[record.name] = record
        self.used.update(record.parts.values())
        self.used.update(used)

    def warn(self, text: str) -> None:
        """Something that the reader should know and that stops nothing."""
        self.warnings.append(text)

    def once(self, key: str, note: str) -> None:
        """One information line for a key."""
        if key not in self._once:
            self._once.add(key)
            self.notes.append(note)

    def disagree(self, text: str) -> None:
        """Config and tensors contradict each other: an error, or a warning under trust='tensors'."""
        if not self.trust_tensors:
            raise CheckpointError(f"{self.place}: {text}; open with trust='tensors' to believe the file")
        self.warn(text)

    def count(self, what: str, matches: Matches) -> None:
        """Record how many modules each pattern matched; one warning for those that matched none."""
        for pattern, n in matches.counts.items():
            self.patterns[pattern] = n or matches.loose.get(pattern, 0)
        if matches.loose:
            self.warn(
                f"{plural(len(matches.loose), what)} matched no module as spelled, only without the leading model/language_model: "
                f"{shown(matches.loose)}"
            )
        none = matches.unmatched()
        if none:
            self.warn(f"{plural(len(none), what)} matched no module: {shown(none)}")

    def finish(self) -> None:
        """Turn what is left into plain records. Raises CheckpointError for tensors that only a quantiser can have written."""
        store = self.store
        if self.kv_config is not None:
            collect_kv(self, vectors=True)
        self._check_biases()
        left: list[str] = []
        for name in self.free():
            entry = store.entries[name]
            packed = entry.dtype in PACKED or entry.dtype in FP8 or entry.dtype == "F8_E8M0"
            parameter = bool(_VECTOR.search(name)) and math.prod(entry.shape) > 1 and not packed
            opaque = packed and (self.has_config or name.endswith(("weight", "_blocks", ".blocks", "_scales", ".scales")))
            if opaque or (_COMPANION.search(name) and not parameter):
                left.append(name)
                continue
            shape = entry.shape
            self.add(Record(name, "plain", {"weight": name}, shape, shape))
        if left:
            first = store.entries[left[0]]
            raise CheckpointError(
                f"{self.file(left[0])}: {plural(len(left), 'tensor')} that nothing explains: {shown(left)} "
                f"(the first is {first.dtype} {list(first.shape)}); nothing is dropped in silence"
            )

    def _check_biases(self) -> None:
        """A bias beside a quantised weight [.., n, k] is [.., n]: another size would be added to, or cut among, the wrong rows."""
        for record in self.records.values():
            if record.kind == "plain":
                continue
            stem = record.name.removesuffix(".weight").removesuffix("_weight")
            for name in (f"{stem}.bias", f"{stem}_bias"):
                entry = self.store.entries.get(name)
                if entry is not None and name not in self.used and entry.shape != record.logical[:-1]:
                    self.disagree(
                        f"{name} has shape {list(entry.shape)}; its weight is {list(record.logical)} and needs {list(record.logical[:-1])}"
                    )


class Checkpoint:
    """A quantised checkpoint, opened lazily: names, tensors, and where every byte came from.

    ``dialect`` and ``reason``: what it is and why. ``names()``: tensors of the unquantised model in its own spelling.
    ``ck[name]``: QuantizedTensor for block formats, torch.Tensor for all else (FP8 weights come dequantised, float32).
    ``warnings`` and ``notes``: what was noticed. ``patterns``: modules matched by each pattern of the config.
    """

    def __init__(self, path: str | os.PathLike[str], dialect: str, reason: str, plan: Plan) -> None:
        self.path = Path(path)
        self.dialect, self.reason = dialect, reason
        self.config = plan.config
        self.store = plan.store
        self.warnings: list[str] = []
        self.notes: list[str] = plan.notes
        self.patterns: dict[str, int] = plan.patterns
        self.kv_config = plan.kv_config
        self._kv = plan.kv
        self._trust_range = plan.trust_tensors
        self._repair = plan.repair
        self._records = {name: plan.records[name] for name in sorted(plan.records, key=natural)}
        self._companions: dict[str, str] | None = None
        for text in (*plan.store.warnings, *plan.warnings):
            self._warn(text, stacklevel=6)

    def _warn(self, text: str, stacklevel: int = 3) -> None:
        if text not in self.warnings:
            self.warnings.append(text)
            python_warnings.warn(CheckpointWarning(text), stacklevel=stacklevel)

    def names(self) -> list[str]:
        """Names of the unquantised model's tensors, layer 2 before layer 10; companions are hidden."""
        return list(self._records)

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._records

    def record(self, name: str) -> Record:
        """How a tensor is stored. Raises CheckpointError for a name that is not one of ``names()``."""
        if not isinstance(name, str):
            raise CheckpointError(f"{self.path}: a name is {errors.shown(name)}; need one of names()")
        record = self._records.get(name)
        if record is not None:
            return record
        if self._companions is None:
            self._companions = {part: r.name for r in self._records.values() for part in r.parts.values()}
        owner = self._companions.get(name)
        if owner is not None:
            raise CheckpointError(f"{self.path}: {name!r} is a companion of {owner!r}; ask for that")
        near = [n for n in self._records if n.startswith(f"{name}.")]  # a module, of which the tensors have names
        if not near and len(self._records) <= 5000:  # difflib takes a millisecond for ten names
            near = difflib.get_close_matches(str(name)[:200], self._records, 2, 0.8)
        hint = f"did you mean {' or '.join(map(errors.shown, near[:2]))}? " if near else ""
        raise CheckpointError(f"{self.path}: has no tensor {errors.shown(name)}; {hint}names() lists its {len(self._records)}")

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor as the unquantised model holds it."""
        return self.record(name).shape

    def __getitem__(self, name: str) -> QuantizedTensor | torch.Tensor:
        """The tensor. Raises CheckpointError for NaN or negative scale bytes, or scalars out of range, naming the tensor."""
        record = self.record(name)
        if record.kind == "plain":
            return self.store.tensor(record.parts["weight"])
        if record.kind == "fp8":
            return dequantize_record(self._reader(record), torch.float32)
        return self._reader(record).quantized()

    def quantized(self, name: str) -> QuantizedTensor:
        """``ck[name]`` of a block-quantised tensor. Raises CheckpointError for any other, as it does for damaged scales."""
        record = self.record(name)
        if record.kind != "block":
            what = "per-tensor or 2-D block FP8" if record.kind == "fp8" else "not quantised"
            raise CheckpointError(f"{self.path}: {name!r} is {what}, it has no 4-bit codes; ck.dequantize({name!r}) gives its values")
        return self._reader(record).quantized()

    def _reader(self, record: Record) -> Reader:
        return Reader(self.store, record, self._warn, self._trust_range, self._repair)

    def dequantize(self, name: str, dtype: torch.dtype = torch.float32, fold: bool = False) -> torch.Tensor:
        """``dtype`` ``shape(name)``: the tensor as the unquantised model holds it, orientation included.

        The value is code times scales, as the producing libraries define it. ``fold=True`` also applies ``pre_quant_scale``
        and the low-rank branch of AWQ and SVD exports, which gives the weight that a plain linear needs.
        Tensors that were not quantised keep their values and, unless they are floating point, their dtype.
        """
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
            raise CheckpointError(
                f"dequantize {errors.shown(name)}: dtype {errors.shown(dtype)} cannot hold values; need float32, bfloat16, float16, float64"
            )
        return self._values(self.record(name), dtype, fold, None)

    def _values(self, record: Record, dtype: torch.dtype, fold: bool, after_step: Any) -> torch.Tensor:
        if record.kind == "plain":
            value = self.store.tensor(record.parts["weight"])
            return value.to(dtype) if value.is_floating_point() else value
        return dequantize_record(self._reader(record), dtype, after_step, fold)

    def halves(self, name: str) -> tuple[QuantizedTensor, QuantizedTensor]:
        """(gate, up) of a stacked [experts, 2 i, k] tensor in the order ``gate_up`` or ``up_gate``, each with its own scales."""
        record = self.record(name)
        if record.kind != "block" or record.gate_up not in ("gate_up", "up_gate") or len(record.logical) != 3:
            raise CheckpointError(f"{self.path}: {name!r} is not a stacked gate/up tensor in halves (gate_up is {record.gate_up!r})")
        reader = self._reader(record)
        scale, second, _ = reader.scales()
        codes, (experts, n, k) = reader.codes(), record.logical
        assert record.format is not None
        split = second.reshape(-1, 2) if second is not None and second.numel() == 2 * experts else None
        out: list[QuantizedTensor] = []
        for i in (0, 1) if record.gate_up == "gate_up" else (1, 0):
            rows = slice(i * (n // 2), (i + 1) * (n // 2))
            out.append(
                QuantizedTensor(
                    record.format,
                    codes[:, rows].contiguous(),
                    scale[:, rows].contiguous(),
                    split[:, i].contiguous() if split is not None else second,
                    (experts, n // 2, k),
                    source={"name": name, "half": "gate" if len(out) == 0 else "up"},
                    extras=reader.extras(),
                )
            )
        return out[0], out[1]

    @property
    def kv_scales(self) -> dict[str, KVScale]:
        """Attention module -> its calibrated cache scales. Raises CheckpointError for one that is not a positive number."""
        return {module: read_kv(self.store, module, parts, self.kv_config) for module, parts in self._kv.items()}

    def close(self) -> None:
        """Close the files. Tensors handed out stay valid."""
        self.store.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        quantised = sum(r.kind != "plain" for r in self._records.values())
        return f"Checkpoint({str(self.path)!r}, dialect={self.dialect!r}, {len(self)} tensors, {quantised} quantised)"


def make(path: str | os.PathLike[str], dialects: Iterable[Dialect], options: Options) -> Checkpoint:
    """Open ``path`` with the first dialect that recognises it.

    The garbage collector pauses meanwhile: with 60,000 names it would otherwise walk all entries again and again (half the time).
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _make(path, dialects, options)
    finally:
        if collecting:
            gc.enable()


def _make(path: str | os.PathLike[str], dialects: Iterable[Dialect], options: Options) -> Checkpoint:
    store = Store.open(path)
    try:
        config = Config.load(store.root) if store.with_config else Config()
        for dialect in dialects:
            reason = dialect.detect(store, config)
            if reason is None:
                continue
            plan = Plan(store, config, options)
            if config.nested and dialect.name != "modelopt" and not config.fp8_with_fp4_experts:
                plan.disagree(f"hf_quant_config.json is ModelOpt's, but {reason}; need one of them: remove the leftover")
            collect_kv(plan)
            dialect.plan(plan)
            plan.finish()
            require_kv(plan)
            for note in plan.notes:
                _log.info("%s: %s", plan.place, note)
            return Checkpoint(path, dialect.name, reason, plan)
        raise CheckpointDialect(f"{path}: no dialect recognises it")
    except CheckpointError:
        store.close()
        raise
