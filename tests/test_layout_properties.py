"""What every layout must satisfy, for the whole catalogue and for random ones: bijection, inverse, offset, padding, shards, chains."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from layout_formulas import FORMULAS, shuffled

import fp4
from fp4 import layouts as catalogue
from fp4.errors import LayoutError
from fp4.layout import ByteRange, Chain, Layout, Reason, Segmented
from fp4.layout_doc import sample_shape
from fp4.testing import assert_same_bytes, strategies
from fp4.testing.goldens import counter_bytes

LAYOUTS = [layout for name in catalogue.names() for layout in catalogue.variants(name)]
IDS = [f"{layout.name}-{layout.multiple[0]}x{layout.multiple[1]}" for layout in LAYOUTS]
each = pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)


def published(layout: Layout, m: np.ndarray, k: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """The hand-written formula of a catalogue layout."""
    if layout.name == "blackwell_value_shuffled" and layout.tile[0] == 128:
        return shuffled(256, 128)(m, k, rows, cols)
    return FORMULAS[layout.name](m, k, rows, cols)


def by_scatter(layout: Layout, x: np.ndarray) -> np.ndarray:
    """apply in numpy, from ``offset`` and the word table alone: pad, scatter each unit to its place, permute bits."""
    g = layout.geometry(x.shape)
    lead, per_byte = math.prod(g.lead), layout.units_per_byte
    units = x.reshape(lead, *x.shape[-2:])
    if per_byte == 2:
        units = np.stack((units & 15, units >> 4), -1).reshape(lead, g.rows, g.cols)
    fill = layout.fill if per_byte == 1 else None
    full = np.full((lead, g.prows, g.pcols), 0 if fill is None else fill, dtype=np.uint8)
    if fill is None:
        full[..., 0::2], full[..., 1::2] = layout.fill & 15, layout.fill >> 4
    full[:, : g.rows, : g.cols] = units
    place = layout.offset((g.prows, g.pcols // per_byte), np.arange(g.prows)[:, None], np.arange(g.pcols))
    out = np.zeros((lead, g.prows * g.pcols), dtype=np.uint8)
    out[:, place.reshape(-1)] = full.reshape(lead, g.prows * g.pcols)
    if per_byte == 2:
        out = out[:, 0::2] | out[:, 1::2] << 4
    if layout.word is not None:
        bits = np.unpackbits(out.reshape(lead, out.shape[1] // 4, 4), axis=-1, bitorder="little")
        out = np.packbits(bits[..., list(layout.word)], axis=-1, bitorder="little").reshape(lead, out.shape[1])
    return out.reshape(*g.lead, out.shape[1])


# ---- every layout of the catalogue --------------------------------------------------------------------------------------------------


@each
def test_offset_is_the_published_formula(layout: Layout) -> None:
    for a, b in ((3, 3), (4, 3), (3, 5)):
        shape = sample_shape(layout, a * layout.multiple[0], b * layout.multiple[1])
        g = layout.geometry(shape)
        m, k = np.arange(g.prows)[:, None], np.arange(g.pcols)[None]
        want = published(layout, m, k, g.prows, g.pcols) + 0 * (m + k)
        got = layout.offset(shape, m, k)
        wrong = np.argwhere(got != want)
        assert not wrong.size, f"{layout.name} {shape}: unit {tuple(wrong[0])} at {got[tuple(wrong[0])]}, published {want[tuple(wrong[0])]}"


@each
def test_offset_is_a_bijection_in_every_number_type(layout: Layout) -> None:
    shape = sample_shape(layout, 3 * layout.multiple[0], 3 * layout.multiple[1])
    g = layout.geometry(shape)
    m, k = np.arange(g.prows)[:, None], np.arange(g.pcols)[None]
    grid = layout.offset(shape, m, k)
    assert np.array_equal(np.sort(grid.reshape(-1)), np.arange(g.prows * g.pcols))
    assert torch.equal(layout.offset(shape, torch.from_numpy(m), torch.from_numpy(k)), torch.from_numpy(grid))
    for i, j in ((0, 0), (g.prows - 1, g.pcols - 1), (g.prows // 2, g.pcols // 3)):
        assert layout.offset(shape, i, j) == grid[i, j]
        assert eval(layout.formula(shape), {"m": i, "k": j}) == grid[i, j]
        assert eval(layout.formula(), {"m": i, "k": j, "RO": g.free[0], "CO": g.free[1]}) == grid[i, j]
    assert layout.offset((3, *shape), 1, 2, 2) == layout.offset(shape, 1, 2) + 2 * g.prows * g.pcols
    if layout.pad is not None and layout.pad[0] is not None and layout.multiple[0] > 1:  # experts are padded each
        ragged = (3, shape[0] - 1, shape[1])
        assert layout.offset(ragged, 0, 1, 2) == layout.offset(shape, 0, 1) + 2 * g.prows * g.pcols


@each
@given(data=st.data())
def test_apply_is_the_scatter_by_offset(layout: Layout, data: st.DataObject) -> None:
    """torch == numpy for ragged, empty and expert shapes; the inverse returns the input from storage whose padding is poisoned."""
    shape = data.draw(strategies.shapes(layout))
    if math.prod(layout.padded(shape)) > 1 << 19:
        return
    x = data.draw(strategies.byte_arrays(shape))
    y = layout.apply(x)
    assert y.dtype == np.uint8
    assert y.shape == (*shape[:-2], math.prod(layout.padded(shape)[-2:]))
    assert y.size == layout.nbytes(shape)
    assert_same_bytes(y, by_scatter(layout, x), layout=layout, shape=shape)
    assert_same_bytes(layout.apply(torch.from_numpy(x)), torch.from_numpy(y))
    assert_same_bytes(layout.invert(y, x.shape), x)
    # which stored bits are padding: apply zeros with fill 0 and with fill 0xFF
    zeros = np.zeros_like(x)
    pads = replace(layout, fill=0).apply(zeros) ^ replace(layout, fill=255).apply(zeros)
    poisoned = y ^ (pads & data.draw(strategies.byte_arrays(y.shape)))
    assert_same_bytes(layout.invert(poisoned, shape), x)


@each
def test_bit_offset_follows_every_bit(layout: Layout) -> None:
    shape = sample_shape(layout, layout.multiple[0], layout.multiple[1])
    g, bits = layout.geometry(shape), 8 // layout.units_per_byte
    rng = np.random.default_rng(0)
    for _ in range(24):
        m, k, bit = int(rng.integers(g.prows)), int(rng.integers(g.pcols)), int(rng.integers(bits))
        x = np.zeros(shape, dtype=np.uint8)
        x[m, k // layout.units_per_byte] = 1 << (bit + (k % layout.units_per_byte) * 4)
        stored = np.flatnonzero(np.unpackbits(layout.apply(x), bitorder="little"))
        assert stored.tolist() == [layout.bit_offset(shape, m, k, bit)]
        assert layout.bit_offset(shape, np.array([m]), np.array([k]), np.array([bit])).tolist() == stored.tolist()
        assert layout.bit_offset(shape, torch.tensor([m]), torch.tensor([k]), torch.tensor([bit])).tolist() == stored.tolist()


@each
@pytest.mark.parametrize("dim", [0, 1])
def test_every_legal_shard_is_the_shard_stored(layout: Layout, dim: int) -> None:
    """apply(slice) == the shard's bytes; what is refused has a reason that names the layout, the dimension and the cause."""
    legal = 0
    for n in (1, 2, 3, 4):
        size = [2, 2]
        size[dim] = 12
        shape = sample_shape(layout, size[0] * layout.multiple[0], size[1] * layout.multiple[1])
        if math.prod(shape) > 1 << 22:
            continue
        ranges = layout.shard(dim, n, shape)
        if isinstance(ranges, Reason):
            assert not ranges
            assert layout.name in str(ranges)
            assert "free axis" in str(ranges) or "not multiples" in str(ranges) or "whole number" in str(ranges)
            continue
        legal += n > 1
        x = torch.from_numpy(counter_bytes((2, *shape)))
        y = layout.apply(x)
        parts = x.chunk(n, dim=dim - 2)
        for part, r in zip(parts, ranges, strict=True):
            assert_same_bytes(r.take(y), layout.apply(part), name=f"{layout.name} shard {r}")
            assert r.nbytes * n == layout.nbytes(shape)
    group = [a for a in layout.axes if a.dim == dim]
    assert bool(legal) == bool(group and not group[0].size)


