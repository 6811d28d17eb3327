"""Speed of the layout kernel against a plain device copy: ``python benchmarks/permute.py [--mib 256] [--sweep] [--json FILE] [NAME ...]``.
With ``--no-time --jobs 8`` before it, the same options fill Triton's cache in 8 processes, and the timing compiles nothing.

For each byte layout and direction: the median time of ``apply`` or ``invert`` of one matrix and its share of the bandwidth that
``torch.Tensor.copy_`` of the same number of bytes reaches in the same run. Aim: 80% or more from 64 MiB on. ``--sweep`` also tries
other tile sizes and warps and prints the best. The last lines compare ``quantize`` with plain and with 128x4 scales.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor

import torch

from fp4 import layouts as catalogue
from fp4.gpu.kernels import permute
from fp4.layout import Layout
from fp4.layout_doc import sample_shape

TILES, WARPS = (4096, 8192, 16384, 32768), (4, 8)


def time_us(call, repeats: int = 20, calls: int = 4) -> float:  # type: ignore[no-untyped-def]
    """Median device time of one call in microseconds: a CUDA graph of ``calls`` calls, so that launch cost on the CPU is not counted.

    A call that cannot be captured is timed call by call, launch cost included.
    """
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        run, n = graph.replay, calls
    except RuntimeError:
        torch.cuda.synchronize()
        run, n = call, 1
    out = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        out.append(start.elapsed_time(stop) * 1000 / n)
    return statistics.median(out)


def shape_for(layout: Layout, nbytes: int) -> tuple[int, int]:
    """Whole tiles, about ``nbytes``, four times as many rows as columns or close to it."""
    columns = 4096 if layout.role != "scale" else 1024
    _, cols = sample_shape(layout, 0, columns * layout.units_per_byte)
    return sample_shape(layout, max(nbytes // cols, 1), cols * layout.units_per_byte)


def options(layout: Layout, sweep: bool) -> list[tuple[int, int]]:
    return [(t, w) for t in TILES for w in WARPS] if sweep else [permute.tile(layout)]


def warm(layout: Layout, nbytes: int, sweep: bool) -> None:
    """Compile what ``measure`` times; each call runs once."""
    shape = shape_for(layout, nbytes)
    x = torch.empty(shape, dtype=torch.uint8, device="cuda")
    y = layout.apply(x)
    layout.invert(y, shape)
    for tile, warps in options(layout, sweep):
        try:
            permute.apply(layout, x, tile_bytes=tile, warps=warps)
            permute.invert(layout, y, shape, tile_bytes=tile, warps=warps)
        except Exception as error:  # a tile that does not fit shared memory: measure says so too
            print(f"  {layout.name} tile {tile} warps {warps}: {type(error).__name__}")
    torch.cuda.synchronize()


def measure(layout: Layout, nbytes: int, sweep: bool) -> list[dict[str, object]]:
    shape = shape_for(layout, nbytes)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    y = layout.apply(x)
    if not torch.equal(layout.invert(y, shape), x):
        raise SystemExit(f"{layout.name}: wrong bytes at {shape}")
    copy = torch.empty_like(x)
    copy_us = time_us(lambda: copy.copy_(x))
    rows = []
    for direction in ("apply", "invert"):
        best: tuple[float, int, int] | None = None
        for tile, warps in options(layout, sweep):
            try:
                us = time_us(
                    (lambda: permute.apply(layout, x, tile_bytes=tile, warps=warps))  # noqa: B023
                    if direction == "apply"
                    else (lambda: permute.invert(layout, y, shape, tile_bytes=tile, warps=warps))  # noqa: B023
                )
            except Exception as error:  # a tile that does not fit shared memory is not an answer, but no reason to stop
                print(f"  {layout.name} {direction} tile {tile} warps {warps}: {type(error).__name__}")
                continue
            if best is None or us < best[0]:
                best = (us, tile, warps)
        if best is None:
            continue
        us, tile, warps = best
        rows.append(
            {
                "layout": layout.name,
                "pad": list(layout.multiple),
                "direction": direction,
                "shape": list(shape),
                "us": round(us, 1),
                "copy_us": round(copy_us, 1),
                "gb_s": round(2 * x.numel() / us / 1e3, 1),
                "of_copy": round(copy_us / us, 3),
                "tile": tile,
                "warps": warps,
            }
        )
    return rows


def quantize_rows(nbytes: int) -> list[dict[str, object]]:
    """``quantize`` with plain scales and straight into 128x4, bf16 input of ``nbytes``."""
    import fp4

    x = torch.randn(nbytes // 2 // 4096, 4096, dtype=torch.bfloat16, device="cuda")
    rows = []
    for name in ("nvfp4", "mxfp4"):
        plain = time_us(lambda: fp4.quantize(x, name))  # noqa: B023
        swizzled = time_us(lambda: fp4.quantize(x, name, scale_layout=catalogue.get("sf_128x4")))  # noqa: B023
        rows.append({"quantize": name, "plain_us": round(plain, 1), "sf_128x4_us": round(swizzled, 1), "ratio": round(swizzled / plain, 3)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="layouts; default: all")
    parser.add_argument("--mib", type=int, default=256, help="bytes moved, in MiB")
    parser.add_argument("--sweep", action="store_true", help="try other tile sizes and warps")
    parser.add_argument("--no-time", action="store_true", help="compile only what would be timed")
    parser.add_argument("--jobs", type=int, default=1, help="processes of --no-time")
    parser.add_argument("--json", metavar="FILE", help="write every row there")
    args = parser.parse_args()
    found = [
        layout
        for name in args.names or catalogue.names()
        for layout in (catalogue.variants(name) if name.startswith("hopper_sf") else catalogue.variants(name)[:1])
        if permute.can(layout)
    ]
    if args.no_time:
        with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            work = [pool.submit(warm, layout, args.mib << 20, args.sweep) for layout in found]
            if not args.names:
                work.append(pool.submit(quantize_rows, args.mib << 20))
            for done in work:
                done.result()
        return
    rows: list[dict[str, object]] = []
    print(f"{torch.cuda.get_device_name()}, {args.mib} MiB")
    for layout in found:
        for row in measure(layout, args.mib << 20, args.sweep):
            rows.append(row)
            print(
                f"{row['layout']!s:26} {row['direction']!s:6} {row['shape']!s:16} {row['us']:>8} us {row['gb_s']:>7} GB/s "
                f"{float(str(row['of_copy'])):6.1%} of copy  tile {row['tile']} warps {row['warps']}"
            )
    slow = [f"{r['layout']} {r['direction']} {r['of_copy']}" for r in rows if float(str(r["of_copy"])) < 0.8]
    print(f"{len(rows) - len(slow)} of {len(rows)} at 80% of copy or more" + (f"; below: {'; '.join(slow)}" if slow else ""))
    if not args.names:
        try:
            for row in quantize_rows(args.mib << 20):
                rows.append(row)
                print(row)
        except (TypeError, ImportError, AttributeError, ValueError) as error:
            print(f"quantize into a scale layout: {error}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "mib": args.mib, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
