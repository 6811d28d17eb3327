"""NVFP4 linear layers: ``mm_fp4`` with each of its kernel libraries, against a decoder built from public sources."""

from __future__ import annotations

from typing import Any

import pretend
import pytest
import spec
import torch
from cases import dense, error, poisoned, quantized
from emulate import Emulator

import fp4
from fp4.gpu.device import Device

TIGHT = 1e-6
BACKENDS = [
    ("flashinfer_cutlass", "fp4_gemm", (10, 0)),
    ("flashinfer_cutlass", "fp4_gemm", (10, 3)),
    ("flashinfer_cutlass", "fp4_gemm", (12, 0)),
    ("flashinfer_cutlass", "fp4_gemm", (12, 1)),
    ("flashinfer_cudnn", "cudnn_fp4_gemm", (10, 0)),
    ("flashinfer_cudnn", "cudnn_fp4_gemm", (12, 0)),
    ("flashinfer_cutedsl", "cute_dsl_fp4_gemm", (10, 0)),
    ("flashinfer_trtllm", "trtllm_gemm", (10, 0)),
    ("flashinfer_trtllm", "trtllm_gemm", (10, 3)),
]


def weight(n: int = 200, k: int = 208, input_scale: float | None = 0.0017) -> fp4.QuantizedTensor:
    second = {} if input_scale is None else {"input_scale": torch.tensor(input_scale)}
    return quantized("nvfp4", n, k, seed=1, global_scale=torch.tensor(0.043), **second)


def inputs(m: int, k: int) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(torch.bfloat16)


def seen(x: torch.Tensor, input_scale: torch.Tensor) -> torch.Tensor:
    """What the quantised activation stands for."""
    codes, scale = spec.nvfp4(x, 1.0 / input_scale)
    return spec.blocks(spec.E2M1[codes], spec.e4m3(scale)) * float(input_scale)


def run(q: fp4.QuantizedTensor, x: torch.Tensor, backend: str, cc: tuple[int, int], bias: Any = None, **kw: Any) -> Any:
    emulator = Emulator(cc)
    with pretend.gpu(cc, emulator.functions) as recorder, poisoned():
        prepared = fp4.prepare(q, backend=backend, device=Device.fake(cc), **kw)
        y = fp4.matmul(x, prepared, bias=bias)
    return y, emulator.exact, recorder, prepared


@pytest.mark.parametrize("m", [1, 32, 33, 130])
@pytest.mark.parametrize(("backend", "function", "cc"), BACKENDS)
def test_matmul(backend: str, function: str, cc: tuple[int, int], m: int) -> None:
    q, x = weight(), inputs(m, 208)
    y, exact, recorder, _ = run(q, x, backend, cc)
    want = seen(x, q.input_scale) @ dense(q).T
    assert recorder.count(function) == 1
    assert error(exact[:, :200], want) < TIGHT
    assert not exact[:, 200:].any()
    assert torch.equal(y, exact[:, :200].to(torch.bfloat16))
    if backend == "flashinfer_trtllm":  # the 8x4 scale order for few rows
        assert recorder.last(function).args[9] is (m <= 32)


@pytest.mark.parametrize(("backend", "function", "cc"), BACKENDS[::2])
def test_bias_and_leading_dimensions(backend: str, function: str, cc: tuple[int, int]) -> None:
    q, x = weight(64, 96), inputs(6, 96)
    bias = 257 + torch.randn(64, generator=torch.Generator().manual_seed(2))  # no bfloat16 numbers
    y, exact, _, _ = run(q, x.view(2, 3, 96), backend, cc, bias=bias)
    assert tuple(y.shape) == (2, 3, 64)
    assert torch.equal(y.view(6, 64), (exact[:, :64].to(torch.bfloat16).float() + bias).to(torch.bfloat16))


def test_a_one_row_view_is_not_taken_for_column_major() -> None:
    """x.T[:1] is contiguous for torch and has row stride 1; FlashInfer's quantiser would transpose it."""
    q = weight(64, 96)
    x = inputs(96, 1).T
    assert x.is_contiguous()
    assert x.stride(-2) == 1
    y, _, _, _ = run(q, x, "flashinfer_cutlass", (10, 0))
    assert torch.equal(y, run(q, x.clone().reshape(-1).view(1, 96), "flashinfer_cutlass", (10, 0))[0])


