"""The decode kernels' PTX on a CPU, block by block, against fp64 of the exact weights: values, ragged edges, every warp layout."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.kernel

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np, torch
from ptx_block import Block
from triton.backends.compiler import GPUTarget
from fp4 import layouts
from fp4.gpu.kernels import dense, frag, launch, tune

launch.compile_only(GPUTarget("cuda", 90, 32))
build, made, calls = launch.build, [], []
def keep(fn, signature, constants, **how):
    made.append((build(fn, signature, constants, **how), fn, signature, how["num_warps"]))
    return made[-1][0]
launch.build = keep
launch.Kernel.__call__ = lambda self, *args: calls.append(args)
launch.raw_stream = lambda index: 0

def run(row, n, k, m, block, half=False, bias=False, processors=2, special=False):
    launch.processors = lambda device: processors
    g = torch.Generator().manual_seed(n + k + m)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=g)
    scale = torch.randint(*((0x30, 0x78) if block == 16 else (116, 124)), (n, k // block), dtype=torch.uint8, generator=g)
    if special:  # a negative scale, one of zero, NaN in one row
        scale[0, 0], scale[1, 0], scale[2, 0] = (0x90, 0, 0x7F) if block == 16 else (116, 116, 0xFF)
    second = torch.tensor(2.0**-13) if block == 16 else None
    w = tune.values(codes, scale, second, block)
    if special and block == 32:
        w[2, :32] = torch.nan
    stored = layouts.get("frag_w").apply(codes), layouts.get(frag.SCALE_LAYOUT[block]).apply(scale)
    d = dense.Dense(*stored, second, n, k, block, dense.facts(scale, block), "sm90")
    dtype = torch.float16 if half else torch.bfloat16
    x = torch.randn(m, k, generator=g).to(dtype)
    b = torch.randn(n, generator=g).to(dtype) if bias else None
    y = torch.full((m, n), torch.nan, dtype=dtype)
    made.clear(), calls.clear()
    d._plan(m, half, dtype, b, row)(x, b, y, m)
    (kernel, fn, signature, warps), (gx, gy, _, *args) = made[-1], calls[-1]
    memory, places = [np.zeros(256, np.uint8)], {}
    for t in (x, d.codes, d.scale, d._alpha[half], y, *(() if b is None else (b,))):
        raw = t.contiguous().view(torch.uint8).numpy().reshape(-1)
        places[t.data_ptr()] = sum(map(len, memory))
        memory.append(np.concatenate([raw, np.zeros(-len(raw) % 256, np.uint8)]))
    memory = np.concatenate(memory)
    names = [name for name in fn.arg_names if name in signature]
    params = [places[a] if signature[name].startswith("*") else a & 0xFFFFFFFF for name, a in zip(names, args)]
    block_ = Block(kernel.compiled.asm["ptx"], warps * 32, kernel.shared)
    for at in range(gx):
        block_.run(memory, [*params, 0, 0, 0, 0], (at, 0), (gx, gy))
    at = places[y.data_ptr()]
    got = torch.from_numpy(memory[at : at + y.nbytes].copy()).view(dtype).reshape(m, n).double()
    want = x.double() @ w.T + (0 if b is None else b.double())
    assert torch.equal(got.isnan(), want.isnan()), (row, n, k, m, block)
    good = ~want.isnan()
    error = ((got - want)[good].norm() / want[good].norm()).item()
    assert error < (3e-4 if half else 3e-3), (error, row, n, k, m, block)

for case in eval(sys.argv[2]):
    run(**case)
    print("right", case)
"""


def small(wk, wn, r, u, d, xs):
    return {"kernel": "small", "WK": wk, "WN": wn, "R": r, "U": u, "D": d, "XS": xs}


def cases(*rows):
    return [dict(zip(("row", "n", "k", "m", "block"), r[:5], strict=True)) | (r[5] if len(r) > 5 else {}) for r in rows]


CASES = {
    "one row": cases(
        (small(8, 1, 1, 4, 1, 99), 40, 8192, 1, 16),
        (small(8, 1, 1, 4, 1, 99), 40, 2880, 1, 32, {"bias": True}),
        (small(4, 1, 1, 4, 1, 99), 40, 1024, 1, 16),
        (small(4, 1, 1, 4, 1, 99), 40, 2880, 1, 32, {"bias": True}),
        (small(4, 1, 1, 4, 2, 99), 40, 48, 1, 16),
        (small(4, 1, 1, 2, 2, 99), 40, 576, 1, 32, {"half": True}),
        (small(4, 1, 1, 2, 2, 99), 48, 4096, 1, 16, {"special": True}),
        (small(4, 1, 2, 2, 1, 99), 72, 1536, 1, 16),
        (small(2, 2, 1, 8, 1, 2), 64, 4096, 1, 32, {"special": True}),
    ),
    "more rows": cases(
        (small(4, 2, 1, 2, 2, 4), 40, 1056, 13, 16, {"bias": True}),
        (small(4, 2, 1, 2, 2, 4), 32, 2048, 8, 32),
        (small(4, 1, 2, 2, 1, 0), 40, 512, 16, 32, {"half": True}),
        (small(4, 1, 1, 4, 1, 4), 40, 512, 5, 16),
        (small(8, 1, 1, 4, 1, 99), 16, 8192, 16, 16),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_blocks(name):
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    here = os.path.dirname(os.path.abspath(__file__))
    done = subprocess.run([sys.executable, "-c", SCRIPT, here, repr(CASES[name])], capture_output=True, text=True, env=env, timeout=300)
    assert done.stdout.count("right") == len(CASES[name]), done.stdout + done.stderr[-3000:]
