"""What reaches a backend's callable, and arguments of the layer verbs that are no tensor, no dtype, no range or no rank."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from layer_cases import random_weight

import fp4
from fp4.gpu import registry
from fp4.gpu.backends import reference
from fp4.gpu.registry import No, Ok
from fp4.gpu.storage import Stored
from fp4.prepared import Prepared, PreparedMoE

X = torch.linspace(-2, 2, 128).view(2, 64).bfloat16()
IDS, ONES = torch.tensor([[0, 3], [2, 1]]), torch.ones(2, 2)


@pytest.fixture
def linear() -> Prepared:
    return fp4.prepare(random_weight(1, "nvfp4", 48, 64))


def layer(**more: Any) -> PreparedMoE:
    w13, w2 = random_weight(1, "mxfp4", 4, 64, 64), random_weight(2, "mxfp4", 4, 64, 32)
    return fp4.prepare_moe(w13, w2, **{"gate_up": "gate_up", **more})


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """A backend that keeps what it is called with, as a kernel would get it: addresses and sizes."""
    calls: list[tuple[Any, ...]] = []

    def run(prepared: Any) -> Callable[..., torch.Tensor]:
        real = reference.run(prepared)

        def call(*args: Any) -> torch.Tensor:
            calls.append(args)
            return real(*args)

        return call

    module = types.SimpleNamespace(
        name="recorder", probe=lambda: Ok(), supports=lambda problem: Ok(1), layouts=reference.layouts, run=run
    )  # fmt: skip
    monkeypatch.setattr(registry, "_discover", lambda: iter({"recorder": module}.items()))
    registry.reset()
    yield calls
    monkeypatch.undo()
    registry.reset()


@pytest.mark.parametrize("bias", [torch.arange(96.0)[::2], torch.tensor([3.0]).expand(48), torch.arange(96.0).view(48, 2)[:, 1]])
def test_a_strided_bias_is_dense_for_the_kernel(recorder: list[Any], bias: torch.Tensor) -> None:
    """Kernels read n elements from the bias's address: a view with gaps would be misread, an expanded one read out of bounds."""
    w = fp4.prepare(random_weight(1, "nvfp4", 48, 64))
    y = fp4.matmul(X, w, bias)
    (_, got, _) = recorder[-1]
    assert got.is_contiguous()
    assert torch.equal(got, bias)
    assert torch.equal(y, fp4.matmul(X, w, bias.clone()))


