"""Reads Hopper machine code: how many instructions, and one hazard that no sanitizer reports, a register operand of an asynchronous MMA
that is overwritten before a wait has proved the MMA done. The compiler keeps source order, not asynchronous reads, so a kernel must be
built to be free of it.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from pathlib import Path


def disassemble(cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        return subprocess.run([str(tool), "-c", f.name], capture_output=True, text=True, check=True).stdout


def straight_length(sass: str) -> int:
    """Instructions of a thread of a kernel without loops, up to its last EXIT: what lies behind it are the rare cases of a division. What
    an unconditional forward jump passes over is not counted: the rare case of a branch, behind the usual one."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if m := re.match(r"(\.L_x_\d+):", line.strip()):
            labels[m[1]] = len(code)
        elif m := re.match(r"\s+/\*[0-9a-f]{4,5}\*/\s+(.*?);", line):
            code.append(m[1].strip())
    last = max(i for i, text in enumerate(code) if "EXIT" in text)
    at = count = 0
    while at <= last:
        count += 1
        m = re.match(r"BRA `\((\.L_x_\d+)\)", code[at])
        at = labels[m[1]] if m and labels[m[1]] > at else at + 1
    return count


def early_loads(sass: str) -> int:
    """16-byte loads from global memory that leave before the first instruction that reads what one of them brings."""
    loaded: set[int] = set()
    count = 0
    for text in re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(.*?);", sass, re.MULTILINE):
        reads = {int(r) for r in re.findall(r"(?<![A-Z])R(\d+)", text.split(",", 1)[1] if "," in text else "")}
        if reads & loaded:
            break
        if m := re.match(r"LDG\.E\S*\.128\S*\s+R(\d+)", text):
            loaded |= set(range(int(m[1]), int(m[1]) + 4))
            count += 1
    return count


def _loops(sass: str) -> list[list[str]]:
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if m := re.match(r"(\.L_x_\d+):", line.strip()):
            labels[m[1]] = len(code)
        elif m := re.match(r"\s+/\*[0-9a-f]{4,5}\*/\s+(.*?);", line):
            code.append(m[1].strip())
    found = []
    for i, text in enumerate(code):
        m = re.search(r"BRA.*`\((\.L_x_\d+)\)", text)
        if m and labels.get(m[1], i) < i and any("GMMA" in t for t in code[labels[m[1]] : i]):
            found.append(code[labels[m[1]] : i + 1])
    return found


def hazards(sass: str) -> tuple[int, list[str]]:
    """(loops with MMAs, instructions that write a register which an MMA in flight may still read). A loop is walked three times."""
    loops = _loops(sass)
    bad: list[str] = []
    for body in loops:
        groups: list[set[int]] = []  # operand registers of each committed, unfinished group of MMAs
        current: set[int] = set()
        for text in body * 3:
            if re.search(r"[HQ]GMMA", text):
                if m := re.search(r"GMMA\S*\s+R\d+,\s*R(\d+)", text):
                    current |= set(range(int(m[1]), int(m[1]) + 4))
                if "gsb0" in text:
                    groups.append(current)
                    current = set()
                continue
            if m := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", text):
                groups = groups[len(groups) - min(int(m[1]), len(groups)) :]
                continue
            m = re.match(r"([A-Z0-9_.]+)\s+(?:P\d+,\s*)?R(\d+)\b", re.sub(r"^@!?U?P\d+\s+", "", text))
            if not m or m[1].startswith(("ST", "BAR", "RED")):
                continue
            width = 4 if ".128" in m[1] else 2 if ".64" in m[1] or "WIDE" in m[1] or m[1].startswith("CS2R") else 1
            written = set(range(int(m[2]), int(m[2]) + width))
            if any(written & g for g in [*groups, current]):
                bad.append(text)
    return len(loops), bad


def serialised(sass: str) -> bool:
    """Whether the assembler waits for each MMA before it starts the next, as ptxas does (C7510 to C7514) when it cannot overlap them."""
    code = re.findall(r"(?:GMMA\S*|WARPGROUP\.DEPBAR\.LE gsb0, 0x\d)", sass)
    waits = sum(a.startswith("GMMA") and b.endswith("0x0") for a, b in itertools.pairwise(code))
    return 2 * waits > sum(c.startswith("GMMA") for c in code)


def hand_over(sass: str, helpers: bool = False) -> list[str]:
    """What is wrong with the order in which a warp-specialised kernel of one partition hands work to its other warps; [] if nothing.

    Triton's own traffic, which racecheck reports: the default warps write one byte a warp (which partition, 3 to end) and the captured
    values, the other warps read both. Barrier 1 of the whole block must lie between each write and read:

        default   write both, B, B, the kernel, B, write "end", B, exit
        others    B, read the byte, read the values (if the partition takes any), B, the partition, B, and again from the start;
                  warps without a partition B, read the byte, B, B, and again

    helpers: blocks of the kernel may bring x into order and do nothing else. The default warps' code for that stands in front of the
    hand-over, which these blocks do not reach, as runs of pairs of a write and a read between two labels: left out.
    """
    code = re.findall(r"^(?:\s+/\*[0-9a-f]{4,5}\*/\s+|(?=\.L_x_))(.*?)[;:]", sass, re.MULTILINE)
    split = next((i for i, t in enumerate(code) if re.match(r"STS \[UR\d+\+0x[0-9a-f]+\]", t)), None)
    if split is None:
        return ["no byte is handed over"]
    end = next(i for i in range(split, len(code)) if "EXIT" in code[i])
    state = code[split].split(",")[0].split("+")[1]
    read = next((i for i, t in enumerate(code) if t.startswith("LDS.U8")), 0)
    start = next((t for t in reversed(code[:read]) if t.startswith(".L_x_")), "no label")
    kind = {
        "|": r"\.L_x_",
        "<": r"BRA `\(" + re.escape(start) + r"\)",
        "B": r"BAR\.SYNC\.DEFER_BLOCKING 0x1 ?$",
        "W": r"STS \[UR\d+\+" + re.escape(state),
        "r": r"LDS\.U8",
        "v": r"LDS\S* R\d+, \[UR\d+\+0x",
        "s": r"(@!?U?P\d+ )?STS",
        "l": r"(@!?U?P\d+ )?LDS",
    }

    def events(part: list[str]) -> str:
        """In code order: label, jump to the start, barrier, write and read of bytes, read of values, other writes (s) and reads (l)."""
        return "".join(next((c for c, p in kind.items() if re.match(p, t)), "") for t in part)

    others, default = events(code[:split]) + "|" + events(code[end:]), re.sub(r"[|<]", "", events(code[split:end]))
    if helpers:
        others = re.sub(r"(?<=\|)(sl){4,}(?=\|)", "", others)
    good = others.count("r") == others.count("|Br") == 1 and not set("Wsl") & set(others)
    values = "".join(re.findall(r"\|(v+)B", others))
    *turns, rest = [turn.count("B") for turn in others.partition("r")[2].split("<")]  # barriers on each way back to the start
    good = good and len(turns) > 0 and set(turns) == {2} and not rest
    bad = [] if good and len(values) == others.count("v") else [f"other warps: {others}"]
    return bad if re.fullmatch(r"[Ws]+BB[slv]*BWB", default) else [*bad, f"default warps: {default}"]
