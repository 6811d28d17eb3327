"""What the back end refuses, in words, and the two kinds of parallelism that it serves."""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pretend
import pytest
import torch
from cases import Layer, error, poisoned, quantized
from emulate import Emulator
from test_contract_moe import BACKENDS, GPT_OSS, installed_sm90_layout, plain_layer

import fp4
import fp4.prepared
from fp4.gpu.device import Device

SM100 = (10, 0)

REFUSED = [
    ("flashinfer_trtllm", "nvfp4", {"order": None, "activation": fp4.ReLU2(), "bias": False}, {}, "no activation relu2"),
    ("flashinfer_trtllm", "nvfp4", {"activation": fp4.SiTU(), "bias": False}, {}, "no activation situ|no SiTU kernels"),
    ("flashinfer_trtllm", "nvfp4", {"activation": GPT_OSS, "pair": "different"}, {}, "one clamp limit"),
    ("flashinfer_trtllm", "mxfp4", {"activation": GPT_OSS}, {"act_dtype": torch.float16}, "bf16 only"),
    ("flashinfer_cutedsl", "nvfp4", {"activation": GPT_OSS}, {}, "no activation swiglu|has no grouped_gemm_nt_masked"),
    ("flashinfer_cutedsl", "nvfp4", {"activation": fp4.SiLU(), "bias": True}, {}, "has no bias|has no grouped_gemm_nt_masked"),
    ("flashinfer_cutlass", "nvfp4", {"activation": GPT_OSS, "local": (1, 3)}, {}, "equal parts only"),
    ("flashinfer_cutlass", "nvfp4", {"activation": GPT_OSS}, {"act": "keep"}, "asked for keep"),
    ("flashinfer_cudnn", "nvfp4", {"activation": GPT_OSS}, {}, "has no route for moe/nvfp4"),
]


@pytest.mark.parametrize(("backend", "format", "layer", "how", "why"), REFUSED)
def test_refused_with_a_reason(backend: str, format: str, layer: dict[str, Any], how: dict[str, Any], why: str) -> None:
    pretend.flashinfer()
    with pytest.raises(fp4.Unsupported, match=why):
        Layer(format, **layer).prepare(backend, Device.fake(SM100), **how)


@pytest.mark.parametrize(("backend", "format", "cc", "act"), [b for b in BACKENDS if b[1] == "mxfp4"])
@pytest.mark.parametrize("which", ["w13", "w2", "pair"])
def test_a_global_scale_of_mxfp4_is_not_left_out(backend: str, format: str, cc: tuple[int, int], act: str, which: str) -> None:
    """flashinfer#1592: these kernels have no operand for it, so the result would be that of a global scale of 1."""
    pretend.flashinfer()
    layer = plain_layer(backend, format)
    if which == "pair":
        gate, up = (quantized("mxfp4", 4, 96, 160, seed=s, global_scale=torch.tensor(0.5 * s)) for s in (1, 2))
        layer.w13, layer.pair, layer.order = (gate, up), "different", "gate_up"
    else:
        setattr(layer, which, replace(getattr(layer, which), global_scale=torch.tensor(0.5)))
    with pytest.raises(fp4.Unsupported, match="no place for a global scale"):
        layer.prepare(backend, Device.fake(cc), act=act)


@pytest.mark.parametrize("value", [0.0, float("inf")])
def test_an_expert_that_calibration_never_reached(value: float) -> None:
    """input_scale 0 or infinite for one expert is refused with its number (vllm#45212)."""
    pretend.flashinfer()
    layer = Layer("nvfp4", activation=GPT_OSS)
    layer.w2.input_scale[3] = value
    with pytest.raises(fp4.FormatMismatch, match=r"input_scale of expert 3 is (0|inf); need a finite multiplier above 0"):
        layer.prepare("flashinfer_cutlass", Device.fake(SM100))


@pytest.mark.parametrize(("backend", "format", "cc", "act"), [b for b in BACKENDS if b[1] == "mxfp4" and b[3] == "keep"])
def test_tensor_parallel_parts_add_up(backend: str, format: str, cc: tuple[int, int], act: str) -> None:
    """Two ranks: the partial outputs sum to the whole and hold the bias of the second product once."""
    layer = plain_layer(backend, format, inter=128)
    total = torch.zeros(layer.tokens, layer.hidden, dtype=torch.float64)
    for rank in range(2):
        emulator = Emulator(cc, "B")
        if cc == (9, 0):
            from test_contract_moe import installed_sm90_layout

            emulator = Emulator(cc, installed_sm90_layout())
        with pretend.gpu(cc, emulator.functions), poisoned():
            fp4.moe(layer.x, layer.prepare(backend, Device.fake(cc), act=act, tp=(rank, 2)), layer.ids, layer.weights)
        total += emulator.exact[:, : layer.hidden]
    assert error(total, layer.reference(layer.plain)) < 2e-6


def test_saved_weights_come_back(tmp_path: Path) -> None:
    """A file of prepared weights restores bit for bit, a folded gate/up scale included, without the GPU it was made for."""
    pretend.flashinfer()
    layer = Layer("nvfp4", pair="foldable", activation=fp4.SiLU(), bias=False)
    layer.prepare("flashinfer_cutlass", Device.fake(SM100)).save(tmp_path / "experts.safetensors")
    loaded = fp4.prepared.load(tmp_path / "experts.safetensors", device="cpu")
    (gate, up), w2 = loaded.restore()
    for got, given in ((gate, layer.w13[0]), (up, layer.w13[1]), (w2, layer.w2)):
        assert torch.equal(got.codes, given.codes)
        assert torch.equal(got.scale, given.scale)
    with pytest.raises(fp4.LayoutMismatch, match="prepared for SM100"):
        fp4.moe(layer.x, loaded, layer.ids, layer.weights)


