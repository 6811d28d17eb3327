"""Marlin's mixture of experts beside fp4's, on the same weights, in turn in one process; its dense products with ``--dense``.

    MARLIN_LIBRARY=marlin.so python benchmarks/moe_marlin.py [--formats mxfp4,nvfp4 --tokens 1,16,64,256,1024,4096] [--dense] [--json FILE]

The kernels are SGLang 0.5.23's, built by ``benchmarks/marlin.py`` (which says how), called as its ``fused_marlin_moe`` calls them: rows
of a block by its rule, atomic adds for NVFP4. ``products``: the two products alone. ``layer``: product with bias, SwiGLU on halves, product
with bias and routing weight, SGLang's sum over the slots. The sort by expert is made beforehand and is not in the time (it is in fp4's).
Sizes that are no multiple of its tiles are padded by hand, x before the clock starts; three paddings of (k of the first product, n of the
second), of which the fastest layer counts: (2880, 2944) the least that runs, (2880, 3072), and (3072, 3072), what SGLang pads to.

Time: CUDA graphs of n x (flush of the L2 cache + op) less those of flushes; every op's graph is replayed in turn, the median of the rounds
counts. Error: relative Frobenius norm against float64, as in ``benchmarks/moe.py``; --check prints it, and does not time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import marlin
import torch
import triton
import triton.language as tl
from moe import weight

import fp4
from fp4.ref.moe import moe as reference

PADDINGS = ((2880, 2944), (2880, 3072), (3072, 3072))
EXPERTS, HIDDEN, INTER, MID, TOPK = 128, 2880, 2880, 2944, 4
DENSE_K, DENSE_N = 8192, (8192, 28672)


@triton.jit
def _swiglu(x, out, inter, alpha, beta, limit, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < inter
    gate = tl.load(x + row * 2 * inter + c, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * inter + inter + c, mask=inside, other=0.0).to(tl.float32)
    gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
    tl.store(out + row * inter + c, (gate * tl.sigmoid(alpha * gate) * (up + beta)).to(tl.bfloat16), mask=inside)


def swiglu(x: torch.Tensor, out: torch.Tensor) -> None:
    """[rows, 2 * inter] in halves -> [rows, inter]: one program for 512 columns of a row, as SGLang's swiglu_oai_split."""
    rows, inter = out.shape
    _swiglu[rows, triton.cdiv(inter, 512)](x, out, inter, 1.702, 1.0, 7.0, BLOCK=512, num_warps=4)


