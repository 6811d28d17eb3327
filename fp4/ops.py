"""The public verbs quantize, dequantize, fake_quantize and to_layout, and their torch.library ops.

Tensors on a CPU go to the vectorised torch code, tensors on a GPU to the golden Triton kernels; both give the same bytes. The ops are
``fp4::quantize``, ``fp4::quantize_stored``, ``fp4::dequantize``, ``fp4::fake_quantize`` and ``fp4::to_layout``; they have fakes, so
``torch.compile`` sees one node each, and they launch without host synchronisation on a GPU (CUDA-graph safe), unless the recipe says
``"error"`` for NaN or infinity.
"""

from __future__ import annotations

import warnings
from typing import Any, overload

import torch

from fp4 import check, formats
from fp4 import layouts as catalogue
from fp4 import recipe as recipe_module
from fp4.errors import FormatMismatch, Fp4Error, LayoutMismatch, Unsupported, shown
from fp4.formats import Format
from fp4.layout import Chain, Layout
from fp4.library import byte_shape, dequantize_last, quantize_into, quantize_last, straight
from fp4.recipe import Recipe
from fp4.stored import Stored, StoredQuantized
from fp4.tensor import QuantizedTensor, _readable

__all__ = ["Stored", "StoredQuantized", "dequantize", "fake_quantize", "quantize", "to_layout"]


