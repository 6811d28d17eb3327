"""Checks of arguments, one for each kind of value: numbers, names, tensors. Every verb takes what a caller gave it through these, so that
a value of another kind is one typed sentence and never an error of Python or torch from further inside."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._C import _functorch
from torch.autograd import forward_ad

from fp4.errors import FormatMismatch, Fp4Error, Unsupported, shown

__all__ = ["FLOATS", "axis", "choice", "dense", "device", "float_dtype", "no_tangent", "path", "raw_bytes", "share", "values", "whole"]

#: dtypes of values on the way in and out
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_MOST = (1 << 63) - 1

#: method of a subclass of torch's whose memory is not the whole tensor, what it is, the way out
_SUBCLASSES = (
    ("full_tensor", "whose parts lie on several ranks", "pass .to_local(), this rank's part, or .full_tensor()"),
    ("get_mask", "of which some elements are no numbers", "call .to_tensor(0)"),
)


def whole(
    where: str, what: str, value: Any, low: int | None = None, high: int | None = None, error: type[Fp4Error] = FormatMismatch
) -> int:
    """``value`` as an int from ``low`` to ``high``, at most 64 bits. 2.5 rows must not become 2, nor True one, nor a string a number."""
    traced = isinstance(value, torch.SymInt) or (type(value) is int and torch.compiler.is_compiling())
    # of a traced size an index would make a constant, and a bound that every size keeps would be a guard
    if traced and (low is None or value >= low) and (high is None or high >= _MOST or value <= high):
        return value  # type: ignore[no-any-return]
    number: int | None = value if type(value) is int else None
    if number is None and not isinstance(value, (bool, np.bool_)) and getattr(value, "dtype", None) != torch.bool:
        with contextlib.suppress(Exception):  # a tensor without values, or of several, has errors of its own
            number = operator.index(value)
    if number is None or not (-_MOST if low is None else low) <= number <= (_MOST if high is None else high):
        span = "" if low is None else f" from {low} to {high}" if high is not None else f" of {low} or more"
        bits = ", in 64 bits" if number is not None and abs(number) > _MOST else ""
        raise error(f"{where}: {what} is {shown(value)}; need a whole number{span}{bits}")
    return number


def axis(where: str, value: Any, shape: Sequence[int]) -> int:
    """``value`` when it is a dimension of ``shape``; negative ones count from the end."""
    number = whole(where, "axis", value)
    if not -len(shape) <= number < len(shape):
        raise FormatMismatch(f"{where}: axis {number} is outside shape {list(shape)}")
    return number


def choice(where: str, what: str, value: Any, known: Collection[str], optional: bool = False) -> str | None:
    """``value`` when it is one of ``known``, or None where that is allowed."""
    if (value is None and optional) or (isinstance(value, str) and value in known):
        return value
    raise FormatMismatch(f"{where}: {what} is {shown(value)}; need one of {', '.join(known)}{' or None' if optional else ''}")


def share(where: str, what: str, value: Any) -> tuple[int, int]:
    """(rank, size) of a parallel group."""
    try:
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise FormatMismatch("")
        size = whole("", "", value[1], 1)
        return whole("", "", value[0], 0, size - 1), size
    except FormatMismatch:
        raise FormatMismatch(f"{where}: {what} is {shown(value)}; need (rank, size) with 0 <= rank < size") from None


def float_dtype(where: str, what: str, value: Any, optional: bool = False, wide: bool = False) -> None:
    """Refuse what is none of FLOATS, nor, where the reference computes, float64 (``wide``)."""
    known = (*FLOATS, torch.float64) if wide else FLOATS
    if not (value is None and optional) and not (isinstance(value, torch.dtype) and value in known):
        more = ", torch.float64" if wide else ""
        raise FormatMismatch(f"{where}: {what} is {shown(value)}; need torch.float32{more}, torch.bfloat16 or torch.float16")


def dense(where: str, what: str, t: Any, device: torch.device | None = None, error: type[Fp4Error] = FormatMismatch) -> torch.Tensor:
    """``t`` when it is a tensor in ordinary memory: not sparse, not nested, not of torch's own quantised dtypes, which have no bytes that
    a view could show, and without the negative bit (``z.conj().imag``), which a kernel that reads the memory does not see. ``device``:
    where its values are needed; the meta device has none to bring there."""
    if not isinstance(t, torch.Tensor):
        raise error(f"{where}: {what} is {type(t).__name__}; need a torch.Tensor")
    if type(t) is not torch.Tensor and not torch.compiler.is_compiling():
        for method, kind, way in _SUBCLASSES:
            if hasattr(t, method):
                raise error(f"{where}: {what} is a {type(t).__name__}, {kind}; need a plain tensor; {way}")
    if t.is_nested or t.layout is not torch.strided:
        kind = "nested" if t.is_nested else str(t.layout).removeprefix("torch.")
        way = "each part by itself" if t.is_nested else "call .to_dense()"
        raise error(f"{where}: {what} is a {kind} tensor; need a dense tensor; {way}")
    if t.is_quantized:
        raise error(
            f"{where}: {what} is {t.dtype}, torch's own quantised type; need plain numbers or bytes; call .dequantize() or .int_repr()"
        )
    if not torch.compiler.is_compiling() and t.is_neg():
        raise error(f"{where}: {what} is a view with torch's negative bit, whose memory holds -{what}; call .resolve_neg()")
    if device is not None and t.device.type == "meta" and device.type != "meta":
        raise error(f"{where}: {what} is on the meta device and has no values; load it first, {device} needs them")
    return t


def values(where: str, what: str, t: torch.Tensor) -> torch.Tensor:
    """``t`` when it has values that may be read: no tensor of the meta device, no fake one."""
    if t.device.type == "meta" or type(t).__name__ == "FakeTensor":
        raise FormatMismatch(
            f"{where}: {what} has no values here ({'meta device' if t.device.type == 'meta' else 'fake tensor'}); load it first"
        )
    return t


def no_tangent(where: str, *tensors: Any) -> None:
    """Refuse what forward-mode AD or a derivative of ``torch.func`` follows: kernels see the values alone, and a tangent that is left out
    reads as a derivative of zero."""
    for t in tensors:
        followed = False
        while isinstance(t, torch.Tensor) and _functorch.is_functorch_wrapped_tensor(t):
            followed = followed or _functorch.is_gradtrackingtensor(t)
            t = _functorch.get_unwrapped(t)
        dual = forward_ad._current_level >= 0 and isinstance(t, torch.Tensor)
        if followed or (dual and forward_ad.unpack_dual(t).tangent is not None):  # type: ignore[no-untyped-call]
            raise Unsupported(f"{where}: torch.func and forward-mode AD do not get a derivative through it; use backward() or no_grad()")


def device(where: str, value: Any) -> torch.device:
    """``value`` as a device that torch can use here."""
    try:
        found = torch.device(value)
    except (RuntimeError, TypeError, ValueError):
        raise FormatMismatch(f"{where}: {shown(value)} is no torch device; need 'cpu', 'cuda', 'cuda:1' ...") from None
    if found.type == "cuda" and not 0 <= (found.index or 0) < torch.cuda.device_count():
        raise FormatMismatch(f"{where}: {found} was asked for and torch sees {torch.cuda.device_count()} CUDA devices; use 'cpu'")
    return found


def path(where: str, value: Any, error: type[Fp4Error] = Fp4Error) -> Path:
    """``value`` as the Path of a file or folder: text or os.PathLike, on one line."""
    name = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(name, str) or not name or any(c < " " for c in name):
        raise error(f"{where}: path is {shown(value)}; need the name of a file or folder, without control characters")
    return Path(name)


def raw_bytes(where: str, what: str, t: Any, error: type[Fp4Error] = FormatMismatch) -> torch.Tensor:
    """``t`` as uint8: it is that, or a view of an 8-bit dtype such as torch.float8_e4m3fn."""
    t = dense(where, what, t, error=error)
    if t.element_size() != 1 or t.dtype == torch.bool:
        raise error(f"{where}: {what} has dtype {t.dtype}; need raw bytes (uint8 or an 8-bit dtype)")
    as_u8: torch.Tensor = t if t.dtype == torch.uint8 else t.view(torch.uint8)
    return as_u8
