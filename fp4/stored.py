"""Bytes in a storage order together with that order: what ``to_layout`` and ``quantize(..., scale_layout=L)`` return."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp4.formats import Format
from fp4.layout import Chain, Layout
from fp4.recipe import Recipe
from fp4.tensor import QuantizedTensor, second_level

__all__ = ["Stored", "StoredQuantized"]


@dataclass(frozen=True, eq=False)
class Stored:
    """Bytes in a storage order, together with that order: what ``to_layout`` returns.

    Shapes::

        data:  u8 [..., nbytes of one expert], storage order of ``layout``, padding filled with ``layout.fill``
        shape: logical byte shape [..., rows, columns]

    A tensor attribute would be lost by the first view; the object carries the tag, so a second ``to_layout`` is an error and not
    a double swizzle (modular#6600).
    """

    data: torch.Tensor
    layout: Layout | Chain
    shape: tuple[int, ...]

    def restore(self) -> torch.Tensor:
        """The logical bytes, u8 ``shape``."""
        plain: torch.Tensor = self.layout.invert(self.data, self.shape)
        return plain

    def __repr__(self) -> str:
        return f"Stored({self.layout}, shape={list(self.shape)}, {self.data.numel()} bytes, device={self.data.device})"


@dataclass(frozen=True, eq=False)
class StoredQuantized:
    """A quantised tensor whose scales were written straight into a storage layout: ``quantize(..., scale_layout=L)``.

    ``codes`` and ``global_scale`` as in QuantizedTensor; ``scale`` is a Stored. ``restore()`` gives the QuantizedTensor.
    """

    format: Format
    codes: torch.Tensor
    scale: Stored
    global_scale: torch.Tensor | None
    shape: tuple[int, ...]
    axis: int
    recipe: Recipe

    def restore(self) -> QuantizedTensor:
        """The same tensor with plain scales."""
        columns = self.codes.shape[-1] * self.format.codes_per_byte // self.format.block  # no -1: there may be no rows
        plain = self.scale.restore().reshape(*self.codes.shape[:-1], columns)
        return QuantizedTensor(self.format, self.codes, plain, self.global_scale, self.shape, self.axis, self.recipe)

    def __repr__(self) -> str:
        second = f"{second_level(self.global_scale)}, scale={self.scale.layout}"
        return f"StoredQuantized({self.format}, shape={list(self.shape)}{second}, device={self.codes.device})"