def test_known_shards() -> None:
    """Tensor-parallel facts: rows of 128x4 are one run; gate/up layouts refuse a naive split; Marlin splits K in one run."""
    sf = fp4.layouts["sf_128x4"]
    assert sf.shard(0, 2, (512, 64)) == (ByteRange(0, 16384, 1, 32768), ByteRange(16384, 16384, 1, 32768))
    assert [r.count for r in sf.shard(1, 2, (512, 64))] == [4, 4]
    assert "4 equal parts, each a multiple of 128" in str(sf.shard(0, 4, (384, 64)))
    assert "not outermost" in str(fp4.layouts["aiter_w_gu"].shard(0, 2, (64, 128)))
    assert "not outermost" in str(fp4.layouts["gate_up_pairs"].shard(0, 2, (64, 128)))
    assert [r.count for r in fp4.layouts["marlin_w"].shard(1, 2, (128, 32))] == [1, 1]
    assert isinstance(sf.shard(0, 3, (130, 64)), Reason)


def test_a_shard_is_whole_bytes_and_words() -> None:
    """Half a byte, or a word of two shards, is no byte range."""
    nibbles = Layout("columns", "mo k2 -> k2 mo", unit="nibble")
    assert "a part of 1 nibbles is not a whole number of bytes" in str(nibbles.shard(0, 2, (2, 1)))
    assert nibbles.shard(0, 2, (4, 1))
    words = Layout("words", "m k -> m k", word=tuple(reversed(range(32))))
    assert "a part of 6 bytes is not a whole number of words" in str(words.shard(0, 2, (2, 6)))
    assert words.shard(0, 2, (2, 8)) == (ByteRange(0, 8, 1, 16), ByteRange(8, 8, 1, 16))


