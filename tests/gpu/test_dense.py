"""Dense W4A16 kernels on a GPU, against fp64 products of the exactly dequantised weight."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fp4.gpu.kernels import frag
from fp4.gpu.kernels.dense import table
from fp4.gpu.kernels.dense_fp8 import Few, hopper_table
from fp4.gpu.kernels.dense_plans import CONDITIONS
from fp4.layouts import layouts

pytestmark = [pytest.mark.gpu, pytest.mark.kernel]

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
#: relative Frobenius error of rounding to the output type, with room for fp32 accumulation
BOUND = {torch.bfloat16: 2.6e-3, torch.float16: 3.5e-4, torch.float32: 2e-6}
#: W4A8, error of an element over the sum of its terms' magnitudes: sums of 32 products with 14 bits, added up over k
W4A8_BOUND = 2e-3


def weight(n, k, block, seed=0, scales=None, device="cuda"):
    """(codes u8 [n, k/2], scale bytes u8 [n, k/block], global scale or None, fp64 values [n, k])."""
    g = torch.Generator(device=device).manual_seed(seed)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device, generator=g)
    low, high = scales or ((0, 0x7F) if block == 16 else (110, 130))
    scale = torch.randint(low, high, (n, k // block), dtype=torch.uint8, device=device, generator=g)
    second = torch.tensor(0.0173, device=device) if block == 16 else None
    return codes, scale, second, values(codes, scale, second, block)


def values(codes, scale, second, block):
    lut = torch.tensor(E2M1, dtype=torch.float64, device=codes.device)
    v = torch.stack((lut[(codes & 15).long()], lut[(codes >> 4).long()]), -1).flatten(-2)
    s = scale.view(torch.float8_e4m3fn).double() if block == 16 else torch.exp2(scale.double() - 127)
    if block == 32:
        s = torch.where(scale == 255, torch.nan, s)
    out = v * s.repeat_interleave(block, -1)
    return out if second is None else out * second.double()


def bind(codes, scale, second, block, rows=None):
    from fp4.gpu.kernels.dense import LAYOUT, Dense, facts

    about = facts(scale, block)
    names = LAYOUT[block]
    n, k = codes.shape[0], codes.shape[1] * 2
    return Dense(layouts[names[0]].apply(codes), layouts[names[1]].apply(scale), second, n, k, block, about, rows)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def check(y, x, w, bias=None, bound=None):
    ref = x.double() @ w.T
    if bias is not None:
        ref = ref + bias.double()
    err, best = (((v.double() - ref).norm() / ref.norm()).item() for v in (y, ref.to(y.dtype)))
    # of few values one may weigh most: rounding the exact product alone is above 2.6e-3 in 3 of 100 cases of 48 values
    assert err < max(bound or BOUND[y.dtype], best + 2e-5), (err, best)


ROUTES = [
    {"kernel": "small", "WK": 8, "WN": 1, "R": 1, "U": 4, "D": 1, "XS": 99},
    {"kernel": "small", "WK": 4, "WN": 1, "R": 1, "U": 4, "D": 1, "XS": 99},
    {"kernel": "small", "WK": 4, "WN": 2, "R": 1, "U": 2, "D": 2, "XS": 4},
    {"kernel": "small", "WK": 4, "WN": 1, "R": 2, "U": 2, "D": 1, "XS": 0},
    {"kernel": "plain", "BM": 16, "R": 4, "U": 4, "NW": 4},
    {"kernel": "plain", "BM": 64, "R": 4, "U": 4, "NW": 8},
    {"kernel": "dequantize"},
    {"kernel": "wide", "BT": 64, "R": 2, "U": 4, "XS": 6, "GM": 8, "SPLIT": 3, "NW": 4, "PDL": 1},
    {"kernel": "wide", "BT": 256, "R": 1, "U": 2, "XS": 6, "GM": 8, "SPLIT": 1, "NW": 8},
]
#: and every Hopper row that the table picks, once
_PICKED = [{k: v for k, v in r.items() if k not in CONDITIONS} for r in table()["sm90"]]
ROUTES += list({str(r): r for r in _PICKED if r["kernel"] in ("wide", "ws", "tiles")}.values())
#: what else it picks for few rows of x
SMALL = [r for r in {str(r): r for r in _PICKED if r["kernel"] == "small"}.values() if r not in ROUTES]
ROUTES_W4A8 = list({str(r): r for _, _, r in hopper_table()}.values())
ROUTES_W4A8 += [Few(32, 4, 2, 2, 2, 1, 4)]
#: what no row of the table picks, each in a process of its own: one that never ends fails one test
SPECIALISED = [
    {"kernel": "ws", "BT": 128, "R": 2, "U": 2, "SK": 2, "XS": 6, "NW": 8, "CUT": 0, "PER": 1, "PDL": 1},
    {"kernel": "ws", "BT": 64, "R": 2, "U": 4, "SK": 2, "XS": 8, "NW": 8, "CUT": 2, "PER": 1},
    {"kernel": "ws", "BT": 64, "R": 1, "U": 4, "SK": 2, "XS": 6, "NW": 4, "CUT": 1, "PER": 2, "PDL": 1},
    {"kernel": "tiles", "BT": 256, "R": 1, "XS": 5, "NW": 8, "GM": 2, "HELP": 0, "PDL": 1},
    {"kernel": "tiles", "BT": 256, "R": 1, "XS": 5, "NW": 8, "GM": 1, "HELP": 1, "PDL": 1},
    {"kernel": "tiles", "BT": 256, "R": 1, "XS": 5, "NW": 8, "GM": 1, "HELP": 2, "PDL": 1},
    {"kernel": "ws8", "BT": 128, "R": 1, "SK": 1, "XS": 6, "NW": 8, "PDL": 1},
]
SHAPES = [(512, 1024), (48, 16), (100, 32), (257, 2880), (1000, 1056), (272, 8192)]


def forced(row, codes, scale, second, block):
    d = bind(codes, scale, second, block)
    d._rows = [{"m_max": None, "n_min": 0, **row}]
    return d


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("row", ROUTES, ids=lambda r: "-".join(str(v) for v in r.values()))
def test_every_route_every_shape(row, block):
    """Ragged n and k, one block of k, m from 1 up, both activation types, bias, other output types; output and memory poisoned."""
    if row["kernel"] in ("wide", "ws", "tiles") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("warp-group MMA needs a Hopper GPU (SM90)")
    every_shape(row, block)


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("row", SMALL, ids=lambda r: "-".join(str(v) for v in r.values()))
def test_rows_for_few_rows_of_x(row, block):
    every_shape(row, block, SHAPES[3:4] + SHAPES[5:])


def every_shape(row, block, shapes=SHAPES):
    ms = (1, 3, 16) if row["kernel"] == "small" else (1, 17, 130, 300)
    for i, (n, k) in enumerate(shapes):
        if k % block:
            continue
        codes, scale, second, w = weight(n, k, block, seed=i)
        d = forced(row, codes, scale, second, block)
        for j, m in enumerate(ms):
            dtype = torch.float16 if (i + j) % 3 == 2 and d.about["fp16"] else torch.bfloat16
            x = torch.randn(m, k, device="cuda", dtype=dtype)
            bias = torch.randn(n, device="cuda", dtype=dtype) * 40 if j % 2 else None
            poison = torch.full((m * n + 2 * m * k + (1 << 20),), torch.nan, device="cuda")
            del poison  # the allocator hands this memory to outputs and workspaces
            y = d(x, bias)
            check(y, x, w, bias)
            assert torch.equal(y, d(x, bias)), "two runs differ"
            if i == 0 and m != 3:
                check(d(x, None, torch.float32), x, w, bound=1e-5)


@pytest.mark.sm90
@pytest.mark.parametrize("row", SPECIALISED, ids=lambda r: "-".join(str(v) for v in r.values()))
def test_specialised_routes(row):
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    code = "import sys, json, test_dense; test_dense.specialised(json.loads(sys.argv[1]))"
    command = [sys.executable, "-c", code, json.dumps(row)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}, timeout=90)
    assert done.returncode == 0, done.stderr[-2000:]


def specialised(row):
    """One row of SPECIALISED, in this process."""
    if row["kernel"] in ("ws", "tiles"):
        cases = ((16, 512, 1024, torch.bfloat16, False), (16, 257, 2880, torch.bfloat16, True), (32, 1000, 2880, torch.float16, True))
        for block, n, k, dtype, biased in cases:
            codes, scale, second, w = weight(n, k, block, seed=n)
            d = forced(row, codes, scale, second, block)
            for m in (1, 17, 130, 300, 1100):
                x = torch.randn(m, k, device="cuda", dtype=dtype)
                bias = torch.randn(n, device="cuda", dtype=dtype) * 40 if biased else None
                poison = torch.full((m * n + 2 * m * k + (1 << 20),), torch.nan, device="cuda")
                del poison
                y = d(x, bias)
                check(y, x, w, bias)
                assert torch.equal(y, d(x, bias)), "two runs differ"
        return
    from fp4.gpu.kernels.dense_fp8 import Specialised

    one = Specialised(**{k: v for k, v in row.items() if k != "kernel"})
    for n, k in ((512, 1024), (100, 32), (257, 2880)):
        for m in (1, 17, 130, 300):
            d, w, x = w4a8(n, k, m, True)
            d._table = ((None, 0, one),)
            q, xs = quantised(d, x, True)
            x8 = q[:, :k].double() * xs.double()
            y = d(x, None, torch.float32)
            assert ((y.double() - x8 @ w.T).abs() / (x8.abs() @ w.abs().T)).max() <= W4A8_BOUND
            assert torch.equal(d(x), d(x))


@pytest.mark.parametrize("block", [16, 32])
def test_table_choice_and_empty(block):
    codes, scale, second, w = weight(512, 1024, block)
    d = bind(codes, scale, second, block)
    for m in (0, 1, 2, 8, 9, 16, 17, 33, 64, 65, 128, 256, 1000, 2100):
        x = torch.randn(m, 1024, device="cuda", dtype=torch.bfloat16)
        y = d(x)
        assert y.shape == (m, 512)
        if m:
            check(y, x, w)


@pytest.mark.parametrize("half", [False, True], ids=["bf16", "fp16"])
@pytest.mark.parametrize("m", [1, 16, 64, 256])
def test_all_scale_bytes(m, half):
    """Each e4m3 byte, zero, subnormals, negative and NaN ones included: NaN stays in its row of W; every finite row is exact."""
    codes, scale, second, _ = weight(256, 256, 16, seed=3)
    scale[:] = torch.arange(256, device="cuda", dtype=torch.uint8)[:, None]
    w = values(codes, scale, second, 16)
    x = torch.randn(m, 256, device="cuda", dtype=torch.float16 if half else torch.bfloat16)
    y = bind(codes, scale, second, 16)(x)
    nan = torch.zeros(256, dtype=torch.bool, device="cuda")
    nan[[0x7F, 0xFF]] = True
    assert y[:, nan].isnan().all()
    assert not y[:, ~nan].isnan().any()
    ref = x.double() @ w[~nan].T
    scale_of_row = ref.abs().amax(0).clamp_min(1e-30)
    assert ((y[:, ~nan].double() - ref).abs() / scale_of_row).max() < 2.0**-8
    assert (y[:, 0] == 0).all()


@pytest.mark.parametrize("m", [1, 16, 64])
def test_mxfp4_windows(m):
    """Exponents far from 127, a byte 255 (NaN), and an fp16 x whose products need the two-term split."""
    for low, high in ((0, 100), (200, 255), (100, 140), (126, 127)):
        codes, scale, _, w = weight(64, 512, 32, seed=low, scales=(low, high))
        d = bind(codes, scale, None, 32)
        for dtype in (torch.bfloat16, torch.float16):
            x = torch.randn(m, 512, device="cuda", dtype=dtype)
            y = d(x, None, torch.float32)
            ref = x.double() @ w.T
            ok = ref.abs() < 1e38
            err = ((y.double() - ref)[ok].norm() / ref[ok].norm()).item()
            assert err < 1e-5, (low, high, dtype, err)
    codes, scale, _, w = weight(64, 512, 32)
    scale[5, 3] = 255
    y = bind(codes, scale, None, 32)(torch.randn(m, 512, device="cuda", dtype=torch.bfloat16))
    assert y[:, 5].isnan().all()
    assert not y[:, torch.arange(64, device="cuda") != 5].isnan().any()


@pytest.mark.parametrize("m", [2, 16, 40, 256, 3000])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_values_stay_in_their_row(m, bad):
    codes, scale, second, _ = weight(256, 1024, 16, scales=(0x30, 0x70))
    d = bind(codes, scale, second, 16)
    x = torch.randn(m, 1024, device="cuda", dtype=torch.bfloat16)
    clean = d(x)
    x2 = x.clone()
    x2[1, 77] = bad
    y = d(x2)
    rest = torch.arange(m, device="cuda") != 1
    assert torch.equal(y[rest], clean[rest])
    assert not y[1].isfinite().any() if bad != bad else not y[1].isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_values_of_float16_stay_in_their_row(bad):
    """MXFP4 scales over more binades than fp16 has: x goes in as two bf16 terms, and inf - inf must not make a NaN of an infinity."""
    codes, scale, _, w = weight(256, 1024, 32, scales=(100, 140))
    d = bind(codes, scale, None, 32)
    assert not d.about["fp16"]
    x = torch.randn(16, 1024, device="cuda", dtype=torch.float16)
    clean = d(x, None, torch.float32)
    x[1, 77] = bad
    y = d(x, None, torch.float32)
    rest = torch.arange(16, device="cuda") != 1
    assert torch.equal(y[rest], clean[rest])
    want = x[1].double() @ w.T
    assert torch.equal(y[1].isnan(), want.isnan())
    assert torch.equal(y[1].isinf(), want.isinf())


@pytest.mark.parametrize("m", [1, 16, 64, 256, 1000, 1100])
def test_graph_replay_equals_eager(m):
    """Up to 1,024 rows, and beyond: there weights of few rows are dequantised, and the product is cuBLAS's."""
    codes, scale, second, _ = weight(1024, 2048, 16)
    d = bind(codes, scale, second, 16)
    d.warmup(m)
    x = torch.randn(m, 2048, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = d(x)
    for seed in range(3):
        x.copy_(torch.randn(m, 2048, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)))
        y.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, d(x))


