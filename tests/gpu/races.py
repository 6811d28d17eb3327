"""What the reports of compute-sanitizer's racecheck on a warp-specialised kernel are about, from its machine code. No GPU.

TRITON_CACHE_DIR=DIR python tests/gpu/sanitize_moe.py compile 0/1 wide      (the Triton and the target of the run)
python tests/gpu/races.py DIR grouped_wide REPORT...

For every report: the kernel in which all its offsets are shared-memory accesses of the reported kind, what lies at the address, and whether
a barrier of the whole program (``BAR.SYNC 1``, no thread count) stands between. Triton itself hands two things to its worker warps: one
byte a warp, which partition to run (``state``), and the arguments that are not kernel parameters (``captured``). Anything else, slots
and mbarriers above all, is printed as ``OTHER`` and makes the exit status 1.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import sass

SIZE = {"bf16": 2, "f16": 2, "f8E4M3FN": 1, "i8": 1, "i32": 4, "i64": 8}


def allocations(ttgir: Path) -> tuple[list[tuple[int, int, str]], int, int]:
    """([start, end) and type of every slot and mbarrier, address of the captured arguments, of the state), by Triton 3.6's own pass."""
    from triton._C.libtriton import ir, nvidia, passes
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    context = ir.context()
    ir.load_dialects(context)
    CUDABackend(GPUTarget("cuda", 90, 32)).load_dialects(context)
    module = ir.parse_mlir_module(str(ttgir), context)
    module.context = context
    pm = ir.pass_manager(context)
    for add in (passes.ttgpuir.add_combine_tensor_select_and_if, passes.ttgpuir.add_allocate_warp_groups, passes.convert.add_scf_to_cf):
        add(pm)
    passes.gluon.add_inliner(pm)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(pm, 90, 86)
    pm.run(module, "allocate")
    buffers, captured, state = [], -1, -1
    for line in str(module).splitlines():
        if not (m := re.search(r"allocation\.offset = (\d+)", line)):
            continue
        at = int(m[1])
        if "ttg.local_alloc" in line:
            *shape, kind = re.search(r"memdesc<([\dx]+x\w+)", line)[1].split("x")
            buffers.append((at, at + SIZE[kind] * math.prod(map(int, shape)), "x".join((*shape, kind))))
        elif "ttg.warp_specialize(" in line:
            captured = at
        elif "tt.func" in line:
            state = at
    return buffers, captured, state


def code(cubin: Path) -> dict[int, str]:
    return {int(m[1], 16): m[2].strip() for m in re.finditer(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass.disassemble(cubin.read_bytes()))}


def fits(text: str, kind: str) -> bool:
    return re.search(r"\bLDS" if kind == "Read" else r"\bSTS|\bATOMS|\bSYNCS", text) is not None


def whole(text: str) -> bool:
    return re.fullmatch(r"BAR\.SYNC\.DEFER_BLOCKING 0x1", text) is not None


def ordered(instructions: list[str], i: int, kind: str, what: str) -> bool:
    """A write, and a read of a captured argument, meet the barrier before any branch behind them; a read of the state right after it."""
    if what == "state" and kind == "Read":
        return any(whole(t) for t in instructions[max(0, i - 6) : i])
    for text in instructions[i + 1 :]:
        if whole(text) or re.search(r"\b(BRA|BRX|EXIT)\b", text):
            return whole(text)
    return False


def main(cache: Path, name: str, reports: list[Path]) -> int:
    kernels = {p.parent.name[:6]: (code(p), *allocations(p.with_suffix(".ttgir"))) for p in sorted(cache.glob(f"*/{name}.cubin"))}
    status, number = 0, 0
    for report in reports:
        races = report.read_text().split("Race reported between")[1:]
        previous = ""
        for race in races:
            number += 1
            seen = re.findall(rf"(Read|Write) access at {name}\+0x([0-9a-f]+)", race)
            accesses = [(kind, int(at, 16)) for kind, at in seen]
            names = [k for k, (c, *_) in kernels.items() if all(fits(c.get(at, ""), kind) for kind, at in accesses)]
            key = previous if previous in names else names[0] if names else ""
            previous = key
            print(f"{number} {report.name} kernel {key or 'not found'}{'' if len(names) == 1 else f' (of {names})'}")
            if not key:
                status = 1
                continue
            text, buffers, captured, state = kernels[key]
            for kind, at in accesses:
                address = int((re.findall(r"\+0x([0-9a-f]+)\]", text[at]) or ["0"])[0], 16)
                if address == captured and not any(a <= captured < b for a, b, _ in buffers):
                    what = "captured"
                elif address in (state, state + 8) or (address in (state - 4, state - 8) and "LDS.U8" in text[at]):  # warps from 4 or 8 on
                    what = "state" if all(b <= state for _, b, _ in buffers) else "OTHER"
                else:
                    what = "OTHER"
                where = ordered(list(text.values()), list(text).index(at), kind, what)
                status |= what == "OTHER" or not where
                print(f"    {kind:5} +0x{at:x} {text[at]}: {what}, {'barrier' if where else 'NO BARRIER'}")
    for key, (_, buffers, captured, state) in kernels.items():
        held = ", ".join(f"{t} at 0x{a:x}" for a, _, t in buffers)
        print(f"kernel {key}: captured 0x{captured:x}, state 0x{state:x}, slots and barriers {held}")
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], [Path(p) for p in sys.argv[3:]]))
