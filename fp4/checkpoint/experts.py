"""Experts between one tensor each and one stacked tensor: rows of gate and up picked out, or put in turns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from fp4.checkpoint.base import Checkpoint
from fp4.checkpoint.output import Blob
from fp4.checkpoint.record import Record
from fp4.checkpoint.safetensors_file import DTYPE_BITS
from fp4.checkpoint.weights import View

__all__ = ["Joined", "apart", "join", "join_bias", "slices", "split", "split_bias"]

_STACKED = re.compile(r"(?P<head>.*experts)\.(?P<leaf>gate_up_proj|up_gate_proj|down_proj)(_weight|\.weight)?")
_SINGLE = re.compile(r"(?P<head>.*experts)\.(?P<e>\d{1,6})\.(?P<leaf>gate_proj|up_proj|down_proj|w1|w2|w3)\.(?P<end>weight|bias)")
_BIAS = re.compile(r"(?P<head>.*experts)\.(?P<leaf>gate_up_proj|down_proj)_bias")
_ROLE = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


def slices(order: str | None, n: int) -> dict[str, tuple[slice, int]] | None:
    """Leaf -> (rows, which half) of a stacked gate/up tensor of n rows; None when the order is unknown."""
    first, second = (slice(0, n // 2), 0), (slice(n // 2, n), 1)
    return {
        "interleaved": {"gate_proj": (slice(0, None, 2), 0), "up_proj": (slice(1, None, 2), 0)},
        "gate_up": {"gate_proj": first, "up_proj": second},
        "up_gate": {"gate_proj": second, "up_proj": first},
    }.get(order or "")


def split(record: Record) -> list[tuple[str, View, int]] | str:
    """(module, rows, n) of each expert's matrices in a stacked tensor, or the reason why it cannot be taken apart."""
    found = _STACKED.fullmatch(record.name)
    if found is None:
        return "is stacked, and its name does not say which experts' matrices it holds"
    experts, n = record.logical[0], record.logical[1]
    if found["leaf"] == "down_proj":
        return [(f"{found['head']}.{e}.down_proj", View(record, e), n) for e in range(experts)]
    parts = slices(record.gate_up, n)
    if parts is None or n % 2:
        return "is stacked, and nothing tells the order of its gate and up rows"
    return [
        (f"{found['head']}.{e}.{leaf}", View(record, e, rows, half), n // 2) for e in range(experts) for leaf, (rows, half) in parts.items()
    ]


def apart(ck: Checkpoint, name: str) -> dict[str, tuple[int, slice]]:
    """Name of each single expert's tensor -> (expert, rows) in a stacked weight or bias; empty when it is none, or its order is unknown."""
    record, bias = ck.record(name), _BIAS.fullmatch(name)
    if bias is None:
        parts = split(record) if record.kind == "block" and len(record.logical) == 3 else ""
        return {f"{module}.weight": (view.expert, view.rows) for module, view, _ in parts} if isinstance(parts, list) else {}
    stem = name.removesuffix("_bias")
    owner = next((w for w in (stem, f"{stem}.weight") if w in ck), None)
    if owner is None or len(record.shape) != 2:
        return {}
    leaves = {"down_proj": (slice(None), 0)} if bias["leaf"] == "down_proj" else slices(ck.record(owner).gate_up, record.shape[1])
    return {f"{bias['head']}.{e}.{leaf}.bias": (e, rows) for e in range(record.shape[0]) for leaf, (rows, _) in (leaves or {}).items()}


@dataclass
class Joined:
    """Matrices of one layer's experts: role -> expert -> record."""

    head: str
    roles: dict[str, dict[int, Record]] = field(default_factory=dict)

    def stacks(self) -> dict[str, list[tuple[View, ...]]] | str:
        """Stacked tensor's name -> its views, or the reason why these records do not stack."""
        counts = {role: len(members) for role, members in self.roles.items()}
        experts = max(counts.values())
        if set(counts) != {"gate", "up", "down"} or any(sorted(m) != list(range(experts)) for m in self.roles.values()):
            return f"experts {self.head}.* do not all have gate, up and down: {counts}"
        for role, members in self.roles.items():
            if len({(r.logical, r.format, r.act, "input" in r.parts) for r in members.values()}) > 1:
                return f"experts {self.head}.* differ in shape or format of their {role} matrices"
        if self.roles["gate"][0].logical != self.roles["up"][0].logical:
            return f"experts {self.head}.* have gate and up of different shapes"
        pairs = zip(*([View(self.roles[r][e]) for e in range(experts)] for r in ("gate", "up")), strict=True)
        return {
            f"{self.head}.gate_up_proj": list(pairs),
            f"{self.head}.down_proj": [(View(self.roles["down"][e]),) for e in range(experts)],
        }


def join(records: list[Record]) -> dict[str, Joined]:
    """The records that are single experts' matrices, by their layer."""
    out: dict[str, Joined] = {}
    for record in records:
        found = _SINGLE.fullmatch(record.name)
        if found and found["end"] == "weight" and record.kind == "block" and len(record.logical) == 2:
            layer = out.setdefault(found["head"], Joined(found["head"]))
            layer.roles.setdefault(_ROLE[found["leaf"]], {})[int(found["e"])] = record
    return out


def split_bias(ck: Checkpoint, name: str, heads: dict[str, str | None]) -> list[Blob] | None:
    """Biases of single experts out of a stacked one; ``heads`` maps a taken-apart layer to the order of its gate and up rows."""
    found = _BIAS.fullmatch(name)
    if found is None or found["head"] not in heads:
        return None
    entry = ck.store.entries[name]
    weight = next((ck.record(w) for w in (name.removesuffix("_bias"), f"{name.removesuffix('_bias')}.weight") if w in ck), None)
    if len(entry.shape) != 2 or (weight is not None and entry.shape != weight.logical[:-1]):
        return None
    experts, n = entry.shape
    parts = {"down_proj": (slice(None), 0)} if found["leaf"] == "down_proj" else slices(heads[found["head"]], n)
    if parts is None:
        return None

    def blob(e: int, leaf: str, rows: slice) -> Blob:
        def chunks() -> Iterator[torch.Tensor]:
            yield ck.store.bytes(name).reshape(experts, n, DTYPE_BITS[entry.dtype] // 8)[e, rows]

        return Blob(f"{found['head']}.{e}.{leaf}.bias", entry.dtype, (len(range(n)[rows]),), chunks)

    return [blob(e, leaf, rows) for e in range(experts) for leaf, (rows, _) in parts.items()]


def join_bias(ck: Checkpoint, names: list[str], heads: set[str]) -> tuple[list[Blob], set[str]] | str:
    """(stacked biases of the joined layers, stored names that went into them), or the reason why they do not stack."""
    found: dict[str, dict[str, dict[int, str]]] = {}
    for name in names:
        match = _SINGLE.fullmatch(name)
        if match and match["end"] == "bias" and match["head"] in heads:
            found.setdefault(match["head"], {}).setdefault(_ROLE[match["leaf"]], {})[int(match["e"])] = name
    blobs: list[Blob] = []
    for head, roles in found.items():
        experts = sum(
            bool(m and m["head"] == head and m["end"] == "weight" and _ROLE[m["leaf"]] == "down") for m in map(_SINGLE.fullmatch, ck)
        )
        if any(sorted(m) != list(range(experts)) for m in roles.values()) or ("gate" in roles) != ("up" in roles):
            return f"only some experts of {head}.* have biases"
        if any(len({(ck.store.entries[n].dtype, ck.store.entries[n].shape) for n in m.values()}) > 1 for m in roles.values()):
            return f"experts of {head}.* have biases of different shapes"
        if "gate" in roles and ck.store.entries[roles["gate"][0]][1:3] != ck.store.entries[roles["up"][0]][1:3]:
            return f"experts of {head}.* have gate and up biases of different shapes"
        for leaf, members in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            if members[0] in roles:
                blobs.append(_stacked_bias(ck, f"{head}.{leaf}_bias", [[roles[r][e] for r in members] for e in range(experts)]))
    return blobs, {n for roles in found.values() for m in roles.values() for n in m.values()}


def _stacked_bias(ck: Checkpoint, name: str, sources: list[list[str]]) -> Blob:
    first = ck.store.entries[sources[0][0]]
    n = first.shape[0]

    def chunks() -> Iterator[torch.Tensor]:
        for members in sources:
            yield torch.stack([ck.store.bytes(m).reshape(n, -1) for m in members], 1)

    return Blob(name, first.dtype, (len(sources), n * len(sources[0])), chunks)
