"""Which matrix of an expert a tensor is, by its name in the checkpoint.

Gate, up and down in each other's place, or experts in the order of their names as text (0, 1, 10, 11, 2 ..), fit every shape and give
numbers: nothing fails, the model talks nonsense (sglang PR #32430). Where a tensor says what it is, it is held to that; a tensor
without a name (``dataclasses.replace(q, source={})``) is what the caller says.
"""

from __future__ import annotations

from collections.abc import Sequence

from fp4.errors import LayoutMismatch, shown
from fp4.tensor import QuantizedTensor

__all__ = ["check_experts", "check_moe", "role"]

#: part of a name -> what it is, in the models that write it: Llama, Qwen and DeepSeek; Mixtral and DeepSeek-V4
_ROLES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "gate_up_proj": "gate and up"}
_ROLES |= {"w1": "gate", "w3": "up", "w2": "down"}


def role(q: QuantizedTensor) -> str | None:
    """ "gate", "up", "down", "gate and up", or None when its name does not tell."""
    if q.source.get("half") in ("gate", "up"):  # of ck.halves
        return str(q.source["half"])
    found = [_ROLES[part] for part in str(q.source.get("name", "")).split(".") if part in _ROLES]
    return found[-1] if found else None


def _refuse(where: str, what: str, q: QuantizedTensor, need: str) -> LayoutMismatch:
    return LayoutMismatch(
        f"{where}: {what} is {shown(q.source['name'])}, the {role(q)} projection; need {need}; exchange them, or, when the name is wrong, "
        "dataclasses.replace(q, source={})"
    )


def check_moe(where: str, first: Sequence[QuantizedTensor], w2: QuantizedTensor) -> None:
    """``first`` is (w13,) or (gate, up). Raises LayoutMismatch for a tensor whose name says that it belongs elsewhere."""
    if role(w2) not in (None, "down"):
        raise _refuse(where, "w2", w2, "the down projection")
    for i, q in enumerate(first):
        place, need = ("w13", "gate and up") if len(first) == 1 else (f"w13[{i}]", ("gate", "up")[i])
        is_ = role(q)
        if is_ == "down" or (len(first) == 2 and is_ not in (None, need)):
            raise _refuse(where, place, q, "the pair (gate, up)" if len(first) == 2 else need)


def check_experts(where: str, experts: Sequence[QuantizedTensor]) -> dict[str, str]:
    """``source`` of the stack: the experts' names with ``*`` where they differ. Raises LayoutMismatch for matrices of different roles, and
    for experts that are sorted as text."""
    roles = [role(q) for q in experts]
    for i, r in enumerate(roles):
        if None not in (r, roles[0]) and r != roles[0]:
            raise _refuse(where, f"item {i}", experts[i], f"the {roles[0]} projection, as item 0 ({shown(experts[0].source['name'])})")
    parts = [str(q.source.get("name", "")).split(".") for q in experts]
    if any(p == [""] for p in parts) or len({len(p) for p in parts}) != 1:
        return {}
    columns = list(zip(*parts, strict=True))
    for column in columns:
        if len(set(column)) > 1 and all(n.isdecimal() for n in column):
            numbers = [int(n) for n in column]
            if numbers != sorted(numbers) and numbers == sorted(numbers, key=str):
                at = next(i for i in range(1, len(numbers)) if numbers[i] < numbers[i - 1])
                raise LayoutMismatch(
                    f"{where}: item {at - 1} is expert {numbers[at - 1]}, item {at} is expert {numbers[at]}: the names are sorted as text; "
                    "sort by number, as ck.names() does"
                )
    return {"name": ".".join(c[0] if len(set(c)) == 1 else "*" for c in columns)}
