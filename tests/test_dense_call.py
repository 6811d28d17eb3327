"""What a dense product hands to its kernels, without a GPU: aligned operands, and fp16 x that the scales do not fit, as two bf16 terms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fp4.gpu.kernels import dense, dense_fp8

NONE = torch.zeros(4, dtype=torch.int32)


def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device is the one of every weight."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dense, "_current", lambda: 0)


@pytest.fixture(params=["w4a16", "w4a8"])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A weight [48, 64] whose plans keep what they are called with."""
    no_gpu(monkeypatch)
    seen: list[Any] = []

    def plan(*_: Any) -> Any:
        return lambda x, bias, y, m: seen.append((x, bias, y, m))

    if request.param == "w4a16":
        d: Any = dense.Dense(NONE, NONE, None, 48, 64, 32, {"low": 116, "high": 123, "any": False, "fp16": True}, "plain")
        d._plan = plan
    else:
        d = dense_fp8.Dense8(NONE, NONE, torch.full((48,), 120, dtype=torch.uint8), None, 48, 64, wide=False)
        d._build = plan
    return d, seen


def test_kernels_get_aligned_rows(product: Any) -> None:
    """They load 16 bytes at a time: a view that starts elsewhere, or has gaps, is copied."""
    d, seen = product
    store = torch.randn(1000, dtype=torch.bfloat16)
    odd, odd_bias = store[1 : 1 + 3 * 64].view(3, 64), store[3 : 3 + 48]
    wide = torch.randn(3, 128, dtype=torch.bfloat16)
    for x in (odd, wide[:, ::2], wide[:, 64:], torch.randn(3, 64, dtype=torch.bfloat16)):
        y = d(x, odd_bias, torch.float32)
        got, bias, out, m = seen.pop()
        assert out is y
        assert (m, y.shape, y.dtype) == (3, (3, 48), torch.float32)
        for t, want in ((got, x), (bias, odd_bias)):
            assert t.data_ptr() % 16 == 0
            assert t.is_contiguous()
            assert torch.equal(t, want)


def test_no_rows_launch_nothing(product: Any) -> None:
    d, seen = product
    assert d(torch.empty(0, 64, dtype=torch.bfloat16)).shape == (0, 48)
    assert not seen


@pytest.mark.parametrize("biased", [False, True])
def test_half_precision_as_two_terms(monkeypatch: pytest.MonkeyPatch, biased: bool) -> None:
    """hi + lo is x, bit for bit, subnormals too; an infinity or NaN stays one, and is not made from inf - inf."""
    no_gpu(monkeypatch)
    w = torch.eye(64)[:48]
    given: list[torch.Tensor] = []

    class Product(dense.Dense):
        def __call__(self, x: torch.Tensor, bias: Any = None, out_dtype: Any = None) -> torch.Tensor:
            assert (x.dtype, bias, out_dtype) == (torch.bfloat16, None, torch.float32)
            given.append(x)
            return torch.where(x.isfinite(), x.float(), 0.0) @ w.T + torch.where(x.isfinite(), 0.0, x.float())[:, :48]

    d = Product(NONE, NONE, None, 48, 64, 32, {"low": 90, "high": 140, "any": False, "fp16": False}, "plain")
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = every.view(-1, 64)
    bias = torch.linspace(-3, 3, 48) if biased else None
    y = torch.empty(len(x), 48, dtype=torch.float32)
    assert d._split_fp16(x, bias, y) is y
    want = x[:, :48].float() + (0.0 if bias is None else bias)
    assert torch.equal(y.isnan(), want.isnan())
    assert torch.equal(torch.nan_to_num(y), torch.nan_to_num(want))
    hi, lo = given[0].float().chunk(2)
    assert torch.equal(hi + lo, x.float()) or torch.equal(torch.nan_to_num(hi + lo), torch.nan_to_num(x.float()))
    assert bool(lo.isfinite().all())
