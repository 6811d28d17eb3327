"""MoE: every FlashInfer entry point that fp4 routes to, through its real Python wrapper, against a decoder built from public sources."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pretend
import pytest
import torch
from cases import Layer, error, poisoned
from emulate import Emulator

import fp4
from fp4.gpu.device import Device

#: float32 alpha, reciprocal and clamp in another unit: a few float32 roundings
TIGHT = 2e-6

GPT_OSS = fp4.SwiGLU(alpha=1.702, beta=1.0, limit=7.0)
ORDERS = ("interleaved", "gate_up", "up_gate")


def run(layer: Layer, backend: str, cc: tuple[int, int], sm90: str | None = None, **kw: Any) -> tuple[torch.Tensor, Emulator, Any, Any]:
    emulator = Emulator(cc, sm90 or (installed_sm90_layout() if cc == (9, 0) else "B"))
    with pretend.gpu(cc, emulator.functions) as recorder, poisoned():
        prepared = layer.prepare(backend, Device.fake(cc), **kw)
        y = fp4.moe(layer.x, prepared, layer.ids, layer.weights)
    return y, emulator, recorder, prepared


def agree(layer: Layer, y: torch.Tensor, exact: torch.Tensor, want: torch.Tensor) -> None:
    """The emulator's float64 result equals the reference, pads add nothing, and y is its rounding."""
    assert error(exact[:, : layer.hidden], want) < TIGHT
    assert torch.equal(exact[:, layer.hidden :], torch.zeros_like(exact[:, layer.hidden :]))
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, exact[:, : layer.hidden].to(torch.bfloat16))
    assert y.is_contiguous()


@pytest.mark.parametrize("cc", [(10, 0), (10, 3), (12, 0), (12, 1)])
@pytest.mark.parametrize("order", ORDERS)
def test_nvfp4_cutlass(order: str, cc: tuple[int, int]) -> None:
    layer = Layer("nvfp4", order, activation=GPT_OSS)
    y, emulator, recorder, prepared = run(layer, "flashinfer_cutlass", cc)
    agree(layer, y, emulator.exact, layer.reference(layer.nvfp4))
    assert prepared.meta["route"] == "nvfp4_moe_cutlass"
    init, *_ = recorder.last("run_moe").args
    assert len(init) < 8 or init[7] is False, "use_fused_finalize must be off: its sums are not reproducible"


@pytest.mark.parametrize("scalar", [False, True])
def test_nvfp4_cutlass_silu_without_bias(scalar: bool) -> None:
    layer = Layer("nvfp4", "gate_up", activation=fp4.SiLU(), bias=False, per_expert_input=not scalar)
    y, emulator, _, _ = run(layer, "flashinfer_cutlass", (10, 0))
    agree(layer, y, emulator.exact, layer.reference(layer.nvfp4))


def test_nvfp4_cutlass_without_gate() -> None:
    layer = Layer("nvfp4", None, activation=fp4.ReLU2(), bias=False)
    y, emulator, _, _ = run(layer, "flashinfer_cutlass", (10, 0))
    agree(layer, y, emulator.exact, layer.reference(layer.nvfp4))


@pytest.mark.parametrize("cc", [(10, 0), (10, 3)])
@pytest.mark.parametrize("order", ORDERS)
def test_nvfp4_trtllm(order: str, cc: tuple[int, int]) -> None:
    layer = Layer("nvfp4", order, activation=GPT_OSS)
    y, emulator, _, prepared = run(layer, "flashinfer_trtllm", cc)
    agree(layer, y, emulator.exact, layer.reference(layer.nvfp4_shared))
    assert prepared.meta["route"] == "nvfp4_moe_trtllm"


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_trtllm_hidden_is_padded_to_256(format: str) -> None:
    """96 and 352 are next to 128 and 384, which the NVFP4 kernel computes wrongly."""
    for hidden in (96, 352):
        layer = Layer(format, "gate_up", hidden=hidden, inter=32, activation=GPT_OSS)
        y, emulator, _, _ = run(layer, "flashinfer_trtllm", (10, 0))
        agree(layer, y, emulator.exact, layer.reference(layer.nvfp4_shared if format == "nvfp4" else layer.plain))
        assert emulator.exact.shape[1] % 256 == 0


