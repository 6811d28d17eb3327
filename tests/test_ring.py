"""The ring of slots between the producer and the multiplying warps of ``ws_m`` and ``ws_fp8``, run from their TTGIR (``ring_model``)."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from ring_model import Fault, simulate

pytestmark = pytest.mark.kernel

#: name -> (BT, R, U, SK, XS, NW); one and two slots a round, one and two warp groups
ROWS = {
    "one slot a round": (128, 2, 2, 2, 6, 8),
    "two slots a round": (64, 1, 4, 2, 6, 4),
    "a slot a step": (256, 1, 2, 1, 6, 8),
    "fp8": (256, 1, 2, 2, 3, 8),
}
SCRIPT = """
import json, sys, torch
from triton.backends.compiler import GPUTarget
from fp4.gpu.kernels import dense, dense_fp8, launch
launch.compile_only(GPUTarget("cuda", 90, 32))
build, made = launch.build, []
launch.build = lambda *a, **k: made.append(build(*a, **k)) or made[-1]
none, out = torch.zeros(4, dtype=torch.int32), {}
about = {"low": 116, "high": 123, "any": False, "fp16": True}
for name, (bt, r, u, sk, xs, nw) in json.loads(sys.argv[1]).items():
    if name == "fp8":
        d = dense_fp8.Dense8(none, none, torch.full((1000,), 120, dtype=torch.uint8), None, 1000, 1056, True)
        d._plan(dense_fp8.Specialised(bt, r, sk, xs, nw), torch.bfloat16, torch.bfloat16, None)
    else:
        d = dense.Dense(none, none, None, 1000, 1056, 16, about, "sm90")
        row = dict(kernel="ws", BT=bt, R=r, U=u, SK=sk, XS=xs, NW=nw, CUT=1, PER=1)
        d._plan(300, False, torch.bfloat16, None, row)
    out[name] = next(k.compiled.asm["ttgir"] for k in reversed(made) if k.compiled.metadata.name in ("ws_m", "ws_fp8"))
json.dump(out, open(sys.argv[2], "w"))
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    import json

    path = tmp_path_factory.mktemp("ring") / "ttgir.json"
    env = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", SCRIPT, json.dumps(ROWS), str(path)], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(path.read_text())


def run(name, ttgir, m, n, kt, blocks, whole=False, seed=0):
    """All blocks of a product of m rows of x, n rows of W and kt tiles of 64 columns; whole: runs of whole tiles."""
    bt, r, u, _, _, nw = ROWS[name]
    columns, tiles = (128, 2 * u) if name == "fp8" else (64, u)
    nk, tiles_m, tiles_n = -(-kt // tiles), -(-m // bt), -(-n // (r * nw * 16))
    unit = nk if whole or name == "fp8" else 1
    units = nk * tiles_m * tiles_n // unit
    blocks = min(blocks, units)
    for pid in range(blocks):
        first, last = ((c * (units // blocks) + min(c, units % blocks)) * unit for c in (pid, pid + 1))
        boxes = [(w // nk % tiles_m * bt, (w % nk * u + j) * columns) for w in range(first, last) for j in range(u)]
        sizes = {"M": m, "N": n, "KT": kt, "oc": 0, "unit": unit, "pid": pid, "blocks": blocks}
        simulate(ttgir, sizes, boxes, nw // 4, seed + pid)


@pytest.mark.parametrize("name", ROWS)
def test_every_wait_ends_and_every_mma_reads_its_box(name, kernels):
    for i, (m, n, kt, blocks) in enumerate(((300, 700, 20, 5), (17, 300, 18, 4), (600, 512, 16, 7), (1, 16, 1, 3))):
        run(name, kernels[name], m, n, kt, blocks, seed=i)
        run(name, kernels[name], m, n, kt, blocks, whole=True, seed=i + 50)


def spoil(ttgir, what):
    """The kernel with a fault in its protocol."""
    slot = re.search(r"memdesc_index %full\[(%slot\w*)\].*\n\s+ttng\.wait_barrier", ttgir)[1]
    release = r"(memdesc_index %empty\[)%\w+(\][^\n]*\n\s+ttng\.async_copy_mbarrier_arrive)"
    if what == "releases the same slot in every round":  # what Triton made of a variable that remembered the last slot
        return re.sub(release, r"\g<1>%c0_i32\2", ttgir, count=1)
    if what == "releases the slot being read":
        return re.sub(release, rf"\g<1>{slot}\2", ttgir, count=1)
    if what == "never releases":
        return re.sub(r"ttng\.async_copy_mbarrier_arrive", "none.at_all", ttgir)
    if what == "does not wait for copies":
        return re.sub(r"ttng\.wait_barrier (%\w+), %phase", r"none.at_all \1, %phase", ttgir, count=1)
    return ttgir.replace("pendings = 1", "pendings = 2")  # what: "waits for the MMA before the last"


FAULTS = {
    "releases the same slot in every round": "nobody can go on|more arrivals",
    "releases the slot being read": "overwrites|reads box|nobody can go on|more arrivals",
    "never releases": "nobody can go on",
    "does not wait for copies": "reads box",
    "waits for the MMA before the last": "overwrites",
}


@pytest.mark.parametrize("what", FAULTS)
def test_the_model_finds_faults(what, kernels):
    name = "one slot a round"
    broken = spoil(kernels[name], what)
    assert broken != kernels[name]

    def often():
        for seed in range(20):
            run(name, broken, 600, 512, 40, 3, seed=seed)

    with pytest.raises(Fault, match=FAULTS[what]):
        often()
