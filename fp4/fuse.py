"""Putting quantised tensors together and taking them apart, exactly or not at all.

Joining (q, k, v; gate and up): the parts may carry different global scales. ``scale_i * g_i`` must survive unchanged, so a part is
rescaled to the common ``g`` only when ``g_i / g`` is a power of two and every block scale times it is an e4m3 number again; anything
else is refused with the largest relative change that it would have cost (vllm#54974: taking the max is silently wrong).

Splitting (tensor and expert parallel): rows anywhere, K only between blocks, and everything with an expert dimension is sliced
with the experts (sglang#36597, vllm#49949).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch

from fp4 import check, roles
from fp4.errors import FormatMismatch, Unsupported, shown
from fp4.formats import E4M3
from fp4.tensor import GATE_UP_ORDERS, QuantizedTensor, refuse_extras

__all__ = ["expert_range", "fold_gate_up", "fuse", "rescale", "shard", "shard_bias", "slice_experts", "split_sizes", "stack"]


def __dir__() -> list[str]:
    return __all__


def rescale(scale: torch.Tensor, exponent: torch.Tensor | int) -> torch.Tensor | None:
    """E4M3 bytes times ``2^exponent`` (int, or int tensor that broadcasts), or None when one result is not an E4M3 number.

    Exact: mantissas move only into subnormals, and then only when no set bit falls off.
    """
    table = torch.from_numpy(E4M3.values.copy()).to(scale.device).double()
    value = table[scale.long()]
    exponent = torch.as_tensor(exponent, device=scale.device)
    wanted = torch.ldexp(value, exponent.double())
    if bool((wanted.abs() > E4M3.max).any()) or bool(value.isnan().any()):
        return None
    out = wanted.float().to(torch.float8_e4m3fn).view(torch.uint8)
    return out if bool((table[out.long()] == wanted).all()) else None


def _log2_ratio(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    """Integer ``log2(a / b)`` elementwise when every ratio is a power of two, 0 where both are zero, else None. ``a, b >= 0``."""
    ma, ea = torch.frexp(a.double())
    mb, eb = torch.frexp(b.double())
    if not bool((ma == mb).all()):
        return None
    return (ea - eb).to(torch.int64)


def _scale_of(q: QuantizedTensor) -> torch.Tensor:
    return torch.ones((), device=q.device) if q.global_scale is None else q.global_scale


def _tensors(where: str, given: Any) -> tuple[QuantizedTensor, ...]:
    """``given`` as a tuple of QuantizedTensor, at least one, all on one device."""
    if not isinstance(given, Iterable) or isinstance(given, (torch.Tensor, str, bytes, Mapping)):
        raise FormatMismatch(f"{where}: got {shown(given)}; need a list of QuantizedTensor")
    out = tuple(given)
    if not out:
        raise FormatMismatch(f"{where}: no tensors; need at least one")
    for i, q in enumerate(out):
        if not isinstance(q, QuantizedTensor):
            raise FormatMismatch(f"{where}: item {i} is {shown(q)}; need a QuantizedTensor")
        if q.device != out[0].device:
            raise FormatMismatch(f"{where}: item {i} is on {q.device}, item 0 on {out[0].device}; move all to one device")
    return out


def fuse(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Concatenate along rows: ``[n_i, k]`` -> ``[sum n_i, k]`` with one global scale, value for value equal to the parts.

    The activation scale is the largest of the parts': one x feeds them all, and nothing saturates. Raises Unsupported when no exact common
    global scale exists; keep the parts apart then (one ``prepare`` each). Raises FormatMismatch when formats, experts or k differ, or
    only some parts have an activation scale. Parts of one axis keep it.
    """
    parts = _tensors("fuse", parts)
    refuse_extras("fuse", *parts)
    first = parts[0]
    if first.codes.ndim < 2:
        raise FormatMismatch(f"fuse: item 0 is {first}; need rows to join, [(experts,) n, k]")
    orders = {q.gate_up for q in parts}
    if len(parts) > 1 and orders - {None} and orders != {"interleaved"}:
        raise FormatMismatch(
            f"fuse: the parts hold gate and up rows as {', '.join(sorted(map(repr, orders)))}; the halves of one would stand between "
            "those of the next; join gates with gates and ups with ups"
        )
    for q in parts[1:]:
        if q.format != first.format or q.codes.shape[:-2] != first.codes.shape[:-2] or q.k != first.k:
            raise FormatMismatch(f"fuse: {q} does not stack on {first}; need the same format, experts and k")
    has = any(q.global_scale is not None for q in parts)
    scales = [check.values("fuse", "global_scale", _scale_of(q)) if has else _scale_of(q) for q in parts]
    scales = [s.expand(first.codes.shape[0]) if any(t.ndim for t in scales) else s for s in scales]
    chosen = scales[0]
    best: list[torch.Tensor] | None = None
    for target in scales:
        moved: list[torch.Tensor] = []
        for q, s in zip(parts, scales, strict=True):
            if not has or bool((s == target).all()):
                moved.append(q.scale)
                continue
            zero = s == 0  # an all-zero part: block scales of 0 say the same under any global scale
            ratio = _log2_ratio(torch.where(zero, target, s), target) if q.format.scale == E4M3 else None
            wide = [1] * (q.scale.ndim - s.ndim)
            new = None if ratio is None else rescale(q.scale, ratio.reshape(*ratio.shape, *wide))
            if new is None:
                break
            moved.append(new.masked_fill(zero.reshape(*zero.shape, *wide), 0))
        if len(moved) == len(parts):
            best, chosen = moved, target
            break
    if best is None:
        spread = torch.stack([s.double() for s in scales])
        change = float((spread.max(0).values / spread.min(0).values.clamp_min(1e-300)).max()) - 1
        raise Unsupported(
            "fuse: the parts have different global scales and no exact common one exists "
            f"(taking the largest would change values by up to {change:.3g} relative); prepare them separately"
        )
    inputs = [q.input_scale for q in parts if q.input_scale is not None]
    if len(inputs) not in (0, len(parts)):
        raise FormatMismatch(f"fuse: {len(inputs)} of {len(parts)} parts have an input_scale; need all or none")
    x_scale = reduce(torch.maximum, inputs) if inputs else None
    codes = torch.cat([q.codes for q in parts], -2)
    second = chosen.clone() if has else None
    axis = first.axis if len({q.axis % len(q.shape) for q in parts}) == 1 else -1
    return QuantizedTensor(
        first.format, codes, torch.cat(best, -2), second, _shape(first, codes, axis), axis, first.recipe, x_scale, first.gate_up
    )


