"""Dense W4A16 and W4A8 against cuBLAS bf16 and, where it is installed, humming: python benchmarks/dense.py [--out FILE]

Times are microseconds with a cold L2 (CUDA graph of ten (96 MiB flush, product) less the flushes, median of 14 replays); errors are
relative Frobenius errors against fp64 of the exactly dequantised weight on 256 of its rows; "limit" is the weight's bytes at 4.26 TB/s.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import triton

from fp4 import layouts
from fp4.gpu.kernels import tune
from fp4.gpu.kernels.dense_fp8 import Dense8
from fp4.gpu.kernels.plain_fp8 import row_base

MS = (1, 16, 64, 256, 1024, 4096)
SHAPES = ((8192, 8192), (28672, 8192))


def humming(block: int, n: int, k: int, codes: Any, scale: Any, second: Any, a8: bool = False) -> Any:
    """A humming layer on the same weight, or None when the package is not installed."""
    try:
        from humming.layer import HummingLayer
    except ImportError:
        return None
    how = {"quant_method": "mxfp4"} if block == 32 else {"quant_method": "modelopt", "quant_algo": "nvfp4"}
    act = {"dtype": "float8e4m3"} if a8 else None
    layer = HummingLayer(shape_n=n, shape_k=k, weight_config=how, input_config=act, torch_dtype=torch.bfloat16).cuda()
    tensors = {"weight": codes.clone(), "weight_scale": scale.clone() if block == 32 else scale.clone().view(torch.float8_e4m3fn)}
    if second is not None:
        tensors["weight_scale_2"] = second.float().clone().view(1)
    layer.load_from_tensors(tensors)
    layer.transform()
    return layer


def host_us(call: Any, x: torch.Tensor) -> float:
    """Host time of one call, median of 20 bursts of 20."""
    for _ in range(50):
        call(x)
    torch.cuda.synchronize()
    times = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(20):
            call(x)
        times.append((time.perf_counter() - start) / 20 * 1e6)
        torch.cuda.synchronize()
    return sorted(times)[10]


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--out", type=Path)
    ap.add_argument("--seconds", type=float, default=1e9, help="start no new row after this long")
    ap.add_argument("--peers", default="cublas,humming")
    ap.add_argument("--only", choices=("nvfp4", "mxfp4"))
    args = ap.parse_args()
    begin = time.time()
    clock = tune.Clock()
    rows: list[dict[str, Any]] = []

    def add(**row: Any) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        if args.out:
            args.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1))

    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    for block in (16, 32):
        if args.only not in (None, {16: "nvfp4", 32: "mxfp4"}[block]):
            continue
        for n, k in SHAPES:
            codes, scale, second = tune.checkpoint(n, k, block)
            mine = tune.bind(codes, scale, second, block)
            pick = torch.cat([torch.arange(128), torch.arange(n - 128, n)]).cuda()
            w = tune.values(codes[pick], scale[pick], second, block)
            wb = torch.empty(n, k, device="cuda", dtype=torch.bfloat16)
            for r in range(0, n, 2048):
                wb[r : r + 2048] = tune.values(codes[r : r + 2048], scale[r : r + 2048], second, block).bfloat16()
            calls: dict[str, Any] = {"fp4": mine}
            if block == 32:
                stored = layouts.get("frag_w").apply(codes), layouts.get("frag_sf32").apply(scale)
                calls["fp4 w4a8"] = Dense8(*stored, row_base(scale), None, n, k)
            if "cublas" in args.peers:
                calls["cublas bf16"] = lambda x, wb=wb: torch.nn.functional.linear(x, wb)
            if "humming" in args.peers:
                for name, a8 in (("humming", False), ("humming w4a8", True)):
                    if a8 and block == 16:
                        continue
                    try:
                        peer = humming(block, n, k, codes, scale, second, a8)
                    except Exception as e:  # a peer that fails is a row without a time
                        print(f"{name} {block} {n}: {type(e).__name__}: {e}"[:200], flush=True)
                        continue
                    if peer is not None:
                        calls[name] = peer
            limit = n * k * (0.5 + 1 / block) / 4.26e6
            for m in MS:
                x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
                ref = x.double() @ w.T
                for name, call in calls.items():
                    if time.time() - begin > args.seconds or ("w4a8" in name and m < 64):
                        continue
                    try:
                        y = call(x)
                        error = ((y[:, pick].double() - ref).norm() / ref.norm()).item()
                        us = clock(lambda call=call, x=x: call(x))
                    except Exception as e:
                        print(f"{name} {block} {n} {m}: {type(e).__name__}: {e}"[:200], flush=True)
                        continue
                    add(name=name, format={16: "nvfp4", 32: "mxfp4"}[block], n=n, k=k, m=m, us=round(us, 2), error=float(f"{error:.2e}"),
                        tflops=round(2e-6 * m * n * k / us), limit=round(limit, 1))  # fmt: skip
            if n == SHAPES[0][0]:
                for m in (1, 64):
                    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
                    add(name="fp4 host time of one call", format={16: "nvfp4", 32: "mxfp4"}[block], m=m, us=round(host_us(mine, x), 1))
            del calls, wb, mine
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
