"""Dense products as ``fp4.matmul`` runs them, beside cuBLAS bf16 and, where it is installed, humming.

``python benchmarks/dense.py [--out FILE]``. One process a size. All compile, set up and check at the same time; then one after the other
has the GPU for its times: microseconds with a cold L2, CUDA graphs of (96 MiB flush, product) less those of flushes, median of replays,
products of a size in turn, both formats and the peers, so that all meet the same clock. Errors are relative Frobenius errors against
fp64 of the exactly dequantised weight on 256 of its rows; same: two calls gave equal bytes; limit: the weight's bytes at 4.26 TB/s.
``--table FILE`` prints a report as
markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

MS = (1, 16, 64, 256, 1024, 4096)
CASES = ("nvfp4+mxfp4:8192", "nvfp4+mxfp4:28672")
K = 8192
Ops = dict[int, dict[str, Any]]
BLOCK = {"nvfp4": 16, "mxfp4": 32, "w4a8": 0}


def humming(block: int, n: int, k: int, codes: Any, scale: Any, second: Any, a8: bool = False) -> Any:
    """A humming layer on the same weight, or None when the package is not installed."""
    import torch

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


def host_us(call: Any, x: Any) -> float:
    """Host time of one call, median of 20 bursts of 20."""
    import torch

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


def picked(bound: Any, m: int) -> dict[str, Any]:
    """The row of the table that a bound weight takes for m rows."""
    from fp4.gpu.kernels.dense_fp8 import KERNELS

    row = bound.choose(m) if hasattr(bound, "choose") else {}
    if isinstance(row, dict):
        return dict(row)
    return {"kernel": next(name for name, kind in KERNELS.items() if isinstance(row, kind)), **row._asdict()}


def compile_rows(args: argparse.Namespace) -> None:
    """Every kernel of the report into Triton's cache, in processes that do not touch the GPU."""
    import torch

    from fp4.gpu.kernels import dense, dense_fp8, tune

    none, about = torch.zeros(4, dtype=torch.int32), {"low": 116, "high": 123, "any": False, "fp16": True}
    work: list[tuple[Any, ...]] = []
    for name, n in ((name, case.split(":")[1]) for case in args.cases for name in case.split(":")[0].split("+")):
        d = dense.Dense(none, none, None, int(n), K, BLOCK[name], about, "sm90")
        work += [(int(n), K, m, picked(d, m), BLOCK[name]) for m in args.ms]
        if name == "mxfp4":
            d8 = dense_fp8.Dense8(none, none, torch.full((int(n),), 120, dtype=torch.uint8), None, int(n), K, True)
            work += [(int(n), K, m, picked(d8, m), 0) for m in args.ms if m >= 64]
    work += [(r["n"], K, r["m"], r["row"], BLOCK[r["format"]]) for r in args.also]
    tune.precompile(work, args.compile_seconds, args.parts)


