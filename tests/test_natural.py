"""Weights in the natural order of k inside the registers (``natural``): the operand of the tensor cores from its PTX, lane by lane."""

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
from natural_kernel import operand
from ptx_block import Block
from triton.backends.compiler import GPUTarget
from fp4 import layouts
from fp4.gpu.kernels import dense, frag, launch, natural, tune

launch.compile_only(GPUTarget("cuda", 90, 32))
if sys.argv[2] == "broken":
    natural._EX.value = natural.EXCHANGE.replace("e,c,p", "c,e,p")
cases = (16, False, False, 1), (32, False, False, 1), (16, True, False, 2), (32, True, True, 1), (16, False, True, 2)
for block, half, special, r in cases if sys.argv[2] == "whole" else cases[:1]:
    nw, kt = 4, 8
    n, k = r * nw * 16, kt * 64
    g = torch.Generator().manual_seed(block + r)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=g)
    scale = torch.randint(*((0x30, 0x78) if block == 16 else (116, 124)), (n, k // block), dtype=torch.uint8, generator=g)
    if special:
        scale[0, 0], scale[1, 0], scale[2, 0] = (0x90, 0, 0x7F) if block == 16 else (116, 116, 0xFF)
    w = tune.values(codes, scale, None, block)
    if special and block == 32:
        w[2, :32] = torch.nan
    stored = layouts.get("frag_w").apply(codes), layouts.get(frag.SCALE_LAYOUT[block]).apply(scale)
    d = dense.Dense(*stored, None, n, k, block, dense.facts(scale, block), "sm90")
    window = d._windows[half]
    constants = dict(KT=kt, KIND=block, ANY=window.any_byte, HALF=half, NW=nw, R=r)
    signature = dict(w_ptr="*i32", s_ptr="*i32", o_ptr="*fp16" if half else "*bf16", oc="i32")
    kernel = launch.build(operand, signature, constants, num_warps=nw)
    raw = [t.contiguous().view(torch.uint8).numpy().reshape(-1) for t in (d.codes, d.scale)] + [np.full(n * k * 2, 0xFF, np.uint8)]
    at = np.cumsum([256, *map(len, raw)])
    memory = np.concatenate([np.zeros(256, np.uint8), *raw])
    run = Block(kernel.compiled.asm["ptx"], nw * 32, kernel.shared)
    run.run(memory, [int(at[0]), int(at[1]), int(at[2]), window.oc & 0xFFFFFFFF, 0, 0, 0, 0])
    got = torch.from_numpy(memory[at[2] :].copy()).view(torch.float16 if half else torch.bfloat16).reshape(n, k).double() * window.alpha
    assert torch.equal(got.isnan(), w.isnan()), "NaN"
    live = ~w.isnan().any(1)  # all of y is NaN in the other rows, whatever else they hold
    assert torch.equal(got[live], w[live].double()), "values"
    print("right", block, half, special, r, window.any_byte)
"""


def run(how):
    env = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    here = os.path.dirname(os.path.abspath(__file__))
    return subprocess.run([sys.executable, "-c", SCRIPT, here, how], capture_output=True, text=True, env=env, timeout=300)


def test_every_weight_lies_where_natural_x_has_its_column():
    done = run("whole")
    assert done.stdout.count("right") == 5, done.stdout + done.stderr[-3000:]


def test_a_wrong_exchange_is_seen():
    done = run("broken")
    assert "values" in done.stderr, done.stdout + done.stderr[-3000:]
    assert "right" not in done.stdout