def _check_input(x: Any, fmt: Format, axis: int, where: str) -> torch.Tensor:
    """x with the quantised axis last. Raises FormatMismatch with the way out."""
    check.dense(where, "x", x)
    if x.dtype not in check.FLOATS:
        hint = "round it to float32 yourself, so that the loss is visible" if x.dtype == torch.float64 else "convert it"
        raise FormatMismatch(f"{where}: x is {x.dtype}; need float32, bfloat16 or float16; {hint}")
    if x.ndim == 0:
        raise FormatMismatch(f"{where}: x is a scalar; need at least one dimension, of a multiple of {fmt.block} elements")
    axis = check.axis(where, axis, x.shape)
    k = x.shape[axis]
    if k == 0:
        raise FormatMismatch(f"{where}: axis {axis} of shape {list(x.shape)} is empty; need at least one block of {fmt.block} elements")
    if k % fmt.block:
        up = -(-k // fmt.block) * fmt.block
        other = "" if x.ndim < 2 else ", or pass another axis"
        raise FormatMismatch(f"{where}: k = {k} is not a multiple of the {fmt} block {fmt.block}; pad k to {up} with zeros{other}")
    last: torch.Tensor = x.movedim(axis, -1)
    return last


def _second_level(value: Any, name: str, x: torch.Tensor, fmt: Format, where: str) -> torch.Tensor | None:
    """A global or encode scale as f32 [] or [experts] on x's device, by value."""
    if value is None:
        return None
    if not fmt.tensor_scale:
        raise FormatMismatch(f"{where}: {fmt} has no global scale, got {name}={shown(value)}; multiply the result instead")
    if isinstance(value, float):
        if not 2.0**-150 < value < 2.0**128 - 2.0**103:  # what rounds to zero or to infinity
            raise FormatMismatch(f"{where}: {name} is {value:g}; need positive finite float32 numbers")
        value = torch.full((), value, dtype=torch.float32, device=x.device)  # filled there: a copy from the host ends a graph capture
    if not isinstance(value, torch.Tensor) or value.dtype not in check.FLOATS:
        raise FormatMismatch(
            f"{where}: {name} is {shown(value)}; need a float32 multiplier, [] or [experts] (bfloat16 and float16 are widened)"
        )
    check.dense(where, name, value, x.device)
    if _readable(value):  # on a GPU: a synchronisation
        wide = value.to(torch.float32)
        if not bool(((wide > 0) & (wide < torch.inf)).all()):
            got = f"{float(wide):g}" if wide.numel() == 1 else str([float(f"{v:g}") for v in wide.flatten()[:4].tolist()])
            raise FormatMismatch(f"{where}: {name} is {got}; need positive finite float32 numbers")
    scale: torch.Tensor = value.to(device=x.device, dtype=torch.float32)
    if scale.numel() == 1:
        return scale.reshape(())
    if x.ndim < 3 or tuple(scale.shape) != (x.shape[0],):
        need = f"[] or one value an expert, [{x.shape[0]}]" if x.ndim >= 3 else "[] (x has no expert dimension)"
        raise FormatMismatch(f"{where}: {name} has shape {list(scale.shape)}; need {need}")
    return scale


def _arguments(
    x: torch.Tensor, format: str | Format, recipe: str | Recipe, global_scale: Any, encode_scale: Any, axis: int, where: str
) -> tuple[torch.Tensor, Format, Recipe, torch.Tensor | None, torch.Tensor | None, bool]:
    fmt = formats.get(format)
    how = recipe_module.get(recipe, fmt.name)
    if fmt.scale.signed and max(how.zero_byte, how.underflow_byte) >= fmt.scale.nan_codes[0]:
        raise Fp4Error(
            f"{where}: recipe {how.name} has zero_byte {how.zero_byte} and underflow_byte {how.underflow_byte}; {fmt.scale.name} bytes are "
            f"finite and not negative up to {fmt.scale.nan_codes[0] - 1}"
        )
    last = _check_input(x, fmt, axis, where)
    per_expert = isinstance(global_scale, str)
    if per_expert and (global_scale != "per_expert" or not fmt.tensor_scale or last.ndim < 3):
        raise FormatMismatch(
            f"{where}: global_scale is {shown(global_scale)} for {fmt} {list(x.shape)}; "
            "need a multiplier, None, or 'per_expert' with x [experts, .., k]"
        )
    g = None if per_expert else _second_level(global_scale, "global_scale", last, fmt, where)
    gs = _second_level(encode_scale, "encode_scale", last, fmt, where)
    if gs is not None and g is not None and gs.shape != g.shape:
        raise FormatMismatch(f"{where}: global_scale {list(g.shape)} and encode_scale {list(gs.shape)} differ in shape; pass one of them")
    return last, fmt, how, g, gs, per_expert


@overload
def quantize(
    x: torch.Tensor,
    format: str | Format = "nvfp4",
    recipe: str | Recipe = "default",
    global_scale: torch.Tensor | float | str | None = None,
    axis: int = -1,
    *,
    encode_scale: torch.Tensor | float | None = None,
    scale_layout: None = None,
) -> QuantizedTensor: ...


@overload
def quantize(
    x: torch.Tensor,
    format: str | Format = "nvfp4",
    recipe: str | Recipe = "default",
    global_scale: torch.Tensor | float | str | None = None,
    axis: int = -1,
    *,
    encode_scale: torch.Tensor | float | None = None,
    scale_layout: Layout | Chain | str,
) -> StoredQuantized: ...


def quantize(
    x: torch.Tensor,
    format: str | Format = "nvfp4",
    recipe: str | Recipe = "default",
    global_scale: torch.Tensor | float | str | None = None,
    axis: int = -1,
    *,
    encode_scale: torch.Tensor | float | None = None,
    scale_layout: Layout | Chain | str | None = None,
) -> QuantizedTensor | StoredQuantized:
    """Quantise x in blocks along ``axis``.

    Shapes, with k = x.shape[axis] a multiple of the block::

        x:            f32, bf16 or f16, any shape and strides; zero rows are fine
        global_scale: f32 [] or [experts] (3-D and up): the multiplier g; None: from the amax of x, ``g = amax / (6 * 448)``;
                      "per_expert": the same for each x[e]. Formats without a tensor scale (MXFP4, MXFP8, AMDFP4) take none
        encode_scale: 1 / g as FlashInfer and compressed-tensors hold it, for byte equality with them
        -> QuantizedTensor, codes and scale with ``axis`` moved last

    ``byte = scale_rule(amax of the block)``, ``code = round(x * factor(byte))``; every choice is in the Recipe. A block with NaN or
    infinity reads NaN under the default recipe and leaves the other blocks alone: the default g is taken from finite values only. An
    all-zero tensor has g = 1 and zero codes.

    ``scale_layout``: store the scale bytes straight in that layout (no second pass); the result is then a StoredQuantized.

    Raises FormatMismatch for a dtype, shape or second-level scale that does not fit, Fp4Error for an unknown recipe and for NaN or
    infinity where the recipe says "error".

    >>> q = fp4.quantize(torch.linspace(-6, 6, 32).reshape(1, 32), "mxfp4")
    >>> q.scale.tolist(), fp4.dequantize(q)[0, :3].tolist()
    ([[127]], [-6.0, -6.0, -6.0])
    """
    last, fmt, how, g, gs, per_expert = _arguments(x, format, recipe, global_scale, encode_scale, axis, "quantize")
    if scale_layout is not None:
        return _stored(last, fmt, how, g, gs, per_expert, _layout(scale_layout), tuple(x.shape), axis)
    op = quantize_last if straight(last) else torch.ops.fp4.quantize
    codes, scale, used = op(last, fmt.name, how.key, g, gs, per_expert)
    second = (g if g is not None else used) if fmt.tensor_scale else None
    if (g is not None or gs is not None) and second is not None and _readable(scale):  # on a GPU: a wait
        _warn_of_reciprocal(x, scale, second)
    return QuantizedTensor(fmt, codes, scale, second, tuple(x.shape), axis, how)


def _warn_of_reciprocal(x: torch.Tensor, scale: torch.Tensor, given: torch.Tensor) -> None:
    """Say so when a given second-level scale leaves subnormal block scales only. 1, the reciprocal of itself, is one level of scales."""
    if not scale.numel() or int(scale.max()) >= 8 or bool((given == 1).all()) or not x.any():
        return
    zeros = "" if scale.any() else ": the result is all zeros"
    warnings.warn(
        f"quantize: every block scale of x {list(x.shape)} is below 2^-6, where e4m3 loses precision{zeros}; global_scale is a "
        "multiplier, amax / 2688, and encode_scale its reciprocal: they may be exchanged",
        stacklevel=3,
    )


def _stored(
    x: torch.Tensor,
    fmt: Format,
    how: Recipe,
    g: torch.Tensor | None,
    gs: torch.Tensor | None,
    per_expert: bool,
    order: Layout | Chain,
    shape: tuple[int, ...],
    axis: int,
) -> StoredQuantized:
    if straight(x):
        codes, data, used = quantize_into(x, fmt, how, g, gs, per_expert, order)
    elif _catalogued(order):
        codes, data, used = torch.ops.fp4.quantize_stored(x, fmt.name, how.key, g, gs, per_expert, order.name)
    else:  # an op carries names only
        codes, plain, used = torch.ops.fp4.quantize(x, fmt.name, how.key, g, gs, per_expert)
        data = order.apply(plain.reshape(byte_shape(x, fmt)))
    second = g if g is not None else used
    second = second.detach() if fmt.tensor_scale and second is not None else None
    return StoredQuantized(fmt, codes, Stored(data, order, byte_shape(x, fmt)), second, shape, axis, how)


def dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of q, ``dtype`` q.shape: ``elem[code] * (scale * global_scale)``, in float32, rounded once to ``dtype`` (float64 holds the
    float32 values).

    A NaN scale byte makes its block NaN. A ue8m0 byte 0 is 2^-127 and 255 is NaN, as OCP MX v1.0 says. Raises FormatMismatch for
    anything but a QuantizedTensor and a floating-point dtype.

    >>> fp4.dequantize(fp4.quantize(torch.ones(1, 16), "nvfp4"), torch.bfloat16)[0, 0].item()
    1.0
    """
    if not isinstance(q, QuantizedTensor):
        hint = "call .restore() first" if hasattr(q, "restore") else "build one with fp4.QuantizedTensor(...)"
        raise FormatMismatch(f"dequantize: got {type(q).__name__}; need a QuantizedTensor; {hint}")
    check.float_dtype("dequantize", "dtype", dtype, wide=True)
    op = dequantize_last if straight(q.codes) else torch.ops.fp4.dequantize
    out: torch.Tensor = op(q.codes, q.scale, q.global_scale, q.format.name, dtype)
    return out.movedim(-1, q.axis)


def fake_quantize(
    x: torch.Tensor,
    format: str | Format = "nvfp4",
    recipe: str | Recipe = "default",
    global_scale: torch.Tensor | float | str | None = None,
    axis: int = -1,
    *,
    encode_scale: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """``dequantize(quantize(x, ...), x.dtype)``: same shape and dtype as x. The gradient passes straight through to x, and to x alone:
    a second-level scale that asks for one raises Unsupported.

    Arguments and errors as ``quantize``; Unsupported for forward-mode AD and ``torch.func``, which get no derivative here.

    >>> fp4.fake_quantize(torch.tensor([[0.3] * 31 + [6.0]]), "mxfp4")[0, :1].tolist()
    [0.5]
    """
    last, fmt, how, g, gs, per_expert = _arguments(x, format, recipe, global_scale, encode_scale, axis, "fake_quantize")
    for name, t in (("global_scale", global_scale), ("encode_scale", encode_scale)):
        if isinstance(t, torch.Tensor) and t.requires_grad and torch.is_grad_enabled():
            raise Unsupported(f"fake_quantize: {name} asks for a gradient, and x alone gets one; pass {name}.detach()")
    if not torch.compiler.is_compiling():
        check.no_tangent("fake_quantize", x, global_scale, encode_scale)
    out: torch.Tensor = torch.ops.fp4.fake_quantize(last, fmt.name, how.key, g, gs, per_expert)
    return out.movedim(-1, axis)


def _layout(layout: Layout | Chain | str) -> Layout | Chain:
    if isinstance(layout, str):
        return catalogue.parse(layout)
    if not isinstance(layout, (Layout, Chain)):
        raise Fp4Error(f"to_layout: layout is {type(layout).__name__}; need a Layout, a chain or text such as 'gate_up_pairs >> sf_128x4'")
    return layout


def _catalogued(order: Layout | Chain) -> bool:
    """Whether a name is all that an op needs to find the layout again."""
    return isinstance(order, Layout) and order.name in catalogue.names() and catalogue.get(order.name) == order


def to_layout(t: torch.Tensor | Stored, layout: Layout | Chain | str) -> Stored:
    """Bytes in another storage order.

    Shapes::

        t: u8 (or an 8-bit dtype) [..., rows, columns], logical order; or a Stored
        layout: a Layout, a chain, or their text: a catalogue name, a spec, or several joined with " >> "
        -> Stored with data u8 [..., layout.nbytes of one expert]

    A Stored in the same layout is returned as it is; in another it is LayoutMismatch: restore() it first. Raises LayoutError when
    the shape does not fit the layout.

    >>> fp4.to_layout(q.scale, "sf_128x4").data
    """
    order = _layout(layout)
    if isinstance(t, Stored):
        if t.layout == order:
            return t
        raise LayoutMismatch(
            f"to_layout: the bytes are stored as {t.layout}; need plain bytes to store them as {order}; call fp4.to_layout(t.restore(), ..)"
        )
    if not isinstance(t, torch.Tensor):
        raise FormatMismatch(f"to_layout: got {type(t).__name__}; need a byte tensor such as q.scale or q.codes")
    t = check.raw_bytes("to_layout", "t", t)
    shape = tuple(t.shape)
    if _catalogued(order) and len(shape) >= 2 and t.numel():
        data = torch.ops.fp4.to_layout(t, order.name)
    else:
        data = order.apply(t)
    return Stored(data, order, shape)