def test_a_scale_that_flashinfer_cannot_hold_goes_to_another_backend() -> None:
    """ue8m0 byte 0 is 2^-127 in the format and 0.0 in some FlashInfer kernels: forced it is refused, else Triton takes the layer."""
    layer = Layer("mxfp4", activation=fp4.SwiGLU())
    layer.w13.scale[2, 5, 1], layer.w13.codes[2, 5] = 0, 0x11
    with pretend.gpu((10, 0), Emulator((10, 0)).functions):
        p = layer.prepare(None, Device.fake((10, 0)))  # type: ignore[arg-type]
        assert p.backend == "triton"
        assert "passed over: these values" in p.reasons
        with pytest.raises(fp4.Unsupported, match=r"block scale byte 0x00 at \[2, 5, 1\]"):
            layer.prepare("flashinfer_trtllm", Device.fake((10, 0)))
        layer.w13.codes[2, 5] = 0x88  # a block of zeros, negative ones too, is zero whatever the scale
        assert layer.prepare("flashinfer_trtllm", Device.fake((10, 0))).backend == "flashinfer_trtllm"
        layer.w13.scale[1, 0, 0] = 0xFF  # NaN is no value that another backend would give
        with pytest.raises(fp4.FormatMismatch, match="repair the checkpoint"):
            layer.prepare(None, Device.fake((10, 0)))  # type: ignore[arg-type]


def test_tuning_buckets_hold_the_tokens() -> None:
    """FlashInfer tunes for powers of two up to ``tune_max_num_tokens``: one below the batch would run it on a tactic of a smaller one."""
    from fp4.gpu.backends._flashinfer_route import tune_tokens

    assert [tune_tokens(t) for t in (1, 2, 3, 4, 5, 1024, 1025)] == [1, 2, 4, 4, 8, 1024, 2048]


@pytest.mark.parametrize(("backend", "format", "cc", "act"), [("flashinfer_cutlass", "linear", SM100, "any"), *BACKENDS])
def test_no_environment_variable_changes_the_quantisers(
    backend: str, format: str, cc: tuple[int, int], act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLASHINFER_NVFP4_4OVER6 turns another rule of block scales on where ``nvfp4_4over6`` is left out; None is off, whatever it says."""
    from fp4.gpu.backends import _flashinfer_bind as bind
    from fp4.gpu.backends import flashinfer as routes

    pretend.flashinfer()
    real, passed = bind._find, []

    def watched(name: str) -> Any:
        fn = real(name)
        if not callable(fn) or isinstance(fn, type) or "nvfp4_4over6" not in inspect.signature(fn).parameters:
            return fn

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            passed.append((name, kwargs.get("nvfp4_4over6", "from the environment")))
            return fn(*args, **kwargs)

        return call

    layer = plain_layer(backend, format) if format != "linear" else None
    if "nvfp4_4over6" not in inspect.signature(real("fp4_quantize")).parameters:
        pytest.skip("this flashinfer has no argument for it")
    monkeypatch.setenv("FLASHINFER_NVFP4_4OVER6", "1")
    bind.reset()
    monkeypatch.setattr(bind, "_find", watched)
    emulator = Emulator(cc, installed_sm90_layout() if cc == (9, 0) else "B")
    try:
        with pretend.gpu(cc, emulator.functions), poisoned():
            if layer is None:
                q = quantized("nvfp4", 64, 96, seed=1, global_scale=torch.tensor(0.04), input_scale=torch.tensor(0.002))
                fp4.matmul(torch.ones(3, 96).bfloat16(), fp4.prepare(q, backend, device=Device.fake(cc)))
            else:
                p = layer.prepare(backend, Device.fake(cc), act=act)
                fp4.moe(layer.x, p, layer.ids, layer.weights)
                if backend == "flashinfer_trtllm":
                    logits = torch.randn(layer.tokens, layer.experts, generator=torch.Generator().manual_seed(1))
                    routes.from_logits(p)(layer.x, logits, layer.topk)
    finally:
        monkeypatch.undo()
        bind.reset()
    assert passed, "no function of this route takes the argument"
    assert {value for _, value in passed} == {None}, passed


def test_functions_are_bound_by_the_names_that_a_release_has() -> None:
    """A required name that is missing is an error before any call; an optional one is left out; a tuple is told by the annotation."""
    from fp4.gpu.backends._flashinfer_bind import Function

    def old(a: int, topk_ids: torch.Tensor) -> Any:
        return a, topk_ids

    def new(a: int, topk_ids: torch.Tensor | tuple[torch.Tensor, torch.Tensor], extra: int = 7) -> Any:
        return a, topk_ids, extra

    def anything(**names: Any) -> Any:
        return names

    assert Function("old", old).bind(("a",), {"extra": None})(a=1, topk_ids=2) == (1, 2)
    assert Function("new", new).bind(("a", "extra"), {"extra": None})(a=1, topk_ids=2) == (1, 2, None)
    with pytest.raises(fp4.BackendUnavailable, match=r"old has no parameter extra, more; it has a, topk_ids; install a release"):
        Function("old", old).bind(("a", "extra", "more"))
    assert Function("anything", anything).bind(("a",), {"b": 3})(a=1) == {"a": 1}
    assert [Function("f", f).takes_tuple("topk_ids") for f in (old, new, anything)] == [False, True, False]
