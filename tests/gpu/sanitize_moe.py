"""One small call of every grouped kernel, for compute-sanitizer. Run it once without, so that the kernels are compiled, then

compute-sanitizer --tool memcheck python tests/gpu/sanitize_moe.py [part/parts]
compute-sanitizer --tool racecheck python tests/gpu/sanitize_moe.py [part/parts]

Weights and inputs are made on the CPU, so that under the tool nothing runs on the device but these kernels and copies. ``part/parts``
(0/6 .. 5/6) takes every sixth plan, for processes side by side.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from test_grouped import plans

import fp4
from fp4.formats import MXFP4, NVFP4
from fp4.gpu.kernels import grouped, grouped_run
from fp4.gpu.kernels.act_quantize import act_and_quantize
from fp4.ref.activation import SiLU, SwiGLU
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
    g.windows = {d: w if isinstance(w, Exception) else tuple((a.cuda(), *rest) for a, *rest in w) for d, w in g.windows.items()}
    found = {f.name: getattr(g, f.name) for f in dataclasses.fields(g)}
    return dataclasses.replace(g, **{n: t.cuda() for n, t in found.items() if isinstance(t, torch.Tensor)})


part, parts = map(int, (sys.argv[1] if len(sys.argv) > 1 else "0/1").split("/"))
torch.manual_seed(1)
made = (
    (layer(MXFP4, 3, 96, 160, SwiGLU(), "interleaved", True), 3),
    (layer(NVFP4, 3, 208, 80, SiLU(), "up_gate", False, first=1), 5),
)
mine = plans()[part::parts]
for plan in mine:
    for g, total in made:
        x = torch.randn(9, g.hidden).bfloat16().cuda()
        ids = torch.rand(9, total).argsort(1)[:, :2].int().contiguous().cuda()
        grouped_run.run(x, g, ids, torch.rand(9, 2).cuda(), plan=plan)
        torch.cuda.synchronize()
if part == 0:
    h = torch.randn(5, 320).bfloat16().cuda()
    for fmt, second in (("nvfp4", torch.tensor(0.01).cuda()), ("mxfp8", None)):
        act_and_quantize(h, SwiGLU(), "interleaved", fmt, fp4.recipes["default"], second)
    torch.cuda.synchronize()
print(f"{len(mine)} plans x 2 layers ran, part {part} of {parts}")
