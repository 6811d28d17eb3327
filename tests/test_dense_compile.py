"""The dense kernels compile for every target, without a GPU and without spilling where it counts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.kernel

SCRIPT = """
import sys
from triton.backends.compiler import GPUTarget
from fp4.gpu.kernels import launch, plain
arch = int(sys.argv[1])
target = GPUTarget("cuda", arch, 32)
i = lambda names: dict.fromkeys(names.split(), "i32")
common = dict(KIND=16, ANY=False, HALF=False, HAS_BIAS=True)
sizes = i("M N K NT KT KB stride_xm oc")
sig = dict(x_ptr="*bf16", w_ptr="*i32", s_ptr="*i32", alpha_ptr="*fp32", bias_ptr="*bf16", y_ptr="*bf16")
more = dict(num_stages=2, aligned=("K", "stride_xm"), target=target)
launch.build(plain.dense_plain, sig | sizes, common | dict(BM=16, R=4, U=4), num_warps=4, **more)
half = common | dict(KIND=32, ANY=True, HALF=True, BM=64, R=4, U=4)
launch.build(plain.dense_plain, sig | dict(x_ptr="*fp16", y_ptr="*fp32") | sizes, half, num_warps=8, **more)
launch.build(plain.dequantize_tiles, dict(w_ptr="*i32", s_ptr="*i32", o_ptr="*bf16") | i("row0 N K NT KT KB oc"),
             dict(KIND=16, ANY=False, HALF=False, R=4, U=4), num_warps=4, target=target)
assert launch.gluon_reason() is None, launch.gluon_reason()
from fp4.gpu.kernels.small_m import small_m
more = dict(part_ptr="*fp32", count_ptr="*i32")
for kind, half, mt, mr, xs in ((16, False, 8, 1, 4), (32, True, 16, 16, 0)):
    k = launch.build(small_m, sig | dict(x_ptr="*i32") | more | i("M N oc"), dict(K=1056, KIND=kind, ANY=False, HALF=half, HAS_BIAS=True,
        EVEN_N=False, WK=4, WN=1, R=1, U=4, MT=mt, MR=mr, SPLIT=1, D=1, XS=min(xs, 2)), num_warps=4, target=target)
    assert k.shared <= 99 * 1024
if arch == 90:
    from fp4.gpu.kernels.wide_m import permute_x, wide_m
    for kind, split in ((16, 1), (32, 2)):
        launch.build(wide_m, sig | more | i("M N KT oc"), dict(KIND=kind, ANY=False, HALF=False, HAS_BIAS=True, EVEN=False, BT=64, R=1, U=4,
            XS=6, GM=8, SPLIT=split, NW=4), num_warps=4, aligned=("N",), target=target)
    order = dict(x_ptr="*i32", o_ptr="*i32", count_ptr="*i32", words="i32", tiles="i32")
    launch.build(permute_x, order, dict(B=32, COUNTS=256), num_warps=4, target=target)
print("compiled", arch)
"""


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_compiles_for(arch):
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(arch)], capture_output=True, text=True, env=env, timeout=300)
    assert f"compiled {arch}" in done.stdout, done.stderr[-2000:]
