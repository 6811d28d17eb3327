"""Offsets beyond 2^31 on a GPU: weights, activations and results that 32-bit offsets do not reach, and millions of rows of either.

A kernel reads a weight by 32-bit words of eight codes: an offset of 2^31 words is one of 2^34 codes, 8 GiB. What a wrong offset would read
or write is far away: zeros, NaN left there before, or no memory at all. One process runs all of this file.
"""

from __future__ import annotations

import pytest
import torch
from gpu.test_dense import ROUTES, ROUTES_W4A8, W4A8_BOUND, quantised, values, weight
from gpu.test_dense_rows import name

import fp4
from fp4.gpu.kernels import permute
from fp4.gpu.kernels.dense import N_HOPPER, Dense, facts
from fp4.gpu.kernels.dense_fp8 import _PLAIN, Dense8, Few, Specialised
from fp4.gpu.kernels.plain_fp8 import row_base
from fp4.layouts import layouts
from fp4.ref.activation import SiLU
from fp4.ref.triton_quantize import WIDE_FROM

pytestmark = [pytest.mark.gpu, pytest.mark.kernel, pytest.mark.xdist_group("far")]

NAN = float("nan")


@pytest.fixture(autouse=True)
def memory():
    """What a test has allocated goes back to the other processes on the GPU."""
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def room(gib: int) -> None:
    if torch.cuda.mem_get_info()[0] < gib << 30:
        pytest.skip(f"needs {gib} GiB of free GPU memory")


def one_of(kernel: str, **constants) -> dict:
    """The first route of a kernel with these constants."""
    return next(r for r in ROUTES if r["kernel"] == kernel and all(r.get(k, 0) == v for k, v in constants.items()))


#: one row for each way to an address: what differs between the others is how many rows, warps and slots
WAYS = [
    one_of("small", WN=1), one_of("small", WN=2), one_of("plain", BM=64), one_of("dequantize"), one_of("wide", SPLIT=1),
    one_of("wide", SPLIT=3), one_of("ws", CUT=1), one_of("ws", CUT=1, NAT=1), one_of("tiles", NAT=0, HELP=0), one_of("tiles", HELP=2),
    one_of("tiles", NAT=1),
]  # fmt: skip
FEW = [next(r for r in ROUTES_W4A8 if isinstance(r, Few) and mt == r.MT) for mt in (8, 16)]
WS8 = [next(r for r in ROUTES_W4A8 if isinstance(r, Specialised) and (bool(r.TS), bool(r.CUT)) == how) for how in ((0, 0), (1, 0), (0, 1))]
PLAIN8 = [r for _, _, r in _PLAIN]


def ids(row) -> str:
    return name(row) if isinstance(row, dict) else "-".join(map(str, (type(row).__name__, *row)))


def each(rows):
    """These rows, those for Hopper marked."""
    hopper = [isinstance(r, (Few, Specialised)) or (isinstance(r, dict) and r["kernel"] in ("wide", "ws", "tiles")) for r in rows]
    marked = [pytest.param(r, id=ids(r), marks=pytest.mark.sm90 if h else ()) for r, h in zip(rows, hopper, strict=True)]
    return pytest.mark.parametrize("row", marked)


