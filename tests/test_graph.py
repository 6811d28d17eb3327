"""On a GPU: every backend that says it serves a layer here computes what the reference does, and does it inside a CUDA graph.

Which backends run depends on the machine; the test's name says which one. Graph captures replay with new activations and a new spread
of tokens over experts, and the allocator is filled with NaN first, so that nothing leans on memory that happened to be zero.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fp4
from fp4.gpu import registry
from fp4.gpu.backends._triton_kernels_replay import Replay
from fp4.gpu.device import Device
from fp4.gpu.problem import Problem
from fp4.prepared import Prepared, PreparedMoE
from fp4.tensor import QuantizedTensor

pytestmark = pytest.mark.gpu

OSS = fp4.SwiGLU()
HERE = Device.of("cuda") if torch.cuda.is_available() else Device.of("cpu")
LINEAR = {"nvfp4": (1536, 1024), "mxfp4": (2880, 2880), "nvfp4 ragged": (1000, 528)}
LAYERS: dict[str, dict[str, Any]] = {
    "gpt-oss": {"fmt": "mxfp4", "experts": 32, "hidden": 2880, "inter": 2880, "order": "interleaved", "act": OSS, "slots": 4},
    "local": {"fmt": "mxfp4", "experts": 16, "hidden": 1024, "inter": 512, "order": "gate_up", "act": OSS, "slots": 3, "local": (4, 9)},
    "nvfp4": {"fmt": "nvfp4", "experts": 8, "hidden": 768, "inter": 576, "order": "up_gate", "act": fp4.SiLU(), "slots": 2},
    "pair": {"fmt": "nvfp4", "experts": 8, "hidden": 512, "inter": 256, "order": None, "act": fp4.SiTU(), "slots": 2},
}


def weight(seed: int, fmt: str, *shape: int, global_scale: bool = True) -> QuantizedTensor:
    g = torch.Generator(device="cuda").manual_seed(seed)
    block, low, high = {"mxfp4": (32, 118, 124), "nvfp4": (16, 0x28, 0x48)}[fmt]
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device="cuda", generator=g)
    scale = torch.randint(low, high, (*shape[:-1], shape[-1] // block), dtype=torch.uint8, device="cuda", generator=g)
    second = torch.rand(shape[:-2], device="cuda", generator=g) / 8 + 0.01 if fmt == "nvfp4" and global_scale else None
    return QuantizedTensor(fmt, codes, scale, second)


def usable(problem: Problem) -> list[str]:
    """Backends with an Ok; asked at collection, so that each is a test of its own."""
    if not torch.cuda.is_available():
        return ["none"]
    return [c.name for c in registry.rank(problem) if c.verdict]


def linear_cases() -> list[tuple[str, str]]:
    out = []
    for case, (n, k) in LINEAR.items():
        p = Problem("matmul", case.split()[0], HERE, n=n, k=k, global_scales="tensor" if "nvfp4" in case else "none")
        out += [(case, backend) for backend in usable(p)]
    return out


def layer_cases() -> list[tuple[str, str]]:
    out = []
    for case, c in LAYERS.items():
        scales = "gate_up" if c["order"] is None else "expert" if c["fmt"] == "nvfp4" else "none"
        p = Problem(
            "moe", c["fmt"], HERE, experts=c["experts"], hidden=c["hidden"], intermediate=c["inter"], activation=c["act"],
            gate_up=c["order"] or "gate_up", local=c.get("local"), global_scales=scales, bias=True,
        )  # fmt: skip
        out += [(case, backend) for backend in usable(p)]
    return out


def make_linear(case: str, backend: str) -> tuple[Prepared, Prepared]:
    n, k = LINEAR[case]
    w = weight(n, case.split()[0], n, k)
    return fp4.prepare(w, backend), fp4.prepare(w, "reference")


def make_layer(case: str, backend: str) -> tuple[PreparedMoE, PreparedMoE]:
    c = LAYERS[case]
    e, h, i = c["experts"], c["hidden"], c["inter"]
    if c["order"] is None:
        w13: Any = (weight(1, c["fmt"], e, i, h), weight(2, c["fmt"], e, i, h))
    else:
        w13 = weight(1, c["fmt"], e, 2 * i, h)
    w2 = weight(3, c["fmt"], e, h, i)
    g = torch.Generator(device="cuda").manual_seed(4)
    kw = {
        "gate_up": c["order"], "activation": c["act"], "local_experts": c.get("local"), "topk": c["slots"],
        "bias13": torch.randn(e, 2 * i, device="cuda", generator=g).bfloat16(), "bias2": torch.randn(e, h, device="cuda", generator=g),
    }  # fmt: skip
    return fp4.prepare_moe(w13, w2, backend=backend, **kw), fp4.prepare_moe(w13, w2, backend="reference", **kw)


def tokens(case: str, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    c = LAYERS[case]
    g = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(rows, c["hidden"], device="cuda", generator=g).bfloat16()
    logits = torch.randn(rows, c["experts"], device="cuda", generator=g) * (1 + seed % 3)
    w, ids = torch.topk(torch.softmax(logits, -1), c["slots"])
    return x, ids.int() if seed % 2 else ids, w


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm()) if bool(torch.isfinite(got).all()) else float("inf")


def poison() -> None:
    """Leave NaN in what the allocator hands out next."""
    blocks = [torch.full((1 << 24,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(8)]
    blocks += [torch.full((n,), 0xFF, dtype=torch.uint8, device="cuda") for n in (512, 4096, 65536, 1 << 20) for _ in range(4)]
    del blocks


#: W4A16 rounds a linear result once (2^-9), a MoE's intermediate and slots too; a backend that quantises activations says so in its note
BOUND = {"matmul": 3e-3, "moe": 6e-3}
COARSE = 0.2


def bound(w: Any) -> float:
    note = next((c.verdict.note for c in registry.rank(w.problem) if c.name == w.backend and c.verdict), "")
    return COARSE if "activations" in note and "16-bit" not in note else BOUND[w.problem.op]


@pytest.mark.parametrize(("case", "backend"), linear_cases())
def test_linear(case: str, backend: str) -> None:
    w, ref = make_linear(case, backend)
    bias = torch.randn(w.n, device="cuda")
    for rows in (1, 2, 16, 17, 64, 200, 1030):
        x = torch.randn(rows, w.shape[1], device="cuda").bfloat16()
        poison()
        y = fp4.matmul(x, w, bias)
        assert error(y, fp4.matmul(x, ref, bias)) < bound(w), rows
        assert torch.equal(y, fp4.matmul(x, w, bias)), "run to run"
    for dtype in set(w.act_dtypes) - {torch.bfloat16}:
        x = torch.randn(5, w.shape[1], device="cuda", dtype=dtype)
        assert error(fp4.matmul(x, w, out_dtype=torch.float32), fp4.matmul(x, ref, out_dtype=torch.float32)) < bound(w), dtype
    r, q = w.restore(), ref.restore()
    assert torch.equal(r.codes, q.codes)
    assert torch.equal(r.scale, q.scale)


@pytest.mark.parametrize(("case", "backend"), layer_cases())
def test_layer(case: str, backend: str) -> None:
    w, ref = make_layer(case, backend)
    for seed, rows in enumerate((1, 3, 16, 70, 300)):
        args = tokens(case, rows, seed)
        poison()
        y = fp4.moe(args[0], w, *args[1:])
        assert error(y, fp4.moe(args[0], ref, *args[1:])) < bound(w), rows
        assert torch.equal(y, fp4.moe(args[0], w, *args[1:])), "run to run"
    assert getattr(w.bind(), "failed", None) is None, "a capture of the backend failed"
    x, ids, gates = tokens(case, 8, 0)
    ids[2], ids[5, 0] = -1, 10_000  # a token with no expert at all, a slot far out of range
    assert error(fp4.moe(x, w, ids, gates), fp4.moe(x, ref, ids, gates)) < bound(w)
    (a, b), (c, d) = w.restore(), ref.restore()
    for s, t in [*(zip(a, c, strict=True) if isinstance(a, tuple) else [(a, c)]), (b, d)]:
        assert torch.equal(s.codes, t.codes)
        assert torch.equal(s.scale, t.scale)


@pytest.mark.parametrize(("case", "backend"), [c for c in linear_cases() if c[1] != "reference"])
def test_linear_in_a_graph(case: str, backend: str) -> None:
    w, _ = make_linear(case, backend)
    fp4.warmup(w, 64)
    for rows in (1, 16, 64):
        x = torch.randn(rows, w.shape[1], device="cuda").bfloat16()
        fp4.matmul(x, w)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fp4.matmul(x, w)
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
            assert torch.equal(y, fp4.matmul(x, w))


@pytest.mark.parametrize(("case", "backend"), [c for c in layer_cases() if c[1] != "reference"])
def test_layer_in_a_graph(case: str, backend: str) -> None:
    w, _ = make_layer(case, backend)
    fp4.warmup(w, 64)
    for rows in (1, 16, 64):
        x, ids, gates = tokens(case, rows, 1)
        fp4.moe(x, w, ids, gates)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fp4.moe(x, w, ids, gates)
        for seed in (3, 5, 7):
            new = tokens(case, rows, seed)
            for old, fresh in zip((x, ids, gates), new, strict=True):
                old.copy_(fresh)
            if seed == 7:
                ids.fill_(int(LAYERS[case].get("local", (0, 1))[0]))  # every token to one expert
            poison()
            graph.replay()
            assert torch.equal(y, fp4.moe(x, w, ids, gates)), (rows, seed)


def test_a_failed_capture_leaves_the_device_usable() -> None:
    """The call falls back to the library's own, and the caller's random numbers go on."""

    def call(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.dtype) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()  # not permitted there
        return x.to(out)

    replayed = Replay(call)
    args = torch.randn(3, 8, device="cuda"), torch.zeros(3, 1, dtype=torch.int32, device="cuda"), torch.ones(3, 1, device="cuda")
    assert torch.equal(replayed(*args, torch.float32), args[0])
    with pytest.warns(UserWarning, match="cannot be captured"):
        assert torch.equal(replayed(*args, torch.float32), args[0])
    assert torch.equal(replayed(*args, torch.float32), args[0])
    assert replayed.failed
    assert torch.isfinite(torch.randn(5, device="cuda")).all()
    again = Replay(lambda x, ids, weights, out: x.to(out) + 1)  # on the same stream
    for _ in range(3):
        assert torch.equal(again(*args, torch.float32), args[0] + 1)
    assert again.plans
    assert again.failed is None
    assert torch.isfinite(torch.randn(5, device="cuda")).all()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor(mode: str) -> None:
    w, _ = make_linear("nvfp4", registry.rank(Problem("matmul", "nvfp4", HERE, n=1536, k=1024)).best or "reference")
    e, _ = make_layer("nvfp4", registry.rank(Problem("moe", "nvfp4", HERE, activation=fp4.SiLU())).best or "reference")

    def f(x: torch.Tensor, a: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(fp4.matmul(x, w)) + 1, fp4.moe(a * 2, e, ids, gates)

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, mode=mode)
    for seed in range(4):
        a, ids, gates = tokens("nvfp4", 16, 2 * seed)
        x = torch.randn(16, 1024, device="cuda").bfloat16()
        for got, want in zip(compiled(x, a, ids, gates), f(x, a, ids, gates), strict=True):
            torch.testing.assert_close(got, want)


def test_wrong_place() -> None:
    w, _ = make_linear("nvfp4", "triton")
    with pytest.raises(fp4.LayoutMismatch, match="x is on cpu, the weight was prepared on cuda:0"):
        fp4.matmul(torch.zeros(1, 1024, dtype=torch.bfloat16), w)
    moved = replace(w, arrays={n: t.cpu() for n, t in w.arrays.items()})
    with pytest.raises(fp4.LayoutMismatch, match="and are on CPU; prepare again there"):
        fp4.matmul(torch.zeros(1, 1024, dtype=torch.bfloat16), moved)
    other = replace(w, problem=replace(w.problem, device=replace(Device.of("sm75"), index=0)))
    with pytest.raises(fp4.LayoutMismatch, match="prepared for SM75"):
        fp4.matmul(torch.zeros(1, 1024, dtype=torch.bfloat16, device="cuda"), other)


def test_prepare_moves_experts_one_by_one() -> None:
    """Weights on the host go to the device as they are stored: no second copy of the layer there."""
    c = LAYERS["gpt-oss"]
    w13, w2 = (q.to("cpu") for q in (weight(1, "mxfp4", 32, 5760, 2880), weight(2, "mxfp4", 32, 2880, 2880)))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    p = fp4.prepare_moe(w13, w2, gate_up=c["order"], activation=OSS, device="cuda")
    grown = torch.cuda.max_memory_allocated() - before
    assert p.device.type == "cuda"
    assert grown < 1.2 * p.nbytes + (64 << 20), (grown, p.nbytes)


@pytest.mark.parametrize("stored", [None, "sf_128x4"])
@pytest.mark.parametrize("given", [None, 0.01, "tensor", "per_expert"])
@pytest.mark.parametrize("recipe", ["default", "te", "compressed_tensors"])
def test_quantize_is_captured(recipe: str, given: Any, stored: str | None) -> None:
    """No value is read back and nothing comes from the host: a replay quantises what x holds then."""
    x = torch.randn(2, 130, 256, device="cuda", dtype=torch.bfloat16)
    g = torch.tensor([0.01, 0.02], device="cuda") if given == "tensor" else given

    def run() -> tuple[torch.Tensor, ...]:
        q = fp4.quantize(x, "nvfp4", recipe, g, scale_layout=stored)
        return q.codes, q.scale if stored is None else q.scale.data, q.global_scale

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    x.copy_(torch.randn_like(x) * 3)
    want = run()
    graph.replay()
    torch.cuda.synchronize()
    for got, expected in zip(out, want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_dequantize_and_to_layout_are_captured(fmt: str) -> None:
    q, other = (weight(seed, fmt, 2, 130, 256) for seed in (1, 2))

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return fp4.dequantize(q, torch.bfloat16), fp4.to_layout(q.scale, "sf_128x4").data

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for name in ("codes", "scale", "global_scale"):
        if getattr(q, name) is not None:
            getattr(q, name).copy_(getattr(other, name))
    want = run()
    graph.replay()
    torch.cuda.synchronize()
    for got, expected in zip(out, want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.sm90
@pytest.mark.parametrize("m", [1, 64, 300])
def test_fp8_activations_in_a_graph(m: int) -> None:
    """W4A8: the scale of each token is taken on the device, in the replay too."""
    w = fp4.prepare(weight(3, "mxfp4", 1024, 2048), act="fp8")
    fp4.warmup(w, 300)
    x = torch.randn(m, 2048, device="cuda").bfloat16()
    bias = torch.randn(1024, device="cuda")
    fp4.matmul(x, w, bias)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fp4.matmul(x, w, bias)
    x.copy_(torch.randn_like(x) * 5)
    want = fp4.matmul(x, w, bias)
    graph.replay()
    torch.cuda.synchronize()
    assert y.shape == (m, 1024)
    assert torch.equal(y, want)
