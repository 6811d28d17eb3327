"""The ring of slots between the producer and the multiplying warps of ``ws_m``, ``ws_tiles`` and ``ws_fp8``, run from their TTGIR
(``ring_model``), and the buffer through which ``ws_tiles`` lets tiles of the output out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter

import pytest
from ring_model import Fault, simulate

from fp4.gpu.kernels.dense import table

pytestmark = pytest.mark.kernel

#: name -> (kernel, BT, R, U, SK, XS, NW) of what no table picks: one slot a round; of tiles, with GM and HELP in place of U and SK,
#: NAT behind, as with ws_m;
#: of e4m3 (ws8), with CUT, GM and TS behind
EXTRA = {
    "e4m3, cut": ("ws8", 64, 2, 2, 2, 2, 4, 1, 2, 0),
    "e4m3, y by TMA": ("ws8", 256, 1, 2, 1, 4, 8, 0, 2, 1),
    "one slot a round": ("ws", 128, 2, 2, 2, 6, 8),
    "x in natural order": ("ws", 256, 1, 4, 1, 6, 8, 1),
    "x in natural order, two tiles a slot": ("ws", 128, 1, 4, 2, 3, 4, 1),
    "tiles": ("tiles", 256, 1, 2, 0, 5, 8),
    "tiles with helpers": ("tiles", 256, 1, 2, 1, 5, 8),
    "tiles, half with helpers": ("tiles", 256, 1, 2, 2, 5, 8),
}


def table_rows():
    """Each ring that the tables can pick, and the shortest ones, those of float32 outputs."""
    rows = dict(EXTRA)
    for part, fp8 in (("sm90", False), ("sm90 w4a8", True)):
        for r in table()[part]:
            if r["kernel"] == "ws":
                one = ("ws8" if fp8 else "ws", r["BT"], r["R"], r.get("U", 2), r["SK"], r["XS"], r["NW"])
                one += (int(r.get("CUT", 0)), r.get("GM", 8), int(r.get("TS", 0))) if fp8 else (int(r.get("NAT", 0)),)
                rows["-".join(map(str, one))] = one
            if r["kernel"] == "tiles":
                one = ("tiles", r["BT"], r["R"], r["GM"], r["HELP"], r["XS"], r["NW"], r.get("NAT", 0))
                rows["-".join(map(str, one))] = one
    for kernel in ("ws", "ws8"):  # the ring of the most bytes
        name = max((n for n in rows if rows[n][0] == kernel), key=lambda n: rows[n][1] * rows[n][4] * rows[n][5])
        rows[name + "-float32"] = rows[name]
    return rows


ROWS = table_rows()
SCRIPT = """
import json, sys, torch
from triton.backends.compiler import GPUTarget
from fp4.gpu.kernels import dense, dense_fp8, dense_tiles, launch
launch.compile_only(GPUTarget("cuda", 90, 32))
made = []
for name in ("build", "build_ring"):
    def keep(*a, make=getattr(launch, name), **k):
        made.append((make(*a, **k), a[2]))
        return made[-1][0]
    setattr(launch, name, keep)
none, out = torch.zeros(4, dtype=torch.int32), {}
about = {"low": 116, "high": 123, "any": False, "fp16": True}
for name, (kernel, bt, r, u, sk, xs, nw, *way) in json.loads(sys.argv[1]).items():
    to = torch.float32 if "float32" in name else torch.bfloat16
    if kernel == "ws8":
        d = dense_fp8.Dense8(none, none, torch.full((1000,), 120, dtype=torch.uint8), None, 1000, 1056, True)
        d._plan(dense_fp8.Specialised(bt, r, sk, xs, nw, CUT=way[0], GM=way[1], TS=bool(way[2])), torch.bfloat16, to, None)
    elif kernel == "tiles":
        # rows of x enough for more tiles than a group, and with help a few multiprocessors without a tile
        d = dense.Dense(none, none, None, 1000, 1056, 16, about, "sm90")
        launch.processors = lambda device: 132 if sk else 1
        dense_tiles._RATE = 1 << 30
        d._plan(4000, False, to, None, dict(kernel="tiles", BT=bt, R=r, GM=u, HELP=sk, XS=xs, NW=nw, PDL=1, NAT=way[0] if way else 0))
    else:
        d = dense.Dense(none, none, None, 1000, 1056, 16, about, "sm90")
        row = dict(kernel="ws", BT=bt, R=r, U=u, SK=sk, XS=xs, NW=nw, CUT=1, PER=1, NAT=way[0] if way else 0)
        d._plan(300, False, to, None, row)
    k, constants = next(m for m in reversed(made) if m[0].compiled.metadata.name in ("ws_m", "ws_tiles", "ws_fp8"))
    assert kernel != "tiles" or constants["HELP"] == bool(sk), name
    assert k.shared <= launch.SHARED - launch.BLOCK_SHARED, (name, k.shared)
    out[name] = k.compiled.asm["ttgir"], constants["XS"]