def test_restore_is_bit_exact():
    for block in (16, 32):
        codes, scale, _, _ = weight(100, 1056, block, scales=(0, 256))
        for name, t in (("frag_w", codes), (frag.SCALE_LAYOUT[block], scale)):
            assert torch.equal(layouts[name].invert(layouts[name].apply(t), shape=t.shape), t)


def test_host_time():
    """One call costs little host time: measured over calls that the GPU hides."""
    import time

    codes, scale, second, _ = weight(256, 256, 16)
    d = bind(codes, scale, second, 16)
    x = torch.randn(1, 256, device="cuda", dtype=torch.bfloat16)
    for _ in range(50):
        d(x)
    torch.cuda.synchronize()
    times = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(20):
            d(x)
        times.append((time.perf_counter() - start) / 20)
        torch.cuda.synchronize()
    print(f"host time of one call: {np.median(times) * 1e6:.1f} us")
    assert np.median(times) < 60e-6


def quantised(d, x, frag):
    """What the quantiser of d writes: e4m3 [m, kt * 64] in natural k order, f32 scales [m, 1]."""
    m, width = x.shape[0], d.kt * 64
    space = torch.empty(m * (d.kt * 16 + 1), dtype=torch.int32, device="cuda")
    d.quantizer(x.dtype, frag)(x, space, m, torch.cuda.current_stream().cuda_stream)
    q = space[: m * d.kt * 16].view(torch.uint8).reshape(m, width)
    if frag:  # words (s, t) of a tile back to (t, s)
        q = q.reshape(m, -1, 4, 4, 4).transpose(2, 3).reshape(m, width)
    return q.view(torch.float8_e4m3fn), space[m * d.kt * 16 :].view(torch.float32).reshape(m, 1)


