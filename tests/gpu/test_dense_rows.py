"""Dense kernels on a GPU, each row of the tables by force: NaN and infinity stay in their rows of x, rows of any size, graphs, empty x."""

from __future__ import annotations

import pytest
import torch
from gpu.test_dense import ROUTES, ROUTES_W4A8, W4A8_BOUND, bind, forced, quantised, w4a8, weight

import fp4
from fp4.gpu.kernels.dense_fp8 import _PLAIN, Dense8, Few

pytestmark = [pytest.mark.gpu, pytest.mark.kernel]

NAN, INF = float("nan"), float("inf")
#: W4A8: every row of the Hopper table, and of plain Triton's
KERNELS_W4A8 = [pytest.param(r, id="-".join(map(str, (type(r).__name__, *r))), marks=pytest.mark.sm90) for r in ROUTES_W4A8]
KERNELS_W4A8 += [pytest.param(r, id="-".join(map(str, ("plain", *r)))) for _, _, r in _PLAIN]


def needs_hopper(row) -> None:
    if row["kernel"] in ("wide", "ws", "tiles") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("warp-group MMA needs a Hopper GPU (SM90)")


def name(row) -> str:
    return "-".join(str(v) for v in row.values())


def poison(size: int) -> None:
    """Leave NaN in what the allocator hands out next."""
    torch.full((size,), NAN, device="cuda")