def test_shards_of_a_free_axis_that_is_stored_backwards() -> None:
    """The first rows lie last."""
    layout = Layout("reversed", "(mo m4) k -> ~mo m4 k")
    x = torch.from_numpy(counter_bytes((24, 5)))
    y = layout.apply(x)
    ranges = layout.shard(0, 3, (24, 5))
    assert [r.start for r in ranges] == [80, 40, 0]  # type: ignore[union-attr]
    for part, r in zip(x.chunk(3), ranges, strict=True):  # type: ignore[arg-type]
        assert_same_bytes(r.take(y), layout.apply(part))


@pytest.mark.parametrize("name", ["sf_128x4", "marlin_sf", "deepgemm_sf", "aiter_w"])
def test_extents_beyond_2_31(name: str) -> None:
    layout = fp4.layouts[name]
    rows, cols = 2**22, 2**14  # 64 GiB
    m, k = np.array([0, 1, 12345, rows - 1]), np.array([0, 3, 777, cols - 1])
    want = published(layout, m.astype(object), k.astype(object), rows, cols)
    assert layout.offset((rows, cols), m, k).tolist() == list(want)
    assert layout.offset((rows, cols), torch.from_numpy(m).int(), torch.from_numpy(k).int()).tolist() == list(want)
    assert layout.offset((rows, cols), m.astype(np.int32), k.astype(np.int32)).tolist() == list(want)
    assert layout.nbytes((4, rows, cols)) == 2**38
    assert max(want) >= 2**31


# ---- random layouts ------------------------------------------------------------------------------------------------------------------


