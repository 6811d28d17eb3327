"""The torch.library ops ``fp4::quantize``, ``quantize_stored``, ``dequantize``, ``fake_quantize`` and ``to_layout``, with their fakes.

Each has its quantised axis last and its recipe, format and layout by name. An eager call of a plain tensor runs the body itself
(``straight``); everything else goes through the dispatcher.
"""

from __future__ import annotations

from typing import Any

import torch

from fp4 import formats
from fp4 import layouts as catalogue
from fp4 import recipe as recipe_module
from fp4.formats import Format
from fp4.layout import Chain, Layout
from fp4.recipe import Recipe
from fp4.ref import quantize as ref

__all__ = ["byte_shape", "dequantize_last", "quantize_into", "quantize_last", "straight", "watched"]


def _on_gpu(x: torch.Tensor) -> bool:
    return x.device.type == "cuda"


_modes, _tracer, _compiling = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state, torch.compiler.is_compiling
_transforms = torch._C._functorch.peek_interpreter_stack


def watched() -> bool:
    """Whether a compiler, a tracer, a dispatch mode or a transform of torch.func (vmap) notes what runs: it sees ops, and of a launched
    kernel only the empty output."""
    return bool(_compiling() or _modes() or _tracer() is not None or _transforms() is not None)


def straight(x: torch.Tensor) -> bool:
    """Call the op's body itself: an eager plain tensor without a gradient. The first call through the dispatcher imports all of
    torch's compiler, several seconds in every process that only wants numbers."""
    return type(x) is torch.Tensor and not watched() and not (x.requires_grad and torch.is_grad_enabled())


