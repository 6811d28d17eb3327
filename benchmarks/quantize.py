"""Speed of quantise and dequantise, each as a ratio to a plain copy measured in the same run.

    OMP_NUM_THREADS=2 python benchmarks/quantize.py cpu [--elements 268435456] [--formats nvfp4]
    python benchmarks/quantize.py gpu [--size 8192] [--sweep-below 0.9] [--json FILE]
    python benchmarks/quantize.py gpu --no-time --jobs 8        # compare bytes and fill Triton's cache in 8 processes
    python benchmarks/quantize.py gpu --no-check                # then time alone, with nothing left to compile

CPU: time over the time of copying the bf16 side (256 Mi elements): at most 16 for dequantise, 60 for quantise.
GPU: bytes read and written per second over those of a device copy of a bf16 size x size tensor: at least 0.85. The data are random,
several buffers in turn (more than the L2 cache together), launches in one CUDA graph, the median of the replays. Before timing, the
kernels' bytes are compared with the CPU's for every format and preset, ties and specials included, 16-bit inputs without and with
``HARDWARE_E4M3``. float16 and float32 inputs have rows of their own; their share is of the copy's rate too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fp4
from fp4 import formats
from fp4.ref import quantize as ref

Row = dict[str, Any]


def best(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def cpu(elements: int, repeats: int, names: list[str]) -> list[Row]:
    """Ratios to the copy of the bf16 tensor; copy and work alternate, the minimum of each counts."""
    x = torch.empty(elements // 4096, 4096, dtype=torch.bfloat16)
    for part in torch.split(x, 4096):
        part.copy_(torch.randn(part.shape))
    y = torch.empty_like(x)
    rows: list[Row] = []
    for name in names:
        fmt = formats.get(name)
        g = torch.tensor(0.002) if fmt.tensor_scale else None
        q = fp4.quantize(x, fmt, global_scale=g)
        for op, limit, run in (
            ("dequantize", 16, partial(fp4.dequantize, q, torch.bfloat16)),
            ("quantize", 60, partial(fp4.quantize, x, fmt, global_scale=g)),
            ("quantize, g from amax", 60, partial(fp4.quantize, x, fmt)),
        ):
            if op.endswith("amax") and g is None:
                continue
            copy = best(partial(y.copy_, x), repeats + 2)
            took = best(run, repeats)
            copy = min(copy, best(partial(y.copy_, x), repeats + 2))
            rows.append({"op": op, "format": name, "seconds": took, "copy_seconds": copy, "ratio": took / copy, "limit": limit})
    return rows


def graph_time(launches: list[Callable[[], object]], replays: int = 20) -> float:
    """Seconds a launch: all launches in one CUDA graph, the median of the replays."""
    for run in launches:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in launches:
            run()
    times = []
    for _ in range(replays):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / len(launches))
    return statistics.median(times)


@dataclass(frozen=True)
class Case:
    """One row of the GPU part. ``tile`` None: the library's own choice."""

    op: str
    format: str
    hardware: bool = True
    tile: int | None = None
    warps: int | None = None
    dtype: str = "bfloat16"


def cases(names: list[str]) -> list[Case]:
    out = []
    for name in names:
        out.append(Case("quantize", name))
        if name == "mxfp8":
            out.append(Case("quantize", name, hardware=False))
        out.append(Case("dequantize", name))
        if name in ("nvfp4", "mxfp4", "mxfp8"):
            out.append(Case("quantize to sf_128x4", name))
        if name == "nvfp4":  # x is read twice: for its amax, then for its codes
            out += [Case("quantize, g from amax", name), Case("amax", name)]
        if name in ("nvfp4", "mxfp4", "mxfp8"):
            out += [Case("quantize", name, dtype=t) for t in ("float16", "float32")]
    return out