def in_turn_us(ops: dict[str, Callable[[], Any]], flush: torch.Tensor, n: int = 4, rounds: int = 9) -> dict[str, float]:
    """{name: us of one call with a cold L2}; the graphs of all ops take turns."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graphs, times = {}, {}
    with torch.cuda.stream(stream):
        for name, op in {"": lambda: None, **ops}.items():
            op()
            stream.synchronize()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name], stream=stream):
                for _ in range(n):
                    flush.zero_()
                    op()
            times[name] = []
        for _ in range(rounds + 1):
            for name, graph in graphs.items():
                a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                a.record(stream)
                graph.replay()
                b.record(stream)
                stream.synchronize()
                times[name].append(a.elapsed_time(b) / n * 1e3)
    median = {name: statistics.median(t[1:]) for name, t in times.items()}
    return {name: median[name] - median[""] for name in ops}


class Layer:
    """Marlin's calls for one padding and one batch; the buffers are made once."""

    def __init__(self, lib: marlin.Library, weights: tuple[marlin.Weight, marlin.Weight], ids: torch.Tensor, p: torch.Tensor) -> None:
        self.lib, (self.w13, self.w2), self.p = lib, weights, p.float().contiguous()
        self.tokens, self.topk = ids.shape
        self.route = marlin.Route(ids, EXPERTS)
        pairs = ids.numel()
        self.h, self.a, self.y, self.out = (
            torch.zeros(*size, dtype=torch.bfloat16, device="cuda")
            for size in ((pairs, self.w13.n), (pairs, self.w2.k), (pairs, self.w2.n), (self.tokens, self.w2.n))
        )

    def products(self, x: torch.Tensor) -> None:
        self.lib.moe(x, self.w13, self.route, top_k=self.topk, out=self.h)
        self.lib.moe(self.a, self.w2, self.route, top_k=1, weights=self.p, out=self.y)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.lib.moe(x, self.w13, self.route, top_k=self.topk, out=self.h)
        swiglu(self.h, self.a)
        self.lib.moe(self.a, self.w2, self.route, top_k=1, weights=self.p, out=self.y)
        return self.lib.topk_sum(self.y.view(self.tokens, self.topk, -1), self.out)[:, :HIDDEN]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def show(row: dict[str, Any]) -> None:
    shown = (f"{k} {v:.2e}" if "error" in k else f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
    print("  ".join(shown), flush=True)


def experts(lib: marlin.Library, fmt: str, tokens: list[int], check: bool) -> list[dict[str, Any]]:
    w13, w2 = weight(fmt, EXPERTS, 2 * INTER, HIDDEN, 11), weight(fmt, EXPERTS, HIDDEN, INTER, 12)
    b13 = (torch.randn(EXPERTS, 2 * INTER, device="cuda") * 0.1).bfloat16().float()
    b2 = (torch.randn(EXPERTS, HIDDEN, device="cuda") * 0.1).bfloat16().float()
    options: dict[str, Any] = {"gate_up": "interleaved", "activation": fp4.SwiGLU(), "bias13": b13, "bias2": b2}
    ours = fp4.prepare_moe(w13, w2, backend="triton", **options)
    first = {k: marlin.Weight(w13, MID, k, bias=b13, pairs=True) for k in {k for k, _ in PADDINGS}}
    second = {n: marlin.Weight(w2, n, MID, bias=b2, weighted=True) for n in {n for _, n in PADDINGS}}
    flush = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    rows = []
    for t in tokens:
        torch.manual_seed(t)
        x = torch.randn(t, HIDDEN, device="cuda", dtype=torch.bfloat16)
        p, ids = torch.topk(torch.randn(t, EXPERTS, device="cuda"), TOPK)
        p, ids = torch.softmax(p, -1), ids.int()
        given = {k: torch.nn.functional.pad(x, (0, k - HIDDEN)) for k in first}
        layers = {pad: Layer(lib, (first[pad[0]], second[pad[1]]), ids, p) for pad in PADDINGS}
        row: dict[str, Any] = {"format": fmt, "tokens": t, "block": layers[PADDINGS[0]].route.block}
        if check:
            some = slice(0, min(t, 32))
            want = reference(x[some], w13, w2, ids[some], p[some], acc=torch.float64, out_dtype=torch.float64, **options)
            row["fp4 error"] = relative(fp4.moe(x, ours, ids, p)[some], want)
            row |= {f"marlin {pad} error": relative(layer(given[pad[0]])[some], want) for pad, layer in layers.items()}
        else:
            ops: dict[str, Callable[[], Any]] = {"fp4": lambda: fp4.moe(x, ours, ids, p)}  # noqa: B023
            for pad, layer in layers.items():
                ops[f"layer {pad}"] = lambda layer=layer, pad=pad: layer(given[pad[0]])  # noqa: B023
                ops[f"products {pad}"] = lambda layer=layer, pad=pad: layer.products(given[pad[0]])  # noqa: B023
            got = in_turn_us(ops, flush)
            best = min(PADDINGS, key=lambda pad: got[f"layer {pad}"])
            mine = fp4.moe(x, ours, ids, p).double()
            row |= {"fp4": got["fp4"], "marlin layer": got[f"layer {best}"], "marlin products": got[f"products {best}"], "padding": best}
            row |= {"error between": relative(layers[best](given[best[0]]), mine), "all": got}
        rows.append(row)
        show({k: v for k, v in row.items() if k != "all"})
    return rows


def dense(lib: marlin.Library, fmt: str, ms: list[int], check: bool) -> list[dict[str, Any]]:
    """fp4.matmul, cuBLAS on the dequantised weight, and Marlin: the dense kernel for NVFP4, the MoE kernel with one expert for MXFP4."""
    rows = []
    flush = torch.empty(96 << 20, dtype=torch.uint8, device="cuda")
    for n in DENSE_N:
        q = weight(fmt, 1, n, DENSE_K, 5)
        one = fp4.QuantizedTensor(fmt, q.codes[0], q.scale[0], None if q.global_scale is None else q.global_scale.reshape(()))
        ours, theirs = fp4.prepare(one, backend="triton"), marlin.Weight(q, n, DENSE_K)
        exact = fp4.dequantize(one, torch.float32)
        wide = exact.bfloat16()
        for m in ms:
            torch.manual_seed(m)
            x = torch.randn(m, DENSE_K, device="cuda", dtype=torch.bfloat16)
            y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            row: dict[str, Any] = {"format": fmt, "n": n, "m": m}
            if check:
                want = x[:32].double() @ exact[:256].double().T
                row |= {"fp4 error": relative(fp4.matmul(x, ours)[:32, :256], want)}
                row |= {"marlin error": relative(lib.dense(x, theirs, y)[:32, :256], want)}
            else:
                ops = {
                    "fp4": lambda: fp4.matmul(x, ours),  # noqa: B023
                    "marlin": lambda: lib.dense(x, theirs, y),  # noqa: B023
                    "cublas": lambda: torch.nn.functional.linear(x, wide),  # noqa: B023
                }
                row |= in_turn_us(ops, flush)
            rows.append(row)
            show(row)
    return rows


def compile_ahead(formats: list[str], tokens: list[int]) -> None:
    """fp4's MoE kernels into Triton's disk cache, in processes that ask no device."""
    command = [sys.executable, str(Path(__file__).parent / "moe.py"), "--compile-only"]
    for process in [subprocess.Popen([*command, "--format", f, "--tokens", str(t)]) for f in formats for t in tokens]:
        process.wait(timeout=120)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--formats", default="mxfp4,nvfp4")
    p.add_argument("--tokens", default="1,16,64,256,1024,4096")
    p.add_argument("--dense", action="store_true")
    p.add_argument("--check", action="store_true", help="errors instead of times")
    p.add_argument("--compiled", action="store_true", help="fp4's kernels are in Triton's cache already")
    p.add_argument("--json", type=Path)
    a = p.parse_args()
    formats, tokens = a.formats.split(","), [int(t) for t in a.tokens.split(",")]
    try:
        file = marlin.find()
    except FileNotFoundError as e:
        print(f"marlin: not measured ({e})")
        return
    if not a.compiled and not a.dense:
        compile_ahead(formats, tokens)
    lib = marlin.Library(file)
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    rows: list[dict[str, Any]] = []
    for fmt in formats:
        rows += (dense if a.dense else experts)(lib, fmt, tokens, a.check)
        if a.json:
            a.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
