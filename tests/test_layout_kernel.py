"""The Triton permute kernel and the device offset function against the torch path (interpreter on a CPU, compiled on a GPU)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fp4
from fp4 import layouts as catalogue
from fp4.gpu.kernels import permute
from fp4.layout import Layout
from fp4.layout_doc import sample_shape
from fp4.ref.triton_layout import divider, layout_index, layout_offset
from fp4.testing import assert_same_bytes, strategies
from fp4.testing.goldens import counter_bytes

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
LAYOUTS = [layout for name in catalogue.names() for layout in catalogue.variants(name)]
IDS = [f"{layout.name}-{layout.multiple[0]}x{layout.multiple[1]}" for layout in LAYOUTS]


def shapes(layout: Layout) -> list[tuple[int, ...]]:
    """Three tiles each way with experts (one padding unit where that is many tiles), and ragged or odd numbers of tiles without."""
    times = [3 if m == t else 1 + (m < 64) for m, t in zip(layout.multiple, layout.tile, strict=True)]
    whole = (2, *sample_shape(layout, times[0] * layout.multiple[0], times[1] * layout.multiple[1]))
    ragged = list(sample_shape(layout, layout.multiple[0], 5 * layout.multiple[1]))
    if layout.pad is not None:
        ragged = [n - (layout.multiple[d] // 2 if layout.pad[d] is not None else 0) for d, n in enumerate(ragged)]
    return [whole, (max(ragged[0], 1), max(ragged[1], 1))]


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_kernel_writes_the_same_bytes(layout: Layout) -> None:
    if not permute.can(layout):
        pytest.skip("an axis of 3: served by the torch path (fewer than 4 scale columns)")
    for shape in shapes(layout):
        x = torch.from_numpy(counter_bytes(shape))
        want = layout._apply(x, layout.geometry(shape))
        got = permute.apply(layout, x.to(DEVICE))
        assert_same_bytes(got, want, layout=layout, shape=shape)
        assert_same_bytes(permute.invert(layout, got, shape), x)


@pytest.mark.parametrize("name", ["deepgemm_sf", "marlin_sf", "marlin_mx_sf_single", "blackwell_value_shuffled"])
def test_longer_runs_of_large_tensors_write_the_same_bytes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What tensors from ``FAR_BYTES`` on get, by a small one."""
    layout = catalogue.get(name)
    near = permute.arguments(layout, shapes(layout)[0], 16, False).constants["ROWS_FIRST"]
    monkeypatch.setattr(permute, "FAR_BYTES", 0)
    permute.arguments.cache_clear()
    try:
        assert not near
        assert permute.arguments(layout, shapes(layout)[0], 16, False).constants["ROWS_FIRST"]
        for shape in shapes(layout):
            x = torch.from_numpy(counter_bytes(shape)).to(DEVICE)
            y = permute.apply(layout, x)
            assert_same_bytes(y.cpu(), layout.apply(x.cpu()))
            assert_same_bytes(permute.invert(layout, y, shape).cpu(), x.cpu())
    finally:
        permute.arguments.cache_clear()


@pytest.mark.parametrize(
    "name", ["marlin_w", "marlin_w_a8", "cpu_amx_w", "sm90_mixed_fp4_a", "frag_w", "hopper_value_v3", "marlin_sf_single", "hopper_sf"]
)
def test_rows_of_whole_words_are_moved_as_words(name: str) -> None:
    """Index bits change places between 32-bit words; rows or pointers that are not whole words go byte by byte, to the same bytes."""
    layout = fp4.layouts[name]
    rows, columns = sample_shape(layout, 2 * layout.multiple[0], 4 * layout.multiple[1])
    x = torch.from_numpy(counter_bytes((rows, columns)))
    want = layout._apply(x, layout.geometry(x.shape))
    for align in (16, 1):
        for inverse in (False, True):
            c = permute.arguments(layout, (rows, columns), align, inverse)
            assert bool(c.constants["EXCHANGED"]) == (align == 16), (name, align)
            pair = (torch.zeros_like(x), want.clone()) if inverse else (x.clone(), torch.zeros_like(want))
            on = [t.to(DEVICE) for t in pair]
            views = [t.view(dtype) for t, dtype in zip(on, c.views, strict=True)]
            permute._permute_kernel[(c.programs,)](*views, *c.numbers, **c.constants, num_warps=permute.WARPS)
            assert_same_bytes(on[0 if inverse else 1], x if inverse else want)