@pytest.mark.parametrize("value", [1.0, 0.0])
def test_scale_per_call_without_input_scale(value: float) -> None:
    """act='nvfp4' on a weight-only checkpoint: one activation scale a call, amax / 2688; an all-zero x gives zero, not NaN."""
    q, x = weight(input_scale=None), inputs(5, 208) * value
    y, exact, _, _ = run(q, x, "flashinfer_cutlass", (10, 0), act="nvfp4")
    if not value:
        assert not y.any()
        return
    gs = 1.0 / (x.abs().amax().float() / 2688.0)
    codes, scale = spec.nvfp4(x, gs)
    want = spec.blocks(spec.E2M1[codes], spec.e4m3(scale)) / float(gs) @ dense(q).T
    assert error(exact[:, :200], want) < TIGHT


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_one_bad_token_stays_alone_without_input_scale(value: float) -> None:
    """The scale a call is taken from finite values: else one infinity makes every token NaN, and one NaN every token coarse."""
    q, x = weight(input_scale=None), inputs(5, 208)
    want = run(q, x[1:], "flashinfer_cutlass", (10, 0), act="nvfp4")[1]
    x[0, 3] = value
    y, exact, _, _ = run(q, x, "flashinfer_cutlass", (10, 0), act="nvfp4")
    assert torch.equal(exact[1:].isfinite(), torch.ones_like(exact[1:], dtype=torch.bool))
    top = x[1:].abs().amax() >= x[0][x[0].isfinite()].abs().amax()
    assert error(exact[1:, :200], want[:, :200]) < (TIGHT if top else 0.2)
    assert bool(y[1:].isfinite().all())


def test_tiny_values_do_not_overflow_their_scale() -> None:
    q, x = weight(input_scale=None), (inputs(5, 208) * 1e-37).to(torch.bfloat16)
    y, exact, _, _ = run(q, x, "flashinfer_cutlass", (10, 0), act="nvfp4")
    assert bool(y.isfinite().all())
    assert bool(exact.isfinite().all())


def test_weight_only_is_refused_by_name() -> None:
    """A weight without input_scale never becomes W4A4 silently (vllm#54189)."""
    with pytest.raises(fp4.Unsupported, match="carries no input_scale"):
        run(weight(input_scale=None), inputs(1, 208), "flashinfer_cutlass", (10, 0))
    with pytest.raises(fp4.Unsupported, match="asked for keep"):
        run(weight(), inputs(1, 208), "flashinfer_cutlass", (10, 0), act="keep")


def test_zero_rows_launch_nothing() -> None:
    q = weight()
    with pretend.gpu((10, 0), Emulator((10, 0)).functions) as recorder:
        prepared = fp4.prepare(q, backend="flashinfer_cutlass", device=Device.fake((10, 0)))
        assert tuple(prepared.bind()(inputs(0, 208), None, torch.bfloat16).shape) == (0, 200)
        assert recorder.calls == []


@pytest.mark.parametrize(("backend", "function", "cc"), BACKENDS[::2])
def test_restore_is_bit_exact(backend: str, function: str, cc: tuple[int, int]) -> None:
    q = weight()
    got = run(q, inputs(1, 208), backend, cc)[3].restore()
    assert torch.equal(got.codes, q.codes)
    assert torch.equal(got.scale, q.scale)
    assert torch.equal(got.global_scale, q.global_scale)
    assert torch.equal(got.input_scale, q.input_scale)


@pytest.mark.parametrize(("at", "byte"), [((3, 2), 0x7F), ((0, 0), 0xB8)])
def test_scales_outside_the_exact_range_are_refused(at: tuple[int, int], byte: int) -> None:
    q = weight()
    q.scale[at] = byte
    with pytest.raises(fp4.FormatMismatch, match=f"{byte:#04x} at {list(at)}".replace("[", r"\[").replace("]", r"\]")):
        run(q, inputs(1, 208), "flashinfer_cutlass", (10, 0))


@pytest.mark.parametrize("backend", ["flashinfer", "flashinfer_cutlass", "flashinfer_trtllm", "flashinfer_cudnn", "flashinfer_cutedsl"])
@pytest.mark.parametrize("sm", ["sm75", "sm80", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121"])
def test_capabilities_are_names_not_numbers(backend: str, sm: str, capsys: pytest.CaptureFixture[str]) -> None:
    """121 is served where 121 is listed and nowhere else; 90 has no FP4 quantiser at all."""
    pretend.flashinfer()
    serves = {
        "flashinfer_cutlass": {"sm100", "sm103", "sm110", "sm120", "sm121"},
        "flashinfer_cudnn": {"sm100", "sm103", "sm110", "sm120", "sm121"},
        "flashinfer_cutedsl": {"sm100", "sm103"},
        "flashinfer_trtllm": {"sm100", "sm103"},
    }
    serves["flashinfer"] = set.union(*serves.values())
    ranking = fp4.explain("matmul", "nvfp4", sm, n=128, k=128, input_scale=True)
    capsys.readouterr()
    assert ({c.name: bool(c.verdict) for c in ranking}[backend]) is (sm in serves[backend])
