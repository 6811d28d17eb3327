"""Converting a checkpoint between dialects: planned from headers, refused before anything is written, then streamed.

Codes and block scales are copied as bytes; only names, shapes, the second-level scales' direction and the config change. The
report says of every tensor whether that is exact.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from fp4.checkpoint.base import Checkpoint, natural
from fp4.checkpoint.convert_report import ConversionRefused, ConvertReport, TensorReport
from fp4.checkpoint.experts import join, join_bias, split, split_bias
from fp4.checkpoint.linear import FLOATS, plural, shown
from fp4.checkpoint.output import Blob, check_target, stored, strip_quantization, write_model
from fp4.checkpoint.record import Record
from fp4.checkpoint.weights import Loader, Scalar, View, Weight, cast_codes, cast_exponent, read_scalars
from fp4.checkpoint.write_compressed_tensors import CompressedTensorsWriter
from fp4.checkpoint.write_gptoss import GptOssWriter
from fp4.checkpoint.write_modelopt import ModelOptWriter
from fp4.errors import CheckpointError, unknown

__all__ = ["WRITERS", "ConversionRefused", "ConvertReport", "TensorReport", "convert_checkpoint"]

Progress = Callable[[int, int, str], None]


class Writer(Protocol):
    """One dialect's way to store quantised weights. ``divides``: second-level scales are stored as divisors."""

    name: str
    divides: bool
    #: shape of a single cache scale
    kv_shape: tuple[int, ...]

    def stacks(self, ck: Checkpoint) -> bool | None:
        """Experts in one stacked tensor: yes, no, or None for as they are."""

    def refuse(self, ck: Checkpoint, weight: Weight) -> str:
        """Why a weight cannot be written, "" when it can."""

    def blobs(self, loader: Loader, weight: Weight) -> list[Blob]:
        """The tensors of one weight."""

    def kv(self, module: str, role: str, stored: str) -> str | None:
        """Name of a cache scale, ``stored`` being the source's."""

    def refuse_kv(self, ck: Checkpoint) -> str:
        """Why the cache's scales cannot be written, "" when they can."""

    def configs(self, ck: Checkpoint, weights: list[Weight], plain: list[str]) -> dict[str, dict[str, Any]]:
        """Config files: config.json holds the quantization_config alone. ``plain``: modules that are not quantised."""


WRITERS: dict[str, Writer] = {w.name: w for w in (ModelOptWriter(), CompressedTensorsWriter(), GptOssWriter())}
#: matrices of one layer that engines run as one product, which therefore share a second-level scale after a cast
_FUSED = {**dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "gate_up"), **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv")}


def convert_checkpoint(
    src: str | os.PathLike[str] | Checkpoint,
    dst: str | os.PathLike[str],
    to: str,
    *,
    format: str | None = None,
    lossy: bool = False,
    progress: Progress | None = None,
    shard_bytes: int = 5 << 30,
    trust: str = "config",
    activations: str | None = None,
) -> ConvertReport:
    """Write checkpoint ``src`` to the new folder ``dst`` in dialect ``to``: "modelopt", "compressed-tensors" or "gpt-oss".

    ``format="nvfp4"`` casts MXFP4 weights to NVFP4 (weight-only: MXFP4 files have no calibrated activation scale); a tensor
    whose block exponents do not fit is refused unless ``lossy``. Memory: one expert of one tensor beside its scales.
    Raises ConversionRefused (a CheckpointError) when some tensor cannot be written, before anything is, and CheckpointError
    for a bad source, an existing target or a failed write; then nothing is left at ``dst``.
    """
    writer = WRITERS.get(to)
    if writer is None:
        raise CheckpointError(f"convert: dialect {unknown(to, WRITERS, 'fp4 convert --help')}")
    if format not in (None, "nvfp4", "mxfp4"):
        raise CheckpointError(f"convert: format is {format!r}; need 'nvfp4' or 'mxfp4', or none to keep each tensor's")
    if shard_bytes < 1:
        raise CheckpointError(f"convert: shard_bytes is {shard_bytes}; need a positive number")
    target = Path(dst)
    if target.suffix == ".safetensors":
        raise CheckpointError(f"convert: {target} is one file; {to} needs a folder, as its config says how to read it")
    check_target("convert", target)
    if isinstance(src, Checkpoint):
        return _Conversion(src, writer, format, lossy).run(target, shard_bytes, progress)
    from fp4.checkpoint import open_checkpoint

    with open_checkpoint(src, trust=trust, activations=activations) as ck:
        return _Conversion(ck, writer, format, lossy).run(target, shard_bytes, progress)