@pytest.mark.parametrize("limit", [None, 0.5])
def test_a_clamped_silu_is_no_silu(limit: float | None) -> None:
    """SwiGLU with alpha 1 and beta 0 is SiLU only without a limit; with one the kernel has to clamp."""
    layer = Layer("mxfp4", activation=fp4.SwiGLU(alpha=1.0, beta=0.0, limit=limit))
    y, emulator, _, _ = run(layer, "flashinfer_trtllm", (10, 0))
    agree(layer, y, emulator.exact, layer.reference(layer.plain))


@pytest.mark.parametrize("pair", ["foldable", "different"])
def test_nvfp4_trtllm_gate_and_up_scales(pair: str) -> None:
    """Two output scalars serve two global scales exactly (vllm#54974), biases and beta included."""
    layer = Layer("nvfp4", pair=pair, activation=fp4.SwiGLU(alpha=1.702, beta=1.0, limit=None))
    y, emulator, _, _ = run(layer, "flashinfer_trtllm", (10, 0))
    agree(layer, y, emulator.exact, layer.reference(layer.nvfp4_shared))


@pytest.mark.parametrize("backend", ["flashinfer_cutlass", "flashinfer_cutedsl"])
def test_gate_and_up_scales_fold_or_are_refused(backend: str) -> None:
    if backend == "flashinfer_cutedsl":
        pytest.importorskip("cutlass", reason="the CuTe-DSL route needs nvidia-cutlass-dsl")
    layer = Layer("nvfp4", pair="foldable", activation=fp4.SiLU(), bias=False)
    y, _emulator, _, prepared = run(layer, backend, (10, 0))
    want = layer.reference(layer.nvfp4)
    assert error(y, want) < 0.008
    (gate, up), w2 = prepared.restore()
    for got, given in ((gate, layer.w13[0]), (up, layer.w13[1]), (w2, layer.w2)):
        assert torch.equal(got.codes, given.codes)
        assert torch.equal(got.scale, given.scale)
        assert torch.equal(got.global_scale, given.global_scale)
    with pytest.raises(fp4.Unsupported, match="one w13 scale an expert"):
        run(Layer("nvfp4", pair="different", activation=fp4.SiLU(), bias=False), backend, (10, 0))


@pytest.mark.parametrize("act", ["keep", "mxfp8"])
@pytest.mark.parametrize("order", ORDERS)
def test_mxfp4_trtllm(order: str, act: str) -> None:
    layer = Layer("mxfp4", order, activation=GPT_OSS)
    y, emulator, _, prepared = run(layer, "flashinfer_trtllm", (10, 0), act=act)
    agree(layer, y, emulator.exact, layer.reference(layer.plain if act == "keep" else layer.mxfp8))
    assert prepared.meta["route"] == {"keep": "mxfp4_moe_trtllm_bf16", "mxfp8": "mxfp4_moe_trtllm_mxfp8"}[act]


def test_mxfp4_trtllm_situ() -> None:
    from fp4.gpu.backends import _flashinfer_bind as bind

    pretend.flashinfer()
    layer = Layer("mxfp4", "gate_up", activation=fp4.SiTU(beta=4.0, linear_beta=25.0), bias=False)
    if not bind.need("cutlass_fused_moe").has("situ_beta"):  # a release before 0.7: SiTU is refused by name
        with pytest.raises(fp4.Unsupported, match="no SiTU kernels"):
            run(layer, "flashinfer_trtllm", (10, 0))
        return
    y, emulator, _, _ = run(layer, "flashinfer_trtllm", (10, 0))
    agree(layer, y, emulator.exact, layer.reference(layer.plain))


def _routed() -> Any:
    from fp4.gpu.backends import _flashinfer_bind as bind

    pretend.flashinfer()
    return bind.need("trtllm_fp4_block_scale_routed_moe")


