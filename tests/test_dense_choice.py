"""Which kernel a dense product takes: every row fits its shape, work is shared sensibly, and warmup reaches what later calls need."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fp4.gpu.kernels import dense, dense_fp8, dense_plans, launch, tune

SHAPES = [(8192, 8192), (28672, 8192), (2880, 2880), (1000, 1056), (16, 16), (48, 64), (20000, 96), (4096, 14336), (16384, 65536)]
#: of real models: narrow and wide, short and long k, where tiles of 256 rows of x fill the GPU and where they do not
MODELS = [(1280, 8192), (2560, 8192), (5120, 2880), (5120, 8192), (7168, 2048), (8192, 1024), (10240, 8192), (6144, 4096)]
NONE = torch.zeros(4, dtype=torch.int32)


@pytest.fixture
def built(monkeypatch):
    """Kernels that a plan asks for, as (name, constants, options); nothing is compiled."""
    made = []

    def keep(fn, signature, constants, **how):
        made.append((fn.__name__, tuple(constants.items()), how.get("pdl", False)))
        return launch.Kernel(type("Compiled", (), {"metadata": type("Metadata", (), {"shared": 0})})())

    monkeypatch.setattr(launch, "build", keep)
    return made


def bound(n, k, block):
    return dense.Dense(NONE, NONE, None, n, k, block, {"low": 116, "high": 123, "any": False, "fp16": True}, "sm90")


@pytest.mark.skipif(launch.gluon_reason() is not None, reason="the Hopper kernels need Gluon")
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize(("n", "k"), SHAPES + MODELS)
def test_warmup_reaches_every_kernel(built, n, k, block):
    """Also where m decides how tiles are cut: a graph captured after warmup compiles nothing."""
    d = bound(n, k, block)
    for m in d._sizes(4100):
        d._plan(m, False, torch.bfloat16, None)
    warm = set(built)
    for m in [*range(1, 300), *range(300, 4101, 37)]:
        built.clear()
        d._plan(m, False, torch.bfloat16, None)
        assert set(built) <= warm, (m, d.choose(m), set(built) - warm)


class Launch:
    """In place of a kernel: what every pointer of its arguments must be, and that what permute_x writes lies in a workspace."""

    shared = 0

    def __init__(self, fn, signature, spaces):
        self.fn, self.signature, self.spaces = fn, signature, spaces

    def box(self, address, rows, columns, which=0):
        assert address % 16 == 0
        return (address,)

    def __call__(self, gx, gy, stream, *args):
        got = dict(zip(self.fn.arg_names, args, strict=True))
        for name, kind in self.signature.items():
            assert not kind.startswith("*") or got[name] % 16 == 0, (self.fn.__name__, name)
        if self.fn.__name__ == "permute_x":
            last = min(gy * got["B"], got["tiles"])  # tiles of the last row that the grid writes
            ends = [
                (got["o_ptr"], 128 * ((gx - 1) * got["tiles"] + last)),
                *([(got["count_ptr"], 4 * got["COUNTS"])] if got["COUNTS"] else []),
            ]
            for first, size in ends:
                assert any(s.data_ptr() <= first and first + size <= s.data_ptr() + s.nbytes for s in self.spaces), self.fn.__name__


@pytest.mark.skipif(launch.gluon_reason() is not None, reason="the Hopper kernels need Gluon")
@pytest.mark.parametrize(("n", "k"), [(16, 16), (48, 1040), (257, 96), (272, 1040), (1001, 64), (1256, 2880)])
def test_addresses(n, k, monkeypatch):
    """What the kernels are compiled for, pointers at multiples of 16 bytes, holds for parts of a workspace in every row's call."""
    spaces = []

    def allocated(make):
        def keep(*a, **kw):
            spaces.append(make(*a, **kw))
            return spaces[-1]

        return keep

    monkeypatch.setattr(launch, "build", lambda fn, signature, constants, **how: Launch(fn, signature, spaces))
    monkeypatch.setattr(launch, "build_ring", lambda fn, signature, constants, **how: Launch(fn, signature, spaces))
    monkeypatch.setattr(launch, "processors", lambda device: 132)
    monkeypatch.setattr(launch, "raw_stream", lambda index: 0)
    monkeypatch.setattr(dense_plans, "_empty", allocated(torch.empty_strided))
    monkeypatch.setattr(torch, "empty", allocated(torch.empty))
    rows = [r for r in dense.table()["sm90"] if r["kernel"] != "dequantize"]
    rows += [{**r, "SPLIT": 3} for r in rows if r["kernel"] == "wide"]
    for m in (1, 3, 16, 31, 300, 1100):
        x, y = torch.zeros(m, k, dtype=torch.bfloat16), torch.zeros(m, n, dtype=torch.bfloat16)
        for row in rows:
            if row["kernel"] != "small" or m <= row["m_max"]:
                d = bound(n, k, 16)
                for some in (row, {**row, "m_max": None}):
                    d._plan(m, False, torch.bfloat16, None, some)(x, None, y, m)
                    spaces.clear()