def test_everything_that_a_kernel_reads_is_dense(recorder: list[Any]) -> None:
    ex = layer(bias13=torch.ones(1, 64).expand(4, 64), bias2=torch.ones(64, 4).T, activation=fp4.SwiGLU())
    assert all(t.is_contiguous() for t in ex.arrays.values())
    fp4.moe(X.T.contiguous().T, ex, IDS.T.contiguous().T, torch.ones(1, 1).expand(2, 2).double())
    x, ids, weights, _ = recorder[-1]
    assert x.is_contiguous()
    assert ids.is_contiguous()
    assert weights.is_contiguous()
    assert weights.dtype == torch.float32
    w = fp4.prepare_moe(
        fp4.QuantizedTensor(
            "nvfp4", *(t.new_zeros(4, 64, 64 // n) for t, n in ((IDS.byte(), 2), (IDS.byte(), 16))), torch.ones(1).expand(4)
        ),
        random_weight(2, "nvfp4", 4, 64, 32),
        gate_up="gate_up",
    )
    assert w.arrays["w13.global_scale"].is_contiguous()


def test_a_compiled_graph_gets_the_call_without_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A callable with graphs of its own offers ``direct``; an op inside a compiled graph, which has its own memory, takes that one."""
    taken: list[str] = []

    def run(prepared: Any) -> Callable[..., torch.Tensor]:
        real = reference.run(prepared)

        def named(name: str) -> Any:
            def call(*args: Any) -> torch.Tensor:
                taken.append(name)
                return real(*args)

            return call

        replayed = named("replayed")
        replayed.direct = named("direct")
        return replayed  # type: ignore[no-any-return]

    module = types.SimpleNamespace(name="replays", probe=lambda: Ok(), supports=lambda p: Ok(1), layouts=reference.layouts, run=run)
    monkeypatch.setattr(registry, "_discover", lambda: iter({"replays": module}.items()))
    registry.reset()
    ex = layer()
    want = fp4.moe(X, ex, IDS, ONES)
    assert torch.equal(torch.ops.fp4.moe(X, IDS, ONES, ex.handle, None), want)
    assert taken == ["replayed", "direct"]
    monkeypatch.undo()
    registry.reset()


def test_a_dtype_of_x_that_wants_other_bytes_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """``act_dtypes`` are those for which the backend would have stored the weight the same way."""
    plain = reference.layouts

    def layouts(problem: Any) -> Any:
        wants = plain(problem)
        return {**wants, "scale": Stored("sf_128x4")} if problem.act_dtype == torch.float16 else wants

    def supports(problem: Any) -> Any:
        return No("no float32") if problem.act_dtype == torch.float32 else Ok(1)

    module = types.SimpleNamespace(name="picky", probe=lambda: Ok(), supports=supports, layouts=layouts, run=reference.run)
    monkeypatch.setattr(registry, "_discover", lambda: iter({"picky": module}.items()))
    registry.reset()
    w = fp4.prepare(random_weight(1, "nvfp4", 48, 64))
    assert w.act_dtypes == (torch.bfloat16,)
    with pytest.raises(fp4.FormatMismatch, match=r"x is torch\.float16, backend 'picky' prepared this weight for bfloat16"):
        fp4.matmul(X.half(), w)
    monkeypatch.undo()
    registry.reset()


def test_no_slots_give_zeros_of_the_asked_type() -> None:
    for dtype in (None, torch.float32, torch.float16):
        y = fp4.moe(X, layer(), IDS[:, :0], ONES[:, :0], out_dtype=dtype)
        assert y.dtype == (dtype or X.dtype)
        assert y.shape == X.shape
        assert not y.any()


CALLS: dict[str, tuple[Callable[[Prepared, PreparedMoE], Any], str]] = {
    "no x": (lambda w, e: fp4.matmul(None, w), "matmul: x is NoneType; need a torch.Tensor"),  # type: ignore[arg-type]
    "x list": (lambda w, e: fp4.matmul([[1.0] * 64], w), "matmul: x is list"),  # type: ignore[arg-type]
    "bias list": (lambda w, e: fp4.matmul(X, w, [0.0] * 48), "matmul: bias is list"),  # type: ignore[arg-type]
    "bias float64": (lambda w, e: fp4.matmul(X, w, torch.zeros(48, dtype=torch.float64)), "bias is torch.float64"),
    "bias fp8": (lambda w, e: fp4.matmul(X, w, torch.zeros(48).to(torch.float8_e4m3fn)), "need float32, bfloat16 or float16"),
    "sparse x": (lambda w, e: fp4.matmul(X.to_sparse(), w), r"x is a sparse_coo tensor; need a dense tensor"),
    "out_dtype": (lambda w, e: fp4.matmul(X, w, out_dtype=torch.int8), "out_dtype is torch.int8; need torch.float32"),
    "out_dtype name": (lambda w, e: fp4.matmul(X, w, out_dtype="float32"), "out_dtype is 'float32'; need torch.float32"),  # type: ignore[arg-type]
    "moe no x": (lambda w, e: fp4.moe(None, e, IDS, ONES), "moe: x is NoneType"),  # type: ignore[arg-type]
    "moe no ids": (lambda w, e: fp4.moe(X, e, None, ONES), "moe: topk_ids is NoneType"),  # type: ignore[arg-type]
    "moe ids list": (lambda w, e: fp4.moe(X, e, [[0, 1], [1, 2]], ONES), "moe: topk_ids is list"),  # type: ignore[arg-type]
    "moe weights": (lambda w, e: fp4.moe(X, e, IDS, [[1.0, 1.0]] * 2), "moe: topk_weights is list"),  # type: ignore[arg-type]
    "moe int16": (lambda w, e: fp4.moe(X, e, IDS.short(), ONES), "topk_ids torch.int16"),
    "moe out_dtype": (lambda w, e: fp4.moe(X, e, IDS, ONES, out_dtype=torch.int32), "moe: out_dtype is torch.int32"),
    "handle of another weight": (lambda w, e: torch.ops.fp4.matmul(X, None, w.handle, 47, None), "made for a weight of 47 rows"),
    "handle of experts": (lambda w, e: torch.ops.fp4.matmul(X, None, e.handle, 48, None), "trace it again here"),
    "handle of a matrix": (lambda w, e: torch.ops.fp4.moe(X, IDS, ONES, w.handle, None), "the graph was made for experts"),
}


@pytest.mark.parametrize("case", list(CALLS))
def test_calls(linear: Prepared, case: str) -> None:
    call, words = CALLS[case]
    with pytest.raises(fp4.Fp4Error, match=words):
        call(linear, layer())


def test_gate_and_up_with_different_input_scales_are_refused() -> None:
    """One x feeds both: taking either scale would be a guess about the other half's calibration."""
    w2 = random_weight(2, "nvfp4", 4, 64, 32)
    gate, up = (replace(random_weight(s, "nvfp4", 4, 32, 64), input_scale=torch.full((4,), 0.01)) for s in (1, 3))
    assert torch.equal(fp4.prepare_moe((gate, up), w2).arrays["w13.input_scale"], torch.full((4,), 0.01))
    for other in (torch.tensor([0.01, 0.01, 0.02, 0.01]), None):
        with pytest.raises(fp4.FormatMismatch, match="carry different input_scale; give both the larger one"):
            fp4.prepare_moe((gate, replace(up, input_scale=other)), w2)


PREPARE: dict[str, tuple[dict[str, Any], str]] = {
    "rank of one": ({"tp": (1, 1)}, r"tp is \(1, 1\); need \(rank, size\) with 0 <= rank < size"),
    "size zero": ({"tp": (0, 0)}, r"tp is \(0, 0\)"),
    "rank too large": ({"tp": (2, 2)}, r"tp is \(2, 2\)"),
    "negative rank": ({"tp": (-1, 2)}, r"tp is \(-1, 2\)"),
    "tp int": ({"tp": 2}, "tp is 2"),
    "local of one": ({"local_experts": (2,)}, r"local_experts is \(2,\); need \(start, stop\) or range"),
    "local steps": ({"local_experts": range(0, 4, 2)}, r"local_experts is range\(0, 4, 2\)"),
    "local negative": ({"local_experts": (-2, 2)}, "outside"),
    "bias pair": ({"bias13": (torch.zeros(4, 32), torch.zeros(4, 32))}, "bias13 is tuple; need one tensor"),
    "bias list": ({"bias2": [0.0]}, "bias2 is list"),
    "device": ({"device": "gpu0"}, "device: 'gpu0' is no torch device"),
    "act_dtype": ({"act_dtype": torch.int8}, "act_dtype is torch.int8"),
    "act_dtype name": ({"act_dtype": "bf16"}, "act_dtype is 'bf16'"),
    "out_dtype": ({"out_dtype": torch.float64}, "out_dtype is torch.float64"),
}


@pytest.mark.parametrize("case", list(PREPARE))
def test_prepare(case: str) -> None:
    more, words = PREPARE[case]
    with pytest.raises(fp4.Fp4Error, match=words):
        layer(**more)


def test_weights_without_bytes() -> None:
    w = random_weight(1, "mxfp4", 64, 64)
    with pytest.raises(fp4.FormatMismatch, match="holds no bytes; load the weight first"):
        fp4.prepare(w.to("meta"))
    pair = (random_weight(1, "mxfp4", 4, 32, 64), random_weight(1, "mxfp4", 4, 32, 64).to("meta"))
    with pytest.raises(fp4.FormatMismatch, match="same format, shape and device"):
        fp4.prepare_moe(pair, random_weight(2, "mxfp4", 4, 64, 32))


@pytest.mark.parametrize("local", [(1, 3), range(1, 3)])
def test_local_experts_as_a_range(local: Any) -> None:
    """range(1, 3) unpacks into 1, 2: taken for (start, stop) it loses an expert without a word."""
    ex = layer(local_experts=local)
    assert ex.problem.local == (1, 3)
    assert ex.shape[0] == 2
    full = layer()
    mine = torch.where((IDS == 1) | (IDS == 2), 1.0, 0.0)
    torch.testing.assert_close(fp4.moe(X, ex, IDS, ONES), fp4.moe(X, full, IDS, mine))


def test_values_that_the_first_backend_cannot_hold_go_to_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The ranking sees sizes only. A forced backend still raises; one that was merely best is passed over, with its reason kept."""

    def refuse(problem: Any, weights: Any) -> Any:
        raise fp4.Unsupported("prepare: scales too wide", {"narrow": "scale byte 0x00 is 0.0 here"})

    narrow = types.SimpleNamespace(
        name="narrow", probe=lambda: Ok(), supports=lambda p: Ok(1), layouts=reference.layouts, run=reference.run, prepare=refuse
    )  # fmt: skip
    both = {"narrow": narrow, "reference": reference}
    monkeypatch.setattr(registry, "_discover", lambda: iter(both.items()))
    registry.reset()
    w = random_weight(1, "mxfp4", 48, 64)
    with caplog.at_level("WARNING", logger="fp4"):
        p = fp4.prepare(w)
    assert p.backend == "reference"
    assert "passed over: these values: scale byte 0x00 is 0.0 here" in p.explain()
    assert "narrow was passed over for reference" in caplog.text
    with pytest.raises(fp4.Unsupported, match="scales too wide"):
        fp4.prepare(w, "narrow")
    monkeypatch.setenv("FP4_BACKEND", "narrow")
    with pytest.raises(fp4.Unsupported, match="scales too wide"):
        fp4.prepare(w)
    monkeypatch.delenv("FP4_BACKEND")
    del both["reference"]
    registry.reset()
    with pytest.raises(fp4.Unsupported, match="no backend for the values") as e:
        fp4.prepare(w)
    assert "0.0 here" in e.value.reasons["narrow"]
    monkeypatch.undo()
    registry.reset()


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_plain_kernel_with_local_experts() -> None:
    """Ids are global: the plain path must know which experts it holds. float32 x takes it on a GPU too."""
    pytest.importorskip("triton", reason="the plain kernels are Triton's")
    w13, w2 = random_weight(1, "nvfp4", 4, 64, 64).to(DEVICE), random_weight(2, "nvfp4", 4, 64, 32).to(DEVICE)
    x, ids, ones = X.float().to(DEVICE), IDS.to(DEVICE), ONES.to(DEVICE)
    how = {"gate_up": "up_gate", "activation": fp4.SwiGLU(), "local_experts": (1, 3), "act_dtype": torch.float32}
    plain, want = (fp4.prepare_moe(w13, w2, backend=b, **how) for b in ("triton", "reference"))  # type: ignore[arg-type]
    assert plain.meta["path"] == "plain"
    y, z = fp4.moe(x, plain, ids, ones), fp4.moe(x, want, ids, ones)
    assert float((y - z).norm() / z.norm()) < 3e-6  # two orders of float32 sums; single elements may cancel


@pytest.mark.parametrize("calibrated", [True, False])
def test_scales_of_the_block_scaled_path(monkeypatch: pytest.MonkeyPatch, calibrated: bool) -> None:
    """x is quantised with the checkpoint's input scale where there is one, and alpha undoes exactly that scale and the weight's.

    The kernel needs Blackwell; its product is done here in torch from the very operands it is given.
    """
    pytest.importorskip("triton", reason="the kernel is Triton's")
    from fp4.gpu.kernels import block_scaled

    seen: list[Any] = []

    def product(x: Any, w: Any, alpha: torch.Tensor, bias: torch.Tensor, block: int, out: torch.dtype) -> torch.Tensor:
        a, b = (fp4.dequantize(fp4.QuantizedTensor("nvfp4", *t)) for t in (x, w))
        seen.append((x, alpha))
        return (a @ b.T * alpha + bias).to(out)

    monkeypatch.setattr(block_scaled, "matmul", product)
    q = random_weight(1, "nvfp4", 48, 64)
    scale = torch.tensor(0.003)
    w = fp4.QuantizedTensor("nvfp4", q.codes, q.scale, q.global_scale, input_scale=scale if calibrated else None)
    p = fp4.prepare(w, "triton", device="sm120", act="nvfp4")
    assert p.meta["path"] == "block_scaled"
    bias = torch.linspace(-1, 1, 48)
    y = p.bind()(X, bias, torch.float32)
    xq = fp4.quantize(X, "nvfp4", global_scale=scale if calibrated else None)
    assert torch.equal(seen[0][0][0], xq.codes)
    torch.testing.assert_close(y, fp4.dequantize(xq) @ fp4.dequantize(q).T + bias, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["x", "bias", "x of experts", "weights", "quantize"])
def test_the_negative_bit_is_not_overlooked(name: str) -> None:
    """``z.conj().imag`` is a view whose memory holds the other sign; a kernel that reads the memory gave -y, the CPU a raw error. The
    stand-ins look at nothing, as kernels do."""
    linear = fp4.prepare(fp4.quantize(torch.randn(96, 64), "nvfp4"))
    ex = fp4.prepare_moe(*(fp4.quantize(torch.randn(2, 64, k), "mxfp4") for k in (64, 32)), gate_up="gate_up")
    for p in (linear, ex):
        object.__setattr__(p, "_call", lambda x, *rest: x.new_zeros(x.shape[0], 96))
    x, ids, weights = torch.randn(3, 64), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    calls = {
        "x": lambda: fp4.matmul(torch._neg_view(torch.randn(3, linear.shape[1])), linear),
        "bias": lambda: fp4.matmul(torch.randn(3, linear.shape[1]), linear, torch._neg_view(torch.randn(linear.n))),
        "x of experts": lambda: fp4.moe(torch._neg_view(x), ex, ids, weights),
        "weights": lambda: fp4.moe(x, ex, ids, torch._neg_view(weights)),
        "quantize": lambda: fp4.quantize(torch.randn(2, 64, dtype=torch.complex64).conj().imag),
    }
    with pytest.raises(fp4.FormatMismatch, match="resolve_neg"):
        calls[name]()


def test_the_way_out_can_be_gone(linear: Prepared) -> None:
    """Advice that the next call refuses is none."""
    for dtype in (torch.int64, torch.float64, torch.bool):
        with pytest.raises(fp4.FormatMismatch, match=r"cast x$"):
            fp4.matmul(torch.ones(3, linear.shape[1], dtype=dtype), linear)
    with pytest.raises(fp4.FormatMismatch, match=r"call \.restore\(\) first"):
        fp4.dequantize(linear)  # type: ignore[arg-type]
