"""Reference mixture of experts: two products an expert with an activation between them, weighted and added.

Weights of a gated layer come stacked, ``w13 [experts, 2i, h]`` in one of three row orders, or as the pair ``(gate, up)``, each
``[experts, i, h]``. A pair keeps two global scales exactly; a stacked tensor has one an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fp4.check import choice, dense, float_dtype
from fp4.errors import FormatMismatch, shown
from fp4.ref import activation as activations
from fp4.ref.activation import Activation
from fp4.ref.matmul import ACCUMULATORS, check_bias, check_input, expert, matmul
from fp4.tensor import GATE_UP_ORDERS, QuantizedTensor

__all__ = ["MoE", "check", "moe"]

Pair = tuple[Any, Any]


@dataclass(frozen=True)
class MoE:
    """A checked problem: sizes, the activation, the first matrix as one or two parts with one bias each."""

    experts: int
    hidden: int
    inter: int
    activation: Activation
    #: order of the rows of parts[0] when it is one stacked gate/up matrix, else None
    order: str | None
    parts: tuple[QuantizedTensor, ...]
    biases: tuple[torch.Tensor | None, ...]
    #: global ids of the experts held here
    local: range


def check(
    w13: QuantizedTensor | tuple[QuantizedTensor, QuantizedTensor],
    w2: QuantizedTensor,
    *,
    gate_up: str | None,
    activation: Activation | str,
    bias13: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    bias2: torch.Tensor | None = None,
    local_experts: range | None = None,
) -> MoE:
    """Compare weights, biases, activation and order with one another. Raises FormatMismatch with the first disagreement."""
    where = "moe"
    act = activations.get(activation)
    parts = tuple(w13) if isinstance(w13, (tuple, list)) else (w13,)
    if len(parts) not in (1, 2):
        raise FormatMismatch(f"{where}: w13 is a sequence of {len(parts)} tensors; need one stacked tensor or the pair (gate, up)")
    for name, q in [*((f"w13[{i}]" if len(parts) == 2 else "w13", q) for i, q in enumerate(parts)), ("w2", w2)]:
        if not isinstance(q, QuantizedTensor):
            raise FormatMismatch(f"{where}: {name} is {type(q).__name__}; need a QuantizedTensor [experts, n, k]")
        if q.codes.ndim != 3:
            raise FormatMismatch(f"{where}: {name} has shape {list(q.shape)}; need [experts, n, k]")
    order = _order(where, gate_up, act, parts)

    experts, rows, hidden = parts[0].codes.shape[0], parts[0].codes.shape[1], parts[0].k
    device = parts[0].codes.device
    inter = rows // 2 if act.gated and len(parts) == 1 else rows
    if act.gated and len(parts) == 1 and rows % 2:
        raise FormatMismatch(f"{where}: w13 has {rows} rows; a gated activation needs an even number, gate and up")
    if len(parts) == 2 and (parts[1].codes.shape[:2] != parts[0].codes.shape[:2] or parts[1].k != hidden):
        raise FormatMismatch(f"{where}: gate is {list(parts[0].shape)} and up is {list(parts[1].shape)}; need equal shapes")
    got2 = [w2.codes.shape[0], w2.codes.shape[1], w2.k]
    if got2 != [experts, hidden, inter]:
        raise FormatMismatch(f"{where}: w2 is {got2} and {act.name} with w13 of {rows} rows needs {[experts, hidden, inter]}")
    for q in (*parts[1:], w2):
        if q.codes.device != device:
            raise FormatMismatch(f"{where}: weights are on {device} and {q.codes.device}; move all to one device")
    check_bias(f"{where} w2", bias2, (experts, hidden), device)

    local = range(experts) if local_experts is None else local_experts
    if not isinstance(local, range) or local.step != 1 or len(local) != experts or local.start < 0:
        raise FormatMismatch(
            f"{where}: local_experts is {shown(local_experts)}; need range(first, first + {experts}), the global ids held here"
        )
    return MoE(experts, hidden, inter, act, order, parts, _biases(where, bias13, order, parts, device), local)


def _order(where: str, gate_up: str | None, act: Activation, parts: tuple[QuantizedTensor, ...]) -> str | None:
    if not act.gated:
        if gate_up is not None or len(parts) == 2:
            raise FormatMismatch(
                f"{where}: {act.name} has no gate, but w13 is given with gate/up order {shown(gate_up)}; pass gate_up=None"
            )
        return None
    choice(where, "gate_up", gate_up, GATE_UP_ORDERS, optional=True)
    if len(parts) == 2:
        return gate_up
    recorded = parts[0].gate_up
    if recorded is not None and gate_up is not None and recorded != gate_up:
        raise FormatMismatch(f"{where}: w13 records its rows as {recorded!r} and gate_up says {gate_up!r}; pass gate_up={recorded!r}")
    order = gate_up or recorded
    if order is None:
        raise FormatMismatch(f"{where}: the row order of w13 is not known; pass gate_up, one of {', '.join(GATE_UP_ORDERS)}")
    return order


def _biases(where: str, bias13: Any, order: str | None, parts: tuple[QuantizedTensor, ...], device: torch.device) -> tuple[Any, ...]:
    """One bias a part. A stacked bias beside a pair is split by ``order``."""
    if bias13 is None:
        return (None,) * len(parts)
    if len(parts) == 2 and isinstance(bias13, torch.Tensor):
        if order is None:
            raise FormatMismatch(f"{where}: bias13 is stacked and its order is not known; pass gate_up, or a pair (gate, up)")
        check_bias(f"{where} w13", bias13, (parts[0].codes.shape[0], 2 * parts[0].codes.shape[1]), device)
        return activations.split_gate_up(bias13, order)
    biases = tuple(bias13) if isinstance(bias13, (tuple, list)) else (bias13,)
    if len(biases) != len(parts):
        raise FormatMismatch(f"{where}: w13 comes as {len(parts)} tensor(s) and bias13 as {len(biases)}; give both the same way")
    for q, bias in zip(parts, biases, strict=True):
        check_bias(f"{where} w13", bias, tuple(q.codes.shape[:2]), device)
    return biases


def check_routing(where: str, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
    """Refuse ids and weights that do not fit ``x`` [t, h]. Values are not looked at: an id outside the local range is legal."""
    if x.ndim != 2:
        raise FormatMismatch(f"{where}: x has shape {list(x.shape)}; need [t, h]")
    dense(where, "topk_ids", topk_ids)
    dense(where, "topk_weights", topk_weights)
    if topk_ids.dtype not in (torch.int8, torch.int16, torch.int32, torch.int64) or topk_ids.ndim != 2 or topk_ids.shape[0] != x.shape[0]:
        raise FormatMismatch(f"{where}: topk_ids is {topk_ids.dtype} {list(topk_ids.shape)}; need signed integers [{x.shape[0]}, topk]")
    if not topk_weights.dtype.is_floating_point or topk_weights.shape != topk_ids.shape:
        raise FormatMismatch(
            f"{where}: topk_weights is {topk_weights.dtype} {list(topk_weights.shape)}; need floating point {list(topk_ids.shape)}"
        )
    for name, t in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if t.device != x.device:
            raise FormatMismatch(f"{where}: {name} is on {t.device}, x on {x.device}; move both to one device")


def moe(
    x: torch.Tensor,
    w13: QuantizedTensor | tuple[QuantizedTensor, QuantizedTensor],
    w2: QuantizedTensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    gate_up: str | None = None,
    activation: Activation | str,
    bias13: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    bias2: torch.Tensor | None = None,
    local_experts: range | None = None,
    acc: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
    requantize: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """``y[t] = sum over j of topk_weights[t, j] * (w2[e] @ act(w13[e] @ x[t] + bias13[e]) + bias2[e])``, ``e = topk_ids[t, j]``.

    Shapes::

        x:            float [t, h], t may be 0
        w13:          [experts, 2i, h] in the order ``gate_up`` | (gate, up), each [experts, i, h] | [experts, i, h] when not gated
        w2:           [experts, h, i]
        topk_ids:     int [t, topk], global expert ids; an id outside ``local_experts``, negative too, contributes nothing
        topk_weights: float [t, topk]; never multiplied when its id contributes nothing
        bias13:       [experts, 2i] in the order of w13, or a pair; bias2: [experts, h]
        y:            out_dtype [t, h], default x.dtype

    ``local_experts`` is the range of global ids that the weights hold, default ``range(experts)``. Everything is computed in ``acc`` and
    rounded once at the end. ``requantize`` is applied to the input of each product (a backend with quantised activations passes its
    quantiser followed by its dequantiser). Raises FormatMismatch when anything disagrees.
    """
    where = "moe"
    if not isinstance(acc, torch.dtype) or acc not in ACCUMULATORS:
        raise FormatMismatch(f"{where}: acc is {shown(acc)}; need torch.float32 or torch.float64")
    float_dtype(where, "out_dtype", out_dtype, optional=True, wide=True)
    if requantize is not None and not callable(requantize):
        raise FormatMismatch(f"{where}: requantize is {shown(requantize)}; need a function of a tensor, or None")
    p = check(w13, w2, gate_up=gate_up, activation=activation, bias13=bias13, bias2=bias2, local_experts=local_experts)
    check_input(where, x, p.hidden, w2.codes.device)
    check_routing(where, x, topk_ids, topk_weights)

    y = torch.zeros(x.shape[0], p.hidden, dtype=acc, device=x.device)
    for e in range(p.experts):
        token, slot = torch.where(topk_ids == p.local[e])
        if not len(token):
            continue
        rows = x[token].to(acc)
        if requantize is not None:
            rows = requantize(rows)
        products = [matmul(rows, expert(q, e), None if b is None else b[e], acc=acc) for q, b in zip(p.parts, p.biases, strict=True)]
        hidden = p.activation(*products) if len(products) == 2 else activations.apply(p.activation, products[0], p.order)
        if requantize is not None:
            hidden = requantize(hidden)
        out = matmul(hidden, expert(w2, e), None if bias2 is None else bias2[e], acc=acc)
        y.index_add_(0, token, out * topk_weights[token, slot].to(acc).unsqueeze(-1))
    return y.to(out_dtype or x.dtype)
