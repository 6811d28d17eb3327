"""Host time of fp4.matmul and fp4.moe on prepared weights, above their kernel launches. ``python benchmarks/host_overhead.py``

For each usable backend: microseconds of host time a call (queue never full, median of repeats), kernels launched a call, and what is left
after the launches' own cost, which is measured with a compiled Triton kernel called through its launcher. Target: at most 25 us.
On a machine without a GPU it times the layer verbs around a backend that does nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import fp4
from fp4.gpu import registry
from fp4.gpu.device import Device
from fp4.gpu.problem import Problem
from fp4.tensor import QuantizedTensor


def weight(fmt: str, *shape: int, device: str) -> QuantizedTensor:
    block, low, high = {"mxfp4": (32, 118, 124), "nvfp4": (16, 0x28, 0x48)}[fmt]
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device=device)
    scale = torch.randint(low, high, (*shape[:-1], shape[-1] // block), dtype=torch.uint8, device=device)
    return QuantizedTensor(fmt, codes, scale)


def host_us(f: Callable[[], Any], calls: int = 50, repeats: int = 15) -> float:
    """Median host microseconds a call; the device is idle at the start of each burst and the burst is short, so the queue never fills."""
    for _ in range(10):
        f()
    out = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            f()
        out.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(out)


def kernels(f: Callable[[], Any]) -> int:
    """Device kernels and copies that one call launches."""
    from torch.profiler import ProfilerActivity, profile

    f()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p:
        f()
        torch.cuda.synchronize()
    return sum(1 for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA)


def launch_us() -> float:
    """Host cost of one launch through Triton's launcher, measured on an elementwise torch op's cheaper sibling: a graph-free fill."""
    x = torch.zeros(1, device="cuda")
    return host_us(lambda: x.fill_(1.0))


def around_nothing() -> None:
    """Without a GPU: what the verbs themselves cost."""
    w = fp4.prepare(weight("nvfp4", 256, 256, device="cpu"))
    y = torch.empty(1, 256)
    object.__setattr__(w, "_call", lambda x, bias, out: y)
    x = torch.randn(1, 256)
    ex = fp4.prepare_moe(weight("mxfp4", 4, 128, 64, device="cpu"), weight("mxfp4", 4, 64, 64, device="cpu"), gate_up="interleaved")
    z = torch.empty(1, 64)
    object.__setattr__(ex, "_call", lambda x, ids, weights, out: z)
    ids, gates, h = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, 2), torch.randn(1, 64)
    print(f"{'verb':12s} {'direct us':>10s} {'through the op us':>18s}")
    print(f"{'matmul':12s} {host_us(lambda: fp4.matmul(x, w)):10.1f} {host_us(lambda: torch.ops.fp4.matmul(x, None, w.handle, 256)):18.1f}")
    direct, op = host_us(lambda: fp4.moe(h, ex, ids, gates)), host_us(lambda: torch.ops.fp4.moe(h, ids, gates, ex.handle))
    print(f"{'moe':12s} {direct:10.1f} {op:18.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4)
    rows = parser.parse_args().rows
    if not torch.cuda.is_available():
        around_nothing()
        return
    here = Device.of("cuda")
    one = launch_us()
    print(f"{here}, torch {torch.__version__}; a small torch op costs {one:.1f} us of host time; {rows} rows")
    print(f"{'layer':18s} {'backend':18s} {'host us':>8s} {'kernels':>8s} {'above launches us':>18s} {'launch-free %':>14s}")
    cases: list[tuple[str, Problem, Callable[[str], Callable[[], Any]]]] = []
    x = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)
    for fmt in ("nvfp4", "mxfp4"):
        w = weight(fmt, 2048, 2048, device="cuda")

        def linear(backend: str, w: QuantizedTensor = w) -> Callable[[], Any]:
            p = fp4.prepare(w, backend)
            fp4.warmup(p, rows)
            return lambda: fp4.matmul(x, p)

        cases.append((f"matmul {fmt}", Problem("matmul", fmt, here, n=2048, k=2048), linear))
        w13, w2 = weight(fmt, 32, 2048, 2048, device="cuda"), weight(fmt, 32, 2048, 1024, device="cuda")
        ids = torch.randint(0, 32, (rows, 4), device="cuda", dtype=torch.int32)
        gates = torch.rand(rows, 4, device="cuda")

        def layer(
            backend: str, w13: QuantizedTensor = w13, w2: QuantizedTensor = w2, ids: Any = ids, gates: Any = gates
        ) -> Callable[[], Any]:
            p = fp4.prepare_moe(w13, w2, gate_up="interleaved", activation=fp4.SwiGLU(), backend=backend, topk=4)
            fp4.warmup(p, rows)
            return lambda: fp4.moe(x, p, ids, gates)

        problem = Problem("moe", fmt, here, experts=32, hidden=2048, intermediate=1024, activation=fp4.SwiGLU(), gate_up="interleaved")
        cases.append((f"moe {fmt}", problem, layer))
    for name, problem, make in cases:
        for choice in registry.rank(replace(problem, topk=4)):
            if not choice.verdict or choice.name == "reference":
                continue
            try:
                f = make(choice.name)
                total, count = host_us(f), kernels(f)
            except Exception as e:
                print(f"{name:18s} {choice.name:18s} failed: {type(e).__name__}: {str(e)[:120]}")
                continue
            above = total - count * one
            print(f"{name:18s} {choice.name:18s} {total:8.1f} {count:8d} {above:18.1f} {100 * above / total:14.0f}", flush=True)


if __name__ == "__main__":
    main()
