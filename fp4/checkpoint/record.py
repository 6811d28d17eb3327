"""One logical tensor of a checkpoint: which stored tensors make it up, and how their bytes become values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from fp4.checkpoint.index import Store
from fp4.errors import CheckpointError
from fp4.formats import Format
from fp4.ref.matmul import product
from fp4.ref.quantize import dequantize_blocks
from fp4.tensor import EXTRAS, QuantizedTensor

__all__ = ["Record", "Rule", "Spec"]

#: elements that one step of a dequantisation handles, so that float32 temporaries stay below about 100 MB
_STEP = 1 << 22


@dataclass(frozen=True)
class Spec:
    """What a config says about one module's weight."""

    #: "nvfp4", "mxfp4", "nvfp4_b32", "amdfp4", "mxfp8" or "fp8"
    format: str
    #: the sentence part that names the config entry, for messages
    origin: str
    #: a calibrated activation scale must be in the file
    static_input: bool = False
    #: FP8 block [rows, columns], when the config gives one
    block: tuple[int, int] | None = None
    #: format that the config wants activations quantised to, None for weight-only or where it does not say
    act: str | None = None


@dataclass(frozen=True)
class Rule:
    """How a stored scalar becomes a multiplier: ``value * factor`` or ``factor / value``."""

    divide: bool = False
    factor: float = 1.0
    #: factor to use instead when some e4m3 block scale is above 384 (fouroversix's static mode)
    over_448: float | None = None

    def __str__(self) -> str:
        return "divisor" if self.divide else "multiplier" if self.factor == 1.0 else f"multiplier (times {self.factor:g})"


MULTIPLY, DIVIDE = Rule(), Rule(divide=True)


@dataclass(frozen=True)
class Record:
    """``parts`` maps a role to the stored tensor's name.

    Roles: ``weight`` (plain and FP8), ``codes``, ``scale``, ``global``, ``input``, ``pre_quant_scale``, ``lora_a``,
    ``lora_b``. ``logical`` is [..., n, k]; ``shape`` is the unquantised model's, which is [..., k, n] when ``transposed``.
    """

    name: str
    kind: str  # "plain", "block", "fp8"
    parts: dict[str, str]
    shape: tuple[int, ...]
    logical: tuple[int, ...]
    format: Format | None = None
    #: orders of the stored bytes: "n_k", "k_n" (packed along k, the last dimension is n), "sf_128x4"
    codes_order: str = "n_k"
    scale_order: str = "n_k"
    transposed: bool = False
    global_rule: Rule = MULTIPLY
    input_rule: Rule = MULTIPLY
    gate_up: str | None = None
    #: FP8: elements that one scale covers, (1, k) for a channel, (n, k) for the tensor
    block: tuple[int, int] | None = None
    origin: str = ""
    #: how the activation is quantised, as far as the file says: "static", "dynamic" or None (weight-only)
    activations: str | None = None
    #: the format that the config wants them in: "nvfp4", "mxfp4", "fp8", "mxfp8", or None
    act: str | None = None

    def where(self, store: Store, role: str) -> str:
        name = self.parts[role]
        return f"{store.file_of(name)}: tensor {name!r}"


def multiplier(store: Store, record: Record, role: str) -> torch.Tensor | None:
    """f32 [] or [experts]: the second-level scale as a multiplier, converted by value. Raises CheckpointError when it is not usable."""
    name = record.parts.get(role)
    if name is None:
        return None
    where = record.where(store, role)
    value = store.tensor(name)
    if value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CheckpointError(f"{where}: has dtype {store.entries[name].dtype}; need F32 (or BF16, F16, read by value)")
    value = value.to(torch.float32)
    rule = record.global_rule if role == "global" else record.input_rule
    if not bool(torch.isfinite(value).all()) and not (rule.divide and not bool(value.isnan().any())):
        raise CheckpointError(f"{where}: is {_brief(value)}; need a finite {rule}")
    if bool((value < 0).any()):
        raise CheckpointError(f"{where}: is {_brief(value)}; a negative scale is not a {rule}")
    value = rule.factor / value if rule.divide else value * rule.factor
    if bool(torch.isinf(value).any()):
        raise CheckpointError(f"{where}: is 0 as a {rule}; that scale is infinite")
    return value.reshape(()) if value.numel() == 1 else value.reshape(-1)


def _brief(value: torch.Tensor) -> str:
    return f"{float(value):g}" if value.numel() == 1 else f"{[round(float(v), 6) for v in value.flatten()[:4]]}..."