BITS = tuple(reversed(range(32)))


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ("m k -> m k", BITS),  # eight bytes would move together, and the table is of four
        ("(mo m2) (ko k16) -> mo ko m2 k16", BITS),
        ("(mo m4) k -> mo ~k m4", None),  # bytes of a logical word that lie backwards in storage
        ("(mo m4) (ko k2) -> mo ~ko k2 m4", None),
        ("(mo m4) k -> ~k mo m4", None),
        ("(mo m4) k -> mo k ~m4", None),  # a stored word that holds its rows backwards
    ],
)
def test_words_that_only_others_layouts_have(spec: str, word: tuple[int, ...] | None) -> None:
    layout = Layout("own", spec, word=word)
    x = torch.from_numpy(counter_bytes((16, 64)))
    got = permute.apply(layout, x.to(DEVICE))
    assert_same_bytes(got, layout._apply(x, layout.geometry(x.shape)), layout=layout, shape=x.shape)
    assert_same_bytes(permute.invert(layout, got, x.shape), x)


def test_only_axes_of_three_are_left_to_torch() -> None:
    assert [layout.spec for layout in LAYOUTS if not permute.can(layout)] == ["(mo m4 m32) (ko k3) -> mo ko m32 m4 k3"]


@triton.jit(do_not_specialize=["rows", "cols", "RO", "CO"])
def _offsets(out, rows, cols, RO, CO, WIDE: tl.constexpr, DIGITS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, col = i // cols, i % cols
    if WIDE:
        row, col = row.to(tl.int64), col.to(tl.int64)
    tl.store(out + i, layout_offset(row, col, RO, CO, DIGITS), mask=i < rows * cols)


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_device_offset(layout: Layout) -> None:
    shape = sample_shape(layout, 3 * layout.multiple[0], 3 * layout.multiple[1])
    g = layout.geometry(shape)
    out = torch.full((g.prows, g.pcols), -1, dtype=torch.int64, device=DEVICE)
    _offsets[(triton.cdiv(out.numel(), 16384),)](out, g.prows, g.pcols, *g.free, WIDE=False, DIGITS=layout.digits, BLOCK=16384)
    want = layout.offset(shape, np.arange(g.prows)[:, None], np.arange(g.pcols))
    assert np.array_equal(out.cpu().numpy(), want)


@triton.jit(do_not_specialize=["units", "cols", "RO", "CO", "by_ro", "ro_shift", "by_co", "co_shift"])
def _indices(
    out, units, cols, RO, CO, by_ro, ro_shift, by_co, co_shift, WIDE: tl.constexpr, DIGITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    T: tl.constexpr = tl.int64 if WIDE else tl.uint32
    row, col = layout_index(i.to(T), RO.to(T), CO.to(T), by_ro, ro_shift, by_co, co_shift, DIGITS, WIDE)
    tl.store(out + i, row.to(tl.int64) * cols + col.to(tl.int64), mask=i < units)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_device_index_is_the_inverse_of_the_offset(layout: Layout, wide: bool) -> None:
    shape = sample_shape(layout, 3 * layout.multiple[0], 3 * layout.multiple[1])
    g = layout.geometry(shape)
    got = torch.full((g.prows * g.pcols,), -1, dtype=torch.int64, device=DEVICE)
    dividers = (*divider(g.free[0]), *divider(g.free[1]))
    numbers = (got.numel(), g.pcols, *g.free, *dividers)
    _indices[(triton.cdiv(got.numel(), 16384),)](got, *numbers, WIDE=wide, DIGITS=layout.digits, BLOCK=16384)
    offset = layout.offset(shape, np.arange(g.prows)[:, None], np.arange(g.pcols))
    assert np.array_equal(offset.ravel()[got.cpu().numpy()], np.arange(got.numel()))


def test_device_offset_is_64_bit_when_its_arguments_are() -> None:
    layout = fp4.layouts["marlin_sf"]  # K outermost: the second column lies after all rows
    ro, big = 2**27, 2**33
    out = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    _offsets[(1,)](out, 1, 2, ro, 2, WIDE=True, DIGITS=layout.digits, BLOCK=2)
    assert out.tolist() == [[0, big]] == [[layout.offset((64 * ro, 2), 0, k) for k in (0, 1)]]


@pytest.mark.parametrize("name", ["sf_128x4", "marlin_w", "hopper_value_v3", "trtllm_rows_32"])
def test_kernel_never_reads_or_writes_outside(name: str) -> None:
    """Storage lies between guard bytes, the input too; padding is written as fill and poison in it is never read back."""
    layout = fp4.layouts[name]
    shape = sample_shape(layout, 2 * layout.multiple[0], 2 * layout.multiple[1])
    if layout.pad is not None:
        shape = (shape[0] - 7, shape[1] - 2)
    n, m = layout.nbytes(shape), shape[0] * shape[1]
    guarded = torch.full((m + 128,), 0xEE, dtype=torch.uint8, device=DEVICE)
    x = guarded[64 : 64 + m].view(shape)
    x.copy_(torch.from_numpy(counter_bytes(shape)))
    out = torch.full((n + 128,), 0xDD, dtype=torch.uint8, device=DEVICE)
    permute._launch(layout, x, out[64 : 64 + n], False, permute.TILE_BYTES, permute.WARPS)
    assert (out[:64] == 0xDD).all()
    assert (out[64 + n :] == 0xDD).all()
    assert_same_bytes(out[64 : 64 + n], layout._apply(x.cpu(), layout.geometry(shape)), layout=layout, shape=shape)
    back = torch.full((m + 128,), 0xCC, dtype=torch.uint8, device=DEVICE)
    permute._launch(layout, back[64 : 64 + m].view(shape), out[64 : 64 + n], True, permute.TILE_BYTES, permute.WARPS)
    assert (back[:64] == 0xCC).all()
    assert (back[64 + m :] == 0xCC).all()
    assert_same_bytes(back[64 : 64 + m].view(shape), x)


@pytest.mark.parametrize("name", ["sf_128x4", "up_gate_pairs", "marlin_w", "aiter_sf_gu"])
def test_kernel_with_64_bit_indices(name: str) -> None:
    """The variant that extents of 2^31 bytes and more take, run on a small matrix."""
    layout = fp4.layouts[name]
    shape = (2, *sample_shape(layout, 3 * layout.multiple[0], 3 * layout.multiple[1]))
    assert permute.arguments(layout, (2**20, 2**13), 16, False).constants["WIDE"]
    for inverse in (False, True):
        c = permute.arguments(layout, shape, 1, inverse)
        assert not c.constants["WIDE"]
        x = torch.from_numpy(counter_bytes(shape)).to(DEVICE)
        y = layout._apply(x.cpu(), layout.geometry(shape)).to(DEVICE)
        got = torch.zeros_like(x if inverse else y)
        pair = (got, y) if inverse else (x, got)
        views = [t.view(dtype) for t, dtype in zip(pair, c.views, strict=True)]
        permute._permute_kernel[(c.programs,)](*views, *c.numbers, **{**c.constants, "WIDE": True}, num_warps=permute.WARPS)
        assert_same_bytes(got, x if inverse else y)


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_one_binary_for_all_shapes(layout: Layout) -> None:
    """What the compiler sees depends on the layout and on the alignment class (here the best) and not on the shape.

    Extents of 2^31 bytes and more are one more binary, with 64-bit indices inside tiles; so are, for columns stored apart, those from
    ``FAR_BYTES`` on.
    """
    if not permute.can(layout):
        pytest.skip("an axis of 3: served by the torch path (fewer than 4 scale columns)")
    keys: dict[bool, set[object]] = {False: set(), True: set()}
    for tiles in (16, 32, 48, 80, 112, 160):
        for more in (16, 64, 176, 256):
            shape = sample_shape(layout, tiles * layout.multiple[0], more * layout.multiple[1])
            for experts in (1, 5):
                c = permute.arguments(layout, (experts, *shape), 16, False)
                far = experts * shape[0] * shape[1] >= permute.FAR_BYTES
                keys[far].add(tuple(sorted((k, v) for k, v in c.constants.items())))
                assert all(0 <= n < 2**31 for n in c.numbers)
    assert len(keys[False]) == 1
    assert len(keys[True]) <= 1


_COUNT = """
import sys
import triton
from fp4.gpu.kernels import permute
free = {"R", "C", "RO", "CO", "n_row", "n_col", "stored"}
kernel = permute._permute_kernel
numbers = {p.name for p in kernel.params if not p.is_constexpr} - {"plain", "storage"}
assert numbers == free, numbers
assert all(p.do_not_specialize for p in kernel.params if p.name in free)
"""


def test_run_time_numbers_are_not_specialised() -> None:
    """The rest of the compile key: Triton must not specialise the run-time integers (needs the compiled kernel, not the interpreter)."""
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[1]), "HOME": "/tmp", "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_compilations_are_counted_on_the_device() -> None:
    layout = fp4.layouts["sf_128x4"]
    permute.apply(layout, torch.zeros(128, 64, dtype=torch.uint8, device="cuda"))
    before = sum(len(cache[0]) for cache in permute._permute_kernel.device_caches.values())
    for rows, cols in ((256, 64), (4096, 512), (384, 1024), (3, 128)):
        permute.apply(layout, torch.zeros(rows, cols, dtype=torch.uint8, device="cuda"))
    assert sum(len(cache[0]) for cache in permute._permute_kernel.device_caches.values()) == before


@pytest.mark.parametrize("name", ["frag_w", "frag_w8", "cpu_amx_w"])
@pytest.mark.parametrize("inverse", [False, True])
def test_codes_that_move_one_by_one_have_64_bit_offsets_from_2_31_codes_on(name: str, inverse: bool) -> None:
    """Fewer bytes than 2^31, but offsets count codes: two a byte where an address is no multiple of four, whole words elsewhere."""
    for rows, many in ((2**18 - 64, False), (2**18, True)):
        by_codes, by_words = (permute.arguments(fp4.layouts[name], (rows, 4096), align, inverse).constants for align in (1, 16))
        assert (by_codes["NIBBLE"], by_words["NIBBLE"]) == (1, 0)
        assert (by_codes["WIDE"], by_words["WIDE"]) == (many, False)


@pytest.mark.gpu
def test_more_than_2_31_bytes_on_the_device() -> None:
    layout = fp4.layouts["sf_128x4"]
    rows, cols = 2**20, 2**11 + 4
    if torch.cuda.mem_get_info()[0] < 4 * rows * cols:
        pytest.skip("needs 9 GB of free device memory")
    x = torch.randint(0, 256, (rows, cols), dtype=torch.uint8, device="cuda")
    y = layout.apply(x)
    for m, k in ((0, 0), (rows - 1, cols - 1), (rows - 77, 1030), (2**19 + 5, 3)):
        assert y[layout.offset((rows, cols), m, k)] == x[m, k]
    assert torch.equal(layout.invert(y, x.shape), x)


@settings(max_examples=12)
@given(data=st.data(), layout=strategies.layouts())
def test_random_layouts_through_the_kernel(data: st.DataObject, layout: Layout) -> None:
    assume(permute.can(layout))
    shape = data.draw(strategies.shapes(layout, tiles=2))
    padded = layout.padded(shape)
    assume(np.prod(padded) <= 1 << 15 and (layout.word is None or padded[-2] * padded[-1] % 4 == 0))
    x = data.draw(strategies.byte_tensors(shape))
    want = layout._apply(x, layout.geometry(shape))
    got = permute.apply(layout, x.to(DEVICE), tile_bytes=2048)
    assert_same_bytes(got, want, layout=layout, shape=shape)
    assert_same_bytes(permute.invert(layout, got, shape, tile_bytes=2048), x)
