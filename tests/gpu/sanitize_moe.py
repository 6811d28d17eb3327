"""One small call of every grouped kernel, for compute-sanitizer:

compute-sanitizer --tool memcheck python tests/gpu/sanitize_moe.py
compute-sanitizer --tool racecheck python tests/gpu/sanitize_moe.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from test_grouped import Layer, plans

import fp4
from fp4.formats import NVFP4
from fp4.gpu.kernels import grouped_run
from fp4.gpu.kernels.act_quantize import act_and_quantize
from fp4.ref.activation import SiLU, SwiGLU

layers = Layer(e=3, h=96, i=160), Layer(NVFP4, e=3, h=208, i=80, act=SiLU(), order="up_gate", bias=False, first=1, total=5)
for plan in plans():
    for layer in layers:
        x, ids, p = layer.inputs(9, 2)
        grouped_run.run(x, layer.g, ids, p, plan=plan)
        torch.cuda.synchronize()
h = torch.randn(5, 320, device="cuda", dtype=torch.bfloat16)
for fmt, second in (("nvfp4", torch.tensor(0.01, device="cuda")), ("mxfp8", None)):
    act_and_quantize(h, SwiGLU(), "interleaved", fmt, fp4.recipes["default"], second)
torch.cuda.synchronize()
print("every grouped kernel ran")