def last_rows(n: int, k: int, tail: int, block: int, w4a8: bool = False):
    """A weight [n, k] of zeros but for its last rows: codes and scales as stored, those of the rows, their fp64 values."""
    codes, scale, second, w = weight(tail, k, block, scales=(115, 122) if w4a8 else None)
    stored = []
    for order, part, size in (
        ("frag_w8" if w4a8 else "frag_w", codes, n * k // 2),
        ("frag_sf16" if block == 16 else "frag_sf32", scale, n * k // block),
    ):
        tail_bytes = layouts[order].apply(part)
        whole = torch.zeros(size, dtype=torch.uint8, device="cuda")
        whole[-tail_bytes.numel() :] = tail_bytes
        stored.append(whole)
    return *stored, scale, second, w


def check(y, x, w, bound=1e-4):
    """Each element of bf16 y against x and w in fp64: its own rounding, and ``bound`` of the sum of its terms' magnitudes."""
    x = x.double()
    want = x @ w.T
    over = (y.double() - want).abs() / (want.abs() * 2.0**-8 + (x.abs() @ w.abs().T) * bound).clamp_min(1e-30)
    assert over.max() < 1, over.max()


#: a multiple of 16 rows, not of 32; the last 272 begin at word 2^31 of the codes
K, N, TAIL = 8192, (1 << 21) + 272, 272


def far_weight(m: int, row=None) -> None:
    room(16)
    block = 32 if row is not None and row.get("NAT") else 16
    codes, scales, scale, second, w = last_rows(N, K, TAIL, block)
    assert (N - TAIL) // 16 * (K // 64) * 128 == 1 << 31
    d = Dense(codes, scales, second, N, K, block, facts(scale, block))
    if row is not None:
        d._rows = [{"m_max": None, "n_min": 0, **row}]
    x = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
    y = d(x)
    check(y[:, -TAIL:], x, w)
    assert not y[:, :-TAIL].any()


@pytest.mark.parametrize("m", [1, 16, 64, 256])
def test_weights_beyond_2_31_words(m):
    """2^34 codes and 272 rows more: those, the only ones that are not zero, come out right, and nothing else does. What the table picks."""
    far_weight(m)


@each(WAYS)
def test_weights_beyond_2_31_words_by_every_kernel(row):
    far_weight(16 if row["kernel"] == "small" else 17, row)


@each([*FEW, *WS8, *PLAIN8])
def test_w4a8_weights_beyond_2_31_words(row):
    room(16)
    n, tail = (1 << 21) + 128, 128
    codes, scales, scale, _, w = last_rows(n, K, tail, 32, w4a8=True)
    base = torch.zeros(n, dtype=torch.uint8, device="cuda")
    base[-tail:] = row_base(scale)
    d = Dense8(codes, scales, base, None, n, K, type(row) is not tuple)
    d._table = ((None, 0, row),)
    x = torch.randn(row.MT if isinstance(row, Few) else 17, K, device="cuda", dtype=torch.bfloat16)
    y = d(x)
    q, xs = quantised(d, x, d.wide)
    check(y[:, -tail:], q.double() * xs.double(), w, W4A8_BOUND)
    assert not y[:, :-tail].any()


#: rows of x behind which an offset of 2^31 elements lies, in x of 8192 columns and in y of as many
FAR = 1 << 18
ROWS = FAR + 200
MANY = [*WAYS[2:], *WS8, PLAIN8[-1]]


def some_rows() -> list[int]:
    return [0, 1, 777, 131071, 131072, FAR - 129, *range(FAR - 3, FAR + 3), ROWS - 130, ROWS - 73, ROWS - 1]


def product(row, n: int, k: int, x: torch.Tensor) -> None:
    """y of many rows of x through one row of a table, some of its rows exact, all of it written."""
    block = 32 if not isinstance(row, dict) or row.get("NAT") else 16
    w4a8 = not isinstance(row, dict)
    codes, scale, second, w = weight(n, k, block, scales=(115, 122) if w4a8 else None)
    if w4a8:
        d = Dense8(layouts["frag_w8"].apply(codes), layouts["frag_sf32"].apply(scale), row_base(scale), None, n, k, type(row) is not tuple)
        d._table = ((None, 0, row),)
    else:
        d = Dense(layouts["frag_w"].apply(codes), layouts[f"frag_sf{block}"].apply(scale), second, n, k, block, facts(scale, block))
        d._rows = [{"m_max": None, "n_min": 0, **row}]
    torch.full((len(x), n), NAN, dtype=torch.bfloat16, device="cuda")  # where y will be
    y = d(x)
    rows = some_rows()
    few = x[rows]
    if w4a8:
        q, xs = quantised(d, few, d.wide)
        check(y[rows], q[:, :k].double() * xs.double(), w, W4A8_BOUND)
    else:
        check(y[rows], few, w)
    for part in y.split(1 << 16):
        assert part.isfinite().all()


@each(MANY)
def test_x_beyond_2_31_elements(row):
    room(14)
    product(row, 512, 8192, torch.randn(ROWS, 8192, device="cuda", dtype=torch.bfloat16))


@each([r for r in MANY if not isinstance(r, dict) or r.get("SPLIT", 1) == 1])  # three times y in fp32, and only ever of few rows
def test_y_beyond_2_31_elements(row):
    room(10)
    product(row, 8192, 1024, torch.randn(ROWS, 1024, device="cuda", dtype=torch.bfloat16))


@pytest.mark.parametrize("wide", [None, False], ids=["table", "plain"])
def test_w4a8_more_rows_of_x_than_a_grid_has_in_y(wide):
    """A grid's second dimension ends at 65,535 blocks: of 128 rows, 8,388,480."""
    room(6)
    m, n, k = 65535 * 128 + 200, 16, 32
    codes, scale, _, w = weight(n, k, 32, scales=(115, 122))
    d = Dense8(layouts["frag_w8"].apply(codes), layouts["frag_sf32"].apply(scale), row_base(scale), None, n, k, wide)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    y = d(x)
    rows = [0, 8388479, 8388480, m - 1]
    q, xs = quantised(d, x[rows], d.wide)
    check(y[rows], q[:, :k].double() * xs.double(), w, W4A8_BOUND)
    assert y.isfinite().all()


def test_more_rows_of_x_than_a_grid_has_in_y():
    room(6)
    m, n, k = 65535 * 128 + 200, 16, 32
    codes, scale, second, w = weight(n, k, 16)
    d = Dense(layouts["frag_w"].apply(codes), layouts["frag_sf16"].apply(scale), second, n, k, 16, facts(scale, 16))
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    y = d(x)
    rows = [0, 8388479, 8388480, m - 1]
    check(y[rows], x[rows], w)
    assert y.isfinite().all()


@pytest.mark.parametrize("w4a8", [False, True], ids=["w4a16", "w4a8"])
def test_more_rows_of_w_than_offsets_in_a_tile_reach(w4a8):
    """256 rows of x by 8.4 million of W: an offset inside one tile of y is beyond 2^31."""
    room(10)
    m, k, n = 300, 32, (1 << 23) + (1 << 16)
    assert n > N_HOPPER
    codes, scale, _, w = weight(1024, k, 32, scales=(115, 122))
    codes, scale = (t.repeat(n // 1024, 1) for t in (codes, scale))
    stored = layouts["frag_w8" if w4a8 else "frag_w"].apply(codes), layouts["frag_sf32"].apply(scale)
    d = Dense8(*stored, row_base(scale), None, n, k) if w4a8 else Dense(*stored, None, n, k, 32, facts(scale, 32))
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    torch.full((m, n), NAN, dtype=torch.bfloat16, device="cuda")
    y = d(x)
    x8 = x.double()
    if w4a8:
        q, xs = quantised(d, x, d.wide)
        x8 = q[:, :k].double() * xs.double()
    for at in (0, 1 << 22, n - 1024):
        check(y[:, at : at + 1024], x8, w, W4A8_BOUND if w4a8 else 1e-4)
    for part in y.split(50):  # W repeats itself; a library may add up some of its columns in another order
        first = part[:, None, :1024]
        assert torch.isclose(part.view(len(part), -1, 1024), first, rtol=2.0**-7, atol=1e-4).all()


# ---- quantise, dequantise, act-and-quantise, permute ------------------------------------------------------------------------------------


COLUMNS = 4096
BLOCKS = [slice(0, 128), slice((1 << 19) - 128, 1 << 19), slice(1 << 19, (1 << 19) + 128)]


@pytest.mark.parametrize("stored", [None, "sf_128x4"])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_quantize_beyond_2_31_elements(fmt, stored):
    """Against the same rows alone, up to the first behind 2^31 elements and from there on."""
    room(10)
    x = torch.randn((1 << 19) + 128, COLUMNS, device="cuda", dtype=torch.bfloat16)
    assert x.numel() > WIDE_FROM
    x[-1, -1] = 1000.0
    order = None if stored is None else layouts[stored]
    q = fp4.quantize(x, fmt, scale_layout=order)
    if fmt == "nvfp4":
        assert q.global_scale == fp4.quantize(x[-128:], fmt).global_scale
    scale = q.scale if order is None else order.invert(q.scale.data, shape=q.scale.shape)
    for part in BLOCKS:
        want = fp4.quantize(x[part], fmt, global_scale=q.global_scale)
        assert torch.equal(q.codes[part], want.codes)
        assert torch.equal(scale[part], want.scale)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_dequantize_beyond_2_31_elements(fmt):
    room(10)
    block = 16 if fmt == "nvfp4" else 32
    rows = (1 << 19) + 128
    codes = torch.randint(0, 256, (rows, COLUMNS // 2), dtype=torch.uint8, device="cuda")
    scale = torch.randint(100, 120, (rows, COLUMNS // block), dtype=torch.uint8, device="cuda")
    second = torch.tensor(0.37, device="cuda") if fmt == "nvfp4" else None
    torch.full((rows, COLUMNS), NAN, dtype=torch.bfloat16, device="cuda")
    y = fp4.dequantize(fp4.QuantizedTensor(fmt, codes, scale, second), torch.bfloat16)
    for part in BLOCKS:
        want = values(codes[part], scale[part], second, block)
        assert ((y[part].double() - want).abs() <= want.abs() * 2.0**-8).all()
    for part in y.split(1 << 16):
        assert part.isfinite().all()


@pytest.mark.parametrize("gate_up", ["gate_up", "interleaved"])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
def test_act_and_quantize_beyond_2_31_elements(fmt, gate_up):
    from fp4.gpu.kernels.act_quantize import act_and_quantize
    from fp4.recipe import get as recipe

    room(10)
    h = torch.randn((1 << 19) + 128, COLUMNS, device="cuda", dtype=torch.bfloat16)
    second = torch.tensor(0.01, device="cuda") if fmt == "nvfp4" else None
    how = (SiLU(), gate_up, fmt, recipe("default", fmt), second)
    codes, scale = act_and_quantize(h, *how)
    for part in BLOCKS:
        want = act_and_quantize(h[part], *how)
        assert torch.equal(codes[part], want[0])
        assert torch.equal(scale[part], want[1])


@pytest.mark.parametrize("order", ["frag_w", "frag_w8", "cpu_amx_w"])
@pytest.mark.parametrize("shift", [0, 1])
def test_to_layout_beyond_2_31_nibbles(order, shift):
    """2^31 and more codes in fewer bytes; from an address that is no multiple of four they move one by one, at offsets in codes."""
    room(8)
    layout, rows = layouts[order], (1 << 18) + 64
    x = torch.randint(0, 256, (rows * 4096 + shift,), dtype=torch.uint8, device="cuda")[shift:].view(rows, 4096)
    y = layout.apply(x)
    assert permute.arguments(layout, x.shape, 1 if shift else 16, False).constants["NIBBLE"] == bool(shift)
    for first in (0, 1 << 17, 1 << 18):  # row tiles are stored one behind the other
        assert torch.equal(y[first * 4096 : (first + 64) * 4096], layout.apply(x[first : first + 64].clone()))
    if shift:
        assert torch.equal(y, layout.apply(x.clone()))
    if shift and layout.word is None:  # stored words are words, at addresses of words
        y = torch.cat((y[:1], y))[1:]
    assert torch.equal(layout.invert(y, x.shape), x)


def test_to_layout_beyond_2_31_bytes():
    """The codes of a weight of 2^32 and more, as ``prepare`` stores them."""
    room(10)
    layout, rows = layouts["frag_w"], (1 << 19) + 64
    x = torch.randint(0, 256, (rows, 4096), dtype=torch.uint8, device="cuda")
    y = layout.apply(x)
    for first in (0, 1 << 18, 1 << 19):
        assert torch.equal(y[first * 4096 : (first + 64) * 4096], layout.apply(x[first : first + 64]))
    assert torch.equal(layout.invert(y, x.shape), x)