def w4a8(n, k, m, wide):
    from fp4.gpu.kernels.dense_fp8 import Dense8
    from fp4.gpu.kernels.plain_fp8 import row_base

    codes, scale, _, _ = weight(n, k, 32, seed=m, scales=(115, 122))
    scale[1] += 40
    d = Dense8(layouts["frag_w8"].apply(codes), layouts["frag_sf32"].apply(scale), row_base(scale), None, n, k, wide)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16) * torch.logspace(-3, 3, m, device="cuda")[:, None].bfloat16()
    return d, values(codes, scale, None, 32), x


@pytest.mark.parametrize("k", [1024, 32, 2880])
@pytest.mark.parametrize("frag", [False, True])
def test_w4a8_quantiser_is_the_formula(frag, k):
    """Byte for byte x / (amax / 448), both divisions IEEE. On a GPU torch divides by a Python number as a product with its reciprocal,
    which moves ties of x8 by one code (up to 2e-2 of a short dot product), so the formula runs on the CPU."""
    d, _, x = w4a8(64, k, 300, False)
    x[7] = 0
    x[8, 3] = torch.nan
    q, xs = quantised(d, x, frag)
    h = x.float().cpu()
    top = h.abs().amax(-1, keepdim=True)
    want = torch.where(top == 0, 1.0, top) / torch.full_like(top, 448.0)
    live = torch.arange(300) != 8
    assert torch.equal(xs.cpu()[live], want[live])
    assert torch.isnan(xs[8])
    x8 = (h / want).to(torch.float8_e4m3fn)
    assert torch.equal(q[:, :k].cpu().view(torch.uint8)[live], x8.view(torch.uint8)[live])
    assert (q[:, k:].cpu().view(torch.uint8)[live] == 0).all()


