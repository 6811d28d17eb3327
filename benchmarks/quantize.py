"""Speed of quantise and dequantise, each as a ratio to a plain copy measured in the same run.

    OMP_NUM_THREADS=2 python benchmarks/quantize.py cpu [--elements 268435456] [--formats nvfp4]
    python benchmarks/quantize.py gpu [--size 8192] [--sweep] [--json FILE]

CPU: time over the time of copying the bf16 side (256 Mi elements): at most 16 for dequantise, 60 for quantise.
GPU: bytes read and written per second over those of a device copy of a bf16 size x size tensor: at least 0.85. The data are random,
several buffers in turn (more than the L2 cache together), launches in one CUDA graph, the median of the replays. Before timing, the
kernels' bytes are compared with the CPU's for every format and preset, ties and specials included.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
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


def gpu(size: int, sweep: bool) -> list[Row]:
    from fp4.ref import triton_quantize as golden
    from fp4.ref.triton_amax import finite_amax

    buffers = 6
    xs = [torch.randn(size, size, device="cuda").to(torch.bfloat16) for _ in range(buffers)]
    ys = [torch.empty_like(x) for x in xs]
    copy = graph_time([partial(y.copy_, x) for x, y in zip(xs, ys, strict=True)])
    copy_rate = 2 * xs[0].numel() * 2 / copy
    rows: list[Row] = [{"op": "copy", "format": "bf16", "us": copy * 1e6, "gb_s": copy_rate / 1e9, "ratio": 1.0, "limit": 1.0}]
    shapes = [(t, w) for t in (1024, 2048, 4096, 8192) for w in (2, 4, 8)] if sweep else [(None, 4)]
    for name in ("nvfp4", "mxfp4", "mxfp8", "nvfp4_b32", "amdfp4"):
        fmt = formats.get(name)
        g = torch.tensor(0.002, device="cuda") if fmt.tensor_scale else None
        gs = None if g is None else torch.reciprocal(g)
        recipe = fp4.recipes["default"]
        parts = [golden.quantize_blocks(x, fmt, recipe, g, gs) for x in xs]
        written = parts[0][0].numel() + parts[0][1].numel()
        for tile, warps in shapes:
            pack = partial(golden.quantize_blocks, fmt=fmt, recipe=recipe, global_scale=g, encode_scale=gs, tile=tile, num_warps=warps)
            read = partial(golden.dequantize_blocks, global_scale=g, fmt=fmt, dtype=torch.bfloat16, tile=tile, num_warps=warps)
            work = {"quantize": [partial(pack, x) for x in xs], "dequantize": [partial(read, c, s) for c, s in parts]}
            if not sweep and name in ("nvfp4", "mxfp4"):
                work["quantize to sf_128x4"] = [partial(pack, x, scale_layout=fp4.layouts["sf_128x4"]) for x in xs]
            if not sweep and name == "nvfp4":  # x is read twice: for its amax, then for its codes
                work["quantize, g from amax"] = [partial(fp4.quantize, x, fmt) for x in xs]
                work["amax"] = [partial(finite_amax, x) for x in xs]
            for op, launches in work.items():
                took = graph_time(launches)
                small = {"amax": 0, "quantize, g from amax": written + xs[0].numel() * 2}.get(op, written)
                rate = (xs[0].numel() * 2 + small) / took
                row = {"op": op, "format": name, "us": took * 1e6, "gb_s": rate / 1e9, "ratio": rate / copy_rate, "limit": 0.85}
                rows.append(row | {"tile": tile or 0, "warps": warps})
    return rows


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


def check() -> Row:
    """Bytes of the compiled kernels against the CPU: every format, preset and input type. Raises SystemExit at the first difference."""
    from fp4.ref import triton_quantize as golden

    compared = 0
    for name in formats.names():
        for preset in fp4.recipes.names():
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                fmt, recipe, x = formats.get(name), fp4.recipe.get(preset, name), data((512, 1536), 5).to(dtype)
                g, gs = ref.resolve_global_scale(x, fmt, recipe, None, None, False)
                want = ref.quantize_blocks(x, fmt, recipe, g, gs)
                on = [None if t is None else t.cuda() for t in (g, gs)]
                got = golden.quantize_blocks(x.cuda(), fmt, recipe, *on)
                values = ref.dequantize_blocks(*want, g, fmt, dtype)
                back = golden.dequantize_blocks(*got, on[0], fmt, dtype).cpu()
                if fmt.tensor_scale and not torch.equal(ref.tensor_amax(x.cuda()).cpu(), ref.tensor_amax(x)):
                    raise SystemExit(f"check: amax of {dtype} differs from the CPU")
                pairs = [("codes", want[0], got[0].cpu()), ("scale", want[1], got[1].cpu())]
                pairs.append(("values", values.nan_to_num(0.5), back.nan_to_num(0.5)))
                for what, a, b in pairs:
                    if not torch.equal(a, b):
                        raise SystemExit(
                            f"check: {what} of {name} {preset} {dtype}: {int((a != b).sum())} of {a.numel()} differ from the CPU"
                        )
                    compared += a.numel()
    return {"op": "check", "compared": compared}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("part", choices=["cpu", "gpu"])
    p.add_argument("--elements", type=int, default=1 << 28)
    p.add_argument("--formats", nargs="+", default=["nvfp4", "mxfp4", "mxfp8"], help="CPU part")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--size", type=int, default=8192)
    p.add_argument("--sweep", action="store_true", help="try tile and warp counts")
    p.add_argument("--no-check", action="store_true", help="time only; comparing every preset compiles some 200 kernels, a minute or two")
    p.add_argument("--json", type=Path)
    a = p.parse_args()
    if a.part == "cpu":
        rows = cpu(a.elements, a.repeats, a.formats)
    else:
        rows = [*([] if a.no_check else [check()]), *gpu(a.size, a.sweep)]
    better = (lambda r: r["ratio"] <= r["limit"]) if a.part == "cpu" else (lambda r: r["ratio"] >= r["limit"])
    device = platform.processor() or platform.machine() if a.part == "cpu" else torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, {torch.get_num_threads()} threads, python {platform.python_version()}")
    for r in rows:
        if "ratio" not in r:
            print(f"checked: {r['compared']:,} bytes and values equal to the CPU's")
            continue
        size = f"{r['seconds']:.2f} s, copy {r['copy_seconds']:.3f} s" if a.part == "cpu" else f"{r['us']:.1f} us, {r['gb_s']:.0f} GB/s"
        extra = f" tile {r['tile']} warps {r['warps']}" if r.get("tile") else ""
        print(
            f"{r['op']:24s} {r['format']:10s} ratio {r['ratio']:.2f} (limit {r['limit']}) {'ok' if better(r) else 'MISSED'}  {size}{extra}"
        )
    if a.json:
        a.json.write_text(json.dumps({"device": device, "torch": torch.__version__, "command": sys.argv, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