def check_scale(record: Record, where: str, scale: torch.Tensor) -> None:
    """Raise CheckpointError for a NaN or negative scale byte, naming its index in the [..., n, k / block] order."""
    assert record.format is not None
    kind = record.format.scale
    limit = 0x7F if kind.signed else 0xFF
    if scale.numel() == 0 or int(scale.max()) < limit:
        return
    bad = scale.ge(limit) if kind.signed else scale.eq(limit)
    index = tuple(int(i) for i in bad.nonzero()[0])
    byte, count = int(scale[index]), int(bad.sum())
    nan = (byte & 0x7F) in kind.nan_codes if kind.signed else byte in kind.nan_codes
    what = "is NaN" if nan else "is a negative block scale (some formats use the sign as a codebook flag; fp4 does not read those)"
    raise CheckpointError(
        f"{where}: scale byte 0x{byte:02X} at {list(index)} {what}; {count} such byte{'s' * (count != 1)}; "
        f"the {kind.name} scale must be finite"
        + ("; write the file again, or open it with repair=True, which takes 1.0 where the block's codes are all zero" * nan)
    )


class Reader:
    """Reads the parts of one block record in [..., n, k] order. ``note(text)`` receives warnings."""

    def __init__(self, store: Store, record: Record, note: Callable[[str], None], trust_range: bool = False, repair: bool = False) -> None:
        self.store, self.record, self.note, self.trust_range, self.repair = store, record, note, trust_range, repair

    def codes(self) -> torch.Tensor:
        """u8 [..., n, k / codes_per_byte], a view of the file (strided when the file packs along another axis)."""
        record = self.record
        assert record.format is not None
        name = record.parts["codes"]
        want = (*record.logical[:-1], record.logical[-1] // record.format.codes_per_byte)
        raw = self.store.bytes(name)
        if record.codes_order == "k_n":
            return raw.reshape(*want[:-2], want[-1], want[-2]).transpose(-1, -2)
        each = math.prod(want[:-2]) * want[-1]
        rows = raw.numel() // each if each else want[-2]  # those beyond n are padding (fouroversix)
        return raw.reshape(*want[:-2], rows, want[-1])[..., : want[-2], :]

    def stored_scale(self) -> torch.Tensor:
        """u8 [..., n, k / block], unchecked."""
        record = self.record
        assert record.format is not None
        want = (*record.logical[:-1], record.logical[-1] // record.format.block)
        raw = self.store.bytes(record.parts["scale"])
        if record.scale_order == "k_n":
            return raw.reshape(*want[:-2], want[-1], want[-2]).transpose(-1, -2).contiguous()
        if record.scale_order == "sf_128x4":
            return unswizzle(raw, want)
        return raw.reshape(want)

    def scales(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """(scale, global multiplier, experts or [] that are all zero). Checks bytes and the second level's range."""
        record, store = self.record, self.store
        scale = self.stored_scale()
        second = multiplier(store, record, "global")
        if second is not None and record.global_rule.over_448 is not None and scale.numel() and int(scale.max()) > 0x7C:
            second = second / record.global_rule.factor * record.global_rule.over_448
        where = record.where(store, "scale")
        zero = None if second is None else second.eq(0)
        if second is not None and zero is not None and bool(zero.any()):
            self.note(f"{record.where(store, 'global')}: second-level scale is 0; the tensor is zero, whatever its block scales say")
            scale = scale.clone(memory_format=torch.contiguous_format)
            if scale.numel():
                scale.view(zero.numel(), -1)[zero.reshape(-1)] = 0x38  # 1.0: finite, so that zero times it is zero
        if self.repair:
            scale = self._repaired(scale, where)
        check_scale(record, where, scale)
        if second is not None:
            self._check_range(second)
        return scale, second, zero if zero is not None and bool(zero.any()) else None

    def _repaired(self, scale: torch.Tensor, where: str) -> torch.Tensor:
        """The scales with NaN bytes over all-zero blocks replaced by 1.0; a NaN over other codes stays, to be refused."""
        fmt = self.record.format
        assert fmt is not None
        nan = torch.from_numpy(np.isnan(fmt.scale.values))[scale.to(torch.int64)]
        if not bool(nan.any()):
            return scale
        width = fmt.block // fmt.codes_per_byte
        blocks = self.codes().reshape(*scale.shape, width)[nan]
        empty = (blocks & (0x77 if fmt.codes_per_byte == 2 else 0x7F)).eq(0).all(-1)
        if bool(empty.any()):
            self.note(f"{where}: {int(empty.sum())} NaN scale bytes over blocks of zero codes replaced by 1.0")
            one = int(np.flatnonzero(fmt.scale.values == 1.0)[0])
            scale = scale.clone(memory_format=torch.contiguous_format)
            scale[nan] = torch.where(empty, torch.full_like(scale[nan], one), scale[nan])
        return scale

    def _check_range(self, second: torch.Tensor) -> None:
        """Real multipliers are amax / 2688; above 100 or below 1e-9 the stored number is most likely the other direction."""
        high, low = float(second.max()), float(second[second > 0].min()) if bool((second > 0).any()) else 1.0
        if high <= 1e2 and low >= 1e-9:
            return
        rule = self.record.global_rule
        other = DIVIDE if not rule.divide else MULTIPLY
        worst = high if high > 1e2 else low
        text = (
            f"{self.record.where(self.store, 'global')}: as a {rule} gives the factor {worst:g}; need 1e-9 to 100; "
            f"as a {other} it would be {1 / worst:g}: the scale looks like its own reciprocal"
        )
        if high > 1e2 and not self.trust_range:
            raise CheckpointError(text + "; use trust='tensors' to read it as it stands")
        self.note(text)

    def quantized(self) -> QuantizedTensor:
        """The QuantizedTensor, contiguous, with the activation scale."""
        record, store = self.record, self.store
        assert record.format is not None
        scale, second, zero = self.scales()
        codes = self.codes().contiguous()
        if zero is not None and codes.numel():
            codes = codes.clone()
            codes.view(zero.numel(), -1)[zero.reshape(-1)] = 0
        second_input = multiplier(store, record, "input")
        if second_input is not None and not bool((second_input > 0).all()):
            raise CheckpointError(f"{record.where(store, 'input')}: is {_brief(second_input)}; an activation scale must be above 0")
        source: dict[str, object] = {
            "name": record.name,
            "file": store.file_of(record.parts["codes"]),
            "tensors": dict(record.parts),
            "global_direction": str(record.global_rule) if "global" in record.parts else None,
            "input_direction": str(record.input_rule) if "input" in record.parts else None,
            "activations": record.activations,
            "transposed": record.transposed,
        }
        experts = math.prod(record.logical[:-2])
        if second is not None and second.ndim and second.numel() != experts and experts:
            second = self._merge_halves(second, experts, "global")
        if second_input is not None and second_input.ndim and second_input.numel() != experts and experts:
            # one activation feeds gate and up, so the larger multiplier is safe for both: nothing saturates
            second_input = second_input.reshape(experts, -1).amax(-1)
        return QuantizedTensor(
            record.format, codes, scale, second, record.logical, -1, None, second_input, record.gate_up, source, self.extras()
        )  # fmt: skip

    def extras(self) -> dict[str, torch.Tensor]:
        """The smoothing vector and the low-rank branch, as stored."""
        return {role: self.store.tensor(self.record.parts[role]) for role in EXTRAS if role in self.record.parts}

    def _merge_halves(self, second: torch.Tensor, experts: int, role: str) -> torch.Tensor:
        halves = second.reshape(experts, -1)
        if not bool((halves == halves[:, :1]).all()):
            raise CheckpointError(
                f"{self.record.where(self.store, role)}: gate and up have different second-level scales and share one tensor; "
                "read its values with dequantize, or its halves with Checkpoint.halves"
            )
        return halves[:, 0].contiguous()

    def pieces(self) -> Iterator[tuple[tuple[int, int, int], torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """((expert, first row, last row), codes, scale, multiplier) in steps of bounded size."""
        record = self.record
        scale, second, _ = self.scales()
        n, k = record.logical[-2], record.logical[-1]
        codes = self.codes().reshape(-1, n, self.codes().shape[-1])
        scale = scale.reshape(-1, n, scale.shape[-1])
        experts = codes.shape[0]
        parts = None if second is None or not second.ndim else second.reshape(experts, -1)
        step = max(1, _STEP // max(k, 1))
        for e in range(experts):
            groups = [(0, n, second if parts is None else parts[e, 0])]
            if parts is not None and parts.shape[1] > 1:  # one multiplier each for equal row groups (gate, up)
                rows = n // parts.shape[1]
                groups = [(i * rows, (i + 1) * rows, parts[e, i]) for i in range(parts.shape[1])]
            for first, last, factor in groups:
                for a in range(first, last, step):
                    b = min(a + step, last)
                    yield (e, a, b), codes[e, a:b].contiguous(), scale[e, a:b].contiguous(), factor


def unswizzle(raw: torch.Tensor, want: tuple[int, ...]) -> torch.Tensor:
    """u8 [..., n, k / block] from bytes in 128x4 tiles, padding dropped."""
    from fp4 import layouts  # imported late: most dialects never need a layout

    layout = layouts.get("sf_128x4")
    lead = math.prod(want[:-2])
    each = raw.reshape(lead, -1) if lead else raw.reshape(0, 0)
    if lead == 1:
        plain: torch.Tensor = layout.invert(each[0], shape=want[-2:])
        return plain.reshape(want)
    return torch.stack([layout.invert(e, shape=want[-2:]) for e in each]).reshape(want)


def dequantize_record(
    reader: Reader,
    dtype: torch.dtype,
    after_step: Callable[[], None] | None = None,
    fold: bool = False,
) -> torch.Tensor:
    """``dtype`` ``record.shape``: the values of a block or FP8 record, made in steps of bounded memory.

    ``fold``: return the weight that a plain linear needs: (w + lora_b lora_a) * pre_quant_scale.
    """
    store, record = reader.store, reader.record
    out = torch.zeros(record.shape, dtype=dtype, device="cpu")  # where the file is mapped, whatever the default device is
    if not out.numel():
        return out
    n, k = record.logical[-2:]
    view = out.transpose(-1, -2) if record.transposed else out
    view = view.reshape(-1, n, k) if not record.transposed or view.ndim == 3 else view.unsqueeze(0)
    extras = _fold_terms(store, record) if fold else None

    def put(at: tuple[int, int, int], value: torch.Tensor) -> None:
        e, a, b = at
        if extras is not None:
            low, pre = extras
            value = value.float()
            if low is not None:
                value = value + product(low[1][a:b], low[0])
            if pre is not None:
                value = value * pre
        view[e, a:b] = value.to(dtype)
        if after_step is not None:
            after_step()

    if record.kind == "fp8":
        for at, value in _fp8_pieces(store, record):
            put(at, value)
    else:
        assert record.format is not None
        exact = torch.float32 if extras is not None else dtype
        for at, codes, scale, factor in reader.pieces():
            put(at, dequantize_blocks(codes, scale, factor, record.format, exact))
    return out


def _fold_terms(store: Store, record: Record) -> tuple[tuple[torch.Tensor, torch.Tensor] | None, torch.Tensor | None] | None:
    parts = record.parts
    low = (store.tensor(parts["lora_a"]).float(), store.tensor(parts["lora_b"]).float()) if "lora_a" in parts else None
    pre = store.tensor(parts["pre_quant_scale"]).float().reshape(-1) if "pre_quant_scale" in parts else None
    return None if low is None and pre is None else (low, pre)


def _fp8_pieces(store: Store, record: Record) -> Iterator[tuple[tuple[int, int, int], torch.Tensor]]:
    n, k = record.logical[-2], record.logical[-1]
    weight = store.tensor(record.parts["weight"]).reshape(-1, n, k)
    bn, bk = record.block or (n, k)
    scale = _fp8_scale(store, record).reshape(-1, -(-n // bn) if bn else 1, -(-k // bk) if bk else 1)
    step = max(1, _STEP // max(k, 1))
    for e in range(weight.shape[0]):
        mine = scale[e if scale.shape[0] > 1 else 0]
        for a in range(0, n, step):
            b = min(a + step, n)
            rows = torch.arange(a, b, device="cpu") // bn
            factor = mine[rows]
            factor = factor if bk >= k else factor.repeat_interleave(bk, -1)[:, :k]
            yield (e, a, b), weight[e, a:b].float() * factor


def _fp8_scale(store: Store, record: Record) -> torch.Tensor:
    name = record.parts["scale"]
    value = store.tensor(name)
    if value.dtype == torch.uint8:
        value = value.view(torch.float8_e8m0fnu)
    value = value.to(torch.float32)
    if not bool(torch.isfinite(value).all()) or bool((value < 0).any()):
        raise CheckpointError(f"{record.where(store, 'scale')}: holds a NaN, infinite or negative FP8 scale")
    return value
