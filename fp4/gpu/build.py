"""From logical tensors to a prepared weight: local experts, tensor-parallel shards, gate/up scales, the choice, the stored bytes."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from typing import Any

import torch

from fp4 import check, env, fuse, roles
from fp4.errors import BackendUnavailable, FormatMismatch, LayoutMismatch, Unsupported, shown
from fp4.formats import E4M3
from fp4.gpu import registry, scale_range
from fp4.gpu.device import Device
from fp4.gpu.problem import DTYPES, Problem
from fp4.prepared import Packed, Prepared, PreparedMoE, Weights, _Logical, pack
from fp4.tensor import QuantizedTensor, check_second_level, refuse_extras

__all__ = ["adopt", "prepare", "prepare_moe"]

log = logging.getLogger("fp4")

#: above this a global scale is no multiplier of a weight (amax / 2688), as for checkpoints
_LARGEST_SCALE = 1e2
_LARGE = "{}: global_scale {:g} makes weights of up to {:.3g}; a multiplier is amax / 2688, this looks like its own reciprocal"


def prepare(
    q: QuantizedTensor,
    backend: str | None = None,
    *,
    device: Device | torch.device | str | None = None,
    act: str = "any",
    act_dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
    extras_applied: bool = False,
) -> Prepared:
    """Choose a backend for a linear weight and store it the way that backend reads it.

    ``q``: QuantizedTensor [n, k], quantised along the axis that the product contracts. ``device``: where it shall run (default: where q
    is). ``act``: what may happen to x: "any" (the backend's choice, stated by ``explain``), "keep" (never quantised), or the format to
    quantise it to. ``act_dtype``, ``out_dtype``: the dtypes of x and of the result that calls will have; they take part in the choice and
    convert nothing, ``matmul`` has an ``out_dtype`` of its own. ``extras_applied``: the caller multiplies x and adds the low-rank
    branch of ``q.extras`` itself; without it such a tensor is refused, since its codes alone are another layer. Where nothing has to be
    rearranged (the CPU reference) the weight keeps q's memory, and ``restore`` gives a view of it: write to neither.

    Raises Unsupported with every backend's reason, FormatMismatch for a tensor that is no [n, k] weight.
    """
    if not isinstance(q, QuantizedTensor):
        raise FormatMismatch(
            f"prepare: got {type(q).__name__}; need a QuantizedTensor (fp4.quantize, or ck.quantized(name) of fp4.open_checkpoint)"
        )
    if q.codes.ndim != 2:
        raise FormatMismatch(f"prepare: weight has shape {list(q.shape)}; need [n, k]; stacked experts go to fp4.prepare_moe")
    if not extras_applied:
        refuse_extras("prepare", q, keyword="extras_applied=True")
    q = q.bare()
    where, facts = _place(q.device, device)
    problem = Problem(
        "matmul",
        q.format,
        facts,
        act=act,
        act_dtype=act_dtype,
        out_dtype=out_dtype,
        n=q.codes.shape[0],
        k=q.k,
        global_scales="none" if q.global_scale is None else "tensor",
        input_scale=q.input_scale is not None,
    )
    _check_scales("prepare", q)
    prepared = _build(Prepared, problem, Weights(w=q, device=where), backend, "prepare")
    assert isinstance(prepared, Prepared)
    return prepared


def prepare_moe(
    w13: QuantizedTensor | tuple[QuantizedTensor, QuantizedTensor],
    w2: QuantizedTensor,
    *,
    gate_up: str | None = None,
    bias13: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    activation: Any = None,
    backend: str | None = None,
    device: Device | torch.device | str | None = None,
    act: str = "any",
    act_dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
    topk: int | None = None,
    local_experts: tuple[int, int] | None = None,
    num_experts: int | None = None,
    tp: tuple[int, int] = (0, 1),
    extras_applied: bool = False,
) -> PreparedMoE:
    """Choose a backend for the experts of one MoE layer.

    ``w13 [experts, 2i, h]`` with rows in ``gate_up`` order ("interleaved", "gate_up", "up_gate"; [experts, i, h] and None for an
    activation without a gate), or the pair (gate, up), each [experts, i, h]: their global scales may differ and are kept.
    ``w2 [experts, h, i]``; ``bias13 [experts, 2i]`` in the same row order; ``bias2 [experts, h]``. ``activation`` defaults to SiLU().

    Expert parallel: ``local_experts = (start, stop)`` keeps that range of the given experts; with ``num_experts`` the tensors are
    already the local ones. Top-k ids stay global and ids outside the range contribute zero. Tensor parallel: ``tp = (rank, size)``
    takes that shard of i (gate and up separately, K between blocks, ``bias2`` on rank 0 only). ``act``, ``act_dtype``, ``out_dtype`` and
    ``extras_applied`` as in ``prepare``; ``topk``: ids a token that calls will have, for the choice. Raises FormatMismatch for tensors
    that are no such layer, LayoutMismatch for a ``gate_up`` that contradicts w13's own, Unsupported with every backend's reason.
    """
    from fp4.ref import activation as activations

    where_ = "prepare_moe"
    activation = activations.get("silu" if activation is None else activation)
    gated = activation.gated
    if not extras_applied:
        stacks = (*w13, w2) if isinstance(w13, (tuple, list)) else (w13, w2)
        refuse_extras(where_, *(q for q in stacks if isinstance(q, QuantizedTensor)), keyword="extras_applied=True")
    gate_up_scale: torch.Tensor | None = None
    first = w13 if isinstance(w13, (tuple, list)) else (w13,)
    if all(isinstance(q, QuantizedTensor) for q in (*first, w2)):
        roles.check_moe(where_, first, w2)
    if isinstance(w13, (tuple, list)):
        w13, gate_up_scale = _stack_gate_up(w13, gate_up)
        gate_up = "gate_up"
    a, b = _three_dim("w13", w13).bare(), _three_dim("w2", w2).bare()
    gate_up = _gate_up_order(a, gate_up, gated, activation)
    if a.format != b.format or a.codes.shape[0] != b.codes.shape[0]:
        raise FormatMismatch(f"{where_}: w13 is {a}, w2 is {b}; need the same format and number of experts")
    for name, given in (("bias13", bias13), ("bias2", bias2)):
        if isinstance(given, (tuple, list)):
            raise FormatMismatch(f"{where_}: {name} is {type(given).__name__}; need one tensor, the rows in the order of w13's")
        if given is not None:
            check.dense(where_, name, given, a.device)
    bias13, bias2 = (None if t is None else t.detach() for t in (bias13, bias2))
    tp = check.share(where_, "tp", tp)
    topk = None if topk is None else check.whole(where_, "topk", topk, 1)
    num_experts = None if num_experts is None else check.whole(where_, "num_experts", num_experts, 1)
    a, b, bias13, bias2, gate_up_scale, experts, local = _local(a, b, bias13, bias2, gate_up_scale, local_experts, num_experts)
    if tp[1] > 1:  # rows of w13 and columns of w2 are cut at the same places: between blocks of w2
        cut: dict[str, Any] = {"uneven": True, "gate_up": gate_up, "unit": b.format.block}
        a, bias13 = fuse.shard(a, "n", *tp, **cut), fuse.shard_bias(bias13, "n", *tp, **cut)
        b, bias2 = fuse.shard(b, "k", *tp, uneven=True), fuse.shard_bias(bias2, "k", *tp)
    inter, hidden, rows = b.k, a.k, a.codes.shape[1]
    if rows != inter * (2 if gated else 1) or b.codes.shape[1] != hidden:
        need = f"w13 [e, {2 if gated else 1} x {inter}, {hidden}] and w2 [e, {hidden}, {inter}]"
        raise FormatMismatch(f"{where_}: w13 holds [e, {rows}, {hidden}] and w2 [e, {b.codes.shape[1]}, {inter}]; need {need}")
    for name, bias, n in (("bias13", bias13, rows), ("bias2", bias2, hidden)):
        want = (a.codes.shape[0], n)
        if bias is not None and (tuple(bias.shape) != want or not bias.dtype.is_floating_point):
            raise FormatMismatch(f"{where_}: {name} is {bias.dtype} {list(bias.shape)}; need floating point {list(want)}")
    kinds = {0 if q.global_scale is None else 1 + q.global_scale.ndim for q in (a, b)}
    scales = ("none", "tensor", "expert")[max(kinds)]
    if gate_up_scale is not None:
        scales = "gate_up_foldable" if fuse.fold_gate_up(a, gate_up_scale, str(gate_up)) else "gate_up"
    where, facts = _place(a.device, device)
    problem = Problem(
        "moe",
        a.format,
        facts,
        act=act,
        act_dtype=act_dtype,
        out_dtype=out_dtype,
        bias=bias13 is not None or bias2 is not None,
        experts=experts,
        local=local,
        hidden=hidden,
        intermediate=inter,
        topk=topk,
        activation=activation,
        gate_up=gate_up,
        global_scales=scales,
        input_scale=a.input_scale is not None,
        tp=tp,
    )
    _check_scales(where_, a, b, gate_up_scale=gate_up_scale)
    weights = Weights(w13=a, w2=b, bias13=bias13, bias2=bias2, gate_up_scale=gate_up_scale, device=where)
    prepared = _build(PreparedMoE, problem, weights, backend, where_)
    assert isinstance(prepared, PreparedMoE)
    return prepared


def _three_dim(label: str, q: Any) -> QuantizedTensor:
    if not isinstance(q, QuantizedTensor) or q.codes.ndim != 3:
        got = f"shape {list(q.shape)}" if isinstance(q, QuantizedTensor) else type(q).__name__
        raise FormatMismatch(f"prepare_moe: {label} is {got}; need a QuantizedTensor [experts, n, k]")
    return q


def _place(source: torch.device, device: Device | torch.device | str | None) -> tuple[torch.device, Device]:
    """Where the arrays go and the facts of the device; with an injected Device the arrays stay where they are."""
    if isinstance(device, Device) or (isinstance(device, str) and device.lower().startswith("sm")):
        facts = Device.of(device)
        return (source, facts) if facts.torch.type == "meta" else (facts.torch, facts)
    Device.of(source if device is None else device)  # a typed error for a device that is none
    target = source if device is None else torch.device(device)
    if target.type == "meta" and source.type != "meta":
        raise FormatMismatch("prepare: device is meta, where a weight has no bytes; name the device that runs it, or a capability ('sm90')")
    if target.type == "cuda" and target.index is None:
        target = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return target, Device.of(target)


def _stack_gate_up(pair: Any, gate_up: str | None) -> tuple[QuantizedTensor, torch.Tensor | None]:
    """(gate, up) -> stacked [e, 2i, h] as halves gate, up; the scales f32 [e, 2] when they differ."""
    if len(pair) != 2 or not all(isinstance(q, QuantizedTensor) and q.codes.ndim == 3 for q in pair):
        raise FormatMismatch("prepare_moe: w13 is no pair of QuantizedTensors; need (gate, up), each [experts, intermediate, hidden]")
    if gate_up not in (None, "gate_up"):
        raise FormatMismatch(f"prepare_moe: gate_up is {shown(gate_up)} but w13 is the pair (gate, up); leave gate_up out")
    gate, up = pair
    if gate.format != up.format or gate.codes.shape != up.codes.shape or gate.device != up.device:
        raise FormatMismatch(f"prepare_moe: gate is {gate}, up is {up}; need the same format, shape and device")
    _has_bytes("prepare_moe", gate)
    e = gate.codes.shape[0]
    codes, scale = torch.cat([gate.codes, up.codes], 1), torch.cat([gate.scale, up.scale], 1)
    ins = [q.input_scale for q in pair]
    if (ins[0] is None) != (ins[1] is None) or (ins[0] is not None and not torch.equal(ins[0], ins[1])):
        raise FormatMismatch("prepare_moe: gate and up read the same x but carry different input_scale; give both the larger one")
    stacked = QuantizedTensor(gate.format, codes, scale, input_scale=ins[0], gate_up="gate_up", recipe=gate.recipe)
    if gate.global_scale is None and up.global_scale is None:
        return stacked, None
    one = torch.ones((), device=gate.device)
    both = torch.stack([(one if q.global_scale is None else q.global_scale).expand(e) for q in pair], 1).contiguous()
    if bool((both[:, 0] == both[:, 1]).all()):
        return replace(stacked, global_scale=both[:, 0].contiguous()), None
    return stacked, both


def _gate_up_order(w13: QuantizedTensor, gate_up: str | None, gated: bool, activation: Any) -> str | None:
    if not gated:
        if gate_up is not None:
            raise FormatMismatch(f"prepare_moe: {activation} has no gate, gate_up is {shown(gate_up)}; leave it out")
        return None
    if gate_up is None:
        gate_up = w13.gate_up
    if gate_up is None:
        raise FormatMismatch("prepare_moe: the order of gate and up rows is not known; pass gate_up='interleaved', 'gate_up' or 'up_gate'")
    if w13.gate_up is not None and w13.gate_up != gate_up:
        raise LayoutMismatch(f"prepare_moe: w13 says its rows are {w13.gate_up!r}, the call says {shown(gate_up)}; drop one of the two")
    return gate_up


def _range_of(local: Any) -> tuple[int, int]:
    """(start, stop) of ``local_experts``. A range unpacks into its elements, so it is taken by its ends; a list is no pair of ends: [2, 3]
    would read as the ids 2 and 3, and mean expert 2 alone."""
    if isinstance(local, range) and local.step == 1:
        return local.start, max(local.start, local.stop)
    if not isinstance(local, tuple) or len(local) != 2:
        raise FormatMismatch(f"prepare_moe: local_experts is {shown(local)}; need (start, stop) or range(start, stop)")
    start, stop = (check.whole("prepare_moe", "local_experts", n) for n in local)
    return start, stop


def _local(
    w13: QuantizedTensor,
    w2: QuantizedTensor,
    bias13: torch.Tensor | None,
    bias2: torch.Tensor | None,
    gate_up_scale: torch.Tensor | None,
    local: tuple[int, int] | None,
    num_experts: int | None,
) -> tuple[Any, ...]:
    """The local experts of everything that has an expert dimension, with the number of experts that ids speak of."""
    given = w13.codes.shape[0]
    total = given if num_experts is None else num_experts
    start, stop = (0, total) if local is None else _range_of(local)
    if not 0 <= start <= stop <= total:
        raise FormatMismatch(f"prepare_moe: local_experts ({start}, {stop}) is outside [0, {total}]")
    if num_experts is not None and given == stop - start and given != num_experts:
        pass  # already local
    elif given == total:
        if (start, stop) != (0, total):
            w13, w2 = fuse.slice_experts(w13, start, stop), fuse.slice_experts(w2, start, stop)
            bias13, bias2, gate_up_scale = (None if b is None else b[start:stop] for b in (bias13, bias2, gate_up_scale))
    else:
        raise FormatMismatch(
            f"prepare_moe: {given} experts given; need all {total} or the {stop - start} of local_experts ({start}, {stop})"
        )
    return w13, w2, bias13, bias2, gate_up_scale, total, None if (start, stop) == (0, total) else (start, stop)


def _has_bytes(where: str, q: QuantizedTensor) -> None:
    if q.device.type == "meta":
        raise FormatMismatch(f"{where}: {q} holds no bytes; load the weight first, then prepare it")


def _check_scales(where: str, *tensors: QuantizedTensor, gate_up_scale: torch.Tensor | None = None) -> None:
    """Bytes must exist and second-level scales make sense (a few values, read once). Under FP4_STRICT: no NaN or negative block scale."""
    for q in tensors:
        _has_bytes(where, q)
        of = f"{where}: {q.source['name']}" if "name" in q.source else where
        for name in ("global_scale", "input_scale"):
            t = getattr(q, name)
            if t is not None and type(t) in (torch.Tensor, torch.nn.Parameter):
                check_second_level(of, name, t)
                if name == "global_scale" and t.numel() and (most := float(t.max())) > _LARGEST_SCALE:
                    warnings.warn(_LARGE.format(of, most, most * q.format.elem.max * q.format.scale.max), stacklevel=3)
    if gate_up_scale is not None:
        for part, t in zip(("gate", "up"), gate_up_scale.unbind(1), strict=True):
            check_second_level(f"{where}: {part}", "global_scale", t)
    if not env.strict():
        return
    for q in tensors:
        nan = 0x7F if q.format.scale == E4M3 else 0xFF
        bad = ((q.scale & 0x7F) == nan) | (q.scale > 0x7F) if q.format.scale == E4M3 else q.scale == nan
        if bool(bad.any()):
            at = tuple(int(i) for i in bad.nonzero()[0])
            what = f"block scale {list(at)} is {q.format.scale.name} byte {int(q.scale[at]):#04x}"
            raise FormatMismatch(f"{where}: {what}, NaN or negative; repair the checkpoint")


def _build(
    cls: type[Prepared] | type[PreparedMoE], problem: Problem, weights: Weights, backend: str | None, where: str
) -> Prepared | PreparedMoE:
    chosen = registry.choose(problem, backend, where)
    ranking, passed = registry.rank(problem), {}
    while True:
        module = registry.get(chosen)
        layouts = registry.layouts(chosen, problem)
        own = getattr(module, "prepare", None)
        try:
            scale_range.check(where, chosen, scale_range.stated(module, problem), weights.named())
            packed = Packed(pack(problem, weights, layouts)) if own is None else own(problem, weights)
            break
        except Unsupported as e:  # the values, which no ranking looks at: the next backend, unless this one was asked for by name
            passed[chosen] = f"these values: {'; '.join(e.reasons.values()) or e}"
            rest = [c.name for c in ranking if c.verdict and c.name not in passed]
            if backend or env.backend():
                raise
            if not rest:
                raise Unsupported(f"{where}: no backend for the values of {problem}", {**ranking.reasons, **passed}) from e
            chosen = rest[0]
            log.warning("%s: %s was passed over for %s: %s", where, ", ".join(passed), chosen, list(passed.values())[-1])
    if not isinstance(packed, Packed) or not packed.arrays or not all(isinstance(t, torch.Tensor) for t in packed.arrays.values()):
        got = shown(packed.arrays if isinstance(packed, Packed) else packed)
        raise BackendUnavailable(
            f"{where}: prepare of backend {chosen!r} returned {got}; need a Packed of tensors; a fault of that backend"
        )
    out = cls(
        backend=chosen,
        problem=problem,
        arrays=packed.arrays,
        layouts=packed.layouts or layouts,
        logical={prefix: _Logical.of(q) for prefix, q in weights.named().items()},
        versions=packed.versions,
        meta=packed.meta,
        reasons="\n".join([str(ranking), *(f"  {name:18s} passed over: {why}" for name, why in passed.items())]),
        act_dtypes=packed.act_dtypes or _act_dtypes(module, problem),
    )
    out.bind()
    return out


def _act_dtypes(module: Any, problem: Problem) -> tuple[torch.dtype, ...]:
    """dtypes of x that the same stored bytes serve."""
    layouts = module.layouts(problem)
    out = []
    for dtype in dict.fromkeys((problem.act_dtype, *DTYPES)):
        other = replace(problem, act_dtype=dtype)
        if dtype == problem.act_dtype or (module.supports(other) and module.layouts(other) == layouts):
            out.append(dtype)
    return tuple(out)


def adopt(p: Prepared | PreparedMoE) -> Prepared | PreparedMoE:
    """A loaded object, ready to run where that is possible: bytes are kept when the backend still wants their layouts, else made anew."""
    facts = Device.of(p.device)
    if not facts.same_target(p.problem.device):
        return p  # restorable; bind() raises
    try:
        module = registry.get(p.backend)
    except BackendUnavailable:
        return p
    # the fill of padding may follow the values; it carries no meaning
    wants = {n: replace(s, fill=0) for n, s in module.layouts(p.problem).items()}
    if {n: replace(s, fill=0) for n, s in p.layouts.items() if n in wants} == wants:
        serves = _act_dtypes(module, p.problem)  # those of the file may be fewer: its values may not fit all
        return replace(p, act_dtypes=tuple(d for d in serves if d in p.act_dtypes), reasons=str(registry.rank(p.problem)))
    problem, kw = p.problem, {"act": p.problem.act, "act_dtype": p.problem.act_dtype, "out_dtype": p.problem.out_dtype}
    if isinstance(p, Prepared):
        return prepare(p.restore(), p.backend, device=p.device, **kw)  # type: ignore[arg-type]
    w13, w2 = p.restore()
    b13, b2 = p.restore_bias()
    order = None if isinstance(w13, tuple) else problem.gate_up
    return prepare_moe(
        w13, w2, gate_up=order, bias13=b13, bias2=b2, activation=problem.activation, backend=p.backend, device=p.device,
        topk=problem.topk, local_experts=problem.local, num_experts=problem.experts, **kw,  # type: ignore[arg-type]
    )  # fmt: skip
