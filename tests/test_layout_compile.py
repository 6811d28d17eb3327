"""The permute kernel compiled for real targets without a GPU: it builds, and both sides use 128-bit accesses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

_CODE = """
import json, re, sys
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from fp4.gpu.kernels import permute
from fp4.layouts import get

TYPES = {torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64"}
out = []
for name, shape, inverse, arch in json.loads(sys.argv[1]):
    c = permute.arguments(get(name), tuple(shape), 16, inverse)
    kernel = permute._permute_kernel
    numbers = ["R", "C", "RO", "CO", "n_row", "n_col", "stored"]
    signature = {"plain": TYPES[c.views[0]], "storage": TYPES[c.views[1]]}
    signature |= {n: "i64" if v >= 2**31 else "i32" for n, v in zip(numbers, c.numbers)}
    signature |= dict.fromkeys(c.constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in (0, 1)}
    made = triton.compile(
        ASTSource(kernel, signature, c.constants, aligned), target=GPUTarget("cuda", arch, 32), options={"num_warps": permute.WARPS}
    )
    ptx = made.asm["ptx"]
    access = {side: re.findall(rf"{side}\\.global[a-zA-Z0-9_.:]*", ptx) for side in ("ld", "st")}
    out.append([name, inverse, arch, {k: sorted(set(v)) for k, v in access.items()}, ptx.count("ld.local") + ptx.count("st.local")])
print(json.dumps(out))
"""

#: one layout of each kind: items of 4 and 8 bytes, single bytes, a word table, nibbles, nibbles with a word table
KINDS = ["sf_128x4", "aiter_w", "cdna4_sf", "hopper_value_v3", "marlin_w", "frag_w"]


def compiled(cases: list[tuple[str, tuple[int, ...], bool, int]]) -> list[list]:  # type: ignore[type-arg]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _CODE, json.dumps(cases)], capture_output=True, text=True, timeout=300, check=False, env=env
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_both_sides_are_128_bit_on_hopper() -> None:
    """Row lengths of 16 bytes: every global access moves 16 bytes a thread, and nothing spills."""
    for name, inverse, _, access, local in compiled([(n, (2, 4096, 2048), i, 90) for n in KINDS for i in (False, True)]):
        for side in ("ld", "st"):
            narrow = [a for a in access[side] if not a.endswith((".v4.b32", ".v2.b64"))]
            assert access[side], f"{name} {side}: no global access found"
            assert not narrow, f"{name} inverse={inverse}: {narrow}"
        assert local == 0


def test_ragged_rows_compile_to_narrower_accesses() -> None:
    """90 scale columns (2880 / 32): rows are 2-byte aligned, and the kernel says so instead of failing at run time."""
    ((_, _, _, access, _),) = compiled([("sf_128x4", (5760, 90), False, 90)])
    assert all(a.endswith(".b16") for a in access["ld"])


def test_other_targets_compile() -> None:
    cases = [("sf_128x4", (4096, 2048), False, 80), ("hopper_value_v3", (4096, 2048), True, 100), ("marlin_w", (4096, 2048), False, 120)]
    cases.append(("sf_128x4", (2**22, 2**12), True, 90))  # 64-bit indices
    assert [row[:3] for row in compiled(cases)] == [[n, i, arch] for n, _, i, arch in cases]