def turns(x: torch.Tensor) -> list[tuple[torch.Tensor, list[int]]]:
    """x with NaN, infinity and its negative in the first, the middle and the last row, each in each, at the first, an inner, the last k."""
    m, k = x.shape
    rows = sorted({0, m // 2, m - 1})
    out = []
    for turn in range(3):
        bad = x.clone()
        for i, row in enumerate(rows):
            bad[row, (0, k // 2 + 5, k - 1)[(i + turn) % 3]] = (NAN, INF, -INF)[(i + turn) % 3]
        out.append((bad, rows))
    return out


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("row", ROUTES, ids=name)
def test_bad_values_stay_in_their_rows_on_every_route(row, block):
    """The others do not change by a bit; the bad ones are NaN and infinite where the exact product of the same x and w is."""
    needs_hopper(row)
    codes, scale, second, w = weight(512, 1024, block, seed=1)
    d = forced(row, codes, scale, second, block)
    m = 16 if row["kernel"] == "small" else 300
    x = torch.randn(m, 1024, device="cuda", dtype=torch.bfloat16)
    clean = d(x)
    for bad, rows in turns(x):
        y = d(bad)
        rest = [i for i in range(m) if i not in rows]
        assert torch.equal(y[rest], clean[rest])
        want = bad[rows].double() @ w.T
        assert not want.isfinite().any()
        assert torch.equal(y[rows].isnan(), want.isnan())
        inf = ~want.isnan()
        assert torch.equal(y[rows][inf].double(), want[inf])


@pytest.mark.parametrize("row", ROUTES, ids=name)
def test_graph_replay_equals_eager_on_every_route(row):
    """x is new at each replay, and y full of NaN before."""
    needs_hopper(row)
    replay(forced(row, *weight(512, 1024, 16, seed=1)[:3], 16), 16 if row["kernel"] == "small" else 300)


def replay(d, m: int) -> None:
    x = torch.randn(m, d.k, device="cuda", dtype=torch.bfloat16)
    d(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = d(x)
    for seed in range(3):
        x.copy_(torch.randn(m, d.k, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)))
        y.fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, d(x))
        assert y.isfinite().all()


def fp8_layer(row, n: int = 512, k: int = 1024):
    """(bound weight that takes this row of a table, its fp64 values, x of as many rows as suit it, whether the kernel is Hopper's)."""
    wide = type(row) is not tuple
    m = (1 if row.ONE else row.MT) if isinstance(row, Few) else 300
    d, w, x = w4a8(n, k, m, wide)
    d._table = ((None, 0, row),)
    return d, w, x, wide


@pytest.mark.parametrize("row", KERNELS_W4A8)
@pytest.mark.parametrize(("n", "k"), [(512, 1024), (1000, 2880)])
def test_w4a8_bad_values_stay_in_their_rows(row, n, k):
    """The scale of a row comes of that row alone. One with NaN or infinity is NaN throughout: infinity / infinity goes into every sum."""
    d, w, x, _ = fp8_layer(row, n, k)
    m = len(x)
    clean = d(x)
    assert clean.isfinite().all()
    for bad, rows in turns(x):
        poison(m * n + m * k)
        y = d(bad)
        rest = [i for i in range(m) if i not in rows]
        assert torch.equal(y[rest], clean[rest])
        assert not (bad[rows].double() @ w.T).isfinite().any()
        assert y[rows].isnan().all()


@pytest.mark.parametrize("row", KERNELS_W4A8)
def test_w4a8_rows_of_any_size(row):
    """Rows of zeros are zeros; next to them rows of the largest and of the smallest numbers of bf16, as exact as any."""
    d, w, x, wide = fp8_layer(row)
    m = len(x)
    sizes = (0.0, 3.0e38, 1e30, 1e-30, 1e-37, 2.0**-130)
    for first in range(0, len(sizes), m):
        top = x.float().abs().amax(-1, keepdim=True)
        x2 = x.clone()
        for i, size in enumerate(sizes[first : first + m]):
            x2[-1 - i] = (x[-1 - i].float() / top[-1 - i] * size).bfloat16()
        poison(m * d.n)
        y = d(x2, None, torch.float32)
        q, xs = quantised(d, x2, wide)
        x8 = q[:, : d.k].double() * xs.double()
        want, size = x8 @ w.T, x8.abs() @ w.abs().T
        fits = size < 1e38
        assert fits[:, 0].sum() >= m - 1
        # below the smallest normal number fp32 rounds to multiples of 2^-149
        assert ((y.double() - want).abs() <= size * W4A8_BOUND + 2.0**-148)[fits].all()
        over = want.abs() - size * W4A8_BOUND > 3.41e38
        assert torch.equal(y[over], torch.copysign(torch.full_like(y, INF), want.float())[over])
        assert not y.isnan().any()
        if first == 0:
            assert (y[-1] == 0).all()


@pytest.mark.parametrize("row", KERNELS_W4A8)
def test_w4a8_graph_replay_empty_x_and_poison(row):
    d, _, x, _ = fp8_layer(row)
    first = d(x)
    poison(2 * len(x) * (d.n + d.k))
    assert torch.equal(first, d(x))
    assert d(x[:0]).shape == (0, d.n)
    replay(d, len(x))


@pytest.mark.parametrize("frag", [False, True])
def test_w4a8_quantiser_of_bad_and_extreme_rows(frag):
    """Byte for byte the formula: an infinite row has scale infinity, NaN where x is infinite, else 0; its neighbours know nothing of it."""
    d, _, x = w4a8(64, 1024, 300, False)
    clean, scales = quantised(d, x, frag)
    x = x.clone()
    x[0, 0], x[150, 77], x[299, 1023] = INF, -INF, NAN
    x[3], x[4], x[5], x[6] = 3.0e38, 1e-38, 2.0**-133, 0.0
    q, xs = quantised(d, x, frag)
    h = x.float().cpu()
    top = h.abs().amax(-1, keepdim=True)
    want = torch.where(top == 0, 1.0, top) / torch.full_like(top, 448.0)
    assert torch.equal(xs.cpu().isnan(), want.isnan())
    assert torch.equal(xs.cpu().nan_to_num(0.0, INF), want.nan_to_num(0.0, INF))
    x8 = (h / want).to(torch.float8_e4m3fn).float()
    q, clean = q.float().cpu(), clean.float().cpu()
    assert torch.equal(q.isnan(), x8.isnan())
    assert torch.equal(q.nan_to_num(), x8.nan_to_num())
    rest = [i for i in range(300) if i not in (0, 3, 4, 5, 6, 150, 299)]
    assert torch.equal(q[rest], clean[rest])
    assert torch.equal(xs[rest], scales[rest])


@pytest.mark.parametrize("m", [0, 1, 7, 16, 40, 100, 300])
def test_w4a8_bad_values_by_the_public_road(m):
    """prepare(act="fp8") and matmul with x of three dimensions: what the table picks for each m."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 tensor cores need SM89 or newer")
    codes, scale, _, w = weight(272, 1056, 32, scales=(115, 122))
    p = fp4.prepare(fp4.QuantizedTensor(format="mxfp4", codes=codes, scale=scale), backend="triton", act="fp8")
    assert isinstance(p.bind(), Dense8)
    x = torch.randn(2, m, 1056, device="cuda", dtype=torch.bfloat16)
    clean = fp4.matmul(x, p)
    assert clean.shape == (2, m, 272)
    if not m:
        return
    error = (clean.double() - x.double() @ w.T).norm() / (x.double() @ w.T).norm()
    assert error < 0.04  # e4m3 rounds x by 2^-4 at most, by 2.6% as a root of mean squares
    x[1, m // 2, 3], x[0, m - 1, 1055] = INF, NAN
    y = fp4.matmul(x, p)
    good = torch.ones(2, m, dtype=torch.bool, device="cuda")
    good[1, m // 2] = good[0, m - 1] = False
    assert torch.equal(y[good], clean[good])
    assert y[~good].isnan().all()


def test_w4a16_bad_values_by_the_public_road():
    codes, scale, second, w = weight(272, 1056, 16)
    p = fp4.prepare(fp4.QuantizedTensor(format="nvfp4", codes=codes, scale=scale, global_scale=second), backend="triton")
    d = bind(codes, scale, second, 16)
    for m in (1, 16, 100):
        x = torch.randn(m, 1056, device="cuda", dtype=torch.bfloat16)
        x[-1, 7] = -INF
        y = fp4.matmul(x, p)
        assert torch.equal(y[:-1], d(x)[:-1])
        want = x[-1].double() @ w.T
        assert torch.equal(y[-1].double().nan_to_num(3.0, 1.0, -1.0), want.nan_to_num(3.0, 1.0, -1.0))