def stack(experts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """One weight an expert, ``[n, k]`` each -> ``[experts, n, k]`` with the global scale of each, value for value equal to the parts.

    For checkpoints that name every expert (Qwen3-MoE, DeepSeek): ``prepare_moe((stack(gates), stack(ups)), stack(downs), ...)``. The
    activation scale is kept as ``[experts]`` when every expert has one. Raises FormatMismatch when formats or shapes differ, when a
    part has an expert dimension already, or when only some parts have a global or an activation scale; LayoutMismatch when their names
    in a checkpoint say that they are other matrices, or experts sorted as text (0, 1, 10, 2).
    """
    experts = _tensors("stack", experts)
    refuse_extras("stack", *experts)
    first = experts[0]
    for i, q in enumerate(experts):
        if q.format != first.format or q.shape != first.shape or q.axis % len(q.shape) != first.axis % len(first.shape):
            raise FormatMismatch(f"stack: expert {i} is {q}, expert 0 is {first}; need one format and shape")
        if q.codes.ndim != 2:
            raise FormatMismatch(f"stack: expert {i} is {q}; need [n, k]")
        if q.gate_up != first.gate_up:
            raise FormatMismatch(f"stack: expert {i} has its rows as {q.gate_up!r}, expert 0 as {first.gate_up!r}; need one order")

    source = roles.check_experts("stack", experts)

    def second(name: str) -> torch.Tensor | None:
        have = [s for s in (getattr(q, name) for q in experts) if s is not None]
        if len(have) not in (0, len(experts)):
            raise FormatMismatch(f"stack: {len(have)} of {len(experts)} experts have a {name}; need all or none")
        return torch.stack([s.reshape(()) for s in have]) if have else None

    return QuantizedTensor(
        first.format,
        torch.stack([q.codes for q in experts]),
        torch.stack([q.scale for q in experts]),
        second("global_scale"),
        shape=(len(experts), *first.shape),
        axis=1 + first.axis % 2,
        recipe=first.recipe,
        input_scale=second("input_scale"),
        gate_up=first.gate_up,
        source=source,
    )


def fold_gate_up(w13: QuantizedTensor, scales: torch.Tensor, order: str) -> tuple[QuantizedTensor, torch.Tensor] | None:
    """One global scale an expert instead of two, exactly, or None.

    ``w13 [e, 2i, h]`` in gate/up ``order``, ``scales`` f32 [e, 2] (gate, up). Returns w13 with ``global_scale`` [e] and the exponents
    int64 [e, 2] by which gate and up block scales were multiplied, so that ``rescale(scale, -exponent)`` undoes it.
    """
    from fp4.gpu.storage import reorder_gate_up

    if w13.format.scale != E4M3:
        return None
    s = reorder_gate_up(w13.scale, order, "gate_up")
    s = s.reshape(s.shape[0], 2, s.shape[1] // 2, s.shape[2])  # [e, 2, i, blocks]
    for keep in (0, 1):  # the other half moves; which one can depends on its range
        ratio = _log2_ratio(scales, scales[:, keep : keep + 1].expand_as(scales))
        moved = None if ratio is None else rescale(s, ratio[:, :, None, None])
        if ratio is not None and moved is not None:
            stacked = reorder_gate_up(moved.flatten(1, 2), "gate_up", order)
            return replace(w13, scale=stacked, global_scale=scales[:, keep].contiguous()), ratio
    return None


def split_sizes(blocks: int, size: int) -> list[int]:
    """Blocks of each rank, as even as possible, the first ranks one more: 5 blocks over 4 ranks -> [2, 1, 1, 1]."""
    blocks, size = check.whole("split_sizes", "blocks", blocks, 0), check.whole("split_sizes", "size", size, 1)
    return [blocks // size + (r < blocks % size) for r in range(size)]


def _rows(n: int, gate_up: str | None, rank: int, size: int, unit: int, uneven: bool) -> tuple[int, int, int]:
    """(groups, start, length) of a rank's rows: ``groups`` equal parts (gate, up), and in each the rows [start, start + length)."""
    groups = 2 if gate_up in ("gate_up", "up_gate") else 1
    unit *= 2 if gate_up == "interleaved" else 1  # never between a gate row and its up row
    if n % (groups * unit):
        raise FormatMismatch(f"shard: {n} rows are no multiple of {groups * unit} (gate/up parts x unit)")
    units = n // groups // unit
    if units % size and not uneven:
        raise FormatMismatch(f"shard: {n} rows as {units} units of {groups * unit} do not split over tp = {size}; pass uneven=True")
    sizes = split_sizes(units, size)
    if not sizes[-1]:  # on every rank, not on those alone that would be empty: the others would wait for them
        raise FormatMismatch(f"shard: {units} units of rows over tp = {size}: rank {units} would get none; use a smaller tp")
    return groups, sum(sizes[:rank]) * unit, sizes[rank] * unit


def _take(t: torch.Tensor, dim: int, groups: int, start: int, length: int) -> torch.Tensor:
    """Rows [start, start + length) of each of ``groups`` equal parts of ``t`` along ``dim`` (negative)."""
    per = t.shape[dim] // groups
    return torch.cat([t.narrow(dim, g * per + start, length) for g in range(groups)], dim)


def _shape(q: QuantizedTensor, codes: torch.Tensor, axis: int) -> tuple[int, ...]:
    """The shape of the values of ``codes`` when their quantised dimension is ``axis``."""
    shape = [*codes.shape[:-1], codes.shape[-1] * q.format.codes_per_byte]
    shape.insert(axis % len(shape), shape.pop())
    return tuple(shape)


def _part(q: QuantizedTensor, codes: torch.Tensor, scale: torch.Tensor, **second: Any) -> QuantizedTensor:
    """A part of q along rows, blocks or experts, with q's axis: its values are that part of q's values, not their transpose."""
    return replace(q, codes=codes, scale=scale, shape=_shape(q, codes, q.axis), source={}, **second)


def _cut(where: str, dim: Any, rank: Any, size: Any, gate_up: Any, unit: Any) -> tuple[int, int, int]:
    """(rank, size, unit) of a cut. A misspelt ``dim`` or ``gate_up`` must not become another cut, nor rank -1 the last one."""
    check.choice(where, "dim", dim, ("n", "k"))
    check.choice(where, "gate_up", gate_up, GATE_UP_ORDERS, optional=True)
    return *check.share(where, "(rank, size)", (rank, size)), check.whole(where, "unit", unit, 1)


def shard(
    q: QuantizedTensor, dim: str, rank: int, size: int, *, uneven: bool = False, gate_up: str | None = None, unit: int = 1
) -> QuantizedTensor:
    """Rank ``rank`` of ``size`` of a weight ``[(experts,) n, k]``: ``dim`` "n" (column parallel) or "k" (row parallel).

    Rows: gate and up are split each on its own, so the shard keeps the order (``gate_up`` defaults to ``q.gate_up``), in units of
    ``unit`` rows. K splits only between blocks. An uneven split is refused unless ``uneven``, which gives the first ranks one unit or
    block more. Concatenated shards are the original; partial outputs of "k" shards add up to the whole.
    """
    if not isinstance(q, QuantizedTensor) or q.codes.ndim < 2:
        raise FormatMismatch(f"shard: got {shown(q)}; need a QuantizedTensor [(experts,) n, k]")
    rank, size, unit = _cut("shard", dim, rank, size, gate_up, unit)
    refuse_extras("shard", q)
    if dim == "n":
        part = _rows(q.codes.shape[-2], gate_up or q.gate_up, rank, size, unit, uneven)
        return _part(q, _take(q.codes, -2, *part), _take(q.scale, -2, *part))
    g, k = q.format.block, q.k
    blocks = k // g
    if blocks % size and not uneven:
        columns = ", ".join(str(b * g) for b in split_sizes(blocks, size))
        raise FormatMismatch(
            f"shard: k = {k} over tp = {size} cuts a block of {g} ({blocks} blocks); pass uneven=True for {columns} columns"
        )
    sizes = split_sizes(blocks, size)
    start, length = sum(sizes[:rank]), sizes[rank]
    if not sizes[-1]:
        raise FormatMismatch(
            f"shard: k = {k} has {blocks} blocks of {g}, rank {blocks} of {size} would get none; use a tp of {blocks} or less"
        )
    per = g // q.format.codes_per_byte
    codes, scale = q.codes.narrow(-1, start * per, length * per), q.scale.narrow(-1, start, length)
    return _part(q, codes.contiguous(), scale.contiguous())


def shard_bias(
    bias: torch.Tensor | None, dim: str, rank: int, size: int, *, uneven: bool = False, gate_up: str | None = None, unit: int = 1
) -> torch.Tensor | None:
    """The bias ``[(experts,) n]`` of a shard: like the rows for "n"; for "k" whole on rank 0, None elsewhere, so that sums hold it once."""
    rank, size, unit = _cut("shard_bias", dim, rank, size, gate_up, unit)
    if bias is None:
        return None
    if check.dense("shard_bias", "bias", bias).ndim < 1 or not bias.is_floating_point():
        raise FormatMismatch(f"shard_bias: bias is {shown(bias)}; need floating point [(experts,) n]")
    if dim == "k":
        return bias if rank == 0 else None
    return _take(bias, -1, *_rows(bias.shape[-1], gate_up, rank, size, unit, uneven))


def expert_range(experts: int, rank: int, size: int) -> tuple[int, int]:
    """[start, stop) of an expert-parallel rank; the first ranks hold one more when ``experts % size``."""
    experts = check.whole("expert_range", "experts", experts, 1)
    rank, size = check.share("expert_range", "ep", (rank, size))
    if size > experts:
        raise FormatMismatch(f"expert_range: {shown(experts)} experts over {shown(size)} ranks; need 0 <= rank < size <= experts")
    start, stop = (r * (experts // size) + min(r, experts % size) for r in (rank, rank + 1))
    return start, stop


def slice_experts(q: QuantizedTensor, start: int, stop: int) -> QuantizedTensor:
    """Experts [start, stop): codes, scales and every per-expert second-level scale (sglang#36597)."""
    if not isinstance(q, QuantizedTensor) or q.codes.ndim < 3:
        raise FormatMismatch(f"slice_experts: got {shown(q)}; need a QuantizedTensor [experts, n, k]")
    stop = check.whole("slice_experts", "stop", stop, 0, q.codes.shape[0])
    start = check.whole("slice_experts", "start", start, 0, stop)
    second = {n: None if (t := getattr(q, n)) is None else (t[start:stop] if t.ndim else t) for n in ("global_scale", "input_scale")}
    return _part(q, q.codes[start:stop], q.scale[start:stop], **second)