@given(data=st.data(), layout=strategies.layouts())
def test_random_layouts(data: st.DataObject, layout: Layout) -> None:
    shape = data.draw(strategies.shapes(layout, tiles=2))
    assume(math.prod(layout.padded(shape)) <= 1 << 16)
    if layout.word is not None and math.prod(layout.padded(shape)[-2:]) % 4:
        with pytest.raises(LayoutError, match="whole 32-bit words"):
            layout.apply(np.zeros(shape, np.uint8))
        return
    x = data.draw(strategies.byte_arrays(shape))
    y = layout.apply(x)
    assert_same_bytes(y, by_scatter(layout, x), layout=layout, shape=shape)
    assert_same_bytes(layout.invert(y, shape), x)
    if min(shape) > 0:
        g = layout.geometry(shape)
        m, k = data.draw(st.integers(0, g.prows - 1)), data.draw(st.integers(0, g.pcols - 1))
        assert eval(layout.formula(shape), {"m": m, "k": k}) == layout.offset(shape, m, k)


@given(data=st.data(), layout=strategies.layouts(), n=st.integers(1, 3), dim=st.sampled_from([0, 1]))
def test_random_shards(data: st.DataObject, layout: Layout, n: int, dim: int) -> None:
    size = [1, 1]
    size[dim] = n
    shape = sample_shape(layout, size[0] * layout.multiple[0], size[1] * layout.multiple[1])
    assume(math.prod(shape) <= 1 << 16)
    ranges = layout.shard(dim, n, shape)
    if isinstance(ranges, Reason) or (layout.word is not None and math.prod(layout.padded(shape)) % 4):
        return
    x = torch.from_numpy(data.draw(strategies.byte_arrays(shape)))
    y = layout.apply(x)
    for part, r in zip(x.chunk(n, dim=dim), ranges, strict=True):
        assert_same_bytes(r.take(y), layout.apply(part))


@given(layout=strategies.layouts())
def test_equality_is_equality_of_bytes(layout: Layout) -> None:
    """Renamed axes and split axes are equal; a layout that is not equal but has one shape in common differs in some offset."""
    left, _, right = layout.spec.partition("->")
    renamed = replace(layout, name="other", spec=f"{left}->{right}".replace("r", "row").replace("c", "col"))
    assert renamed == layout
    assert hash(renamed) == hash(layout)
    other = replace(layout, spec=f"{left}-> {' '.join(reversed(right.split()))}")
    shape = sample_shape(layout, 3 * layout.multiple[0], 3 * layout.multiple[1])
    g = layout.geometry(shape)
    if g.prows * g.pcols > 1 << 16:
        return
    at = np.arange(g.prows)[:, None], np.arange(g.pcols)[None]
    assert (other == layout) == bool((other.offset(shape, *at) == layout.offset(shape, *at)).all())


def test_known_equalities() -> None:
    get = fp4.layouts.get
    assert Layout("mine", "(a b4 c32) (d e4) -> a d c32 b4 e4") == get("sf_128x4")  # same tile, whether it pads or refuses
    assert get("sf_128x4") == get("triton_gfx1250_sf")  # AMD's scale tile is NVIDIA's
    assert get("sf_128x4") != get("blackwell_sf")  # K is padded to 8
    assert get("sf_128x4").same_digits(get("blackwell_sf"))
    assert get("aiter_sf").same_digits(get("cdna4_sf"))
    assert get("sm90_mixed_int4") != get("sm90_mixed_fp4_fp8")  # the word table
    assert Layout("split", "(mo m2 n64) (ko k4) -> mo m2 n64 ko k4", pad=(128, 4)) == Layout("rows", "m k -> m k", pad=(128, 4))
    assert get("plain") != "plain"
    assert replace(get("sf_128x4"), fill=127) != get("sf_128x4")  # the bytes of the padding are bytes too
    assert replace(get("sf_128x4"), fill=127).same_digits(get("sf_128x4"))


# ---- dtypes, strides, bad input ------------------------------------------------------------------------------------------------------


