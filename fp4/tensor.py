"""QuantizedTensor: what a checkpoint means, as logical bytes, with no storage layout and no backend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._C import _functorch

from fp4 import check, formats
from fp4.errors import FormatMismatch, shown
from fp4.formats import Format

__all__ = ["EXTRAS", "GATE_UP_ORDERS", "QuantizedTensor", "check_second_level", "refuse_extras"]

#: rows of a stacked gate/up matrix: g0 u0 g1 u1 .. | all gate rows, then all up rows | all up rows, then all gate rows
GATE_UP_ORDERS = ("interleaved", "gate_up", "up_gate")
#: the torch dtype that says what its bytes are, for the types of codes and scales that have one
TYPED = {"e2m1": "float4_e2m1fn_x2", "e4m3": "float8_e4m3fn", "ue8m0": "float8_e8m0fnu"}
#: parts of a layer beside its codes: a factor on x [k]; a low-rank branch [r, k] and [n, r]
EXTRAS = ("pre_quant_scale", "lora_a", "lora_b")


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A block-quantised tensor: ``value = elem[code] * scale * global_scale``.

    Shapes, with ``shape = (..., k)`` the logical shape after ``axis`` was moved last::

        codes:        u8  [..., k / codes_per_byte]   low nibble = even element along k
        scale:        u8  [..., k / block]            raw bits of format.scale, row-major, never swizzled
        global_scale: f32 [] or [experts]             multiplier, or None (= 1); finite, 0 only for an all-zero tensor or expert
        input_scale:  f32 [] or [experts]             multiplier of the quantised activation, or None; finite and above 0

    Codes and scales may come in torch's dtype of that type (float8_e4m3fn for e4m3 ...); one of another type is refused. Two of them are
    equal when they are one object; ``torch.equal`` of the fields compares bytes, ``fp4.dequantize`` gives values.
    Stored numbers carry no gradient: the scale of a quantised Parameter is detached.

    ``shape`` and ``axis`` describe the unquantised tensor: ``axis`` is its quantised dimension. Raises FormatMismatch when a dtype or
    shape disagrees with the format, and for a global or input scale on the CPU that is NaN, infinite or negative. On a GPU reading
    it would be a synchronisation, so there ``prepare`` and ``prepare_moe`` look, once, and ``fp4.dequantize`` does not.

    ``extras`` holds what AWQ and SVD exports (ModelOpt NVFP4_AWQ, NVFP4_SVD) keep beside the codes; the layer is then
    ``y = x' value^T + (x' lora_a^T) lora_b^T`` with ``x' = x * pre_quant_scale``, and the codes alone are not its weight.
    ``fp4.dequantize`` gives the codes' values; ``prepare``, ``prepare_moe``, ``fuse`` and ``stack`` refuse such a tensor until the
    caller takes the extras over.
    """

    format: Format
    codes: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None = None
    shape: tuple[int, ...] = ()
    axis: int = -1
    recipe: Any = None
    input_scale: torch.Tensor | None = None
    #: order of the rows of a stacked gate/up matrix, one of GATE_UP_ORDERS, or None
    gate_up: str | None = None
    #: where it came from: tensor names, file, direction of each scale as stored
    source: dict[str, Any] = field(default_factory=dict, compare=False)
    #: role -> tensor, roles of EXTRAS; see above
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        fmt = formats.get(self.format)
        object.__setattr__(self, "format", fmt)
        for name in ("source", "extras"):
            given = getattr(self, name)
            if not isinstance(given, Mapping):
                raise FormatMismatch(f"QuantizedTensor: {name} is {shown(given)}; need a dict, empty when there is nothing to say")
        where = f"QuantizedTensor {self.source.get('name', '')}".rstrip()
        for name, stored in (("codes", fmt.elem.name), ("scale", fmt.scale.name)):
            t = getattr(self, name)
            as_bytes = check.raw_bytes(where, name, t)
            label = str(t.dtype).removeprefix("torch.")
            if name == "scale" and label == "int8":  # exponents without their bias: -7 would be byte 249, 2^122
                raise FormatMismatch(
                    f"{where}: scale is int8; {fmt} has {stored}, raw bits: .view(torch.uint8) when these are, or add 127 to exponents"
                )
            if label.startswith("float") and label != TYPED.get(stored):  # flashinfer#3398: bytes of one type read as another
                raise FormatMismatch(
                    f"{where}: {name} is {t.dtype}; {fmt} has {stored}: need uint8 or {TYPED.get(stored, 'int8')}; take the right "
                    "format, or, when the label is wrong, .view(torch.uint8)"
                )
            object.__setattr__(self, name, as_bytes)
        codes, scale = self.codes, self.scale
        if codes.ndim < 1:
            raise FormatMismatch(f"{where}: codes is a scalar; need [..., k / {fmt.codes_per_byte}]")
        k = codes.shape[-1] * fmt.codes_per_byte
        moved = (*codes.shape[:-1], k)
        if self.shape is None or (isinstance(self.shape, (tuple, list)) and not self.shape):
            object.__setattr__(self, "shape", moved)
        if not isinstance(self.shape, (tuple, list)):
            raise FormatMismatch(f"{where}: shape is {shown(self.shape)}; need a tuple of whole numbers")
        shape = tuple(check.whole(where, f"shape[{i}]", n, 0) for i, n in enumerate(self.shape))
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "axis", check.axis(where, self.axis, shape))
        axis = self.axis % len(shape)
        last = (*shape[:axis], *shape[axis + 1 :], shape[axis])
        if last != moved:
            raise FormatMismatch(
                f"{where}: codes {list(codes.shape)} hold {list(moved)} elements of {fmt}; shape says {list(shape)} with axis {self.axis}"
            )
        if k % fmt.block:
            padded = -(-k // fmt.block) * fmt.block
            raise FormatMismatch(f"{where}: k = {k} is not a multiple of the {fmt} block {fmt.block}; pad k to {padded}")
        want = (*codes.shape[:-1], k // fmt.block)
        if tuple(scale.shape) != want:
            raise FormatMismatch(f"{where}: scale has shape {list(scale.shape)}; need {list(want)} (one byte per {fmt.block} elements)")
        if scale.device != codes.device:
            raise FormatMismatch(f"{where}: codes are on {codes.device}, scale on {scale.device}; move both to one device")
        for name in ("global_scale", "input_scale"):
            self._check_second_level(where, name)
        self._check_extras(where)
        check.choice(where, "gate_up", self.gate_up, GATE_UP_ORDERS, optional=True)

    def _check_second_level(self, where: str, name: str) -> None:
        t = getattr(self, name)
        if t is None:
            return
        if isinstance(t, float) or (isinstance(t, int) and not isinstance(t, bool) and abs(t) < 1 << 128):
            t = torch.tensor(float(t), dtype=torch.float32, device=self.codes.device)
        if not isinstance(t, torch.Tensor) or not t.dtype.is_floating_point:
            raise FormatMismatch(f"{where}: {name} is {shown(t)}; need a float32 multiplier, [] or [experts]")
        check.dense(where, name, t, self.codes.device)
        if t.dtype != torch.float32:
            if t.dtype == torch.float64:
                raise FormatMismatch(f"{where}: {name} is float64; need float32, round it yourself so that the loss is visible")
            t = t.to(torch.float32)  # by value: bf16 bytes read as f32 would be zero (flashinfer#3398)
        t = t.detach().to(self.codes.device)
        if t.numel() == 1 and self.codes.ndim < 3:
            t = t.reshape(())
        experts = self.codes.shape[0] if self.codes.ndim >= 3 else None
        if t.ndim == 1 and t.numel() == 1:
            t = t.reshape(())
        if t.ndim and (experts is None or tuple(t.shape) != (experts,)):
            raise FormatMismatch(f"{where}: {name} has shape {list(t.shape)}; need [] or one value an expert, [{experts}]")
        if _readable(t):
            check_second_level(where, name, t)
        object.__setattr__(self, name, t)

    def _check_extras(self, where: str) -> None:
        if unknown := [name for name in self.extras if name not in EXTRAS]:
            raise FormatMismatch(f"{where}: extras holds {', '.join(map(shown, unknown))}; need one of {', '.join(EXTRAS)}")
        if ("lora_a" in self.extras) != ("lora_b" in self.extras):
            raise FormatMismatch(f"{where}: extras holds one of lora_a and lora_b; need both")
        for name, t in self.extras.items():
            check.dense(where, f"{name} of extras", t, self.codes.device)
        object.__setattr__(self, "extras", {name: t.detach().to(self.codes.device) for name, t in self.extras.items()})

    def bare(self) -> QuantizedTensor:
        """The codes and scales without ``extras``: says that the caller multiplies x and adds the branch itself."""
        return replace(self, extras={})

    @property
    def k(self) -> int:
        """Length of the quantised axis."""
        return self.codes.shape[-1] * self.format.codes_per_byte

    @property
    def scale_f32(self) -> torch.Tensor:
        """f32 [..., k / block]: the values of the scale bytes, exact; NaN where the byte is. ``global_scale`` is not in them."""
        return torch.tensor(self.format.scale.values, dtype=torch.float32, device=self.device)[self.scale.long()]

    @property
    def device(self) -> torch.device:
        """Where codes, scales and second-level scales are."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, second-level scales and extras."""
        parts = (self.codes, self.scale, self.global_scale, self.input_scale, *self.extras.values())
        return sum(t.numel() * t.element_size() for t in parts if t is not None)

    def numel(self) -> int:
        """Elements, not bytes."""
        return math.prod(self.shape)

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """The same tensor on another device."""
        device = check.device("QuantizedTensor.to", device)
        if device.type != "meta":
            check.values("QuantizedTensor.to", "the tensor", self.codes)
        moved = {n: t.to(device) for n in ("codes", "scale", "global_scale", "input_scale") if (t := getattr(self, n)) is not None}
        return replace(self, **moved)

    def __repr__(self) -> str:
        extras = f", extras={'+'.join(self.extras)}" if self.extras else ""
        return f"QuantizedTensor({self.format}, shape={list(self.shape)}{second_level(self.global_scale)}{extras}, device={self.device})"


def _readable(t: torch.Tensor) -> bool:
    """Values are there and cost no synchronisation: a plain tensor on the CPU, not one that a compiler traces or vmap batches."""
    plain = t.device.type == "cpu" and type(t) in (torch.Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()
    return plain and not _functorch.is_functorch_wrapped_tensor(t)


def check_second_level(where: str, name: str, t: torch.Tensor) -> None:
    """Raises FormatMismatch for a global_scale that is NaN, infinite or negative, an input_scale that is 0 as well. Reads the values."""
    if not t.numel():
        return
    low, high = (float(v) for v in torch.aminmax(t.detach()))
    if high < math.inf and (low >= 0 if name == "global_scale" else low > 0):
        return
    flat = t.detach().reshape(-1)
    bad = ~(flat.isfinite() & (flat >= 0 if name == "global_scale" else flat > 0))
    at = int(bad.nonzero()[0])
    which = f" of expert {at}" if t.ndim else ""
    need = "need a finite multiplier, not negative" if name == "global_scale" else "need a finite multiplier above 0"
    raise FormatMismatch(f"{where}: {name}{which} is {float(flat[at]):g}; {need}; a calibration value is missing or was overwritten")


def second_level(g: torch.Tensor | None) -> str:
    """``, global_scale=..`` of a repr: the value of a scalar on the CPU (elsewhere it would be a synchronisation), else the shape."""
    if g is None:
        return ""
    shown = f"{float(g):g}" if g.ndim == 0 and g.device.type == "cpu" and type(g) is torch.Tensor else str(list(g.shape))
    return f", global_scale={shown}"


def refuse_extras(where: str, *tensors: QuantizedTensor, keyword: str = "") -> None:
    """Raises FormatMismatch for a tensor whose codes alone are not the layer's weight."""
    for q in tensors:
        if q.extras:
            name = q.source.get("name", "")
            steps = ["multiply x by pre_quant_scale"] if "pre_quant_scale" in q.extras else []
            steps += ["add (x @ lora_a.T) @ lora_b.T to the result"] if "lora_a" in q.extras else []
            raise FormatMismatch(
                f"{where}: {repr(name) if name else 'the weight'} has {', '.join(q.extras)}, which its codes do not hold; use "
                f"ck.dequantize(name, fold=True) as a plain weight, or {' and '.join(steps)} yourself (q.extras) and pass "
                f"{keyword or 'q.bare()'}"
            )