def variants(case: Case) -> list[Case]:
    """The same work with other warps, and with one or two blocks a thread."""
    if case.op == "dequantize":
        return [replace(case, tile=t, warps=w) for t in (2048, 4096, 8192) for w in (2, 4, 8)]
    if not case.op.startswith("quantize") or case.op.endswith("amax") or case.dtype != "bfloat16" or not case.hardware:
        return []
    block = formats.get(case.format).block
    return [replace(case, tile=32 * w * block * n, warps=w) for n in (1, 2) for w in (1, 2, 4)]


def launches(case: Case, xs: list[torch.Tensor]) -> tuple[list[Callable[[], object]], int]:
    """(one call a buffer, bytes that a call reads and writes)."""
    from fp4.ref import triton_quantize as golden
    from fp4.ref.triton_amax import finite_amax

    golden.HARDWARE_E4M3 = case.hardware
    fmt, recipe = formats.get(case.format), fp4.recipes["default"]
    g = torch.tensor(0.002, device="cuda") if fmt.tensor_scale else None
    gs = None if g is None else torch.reciprocal(g)
    elements = xs[0].numel()
    both = elements * xs[0].element_size() + elements // fmt.codes_per_byte + elements // fmt.block
    how: dict[str, Any] = {"fmt": fmt, "tile": case.tile, "num_warps": case.warps}
    pack = partial(golden.quantize_blocks, recipe=recipe, global_scale=g, encode_scale=gs, **how)
    if case.op == "quantize":
        return [partial(pack, x) for x in xs], both
    if case.op == "quantize to sf_128x4":
        return [partial(pack, x, scale_layout=fp4.layouts["sf_128x4"]) for x in xs], both
    if case.op == "dequantize":
        parts = [pack(x, tile=None, num_warps=None) for x in xs]
        return [
            partial(golden.dequantize_blocks, c, s, global_scale=g, dtype=torch.bfloat16, **(how | {"num_warps": case.warps or 4}))
            for c, s in parts
        ], both
    if case.op == "amax":
        return [partial(finite_amax, x) for x in xs], elements * 2
    return [partial(fp4.quantize, x, fmt) for x in xs], both + elements * 2


def gpu(size: int, names: list[str], sweep_below: float) -> list[Row]:
    xs = [torch.randn(size, size, device="cuda").to(torch.bfloat16) for _ in range(6)]
    ys = [torch.empty_like(x) for x in xs]
    copy = graph_time([partial(y.copy_, x) for x, y in zip(xs, ys, strict=True)])
    copy_rate = 2 * xs[0].numel() * 2 / copy
    rows: list[Row] = [{"op": "copy", "format": "bf16", "us": copy * 1e6, "gb_s": copy_rate / 1e9, "ratio": 1.0, "limit": 1.0}]

    def measure(case: Case) -> float:
        calls, moved = launches(case, xs if case.dtype == "bfloat16" else [x.to(getattr(torch, case.dtype)) for x in xs[:3]])
        took = graph_time(calls)
        rate = moved / took
        row = asdict(case) | {"us": took * 1e6, "gb_s": rate / 1e9, "ratio": rate / copy_rate, "limit": 0.85}
        rows.append(row)
        return rate / copy_rate

    for case in cases(names):
        if measure(case) < sweep_below:
            for other in variants(case):
                measure(other)
    return rows


def warm(case: Case, size: int) -> int:
    """Compile the case, once run."""
    for call in launches(case, [torch.randn(size, size, device="cuda").to(getattr(torch, case.dtype))])[0]:
        call()
    torch.cuda.synchronize()
    return 0


def in_processes(work: list[Callable[[], int]], jobs: int) -> int:
    """Sum of the results; 1 job runs here. Whatever a process raises is raised here."""
    if jobs == 1:
        return sum(run() for run in work)
    with ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        return sum(done.result() for done in [pool.submit(run) for run in work])


