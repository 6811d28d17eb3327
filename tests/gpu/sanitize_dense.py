"""One small call of every dense kernel, for compute-sanitizer; with arguments, one part of them or one kind (``ws``: warp-specialised):

compute-sanitizer --tool memcheck python tests/gpu/sanitize_dense.py [PART/PARTS [KIND]]
compute-sanitizer --tool racecheck python tests/gpu/sanitize_dense.py [PART/PARTS [KIND]]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from test_dense import ROUTES, ROUTES_W4A8, forced, weight

from fp4.gpu.kernels.dense_fp8 import Dense8, Few
from fp4.gpu.kernels.plain_fp8 import row_base
from fp4.layouts import layouts

part, parts = map(int, sys.argv[1].split("/")) if len(sys.argv) > 1 else (0, 1)
kind = sys.argv[2] if len(sys.argv) > 2 else ""
hopper = torch.cuda.get_device_capability() == (9, 0)


def small(n: int, k: int, block: int, scales: tuple[int, int] | None = None) -> tuple:
    """Made on the CPU: under the tool only the library's own kernels are to run."""
    codes, scale, second, _ = weight(n, k, block, scales=scales, device="cpu")
    return codes.cuda(), scale.cuda(), second if second is None else second.cuda()


FEW = ((16, 48, 1040, 1), (32, 64, 2048, 1), (16, 48, 1040, 3), (32, 80, 544, 16))
#: the last has enough rows of x for more than one group of tiles: rows with HELP start helpers
MANY = ((16, 48, 1040, 3), (32, 80, 544, 16), (16, 272, 1040, 300), (16, 272, 1040, 1100))
calls = [(row["kernel"], row, shape) for row in ROUTES for shape in (FEW if row["kernel"] == "small" else MANY)]
calls += [("small8" if isinstance(row, Few) else "ws8", row, None) for row in ROUTES_W4A8] + [("plain8", None, None)]
calls = [c for c in calls if kind in c[0] and (hopper or c[0] not in ("wide", "ws", "tiles", "small8", "ws8"))]
for name, row, shape in calls[part::parts]:
    if shape is not None:
        block, n, k, m = shape
        forced(row, *small(n, k, block), block)(torch.randn(m, k).bfloat16().cuda())
    else:
        codes, scale, _ = small(272, 544, 32, (115, 122))
        d = Dense8(layouts["frag_w8"].apply(codes), layouts["frag_sf32"].apply(scale), row_base(scale), None, 272, 544, row is not None)
        if row is not None:
            d._table = ((None, 0, row),)
        d(torch.randn((1 if row.ONE else row.MT) if isinstance(row, Few) else 300, 544).bfloat16().cuda())
    torch.cuda.synchronize()
    print(name, row, flush=True)
print(f"{len(calls[part::parts])} of {len(calls)} calls ran, part {part} of {parts}")
