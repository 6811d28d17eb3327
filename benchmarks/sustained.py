"""Products of many rows while the GPU is warm: time, SM clock and power, in bursts and sustained.

``python benchmarks/sustained.py [--json FILE]``. A product of 1,024 rows or more draws the power limit of the GPU, which then lowers its
clock; a time says little without it. Each product is a CUDA graph of about 8 ms of calls. burst: the median of five replays, 20 ms of
idling before each, at the full clock. sustained: the median of replays for 0.35 s without a pause, while nvidia-smi reads clock and power
every 20 ms (mean of what it reads after the first 0.15 s). cuBLAS bf16 has the same values as the weight it stands beside (bits that toggle
cost power); torch._scaled_mm is cuBLAS with both operands in e4m3 already, random, so without the quantisation of x.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dense
import torch
from dense import BLOCK, K

import fp4
from fp4.gpu.kernels import tune

Call = Callable[[], Any]
WHAT = "timestamp,clocks.sm,power.draw.instant,clocks_event_reasons.active"


def products(n: int, ms: list[int], peers: bool) -> Iterator[tuple[str, int, Call]]:
    """(name, m, call) of every product with an n x 8192 weight."""
    xs = {m: torch.randn(m, K, device="cuda", dtype=torch.bfloat16) for m in ms}
    for fmt in ("nvfp4", "mxfp4"):
        codes, scale, second = tune.checkpoint(n, K, BLOCK[fmt])
        weight = fp4.QuantizedTensor(fmt, codes, scale, second)
        w = torch.cat([tune.values(codes[r : r + 2048], scale[r : r + 2048], second, BLOCK[fmt]).bfloat16() for r in range(0, n, 2048)])
        p = fp4.prepare(weight)
        for m, x in xs.items():
            plan, y = tune.plan_of(p.bind(), m, tune.DEQUANTIZE), torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            yield f"cublas bf16 {fmt}", m, lambda x=x, w=w: torch.nn.functional.linear(x, w)
            yield f"fp4 {fmt}", m, lambda x=x, p=p: fp4.matmul(x, p)
            yield f"fp4 {fmt}, dequantise", m, lambda x=x, m=m, y=y, plan=plan: plan(x, None, y, m)
    p = fp4.prepare(weight, act="fp8")
    layer = dense.humming(32, n, K, codes, scale, None, True) if peers else None
    w8, one = torch.randn(n, K, device="cuda").to(torch.float8_e4m3fn), torch.ones((), device="cuda")
    for m, x in xs.items():
        x8 = x.to(torch.float8_e4m3fn)
        yield "cublas e4m3", m, lambda x8=x8: torch._scaled_mm(x8, w8.t(), one, one, out_dtype=torch.bfloat16)
        yield "fp4 w4a8", m, lambda x=x: fp4.matmul(x, p)
        if layer is not None:
            yield "humming w4a8", m, lambda x=x: layer(x)


def replay(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    """Seconds of one replay."""
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record(stream)
    graph.replay()
    b.record(stream)
    stream.synchronize()
    return a.elapsed_time(b) * 1e-3


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def measure(call: Call, flops: float) -> tuple[dict[str, float], datetime.datetime, datetime.datetime]:
    """Times of one product, and when it ran without a pause."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    calls = max(4, int(8e-3 * 700e12 / flops))
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                call()
        replay(graph, stream)
        burst = []
        for _ in range(5):
            time.sleep(0.02)
            burst.append(replay(graph, stream))
        begin, end, held = datetime.datetime.now(), time.monotonic() + 0.35, []
        while time.monotonic() < end:
            held.append(replay(graph, stream))
    us = {"burst us": median(burst) / calls * 1e6, "sustained us": median(held) / calls * 1e6}
    return us | {f"{k.split()[0]} tflops": flops / v * 1e-6 for k, v in us.items()}, begin, datetime.datetime.now()


def samples(path: str) -> list[tuple[datetime.datetime, float, float, str]]:
    """(when, MHz, W, reasons) of nvidia-smi's lines; a line that was cut is left out."""
    found = []
    for line in Path(path).read_text().splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4 and parts[3].startswith("0x"):
            found.append((datetime.datetime.strptime(parts[0], "%Y/%m/%d %H:%M:%S.%f"), float(parts[1]), float(parts[2]), parts[3]))
    return found


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rows", type=int, nargs="+", default=[1024, 4096])
    p.add_argument("--sizes", type=int, nargs="+", default=[8192, 28672], help="N of the weights; K is 8192")
    p.add_argument("--no-peers", action="store_true", help="without humming")
    p.add_argument("--compile-only", action="store_true", help="call each product once, time nothing")
    p.add_argument("--json")
    a = p.parse_args()
    rows: list[dict[str, Any]] = []
    while_held: list[tuple[datetime.datetime, datetime.datetime]] = []
    with tempfile.NamedTemporaryFile("w+", suffix=".csv") as log:
        reader = None
        if not a.compile_only:
            reader = subprocess.Popen(["nvidia-smi", f"--query-gpu={WHAT}", "--format=csv,noheader,nounits", "-lms", "20"], stdout=log)
        for n in a.sizes:
            for name, m, call in products(n, a.rows, not a.no_peers):
                call()
                torch.cuda.synchronize()
                if reader:
                    row, *held = measure(call, 2.0 * m * n * K)
                    rows.append({"name": name, "n": n, "m": m, **row})
                    while_held.append((held[0], held[1]))
        if not reader:
            return
        time.sleep(0.1)
        reader.terminate()
        reader.wait()
        read = samples(log.name)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for row, (begin, end) in zip(rows, while_held, strict=True):
        inside = [s for s in read if begin + datetime.timedelta(seconds=0.15) <= s[0] <= end]
        if inside:
            row |= {"mhz": sum(s[1] for s in inside) / len(inside), "watt": sum(s[2] for s in inside) / len(inside)}
            row["reasons"] = sorted({s[3] for s in inside})
        burst, held_ = (f"{row[f'{how} us']:8.1f} us {row[f'{how} tflops']:5.0f} TFLOP/s" for how in ("burst", "sustained"))
        state = f"{row.get('mhz', 0):5.0f} MHz {row.get('watt', 0):4.0f} W"
        print(f"{row['n']:6d} {row['m']:5d} {row['name']:24s} burst {burst}  sustained {held_}  {state}")
    if a.json:
        Path(a.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