def test_any_one_byte_dtype_and_any_strides() -> None:
    layout = fp4.layouts["sf_128x4"]
    x = torch.from_numpy(counter_bytes((130, 6)))
    want = layout.apply(x)
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu):
        assert_same_bytes(layout.apply(x.view(dtype)), want)
    assert_same_bytes(layout.apply(x.t().contiguous().t()), want)
    assert_same_bytes(layout.apply(x.numpy().astype(np.uint8).view(np.int8)), want.numpy())
    assert_same_bytes(layout.invert(want.view(torch.int32).reshape(2, 4, 64), (130, 6)), x)


@pytest.mark.parametrize("name", ["sf_128x4", "marlin_w", "hopper_value_v3"])
def test_large_expert_tensors_go_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = fp4.layouts[name]
    x = torch.from_numpy(counter_bytes((2, 3, *sample_shape(layout, layout.multiple[0], layout.multiple[1]))))
    want = layout.apply(x)
    monkeypatch.setattr("fp4.layout._AT_ONCE", 100)
    assert_same_bytes(layout.apply(x), want)
    assert_same_bytes(layout.invert(want, x.shape), x)


BAD = [
    (lambda: Layout("x", "m k"), "must read"),
    (lambda: Layout("x", "m k n -> m k n"), "two groups"),
    (lambda: Layout("x", "(m q) k -> m q k"), "2 free axes in the rows group"),
    (lambda: Layout("x", "(m m4) (k m4) -> m k m4 m4"), "'m4' is not an axis"),
    (lambda: Layout("x", "(m 4) k -> m 4 k"), "'4' is not an axis"),
    (lambda: Layout("x", "(m m0) k -> m m0 k"), "'m0' is not an axis"),
    (lambda: Layout("x", "(m a4) k -> m b4 a4 k"), "unknown axis 'b4'"),
    (lambda: Layout("x", "(m a4) k -> m a4 a4 k"), "'a4' is stored twice"),
    (lambda: Layout("x", "(m a4) k -> m k"), "axis a4 of the left is not stored"),
    (lambda: Layout("x", "m k -> m k", word=(*range(31), 0)), "not a permutation of the bits 0..31"),
    (lambda: Layout("x", "m k -> m k", unit="bit"), "need 'byte' or 'nibble'"),
    (lambda: Layout("x", "m k -> m k", unit="nibble"), "need an even column tile"),
    (lambda: Layout("x", "m k -> m k", fill=256), "need a byte"),
    (lambda: Layout("x", "m k -> m k", pad=(0, 1)), "need positive numbers"),
    (lambda: Layout("x", "(g2 n) k -> n g2 k", pad=(4, 1)), "cannot pad rows"),
    (lambda: fp4.layouts["nothing"], "is not known"),
    (lambda: fp4.layouts["hopper_sf(num_warps=5)"], "need 4 or 8"),
    (lambda: fp4.layouts["hopper_sf(many)"], "is not a whole number"),
    (lambda: fp4.layouts["sf_128x4(3)"], "gives 1 values; sf_128x4 takes none|has no parameter"),
    (lambda: fp4.layouts["blackwell_value_shuffled(block_k=3)"], "need an even block_k"),
    (lambda: fp4.layouts["marlin_w"].apply(np.zeros((63, 8), np.uint8)), r"63 rows in shape \[63, 8\] do not fit; need a multiple of 64"),
    (
        lambda: fp4.layouts["marlin_w"].apply(np.zeros((64, 9), np.uint8)),
        r"18 nibbles .* do not fit; need a multiple of 16; pad to 32 nibbles",
    ),
    (lambda: fp4.layouts["sf_128x4"].apply(np.zeros(4, np.uint8)), r"shape is \[4\]; need \[..., rows, columns\]"),
    (lambda: fp4.layouts["sf_128x4"].apply(torch.zeros(4, 4)), "dtype torch.float32; need raw bytes"),
    (lambda: fp4.layouts["sf_128x4"].apply(np.zeros((4, 4))), r"dtype float64; need raw bytes"),
    (lambda: fp4.layouts["sf_128x4"].apply(torch.zeros(4, 4, dtype=torch.bool)), "need raw bytes"),
    (lambda: fp4.layouts["sf_128x4"].apply([[1]]), "input is list"),
    (lambda: fp4.layouts["sf_128x4"].invert(np.zeros(511, np.uint8), (4, 4)), "storage has 511 bytes; need 512"),
    (lambda: fp4.layouts["sf_128x4"].invert(torch.zeros(32, 32, dtype=torch.uint8).t()[:, :16], (4, 4)), "storage has strides"),
    (lambda: fp4.layouts["sf_128x4"].invert("bytes", (4, 4)), "storage is str"),
    (lambda: fp4.layouts["sf_128x4"].offset((128, 4), 128, 0), r"m = 128 is outside 0..127"),
    (lambda: fp4.layouts["sf_128x4"].offset((128, 4), 0, np.array([0, -1])), r"k = -1 is outside 0..3"),
    (lambda: fp4.layouts["sf_128x4"].offset((128, 4), torch.tensor([200]), 0), r"m = 200 is outside"),
    (lambda: fp4.layouts["sf_128x4"].shard(2, 2, (256, 4)), "need dim 0"),
    (lambda: fp4.layouts["sf_128x4"].shard(0, 0, (256, 4)), "n >= 1"),
    (lambda: fp4.layouts["sf_128x4"].padded((-1, 4)), r"shape is \[-1, 4\]"),
    (lambda: fp4.layouts["sf_128x4"].nbytes((2**40, 2**40)), r"2\^63 bytes or more, beyond 64-bit offsets"),
    (lambda: Layout("fixed", "m4 k4 -> k4 m4").apply(np.zeros((8, 4), np.uint8)), "need exactly 4"),
    (lambda: Layout("w", "m k -> m k", word=tuple(range(32))).apply(np.zeros((3, 3), np.uint8)), "not whole 32-bit words"),
    (lambda: Chain([]), "need at least one"),
    (lambda: Segmented(fp4.layouts["sf_128x4"], (0, 5, 3)), "never falling"),
    (lambda: Segmented(fp4.layouts["sf_128x4"], (1, 5)), "need 0 first"),
    (lambda: Segmented(fp4.layouts["sf_128x4"], (0, 5)).apply(np.zeros((6, 4), np.uint8)), r"need \[5, columns\]"),
    (lambda: Segmented(fp4.layouts["sf_128x4"], (0, 200), capacity=128).nbytes((200, 4)), "capacity of 128 rows"),
    (lambda: fp4.layouts["sf_128x4"].picture((0, 4)), "is empty"),
    # what is not a whole number is refused and never cut to one: offset(1.5, 0) used to be the offset of row 1
    (lambda: fp4.layouts["sf_128x4"].offset((128, 4), 1.5, 0), "m is 1.5; need a whole number"),
    (lambda: fp4.layouts["sf_128x4"].offset((128, 4), 0, "1"), "k is '1'; need a whole number"),
    (lambda: fp4.layouts["sf_128x4"].offset((128, 4), True, 0), "m is True"),
    (lambda: fp4.layouts["sf_128x4"].offset((128, 4), [1, 2], 0), "need a whole number"),
    (lambda: fp4.layouts["sf_128x4"].offset((128, 4), torch.tensor([1.5]), 0), "m has dtype torch.float32; need whole numbers"),
    (lambda: fp4.layouts["sf_128x4"].offset((128, 4), torch.tensor([True]), 0), "m has dtype torch.bool"),
    (lambda: fp4.layouts["sf_128x4"].offset((128, 4), 0, np.array([0.5])), "k has dtype float64; need whole numbers"),
    (lambda: fp4.layouts["sf_128x4"].padded((2.5, 4)), "shape is 2.5; need a whole number"),
    (lambda: fp4.layouts["sf_128x4"].padded("84"), r"shape is \[\]; need"),
    (lambda: fp4.layouts["sf_128x4"].nbytes(5), "shape is 5; need a sequence"),
    (lambda: (fp4.layouts["sf_128x4"] >> fp4.layouts["plain"]).padded((2.5, 4)), "need a whole number"),
    (lambda: fp4.layouts["sf_128x4"].shard(0, 1.5, (256, 4)), "n is 1.5"),
    (lambda: fp4.layouts["sf_128x4"].shard("rows", 2, (256, 4)), "dim is 'rows'"),
    (lambda: fp4.layouts["sf_128x4"].invert(np.zeros(512, object), (4, 4)), "dtype object; need raw bytes"),
    (lambda: fp4.layouts["plain"].apply_rows(np.ones(4)), "need a torch.Tensor"),
    (lambda: fp4.layouts["hopper_value_v3(pad_n=1.5)"], "is not a whole number"),
    (lambda: fp4.layouts["hopper_sf(num_warps=4, num_warps=8)"], "given twice"),
    (lambda: Layout("x", None), "spec is NoneType"),
    (lambda: Layout("x", "((m)) k -> m k"), "spec must read"),
    (lambda: Layout("x", "m) (k -> m k"), "spec must read"),
    (lambda: Layout("x", "m k -> m k", fill=1.5), "fill is 1.5"),
    (lambda: Layout("x", "m k -> m k", fill=None), "fill is None"),
    (lambda: Layout("x", "m k -> m k", word=5), "word table is 5"),
    (lambda: Layout("x", "m k -> m k", word=[float(i) for i in range(32)]), "need a whole number"),
    (lambda: Layout("x", "m k -> m k", pad=3), "pad is 3"),
    (lambda: Layout("x", "m k -> m k", pad=(1, 2, 3)), "pad is"),
    (lambda: Layout("x", "m k -> m k", pad=(1.5, 1)), "pad is 1.5"),
    (lambda: Segmented(fp4.layouts["sf_128x4"], (0, 1.5)), "starts is 1.5"),
    (lambda: Segmented(fp4.layouts["sf_128x4"], 3), "starts is 3"),
    (lambda: Segmented("sf_128x4", (0, 3)), "layout is str"),
    (lambda: Segmented(fp4.layouts["sf_128x4"], (0, 3), capacity="x"), "capacity is 'x'"),
]


