"""Grouped 4-bit products on a GPU against the float64 reference: every plan, ragged sizes, routing edge cases, graphs, NaN, poison."""

from __future__ import annotations

import pytest
import torch

from fp4.formats import MXFP4, NVFP4
from fp4.gpu.kernels import grouped, grouped_plan, grouped_run
from fp4.gpu.kernels.grouped_plan import Plan
from fp4.ref.activation import ReLU2, SiLU, SiTU, SwiGLU
from fp4.ref.moe import moe
from fp4.tensor import QuantizedTensor

#: a kernel that hangs ends its process, not the run
pytestmark = [pytest.mark.gpu, pytest.mark.kernel, pytest.mark.timeout(100, method="thread")]

#: relative Frobenius error: the intermediate and the result are each rounded to 16 bits, pair rows too when there are many
BOUND = {torch.bfloat16: 3.2e-3, torch.float16: 4.5e-4}


def plans() -> list[Plan]:
    """All that ``choose`` can pick on this GPU, those of most rows last."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    return [p for _, p in grouped_plan.plans(capability)]


def name(p: Plan) -> str:
    return f"{p.kernel}-{p.mt}"


def some(most: int = 999, layer: str = "mx") -> pytest.MarkDecorator:
    """Parametrises ``plan``, of blocks up to ``most`` rows. A group a plan and layer (``-n 8 --dist loadgroup``): it compiles once."""
    each = [pytest.param(p, id=name(p), marks=pytest.mark.xdist_group(f"{name(p)}-{layer}")) for p in plans() if p.mt <= most]
    return pytest.mark.parametrize("plan", each)


def few(layer: str) -> pytest.MarkDecorator:
    """The smallest plan of every kernel."""
    first = {p.kernel: p for p in reversed(plans())}.values()
    each = [pytest.param(p, id=name(p), marks=pytest.mark.xdist_group(f"{name(p)}-{layer}")) for p in first]
    return pytest.mark.parametrize("plan", each)


def weights(fmt, e, n, k, seed, second=None):
    g = torch.Generator(device="cuda").manual_seed(seed)
    codes = torch.randint(0, 256, (e, n, k // 2), dtype=torch.uint8, device="cuda", generator=g)
    # every NVFP4 byte of a finite, non-negative scale up to 30, zero and subnormals included; ten binades of MXFP4
    low, high = (0, 0x5F) if fmt is NVFP4 else (114, 124)
    scale = torch.randint(low, high, (e, n, k // fmt.block), dtype=torch.uint8, device="cuda", generator=g)
    return QuantizedTensor(fmt, codes, scale, second)


class Layer:
    def __init__(self, fmt=MXFP4, e=8, h=576, i=320, act=None, order="interleaved", bias=True, first=0, total=None, halves=False):
        torch.manual_seed(e * h + i)
        self.act = act or SwiGLU()
        self.order = order if self.act.gated else None
        n = i * (2 if self.act.gated else 1)
        nv = fmt is NVFP4
        g13 = torch.rand(e, device="cuda") * 0.02 + 0.001 if nv else None
        g2 = torch.rand(e, device="cuda") * 0.02 + 0.001 if nv else None
        self.bias13 = torch.randn(e, n, device="cuda") * 0.1 if bias else None
        self.bias2 = torch.randn(e, h, device="cuda") * 0.1 if bias else None
        self.w13, self.w2 = weights(fmt, e, n, h, 1, None if halves else g13), weights(fmt, e, h, i, 2, g2)
        self.local, self.total, self.h = range(first, first + e), total or e, h
        self.ref13, scales = self.w13, None
        if halves:
            from fp4.prepared import split_gate_up

            scales = torch.stack((g13, g13 * 1.37), 1).contiguous()
            self.ref13 = split_gate_up(self.w13, self.order, scales)
        self.g = grouped.prepare(
            self.w13,
            self.w2,
            gate_up=self.order,
            activation=self.act,
            bias13=self.bias13,
            bias2=self.bias2,
            gate_up_scale=scales,
            first=first,
        )

    def inputs(self, t, k, dtype=torch.bfloat16, seed=0):
        torch.manual_seed(seed + t)
        x = torch.randn(t, self.h, device="cuda").to(dtype) * (1.0 if dtype == torch.bfloat16 else 0.05)
        ids = torch.rand(t, self.total, device="cuda").argsort(1)[:, :k].int()
        return x, ids, torch.rand(t, k, device="cuda")

    def reference(self, x, ids, p):
        return moe(
            x, self.ref13, self.w2, ids, p, gate_up=self.order, activation=self.act, bias13=self.bias13, bias2=self.bias2,
            local_experts=self.local, acc=torch.float64, out_dtype=torch.float64,
        )  # fmt: skip

    def check(self, x, ids, p, plan=None):
        poison()
        y = grouped_run.run(x, self.g, ids, p, out=torch.full_like(x, float("nan")), plan=plan)
        want = self.reference(x, ids, p)
        error = ((y.double() - want).norm() / want.norm().clamp_min(1e-30)).item()
        assert error < BOUND[x.dtype], f"relative error {error:.2e}"
        return y


def poison():
    """Fill freed memory with NaN bytes, so that a workspace that is read before it is written shows."""
    for size in (1 << 16, 1 << 20, 1 << 24, 1 << 26):
        torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")


@pytest.fixture(scope="module")
def mx():
    return Layer()


@pytest.fixture(scope="module")
def nv():
    return Layer(NVFP4, e=5, h=208, i=144, act=SiLU(), order="up_gate", halves=True)


@some()
def test_every_plan_mxfp4(mx, plan):
    mx.check(*mx.inputs(100, 4), plan=plan)


@some(most=96, layer="nv")
def test_every_plan_nvfp4_ragged_two_global_scales(nv, plan):
    nv.check(*nv.inputs(70, 3), plan=plan)


@pytest.mark.parametrize("t", [0, 1, 3, 17, 64, 300])
def test_token_counts_choose_their_own_plan(mx, t):
    x, ids, p = mx.inputs(t, 4)
    if t == 0:
        assert grouped_run.run(x, mx.g, ids, p).shape == (0, mx.h)
    else:
        mx.check(x, ids, p)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6, 7, 8])
def test_any_top_k(mx, k):
    mx.check(*mx.inputs(9, k))


@some()
def test_all_tokens_to_one_expert(mx, plan):
    x, ids, p = mx.inputs(150, 1)
    mx.check(x, torch.full_like(ids, 6), p, plan)


@pytest.mark.parametrize("act", [SwiGLU(alpha=1.2, beta=0.0, limit=None), SiTU(), SiTU(linear_beta=None), ReLU2()], ids=str)
@few("act")
def test_activations_and_expert_parallel_range(act, plan):
    layer = Layer(MXFP4, e=4, h=128, i=96, act=act, order="gate_up", first=2, total=8)
    x, ids, p = layer.inputs(90, 5)
    ids[3] = torch.tensor([-1, 0, 1, 6, 7], device="cuda")  # nothing local: the row must be exactly zero
    y = layer.check(x, ids, p, plan)
    assert (y[3] == 0).all()


def test_ids_of_64_bits_outside_32_bits_are_not_local(mx):
    x, ids, p = mx.inputs(5, 2)
    wide = ids.long()
    wide[1] += 2**32
    y = grouped_run.run(x, mx.g, wide, p)
    assert (y[1] == 0).all()
    assert torch.equal(y[[0, 2, 3, 4]], grouped_run.run(x, mx.g, ids, p)[[0, 2, 3, 4]])


@few("half")
def test_float16(plan):
    for fmt in (NVFP4, MXFP4):
        layer = Layer(fmt, e=4, h=288, i=96, act=SiLU(), order="gate_up", bias=False)
        layer.check(*layer.inputs(80, 2, torch.float16), plan=plan)


@few("mx")
def test_nan_and_infinity_stay_in_their_rows(mx, plan):
    x, ids, p = mx.inputs(40, 4)
    clean = grouped_run.run(x, mx.g, ids, p, plan=plan)
    bad = x.clone()
    bad[7, 3], bad[19, 100] = float("nan"), float("inf")
    y = grouped_run.run(bad, mx.g, ids, p, plan=plan)
    assert y[7].isnan().all()
    assert not y[19].isfinite().all()
    rest = [i for i in range(40) if i not in (7, 19)]
    assert torch.equal(y[rest], clean[rest])


@few("one")
def test_one_block_of_k(plan):
    """Both products have one scale block of k, far less than a kernel's step."""
    for fmt in (MXFP4, NVFP4):
        layer = Layer(fmt, e=4, h=fmt.block, i=fmt.block, act=SiLU(), order="gate_up")
        layer.check(*layer.inputs(40, 2), plan=plan)