@pytest.mark.parametrize("form", ["tuple", "packed"])
def test_trtllm_routing_forms(form: str) -> None:
    """Packed routing rounds the weights to bf16 (sglang#33631), the tuple keeps float32."""
    from fp4.gpu.backends import flashinfer as backend

    if form == "tuple" and not _routed().takes_tuple("topk_ids"):
        pytest.skip("this flashinfer takes packed routing only (the tuple came in 0.6.13)")

    layer, emulator = Layer("mxfp4", activation=GPT_OSS), Emulator((10, 0))
    weights = layer.weights if form == "tuple" else layer.weights.to(torch.bfloat16).float()
    ids = layer.ids.clone()
    ids[0, 1], ids[2, 0] = -1, layer.experts
    with pretend.gpu((10, 0), emulator.functions), poisoned():
        prepared = layer.prepare("flashinfer_trtllm", Device.fake((10, 0)))
        y = backend.routed(prepared, form=form)(layer.x, ids, layer.weights, torch.bfloat16)
    agree(layer, y, emulator.exact, layer.reference(layer.plain, ids=ids, weights=weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trtllm_from_logits(dtype: torch.dtype) -> None:
    """All-negative logits too: padding value 0 must not win (flashinfer#2822)."""
    from fp4.gpu.backends import flashinfer as backend

    layer, emulator = Layer("mxfp4", activation=GPT_OSS), Emulator((10, 0))
    logits = (-5 - 3 * torch.rand(layer.tokens, layer.experts, generator=torch.Generator().manual_seed(3))).to(dtype)
    value, ids = logits.double().topk(layer.topk, -1)
    with pretend.gpu((10, 0), emulator.functions), poisoned():
        prepared = layer.prepare("flashinfer_trtllm", Device.fake((10, 0)))
        y = backend.from_logits(prepared, "renormalize")(layer.x, logits, layer.topk)
        with pytest.raises(fp4.FormatMismatch, match="logits are"):
            backend.from_logits(prepared)(layer.x, logits[:, :2], layer.topk)
    agree(layer, y, emulator.exact, layer.reference(layer.plain, ids=ids, weights=value.softmax(-1)))
    with pretend.gpu((10, 0), emulator.functions) as recorder:
        none = backend.from_logits(layer.prepare("flashinfer_trtllm", Device.fake((10, 0))))(layer.x[:0], logits[:0], layer.topk)
    assert tuple(none.shape) == (0, layer.hidden)
    assert recorder.calls == []  # zero tokens are not launched


@pytest.mark.parametrize("routing", ["softmax", "renormalize", "deepseek_v3", "llama4", "topk"])
def test_trtllm_routing_methods(routing: str) -> None:
    """Each name reaches the method of its formula, with the bias and the groups that DeepSeek-V3's has."""
    from fp4.gpu.backends import _flashinfer_bind as bind
    from fp4.gpu.backends import flashinfer as backend

    pretend.flashinfer()
    layer, emulator = Layer("mxfp4", activation=GPT_OSS, topk=1 if routing == "llama4" else 2), Emulator((10, 0))
    g = torch.Generator().manual_seed(4)
    logits, bias = torch.randn(layer.tokens, layer.experts, generator=g), torch.randn(layer.experts, generator=g) * 0.1
    z, k, how, given = logits.double(), layer.topk, {}, None
    if routing == "deepseek_v3":
        how, given = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5}, bias
        first = (z.sigmoid() + bias)[:, :2].sum(1) > (z.sigmoid() + bias)[:, 2:].sum(1)
        assert 0 < int(first.sum()) < len(first)
        ids = torch.where(first[:, None], torch.tensor([0, 1]), torch.tensor([2, 3]))
        weights = z.sigmoid().gather(1, ids)
        weights = weights / weights.sum(1, keepdim=True) * 2.5
    else:
        weights, ids = (z.softmax(1) if routing == "softmax" else z).topk(k, 1)
        weights = {"renormalize": weights.softmax(1), "llama4": weights.sigmoid()}.get(routing, weights)
    with pretend.gpu((10, 0), emulator.functions), poisoned():
        prepared = layer.prepare("flashinfer_trtllm", Device.fake((10, 0)))
        if bind.enum("RoutingMethodType", backend._flashinfer_trtllm.ROUTING[routing]) is None:
            with pytest.raises(fp4.Unsupported, match="has no routing method"):
                backend.from_logits(prepared, routing)
            return
        y = backend.from_logits(prepared, routing, given, **how)(layer.x, logits, k)
    agree(layer, y, emulator.exact, layer.reference(layer.plain, ids=ids, weights=weights))
    with pytest.raises(fp4.FormatMismatch, match="routing 'sigmoid' is not known"):
        backend.from_logits(prepared, "sigmoid")
    with pytest.raises(fp4.FormatMismatch, match="option groups is not known"):
        backend.from_logits(prepared, routing, groups=2)


def test_trtllm_deferred_finalize() -> None:
    from fp4.gpu.backends import flashinfer as backend

    layer, emulator = Layer("mxfp4", activation=GPT_OSS), Emulator((10, 0))
    ids = layer.ids.clone()
    ids[1, 0] = -1
    with pretend.gpu((10, 0), emulator.functions), poisoned():
        prepared = layer.prepare("flashinfer_trtllm", Device.fake((10, 0)))
        call = backend.deferred(prepared)
        rows, weights, index = call(layer.x, ids, layer.weights)
        with pytest.raises(fp4.FormatMismatch, match="zero tokens"):
            call(layer.x[:0], ids[:0], layer.weights[:0])
    assert index.shape == ids.shape
    assert bool((index[ids < 0] == -1).all())
    taken = emulator.exact[index.long().clamp(min=0)] * (index >= 0).unsqueeze(-1)
    y = (taken * weights.double().unsqueeze(-1)).sum(1)
    assert error(y[:, : layer.hidden], layer.reference(layer.plain, ids=ids)) < TIGHT
    assert rows.dtype == torch.bfloat16


@pytest.mark.parametrize("cc", [(12, 0), (12, 1), (10, 0)])
@pytest.mark.parametrize("order", ORDERS)
def test_mxfp4_cutlass_mxfp8(order: str, cc: tuple[int, int]) -> None:
    layer = Layer("mxfp4", order, activation=GPT_OSS)
    y, emulator, _, prepared = run(layer, "flashinfer_cutlass", cc, act="mxfp8")
    agree(layer, y, emulator.exact, layer.reference(layer.mxfp8))
    assert prepared.meta["route"] == "mxfp4_moe_cutlass_mxfp8"


@pytest.mark.parametrize("order", ORDERS)
def test_mxfp4_sm90(order: str) -> None:
    layer = Layer("mxfp4", order, experts=3, activation=GPT_OSS)
    y, emulator, _, prepared = run(layer, "flashinfer_cutlass", (9, 0))
    agree(layer, y, emulator.exact, layer.reference(layer.plain))
    assert prepared.meta["sm90_layout"] == installed_sm90_layout()


def installed_sm90_layout() -> str:
    """What the installation's own helper says: 3 dimensions are layout A, 5 are B."""
    helper = pretend.flashinfer().fused_moe.interleave_moe_scales_for_sm90_mixed_gemm
    return {3: "A", 5: "B"}[helper(torch.zeros(1, 128, 4, dtype=torch.uint8)).ndim]


@pytest.mark.parametrize("layout", ["A", "B", "C"])
def test_sm90_layout_is_told_apart_by_the_helper(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other releases: the helper is replaced by the published formula of each layout, and by one that nobody knows."""
    from fp4.gpu.backends import _flashinfer_bind as bind
    from fp4.gpu.backends import _flashinfer_cutlass as backend

    pretend.flashinfer()

    def helper(scales: torch.Tensor, group_size: int = 32) -> torch.Tensor:
        e, n, k = scales.shape
        if layout == "A":
            return scales.view(e, n, k // 4, 4).permute(0, 2, 1, 3).reshape(e, k // 4, 4 * n).contiguous()
        folded = scales.view(e, n // 64, 4, 16, k // 4, 4).permute(0, 1, 4, 3, 2, 5).reshape(e, n // 64, k // 4, 16, 16).contiguous()
        return folded if layout == "B" else folded.flip(-1)

    name = "interleave_moe_scales_for_sm90_mixed_gemm"
    real = bind.find
    monkeypatch.setattr(bind, "find", lambda n: bind.Function(name, helper) if n == name else real(n))
    backend.sm90_layout.cache_clear()
    try:
        if layout == "C":
            with pytest.raises(fp4.BackendUnavailable, match="neither of the two"):
                backend.sm90_layout()
            return
        layer = Layer("mxfp4", "interleaved", experts=3, activation=GPT_OSS)
        y, emulator, _, prepared = run(layer, "flashinfer_cutlass", (9, 0), sm90=layout)
        agree(layer, y, emulator.exact, layer.reference(layer.plain))
        other = "B" if layout == "A" else "A"  # as if another release had prepared the bytes and saved them
        prepared = replace(prepared, meta={**prepared.meta, "sm90_layout": other})
        with pytest.raises(fp4.BackendUnavailable, match=f"in FlashInfer's SM90 layout {other}, the installed .* reads {layout}"):
            prepared.bind()
    finally:
        monkeypatch.undo()
        backend.sm90_layout.cache_clear()


@pytest.mark.parametrize("cc", [(10, 0), (10, 3)])
@pytest.mark.parametrize("order", ORDERS)
def test_nvfp4_masked_grouped_gemm(order: str, cc: tuple[int, int]) -> None:
    pytest.importorskip("cutlass", reason="the CuTe-DSL route needs nvidia-cutlass-dsl")
    layer = Layer("nvfp4", order, activation=fp4.SiLU(), bias=False)
    y, _emulator, recorder, prepared = run(layer, "flashinfer_cutedsl", cc)
    want = layer.reference(layer.nvfp4)
    assert error(y, want) < 0.008  # bf16 rounding of the expert outputs and of y
    assert prepared.meta["route"] == "nvfp4_moe_masked"
    assert recorder.count("masked_gemm") == 2
    mask = recorder.last("masked_gemm").args[1]["masked_m_tensor_gpu"]
    assert mask.tolist() == [int((layer.ids == e).sum()) for e in range(layer.experts)]


def test_masked_permutation_takes_repeated_experts_once() -> None:
    from fp4.gpu.backends._flashinfer_masked import depermute, permute

    x = torch.arange(1.0, 4.0).view(3, 1).repeat(1, 2)
    ids = torch.tensor([[2, 2], [5, 2], [3, 9]])
    rows, counts, slot = permute(x, ids, start=2, experts=2)
    assert counts.tolist() == [2, 1]
    assert slot.tolist() == [[0, 0], [-1, 1], [3, -1]]
    rows[0, 2:], rows[1, 1:] = float("nan"), float("nan")
    weights = torch.tensor([[0.5, 0.25], [9.0, 1.0], [2.0, 9.0]])
    assert depermute(rows, slot, weights)[:, 0].tolist() == [0.75, 2.0, 6.0]
    # an expert without tokens in front: its rows, the first of all, are garbage that no id may bring in
    rows, counts, slot = permute(x, torch.tensor([[3, 9], [9, 3], [-1, 9]]), start=2, experts=2)
    assert counts.tolist() == [0, 2]
    rows[0], rows[1, 2:] = float("nan"), float("inf")
    assert depermute(rows, slot, weights)[:, 0].tolist() == [0.5, 2.0, 0.0]


BACKENDS = [
    ("flashinfer_cutlass", "nvfp4", (10, 0), "any"),
    ("flashinfer_trtllm", "nvfp4", (10, 0), "any"),
    ("flashinfer_cutedsl", "nvfp4", (10, 0), "any"),
    ("flashinfer_trtllm", "mxfp4", (10, 0), "keep"),
    ("flashinfer_trtllm", "mxfp4", (10, 0), "mxfp8"),
    ("flashinfer_cutlass", "mxfp4", (12, 0), "mxfp8"),
    ("flashinfer_cutlass", "mxfp4", (9, 0), "keep"),
]


def plain_layer(backend: str, format: str, **kw: Any) -> Layer:
    """A layer that every route serves: SiLU and no bias for the masked GEMM."""
    if backend == "flashinfer_cutedsl":
        pytest.importorskip("cutlass", reason="the CuTe-DSL route needs nvidia-cutlass-dsl")
        return Layer(format, activation=fp4.SiLU(), bias=False, **kw)
    return Layer(format, activation=GPT_OSS, **kw)


@pytest.mark.parametrize(("backend", "format", "cc", "act"), BACKENDS)
def test_zero_tokens_launch_nothing(backend: str, format: str, cc: tuple[int, int], act: str) -> None:
    layer = plain_layer(backend, format, tokens=0)
    y, _, _, prepared = run(layer, backend, cc, act=act)
    assert tuple(y.shape) == (0, layer.hidden)
    with pretend.gpu(cc, Emulator(cc).functions) as recorder:
        y = prepared.bind()(layer.x, layer.ids, layer.weights, torch.bfloat16)  # the backend's own guard (sglang#38773)
    assert tuple(y.shape) == (0, layer.hidden)
    assert recorder.calls == []


@pytest.mark.parametrize(("backend", "format", "cc", "act"), BACKENDS)
def test_local_experts(backend: str, format: str, cc: tuple[int, int], act: str) -> None:
    """Experts 2 and 3 of 4: everything with an expert dimension is local, other experts add zero (sglang#36597)."""
    layer = plain_layer(backend, format, local=(2, 4))
    y, _emulator, _, prepared = run(layer, backend, cc, act=act)
    sees = {"mxfp8": layer.mxfp8, "keep": layer.plain}.get(act) or (layer.nvfp4_shared if backend == "flashinfer_trtllm" else layer.nvfp4)
    assert error(y, layer.reference(sees)) < 0.008
    assert all(t.shape[0] == 2 for n, t in prepared.arrays.items() if t.ndim and n != "flashinfer.quant13")


@pytest.mark.parametrize(("backend", "format", "cc", "act"), [b for b in BACKENDS if b[1] == "nvfp4"])
def test_an_all_zero_expert_gives_its_biases(backend: str, format: str, cc: tuple[int, int], act: str) -> None:
    """A global scale of 0 (pruned experts in ModelOpt files) beside biases, a clamp and beta, which one route divides by the scales."""
    layer = plain_layer(backend, format)
    layer.w13.global_scale[0] = layer.w2.global_scale[2] = 0.0
    layer.ids[0] = torch.tensor([0, 2])
    y, _, _, prepared = run(layer, backend, cc, act=act)
    sees = layer.nvfp4_shared if backend == "flashinfer_trtllm" else layer.nvfp4
    assert error(y, layer.reference(sees)) < 0.008
    assert torch.equal(prepared.restore()[1].global_scale, layer.w2.global_scale)


@pytest.mark.parametrize(("backend", "format", "cc", "act"), BACKENDS)
def test_restore_is_bit_exact(backend: str, format: str, cc: tuple[int, int], act: str) -> None:
    layer = plain_layer(backend, format)
    _, _, _, prepared = run(layer, backend, cc, act=act)
    for got, given in zip(prepared.restore(), (layer.w13, layer.w2), strict=True):
        assert torch.equal(got.codes, given.codes)
        assert torch.equal(got.scale, given.scale)
        for name in ("global_scale", "input_scale"):
            a, b = getattr(got, name), getattr(given, name)
            assert (a is None and b is None) or torch.equal(a, b)
    for got_bias, given_bias in zip(prepared.restore_bias(), (layer.bias13, layer.bias2), strict=True):
        assert (got_bias is None and given_bias is None) or torch.equal(got_bias, given_bias)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_the_oracle_agrees_with_fp4_ref(format: str) -> None:
    """Layer.reference (its formulas, written anew) equals fp4.ref.moe on the same activations, in float64."""
    from fp4.ref.moe import moe

    layer = Layer(format, "interleaved", activation=GPT_OSS)
    want = moe(
        layer.x.double(), layer.w13, layer.w2, layer.ids, layer.weights, gate_up=layer.order, activation=layer.activation,
        bias13=layer.bias13, bias2=layer.bias2, acc=torch.float64, out_dtype=torch.float64,
    )  # fmt: skip
    assert error(layer.reference(layer.plain), want) < 1e-9
