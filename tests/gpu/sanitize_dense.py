"""One small call of every dense kernel, for compute-sanitizer:

compute-sanitizer --tool memcheck python tests/gpu/sanitize_dense.py
compute-sanitizer --tool racecheck python tests/gpu/sanitize_dense.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from test_dense import ROUTES, forced, weight

from fp4.gpu.kernels.dense_fp8 import Dense8
from fp4.gpu.kernels.plain_fp8 import row_base
from fp4.layouts import layouts

for row in ROUTES:
    for block, (n, k), m in ((16, (48, 1040), 3), (32, (80, 544), 16)):
        codes, scale, second, _ = weight(n, k, block)
        forced(row, codes, scale, second, block)(torch.randn(m, k, device="cuda", dtype=torch.bfloat16))
        torch.cuda.synchronize()
codes, scale, _, _ = weight(80, 544, 32, scales=(115, 122))
for wide in (True, False) if torch.cuda.get_device_capability() == (9, 0) else (False,):
    d = Dense8(layouts["frag_w"].apply(codes), layouts["frag_sf32"].apply(scale), row_base(scale), None, 80, 544, wide)
    d(torch.randn(17, 544, device="cuda", dtype=torch.bfloat16))
    torch.cuda.synchronize()
print("every dense kernel ran")