def data(shape: tuple[int, int], seed: int) -> torch.Tensor:
    """Ties of e2m1 and e4m3 at many scales, normal numbers, zeros, subnormals, NaN and infinities."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-20, 20, (shape[0], 1), generator=g).float())
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -5.0, 0.0, -0.0, 17.0, 19.0])
    grid = ties[torch.randint(0, len(ties), shape, generator=g)] * torch.exp2(torch.randint(-8, 8, (shape[0], 1), generator=g).float())
    x = torch.where(torch.rand((shape[0], 1), generator=g) < 0.4, grid, x)
    odd = torch.tensor([1e-40, -1e-38, 3e38, torch.inf, -torch.inf, torch.nan])
    x = torch.where(torch.rand(shape, generator=g) < 0.002, odd[torch.randint(0, len(odd), shape, generator=g)], x)
    return torch.where(torch.rand((shape[0], 1), generator=g) < 0.05, torch.zeros(()), x)


def every_pattern(block: int, dtype: torch.dtype) -> torch.Tensor:
    """All patterns of a 16-bit type beside block maxima from subnormal to the largest power of two, [rows, 64 * block]."""
    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    bits = torch.cat([bits, bits[: -len(bits) % (block - 1)]]).view(dtype).view(-1, block - 1)
    powers = [*range(-133, 128, 13), 127, -126, -127] if dtype == torch.bfloat16 else [*range(-24, 16, 3), 15, -14, -15]
    tops = torch.exp2(torch.tensor(powers).double()).to(dtype)
    # what is above the block's maximum would be the maximum itself; NaN and infinity stay
    small = torch.where(bits.isfinite() & (bits.abs() > tops[:, None, None]), tops[:, None, None], bits[None])
    x = torch.cat([tops[:, None, None].expand(-1, len(bits), 1), small], 2).reshape(-1, block)
    return x[: len(x) // 64 * 64].reshape(-1, 64 * block)


def check(name: str, preset: str, dtype: torch.dtype, hardware: bool, exhaustive: bool) -> int:
    """Bytes of the compiled kernels against the CPU's; how many were compared. Raises ValueError at the first difference."""
    from fp4.ref import triton_quantize as golden

    golden.HARDWARE_E4M3 = hardware
    fmt, recipe = formats.get(name), fp4.recipe.get(preset, name)
    x = every_pattern(fmt.block, dtype) if exhaustive else data((512, 1536), 5).to(dtype)
    g, gs = ref.resolve_global_scale(x, fmt, recipe, None, None, False)
    want = ref.quantize_blocks(x, fmt, recipe, g, gs)
    on = [None if t is None else t.cuda() for t in (g, gs)]
    got = golden.quantize_blocks(x.cuda(), fmt, recipe, *on)
    values = ref.dequantize_blocks(*want, g, fmt, dtype)
    back = golden.dequantize_blocks(*got, on[0], fmt, dtype).cpu()
    if fmt.tensor_scale and not torch.equal(ref.tensor_amax(x.cuda()).cpu(), ref.tensor_amax(x)):
        raise ValueError(f"check: amax of {dtype} differs from the CPU")
    pairs = [("codes", want[0], got[0].cpu()), ("scale", want[1], got[1].cpu())]
    pairs.append(("values", values.nan_to_num(0.5), back.nan_to_num(0.5)))
    if preset == "default":
        layout = fp4.layouts["sf_128x4"]
        codes, scale = golden.quantize_blocks(x.cuda(), fmt, recipe, *on, scale_layout=layout)
        pairs += [("codes beside sf_128x4", want[0], codes.cpu()), ("scale in sf_128x4", layout.apply(want[1]), scale.cpu())]
    if fmt.tensor_scale:  # both by one kernel on the GPU
        own = ref.resolve_global_scale(x.cuda(), fmt, recipe, None, None, False)
        pairs += [(what, a.view(1), b.cpu().view(1)) for what, a, b in zip(("global scale", "encode scale"), (g, gs), own, strict=True)]
    for what, a, b in pairs:
        if not torch.equal(a, b):
            at = int((a != b).flatten().nonzero()[0])
            raise ValueError(
                f"check: {what} of {name} {preset} {dtype}, hardware_e4m3 {hardware}: {int((a != b).sum())} of {a.numel()} differ from the "
                f"CPU; first at {at}: {a.flatten()[at].item()} on the CPU, {b.flatten()[at].item()} on the GPU"
            )
    return sum(a.numel() for _, a, _ in pairs)