@some()
def test_runs_are_equal(mx, plan):
    x, ids, p = mx.inputs(120, 4)
    first = grouped_run.run(x, mx.g, ids, p, plan=plan)
    for _ in range(3):
        poison()
        assert torch.equal(first, grouped_run.run(x, mx.g, ids, p, plan=plan))


@pytest.mark.parametrize("t", [2, 20, 60, 300])
def test_graph_replay_with_another_routing_equals_eager(mx, t):
    x, ids, p = mx.inputs(t, 4)
    out = torch.empty_like(x)
    grouped_run.run(x, mx.g, ids, p, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_run.run(x, mx.g, ids, p, out=out)
    for seed in (1, 2):
        x2, ids2, p2 = mx.inputs(t, 4, seed=seed)
        if seed == 2:
            ids2 = torch.full_like(ids2, 1)  # the most uneven routing
        want = grouped_run.run(x2, mx.g, ids2, p2)
        for a, b in ((x, x2), (ids, ids2), (p, p2)):
            a.copy_(b)
        graph.replay()
        assert torch.equal(out, want)


def test_gpt_oss_sizes():
    layer = Layer(MXFP4, e=4, h=2880, i=2880)
    for t in (1, 9, 30):
        layer.check(*layer.inputs(t, 4))


@few("big")
def test_offsets_beyond_2_31_elements(plan):
    """The last experts of 2^31 and more weights, w13 alone."""
    layer = Layer(MXFP4, e=132, h=2880, i=2880, bias=False)
    assert layer.w13.numel() > 1 << 31
    x, ids, p = layer.inputs(9, 3)
    ids[:, 0], ids[:, 1], ids[:, 2] = 131, 130, 0
    layer.check(x, ids, p, plan)


def test_float32_output(mx):
    x, ids, p = mx.inputs(20, 4)
    y = grouped_run.run(x, mx.g, ids, p, out=torch.empty(20, mx.h, device="cuda"))
    assert torch.equal(y.bfloat16(), grouped_run.run(x, mx.g, ids, p))


def test_public_road():
    """fp4.prepare_moe and fp4.moe reach these kernels and undo their storage."""
    import fp4

    layer = Layer(NVFP4, e=4, h=128, i=96, act=SiLU(), order="interleaved")
    ex = fp4.prepare_moe(
        layer.w13, layer.w2, gate_up="interleaved", bias13=layer.bias13, bias2=layer.bias2, activation=SiLU(), backend="triton"
    )
    assert ex.meta["path"] == "moe"
    x, ids, p = layer.inputs(33, 2)
    assert torch.equal(fp4.moe(x, ex, ids, p), grouped_run.run(x, layer.g, ids, p))
    for got, given in zip(ex.restore(), (layer.w13, layer.w2), strict=True):
        assert torch.equal(got.codes, given.codes)
        assert torch.equal(got.scale, given.scale)


def test_restore_is_bit_exact(mx, nv):
    for layer in (mx, nv):
        for got, given in zip(grouped.restore(layer.g), (layer.w13, layer.w2), strict=True):
            assert torch.equal(got.codes, given.codes)
            assert torch.equal(got.scale, given.scale)


def test_views_and_weight_dtypes(mx):
    x, ids, p = mx.inputs(6, 4)
    want = grouped_run.run(x, mx.g, ids, p)
    wide = torch.cat((x, x), 1)[:, : mx.h]
    assert torch.equal(grouped_run.run(wide, mx.g, ids, p), want)
    shifted = torch.cat((ids[:1, :1].reshape(-1), ids.reshape(-1)))[1:].view_as(ids)  # not 16-byte aligned
    assert torch.equal(grouped_run.run(x, mx.g, shifted, p), want)
    half = p.bfloat16()
    assert torch.equal(grouped_run.run(x, mx.g, ids, half), grouped_run.run(x, mx.g, ids, half.float()))


def test_bad_input_is_refused(mx):
    from fp4.errors import FormatMismatch

    x, ids, p = mx.inputs(4, 2)
    for args in ((x.float(), ids, p), (x[:, :64].contiguous(), ids, p), (x, ids.short(), p), (x, ids, p[:, :1])):
        with pytest.raises(FormatMismatch):
            grouped_run.run(args[0], mx.g, args[1], args[2])