json.dump(out, open(sys.argv[2], "w"))
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """name -> (TTGIR, slots of the ring)."""
    path = tmp_path_factory.mktemp("ring") / "ttgir.json"
    env = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", SCRIPT, json.dumps(ROWS), str(path)], capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(path.read_text())


def test_a_wider_output_gets_a_shorter_ring(kernels):
    """float32 rows go to their order through shared memory that the ring of 16-bit outputs has."""
    for name, row in ROWS.items():
        assert (kernels[name][1] < row[5]) if "float32" in name else (kernels[name][1] == row[5]), name


def run(name, ttgir, m, n, kt, blocks, whole=False, seed=0):
    """All blocks of a product of m rows of x, n rows of W and kt tiles of 64 columns; whole: runs of whole tiles."""
    kernel, bt, r, u, _, _, nw, *way = ROWS[name]
    way = way if kernel == "ws8" else []
    columns, tiles = (128, 2 * u) if kernel == "ws8" else (64, u)
    nk, tiles_m, tiles_n = -(-kt // tiles), -(-m // bt), -(-n // (r * nw * 16))
    unit = nk if whole or (way and not way[0]) else 1
    units = nk * tiles_m * tiles_n // unit
    blocks, leave = min(blocks, units), []
    for pid in range(blocks):
        if kernel == "ws8" and unit == nk:  # one tile in ``blocks``
            steps = [(tile, k) for tile in range(pid, units, blocks) for k in range(nk)]
        else:
            first, last = ((c * (units // blocks) + min(c, units % blocks)) * unit for c in (pid, pid + 1))
            steps = [divmod(w, nk) for w in range(first, last)]
        at = {tile: place(tile, tiles_m, tiles_n, way[1]) if way else (tile % tiles_m, tile // tiles_m) for tile, _ in steps}
        boxes = [(at[tile][0] * bt, (k * u + j) * columns) for tile, k in steps for j in range(u)]
        if way and way[2]:
            leave = [(pm * bt, pn * r * nw * 16) for pm, pn in at.values()]
        sizes = {"M": m, "N": n, "KT": kt, "oc": 0, "unit": unit, "pid": pid, "blocks": blocks}
        simulate(ttgir, sizes, boxes, nw // 4, seed + pid, leave)


def place(i, tiles_m, tiles_n, group):
    """Tile i of the order of ``ws_tiles``: groups of ``group`` tiles of rows of x, in a group all of them before the next tile of W."""
    order = [
        (pm, pn)
        for first in range(0, tiles_m, group)
        for pn in range(tiles_n)
        for pm in range(first, min(first + group, tiles_m))
    ]  # fmt: skip
    return order[i]


def run_tiles(name, ttgir, m, n, kt, blocks, helpers, seed=0):
    """All blocks of a product by ``ws_tiles``: the helpers multiply nothing, the others together have each tile once."""
    _, bt, r, group, _, _, nw, *_ = ROWS[name]
    bn, nk, tiles_m = r * nw * 16, -(-kt // 4), -(-m // bt)
    tiles_n = -(-n // bn)
    tiles, seen, chunks = tiles_m * tiles_n, [], -(-kt // 32)
    blocks, counted, awaited = min(blocks, tiles), Counter(), set()
    groups = -(-tiles_m // group)
    front, ready = (group, 1) if ROWS[name][4] == 1 else ((groups - groups // 2) * group, chunks)
    for pid in range(helpers + blocks):
        mine = [place(i, tiles_m, tiles_n, group) for i in range(pid - helpers, tiles, blocks)] if pid >= helpers else []
        seen += mine
        boxes = [(pm * bt, k * 64) for pm, _ in mine for k in range(nk * 4)]
        sizes = {
            "M": m, "N": n, "KT": kt, "words": kt * 32, "oc": 0, "pid": pid, "blocks": helpers + blocks, "helpers": helpers, "front": front,
            "ready": ready, "flag_ptr": 0,
        }  # fmt: skip
        machine = simulate(ttgir, sizes, boxes, nw // 4, seed + pid, [(pm * bt, pn * bn) for pm, pn in mine])
        counted.update(machine.counted)
        awaited.update(machine.awaited)
    assert sorted(seen) == [(pm, pn) for pm in range(tiles_m) for pn in range(tiles_n)]
    if helpers:  # each chunk of x that permute_x has not done is waited for, and is brought into order whole
        late = {pm * chunks + c for pm in range(tiles_m) for c in range(chunks) if pm >= front or c >= ready}
        assert {at for at, least in awaited if least > 0} == late == {at for at in counted if at < tiles_m * chunks}
        assert {least for _, least in awaited} <= {0, bt // 16}
        assert all(counted[at] == bt // 16 for at in late)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row[0] == "tiles"])
def test_tiles_of_the_output_leave_whole(name, kernels):
    for i, (m, n, kt, blocks) in enumerate(((700, 700, 10, 5), (17, 300, 35, 4), (1500, 256, 4, 3), (1, 16, 1, 3))):
        run_tiles(name, kernels[name][0], m, n, kt, blocks, 2 if ROWS[name][4] else 0, seed=i)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row[0] != "tiles"])
def test_every_wait_ends_and_every_mma_reads_its_box(name, kernels):
    for i, (m, n, kt, blocks) in enumerate(((300, 700, 20, 5), (17, 300, 18, 4), (600, 512, 16, 7), (1, 16, 1, 3))):
        run(name, kernels[name][0], m, n, kt, blocks, seed=i)
        if ROWS[name][0] == "ws" or ROWS[name][7:8] == (1,):
            run(name, kernels[name][0], m, n, kt, blocks, whole=True, seed=i + 50)


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
    if what == "writes what is still leaving":
        return ttgir.replace("ttng.async_tma_store_wait", "none.at_all")
    if what == "lets out what is half written":
        store, copy = ttgir.index("ttg.local_store"), ttgir.index("ttng.async_tma_copy_local_to_global")
        return ttgir[:store] + re.sub(r"(gpu|ttg)\.barrier", "none.at_all", ttgir[store:copy]) + ttgir[copy:]
    if what == "does not wait for copies":
        return re.sub(r"ttng\.wait_barrier (%\w+), %phase", r"none.at_all \1, %phase", ttgir, count=1)
    return ttgir.replace("pendings = 1", "pendings = 2")  # what: "waits for the MMA before the last"


FAULTS = {
    "releases the same slot in every round": "nobody can go on|more arrivals",
    "releases the slot being read": "overwrites|reads box|nobody can go on|more arrivals",
    "never releases": "nobody can go on",
    "does not wait for copies": "reads box",
    "waits for the MMA before the last": "overwrites",
    "writes what is still leaving": "before it has left",
    "lets out what is half written": "before all have written",
}


@pytest.mark.parametrize("what", FAULTS)
def test_the_model_finds_faults(what, kernels):
    name = "tiles" if "leaving" in what or "half" in what else "one slot a round"
    broken = spoil(kernels[name][0], what)
    assert broken != kernels[name][0]

    def often():
        for seed in range(20):
            if name == "tiles":
                run_tiles(name, broken, 600, 512, 8, 3, 0, seed=seed)
            else:
                run(name, broken, 600, 512, 40, 3, seed=seed)

    with pytest.raises(Fault, match=FAULTS[what]):
        often()