class _Conversion:
    """The plan of one conversion."""

    def __init__(self, ck: Checkpoint, writer: Writer, format: str | None, lossy: bool) -> None:
        self.ck, self.writer, self.format, self.lossy = ck, writer, format, lossy
        self.loader = Loader(ck)
        self.weights: list[Weight] = []
        self.heads: dict[str, str | None] = {}  # layers whose stacked experts are taken apart -> order of gate and up
        self.joined: set[str] = set()
        self.notes: list[str] = []
        self.refusals: list[str] = []

    def run(self, target: Path, shard_bytes: int, progress: Progress | None) -> ConvertReport:
        ck = self.ck
        self._plan()
        self._cast()
        for weight in self.weights:
            known = weight.format in ("nvfp4", "mxfp4", "mxfp8", "fp8")
            odd = "" if known else f"is {weight.format}, which {self.writer.name} does not have"
            weight.refused = weight.refused or odd or self.writer.refuse(ck, weight)
        blobs, plain = self._plain()
        report = ConvertReport(str(target), ck.dialect, self.writer.name, copied=len(plain), notes=self.notes)
        report.tensors = self._rows()
        self._refuse(report, target)
        for weight in self.weights:
            blobs += self.writer.blobs(self.loader, weight)
        blobs += self._cache()
        blobs.sort(key=lambda blob: natural(blob.name))
        configs = self._configs(plain)
        self._left_over(report)

        def done(blob: Blob) -> None:
            count[0] += 1
            if progress is not None:
                progress(count[0], len(blobs), blob.name)

        count = [0]
        report.files, report.bytes_out = write_model("convert", target, blobs, ck.store, configs, shard_bytes, done)
        report.warnings = list(ck.warnings)
        return report

    # which records become which weights

    def _plan(self) -> None:
        ck = self.ck
        records = [ck.record(name) for name in ck if ck.record(name).kind != "plain"]
        if not records:
            raise CheckpointError(f"convert: {ck.path} ({ck.dialect}) has no quantised tensor; need one to convert")
        wish = self.writer.stacks(ck)
        layers = join(records) if wish else {}
        member = {r.name: layer for layer in layers.values() for m in layer.roles.values() for r in m.values()}
        stacked: set[str] = set()
        for record in records:
            layer = member.get(record.name)
            if layer is None:
                self._single(record, wish)
            elif layer.head not in stacked:
                stacked.add(layer.head)
                stacks = layer.stacks()
                if isinstance(stacks, str):
                    self.weights += [self._refused(r, stacks) for m in layer.roles.values() for r in m.values()]
                    continue
                self.joined.add(layer.head)
                for name, views in stacks.items():
                    self._add(name, views, stacked=True)

    def _single(self, record: Record, wish: bool | None) -> None:
        extras = [r for r in ("pre_quant_scale", "lora_a", "lora_b") if r in record.parts]
        if extras:
            self.weights.append(self._refused(record, f"has {' and '.join(extras)}, which is not converted; fp4 dequantize folds it in"))
        elif len(record.logical) == 2:
            if not record.name.endswith(".weight"):
                self.weights.append(self._refused(record, "is a matrix whose name does not end in .weight"))
            else:
                self._add(record.name.removesuffix(".weight"), [(View(record),)])
        elif record.kind == "fp8" or len(record.logical) != 3 or not record.logical[0]:
            self.weights.append(self._refused(record, f"is {_format(record)} {list(record.logical)}, which has no name there"))
        elif wish or (wish is None and record.codes_order == "k_n"):
            self._add(record.name, [(View(record, e),) for e in range(record.logical[0])], stacked=True)
        else:
            parts = split(record)
            if isinstance(parts, str):
                self.weights.append(self._refused(record, parts))
                return
            head = parts[0][0].rsplit(".", 2)[0]
            self.heads[head] = record.gate_up or self.heads.get(head)
            for module, view, _ in parts:
                self._add(module, [(view,)])

    def _refused(self, record: Record, reason: str) -> Weight:
        return Weight(record.name, record.kind, _format(record), record.logical, [(View(record),)], refused=reason)

    def _add(self, module: str, views: list[tuple[View, ...]], stacked: bool = False) -> None:
        record = views[0][0].record
        n = len(range(record.logical[-2])[views[0][0].rows]) * len(views[0])
        shape = (len(views), n, record.logical[-1]) if stacked else (n, record.logical[-1])
        weight = Weight(module, record.kind, _format(record), shape, views, stacked, act=record.act)
        self.weights.append(weight)
        if record.kind == "fp8":
            return
        if weight.format == "nvfp4":  # a single-level NVFP4 tensor (torchao) means 1; the targets' names have two levels
            weight.second = Scalar(1.0)
        for role, attribute in (("global", "second"), ("input", "input")):
            found = self._scalars(views, role)
            if len(found) > 1:
                what = "second-level" if role == "global" else "activation"
                weight.refused = f"has {len(found)} different {what} scales; {self.writer.name} stores one for a stacked tensor"
            elif found:
                setattr(weight, attribute, found[0])
                number = found[0].stored(self.writer.divides)[0]
                if not 0 < number < math.inf and (role == "input" or found[0].multiplier):
                    weight.refused = f"has a scale of {found[0].multiplier:g}, which cannot be written as {self.writer.name} stores it"
                elif role == "input" and not found[0].multiplier:
                    weight.refused = "has an activation scale of 0"

    def _scalars(self, views: list[tuple[View, ...]], role: str) -> list[Scalar]:
        """The different scalars of a weight's rows."""
        out: dict[Scalar, None] = {}
        for view in (v for group in views for v in group):
            scalars = read_scalars(self.ck, view.record, role)
            if scalars is None:
                continue
            experts = view.record.logical[0] if len(view.record.logical) == 3 else 1
            each = len(scalars) // experts
            mine = scalars if not each else scalars[view.expert * each : (view.expert + 1) * each]
            if len(mine) > 1 and view.rows != slice(None):
                mine = [mine[view.half]]
            out.update(dict.fromkeys(mine))
        return list(out)

    # MXFP4 to NVFP4

    def _cast(self) -> None:
        groups: dict[str, list[Weight]] = {}
        for weight in self.weights:
            if weight.refused or self.format in (None, weight.format) or weight.kind == "fp8" or weight.format == "mxfp8":
                continue
            if (weight.format, self.format) != ("mxfp4", "nvfp4"):
                weight.refused = f"is {weight.format}; only MXFP4 to NVFP4 is a cast, {self.format} would mean to quantise again"
                continue
            head, _, leaf = weight.module.rpartition(".")
            groups.setdefault(f"{head}.{_FUSED.get(leaf, leaf)}" if not weight.stacked else weight.module, []).append(weight)
        for members in groups.values():
            exponent = cast_exponent(self.loader, members)
            for weight in members:
                weight.lost = sum(self._lost(weight, e, exponent) for e in range(len(weight.views)))
                if weight.act:
                    weight.notes.append(f"activations are left unquantised: the source's {weight.act} has no calibrated scale for NVFP4")
                weight.format, weight.cast, weight.act, weight.input = "nvfp4", exponent, None, None
                weight.second = Scalar(2.0**exponent)
                if weight.lost and not self.lossy:
                    weight.refused = (
                        f"{plural(weight.lost, 'element')} would change: block exponents span more than e4m3 scales hold; lossy rounds them"
                    )

    def _lost(self, weight: Weight, e: int, exponent: int) -> int:
        scale = self.loader.scale(weight, e)
        if not scale.numel() or int(scale.min()) - 127 - exponent >= -9:
            return 0
        return cast_codes(self.loader.codes(weight, e), scale, exponent)[1]

    # everything that is not quantised

    def _plain(self) -> tuple[list[Blob], list[str]]:
        """(tensors copied as they are, modules that are not quantised)."""
        ck, blobs = self.ck, []
        names = [n for n in ck if ck.record(n).kind == "plain"]
        stacked = join_bias(ck, names, self.joined)
        if isinstance(stacked, str):
            self.refusals.append(stacked)
            stacked = ([], set())
        blobs += stacked[0]
        plain: dict[str, None] = {}
        for name in names:
            if name in stacked[1]:
                continue
            apart = split_bias(ck, name, self.heads)
            blobs += apart if apart is not None else [stored(ck.store, name)]
            entry = ck.store.entries[name]
            if len(entry.shape) >= 2 and entry.dtype in FLOATS and not name.endswith("bias"):
                plain[name.removesuffix(".weight") if name.endswith(".weight") else name.rpartition(".")[0] or name] = None
        return blobs, list(plain)

    def _cache(self) -> list[Blob]:
        """Scales of the key/value cache under the target's names."""
        store, out = self.ck.store, []
        for module, parts in self.ck._kv.items():
            for role, name in parts.items():
                entry = store.entries[name]
                shape = self.writer.kv_shape if entry.nbytes * 8 == _bits(entry.dtype) else entry.shape
                rename = self.writer.kv(module, role, name)
                value = store.tensor(name).to(torch.float32).reshape(-1)
                out.append(Blob(rename or name, "F32", shape, lambda v=value: [v.view(torch.uint8)]))  # type: ignore[misc]
        return out

    def _configs(self, plain: list[str]) -> dict[str, dict[str, Any]]:
        configs = self.writer.configs(self.ck, self.weights, plain)
        quant = configs.pop("config.json")
        return {**configs, "config.json": {**strip_quantization(self.ck.config.model), "quantization_config": quant}}

    def _left_over(self, report: ConvertReport) -> None:
        """Stored tensors that no record has, such as activation scales of a weight-only reading: named, not dropped in silence."""
        used = {p for name in self.ck for p in self.ck.record(name).parts.values()}
        used |= {name for parts in self.ck._kv.values() for name in parts.values()}
        left = [n for n in self.ck.store.entries if n not in used]
        if left:
            report.notes.append(f"{plural(len(left), 'stored tensor')} without meaning for the weights not carried over: {shown(left[:3])}")

    # the report

    def _rows(self) -> list[TensorReport]:
        rows: dict[str, TensorReport] = {}
        for weight in self.weights:
            change = weight.second.stored(self.writer.divides)[1] if weight.second else 0.0
            moved = weight.input.stored(self.writer.divides)[1] if weight.input else 0.0
            for note in weight.notes:
                if note not in self.notes:
                    self.notes.append(note)
            for record in weight.records:
                row = rows.setdefault(record.name, TensorReport(record.name, "", _format(record), weight.format))
                row.scale_change, row.input_change = max(row.scale_change, change), max(row.input_change, moved)
                row.lost += weight.lost
                row.reason = row.reason or weight.refused
                other = weight.cast is not None or (weight.second is not None and weight.second.multiplier == 0)
                if record.kind == "fp8" and self.ck.store.entries[record.parts["scale"]].dtype not in FLOATS:
                    other = True
                row.exactness = "value-exact" if other or row.exactness == "value-exact" else "bit-exact"
        for row in rows.values():
            if row.reason:
                row.exactness = "refused"
            elif row.lost:
                row.exactness = "lossy"
            elif row.scale_change or row.input_change:
                row.exactness = "rounded"
        return list(rows.values())

    def _refuse(self, report: ConvertReport, target: Path) -> None:
        reasons = [f"{t.name} {t.reason}" for t in report.tensors if t.exactness == "refused"]
        cache = self.writer.refuse_kv(self.ck)
        reasons += [*self.refusals, *([f"the key/value cache: {cache}"] if cache else [])]
        if reasons:
            more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
            raise ConversionRefused(f"convert: {self.ck.path} to {self.writer.name}: {reasons[0]}{more}; nothing was written", report)


def _bits(dtype: str) -> int:
    from fp4.checkpoint.safetensors_file import DTYPE_BITS

    return DTYPE_BITS[dtype]


def _format(record: Record) -> str:
    return record.format.name if record.format is not None else record.kind
