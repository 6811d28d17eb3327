"""Stacked experts whose companions are named with an underscore: ModelOpt's GPT-OSS export and FastDeploy's parameters.

ModelOpt: ``experts.gate_up_proj`` U8 [e, h / 2, 2 i], packed along dimension 1, ``_weight_scale`` [e, h / 16, 2 i], one
``_weight_scale_2`` for all experts. FastDeploy: ``up_gate_proj_weight`` U8 [e, 2 i, h / 2], scales [e, 2 i, h / 16],
``_weight_scale_2`` [e, 2] (gate, up).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fp4 import formats
from fp4.checkpoint.linear import FLOATS, PACKED, plural, shown
from fp4.checkpoint.record import Record, Spec
from fp4.errors import CheckpointError

if TYPE_CHECKING:
    from fp4.checkpoint.base import Plan

__all__ = ["build_fused", "fused_floats"]


def fused_floats(plan: Plan, spec_of: Callable[[str], Spec | None]) -> None:
    """Raise CheckpointError for stacked experts that the config means to be quantised and the file holds as floats."""
    entries = plan.store.entries
    floats = [
        n
        for n in plan.free()
        if len(entries[n].shape) == 3 and entries[n].dtype in FLOATS and n.endswith("_proj") and "experts" in n and spec_of(n)
    ]
    if floats:
        spec = spec_of(floats[0])
        origin = spec.origin if spec else "the config"
        plan.disagree(f"{plural(len(floats), 'tensor')} not quantised in the file though {origin}: {shown(floats)}")


def build_fused(plan: Plan, spec_of: Callable[[str], Spec | None], why_not: Callable[[str], str]) -> None:
    """Add a record for each stacked expert tensor. Raises CheckpointError for missing or misshapen companions."""
    entries = plan.store.entries
    excluded, missing = [], []
    for name in plan.free():
        entry = entries[name]
        last = name.rpartition(".")[2]
        if len(entry.shape) != 3 or last in ("weight", "weight_packed", "weight_scale") or name.endswith(("_scale", "_blocks", "_scales")):
            continue
        fastdeploy = last.endswith("_weight")
        stem = name.removesuffix("_weight") if fastdeploy else name
        spec = spec_of(stem)
        if entry.dtype not in PACKED:
            continue
        if f"{stem}_weight_scale" not in entries:
            missing.append(f"{stem}_weight_scale")
            continue
        if spec is None and plan.has_config:
            excluded.append(stem)
            if not plan.trust_tensors:
                continue
        plan.add(_record(plan, name, stem, fastdeploy, spec))
        unused = f"{stem}_input_scale"
        if unused in entries and unused not in plan.used:
            plan.consume([unused])
            plan.once("input-unused", f"{unused}: a weight-only or dynamic activation does not use it; such scales are ignored")
    if missing:
        raise CheckpointError(
            f"{plan.place}: {plural(len(missing), 'block-scale tensor')} not found: {shown(missing)}; "
            "quantised weights cannot be read without"
        )
    if excluded:
        plan.disagree(f"{plural(len(excluded), 'module')} packed as FP4 in the file though {why_not(excluded[0])}: {shown(excluded)}")
    fused_floats(plan, spec_of)


def _record(plan: Plan, name: str, stem: str, fastdeploy: bool, spec: Spec | None) -> Record:
    entries, place = plan.store.entries, plan.file(name)
    codes, scale = entries[name], entries[f"{stem}_weight_scale"]
    fmt = formats.get(spec.format if spec is not None else "nvfp4")
    experts, a, b = codes.byte_shape
    n, k = (a, 2 * b) if fastdeploy else (b, 2 * a)
    if k % fmt.block:
        raise CheckpointError(f"{place}: {name} holds k = {k} (packed {k // 2} bytes), not a multiple of the {fmt} block {fmt.block}")
    groups = k // fmt.block
    want = (experts, n, groups) if fastdeploy else (experts, groups, n)
    allowed = ("F8_E4M3",) if fmt.scale.name == "e4m3" else ("U8", "F8_E8M0")
    if scale.shape != want or scale.dtype not in allowed:
        raise CheckpointError(
            f"{place}: {scale.name} is {scale.dtype} {list(scale.shape)}; {fmt} codes {list(codes.shape)} of k = {k} need "
            f"{' or '.join(allowed)} {list(want)}"
        )
    order = _order(plan, stem, fastdeploy)
    pairs = (2 * experts,) if order in ("gate_up", "up_gate") else ()
    parts = {"codes": name, "scale": scale.name}
    static = spec is not None and spec.static_input and plan.activations is None
    for role, suffix in (("global", "_weight_scale_2"), ("input", "_input_scale")):
        other = f"{stem}{suffix}"
        if other not in entries or (role == "input" and not static):
            continue
        count = 1
        for size in entries[other].shape:
            count *= size
        if count not in (1, experts, *pairs):
            halves = f"; rows are {order or 'of unknown order'}, so a value for each half means nothing" if count == 2 * experts else ""
            need = f", or [{experts}, 2]" if pairs else halves
            raise CheckpointError(f"{place}: {other} has shape {list(entries[other].shape)}; need one value or {experts}{need}")
        if entries[other].dtype not in ("F32", "BF16", "F16"):
            raise CheckpointError(f"{place}: {other} has dtype {entries[other].dtype}; need F32 (or BF16, F16, read by value)")
        parts[role] = other
    if fmt.tensor_scale and "global" not in parts:
        raise CheckpointError(f"{place}: second-level scale {stem}_weight_scale_2 not found; {fmt} under these names has one")
    if static and "input" not in parts:
        raise CheckpointError(
            f"{place}: 1 activation scale not found: {stem}_input_scale; the config asks for static ones; "
            "open with activations='weight_only' or activations='dynamic' to go on without"
        )
    logical = (experts, n, k)
    return Record(
        name=name,
        kind="block",
        parts=parts,
        shape=logical if fastdeploy else (experts, k, n),
        logical=logical,
        format=fmt,
        codes_order="n_k" if fastdeploy else "k_n",
        scale_order="n_k" if fastdeploy else "k_n",
        transposed=not fastdeploy,
        gate_up=order,
        origin=spec.origin if spec else "",
        activations="static" if "input" in parts else None,
        act=spec.act if spec else None,
    )


def _order(plan: Plan, stem: str, fastdeploy: bool) -> str | None:
    """Row order of a stacked gate/up tensor; None, with a warning, when neither model nor tensors tell it."""
    last = stem.rpartition(".")[2]
    if last not in ("gate_up_proj", "up_gate_proj"):
        return None
    kind = plan.config.model_type
    # GPT-OSS is the one family known to give its experts biases
    if kind.startswith("gpt_oss") or (not fastdeploy and f"{stem}_bias" in plan.store.entries):
        return "interleaved"
    if fastdeploy or kind.startswith(("llama4", "phi")):
        return "gate_up"
    plan.warn(f"{stem}: model_type {kind!r} does not tell the order of gate and up; gate_up is None")
    return None
