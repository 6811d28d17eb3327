"""Block-scale bytes that a kernel reads as the format means them. ``prepare`` refuses the others before anything is stored.

A backend states them with ``exact_scale_range(problem) -> (first, last)``; one that states nothing reads every byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fp4.errors import FormatMismatch, Unsupported
from fp4.gpu.problem import Problem
from fp4.tensor import QuantizedTensor

__all__ = ["EVERY", "check", "outside", "stated"]

EVERY = (0x00, 0xFF)


def stated(module: Any, problem: Problem) -> tuple[int, int]:
    """What a backend, or a path of one, says of a problem."""
    own = getattr(module, "exact_scale_range", None)
    return EVERY if own is None else own(problem)


def outside(q: QuantizedTensor, limits: tuple[int, int]) -> torch.Tensor | None:
    """bool mask like ``q.scale`` of bytes outside ``limits``, or None when there is none. Reads the scales once.

    A scale that is a number, neither NaN nor negative, counts as inside over a block of zeros of either sign: their product is zero.
    """
    low, high = limits
    if limits == EVERY:
        return None
    bad = (q.scale < low) | (q.scale > high)
    if not bool(bad.any()):
        return None
    each = q.format.codes_per_byte
    codes = q.codes.reshape(*q.scale.shape, q.format.block // each)
    bad &= (codes & (0x77 if each == 2 else 0x7F)).ne(0).any(-1) | _no_number(q)
    return bad if bool(bad.any()) else None


def _no_number(q: QuantizedTensor) -> torch.Tensor:
    """bool mask of bytes that are NaN or a negative scale."""
    values = q.format.scale.values
    return torch.from_numpy(np.isnan(values) | np.signbit(values)).to(q.scale.device)[q.scale.long()]


def check(where: str, backend: str, limits: tuple[int, int], tensors: dict[str, QuantizedTensor]) -> None:
    """Refuse tensors with bytes outside ``limits``: NaN and negative scales raise FormatMismatch, as no backend makes numbers of them;
    others raise Unsupported, so that another backend takes the weight.
    """
    for prefix, q in tensors.items():
        bad = outside(q, limits)
        if bad is None:
            continue
        broken = bad & _no_number(q)
        final = bool(broken.any())
        at = (broken if final else bad).nonzero()[0].tolist()
        of = f" of {prefix.removesuffix('.')}" if prefix else ""
        why = (
            f"{where}: block scale byte {int(q.scale[tuple(at)]):#04x} at {at}{of} is outside {limits[0]:#04x}..{limits[1]:#04x}, which "
            f"{backend} reads differently from {q.format}; repair the checkpoint or use backend='triton' or 'reference'"
        )
        if final:
            raise FormatMismatch(why)
        raise Unsupported(f"{where}: {backend} cannot hold these block scales", {backend: why})