def checks(presets: list[str]) -> list[Callable[[], int]]:
    """Every format and input type, the presets given; every bf16 and f16 value under the default recipe; with and without
    the conversion to e4m3."""
    out: list[Callable[[], int]] = []
    for name in formats.names():
        for preset in presets:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                for hardware in (False, True) if dtype != torch.float32 else (False,):
                    out.append(partial(check, name, preset, dtype, hardware, False))
                    if preset == "default" and dtype != torch.float32:
                        out.append(partial(check, name, preset, dtype, hardware, True))
    return out


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("part", choices=["cpu", "gpu"])
    p.add_argument("--elements", type=int, default=1 << 28)
    p.add_argument("--formats", nargs="+", help="default: nvfp4 mxfp4 mxfp8 on the CPU, all five on the GPU")
    p.add_argument("--presets", nargs="+", help="recipes whose bytes are compared on the GPU; default: all")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--size", type=int, default=8192)
    p.add_argument("--sweep-below", type=float, default=0.0, metavar="RATIO", help="try other tiles and warps for rows below this ratio")
    p.add_argument("--no-check", action="store_true", help="time only; comparing every preset compiles some 200 kernels, a minute or two")
    p.add_argument("--no-time", action="store_true", help="compare bytes and compile all that --no-check --sweep-below 9 times")
    p.add_argument("--jobs", type=int, default=1, help="processes that compare and compile")
    p.add_argument("--json", type=Path)
    a = p.parse_args()
    if a.part == "cpu":
        rows = cpu(a.elements, a.repeats, a.formats or ["nvfp4", "mxfp4", "mxfp8"])
    else:
        names = a.formats or ["nvfp4", "mxfp4", "mxfp8", "nvfp4_b32", "amdfp4"]
        rows, work = [], [] if a.no_check else checks(a.presets or fp4.recipes.names())
        if a.no_time:
            work += [partial(warm, c, a.size) for case in cases(names) for c in (case, *variants(case))]
        if work:
            try:
                rows.append({"op": "check", "compared": in_processes(work, a.jobs)})
            except ValueError as error:
                raise SystemExit(str(error)) from None
        rows += [] if a.no_time else gpu(a.size, names, a.sweep_below)
    better = (lambda r: r["ratio"] <= r["limit"]) if a.part == "cpu" else (lambda r: r["ratio"] >= r["limit"])
    device = platform.processor() or platform.machine() if a.part == "cpu" else torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, {torch.get_num_threads()} threads, python {platform.python_version()}")
    for r in rows:
        if "ratio" not in r:
            print(f"checked: {r['compared']:,} bytes and values equal to the CPU's")
            continue
        size = f"{r['seconds']:.2f} s, copy {r['copy_seconds']:.3f} s" if a.part == "cpu" else f"{r['us']:.1f} us, {r['gb_s']:.0f} GB/s"
        extra = f" tile {r['tile']} warps {r['warps']}" if r.get("tile") else ""
        extra += "" if r.get("hardware", True) else " without hardware_e4m3"
        extra += "" if r.get("dtype", "bfloat16") == "bfloat16" else f" {r['dtype']}"
        print(
            f"{r['op']:24s} {r['format']:10s} ratio {r['ratio']:.2f} (limit {r['limit']}) {'ok' if better(r) else 'MISSED'}  {size}{extra}"
        )
    if a.json:
        a.json.write_text(json.dumps({"device": device, "torch": torch.__version__, "command": sys.argv, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
