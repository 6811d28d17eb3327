"""Dense products of real models' shapes as ``fp4.matmul`` runs them, beside cuBLAS bf16.

``python benchmarks/shapes.py [--json FILE]``. Kernels compile first, in processes that do not touch the GPU (``--compile-only``: no more
than that; a run after it takes ``--no-compile``). Then one process measures: microseconds with a cold L2, CUDA graphs of (96 MiB flush,
product) less those of flushes, median of replays, both formats and cuBLAS in turn. Printed worst first, as a multiple of cuBLAS's time.
It takes no further cell after ``--seconds`` and keeps what it has; ``--json`` is written anew after each number of rows of x.

An error is the relative Frobenius distance from cuBLAS's product of the weight's exact values in bf16; both are rounded to bf16, which
puts about 2.4e-3 between two right results. ``--humming`` times humming too, where it is installed; it compiles in this process.
``--rows`` times beside each pick the rows of the table for the same number of rows of x: where another is faster, the table is not best.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

#: (n, k): projections of one layer, whole or a GPU's share of it, of models from 4 to 405 billion weights; and what the kernels' targets
#: are about
SHAPES = (
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (2560, 8192), (1280, 8192), (2048, 8192), (8192, 1024),
    (8192, 2048), (8192, 3584), (5120, 2880), (7168, 2048), (14336, 8192), (5120, 8192), (8192, 8192), (28672, 8192),
)  # fmt: skip
MS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
BLOCK = {"nvfp4": 16, "mxfp4": 32}
BEGIN = time.monotonic()
#: largest error
RIGHT = 4e-3


def short(row: dict[str, Any]) -> str:
    """A row of the table in a few characters, without its conditions."""
    from fp4.gpu.kernels.dense_plans import CONDITIONS

    return " ".join([row["kernel"], *(f"{c}{v}" for c, v in row.items() if c not in (*CONDITIONS, "kernel") and v)])


def rows_of(bound: Any, m: int, more: bool) -> list[dict[str, Any]]:
    """The pick of the table; with ``more`` also what it has for the same class of m, each kernel once."""
    pick = bound.choose(m)
    same = [r for r in bound._rows if r["m_max"] == pick["m_max"] or (r["kernel"] == "dequantize" and m > 256)] if more else []
    return list({short(r): r for r in (pick, *same)}.values())


def compile_rows(args: argparse.Namespace) -> None:
    import torch

    from fp4.gpu.kernels import dense, tune

    none, about = torch.zeros(4, dtype=torch.int32), {"low": 116, "high": 123, "any": False, "fp16": True}
    jobs: list[tuple[int, int, int, dict[str, Any], int]] = []
    for n, k in args.shapes:
        for block in BLOCK.values():
            d = dense.Dense(none, none, None, n, k, block, about, "sm90")
            jobs += [(n, k, m, row, block) for m in args.ms for row in rows_of(d, m, args.rows)]
    work, kernels = tune.distinct(jobs)
    # the slowest first, in different processes
    work.sort(key=lambda j: (j[3]["kernel"] not in ("tiles", "ws"), j[3]["kernel"] != "small", -j[1]))
    say(f"{kernels} kernels of {len(jobs)} rows, {len(work)} jobs")
    tune.precompile(work, args.compile_seconds, args.parts)
    say("compiled")


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGIN:5.1f} s: {text}", flush=True)


def clock_of() -> Any:
    """``tune.Clock`` without what ``torch.cuda.graph`` does before each capture (a collection, all cached memory given back)."""
    import torch

    from fp4.gpu.kernels import tune

    class Clock(tune.Clock):
        def _graph(self, op: Any) -> torch.cuda.CUDAGraph:
            def once() -> None:
                self.flush.zero_()
                if op:
                    op()

            with torch.cuda.stream(self.stream):
                once()
                once()
                self.stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin()
                try:
                    for _ in range(self.inner):
                        once()
                finally:
                    graph.capture_end()
            return graph

    return Clock()


def weights(args: argparse.Namespace) -> dict[tuple[int, int], dict[str, Any]]:
    """(n, k) -> format -> (prepared, exact values in bf16, humming's layer if wanted), made on the GPU."""
    import torch

    import fp4
    from fp4.gpu.kernels import tune

    held: dict[tuple[int, int], dict[str, Any]] = {}
    for n, k in args.shapes:
        for fmt, block in BLOCK.items():
            codes, scale, second = tune.checkpoint(n, k, block)
            exact = torch.empty(n, k, device="cuda", dtype=torch.bfloat16)
            for a in range(0, n, 2048):
                exact[a : a + 2048] = tune.values(codes[a : a + 2048], scale[a : a + 2048], second, block).bfloat16()
            layer = None
            if args.humming:
                from dense import humming  # the other benchmark of this folder

                layer = humming(block, n, k, codes, scale, second)
            held.setdefault((n, k), {})[fmt] = (fp4.prepare(fp4.QuantizedTensor(fmt, codes, scale, second)), exact, layer)
    torch.cuda.synchronize()
    return held


def measure(args: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    """Each cell to ``found`` as soon as it is measured."""
    import torch

    import fp4
    from fp4.gpu.kernels import tune

    held = weights(args)
    say(f"{len(held)} weights in two formats")
    x_all = torch.randn(max(args.ms) * max(k for _, k in args.shapes), device="cuda", dtype=torch.bfloat16)
    y_all = torch.empty(max(args.ms) * max(n for n, _ in args.shapes), device="cuda", dtype=torch.bfloat16)
    clock = clock_of()
    gc.collect()
    gc.disable()  # a graph that is collected during a capture ends it
    for m in args.ms:
        for n, k in args.shapes:
            if time.monotonic() - BEGIN > args.seconds:
                say(f"stopped at M = {m}, {n} x {k}: --seconds {args.seconds:g}")
                return
            x, y = x_all[: m * k].view(m, k), y_all[: m * n].view(m, n)
            ops: dict[Any, Any] = {"cublas": lambda x=x, y=y, w=held[n, k]["nvfp4"][1]: torch.mm(x, w.t(), out=y)}
            about: dict[str, dict[str, Any]] = {}
            for fmt, (w, exact, layer) in held[n, k].items():
                ref = torch.mm(x, exact.t()).float()
                error = ((fp4.matmul(x, w).float() - ref).norm() / ref.norm()).item()
                bound = w.bind()
                pick, *others = rows_of(bound, m, args.rows)
                about[fmt] = {"row": short(pick), "error": error}
                ops[fmt] = lambda x=x, w=w: fp4.matmul(x, w)
                for row in others:
                    plan = tune.plan_of(bound, m, row)
                    ops[fmt, short(row)] = lambda x=x, y=y, m=m, plan=plan: plan(x, None, y, m)
                if layer is not None:
                    ops[fmt, "humming"] = lambda x=x, layer=layer: layer(x)
            us = 8 + m * n * k / 350e6  # what to expect, for the number of repeats
            clock.inner, clock.replays = (6, 15) if us < 60 else (3, 11) if us < 300 else (2, 7)
            times = clock.together(ops)
            torch.cuda.empty_cache()  # memory of the graphs
            for fmt in BLOCK:
                beside = {name[1]: round(t, 2) for name, t in times.items() if name[0] == fmt}
                found.append(
                    {"n": n, "k": k, "m": m, "format": fmt, "us": times[fmt], "cublas": times["cublas"], **about[fmt], "others": beside}
                )
        say(f"M = {m}")
        if args.json:
            args.json.write_text(json.dumps(found))


def show(found: list[dict[str, Any]]) -> None:
    """Worst first, then means."""
    for r in sorted(found, key=lambda r: -r["us"] / r["cublas"]):
        better = sorted((t, name) for name, t in r["others"].items() if t < r["us"] * 0.97 or name == "humming")
        more = "; ".join(f"{name} {t:.1f}" for t, name in better[:3])
        size, ratio = f"{r['n']}x{r['k']}", r["us"] / r["cublas"]
        print(f"{ratio:.2f} {size:>11} M {r['m']:<4} {r['format']} {r['us']:7.1f} us, cuBLAS {r['cublas']:7.1f}  [{r['row']}]  {more}")
    for fmt in BLOCK:
        for m in sorted({r["m"] for r in found}):
            q = [r["us"] / r["cublas"] for r in found if r["m"] == m and r["format"] == fmt]
            mean = math.exp(sum(map(math.log, q)) / len(q))
            print(f"{fmt} M {m:<4} {len(q)} shapes: geometric mean {mean:.3f}, worst {max(q):.2f} of cuBLAS's time")


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--json", type=Path, help="write the measurements here")
    ap.add_argument("--shapes", type=lambda s: tuple(tuple(map(int, v.split("x"))) for v in s.split(",")), default=SHAPES, help="NxK, ...")
    ap.add_argument("--ms", type=lambda s: tuple(map(int, s.split(","))), default=MS)
    ap.add_argument("--rows", action="store_true", help="also the table's other rows for the same number of rows of x")
    ap.add_argument("--humming", action="store_true")
    ap.add_argument("--compile-only", action="store_true")
    ap.add_argument("--no-compile", action="store_true")
    ap.add_argument("--seconds", type=float, default=60, help="measure no further cell after so long; what compiles comes on top")
    ap.add_argument("--compile-seconds", type=float, default=300)
    ap.add_argument("--parts", type=int, help="compiling processes")
    args = ap.parse_args()
    if not args.no_compile:
        compile_rows(args)
    if args.compile_only:
        return
    global BEGIN
    BEGIN = time.monotonic()
    found: list[dict[str, Any]] = []
    try:
        measure(args, found)
    finally:  # a cell that fails does not take those before it along
        if args.json:
            args.json.write_text(json.dumps(found))
        show(found)
    wrong = [r for r in found if not r["error"] < RIGHT]
    for r in wrong:
        print(f"WRONG: {r['n']}x{r['k']} M {r['m']} {r['format']}: error {r['error']:.1e}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
