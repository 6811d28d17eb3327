"""torch.compile, torch.export, opcheck and gradients through fp4::matmul and fp4::moe; and what bad input gets from the layer verbs."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_cases import random_weight
from torch.fx.experimental.proxy_tensor import make_fx

import fp4
from fp4 import prepared as prepared_module
from fp4.prepared import Prepared, PreparedMoE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def linear() -> Prepared:
    return fp4.prepare(random_weight(1, "nvfp4", 48, 64).to(DEVICE))


@pytest.fixture
def experts() -> PreparedMoE:
    return moe_layer(DEVICE)


def moe_layer(where: str, **how: Any) -> PreparedMoE:
    w13, w2 = random_weight(1, "mxfp4", 4, 64, 64).to(where), random_weight(2, "mxfp4", 4, 64, 32).to(where)
    return fp4.prepare_moe(w13, w2, gate_up="interleaved", activation=fp4.SwiGLU(), **how)


def x_for(rows: int, k: int = 64, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    g = torch.Generator().manual_seed(rows)
    return torch.randn(rows, k, generator=g).to(DEVICE, dtype)


def routed(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rows)
    return torch.randint(0, 4, (rows, 2), generator=g).to(DEVICE), torch.rand(rows, 2, generator=g).to(DEVICE)


# ---- ops -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 33])
def test_opcheck(linear: Prepared, experts: PreparedMoE, rows: int) -> None:
    bias = torch.randn(48, device=DEVICE)
    ids, w = routed(rows)
    for op, args in (
        (torch.ops.fp4.matmul, (x_for(rows), None, linear.handle, 48, None)),
        (torch.ops.fp4.matmul, (x_for(rows).view(rows, 1, 64), bias, linear.handle, 48, torch.float32)),
        (torch.ops.fp4.moe, (x_for(rows), ids, w, experts.handle, None)),
        (torch.ops.fp4.moe, (x_for(rows), ids.int(), w, experts.handle, torch.float16)),
    ):
        assert set(torch.library.opcheck(op, args).values()) == {"SUCCESS"}


def test_fake_shapes_are_the_real_ones(linear: Prepared, experts: PreparedMoE) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for shape in ((3, 64), (2, 5, 64), (0, 64), (64,)):
            fake = fp4.matmul(mode.from_tensor(torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)), linear, out_dtype=torch.float32)
            assert fake.shape == (*shape[:-1], 48)
            assert fake.dtype == torch.float32
    for shape in ((3, 64), (2, 5, 64), (0, 64), (64,)):
        assert fp4.matmul(torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE), linear).shape == (*shape[:-1], 48)


def test_handle_of_a_weight_that_is_gone() -> None:
    w = fp4.prepare(random_weight(1, "nvfp4", 48, 64).to(DEVICE))
    handle = w.handle
    del w
    gc.collect()
    with pytest.raises(fp4.Fp4Error, match="keep the Prepared object alive"):
        torch.ops.fp4.matmul(x_for(1), None, handle, 48, None)


# ---- torch.compile ---------------------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """A layer as an engine would write it."""

    def __init__(self, linear: Prepared, experts: PreparedMoE) -> None:
        super().__init__()
        self.linear, self.experts = linear, experts
        self.bias = torch.nn.Parameter(torch.linspace(-1, 1, 48, device=DEVICE), requires_grad=False)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(fp4.matmul(x, self.linear, self.bias)) * 2, fp4.moe(x + 1, self.experts, ids, w)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_fullgraph_with_a_dynamic_number_of_rows(linear: Prepared, experts: PreparedMoE, backend: str) -> None:
    block = Block(linear, experts)
    torch._dynamo.reset()
    graphs = []

    def count(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    for rows in (32, 33, 7, 64):
        args = (x_for(rows), *routed(rows))
        for got, want in zip(compiled(*args), block(*args), strict=True):
            torch.testing.assert_close(got, want)
    counted = torch.compile(block, fullgraph=True, dynamic=True, backend=count)
    for rows in (32, 33, 7, 64):
        counted(x_for(rows), *routed(rows))
    assert len(graphs) == 1  # no recompilation by size
    assert sum("fp4." in str(n.target) for n in graphs[0].graph.nodes) == 2


def test_two_layers_in_one_graph(linear: Prepared) -> None:
    other = fp4.prepare(random_weight(9, "nvfp4", 64, 48).to(DEVICE))

    def f(x: torch.Tensor) -> torch.Tensor:
        return fp4.matmul(fp4.matmul(x, linear), other)

    x = x_for(5)
    assert torch.equal(torch.compile(f, fullgraph=True, backend="aot_eager")(x), f(x))


def test_export(linear: Prepared) -> None:
    class M(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return fp4.matmul(x, linear)

    program = torch.export.export(M(), (x_for(4),), dynamic_shapes={"x": {0: torch.export.Dim("rows", min=2, max=512)}})
    assert torch.equal(program.module()(x_for(9)), fp4.matmul(x_for(9), linear))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_export_of_quantisation_with_dynamic_sizes(strict: bool, fmt: str) -> None:
    """Rows and k stay free (pytorch/TensorRT#3745): sizes that were taken for plain integers became constants of the program."""

    class M(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            q = fp4.quantize(x, fmt)
            return q.codes, q.scale, fp4.dequantize(q)

    m, k = torch.export.Dim("m"), torch.export.Dim("k")
    program = torch.export.export(M(), (torch.randn(4, 64, device=DEVICE),), dynamic_shapes={"x": {0: m, 1: 32 * k}}, strict=strict)
    x = torch.randn(7, 96, device=DEVICE)
    for got, want in zip(program.module()(x), M()(x), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_program_in_another_process(linear: Prepared, monkeypatch: pytest.MonkeyPatch, strict: bool) -> None:
    """A handle is a number of one process: in another one the same number is another weight, perhaps of the same shape."""

    class M(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return fp4.matmul(x, linear)

    program = torch.export.export(M(), (x_for(4),), strict=strict)
    assert torch.equal(program.module()(x_for(4)), fp4.matmul(x_for(4), linear))
    monkeypatch.setattr(prepared_module, "_PROCESS", prepared_module._PROCESS ^ 2)
    with pytest.raises(fp4.LayoutMismatch, match="exported in another process"):
        program.module()(x_for(4))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_handle_of_a_forked_process(linear: Prepared) -> None:
    """Parent and child give the next weight the same number; a graph that the child exported ran with the parent's weight."""
    before = prepared_module.exported_handle(linear.handle)
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            own = copy.copy(linear)
            found = prepared_module.by_handle(before) is linear and prepared_module.by_handle(linear.handle) is linear
            os.write(write, f"{int(found)} {prepared_module.exported_handle(own.handle)}".encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    found, theirs = os.read(read, 100).decode().split()
    assert found == "1", "what was here before the fork is the child's too"
    kept = [copy.copy(linear) for _ in range(3)]
    assert int(theirs) & 0xFFFFFFFF in {w.handle for w in kept}, "the case that this test is about"
    with pytest.raises(fp4.LayoutMismatch, match="exported in another process"):
        prepared_module.by_handle(int(theirs))
    assert prepared_module.by_handle(before) is linear


def test_gradient_is_not_silently_dropped(linear: Prepared) -> None:
    x = x_for(2).requires_grad_()
    y = fp4.matmul(x, linear)
    with torch.no_grad():
        assert torch.equal(y, fp4.matmul(x, linear))
    assert y.requires_grad  # backward says that there is no formula, instead of stopping here without a word


# ---- bad input -------------------------------------------------------------------------------------------------------------------

Call = Callable[[Prepared, PreparedMoE], Any]
IDS = torch.zeros(2, 1, dtype=torch.int64)
ONES = torch.ones(2, 1)

BAD: dict[str, tuple[Call, str]] = {
    "unprepared": (lambda w, e: fp4.matmul(x_for(2), w.restore()), r"QuantizedTensor, not prepared .* call fp4.prepare\(w\)"),
    "no weight": (lambda w, e: fp4.matmul(x_for(2), torch.zeros(48, 64)), r"the weight is Tensor; need what fp4.prepare"),
    "experts as a matrix": (lambda w, e: fp4.matmul(x_for(2), e), "the weight is PreparedMoE"),
    "a matrix as experts": (lambda w, e: fp4.moe(x_for(2), w, IDS, ONES), "the weight is Prepared"),
    "k": (lambda w, e: fp4.matmul(x_for(2, 32), w), r"x has shape \[2, 32\]; need \[..., 64\]"),
    "scalar": (lambda w, e: fp4.matmul(x_for(2)[0, 0], w), r"x has shape \[\]"),
    "dtype": (lambda w, e: fp4.matmul(x_for(2, dtype=torch.float64), w), "x is torch.float64"),
    "integers": (lambda w, e: fp4.matmul(x_for(2).to(torch.int32), w), "x is torch.int32"),
    "device": (lambda w, e: fp4.matmul(x_for(2).to("meta"), w), "x is on meta"),
    "bias": (lambda w, e: fp4.matmul(x_for(2), w, torch.zeros(47, device=DEVICE)), r"bias is torch.float32 \[47\]"),
    "integer bias": (lambda w, e: fp4.matmul(x_for(2), w, torch.zeros(48, dtype=torch.int32, device=DEVICE)), "bias is torch.int32"),
    "moe 3-D": (lambda w, e: fp4.moe(x_for(2)[None], e, IDS.to(DEVICE), ONES.to(DEVICE)), r"need \[t, 64\]"),
    "ids dtype": (lambda w, e: fp4.moe(x_for(2), e, IDS.to(DEVICE).float(), ONES.to(DEVICE)), "topk_ids torch.float32"),
    "ids shape": (lambda w, e: fp4.moe(x_for(3), e, IDS.to(DEVICE), ONES.to(DEVICE)), r"need int32 or int64 \[3, topk\]"),
    "weights dtype": (lambda w, e: fp4.moe(x_for(2), e, IDS.to(DEVICE), IDS.to(DEVICE)), "topk_weights torch.int64"),
    "ids elsewhere": (lambda w, e: fp4.moe(x_for(2), e, IDS.to("meta"), ONES.to(DEVICE)), "topk_ids on meta"),
    "prepare a tensor": (lambda w, e: fp4.prepare(torch.zeros(2, 32)), "got Tensor; need a QuantizedTensor"),
    "prepare experts as a matrix": (
        lambda w, e: fp4.prepare(random_weight(0, "mxfp4", 2, 32, 32)),
        "stacked experts go to fp4.prepare_moe",
    ),
    "prepare_moe 2-D": (lambda w, e: fp4.prepare_moe(random_weight(0, "mxfp4", 32, 32), random_weight(0, "mxfp4", 32, 32)), "w13 is shape"),
    "act": (lambda w, e: fp4.prepare(w.restore(), act="int8"), "act is 'int8'"),
    "warmup": (lambda w, e: fp4.warmup(w.restore()), "not prepared"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_input_gets_a_typed_error(linear: Prepared, experts: PreparedMoE, case: str) -> None:
    call, words = BAD[case]
    with pytest.raises(fp4.Fp4Error, match=words):
        call(linear, experts)


MOE_BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no order": ({"gate_up": None}, "order of gate and up rows is not known"),
    "unknown order": ({"gate_up": "gu"}, "gate_up is 'gu'"),
    "order without a gate": ({"activation": fp4.ReLU2()}, "has no gate"),
    "unknown activation": ({"activation": "gelu"}, "activation: 'gelu' is not known"),
    "bias shape": ({"bias13": torch.zeros(4, 63)}, r"bias13 is torch.float32 \[4, 63\]; need floating point \[4, 64\]"),
    "bias dtype": ({"bias2": torch.zeros(4, 64, dtype=torch.int8)}, "bias2 is torch.int8"),
}


@pytest.mark.parametrize("case", list(MOE_BAD))
def test_bad_experts_get_a_typed_error(case: str) -> None:
    more, words = MOE_BAD[case]
    w13, w2 = random_weight(1, "mxfp4", 4, 64, 64), random_weight(2, "mxfp4", 4, 64, 32)
    with pytest.raises(fp4.Fp4Error, match=words):
        fp4.prepare_moe(w13, w2, **{"gate_up": "gate_up", **more})
    with pytest.raises(fp4.Fp4Error, match=r"w13 holds \[e, 64, 64\] and w2 \[e, 64, 64\]; need"):
        fp4.prepare_moe(w13, random_weight(2, "mxfp4", 4, 64, 64), gate_up="gate_up")


def test_order_recorded_by_the_weight_and_the_call_must_agree() -> None:
    import dataclasses

    w13, w2 = random_weight(1, "mxfp4", 4, 64, 64), random_weight(2, "mxfp4", 4, 64, 32)
    w13 = dataclasses.replace(w13, gate_up="interleaved")
    assert fp4.prepare_moe(w13, w2).problem.gate_up == "interleaved"
    with pytest.raises(fp4.LayoutMismatch, match="rows are 'interleaved', the call says 'up_gate'"):
        fp4.prepare_moe(w13, w2, gate_up="up_gate")


@pytest.mark.parametrize("bad", [-1, -7, 4, 1 << 40])
def test_expert_id_out_of_range(experts: PreparedMoE, monkeypatch: pytest.MonkeyPatch, bad: int) -> None:
    """Such a slot adds zero and reads nothing; FP4_STRICT refuses it, unless it is -1, the usual mark of an empty slot."""
    ids, w = routed(5)
    safe, keep = ids.clone(), w.clone()
    ids[3, 1], safe[3, 1], keep[3, 1] = bad, 0, 0
    torch.testing.assert_close(fp4.moe(x_for(5), experts, ids, w), fp4.moe(x_for(5), experts, safe, keep))
    monkeypatch.setenv("FP4_STRICT", "1")
    if bad != -1:
        with pytest.raises(fp4.FormatMismatch, match=rf"topk_ids\[3, 1\] is {bad}; need 0 <= id < 4"):
            fp4.moe(x_for(5), experts, ids, w)
    else:
        torch.testing.assert_close(fp4.moe(x_for(5), experts, ids, w), fp4.moe(x_for(5), experts, safe, keep))


@pytest.mark.parametrize(("fmt", "byte"), [("nvfp4", 0x7F), ("nvfp4", 0xB8), ("nvfp4", 0xFF), ("mxfp4", 0xFF)])
def test_strict_refuses_broken_scales(monkeypatch: pytest.MonkeyPatch, fmt: str, byte: int) -> None:
    """NaN of either format, and a negative e4m3 scale; the largest finite bytes pass."""
    w = random_weight(0, fmt, 32, 64)
    w.scale[0] = 0x7E if fmt == "nvfp4" else 0xFE
    monkeypatch.setenv("FP4_STRICT", "1")
    fp4.prepare(w, "reference")
    w.scale[3, 1] = byte
    with pytest.raises(fp4.FormatMismatch, match=rf"block scale \[3, 1\] is \w+ byte {byte:#04x}"):
        fp4.prepare(w, "reference")
    monkeypatch.delenv("FP4_STRICT")
    fp4.prepare(w, "reference")


def test_x_that_is_not_contiguous(linear: Prepared, experts: PreparedMoE) -> None:
    wide = x_for(6, 128)
    x = wide[:, ::2]
    assert not x.is_contiguous()
    assert torch.equal(fp4.matmul(x, linear), fp4.matmul(x.contiguous(), linear))
    assert torch.equal(fp4.matmul(wide.view(3, 2, 128)[:, :, :64], linear).view(6, 48), fp4.matmul(wide[:, :64].contiguous(), linear))
    ids, w = routed(6)
    t = ids.t().contiguous().t()
    assert torch.equal(fp4.moe(x, experts, t, w), fp4.moe(x.contiguous(), experts, ids, w))


def test_no_rows(linear: Prepared, experts: PreparedMoE) -> None:
    assert fp4.matmul(x_for(0), linear).shape == (0, 48)
    assert fp4.matmul(x_for(0).view(0, 3, 64), linear, out_dtype=torch.float32).shape == (0, 3, 48)
    ids, w = routed(0)
    assert fp4.moe(x_for(0), experts, ids, w).shape == (0, 64)
    assert torch.equal(fp4.moe(x_for(3), experts, ids[:0].new_zeros(3, 0), w.new_zeros(3, 0)), torch.zeros_like(x_for(3)))


def test_warmup_runs_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Powers of two up to m_max, and m_max; as many slots as asked, else as the layer was prepared for."""
    rows: list[Any] = []
    w, ex = fp4.prepare(random_weight(1, "nvfp4", 48, 64)), moe_layer("cpu", topk=3)
    monkeypatch.setattr("fp4.layer._matmul", lambda x, *_: rows.append(len(x)))
    monkeypatch.setattr("fp4.layer._moe", lambda x, ex, ids, weights, out: rows.append((len(x), tuple(ids.shape), tuple(weights.shape))))
    fp4.warmup(w, 20)
    assert rows == [1, 2, 4, 8, 16, 20]
    for topk, slots in ((2, 2), (None, 3)):
        rows.clear()
        fp4.warmup(ex, 5, topk=topk)
        assert rows == [(m, (m, slots), (m, slots)) for m in (1, 2, 4, 5)]
    rows.clear()
    fp4.warmup(w, 0)
    assert rows == [1]


def test_warmup_of_the_layers_here(linear: Prepared, experts: PreparedMoE) -> None:
    fp4.warmup(linear, 20)
    fp4.warmup(experts, 5, topk=2)


P = torch.nn.Parameter


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_parameters_are_quantised_and_used_without_no_grad(fmt: str) -> None:
    """Weights of a model are Parameters, and few people write torch.no_grad() around a first try."""
    weight, x = P(torch.randn(48, 64)), torch.randn(3, 64)
    q = fp4.quantize(weight, fmt)
    assert q.global_scale is None or not q.global_scale.requires_grad
    assert fp4.dequantize(q).shape == fp4.fake_quantize(weight, fmt).shape == (48, 64)
    assert fp4.dequantize(fp4.quantize(weight, fmt, scale_layout="sf_128x4").restore()).shape == (48, 64)
    assert fp4.matmul(P(x), fp4.prepare(q), bias=P(torch.ones(48))).shape == (3, 48)
    w13, w2 = fp4.quantize(P(torch.randn(2, 64, 64)), fmt), fp4.quantize(P(torch.randn(2, 64, 32)), fmt)
    ex = fp4.prepare_moe(w13, w2, gate_up="gate_up", bias13=P(torch.ones(2, 64)), bias2=P(torch.ones(2, 64)))
    assert not any(t.requires_grad for t in ex.arrays.values())
    assert fp4.moe(x, ex, torch.zeros(3, 1, dtype=torch.int64), P(torch.ones(3, 1))).shape == (3, 64)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("of", ["x", "bias", "weights"])
def test_a_backward_is_refused_and_not_silently_without_gradient(compiled: bool, of: str) -> None:
    w = fp4.prepare(fp4.quantize(torch.randn(48, 64)))
    ex = fp4.prepare_moe(fp4.quantize(torch.randn(2, 64, 64)), fp4.quantize(torch.randn(2, 64, 32)), gate_up="gate_up")
    x, ids, ones = P(torch.randn(3, 64)), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    call = {
        "x": lambda: fp4.matmul(x * 2, w),
        "bias": lambda: fp4.matmul(x.detach(), w, bias=P(torch.ones(48)), out_dtype=torch.bfloat16),
        "weights": lambda: fp4.moe(x.detach(), ex, ids, P(ones)),
    }[of]
    if compiled:
        if of != "x":
            pytest.skip("Parameters are made inside")
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    y = call()
    with pytest.raises(fp4.Unsupported, match=r"has no backward; call it under torch.no_grad\(\)"):
        y.sum().backward()
    with torch.no_grad():
        assert not call().requires_grad


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_whoever_notes_what_runs_sees_ops(linear: Prepared, experts: PreparedMoE, tracing_mode: str) -> None:
    """Of a Triton launch ``make_fx`` on real tensors noted the empty output alone: a graph of uninitialised memory."""
    calls: dict[str, Any] = {
        "matmul": lambda x, ids, w: fp4.matmul(x, linear),
        "moe": lambda x, ids, w: fp4.moe(x, experts, ids, w),
        "quantize": lambda x, ids, w: fp4.quantize(x, "mxfp4").codes,
        "quantize_stored": lambda x, ids, w: fp4.quantize(x, "mxfp4", scale_layout="sf_128x4").scale.data,
        "fake_quantize": lambda x, ids, w: fp4.fake_quantize(x),
    }
    for name, call in calls.items():
        graph = make_fx(call, tracing_mode=tracing_mode)(x_for(3), *routed(3))
        assert f"fp4.{name}.default" in {str(node.target) for node in graph.graph.nodes}, name
        rows = 7 if tracing_mode == "symbolic" else 3
        other = (x_for(rows) * 2, *routed(rows))
        assert torch.equal(graph(*other), call(*other)), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace(linear: Prepared) -> None:
    traced = torch.jit.trace(lambda x: fp4.matmul(x, linear), x_for(3))  # type: ignore[no-untyped-call]
    assert torch.equal(traced(x_for(7)), fp4.matmul(x_for(7), linear))