@pytest.mark.parametrize("wide", [pytest.param(True, marks=pytest.mark.sm90), False])
@pytest.mark.parametrize(("n", "k"), [(512, 1024), (100, 32), (257, 2880), (272, 8192)])
@pytest.mark.parametrize("m", [1, 17, 130, 300])
def test_w4a8_is_exact_but_for_the_quantised_x(m, n, k, wide):
    """Against fp64 of the very e4m3 values the kernel multiplies: only the tensor core's 14-bit sums remain.

    The bound is on each element, against the sum of magnitudes: a dot product may cancel, its terms are what the sums round.
    """
    d, w, x = w4a8(n, k, m, wide)
    q, xs = quantised(d, x, wide)
    x8 = q[:, :k].double() * xs.double()
    y = d(x, None, torch.float32)
    worst = ((y.double() - x8 @ w.T).abs() / (x8.abs() @ w.abs().T)).max().item()
    print(f"w4a8 m={m} n={n} k={k} wide={wide}: {worst:.1e}")
    assert worst <= W4A8_BOUND
    bias = torch.randn(n, device="cuda")
    assert torch.equal(d(x), d(x))
    with_bias = d(x, bias, torch.float32)
    assert torch.allclose(with_bias, y + bias, rtol=1e-5, atol=1e-3)
    assert torch.isfinite(d(torch.zeros_like(x))).all()