@pytest.mark.skipif(launch.gluon_reason() is not None, reason="the Hopper kernels need Gluon")
@pytest.mark.parametrize("n", [1 << 23, (1 << 23) + 16, 1 << 26])
def test_offsets_inside_a_tile_fit_32_bits(n, monkeypatch):
    """ws_m and ws_fp8 add rows of x times n to a pointer as 32-bit numbers; for more rows of W there are kernels that do not."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    d = dense.Dense(NONE, NONE, None, n, 32, 32, {"low": 116, "high": 123, "any": False, "fp16": True})
    for m in (1, 17, 33, 64, 65, 128, 129, 256, 300, 1024, 5000):
        row = d.choose(m)
        assert row["kernel"] not in ("ws", "tiles") or (row["BT"] - 1) * n + 256 < 1 << 31
    assert (d.choose(300)["kernel"] == "ws") == (n == 1 << 23)
    if n < 1 << 24:
        eight = dense_fp8.Dense8(NONE, NONE, torch.zeros(n, dtype=torch.uint8), None, n, 32)
        assert all(not isinstance(r, dense_fp8.Specialised) or (r.BT - 1) * n + 256 < 1 << 31 for _, _, r in eight._table)
        assert eight.wide == (n == 1 << 23)


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize(("n", "k"), SHAPES + MODELS)
def test_rows_fit_their_shape(n, k, block):
    for rows in ("sm90", "default", "plain"):
        d = bound(n, k, block)
        d._rows = dense.table()[rows]
        for m in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 1024, 1025, 100000):
            row = d.choose(m)
            assert row["m_max"] is None or m <= row["m_max"]
            assert row["n_min"] <= n <= row.get("n_max", n)
            assert row.get("k_min", 0) <= k <= row.get("k_max", k)
            assert "busy" not in row or dense_plans.busy(d, row, m) >= row["busy"]
            assert row.get("block", block) == block
            if row["kernel"] == "small":
                assert -(-d.kt // (row["WK"] * row["U"])) <= 40
                assert m <= 16


#: (n, k, m, kernel and some of its constants) for a GPU of 132 multiprocessors
CLASSES = [
    # few rows of W: more warps share k
    (1280, 8192, 1, "small", {"WK": 8}),
    (8192, 8192, 1, "small", {"WK": 4}),
    (2048, 8192, 16, "small", {"WK": 8, "WN": 1}),
    (5120, 2880, 8, "small", {"WK": 4, "WN": 1}),
    (8192, 8192, 16, "small", {"WK": 4, "WN": 2}),
    (28672, 8192, 16, "small", {"WN": 1, "R": 2}),
    # k is split the more the fewer rows of W and the longer k
    (8192, 1024, 32, "wide", {"SPLIT": 1}),
    (8192, 8192, 32, "wide", {"SPLIT": 2}),
    (4096, 4096, 32, "wide", {"SPLIT": 4}),
    (2560, 8192, 32, "wide", {"SPLIT": 8}),
    (14336, 8192, 32, "wide", {"SPLIT": 4}),
    (1280, 8192, 64, "wide", {"SPLIT": 8}),
    (8192, 1024, 64, "wide", {"SPLIT": 1}),
    # equal parts of tiles where they fill the GPU, else runs of equal length or another tile
    (4096, 4096, 64, "ws", {"R": 1, "CUT": 2, "PER": 2}),
    (6144, 4096, 64, "ws", {"R": 1, "CUT": 2, "PER": 3}),
    (5120, 8192, 64, "ws", {"R": 1, "CUT": 2, "PER": 3}),
    (10240, 8192, 64, "ws", {"R": 1, "CUT": 2, "PER": 3}),
    (8192, 3584, 64, "ws", {"R": 1, "CUT": 2, "PER": 2}),
    (8192, 8192, 64, "ws", {"R": 2, "CUT": 2, "PER": 2}),
    (14336, 8192, 64, "ws", {"R": 2, "CUT": 2, "PER": 2}),
    (28672, 8192, 64, "ws", {"R": 2, "CUT": 1, "PER": 2}),
    (8192, 8192, 128, "ws", {"BT": 128, "CUT": 2}),
    (10240, 8192, 128, "ws", {"BT": 128, "CUT": 1}),
    (28672, 4096, 128, "ws", {"BT": 128, "CUT": 1}),
    (28672, 8192, 128, "wide", {"R": 2}),
    (4096, 4096, 256, "ws", {"BT": 128, "CUT": 2}),
    (4096, 14336, 256, "ws", {"BT": 256, "CUT": 2, "NAT": 1}),
    (1280, 8192, 256, "ws", {"BT": 128, "CUT": 1}),
    (5120, 8192, 256, "ws", {"BT": 256, "CUT": 1}),
    (8192, 8192, 256, "tiles", {"BT": 128}),
    (10240, 8192, 256, "ws", {"BT": 256, "CUT": 1}),
    (14336, 8192, 256, "tiles", {"BT": 256}),
    (4096, 4096, 512, "ws", {"BT": 128, "CUT": 2}),
    (2048, 8192, 512, "ws", {"NAT": 1, "CUT": 2}),
    (1280, 8192, 512, "ws", {"BT": 128, "CUT": 1}),
    (28672, 8192, 512, "ws", {"BT": 256, "CUT": 1}),
    (2560, 8192, 512, "ws", {"NAT": 1, "CUT": 1}),
    (10240, 8192, 512, "ws", {"BT": 256, "CUT": 1}),
    (4096, 4096, 1024, "tiles", {"NAT": 1}),
    (8192, 1024, 1024, "tiles", {"NAT": 1}),
    (2048, 8192, 1024, "ws", {"NAT": 1, "CUT": 2}),
    (5120, 8192, 1024, "ws", {"CUT": 1}),
    # neither fills the GPU and little is to be done: the library's product of a dequantised weight
    (1280, 8192, 1024, "dequantize", {}),
    (5120, 2880, 2048, "dequantize", {}),
    (6144, 4096, 2048, "tiles", {"NAT": 1}),
]


@pytest.mark.parametrize(("n", "k", "m", "kernel", "some"), CLASSES, ids=lambda v: "" if isinstance(v, dict) else str(v))
@pytest.mark.parametrize("block", [16, 32])
def test_classes_of_shapes(n, k, m, kernel, some, block):
    row = bound(n, k, block).choose(m)
    assert (row["kernel"], {c: row.get(c) for c in some}) == (kernel, some)


def test_tuned_rows_leave_those_of_other_shapes():
    """What ``fp4 bench --tune`` found takes the places of its own classes; the order and all rows with other conditions stay."""
    rows = dense.table()["sm90"]
    plain = [r for r in rows if not {"n_max", "k_min", "k_max", "busy"} & {*r}]
    assert tune.beside(rows, plain) == rows
    found = {"m_max": 64, "n_min": 0, "kernel": "dequantize"}
    changed = tune.beside(rows, [found, {**found, "m_max": 63}])
    assert [r for r in changed if r not in rows] == [found]
    assert [r for r in rows if r not in changed] == [r for r in plain if (r["m_max"], r["n_min"]) == (64, 0)]
    both = [{**found, "block": 16, "kernel": "wide"}, found]
    at = changed.index(found)
    assert tune.beside(rows, both)[at : at + 2] == both


def test_busy():
    """The share of blocks with work: whole waves of tiles, or of the equal parts into which tiles may be cut."""
    tiles = {"kernel": "tiles", "BT": 256, "R": 1, "NW": 8}
    even = {"kernel": "ws", "BT": 256, "R": 1, "NW": 8, "U": 4, "CUT": 2, "PER": 1}
    for n, k, m, row, want in (
        (8192, 8192, 512, tiles, 128 / 132),
        (10240, 8192, 512, tiles, 160 / 264),
        (28672, 8192, 256, tiles, 224 / 264),
        (2560, 8192, 512, tiles, 40 / 132),
        (2560, 8192, 512, even, 120 / 132),  # three parts each
        (1280, 8192, 512, even, 80 / 132),  # four each: no more sums than pay for a tile of 256 rows
        (1280, 8192, 512, {**even, "MOST": 6}, 120 / 132),
        (2560, 8192, 512, {**even, "CUT": 1}, 1),
        (2560, 8192, 512, {**even, "PER": 2}, 160 / 264),
    ):
        assert dense_plans.busy(bound(n, k, 16), row, m) == want


@pytest.mark.skipif(launch.gluon_reason() is not None, reason="the Hopper kernels need Gluon")
def test_shares():
    """No block is without work, cut tiles get as many blocks as fit and are worth it, uncut ones one each."""
    from fp4.gpu.kernels.dense_plans import share

    for tiles in (1, 2, 23, 64, 66, 67, 128, 131, 132, 133, 224, 264, 896):
        for steps in (1, 2, 3, 12, 64):
            for room in (132, 264, 114):
                for cut in (0, 1, 2):
                    for most in (0, 1, 2, 4, 16):
                        blocks, cuts = share(tiles, steps, room, cut, most)
                        assert 1 <= blocks <= min(room, tiles * steps if cuts else tiles)
                        assert not cuts or cut
                        if cuts and cut == 2:
                            assert blocks % tiles == 0
                            assert blocks // tiles <= most
    assert share(64, 32, 264, 2, 16) == (256, True)  # 8192 x 8192, m = 64: four parts a tile
    assert share(256, 64, 132, 2, 4) == (132, False)  # the same, m = 1024: two tiles a block
    assert share(224, 32, 264, 1, 16) == (264, True)  # 28672 x 8192, m = 64: all blocks busy to the end
    assert share(16, 4, 132, 2, 0) == (16, False)  # little to do: sums would take longer than the steps


def test_w4a8_table_serves_every_size():
    for n in (16, 1000, 16383, 16384, 1 << 20):
        for m in (1, 64, 65, 128, 129, 256, 257, 1024, 1025, 1 << 20):
            row = next(r for top, least, r in dense_fp8.hopper_table() if (top is None or m <= top) and n >= least)
            assert isinstance(row, dense_fp8.Row)
    for top, _, row in dense_fp8.hopper_table():
        assert not isinstance(row, dense_fp8.Few) or (top is not None and top <= row.MT and not (row.ONE and top > 1))
    none = torch.zeros(4, dtype=torch.int32)
    for k, few in ((8192, True), (28672, False)):  # 57 steps of k with the narrowest rows: too many to write one behind the other
        d = dense_fp8.Dense8(none, none, torch.zeros(16, dtype=torch.uint8), None, 16, k, True)
        narrow = dense_fp8.Few(16, 4, 2, 1, 2, 2, 4)
        assert d._fits(narrow) == few
        assert all(d._fits(d.choose(m)) for m in (1, 8, 16, 32, 33, 5000))


def test_a_ring_that_does_not_fit_is_shortened(monkeypatch):
    """Built again with fewer slots, at least two, and the caller's constants say how many."""
    built = []

    def build(fn, signature, constants, **how):
        built.append(constants["XS"])
        return launch.Kernel(type("Compiled", (), {"metadata": type("M", (), {"shared": constants["XS"] * 32768 + 65596})})())

    monkeypatch.setattr(launch, "build", build)
    constants = {"XS": 6}
    assert launch.build_ring(None, {}, constants, slot=32768, num_warps=8).shared <= 232448
    assert built == [6, 5]
    assert constants == {"XS": 5}
    for per, want in ((1, 5), (2, 2)):
        constants = {"XS": 5}
        launch.build_ring(None, {}, constants, slot=32768, per=per, num_warps=8)
        assert constants == {"XS": want}


def test_distinct_jobs():
    """One job a kernel: another number of rows of x or another k is another kernel of few rows, another even n is not."""
    build, target = launch.build, launch._target
    row = {"kernel": "small", "WK": 4, "WN": 1, "R": 1, "U": 2, "D": 2, "XS": 4}
    jobs = [(n, k, m, row, 16) for n in (1024, 2048) for k in (1024, 2048) for m in (8, 16)]
    assert tune.distinct(jobs) == (jobs[:4], 4)
    assert (launch.build, launch._target) == (build, target)
