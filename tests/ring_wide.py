"""The barrier protocol of ``grouped_wide``, run from its TTGIR without a GPU (``ring_model``): one warp group fetches by cp.async, others
decode words and multiply, for every tile of a schedule.

A chunk is numbered by the fetching warp group; every buffer of a slot must hold the same chunk when it is read, and no copy may land
while an MMA in flight reads its slot.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ring_model import Fault, Machine, Run, _names, _parse


class WideRun(Run):
    """A multiplying warp group (group >= 0), or the one that fetches (-1). ``chunks``: fetched so far, or those waited for."""

    def __init__(self, machine: Machine, group: int, sched: Sequence[int]) -> None:
        super().__init__(machine, group)
        self.sched, self.chunks = sched, 0
        self.pending: list[Any] = []

    def statement(self, text: str, bodies: list[Any], env: dict[str, Any]) -> Iterator[Any]:
        op, _, rest = text.partition(" ")
        got = [env.get(n) for n in _names(rest)]
        if op == "tt.addptr" and isinstance(got[0], tuple) and got[0][0] == "sched":
            return ("sched", got[0][1] + got[1])
        if op == "tt.load" and isinstance(got[0], tuple) and got[0][0] == "sched":
            return self.sched[got[0][1]]
        if op == "ttg.memdesc_subslice":
            return got[0]
        if op == "ttg.async_copy_global_to_local":
            slot = next(g for g in got if isinstance(g, tuple))[:2]
            copy = [slot, self.chunks, False]
            self.pending.append(copy)
            self.m.copies.append(copy)
            yield
            return None
        if op == "ttg.local_load":
            self.holds(got[0][:2], self.chunks - 1)
            yield
            return None
        return (yield from super().statement(text, bodies, env))

    def holds(self, slot: tuple[str, int], chunk: int) -> None:
        if self.m.slots.get(slot) != chunk:
            raise Fault(f"group {self.group} reads chunk {self.m.slots.get(slot)} from {slot}, not {chunk}")

    def act(self, op: str, rest: str, got: list[Any]) -> Iterator[Any]:
        m = self.m
        if op == "async_copy_mbarrier_arrive" and self.group < 0:
            m.copies.append(("arrive", self.pending, m.barriers[got[0][:2]]))
            self.pending, self.chunks = [], self.chunks + 1
            yield
        elif op == "wait_barrier" and self.group >= 0:
            yield from super().act(op, rest, got)
            self.chunks += 1
        elif op == "async_copy_mbarrier_arrive":
            yield
            barrier = m.barriers[got[0][:2]]
            barrier.arrive(barrier.count // m.groups)
        elif op == "warp_group_dot":
            slot = next(g for g in got if isinstance(g, tuple))[:2]
            self.holds(slot, self.chunks - 1)
            m.done[self.group] = m.done.get(self.group, 0) + 1
            m.flying.setdefault(self.group, []).append(slot)
            yield
        elif op == "warp_group_dot_wait":
            yield
            left, fly = int(re.search(r"pendings = (\d+)", rest)[1]), m.flying.setdefault(self.group, [])
            del fly[: max(0, len(fly) - left)]
        else:
            yield from super().act(op, rest, got)
        return None


def land(m: Machine, at: int) -> bool:
    """Let a copy land, or an arrival that waits for copies happen when they have."""
    what = m.copies[at]
    if what[0] == "arrive":
        if not all(c[2] for c in what[1]):
            return False
        del m.copies[at]
        what[2].arrive(what[2].count)
        return True
    slot, chunk, _ = what
    if any(slot in reads for reads in m.flying.values()):
        raise Fault(f"chunk {chunk} overwrites {slot}, which an MMA in flight reads")
    m.slots[slot], what[2] = chunk, True
    del m.copies[at]
    return True


def simulate(ttgir: str, sched: Sequence[int], pid: int, blocks: int, seed: int = 0) -> int:
    """Run program ``pid`` of ``blocks`` over a schedule (count, then expert, first row, rows of each block). Returns the chunks it took."""
    pick = random.Random(seed)
    lines = [re.sub(r"\s*loc\([^()]*\)", "", line).strip() for line in ttgir.splitlines()]
    first = next(i for i, line in enumerate(lines) if line.startswith("tt.func"))
    body = _parse(iter(lines[first + 1 :]))
    at = next(i for i, (line, _) in enumerate(body) if line.startswith("ttg.warp_specialize"))
    default = next(bodies[0] for line, bodies in body[at:] if line.startswith("default"))
    parts = [(line, bodies[0]) for line, bodies in body[at:] if line.startswith("partition")]
    machine = Machine(len(parts), [])
    env: dict[str, Any] = {"%sched_ptr": ("sched", 0), "pid": pid, "blocks": blocks}
    for _ in WideRun(machine, -1, sched).block(body[:at], env):
        pass
    env.update({name: name for line, _ in body[:at] if (name := line.split(" ")[0]) and "ttg.local_alloc" in line})
    passed = [env.get(n) for n in _names(body[at][0].split(")")[0])]
    runs = {g: WideRun(machine, g, sched) for g in (*range(len(parts)), -1)}
    running: dict[int, Any] = {0: runs[0].block(default, dict(env))}
    for g, (header, inside) in zip((*range(1, len(parts)), -1), parts, strict=True):
        inner = dict(zip(re.findall(r"(%\w+):", header), passed, strict=True)) | {"pid": pid, "blocks": blocks}
        running[g] = runs[g].block(inside, inner)
    stuck: dict[int, str] = {}
    while running:
        able = [g for g in running if g not in stuck]
        if machine.copies and (not able or pick.random() < 0.3):
            order = pick.sample(range(len(machine.copies)), len(machine.copies))
            if any(land(machine, i) for i in order):
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
    chunks = {r.chunks for r in runs.values()}
    if len(chunks) != 1:
        raise Fault(f"chunks fetched and read: {sorted(chunks)}")
    return chunks.pop()