@contextlib.contextmanager
def until(when: float) -> Any:
    """Raises TimeoutError at a time of ``time.monotonic``, as soon as Python runs: a peer may compile for long."""

    def stop(*_: object) -> None:
        raise TimeoutError("no time left for this peer")

    old = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, min(max(when - time.monotonic(), 0.001), 1e6))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def ops_of(fmt: str, n: int, args: argparse.Namespace, late: float) -> tuple[Ops, dict[tuple[int, str], dict[str, Any]], Any]:
    """({m: {name: call}}, {(m, name): row of the report without its time}, fp4's call) for one weight: set up, run and checked.

    late: time of ``time.monotonic`` after which no peer is waited for.
    """
    import torch

    import fp4
    from fp4.gpu.kernels import tune

    k, block, case = K, BLOCK[fmt], f"{fmt}:{n}"
    codes, scale, second = tune.checkpoint(n, k, block)
    weight = fp4.QuantizedTensor(fmt, codes, scale, second)
    pick = torch.cat([torch.arange(128), torch.arange(n - 128, n)]).cuda()
    w = tune.values(codes[pick], scale[pick], second, block)
    prepared = fp4.prepare(weight)
    calls: dict[str, Any] = {"fp4": lambda x: fp4.matmul(x, prepared)}
    bound = {"fp4": prepared.bind()}
    if fmt == "mxfp4":
        prepared8 = fp4.prepare(weight, act="fp8")
        calls["fp4 w4a8"] = lambda x: fp4.matmul(x, prepared8)
        bound["fp4 w4a8"] = prepared8.bind()
    if "cublas" in args.peers:
        wb = torch.empty(n, k, device="cuda", dtype=torch.bfloat16)
        for r in range(0, n, 2048):
            wb[r : r + 2048] = tune.values(codes[r : r + 2048], scale[r : r + 2048], second, block).bfloat16()
        calls["cublas bf16"] = lambda x: torch.nn.functional.linear(x, wb)
    peers: dict[str, Any] = {}
    if "humming" in args.peers:
        for name in ("humming", "humming w4a8")[: 1 if block == 16 else 2]:
            try:
                with until(late):
                    peer = humming(block, n, k, codes, scale, second, "w4a8" in name)
            except Exception as e:  # a peer that fails has no row
                print(f"{name} {case}: {type(e).__name__}: {e}"[:200], flush=True)
                continue
            if peer is not None:
                peers[name] = peer
    ops: dict[int, dict[str, Any]] = {}
    about: dict[tuple[int, str], dict[str, Any]] = {}
    limit = round(n * k * (0.5 + 1 / block) / 4.26e6, 1)
    xs = {m: torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for m in args.ms}
    todo = [(m, name, call) for m in args.ms for name, call in calls.items() if m >= 64 or "w4a8" not in name]
    for row in args.also:
        if row["n"] == n and row["m"] in xs and row["format"] in ((fmt, "w4a8") if block == 32 else (fmt,)):
            kind = "fp4 w4a8" if row["format"] == "w4a8" else "fp4"
            plan = tune.plan_of(bound[kind], row["m"], row["row"])

            def other(x: Any, plan: Any = plan) -> Any:
                y = torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device)
                plan(x, None, y, x.shape[0])
                return y

            todo.append((row["m"], f"{kind}, other row {json.dumps(row['row'])}", other))
    todo += [(m, name, call) for m in args.ms for name, call in peers.items() if m >= 64 or "w4a8" not in name]
    for m, name, call in todo:
        x = xs[m]
        try:
            with until(late if name in peers else float("inf")):
                y = call(x).clone()
                ref = x.double() @ w.T
                error = ((y[:, pick].double() - ref).norm() / ref.norm()).item()
                same = torch.equal(y, call(x))
                torch.cuda.synchronize()
        except Exception as e:
            print(f"{name} {case} {m}: {type(e).__name__}: {e}"[:200], flush=True)
            continue
        ops.setdefault(m, {})[name] = lambda call=call, x=x: call(x)
        about[m, name] = {"name": name, "format": fmt, "n": n, "k": k, "m": m, "error": float(f"{error:.2e}"), "same": same, "limit": limit}
        if name in bound:
            about[m, name] |= {"backend": prepared.backend, "row": picked(bound[name], m)}
    return ops, about, calls["fp4"]


def child(case: str, args: argparse.Namespace) -> None:
    """Set up, say "ready", wait for a line, time, one JSON line a row."""
    import torch

    from fp4.gpu.kernels import tune

    n, late = int(case.split(":")[1]), time.monotonic() + args.peer_seconds
    formats = {fmt: ops_of(fmt, n, args, late) for fmt in case.split(":")[0].split("+")}
    torch.cuda.synchronize()
    print("ready", flush=True)
    if args.setup_only or not sys.stdin.readline():
        return
    short, long = tune.Clock(10, 20), tune.Clock(4, 14)
    for m in sorted(args.ms, key=lambda m: (m == 4096, -m)):
        together = {(fmt, name): op for fmt, (ops, _, _) in formats.items() for name, op in ops.get(m, {}).items()}
        for (fmt, name), us in (long if m >= 1024 else short).together(together).items():
            row = formats[fmt][1][m, name]
            print(json.dumps({**row, "us": round(us, 2), "tflops": round(2e-6 * m * n * K / us)}), flush=True)
    for fmt, (_, _, call) in formats.items():
        for m in (1, 64):
            us = host_us(call, torch.randn(m, K, device="cuda", dtype=torch.bfloat16))
            print(json.dumps({"name": "fp4 host time of one call", "format": fmt, "n": n, "m": m, "us": round(us, 1)}), flush=True)
    print("done", flush=True)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", type=Path)
    ap.add_argument("--cases", type=lambda s: tuple(s.split(",")), default=CASES, help="format:n or format+format:n, ...")
    ap.add_argument("--ms", type=lambda s: tuple(map(int, s.split(","))), default=MS)
    ap.add_argument("--peers", default="cublas,humming")
    ap.add_argument(
        "--also", type=lambda p: json.loads(Path(p).read_text()), default=[], help="JSON list of {format, n, m, row} to time too"
    )
    ap.add_argument("--seconds", type=float, default=1e9, help="end after this long, with the rows there are")
    ap.add_argument("--peer-seconds", type=float, default=1e6, help="a weight waits no longer for its peers' own compilation")
    ap.add_argument("--compile-seconds", type=float, default=300)
    ap.add_argument("--parts", type=int, help="compiling processes")
    ap.add_argument("--compile-only", action="store_true")
    ap.add_argument("--no-compile", action="store_true")
    ap.add_argument("--setup-only", action="store_true", help="run and check everything once, time nothing")
    ap.add_argument("--child", help=argparse.SUPPRESS)
    ap.add_argument("--table", type=Path, help="print a report as markdown")
    args = ap.parse_args()
    if args.table:
        print(markdown(json.loads(args.table.read_text())["rows"]))
        return
    if args.child:
        child(args.child, args)
        return
    begin = time.monotonic()
    if not args.no_compile:
        compile_rows(args)
        print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    if not args.compile_only:
        run_cases(args, begin + args.seconds)