@pytest.mark.parametrize(("call", "text"), BAD, ids=[b[1][:40] for b in BAD])
def test_bad_input_is_one_clear_sentence(call, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(LayoutError, match=text) as error:
        call()
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1200


def test_names_and_families() -> None:
    assert "sf_128x4" in fp4.layouts
    assert "nothing" not in fp4.layouts
    assert list(fp4.layouts) == fp4.layouts.names()
    assert len(fp4.layouts) >= 34
    assert fp4.layouts["hopper_sf(4)"] == fp4.layouts.get("hopper_sf", num_warps=4)
    assert fp4.layouts["hopper_value_v3(pad_n=16, pad_k=32)"].multiple == (16, 32)
    import importlib

    assert importlib.import_module("fp4.layouts")["sf_128x4"] is fp4.layouts["sf_128x4"]
    for layout in LAYOUTS:
        assert layout.origin
        assert layout.holds
        assert layout.role in ("rows", "scale", "value")


def test_text_forms() -> None:
    sf = fp4.layouts["sf_128x4"]
    assert sf.formula((1024, 64)) == "(m % 32)*16 + ((m//32) % 4)*4 + (m//128)*8192 + (k % 4) + (k//4)*512"
    assert sf.cute((1024, 64)) == "((32,4,8),(4,16)):((16,4,8192),(1,512))"
    assert fp4.layouts["swap_pairs"].cute((4, 8)) == "8 + ((2,2),8):((-8,16),1)"
    assert sf.picture().splitlines()[1].split()[:4] == ["0", "1", "2", "3"]
    assert sf.svg().startswith("<svg ")
    assert "LayoutError" not in repr(sf)
