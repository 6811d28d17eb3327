"""Mixture of experts, 4-bit weights and bf16 activations: fp4's kernels, and triton_kernels in the same run when it can be imported.

    python benchmarks/moe.py [--experts 128 --hidden 2880 --inter 2880 --topk 4 --format mxfp4 --tokens 1,16,64,256,1024,4096] [--json FILE]

Time: CUDA graph of n x (flush of the L2 cache + op) minus the same graph of flushes, median of replays. fp4's time holds everything from
top-k ids to the summed rows; triton_kernels' (matmul_ogs generation) starts from routing data that were made beforehand.
Error: relative Frobenius norm against the float64 reference on the first tokens (128 pairs). ``limit``: bytes of the experts in use at
the measured copy rate, or the arithmetic at the measured cuBLAS rate, whichever is longer. Kernels are compiled in parallel before the
clock starts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fp4
from fp4.gpu.kernels import grouped, grouped_plan, grouped_run
from fp4.ref.moe import moe as reference
from fp4.tensor import QuantizedTensor

COPY, ARITHMETIC = 4.26e12, 7.9e14  # bytes and operations a second, measured on an H200 (benchmarks/notes/moe.md)


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("experts", 128), ("hidden", 2880), ("inter", 2880), ("topk", 4)):
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--format", default="mxfp4", choices=["mxfp4", "nvfp4"])
    p.add_argument("--tokens", default="1,16,64,256,1024,4096")
    p.add_argument("--no-peers", action="store_true")
    p.add_argument("--compiled", action="store_true", help="the kernels are in Triton's cache already")
    p.add_argument("--warm", action="store_true", help="call everything once and time nothing, so that compilers' caches are full")
    p.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--json")
    return p.parse_args()


def compile_for(a: argparse.Namespace, t: int) -> None:
    """Compile what ``t`` tokens need into Triton's disk cache; no device is asked."""
    from triton.backends.compiler import GPUTarget

    z, w = torch.zeros(64), torch.zeros(64, dtype=torch.uint8)
    windows: dict[torch.dtype, Any] = {torch.bfloat16: ((z, 5, False),) * 2}
    g = grouped.Grouped(32 if a.format == "mxfp4" else 16, a.experts, 0, a.hidden, a.inter, fp4.SwiGLU(), w, w, w, w, z, z, windows)
    plan = grouped_plan.choose(t * a.topk, a.experts, (9, 0))
    b = torch.bfloat16
    grouped_run.Chain(g, t, a.topk, b, torch.int32, torch.float32, b, plan, GPUTarget("cuda", 90, 32))


def compile_ahead(tokens: list[int]) -> None:
    """Fill Triton's disk cache from one process a token count, before this process touches CUDA."""
    command = [sys.executable, str(Path(__file__).parent / "moe.py"), *sys.argv[1:], "--compile-only", "--tokens"]
    for process in [subprocess.Popen([*command, str(t)]) for t in tokens]:
        process.wait(timeout=120)


