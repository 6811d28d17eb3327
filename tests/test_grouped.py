"""Grouped kernels without a GPU: the routing and reduce kernels in Triton's interpreter, storage, and compilation for every target."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from ring_model import Fault
from ring_wide import simulate

from fp4.errors import FormatMismatch, Unsupported
from fp4.formats import MXFP4, NVFP4
from fp4.gpu.kernels import grouped, grouped_plan
from fp4.gpu.kernels.routing import max_blocks, reduce_kernel, route_kernel, route_reference
from fp4.ref.activation import ReLU2, SiLU, SwiGLU
from fp4.tensor import QuantizedTensor

pytestmark = pytest.mark.kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def route(ids, first, experts, block, chunk=512, light=0):
    pairs = ids.numel()
    order = torch.full((pairs + 1,), -7, dtype=torch.int32, device=DEVICE)
    sched = torch.full((1 + 3 * max_blocks(pairs, experts, block),), -9, dtype=torch.int32, device=DEVICE)
    bins = triton.next_power_of_2(experts + 1)
    route_kernel[(experts,)](ids.to(DEVICE), order, sched, pairs, first, experts, BLOCK=block, CHUNK=chunk, BINS=bins, LIGHT=light)
    return order.cpu(), sched.cpu()


@pytest.mark.parametrize(
    ("pairs", "experts", "first", "block"), [(1, 1, 0, 8), (4, 64, 0, 8), (700, 33, 20, 16), (2000, 5, 0, 64), (512, 40, 3, 16)]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_route_is_the_stable_sort(pairs, experts, first, block, dtype):
    torch.manual_seed(pairs)
    ids = torch.randint(-3, first + experts + 9, (pairs,), dtype=dtype)
    if dtype == torch.int64:
        ids[0] += 2**32  # not local, although its low 32 bits may be
    order, sched = route(ids, first, experts, block)
    want, blocks = route_reference(ids, first, experts, block)
    assert sched[0] == len(blocks)
    assert sched[1 : 1 + 3 * len(blocks)].view(-1, 3).tolist() == [list(b) for b in blocks]
    assert torch.equal(order[: len(want)], want)
    assert (order[len(want) :] == -7).all(), "entries past the last local pair are not written"


@pytest.mark.parametrize(("light", "kinds"), [(5, 1), (24, 2), (40, 2), (100, 1)])
def test_blocks_of_experts_with_many_rows_come_first(light, kinds):
    torch.manual_seed(3)
    ids = torch.cat((torch.randint(0, 9, (200,)), torch.full((50,), 4)))[torch.randperm(250)].int()
    order, sched = route(ids, 1, 8, 16, light=light)
    want, blocks = route_reference(ids, 1, 8, 16, light)
    assert torch.equal(order[: len(want)], want)
    assert sched[1 : 1 + 3 * len(blocks)].view(-1, 3).tolist() == [list(b) for b in blocks]
    rows = torch.bincount(ids.long(), minlength=9)[1:]
    assert {e for e, _, _ in blocks} == {e for e in range(8) if rows[e]}
    many = [int(rows[e]) > light for e, _, _ in blocks]
    assert many == sorted(many, reverse=True)
    assert len(set(many)) == kinds


def test_route_of_one_expert_and_of_none():
    for ids, rows in ((torch.full((300,), 2), 300), (torch.full((300,), -1), 0)):
        order, sched = route(ids, 0, 4, 64)
        assert sched[0] == -(-rows // 64)
        assert torch.equal(order[:rows], torch.arange(rows, dtype=torch.int32))


@given(st.lists(st.integers(0, 200), min_size=1, max_size=30), st.sampled_from([8, 16, 64, 128]))
def test_max_blocks_bounds_every_distribution(counts, block):
    assert sum(-(-c // block) for c in counts) <= max_blocks(max(sum(counts), 1), len(counts), block)


def test_max_blocks_is_reached():
    assert max_blocks(4, 128, 8) == 4
    assert max_blocks(64 + 3, 4, 64) == 4  # 64 + 1 + 1 + 1


@pytest.mark.parametrize("k", [1, 3, 6])
def test_reduce_adds_local_slots_in_order_and_reads_no_other(k):
    t, h = 5, 40
    torch.manual_seed(k)
    y = torch.randn(t * k, h, device=DEVICE)
    ids = torch.randint(0, 6, (t, k), dtype=torch.int32, device=DEVICE)
    local = (ids >= 2) & (ids < 4)
    y[~local.reshape(-1)] = float("nan")  # what a workspace may hold
    out = torch.full((t, h), float("nan"), device=DEVICE)
    reduce_kernel[(t, 1)](y, ids, out, 2, 2, H=h, TOPK=k, BLOCK=64)
    want = torch.zeros(t, h, device=DEVICE)
    for j in range(k):
        want += torch.where(local[:, j : j + 1], y.view(t, k, h)[:, j], 0.0)
    assert torch.equal(out, want)


def tensors(fmt, e, h, i, gated, seed=0, scales=(1, 100)):
    g = torch.Generator().manual_seed(seed)

    def one(n, k):
        codes = torch.randint(0, 256, (e, n, k // 2), dtype=torch.uint8, generator=g)
        return QuantizedTensor(fmt, codes, torch.randint(*scales, (e, n, k // fmt.block), dtype=torch.uint8, generator=g))

    return one(i * (2 if gated else 1), h), one(h, i)


@pytest.mark.parametrize(
    ("fmt", "h", "i", "act", "order"),
    [
        (MXFP4, 96, 64, SwiGLU(), "interleaved"),
        (MXFP4, 544, 32, SiLU(), "gate_up"),
        (NVFP4, 208, 144, SiLU(), "up_gate"),
        (NVFP4, 64, 48, ReLU2(), None),
    ],
)
def test_restore_and_row_order(fmt, h, i, act, order):
    w13, w2 = tensors(fmt, 3, h, i, act.gated)
    bias = torch.randn(3, w13.shape[1])
    g = grouped.prepare(w13, w2, gate_up=order, activation=act, bias13=bias)
    for got, given_ in zip(grouped.restore(g), (w13, w2), strict=True):
        assert torch.equal(got.codes, given_.codes)
        assert torch.equal(got.scale, given_.scale)
    # eight gate rows, then their eight up rows
    gate, up = {"interleaved": (0, 1), "gate_up": (0, i), "up_gate": (i, 0), None: (0, 0)}[order]
    step = 2 if order == "interleaved" else 1
    for n in range(g.n13):
        unit = n // 16 * 8 + n % 8
        row = n if order is None else (gate if n % 16 < 8 else up) + unit * step
        assert torch.equal(g.bias13[:, n], bias[:, row])
    # a word of w13 is lane order: 16 x 64 tile, row n % 16 = 8 e + g, column 16 t + 4 s + 2 h + l, as frag_w says
    from fp4.layouts import layouts

    rows = torch.stack(
        [w13.codes[1, n if order is None else (gate if n % 16 < 8 else up) + (n // 16 * 8 + n % 8) * step] for n in range(g.n13)]
    )
    assert torch.equal(g.w13[1], layouts["frag_w"].apply(rows).reshape(-1))


def test_padding_of_scales_widens_no_window():
    """Zero bytes would: float16 products of MXFP4 are exact over 24 binades only."""
    for scales in ((110, 125), (40, 55)):  # those far from 1.0 too
        w13, w2 = tensors(MXFP4, 2, 96, 64, True, scales=scales)
        g = grouped.prepare(w13, w2, gate_up="gate_up", activation=SiLU())
        assert not isinstance(g.windows[torch.float16], Exception)
    wide = tensors(MXFP4, 2, 96, 64, True, scales=(60, 125))
    assert isinstance(grouped.prepare(*wide, gate_up="gate_up", activation=SiLU()).windows[torch.float16], Unsupported)


def test_scales_reach_the_epilogue_exactly():
    w13, w2 = tensors(NVFP4, 3, 64, 48, True)
    pair = torch.tensor([[0.1, 0.2], [0.3, 0.4], [1e-5, 7.0]])
    g = grouped.prepare(w13, w2, gate_up="gate_up", activation=SiLU(), gate_up_scale=pair)
    for (alpha13, _, _), (alpha2, _, _) in (g.windows[torch.bfloat16], g.windows[torch.float16]):
        factor = (alpha13 / pair)[0, 0].item()
        assert torch.equal(alpha13, pair * factor)
        assert factor == 2.0 ** round(torch.log2(torch.tensor(factor)).item()), "a power of two"
        assert (alpha2 == alpha2[0, 0]).all()


def test_refusals():
    why = grouped.supports(format="mxfp4", hidden=100, intermediate=64, activation=SiLU(), capability=(9, 0))
    assert "hidden = 100" in why
    assert "SM75" in grouped.supports(format="mxfp4", hidden=64, intermediate=64, activation=SiLU(), capability=(7, 5))
    assert "mxfp8" in grouped.supports(format="mxfp8", hidden=64, intermediate=64, activation=SiLU(), capability=(9, 0))
    assert grouped.supports(format="nvfp4", hidden=2880, intermediate=2880, activation=SwiGLU(), capability=(8, 0)) is None
    w13, w2 = tensors(NVFP4, 2, 64, 48, True)
    with pytest.raises(FormatMismatch, match="row order"):
        grouped.prepare(w13, w2, gate_up=None, activation=SiLU())
    with pytest.raises(FormatMismatch, match="need"):
        grouped.prepare(w2, w13, gate_up="gate_up", activation=SiLU())


@pytest.mark.parametrize("cc", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_plans_cover_every_load(cc):
    plans = [p for _, p in grouped_plan.plans(cc)]
    assert all(p.large <= (cc[0] == 9) and p.overlap <= (cc[0] == 9) for p in plans)
    assert {p.kernel for p in plans} == ({"small", "large", "wide"} if cc[0] == 9 else {"small"})
    for experts in (1, 8, 128):
        chosen = [grouped_plan.choose(pairs, experts, cc) for pairs in range(1, 100 * experts, max(1, experts // 2))]
        assert list(dict.fromkeys(chosen)) == plans
        assert [p.mt for p in chosen] == sorted(p.mt for p in chosen), "more rows never take smaller blocks"


@pytest.mark.parametrize(("experts", "hidden", "topk"), [(8, 64, 2), (5, 4096, 3), (32, 2880, 4)])
def test_warmup_meets_every_set_of_kernels(experts, hidden, topk):
    from fp4.gpu.kernels import grouped_run

    def kernels(t):
        pairs = t * topk
        return grouped_plan.choose(pairs, experts, (9, 0)), pairs * hidden <= 1 << 22, grouped_run._chunk(pairs)

    for m in (1, 7, 200, 3000):
        warm = grouped_run.kinds(experts, hidden, topk, m, (9, 0))
        assert set(map(kernels, warm)) == set(map(kernels, range(1, m + 1)))
        assert len(warm) <= 10


def test_plans_of_an_expert_parallel_rank_go_by_all_experts(monkeypatch):
    """Four of 32 experts get an eighth of the pairs: 256 tokens of two slots are 16 rows an expert, not 128."""
    import contextlib
    from types import SimpleNamespace

    from fp4.gpu.backends import _triton_moe
    from fp4.gpu.kernels import grouped_run

    picked = []

    class Stub:
        at = (0,) * 6

        def __init__(self, g, *rest):
            picked.append(rest[6])

        def launch(self, *_):
            pass

    monkeypatch.setattr(grouped_run, "Chain", Stub)
    monkeypatch.setattr(grouped_run, "_capability", lambda index: (9, 0))
    monkeypatch.setattr(grouped_run, "_raw_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    w13, w2 = tensors(MXFP4, 4, 96, 64, True)
    kw = {"gate_up": "gate_up", "activation": SwiGLU()}
    made = grouped.prepare(w13, w2, first=8, total=32, **kw)
    arrays = {"w13.codes": made.w13, "w13.scale": made.s13, "w2.codes": made.w2, "w2.scale": made.s2}
    problem = SimpleNamespace(format=MXFP4, local=(8, 12), experts=32, **kw)
    bound = _triton_moe._bind(SimpleNamespace(problem=problem, shape=(4, 96, 64), arrays=arrays))
    whole = grouped.prepare(w13, w2, **kw)
    assert (made.total, bound.total, whole.total, bound.first, bound.experts) == (32, 32, 4, 8, 4)
    ids, gamma = torch.zeros(256, 2, dtype=torch.int32), torch.ones(256, 2)
    for g in (made, bound, whole):
        grouped_run.run(torch.zeros(256, 96, dtype=torch.bfloat16), g, ids, gamma)
    assert [(p.kernel, p.mt) for p in picked] == [("large", 32), ("large", 32), ("wide", 160)]
    warmed = []
    monkeypatch.setattr(grouped_run, "run", lambda x, *_: warmed.append(x.shape[0]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    grouped_run.warmup(bound, 3000, 2)
    assert sorted(set(warmed)) == grouped_run.kinds(32, 96, 2, 3000, (9, 0))


def test_wide_plans_share_the_registers_of_an_sm():
    wide = [dict(p.config) for _, p in grouped_plan.plans((9, 0)) if p.kernel == "wide"]
    assert {(f["C"], f["per"]) for f in wide} == {(2, 2), (3, 1)}
    for f in wide:
        assert f["RC"] * f["C"] + f["RP"] <= f["maxnreg"] * (f["C"] + 1)
        assert f["maxnreg"] * 128 * (f["C"] + 1) * f["per"] <= 65536
        assert all(f[n] % 8 == 0 and 24 <= f[n] <= 232 for n in ("RC", "RP", "maxnreg"))  # what setmaxnreg takes


@pytest.mark.parametrize(("t", "cc"), [(3, (9, 0)), (20, (9, 0)), (700, (9, 0)), (700, (8, 0))])
def test_launches_pass_what_the_signatures_ask(monkeypatch, t, cc):
    """The chain without a device: every launch has one value an argument, of the declared kind, and pointers lie inside the workspace."""
    import contextlib

    from fp4.gpu.kernels import grouped_run

    calls, stages = [], []

    class Stub:
        def __init__(self, fn, signature, constants):
            self.fn, self.signature, self.constants = fn, signature, constants
            #: a ring of wide slots that does not fit an SM, until it has at most four
            self.shared = 250_000 if constants.get("XS", 0) > 4 else 0
            stages.append(constants.get("XS"))

        def __call__(self, gx, gy, stream, *args):
            names = self.fn.arg_names
            assert len(args) == len(names)
            for name, value in zip(names, args, strict=True):
                if name in self.constants:
                    assert value == self.constants[name], name
                else:
                    assert isinstance(value, float if self.signature[name] == "fp32" else int), name
                    assert not name.endswith("_ptr") or value % 16 == 0, name
            assert gx > 0
            assert gy > 0
            calls.append(self.fn.__name__)

    def build(fn, signature, constants, **_):
        assert set(signature) | set(constants) == set(fn.arg_names)
        return Stub(fn, signature, constants)

    monkeypatch.setattr(grouped_run.launch, "build", build)
    monkeypatch.setattr(grouped_run, "_capability", lambda index: cc)
    monkeypatch.setattr(grouped_run, "_raw_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    w13, w2 = tensors(MXFP4, 4, 96, 64, True)
    g = grouped.prepare(w13, w2, gate_up="gate_up", activation=SwiGLU(), bias13=torch.zeros(4, 128))
    x, ids, p = torch.zeros(t, 96, dtype=torch.bfloat16), torch.zeros(t, 2, dtype=torch.int64), torch.ones(t, 2)
    out = torch.empty(t, 96)
    for _ in range(2):
        assert grouped_run.run(x, g, ids, p, out) is out
    product = "grouped_small" if cc == (8, 0) or t < 10 else "grouped_large" if t < 100 else "grouped_wide"
    order = [] if product == "grouped_small" else ["permute_rows"]
    if product == "grouped_wide":
        assert [v for v in stages if v] == [6, 5, 6, 5]
    assert calls == ["route_kernel", *order, product, product, "reduce_kernel"] * 2
    assert grouped_run.run(x[:0], g, ids[:0], p[:0]).shape == (0, 96)
    with pytest.raises(FormatMismatch, match="topk_weights"):
        grouped_run.run(x, g, ids, p[:, :1], out)
    with pytest.raises(FormatMismatch, match="x is"):
        grouped_run.run(torch.zeros(t + 1, 96, dtype=torch.bfloat16), g, ids, p, out)
    with pytest.raises(FormatMismatch, match="out"):
        grouped_run.run(x, g, ids, p, torch.empty(t, 96, dtype=torch.int32))


SCRIPT = """
import json, sys, torch
sys.path.insert(0, sys.argv[2])
import sass
from triton.backends.compiler import GPUTarget
from fp4.gpu.kernels import grouped, grouped_plan, grouped_run
from fp4.ref.activation import SwiGLU, ReLU2
arch = int(sys.argv[1]); cc = (arch // 10, arch % 10)
loops, ring = 0, {}
z, w, target = torch.zeros(64), torch.zeros(64, dtype=torch.uint8), GPUTarget("cuda", arch, 32)
plans = [p for _, p in grouped_plan.plans(cc)]
# every plan as MXFP4, SwiGLU, bf16; two as NVFP4 without a gate, fp16; those of the wide kernel with one scale block of k
cases = [(p, 32, SwiGLU(), torch.bfloat16, 1056, 288) for p in plans]
cases += [(p, 16, ReLU2(), torch.float16, 1056, 288) for p in (plans[0], plans[-3])]
cases += [(p, 32, SwiGLU(), torch.bfloat16, 32, 32) for p in plans if p.kernel == "wide"]
for plan, block, act, half, hidden, inter in cases:
    g = grouped.Grouped(block, 128, 0, hidden, inter, act, w, w, w, w, z, z, {half: ((z, 5, False),) * 2})
    c = grouped_run.Chain(g, 100, 4, half, torch.int64, torch.float32, half, plan, target)
    for i, kernel in enumerate((c.first[0], c.second[0])):
        assert kernel.shared <= 99 * 1024 or arch == 90, kernel.shared
        asm = kernel.compiled.asm
        assert ("wgmma.mma_async" in asm["ptx"]) == plan.large and ("mma.sync" in asm["ptx"]) != plan.large
        assert ("griddepcontrol.wait" in asm["ptx"]) == (arch >= 90)
        assert kernel.compiled.metadata.launch_pdl == plan.overlap
        assert kernel.shared * dict(plan.config).get("per", 1) <= 227 * 1024
        if plan.large:
            sm, bad = sass.hazards(sass.disassemble(asm["cubin"]))
            loops += sm
            assert not bad, (kernel.compiled.metadata.name, bad[:3])
        if plan.kernel == "wide":
            ring[f"{plan.mt} {block} {inter} {i}"] = asm["ttgir"]
assert (loops >= 12) == (arch == 90), loops
json.dump(ring, open(sys.argv[3], "w"))
print("compiled", arch)
"""


def compiled(arch, path):
    """Every plan that ``choose`` can pick; no register operand of a running MMA is overwritten (``sass.hazards``); shared memory fits."""
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    here = os.path.dirname(os.path.abspath(__file__))
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(arch), here, str(path)], capture_output=True, text=True, env=env, timeout=280)
    assert f"compiled {arch}" in done.stdout, done.stderr[-2000:]
    return json.loads(path.read_text())


@pytest.mark.parametrize("arch", [80, 120])
def test_compiles_for(arch, tmp_path):
    compiled(arch, tmp_path / "ttgir")


@pytest.fixture(scope="module")
def rings(tmp_path_factory):
    """Name (rows a block, scale block, which product) -> TTGIR of the wide kernels."""
    return compiled(90, tmp_path_factory.mktemp("wide") / "ttgir")


def programs(ttgir, rows, seed=0):
    """All programs over blocks of these rows, in schedules of few and of many programs; chunks taken by each."""
    found = re.search(r"%tiles_?\d* = arith.muli %tiles(?:_\d+)?, %c(\d+)_i32", ttgir)
    groups = int(found[1]) if found else 1
    sched = [len(rows), *(v for i, r in enumerate(rows) for v in (i, 0, r))]
    for blocks in {1, 3, max(1, len(rows) * groups - 1), len(rows) * groups + 2}:
        pids = range(blocks) if blocks < 4 else (0, blocks // 2, blocks - 1)
        for pid in pids:
            tiles = len(range(pid, len(rows) * groups, blocks))
            yield tiles, simulate(ttgir, sched, pid, blocks, seed + pid)


#: rows of the blocks of a schedule: none at all, one tile, blocks that fill each kind of tile exactly and by one more
ROWS = ((), (1,), (160, 1, 128, 129, 64, 65, 96, 32, 33, 48))


def test_every_wait_of_the_wide_kernel_ends(rings):
    """``ring_wide``: every program of every schedule ends, and reads what was fetched for it; K has more and fewer chunks than the ring."""
    assert len(rings) == 14
    for name, ttgir in rings.items():
        most = int(name.split()[0])
        for i, rows in enumerate(ROWS):
            each = {chunks // tiles if tiles else chunks for tiles, chunks in programs(ttgir, [min(r, most) for r in rows], i)}
            assert each <= {0, *((1,) if " 32 32 " in name else (17, 9) if name[-1] == "0" else (5, 3))}, name


#: what is broken in the first multiplying warp group -> pattern, what replaces it, how the model sees it
FAULTS = {
    "never releases": (r"ttng\.async_copy_mbarrier_arrive", "none.at_all", "nobody can go on"),
    "releases before the product ends": ("pendings = 0", "pendings = 1", "overwrites"),
    "does not wait for copies": (r"ttng\.wait_barrier", "none.at_all", "reads chunk"),
    "does not carry the slot it releases": (r"%empty\[%[\w#]+\]", "%empty[%c0_i32]", "nobody can go on|more arrivals|overwrites"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_the_model_finds_faults(what, rings):
    pattern, instead, seen = FAULTS[what]
    head, default, rest = re.split(r"(?=\n\s+default \{|\n\s+partition0)", next(t for n, t in rings.items() if n.startswith("160")))
    broken = re.sub(pattern, instead, default)
    assert broken != default
    with pytest.raises(Fault, match=seen):
        [list(programs(head + broken + rest, [160, 128, 160], seed)) for seed in range(10)]
