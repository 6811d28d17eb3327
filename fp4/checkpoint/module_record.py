"""The Record of one module whose tensors are a path plus suffixes: format by dtype and shape, every companion checked."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fp4 import formats
from fp4.checkpoint.record import MULTIPLY, Record, Rule, Spec
from fp4.checkpoint.safetensors_file import Entry
from fp4.errors import CheckpointError

if TYPE_CHECKING:
    from fp4.checkpoint.base import Plan

__all__ = ["FLOATS", "FP8", "PACKED", "Leaves", "infer_format", "make_record", "plural", "shown"]

PACKED = frozenset({"U8", "I8", "F4"})
FP8 = frozenset({"F8_E4M3", "F8_E5M2"})
FLOATS = frozenset({"BF16", "F16", "F32", "F64"})

_SCALE_DTYPES = {"e4m3": ("F8_E4M3",), "ue8m0": ("U8", "F8_E8M0"), "ue5m3": ("U8",)}
_SCALARS = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class Leaves:
    """Suffixes of one producer: ``codes`` is tried in order; scalars with the rule that makes them multipliers."""

    codes: tuple[str, ...] = ("weight",)
    scale: tuple[str, ...] = ("weight_scale",)
    second: dict[str, Rule] = field(default_factory=lambda: {"weight_scale_2": MULTIPLY})
    input: dict[str, Rule] = field(default_factory=lambda: {"input_scale": MULTIPLY})
    #: other companions: suffix -> role
    others: dict[str, str] = field(default_factory=dict)
    #: suffixes that may be in a file and mean nothing for weights
    ignored: frozenset[str] = frozenset()


def plural(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def shown(names: Iterable[str]) -> str:
    """Up to ten names and a count."""
    names = [n if n.isprintable() else repr(n) for n in names]
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def infer_format(codes: Entry, scale: Entry) -> str | None:
    """Format that the dtypes and shapes alone allow; None when none does. U8 scales with a ratio of 16 stay undecided ("u8/16")."""
    if codes.dtype in FP8:
        k = codes.shape[-1] if codes.shape else 0
        micro = scale.dtype in ("U8", "F8_E8M0") and len(scale.shape) == len(codes.shape) and scale.shape[-1] * 32 == k
        return "mxfp8" if micro and scale.shape[:-1] == codes.shape[:-1] else "fp8"
    k = codes.byte_shape[-1] * 2 if codes.shape else 0
    groups = scale.shape[-1] if scale.shape else 0
    ratio = k / groups if groups else 0.0
    if scale.dtype == "F8_E4M3":
        return {16.0: "nvfp4", 32.0: "nvfp4_b32"}.get(ratio)
    if scale.dtype in ("U8", "F8_E8M0"):
        return {32.0: "mxfp4", 16.0: "u8/16" if scale.dtype == "U8" else None}.get(ratio)
    return None


def make_record(
    plan: Plan, module: str, codes: Entry, scale: Entry, spec: Spec | None, leaves: Leaves, have: dict[str, str], name: str | None = None
) -> Record:
    """The checked Record of one module. Raises CheckpointError naming module, tensor, file, expected and found."""
    where = f"{plan.file(codes.name)}: module {module!r}"
    seen = infer_format(codes, scale)
    wanted = spec.format if spec is not None else None
    if seen == "u8/16":
        if wanted != "amdfp4":
            raise CheckpointError(
                f"{where}: {scale.name} is U8 with one scale for 16 elements; only a config that says e5m3 explains that, and "
                f"{spec.origin if spec else 'no config entry covers it'}"
            )
        seen = "amdfp4"
    name = name or f"{module}.weight"
    if codes.dtype in FP8:
        if wanted not in (None, "fp8", "mxfp8") and not plan.trust_tensors:
            raise CheckpointError(f"{where}: {codes.name} has dtype {codes.dtype} though {spec.origin if spec else ''}; need packed U8")
        if seen == "mxfp8" and wanted in (None, "mxfp8"):
            return _block(plan, where, name, "mxfp8", codes, scale, spec, leaves, have)
        if wanted == "mxfp8":
            raise CheckpointError(
                f"{where}: {scale.name} is {scale.dtype} {list(scale.shape)}; MXFP8 needs U8 or F8_E8M0, one for 32 elements"
            )
        return _fp8(plan, where, name, codes, scale, spec, leaves, have)
    if wanted in ("fp8", "mxfp8") and not plan.trust_tensors:
        raise CheckpointError(f"{where}: {codes.name} is packed {codes.dtype} though {spec.origin if spec else ''}")
    if plan.trust_tensors or wanted is None:
        wanted = seen or wanted
    if wanted is None:
        raise CheckpointError(
            f"{where}: {scale.name} is {scale.dtype} {list(scale.shape)} for codes {list(codes.byte_shape)}; need F8_E4M3 with one for 16 "
            "or 32 elements, or E8M0 bytes with one for 32"
        )
    return _block(plan, where, name, wanted, codes, scale, spec, leaves, have)


def _block(
    plan: Plan, where: str, name: str, fmt_name: str, codes: Entry, scale: Entry, spec: Spec | None, leaves: Leaves, have: dict[str, str]
) -> Record:
    fmt = formats.get(fmt_name)
    packed = codes.byte_shape
    if len(packed) < 2:
        raise CheckpointError(f"{where}: {codes.name} has shape {list(packed)}; need [.., n, k / {fmt.codes_per_byte}]")
    logical = (*packed[:-1], packed[-1] * fmt.codes_per_byte)
    k = logical[-1]
    swizzled = codes.name in plan.swizzled
    if k % fmt.block:
        raise CheckpointError(
            f"{where}: {codes.name} holds k = {k} (packed {packed[-1]} bytes), not a multiple of the {fmt} block {fmt.block}"
        )
    want = (*logical[:-1], k // fmt.block)
    allowed = _SCALE_DTYPES[fmt.scale.name]
    if scale.dtype not in allowed:
        raise CheckpointError(f"{where}: {scale.name} has dtype {scale.dtype}; {fmt} needs {' or '.join(allowed)}")
    if scale.shape != want or swizzled:
        tiles = math.prod(want[:-2]) * 512 * -(-want[-2] // 128) * -(-want[-1] // 4)
    if swizzled and math.prod(scale.shape) != tiles:
        raise CheckpointError(f"{where}: {scale.name} has {math.prod(scale.shape)} bytes; 128x4 tiles of {list(want)} need {tiles}")
    if not swizzled and scale.shape != want:
        hint = "; that is the size of swizzled 128x4 tiles, which these names do not store" if math.prod(scale.shape) == tiles else ""
        raise CheckpointError(
            f"{where}: {scale.name} has shape {list(scale.shape)}; weight {list(logical)} (packed {list(packed)}) needs {list(want)}{hint}"
        )
    order = row_order(plan, name, logical)
    parts = {"codes": codes.name, "scale": scale.name}
    for leaf, role in leaves.others.items():
        if leaf in have:
            parts[role] = have[leaf]
    rules: dict[str, Rule] = {}
    experts = math.prod(logical[:-2])
    for role, table in (("global", leaves.second), ("input", leaves.input)):
        found = next((x for x in table if x in have), None)
        if found is None:
            continue
        if role == "input" and not (spec is not None and spec.static_input and plan.activations is None):
            continue
        entry = plan.store.entries[have[found]]
        count = math.prod(entry.shape)
        # [experts, 2] speaks of the rows' first and second half, so of gate and up only when they are stored as halves
        pairs = (2 * experts,) if order in ("gate_up", "up_gate") else ()
        if count != 1 and (len(logical) < 3 or count not in (experts, *pairs)):
            raise CheckpointError(
                f"{where}: {entry.name} has shape {list(entry.shape)}; need one value"
                + (f" or {experts}" if len(logical) > 2 else "")
                + (
                    f" (rows are {order or 'not a stack of gate and up'}, so a value for each half means nothing)"
                    if count == 2 * experts
                    else ""
                )
            )
        if entry.dtype not in _SCALARS:
            raise CheckpointError(f"{where}: {entry.name} has dtype {entry.dtype}; need F32 (or BF16, F16, read by value)")
        parts[role], rules[role] = entry.name, table[found]
    if fmt.tensor_scale and "global" not in parts and leaves.second:
        leaf = next(iter(leaves.second))
        raise CheckpointError(f"{where}: second-level scale {have_name(name, leaf)} not found; {fmt} under these names has one")
    if not fmt.tensor_scale and "global" in parts:
        raise CheckpointError(
            f"{where}: {parts['global']} exists, but {fmt} ({spec.origin if spec else 'by its tensors'}) has no second-level scale"
        )
    if leaves.others:
        check_extras(plan, where, parts, logical)
    return Record(
        name=name,
        kind="block",
        parts=parts,
        shape=logical,
        logical=logical,
        format=fmt,
        scale_order="sf_128x4" if swizzled else "n_k",
        global_rule=rules.get("global", MULTIPLY),
        input_rule=rules.get("input", MULTIPLY),
        gate_up=order,
        origin=spec.origin if spec else "",
        activations="static" if "input" in parts else None,
        act=spec.act if spec else None,
    )


def row_order(plan: Plan, name: str, logical: tuple[int, ...]) -> str | None:
    """Order of gate and up rows of a stacked ``gate_up_proj``: halves, gate first (Phi, Llama 4), but GPT-OSS interleaves its experts."""
    if name.removesuffix(".weight").rpartition(".")[2] != "gate_up_proj":
        return None
    return "interleaved" if len(logical) > 2 and plan.config.model_type.startswith("gpt_oss") else "gate_up"


def have_name(name: str, leaf: str) -> str:
    return f"{name.removesuffix('.weight')}.{leaf}"


def check_extras(plan: Plan, where: str, parts: dict[str, str], logical: tuple[int, ...]) -> None:
    """Shapes of pre_quant_scale [k] and the low-rank branch [r, k], [n, r]."""
    n, k = logical[-2:]
    shape = {role: plan.store.entries[parts[role]].shape for role in ("pre_quant_scale", "lora_a", "lora_b") if role in parts}
    if not shape:
        return
    if "pre_quant_scale" in shape and math.prod(shape["pre_quant_scale"]) != k:
        raise CheckpointError(f"{where}: {parts['pre_quant_scale']} has shape {list(shape['pre_quant_scale'])}; need [{k}]")
    if ("lora_a" in shape) != ("lora_b" in shape):
        raise CheckpointError(f"{where}: has one of the two low-rank matrices; need both")
    if "lora_a" in shape:
        a, b = shape["lora_a"], shape["lora_b"]
        if len(a) != 2 or len(b) != 2 or a[1] != k or b[0] != n or a[0] != b[1]:
            raise CheckpointError(f"{where}: low-rank matrices are {list(a)} and {list(b)}; need [r, {k}] and [{n}, r]")


def _fp8(plan: Plan, where: str, name: str, codes: Entry, scale: Entry, spec: Spec | None, leaves: Leaves, have: dict[str, str]) -> Record:
    shape = codes.shape
    if len(shape) < 2:
        raise CheckpointError(f"{where}: {codes.name} has shape {list(shape)}; need [.., n, k]")
    if scale.dtype not in (*FLOATS, "F8_E8M0", "U8"):
        raise CheckpointError(f"{where}: {scale.name} has dtype {scale.dtype}; need a float or E8M0 scale")
    block = fp8_block(shape, scale.shape, spec.block if spec else None)
    if block is None:
        blocks = f", or blocks of {list(spec.block)}" if spec and spec.block else ""
        raise CheckpointError(
            f"{where}: {scale.name} has shape {list(scale.shape)}; FP8 weight {list(shape)} needs one scale, one a row{blocks}"
        )
    parts = {"weight": codes.name, "scale": scale.name}
    leaf = next((x for x in leaves.input if x in have), None)
    if leaf is not None:
        parts["input"] = have[leaf]
    parts.update({role: have[leaf] for leaf, role in leaves.others.items() if leaf in have and role == "pre_quant_scale"})
    check_extras(plan, where, parts, shape)
    return Record(name, "fp8", parts, shape, shape, block=block, origin=spec.origin if spec else "", act=spec.act if spec else None)


def fp8_block(weight: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int] | None) -> tuple[int, int] | None:
    """Elements that one scale covers: the whole matrix, a row, or a block; None when the shapes do not fit."""
    n, k = weight[-2:]
    lead = math.prod(weight[:-2])
    if len(scale) == 4 and len(weight) == 2 and scale[1] == scale[3] == 1:  # ModelOpt's FP8_PB_WO: [n / 128, 1, k / 128, 1]
        scale = (scale[0], scale[2])
    whole = math.prod(scale) == 1 or (math.prod(scale) == lead and len(weight) > 2)
    if whole and (block is None or len(scale) < 2 or (-(-n // block[0]), -(-k // block[1])) == (1, 1)):
        return (n, k)
    if scale in ((n,), (n, 1), (*weight[:-2], n, 1), (*weight[:-2], n)):
        return (1, k)
    if len(scale) != len(weight) or scale[:-2] != weight[:-2]:
        return None
    if block is not None:
        return block if scale[-2:] == (-(-n // block[0]), -(-k // block[1])) else None
    for size in (128, 32, 64):  # no config entry: the usual square blocks
        if scale[-2:] == (-(-n // size), -(-k // size)):
            return (size, size)
    return None