def weight(fmt: str, e: int, n: int, k: int, seed: int) -> QuantizedTensor:
    g = torch.Generator(device="cuda").manual_seed(seed)
    block, low, high = {"mxfp4": (32, 118, 122), "nvfp4": (16, 0x20, 0x38)}[fmt]
    codes = torch.randint(0, 256, (e, n, k // 2), dtype=torch.uint8, device="cuda", generator=g)
    scale = torch.randint(low, high, (e, n, k // block), dtype=torch.uint8, device="cuda", generator=g)
    second = torch.rand(e, device="cuda", generator=g) * 0.05 + 0.01 if fmt == "nvfp4" else None
    return QuantizedTensor(fmt, codes, scale, second)


def layer(a: argparse.Namespace) -> tuple[QuantizedTensor, QuantizedTensor, dict[str, Any]]:
    """(w13, w2, what else prepare_moe and the reference take), random."""
    w13, w2 = weight(a.format, a.experts, 2 * a.inter, a.hidden, 11), weight(a.format, a.experts, a.hidden, a.inter, 12)
    b13 = (torch.randn(a.experts, 2 * a.inter, device="cuda") * 0.1).bfloat16().float()
    b2 = (torch.randn(a.experts, a.hidden, device="cuda") * 0.1).bfloat16().float()
    return w13, w2, {"gate_up": "interleaved", "activation": fp4.SwiGLU(), "bias13": b13, "bias2": b2}


def inputs(a: argparse.Namespace, t: int, w13: QuantizedTensor, w2: QuantizedTensor, options: dict[str, Any]) -> tuple[Any, ...]:
    """(x, ids, routing weights, the error of a result against float64 on its first tokens)."""
    torch.manual_seed(t)
    x = torch.randn(t, a.hidden, device="cuda", dtype=torch.bfloat16)
    p, ids = torch.topk(torch.randn(t, a.experts, device="cuda"), a.topk)
    p, ids = torch.softmax(p, -1), ids.int()
    some = slice(0, min(t, 128 // a.topk))
    want = reference(x[some], w13, w2, ids[some], p[some], acc=torch.float64, out_dtype=torch.float64, **options)
    return x, ids, p, lambda y: ((y[some].double() - want).norm() / want.norm()).item()


def graph_us(op: Callable[[], Any], flush: torch.Tensor, n: int = 4, replays: int = 11) -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def timed(body: Callable[[], Any]) -> float:
        with torch.cuda.stream(stream):
            body()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(n):
                    body()
            out = []
            for _ in range(replays):
                a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                a.record(stream)
                graph.replay()
                b.record(stream)
                stream.synchronize()
                out.append(a.elapsed_time(b) / n * 1e3)
        return statistics.median(out)

    def both() -> None:
        flush.zero_()
        op()

    return timed(both) - timed(lambda: flush.zero_())


def host_us(op: Callable[[], Any], calls: int = 20) -> float:
    """Host time of a call with an empty queue."""
    out = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            op()
        out.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(out)


def triton_kernels_call(w13: QuantizedTensor, w2: QuantizedTensor, b13: torch.Tensor, b2: torch.Tensor, experts: int, topk: int) -> Any:
    """(ids, weights) -> callable(x), with the library's own default layouts; None when it is not importable in this generation."""
    try:
        from triton_kernels.matmul_ogs import (
            FlexCtx,
            FnSpecs,
            FusedActivation,
            GatherIndx,
            PrecisionConfig,
            RoutingData,
            ScatterIndx,
            matmul_ogs,
        )
        from triton_kernels.numerics import InFlexData
        from triton_kernels.swiglu import swiglu_fn
        from triton_kernels.tensor import FP4, convert_layout, make_ragged_tensor_metadata, wrap_torch_tensor
        from triton_kernels.tensor_details import layout
    except ImportError as e:
        print(f"triton_kernels: not measured ({e})", file=sys.stderr)
        return None
    if w13.format.block != 32:
        print("triton_kernels: not measured (this generation takes MXFP4 only)", file=sys.stderr)
        return None

    def convert(q: QuantizedTensor) -> tuple[Any, Any]:
        vl, vo = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        sl, so = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
        value = convert_layout(wrap_torch_tensor(q.codes.transpose(-2, -1), dtype=FP4), vl, **vo)
        # its kernel reads four scale groups at a time, so the columns are padded here
        s = torch.nn.functional.pad(q.scale.transpose(-2, -1), (0, 0, 0, -q.scale.shape[-1] % 4)).mT.contiguous().mT
        scale = convert_layout(wrap_torch_tensor(s), sl, **so)
        return value, PrecisionConfig(weight_scale=scale, flex_ctx=FlexCtx(rhs_data=InFlexData()))

    (v13, c13), (v2, c2) = convert(w13), convert(w2)
    act = FusedActivation(FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"), reduction_n=2), (1.702, 7.0))

    def bind(ids: torch.Tensor, p: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        hist = torch.bincount(flat, minlength=experts).int()
        gate = p.bfloat16().reshape(-1)[order].contiguous()
        rd = RoutingData(gate, hist, experts, topk, make_ragged_tensor_metadata(hist, order.numel()))
        order, inverse = order.int(), inverse.int()
        gi, si = GatherIndx(src_indx=order, dst_indx=inverse), ScatterIndx(src_indx=inverse, dst_indx=order)

        def call(x: torch.Tensor) -> torch.Tensor:
            h = matmul_ogs(x, v13, b13, rd, gather_indx=gi, precision_config=c13, fused_activation=act)
            return matmul_ogs(h, v2, b2, rd, scatter_indx=si, precision_config=c2, gammas=rd.gate_scal)

        return call

    return bind


def show(row: dict[str, Any]) -> None:
    print("  ".join(f"{k} {v:.3g}" if "error" in k else f"{k} {v:.1f}" for k, v in row.items()), flush=True)


def main() -> None:
    a = parse()
    tokens = [int(t) for t in a.tokens.split(",")]
    if a.compile_only:
        compile_for(a, tokens[0])
        return
    if not a.compiled:
        compile_ahead(tokens)
    import triton

    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, triton {triton.__version__}, {a.format}, {vars(a)}", flush=True)
    w13, w2, options = layer(a)
    ex = fp4.prepare_moe(w13, w2, backend="triton", **options)
    peer = None if a.no_peers else triton_kernels_call(w13, w2, options["bias13"], options["bias2"], a.experts, a.topk)
    flush = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    rows: list[dict[str, Any]] = []
    cases = []

    def save() -> None:
        if a.json:
            Path(a.json).write_text(json.dumps(rows, indent=1))

    for t in tokens:
        x, ids, p, error = inputs(a, t, w13, w2, options)
        ours = lambda: fp4.moe(x, ex, ids, p)  # noqa: B023, E731
        cases.append((x, ids, p, error))
        if a.warm:
            ours()
            rows.append({"tokens": t})
            continue
        active = int(torch.bincount(ids.flatten(), minlength=a.experts).gt(0).sum())
        weights = active * 3 * a.hidden * a.inter * (w13.format.bits_per_element / 8)
        limit = max(weights / COPY, 6 * t * a.topk * a.hidden * a.inter / ARITHMETIC) * 1e6
        rows.append(
            {"tokens": t, "active": active, "limit": limit, "fp4": graph_us(ours, flush), "error": error(ours()), "host": host_us(ours)}
        )
        show(rows[-1])
        save()
    # the other library last: its kernels cannot be compiled ahead without a device
    for row, (x, ids, p, error) in zip(rows, cases, strict=True) if peer is not None else ():
        call = peer(ids, p)
        theirs = lambda: call(x)  # noqa: B023, E731
        if a.warm:
            theirs()
            continue
        row |= {"triton_kernels": graph_us(theirs, flush), "triton_kernels error": error(theirs()), "triton_kernels host": host_us(theirs)}
        show(row)
        save()


if __name__ == "__main__":
    main()
