"""``fp4 bench``: times on this machine, each as a ratio to a plain copy or product measured in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import fp4
from fp4.cli.table import table
from fp4.errors import Fp4Error

__all__ = ["collect", "render", "seconds", "tune"]


def seconds(call: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Best of ``repeats`` after one warm-up call; wall clock, with the device idle before and after."""
    call()
    best = float("inf")
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def collect(mebi: int) -> dict[str, Any]:
    """Quantise, dequantise and multiply a bf16 matrix of about ``mebi`` Mi elements."""
    if not 1 <= mebi <= 4096:
        raise Fp4Error(f"bench: --elements is {mebi}; need 1 to 4096 (Mi elements)")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    k = 4096
    n = mebi * 2**20 // k
    torch.manual_seed(0)
    w = torch.randn(n, k, device=device).bfloat16()
    x = torch.randn(16, k, device=device).bfloat16()
    target = torch.empty_like(w)
    copy = seconds(lambda: target.copy_(w), device)
    product = seconds(lambda: x @ w.T, device)
    rows = [{"what": "copy bf16", "seconds": copy, "baseline": "-", "ratio": 1.0}]
    for name in ("nvfp4", "mxfp4"):
        q = fp4.quantize(w, name)
        rows.append(_row(f"quantize {name}", seconds(lambda f=name: fp4.quantize(w, f), device), "copy bf16", copy))  # type: ignore[misc]
        rows.append(_row(f"dequantize {name}", seconds(lambda q=q: fp4.dequantize(q, torch.bfloat16), device), "copy bf16", copy))  # type: ignore[misc]
        ready = fp4.prepare(q)
        took = seconds(lambda r=ready: fp4.matmul(x, r), device)  # type: ignore[misc]
        rows.append(_row(f"matmul {name} [16, k], {ready.backend}", took, "torch bf16 product", product))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return {"device": where, "shape": [n, k], "rows": rows}


def tune(quiet: bool) -> dict[str, Any]:
    """Measure the dense kernels and rewrite ``fp4/gpu/kernels/table.json``. Raises Fp4Error where they cannot run."""
    if not torch.cuda.is_available():
        raise Fp4Error("bench --tune: no CUDA device is here; the table that ships was measured on an H200 and serves other GPUs too")
    from fp4.gpu.kernels import launch
    from fp4.gpu.kernels import tune as module

    if why := launch.gluon_reason():
        raise Fp4Error(f"bench --tune: {why}; the plain kernels have nothing to tune")
    if torch.cuda.get_device_capability() != (9, 0):
        raise Fp4Error("bench --tune: the candidates are Hopper kernels (SM90); other GPUs use the rows 'default' of the table")
    return module.tune(say=(lambda _: None) if quiet else print)


def _row(what: str, took: float, baseline: str, base: float) -> dict[str, Any]:
    return {"what": what, "seconds": took, "baseline": baseline, "ratio": took / base}


def render(report: dict[str, Any]) -> str:
    rows = [(r["what"], 1e3 * r["seconds"], r["ratio"], r["baseline"]) for r in report["rows"]]
    return f"{report['device']}, weight {report['shape']}\n" + table(("what", "ms", "ratio", "to"), rows)
