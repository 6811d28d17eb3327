"""Activation and block quantisation in one pass: the golden quantiser with the activation in front of it."""

from __future__ import annotations

import torch

from fp4.errors import FormatMismatch
from fp4.formats import Format, get
from fp4.layout import Layout
from fp4.recipe import Recipe
from fp4.ref.activation import Activation, split_gate_up
from fp4.ref.activation import get as get_activation
from fp4.ref.triton_quantize import quantize_blocks

__all__ = ["act_and_quantize"]


def act_and_quantize(
    h: torch.Tensor,
    activation: Activation | str,
    gate_up: str | None,
    format: Format | str,
    recipe: Recipe,
    global_scale: torch.Tensor | None = None,
    scale_layout: Layout | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``quantize(activation(gate, up))`` of the first product of an MoE layer, reading h once and writing codes and scales once.

    Shapes::

        h:            bf16, fp16 or f32 [..., 2 i] in ``gate_up`` order, or [..., i] for a plain activation (gate_up=None)
        global_scale: f32 [] or [h.shape[0]] (h 3-D: one an expert), or None
        -> codes u8 [..., i / codes_per_byte]; scale u8 [..., i / block], or in ``scale_layout``'s order

    The activation runs in float32 and is rounded to h's dtype before its blocks are measured, as FlashInfer's
    ``silu_and_mul_scaled_nvfp4_experts_quantize`` does. Raises FormatMismatch for an order, a dtype or a size that does not fit.
    """
    fmt, act = get(format), get_activation(activation)
    if h.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise FormatMismatch(f"act_and_quantize: h is {h.dtype}; need bfloat16, float16 or float32")
    gate, up = h, None
    if act.gated:
        if gate_up is None:
            raise FormatMismatch(f"act_and_quantize: {act.name} needs gate_up, the order of h's columns")
        gate, up = split_gate_up(h, gate_up)
    elif gate_up is not None:
        raise FormatMismatch(f"act_and_quantize: {act.name} has no gate, but gate_up is {gate_up!r}; pass None")
    if gate.shape[-1] % fmt.block:
        raise FormatMismatch(f"act_and_quantize: {gate.shape[-1]} columns are not a multiple of the {fmt} block {fmt.block}")
    return quantize_blocks(gate, fmt, recipe, global_scale, scale_layout=scale_layout, activation=act, up=up)