@pytest.mark.sm90
@pytest.mark.parametrize("row", ROUTES_W4A8, ids=lambda r: "-".join(map(str, (type(r).__name__, *r))))
def test_every_w4a8_route(row):
    """Ragged n and k, several tiles of m; a float32 output, which shortens the ring, and bf16."""
    for n, k in ((512, 1024), (100, 32), (1000, 2880)):
        for m in ((1,) if row.ONE else {1, row.MT // 2 + 1, row.MT}) if isinstance(row, Few) else (1, 130, 600):
            d, w, x = w4a8(n, k, m, True)
            d._table = ((None, 0, row),)
            q, xs = quantised(d, x, True)
            x8 = q[:, :k].double() * xs.double()
            y = d(x, None, torch.float32)
            assert ((y.double() - x8 @ w.T).abs() / (x8.abs() @ w.abs().T)).max() <= W4A8_BOUND
            assert torch.equal(d(x), y.bfloat16())
            assert torch.equal(d(x), d(x))


def test_w4a8_machine_code_for_sm89():
    """The kernel as compiled for SM89 (mma.m16n8k32): its PTX runs on any newer GPU, translated by the driver."""
    from triton.backends.compiler import GPUTarget

    from fp4.gpu.kernels import launch

    d, w, x = w4a8(272, 1024, 130, False)
    launch.compile_only(GPUTarget("cuda", 89, 32))
    kept, build = [], launch.build
    launch.build = lambda *a, **k: kept.append(build(*a, **k)) or kept[-1]
    try:
        plans = [d._plan_plain(row, torch.bfloat16, torch.float32, None) for _, _, row in d._table]
    finally:
        launch.compile_only(None)
        launch.build = build
    for kernel in kept:
        kernel.compiled.kernel = kernel.compiled.asm["ptx"].encode() + b"\0"
    q, xs = quantised(d, x, False)
    x8 = q[:, :1024].double() * xs.double()
    for plan in plans:
        y = torch.full((130, 272), torch.nan, device="cuda")
        plan(x, None, y, 130)
        assert ((y.double() - x8 @ w.T).abs() / (x8.abs() @ w.abs().T)).max() <= W4A8_BOUND


@pytest.mark.sm90
def test_fp4_matmul_uses_the_dense_path():
    """Through the public verbs: prepare, matmul, restore, explain."""
    import fp4

    codes, scale, second, w = weight(256, 512, 16)
    q = fp4.QuantizedTensor(format="nvfp4", codes=codes, scale=scale, global_scale=second)
    p = fp4.prepare(q, backend="triton")
    assert p.meta["path"] == "dense"
    x = torch.randn(3, 5, 512, device="cuda", dtype=torch.bfloat16)
    check(fp4.matmul(x, p).flatten(0, 1), x.flatten(0, 1), w)
    back = p.restore()
    assert torch.equal(back.codes, codes)
    assert torch.equal(back.scale, scale)
