"""Which kernel a dense product takes: every row fits its shape, work is shared sensibly, and warmup reaches what later calls need."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fp4.gpu.kernels import dense, dense_fp8, launch

SHAPES = [(8192, 8192), (28672, 8192), (2880, 2880), (1000, 1056), (16, 16), (48, 64), (20000, 96), (4096, 14336), (16384, 65536)]
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
@pytest.mark.parametrize(("n", "k"), SHAPES)
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
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_rows_fit_their_shape(n, k, block):
    for rows in ("sm90", "default", "plain"):
        d = bound(n, k, block)
        d._rows = dense.table()[rows]
        for m in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 1024, 1025, 100000):
            row = d.choose(m)
            assert row["m_max"] is None or m <= row["m_max"]
            assert n >= row["n_min"]
            assert row.get("block", block) == block
            if row["kernel"] == "small":
                assert -(-d.kt // (row["WK"] * row["U"])) <= 40
                assert m <= 16


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