def quantize_last(
    x: torch.Tensor, format: str, recipe: str, global_scale: torch.Tensor | None, encode_scale: torch.Tensor | None, per_expert: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(codes, scale, the global scale that was used or None)."""
    fmt, how = formats.get(format), recipe_module.get(recipe)
    g, gs = ref.resolve_global_scale(x, fmt, how, global_scale, encode_scale, per_expert)
    if _on_gpu(x):
        from fp4.ref import triton_quantize

        chained = global_scale is None and encode_scale is None
        codes, scale = triton_quantize.quantize_blocks(x, fmt, how, g, gs, chained=chained)
    else:
        codes, scale = ref.quantize_blocks(x, fmt, how, g, gs)
    return codes, scale, g


def _returnable(used: torch.Tensor | None, given: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """An op may not return None, nor an input."""
    if used is None:
        return torch.ones((), dtype=torch.float32, device=x.device)
    return used.clone() if used is given else used


@torch.library.custom_op("fp4::quantize", mutates_args=())
def _quantize_op(
    x: torch.Tensor, format: str, recipe: str, global_scale: torch.Tensor | None, encode_scale: torch.Tensor | None, per_expert: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes, scale, used = quantize_last(x, format, recipe, global_scale, encode_scale, per_expert)
    return codes, scale, _returnable(used, global_scale, x)


@_quantize_op.register_fake
def _quantize_fake(
    x: torch.Tensor, format: str, recipe: str, global_scale: torch.Tensor | None, encode_scale: torch.Tensor | None, per_expert: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    fmt = formats.get(format)
    k = x.shape[-1]
    codes = x.new_empty((*x.shape[:-1], k // fmt.codes_per_byte), dtype=torch.uint8)
    scale = x.new_empty((*x.shape[:-1], k // fmt.block), dtype=torch.uint8)
    given = global_scale if global_scale is not None else encode_scale
    shape = () if not fmt.tensor_scale else given.shape if given is not None else (x.shape[0],) if per_expert else ()
    return codes, scale, x.new_empty(shape, dtype=torch.float32)


def byte_shape(x: torch.Tensor, fmt: Format) -> tuple[int, ...]:
    """Shape of the scale bytes of x [.., k] as a layout reads them: a vector is one row."""
    return (*(x.shape[:-1] if x.ndim > 1 else (1,)), x.shape[-1] // fmt.block)


def quantize_into(
    x: torch.Tensor, fmt: Format, how: Recipe, g: torch.Tensor | None, gs: torch.Tensor | None, per_expert: bool, order: Layout | Chain
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """As ``quantize_last``, the scales in the storage order of ``order``: by the kernel's own stores where it can, else by ``apply``."""
    chained = g is None and gs is None
    g, gs = ref.resolve_global_scale(x, fmt, how, g, gs, per_expert)
    if _on_gpu(x):
        from fp4.ref import triton_quantize

        direct = order if isinstance(order, Layout) and order.word is None and order.unit == "byte" and x.ndim <= 3 else None
        own = direct is not None
        codes, scale = triton_quantize.quantize_blocks(x, fmt, how, g, gs, scale_layout=direct, chained=chained)
    else:
        own = False
        codes, scale = ref.quantize_blocks(x, fmt, how, g, gs)
    data: torch.Tensor = scale if own else order.apply(scale.reshape(byte_shape(x, fmt)))
    if not own and data.untyped_storage().data_ptr() == scale.untyped_storage().data_ptr():
        data = data.clone()
    return codes, data, g


@torch.library.custom_op("fp4::quantize_stored", mutates_args=())
def _quantize_stored_op(
    x: torch.Tensor,
    format: str,
    recipe: str,
    global_scale: torch.Tensor | None,
    encode_scale: torch.Tensor | None,
    per_expert: bool,
    layout: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    fmt, how = formats.get(format), recipe_module.get(recipe)
    codes, data, used = quantize_into(x, fmt, how, global_scale, encode_scale, per_expert, catalogue.get(layout))
    return codes, data, _returnable(used, global_scale, x)


@_quantize_stored_op.register_fake
def _(
    x: torch.Tensor,
    format: str,
    recipe: str,
    global_scale: torch.Tensor | None,
    encode_scale: torch.Tensor | None,
    per_expert: bool,
    layout: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes, _, second = _quantize_fake(x, format, recipe, global_scale, encode_scale, per_expert)
    return codes, _stored_fake(x, byte_shape(x, formats.get(format)), layout), second


def _stored_fake(x: torch.Tensor, shape: tuple[int, ...], layout: str) -> torch.Tensor:
    """u8 [..., bytes of one expert, padding included]; symbolic sizes stay symbolic."""
    order = catalogue.get(layout)
    if all(type(n) is int for n in shape):
        size = order.nbytes(shape[-2:])
    else:
        pad, width = order.pad or (None, None), order.units_per_byte
        units = (shape[-2], shape[-1] * width)
        rows, columns = (-(-n // m) * m if p is not None else n for n, m, p in zip(units, order.multiple, pad, strict=True))
        size = rows * (columns // width)
    return x.new_empty((*shape[:-2], size), dtype=torch.uint8)


def dequantize_last(
    codes: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None, format: str, dtype: torch.dtype
) -> torch.Tensor:
    fmt = formats.get(format)
    if _on_gpu(codes):
        from fp4.ref import triton_quantize

        narrow = torch.float32 if dtype == torch.float64 else dtype
        out: torch.Tensor = triton_quantize.dequantize_blocks(codes, scale, global_scale, fmt, narrow)
        return out.to(dtype)
    return ref.dequantize_blocks(codes, scale, global_scale, fmt, dtype)


_dequantize_op = torch.library.custom_op("fp4::dequantize", dequantize_last, mutates_args=())


@_dequantize_op.register_fake
def _(codes: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None, format: str, dtype: torch.dtype) -> torch.Tensor:
    return codes.new_empty((*codes.shape[:-1], codes.shape[-1] * formats.get(format).codes_per_byte), dtype=dtype)


@torch.library.custom_op("fp4::fake_quantize", mutates_args=())
def _fake_quantize_op(
    x: torch.Tensor, format: str, recipe: str, global_scale: torch.Tensor | None, encode_scale: torch.Tensor | None, per_expert: bool
) -> torch.Tensor:
    codes, scale, g = _quantize_op(x, format, recipe, global_scale, encode_scale, per_expert)
    second = g if formats.get(format).tensor_scale and global_scale is None else global_scale
    out: torch.Tensor = _dequantize_op(codes, scale, second, format, x.dtype)
    return out


@_fake_quantize_op.register_fake
def _(
    x: torch.Tensor, format: str, recipe: str, global_scale: torch.Tensor | None, encode_scale: torch.Tensor | None, per_expert: bool
) -> torch.Tensor:
    return x.new_empty(x.shape)


def _straight_through(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return grad, None, None, None, None, None


_fake_quantize_op.register_autograd(_straight_through)


@torch.library.custom_op("fp4::to_layout", mutates_args=())
def _to_layout_op(x: torch.Tensor, layout: str) -> torch.Tensor:
    y: torch.Tensor = catalogue.get(layout).apply(x)
    return y.clone() if y.data_ptr() == x.data_ptr() else y


@_to_layout_op.register_fake
def _(x: torch.Tensor, layout: str) -> torch.Tensor:
    return _stored_fake(x, tuple(x.shape), layout)
