"""One small call of every grouped kernel that ``choose`` can pick, for compute-sanitizer. Compile first, without a device:

python tests/gpu/sanitize_moe.py compile 0/4 [wide]      (and 1/4, 2/4, 3/4 beside it)
compute-sanitizer --tool memcheck python tests/gpu/sanitize_moe.py run 0/4 [wide]
compute-sanitizer --tool racecheck python tests/gpu/sanitize_moe.py run 0/4 [wide]

Weights and inputs are made on the CPU, so that under the tool nothing runs on the device but these kernels and copies; the results are
compared with the float64 reference on the CPU. 1/4 takes every fourth pair of a plan and a layer, from the second on; ``wide`` only plans
of that kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

import fp4
from fp4.formats import MXFP4, NVFP4
from fp4.gpu.kernels import grouped, grouped_plan, grouped_run
from fp4.gpu.kernels.act_quantize import act_and_quantize
from fp4.ref.activation import SiLU, SwiGLU
from fp4.ref.moe import moe
from fp4.tensor import QuantizedTensor


def weights(fmt, e, n, k, second):
    codes = torch.randint(0, 256, (e, n, k // 2), dtype=torch.uint8)
    scale = torch.randint(*((0, 0x5F) if fmt is NVFP4 else (114, 124)), (e, n, k // fmt.block), dtype=torch.uint8)
    return QuantizedTensor(fmt, codes, scale, second)


def layer(fmt, e, h, i, act, order, bias, first=0):
    second = torch.rand(e) * 0.02 + 0.001 if fmt is NVFP4 else None
    biases = {"bias13": torch.randn(e, 2 * i), "bias2": torch.randn(e, h)} if bias else {}
    w13, w2 = weights(fmt, e, 2 * i, h, second), weights(fmt, e, h, i, second)
    g = grouped.prepare(w13, w2, gate_up=order, activation=act, first=first, **biases)
    about = {"gate_up": order, "activation": act, "local_experts": range(first, first + e), **biases}
    expect = functools.partial(moe, w13=w13, w2=w2, acc=torch.float64, out_dtype=torch.float64, **about)
    if COMPILE:
        return g, expect
    g.windows = {d: w if isinstance(w, Exception) else tuple((a.cuda(), *rest) for a, *rest in w) for d, w in g.windows.items()}
    found = {f.name: getattr(g, f.name) for f in dataclasses.fields(g)}
    return dataclasses.replace(g, **{n: t.cuda() for n, t in found.items() if isinstance(t, torch.Tensor)}), expect


COMPILE = sys.argv[1] == "compile"
part, parts = map(int, sys.argv[2].split("/"))
kind = sys.argv[3] if len(sys.argv) > 3 else ""
torch.manual_seed(1)
capability = (9, 0) if COMPILE else torch.cuda.get_device_capability()
made = (
    (*layer(MXFP4, 3, 96, 160, SwiGLU(), "interleaved", True), 3),
    (*layer(NVFP4, 3, 208, 80, SiLU(), "up_gate", False, first=1), 5),
)
pairs = [(p, *m) for _, p in reversed(grouped_plan.plans(capability)) if kind in p.kernel for m in made]
for plan, g, expect, total in pairs[part::parts]:
    if COMPILE:
        from triton.backends.compiler import GPUTarget

        grouped_run.Chain(g, 40, 2, torch.bfloat16, torch.int32, torch.float32, torch.bfloat16, plan, GPUTarget("cuda", 90, 32))
        continue
    x = torch.randn(40, g.hidden).bfloat16()
    ids = torch.rand(40, total).argsort(1)[:, :2].int().contiguous()
    ids[:30, 0] = 2  # an expert of more rows than the others
    p = torch.rand(40, 2)
    y, want = grouped_run.run(x.cuda(), g, ids.cuda(), p.cuda(), plan=plan).cpu().double(), expect(x, topk_ids=ids, topk_weights=p)
    error = ((y - want).norm() / want.norm()).item()
    if not error < 4e-3:
        raise SystemExit(f"{plan}: relative error {error:.2e}")
if part == 0 and not COMPILE and not kind:
    h = torch.randn(5, 320).bfloat16().cuda()
    for fmt, second in (("nvfp4", torch.tensor(0.01).cuda()), ("mxfp8", None)):
        act_and_quantize(h, SwiGLU(), "interleaved", fmt, fp4.recipes["default"], second)
    torch.cuda.synchronize()
print(f"{len(pairs[part::parts])} of {len(pairs)} pairs of a plan and a layer ran, part {part} of {parts}")
