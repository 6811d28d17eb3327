"""Runs the barrier protocol of a warp-specialised kernel from its TTGIR, without a GPU: the producer and the warp groups of the default
partition take turns at random, copies land late, and an MMA reads its slot until the wait that covers it.

Only integers, branches, loops, barriers, copies and MMAs are interpreted; everything else is unknown. Found are: a wait that never ends,
a copy into a slot that an MMA in flight reads, an MMA that reads another box than the one it should, a tile of the output that leaves
its buffer before all have written it, or is overwritten before it has left.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_BITS = {"bf16": 16, "f16": 16, "f8E4M3FN": 8}
_COMPARE = {"eq": operator.eq, "ne": operator.ne, "slt": operator.lt, "sle": operator.le, "sgt": operator.gt, "sge": operator.ge}
_INTEGER = {
    "addi": operator.add, "subi": operator.sub, "muli": operator.mul,
    "divsi": lambda a, b: int(a / b), "remsi": lambda a, b: a - b * int(a / b),
    "minsi": min, "maxsi": max, "andi": operator.and_, "ori": operator.or_, "xori": operator.xor,
}  # fmt: skip


class Fault(Exception):
    pass


@dataclass
class Barrier:
    count: int
    left: int = 0
    bytes: int = 0
    phase: int = 0

    def settle(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.phase ^= 1
            self.left = self.count

    def arrive(self, n: int) -> None:
        self.left -= n
        if self.left < 0:
            raise Fault("more arrivals than a phase has")
        self.settle()


@dataclass
class Machine:
    groups: int
    expected: list[tuple[int, int]]
    barriers: dict[tuple[str, int], Barrier] = field(default_factory=dict)
    slots: dict[tuple[str, int], Any] = field(default_factory=dict)
    copies: list[Any] = field(default_factory=list)
    flying: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    arrived: int = 0
    turns: int = 0
    written: dict[int, int] = field(default_factory=dict)
    leaving: bool = False
    outputs: list[tuple[int, int]] = field(default_factory=list)
    counted: dict[int, int] = field(default_factory=dict)
    awaited: list[tuple[int, int]] = field(default_factory=list)

    def land(self, copy: Any) -> None:
        slot, box, size, barrier = copy
        if any(slot in reads for reads in self.flying.values()):
            raise Fault(f"box {box} overwrites {slot}, which an MMA in flight reads")
        self.slots[slot] = box
        barrier.bytes -= size
        barrier.settle()


def _parse(lines: Iterator[str]) -> list[Any]:
    """Lines up to the brace that closes this block -> (line, bodies)."""
    block: list[Any] = []
    for line in lines:
        if line.startswith("}"):
            if line.startswith("} else {"):
                block.append(("else", []))
                continue
            return block
        bodies = [_parse(lines)] if line.endswith("{") else []
        block.append((line, bodies))
    return block


def _split_else(body: list[Any]) -> tuple[list[Any], list[Any]]:
    at = next((i for i, s in enumerate(body) if s[0] == "else"), len(body))
    return body[:at], body[at + 1 :]


def _names(text: str) -> list[str]:
    return re.findall(r"%[\w#]+", text)


def _acts(body: list[Any]) -> bool:
    return any("ttng." in line or any(_acts(b) for b in bodies) for line, bodies in body)


class Run:
    """One warp group of the default partition (group >= 0), or the producer (-1)."""

    def __init__(self, machine: Machine, group: int) -> None:
        self.m, self.group = machine, group

    def block(self, body: list[Any], env: dict[str, Any]) -> Iterator[Any]:
        for line, bodies in body:
            if m := re.match(r"scf\.yield (.*?) :", line):
                return [env.get(n) for n in _names(m[1])]
            head, _, rest = line.partition(" = ") if re.match(r"%[\w:]+ = ", line) else ("", "", line)
            value = yield from self.statement(rest, bodies, env)
            name, _, many = head.partition(":")
            if many:
                env.update({f"{name}#{i}": v for i, v in enumerate(value or [None] * int(many))})
            elif name:
                env[name] = value[0] if isinstance(value, list) else value
        return []

    def statement(self, text: str, bodies: list[Any], env: dict[str, Any]) -> Iterator[Any]:
        op, _, rest = text.partition(" ")
        names = _names(rest)
        got = [env.get(n) for n in names]
        if op == "scf.for":
            return (yield from self.loop(rest, bodies[0], env))
        if op == "scf.if":
            yes, no = _split_else(bodies[0])
            if got[0] is None:
                if _acts(yes) or _acts(no):
                    raise Fault(f"a barrier depends on what the model does not know: {text}")
                return None
            return (yield from self.block(yes if got[0] else no, env))
        if op.startswith("arith."):
            return self.arithmetic(op[6:], rest, got)
        if op == "tt.get_program_id":
            return env["pid"]
        if op == "tt.get_num_programs":
            return env["blocks"]
        if op == "ttg.memdesc_index":
            shape, element = re.search(r"-> !ttg\.memdesc<([\dx]+)x(\w+),", rest).groups()
            size = _BITS.get(element, 64) // 8
            for d in shape.split("x"):
                size *= int(d)
            return (got[0] or names[0], got[1], size)
        if op == "tt.addptr":
            return got[0] + got[1] if None not in got else None
        if op == "tt.atomic_rmw" and self.group < 0:
            self.m.counted[got[0]] = self.m.counted.get(got[0], 0) + got[1]
        if op == "tt.elementwise_inline_asm" and "ld.acquire" in rest:
            self.m.awaited.append((got[0], got[1]))
        if op == "ttg.memdesc_trans":
            return got[0]
        if op.startswith("ttng."):
            return (yield from self.act(op[5:], rest, got))
        if op in ("gpu.barrier", "ttg.barrier") and self.group >= 0:
            yield from self.meet()
        if op == "ttg.local_store" and self.group >= 0:
            yield
            if self.m.leaving:
                raise Fault("a tile of the output is overwritten before it has left")
            self.m.written[self.group] = self.m.written.get(self.group, 0) + 1
        return None

    def meet(self) -> Iterator[Any]:
        """All warp groups of the default partition."""
        m, turn = self.m, self.m.turns
        m.arrived += 1
        if m.arrived == m.groups:
            m.arrived, m.turns = 0, turn + 1
        while m.turns == turn:
            yield f"barrier {turn}"

    @staticmethod
    def arithmetic(op: str, rest: str, got: list[Any]) -> Any:
        if op == "constant":
            m = re.match(r"(-?\d+|true|false)\b", rest)
            return None if m is None else {"true": 1, "false": 0}.get(m[1]) if m[1] in ("true", "false") else int(m[1])
        if any(g is None for g in got):
            return None
        if op == "cmpi":
            return int(_COMPARE[rest.split(",")[0]](*got))
        if op == "select":
            return got[1] if got[0] else got[2]
        if op in ("extsi", "extui", "trunci"):
            return got[0]
        return _INTEGER[op](*got) if op in _INTEGER else None

    def loop(self, rest: str, body: list[Any], env: dict[str, Any]) -> Iterator[Any]:
        m = re.match(r"(%\w+) = (%\w+) to (%\w+) step (%\w+)(?: iter_args\((.*?)\) ->)?", rest)
        pairs = re.findall(r"(%\w+) = (%[\w#]+)", m[5] or "")
        carried = [env.get(b) for _, b in pairs]
        first, last, step = (env.get(m[i]) for i in (2, 3, 4))
        if None in (first, last, step):
            if _acts(body):
                raise Fault(f"a barrier depends on what the model does not know: {rest}")
            return [None] * len(pairs)
        for i in range(first, last, step):
            env[m[1]] = i
            env.update(zip([a for a, _ in pairs], carried, strict=True))
            carried = yield from self.block(body, env)
        return carried

    def act(self, op: str, rest: str, got: list[Any]) -> Iterator[Any]:
        m = self.m
        barrier = m.barriers.get(got[0][:2]) if got and isinstance(got[0], tuple) else None
        if op == "init_barrier":
            if self.group in (-1, 0):
                n = int(re.search(r", (\d+) :", rest)[1])
                m.barriers.setdefault(got[0][:2], Barrier(n, n))
        elif op == "wait_barrier":
            while barrier.phase == got[1]:
                yield f"{got[0][:2]} phase {got[1]}"
        elif op == "async_copy_mbarrier_arrive":
            yield
            barrier.arrive(barrier.count // m.groups)
        elif op == "barrier_expect":
            barrier.bytes += int(re.search(r", (\d+),", rest)[1])
            barrier.arrive(1)
        elif op == "async_tma_copy_global_to_local":
            _, row, column, slot, full, _ = got
            m.copies.append((slot[:2], (row, column), slot[2], m.barriers[full[:2]]))
            yield
        elif op == "async_tma_copy_local_to_global" and self.group == 0:
            yield
            if any(m.written.get(g) != len(m.outputs) + 1 for g in range(m.groups)):
                raise Fault("a tile of the output leaves before all have written it")
            m.outputs.append((got[1], got[2]))
            m.leaving = True
        elif op == "async_tma_store_wait" and self.group == 0:
            yield
            m.leaving = False
        elif op == "warp_group_dot":
            slot, n = got[1][:2], m.done.setdefault(self.group, 0)
            want = m.expected[n] if n < len(m.expected) else None
            if m.slots.get(slot) != want:
                raise Fault(f"MMA {n} reads box {m.slots.get(slot)} from {slot}, not {want}")
            m.done[self.group] += 1
            m.flying.setdefault(self.group, []).append(slot)
            yield
        elif op == "warp_group_dot_wait":
            yield
            left, fly = int(re.search(r"pendings = (\d+)", rest)[1]), m.flying.setdefault(self.group, [])
            del fly[: max(0, len(fly) - left)]
        return None


def simulate(
    ttgir: str, arguments: dict[str, int], expected: list[tuple[int, int]], groups: int, seed: int = 0, outputs: Any = ()
) -> Machine:  # fmt: skip
    """Run block ``arguments["pid"]`` of ``arguments["blocks"]``. Raises Fault.

    expected: the box (row, column) of x of each MMA; outputs: the boxes of y that leave by TMA. The machine returned has the counters in
    memory that the block added to in front of its partitions, and what its producer waited for (address, least value), which the model
    does not wait for; pointers are integers, counted in elements.
    """
    pick = random.Random(seed)
    lines = [re.sub(r"\s*loc\([^()]*\)", "", line).strip() for line in ttgir.splitlines()]
    first = next(i for i, line in enumerate(lines) if line.startswith("tt.func"))
    body = _parse(iter(lines[first + 1 :]))
    at = next(i for i, (line, _) in enumerate(body) if line.startswith("ttg.warp_specialize"))
    default = next(bodies[0] for line, bodies in body[at:] if line.startswith("default"))
    header, producer = next((line, bodies[0]) for line, bodies in body[at:] if line.startswith("partition0"))
    machine = Machine(groups, expected)
    env: dict[str, Any] = {**{f"%{k}": v for k, v in arguments.items()}, **arguments}
    for _ in Run(machine, -1).block(body[:at], env):
        pass
    memory = {name: name for line, _ in body[:at] if (name := line.split(" ")[0]) and "ttg.local_alloc" in line}
    env.update(memory)
    passed = [env.get(n) for n in _names(body[at][0].split(")")[0])]
    inner = dict(zip(re.findall(r"(%\w+):", header), passed, strict=True))
    running: dict[int, Any] = {g: Run(machine, g).block(default, dict(env)) for g in range(groups)}
    running[-1] = Run(machine, -1).block(producer, inner)
    stuck: dict[int, str] = {}
    while running:
        able = [g for g in running if g not in stuck]
        if machine.copies and (not able or pick.random() < 0.2):
            machine.land(machine.copies.pop(pick.randrange(len(machine.copies))))
            stuck.clear()
            continue
        if not able:
            raise Fault(f"nobody can go on: {stuck}")
        g = pick.choice(able)
        try:
            waits = next(running[g])
        except StopIteration:
            del running[g]
            waits = None
        if waits:
            stuck[g] = waits
        else:
            stuck.clear()
    if any(machine.done.get(g, 0) != len(expected) for g in range(groups)):
        raise Fault(f"{machine.done} MMAs, not {len(expected)}")
    if machine.outputs != list(outputs):
        raise Fault(f"boxes {machine.outputs} of the output, not {list(outputs)}")
    return machine
