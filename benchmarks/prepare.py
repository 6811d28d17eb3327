"""Time and memory of preparing one GPT-OSS-120b layer: 128 experts, hidden and intermediate 2880. ``python benchmarks/prepare.py``

Targets on an H200: under 1 s, and extra memory (peak above the weights and the result) under 1.2 times the layer's bytes.
``--experts`` makes it smaller, and it runs on a CPU too, with the layouts of an injected device (``--as sm90``).
"""

from __future__ import annotations

import argparse
import time

import torch

import fp4
from fp4.gpu import registry
from fp4.gpu.device import Device
from fp4.gpu.problem import Problem
from fp4.tensor import QuantizedTensor

H = INTER = 2880


def weight(fmt: str, *shape: int, device: torch.device) -> QuantizedTensor:
    block, low, high = {"mxfp4": (32, 118, 124), "nvfp4": (16, 0x28, 0x48)}[fmt]
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device=device)
    return QuantizedTensor(fmt, codes, torch.randint(low, high, (*shape[:-1], shape[-1] // block), dtype=torch.uint8, device=device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--format", default="mxfp4")
    parser.add_argument("--as", dest="target", default=None, help="capability whose layouts to prepare, without such a device: sm90")
    a = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    here = Device.of(a.target or device)
    w13, w2 = weight(a.format, a.experts, 2 * INTER, H, device=device), weight(a.format, a.experts, H, INTER, device=device)
    b13, b2 = torch.randn(a.experts, 2 * INTER, device=device), torch.randn(a.experts, H, device=device)
    given = w13.nbytes + w2.nbytes
    act = fp4.SwiGLU()
    problem = Problem(
        "moe", a.format, here, experts=a.experts, hidden=H, intermediate=INTER, activation=act, gate_up="interleaved", bias=True
    )  # fmt: skip
    print(f"{here}: {a.experts} experts, {given / 2**20:.0f} MiB in {a.format}")
    print(f"{'backend':18s} {'first s':>8s} {'again s':>8s} {'stored/given':>13s} {'extra/given':>12s} {'restore s':>10s}")
    for choice in registry.rank(problem):
        if not choice.verdict:
            continue
        times, extra = [], 0.0
        for _ in range(2):
            if gpu:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            p = fp4.prepare_moe(
                w13, w2, gate_up="interleaved", bias13=b13, bias2=b2, activation=act, backend=choice.name,
                device=a.target or device, topk=4,
            )  # fmt: skip
            if gpu:
                torch.cuda.synchronize()
                extra = (torch.cuda.max_memory_allocated() - before) / given
            times.append(time.perf_counter() - start)
            stored = p.nbytes / given
            if len(times) < 2:
                del p
        start = time.perf_counter()
        r13, r2 = p.restore()
        if gpu:
            torch.cuda.synchronize()
        spent = time.perf_counter() - start
        assert torch.equal(r13.codes, w13.codes), choice.name
        assert torch.equal(r2.scale, w2.scale), choice.name
        shown = f"{extra:12.2f}" if gpu else f"{'-':>12s}"
        print(f"{choice.name:18s} {times[0]:8.2f} {times[1]:8.2f} {stored:13.2f} {shown} {spent:10.2f}", flush=True)
        del p, r13, r2


if __name__ == "__main__":
    main()