def run_cases(args: argparse.Namespace, end: float) -> None:
    import torch
    import triton

    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    rows: list[dict[str, Any]] = []
    # each argument but what says what to run and when to stop
    skip = ("--out", "--cases", "--seconds")
    passed, given = [], iter(sys.argv[1:])
    for arg in given:
        if arg.split("=")[0] in skip:
            if "=" not in arg:
                next(given)
        else:
            passed.append(arg)
    children: dict[str, tuple[Any, queue.Queue[str | None]]] = {}
    for case in args.cases:
        p = subprocess.Popen([sys.executable, __file__, *passed, "--child", case], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=lambda p=p, q=lines: ([q.put(line.strip()) for line in p.stdout], q.put(None)), daemon=True).start()
        children[case] = p, lines

    def lines_of(case: str, last: str, end: float) -> Any:
        """What a child says before the line ``last``; nothing more once it ended or time is up."""
        p, lines = children[case]
        while True:
            try:
                line = lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                print(f"{case}: not finished in time", flush=True)
                p.kill()
                return
            if line is None or line == last:
                return
            yield line

    for case in children:
        for line in lines_of(case, "ready", end if args.setup_only else end - 0.28 * args.seconds):
            print(line, flush=True)
    for case, (p, _) in () if args.setup_only else children.items():
        if p.poll() is not None:
            continue
        p.stdin.write("go\n")
        p.stdin.flush()
        for line in lines_of(case, "done", end):
            print(line, flush=True)
            if line.startswith("{"):
                rows.append(json.loads(line))
                if args.out:
                    args.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1))
    for p, _ in children.values():
        p.stdin.close()
        try:
            p.wait(max(5.0, min(60.0, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            p.kill()


#: us that a product must reach, by (n, m)
TARGETS = {(8192, 1): 14, (28672, 1): 38, (8192, 16): 17, (28672, 16): 45, (8192, 64): 28, (28672, 64): 72}


def markdown(rows: list[dict[str, Any]]) -> str:
    """The report's tables: W4A16 with each row's target, W4A8, host times; what misses its target first, by how much."""
    us = {(r["name"], r["format"], r.get("n"), r["m"]): r["us"] for r in rows}
    lines: list[tuple[float, str]] = []
    eight: list[tuple[float, str]] = []
    for r in rows:
        name, fmt, n, m = r["name"], r["format"], r.get("n"), r["m"]
        if name not in ("fp4", "fp4 w4a8"):
            continue
        cublas = us.get(("cublas bf16", fmt, n, m)) or us.get(("cublas bf16", "bf16", n, m))
        peer = us.get((name.replace("fp4", "humming"), fmt, n, m))
        shown = [f"{v:.2f}" if v else "not run" for v in (cublas, peer)]
        if name == "fp4 w4a8":
            share = r["tflops"] / 1200
            met = "-" if m < 1024 else "yes" if share >= 1 else f"no ({100 - 100 * share:.0f}% below)"
            eight.append((share if m >= 1024 else 9 + share, f"| {n} | {m} | {r['us']:.2f} | {r['tflops']} | {met} | {shown[1]} |"))
            continue
        target = TARGETS.get((n, m)) or (0.95 * peer if m == 256 and peer else 1.03 * cublas if m >= 1024 and cublas else None)
        over = r["us"] / target - 1 if target else -9
        met = "-" if not target else "yes" if over <= 0 else f"no ({100 * over:.1f}% above)"
        goal = f"{target:.1f}" if target else "-"
        lines.append((-over, f"| {fmt} | {n} | {m} | {r['us']:.2f} | {goal} | {met} | {shown[0]} | {shown[1]} |"))
    out = ["| format | N | M | fp4 | target | met | cuBLAS bf16 | humming |", "|---|---|---|---|---|---|---|---|"]
    out += [line for _, line in sorted(lines)]
    out += ["", "| N | M | fp4 w4a8 | TFLOP/s | met | humming |", "|---|---|---|---|---|---|", *(line for _, line in sorted(eight)), ""]
    hosts = [f"{r['format']} N {r.get('n')} M {r['m']}: {r['us']} us" for r in rows if "host time" in r["name"]]
    if hosts:
        out.append("Host time of one call: " + "; ".join(hosts))
    return "\n".join(out)


if __name__ == "__main__":
    main()
