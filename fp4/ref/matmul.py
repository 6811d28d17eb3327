"""Reference product with a block-quantised weight: the values that every backend is compared with."""

from __future__ import annotations

from dataclasses import replace

import torch

from fp4 import check
from fp4.errors import FormatMismatch, shown
from fp4.ref.quantize import dequantize_blocks
from fp4.tensor import QuantizedTensor, refuse_extras

__all__ = ["ACCUMULATORS", "check_input", "expert", "matmul", "product", "weight"]

#: dtypes in which the reference may multiply and add
ACCUMULATORS = (torch.float32, torch.float64)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a [.., m, k] @ b [k, n]`` in their dtype, float32 or float64, whatever the process is set to.

    An ``autocast`` region would round both to bfloat16, and so would ``set_float32_matmul_precision("medium")`` on a CPU ("high" takes
    TF32 on a GPU): 2e-3 relative, without a word. The first is left; under the second, which is no setting of one thread, a float32
    product is taken in float64.
    """
    kind = a.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return product(a, b)
    if a.dtype == torch.float32 and _shortened(kind):
        return (a.double() @ b.double()).float()
    return a @ b


def _shortened(kind: str) -> bool:
    """Whether torch may take float32 products in fewer bits on this kind of device."""
    of = torch.backends.cuda if kind == "cuda" else torch.backends.mkldnn
    return of.matmul.fp32_precision not in ("none", "ieee")  # type: ignore[union-attr]


def weight(q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The stored matrix in ``dtype``: ``[..., n, k]``, the quantised axis last, whatever ``q.axis`` says.

    float32 is ``fp4.dequantize``, bit for bit. In float64 the products are exact: ``elem[code] * scale`` needs at most 2 + 4 significand
    bits and the global scale 24 more.
    """
    where = f"{q.format} {list(q.shape)}"
    if dtype not in ACCUMULATORS:
        raise FormatMismatch(f"{where}: dtype is {dtype}; the reference computes in float32 or float64")
    if dtype == torch.float32:
        return dequantize_blocks(q.codes, q.scale, q.global_scale, q.format)
    value = dequantize_blocks(q.codes, q.scale, None, q.format).to(dtype)
    if q.global_scale is not None:
        g = q.global_scale.to(dtype)
        value = value * (g.reshape(-1, *[1] * (value.ndim - 1)) if g.ndim else g)
    return value


def expert(q: QuantizedTensor, e: int) -> QuantizedTensor:
    """Expert ``e`` of a tensor with a leading expert dimension: ``[experts, n, k] -> [n, k]``, with its own global scale."""
    if q.codes.ndim != 3:
        raise FormatMismatch(f"expert: codes have shape {list(q.codes.shape)}; need [experts, n, k / {q.format.codes_per_byte}]")
    one = {name: t[e] if t.ndim else t for name in ("global_scale", "input_scale") if (t := getattr(q, name)) is not None}
    return replace(q, codes=q.codes[e], scale=q.scale[e], shape=(), axis=-1, **one)


def check_input(where: str, x: torch.Tensor, k: int, device: torch.device) -> None:
    """Refuse an input that is not a float tensor [..., k] on the weight's device."""
    if not check.dense(where, "x", x).dtype.is_floating_point:
        raise FormatMismatch(f"{where}: x is {x.dtype}; need a floating-point tensor [..., {k}]")
    if x.ndim < 1 or x.shape[-1] != k:
        raise FormatMismatch(f"{where}: x has shape {list(x.shape)}; the weight needs [..., {k}]")
    if x.device != device:
        raise FormatMismatch(f"{where}: x is on {x.device}, the weight on {device}; move both to one device")


def check_bias(where: str, bias: torch.Tensor | None, shape: tuple[int, ...], device: torch.device) -> None:
    """Refuse a bias of another shape or device."""
    if bias is None:
        return
    if not check.dense(where, "bias", bias).dtype.is_floating_point or tuple(bias.shape) != shape:
        raise FormatMismatch(f"{where}: bias is {bias.dtype} {list(bias.shape)}; need floating point {list(shape)}")
    if bias.device != device:
        raise FormatMismatch(f"{where}: bias is on {bias.device}, the weight on {device}; move both to one device")


def matmul(
    x: torch.Tensor,
    q: QuantizedTensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    acc: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``y = x @ dequantize(q).T + bias``, computed in ``acc`` and rounded once to ``out_dtype``.

    Shapes::

        x:    float [..., k]      any strides, zero rows allowed
        q:    [n, k], quantised along k
        bias: float [n] or None
        y:    out_dtype [..., n]  default: x.dtype

    Raises FormatMismatch when a shape, dtype or device disagrees.

    >>> import fp4, torch
    >>> codes = torch.full((2, 8), 0x22, dtype=torch.uint8)                   # 1.0 everywhere
    >>> q = fp4.QuantizedTensor(format="nvfp4", codes=codes, scale=torch.full((2, 1), 0x38, dtype=torch.uint8))
    >>> matmul(torch.ones(1, 16), q)
    tensor([[16., 16.]])
    """
    where = "matmul"
    if not isinstance(acc, torch.dtype) or acc not in ACCUMULATORS:
        raise FormatMismatch(f"{where}: acc is {shown(acc)}; need torch.float32 or torch.float64")
    check.float_dtype(where, "out_dtype", out_dtype, optional=True, wide=True)
    if not isinstance(q, QuantizedTensor):
        raise FormatMismatch(f"{where}: the weight is {type(q).__name__}; need a QuantizedTensor [n, k]")
    if q.codes.ndim != 2:
        raise FormatMismatch(f"{where}: the weight has shape {list(q.shape)}; need [n, k], or call fp4.moe for stacked experts")
    refuse_extras(where, q)
    check_input(where, x, q.k, q.codes.device)
    check_bias(where, bias, (q.codes.shape[0],), q.codes.device)
    y = product(x.to(acc), weight(q, acc).T)
    if bias is not None:
        y = y + bias.to(acc)
    return y.to(out_dtype or x.dtype)
