"""Measure the dense kernels and write their table: ``fp4 bench --tune``.

Each candidate is compiled beforehand in parallel processes, checked against fp64 on 256 rows of W, and timed with a cold L2: a CUDA
graph of ten (flush, product) minus ten flushes, median of replays. The fastest correct one of a size class becomes its row.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fp4.gpu.kernels import dense, frag, launch

Row = dict[str, Any]


def _small(wk: int, wn: int, r: int, u: int, d: int, xs: int) -> Row:
    return {"kernel": "small", "WK": wk, "WN": wn, "R": r, "U": u, "D": d, "XS": xs}


def _wide(bt: int, r: int, u: int, xs: int, nw: int, split: int = 1, gm: int = 8, pdl: int = 0) -> Row:
    return {"kernel": "wide", "BT": bt, "R": r, "U": u, "XS": xs, "GM": gm, "SPLIT": split, "NW": nw, "PDL": pdl}


def _both(*args: int) -> list[Row]:
    """A ``wide`` row that waits for the permutation of x, and one that starts over it."""
    return [_wide(*args, pdl=pdl) for pdl in (0, 1)]


DEQUANTIZE: Row = {"kernel": "dequantize"}
#: upper bound of a class of m (None: no bound) -> (m that is timed, candidates)
CANDIDATES: dict[int | None, tuple[int, list[Row]]] = {
    1: (1, [_small(4, 1, 1, 4, 1, 99), _small(4, 1, 1, 2, 2, 99)]),
    8: (8, [_small(4, 2, 1, 2, 2, 4), _small(4, 1, 2, 2, 1, 0), _small(4, 1, 1, 4, 1, 4)]),
    16: (16, [_small(4, 2, 1, 2, 2, 4), _small(4, 1, 2, 2, 1, 0)]),
    32: (32, [_small(4, 1, 2, 2, 1, 0), *(_wide(32, r, 4, 6, 4, sp) for r in (1, 2) for sp in (1, 2))]),
    64: (64, [*_both(64, 1, 4, 4, 4, 2), *_both(64, 1, 4, 4, 4, 3), *_both(64, 2, 4, 6, 4), *_both(64, 2, 2, 6, 4)]),
    128: (128, [_wide(128, 1, 2, 6, 8, 2), _wide(128, 2, 2, 6, 8), _wide(128, 1, 4, 6, 8, 2), _wide(128, 1, 2, 6, 4)]),
    256: (256, [*_both(128, 1, 4, 6, 8), *_both(256, 1, 2, 6, 8), *_both(256, 1, 2, 5, 8)]),
    1024: (1024, [*_both(256, 1, 2, 6, 8), *_both(256, 1, 2, 5, 8), *_both(256, 1, 2, 5, 8, 1, 4), DEQUANTIZE]),
    None: (4096, [_wide(256, 1, 2, 6, 8), DEQUANTIZE]),
}  # fmt: skip
#: (lower bound of n, n and k that are timed)
CLASSES = ((16384, 28672, 8192), (0, 8192, 8192))


def checkpoint(n: int, k: int, block: int, seed: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Random codes, ordinary scale bytes (e4m3 0.5 .. 240; ue8m0 2^-11 .. 2^-4) and a global scale, on the GPU."""
    g = torch.Generator("cuda").manual_seed(seed)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda", generator=g)
    low, high = (0x30, 0x78) if block == 16 else (116, 124)
    scale = torch.randint(low, high, (n, k // block), dtype=torch.uint8, device="cuda", generator=g)
    return codes, scale, torch.tensor(2.0**-13, device="cuda") if block == 16 else None


def values(codes: torch.Tensor, scale: torch.Tensor, second: torch.Tensor | None, block: int) -> torch.Tensor:
    """fp64 [rows, k]: code * scale * global scale."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64, device=codes.device)
    v = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), -1).flatten(-2)
    s = scale.view(torch.float8_e4m3fn).double() if block == 16 else torch.exp2(scale.double() - 127)
    v = v * s.repeat_interleave(block, -1)
    return v if second is None else v * second.double()


def bind(codes: torch.Tensor, scale: torch.Tensor, second: torch.Tensor | None, block: int) -> dense.Dense:
    from fp4 import layouts

    words, bytes_ = layouts.get("frag_w").apply(codes), layouts.get(frag.SCALE_LAYOUT[block]).apply(scale)
    return dense.Dense(words, bytes_, second, codes.shape[0], codes.shape[1] * 2, block, dense.facts(scale, block))


class Clock:
    """Cold-L2 times: a CUDA graph of ``inner`` (96 MiB written, op) less the same graph without op; median of ``replays``, in us."""

    def __init__(self, inner: int = 10, replays: int = 14) -> None:
        self.inner, self.replays = inner, replays
        self.flush = torch.empty(96 << 20, dtype=torch.uint8, device="cuda")
        self.stream = torch.cuda.Stream()
        self.base = self._run(None)

    def _run(self, op: Callable[[], Any] | None) -> float:
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                self.flush.zero_()
                if op:
                    op()
            self.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                for _ in range(self.inner):
                    self.flush.zero_()
                    if op:
                        op()
            times = []
            for _ in range(self.replays):
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                a.record(self.stream)
                graph.replay()
                b.record(self.stream)
                self.stream.synchronize()
                times.append(a.elapsed_time(b) * 1000 / self.inner)
        return float(sorted(times)[len(times) // 2])

    def __call__(self, op: Callable[[], Any]) -> float:
        return max(self._run(op) - self.base, 1e-3)


def compile_share(part: int, parts: int, arch: int, blocks: tuple[int, ...]) -> None:
    """Compile every parts-th candidate for an architecture into Triton's cache; touches no GPU."""
    from triton.backends.compiler import GPUTarget

    launch.compile_only(GPUTarget("cuda", arch, 32))
    jobs = [(n, k, m, row, block) for block in blocks for _, n, k in CLASSES for m, rows in CANDIDATES.values() for row in rows]
    for n, k, m, row, block in jobs[part::parts]:
        about = {"low": 116, "high": 123, "any": False, "fp16": True}
        none = torch.zeros(4, dtype=torch.int32)
        d = dense.Dense(none, none, None, n, k, block, about, "sm90")
        d._plan(m, False, torch.bfloat16, None, row)


def precompile(blocks: tuple[int, ...] = (16,)) -> None:
    """Fill Triton's cache with all candidates, one process a core."""
    parts = os.cpu_count() or 1
    arch = torch.cuda.get_device_capability()[0] * 10 + torch.cuda.get_device_capability()[1]
    code = (
        "import sys; from fp4.gpu.kernels.tune import compile_share; a = list(map(int, sys.argv[1:])); compile_share(*a[:3], tuple(a[3:]))"
    )
    args = [[sys.executable, "-c", code, str(i), str(parts), str(arch), *map(str, blocks)] for i in range(parts)]
    for p in [subprocess.Popen(a, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}) for a in args]:
        p.wait()


def tune(path: str | Path | None = None, say: Callable[[str], Any] = print) -> dict[str, Any]:
    """Time all candidates on this GPU (NVFP4, bf16) and write the table to ``path`` (default: the package's). Returns the table."""
    precompile()
    clock = Clock()
    where = "sm90" if torch.cuda.get_device_capability() == (9, 0) else "default"
    found: dict[tuple[int | None, int], Row] = {}
    for n_min, n, k in CLASSES:
        codes, scale, second = checkpoint(n, k, 16)
        d = bind(codes, scale, second, 16)
        pick = torch.cat([torch.arange(128), torch.arange(n - 128, n)]).cuda()
        w = values(codes[pick], scale[pick], second, 16)
        for m_max, (m, rows) in CANDIDATES.items():
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            ref = x.double() @ w.T
            y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            times = []
            for row in rows:
                plan = d._plan(m, False, torch.bfloat16, None, row)
                y.fill_(torch.nan)
                plan(x, None, y, m)
                error = ((y[:, pick].double() - ref).norm() / ref.norm()).item()
                us = clock(lambda plan=plan, x=x, y=y, m=m: plan(x, None, y, m))  # type: ignore[misc]
                say(f"n={n} k={k} m={m} {us:9.2f} us  error {error:.1e}  {json.dumps(row)}")
                if error < 3e-3:
                    times.append((us, row))
            found[m_max, n_min] = min(times, key=lambda t: t[0])[1]
    out = [{"m_max": m_max, "n_min": n_min, **found[m_max, n_min]} for m_max in CANDIDATES for n_min, _, _ in CLASSES]
    target = Path(path) if path else Path(__file__).parent / "table.json"
    whole = json.loads((Path(__file__).parent / "table.json").read_text())
    import triton

    whole["about"] = (
        "first row that fits (m <= m_max, n >= n_min) wins; made by fp4 bench --tune on an "
        f"{torch.cuda.get_device_name()}, triton {triton.__version__}, torch {torch.__version__}"
    )
    whole[where] = out
    lines = [f'  "about": {json.dumps(whole.pop("about"))}']
    lines += [f'  "{name}": [\n' + ",\n".join(f"    {json.dumps(r)}" for r in rows) + "\n  ]" for name, rows in whole.items()]
    target.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    dense.table.cache_clear()
    return {where: out}
