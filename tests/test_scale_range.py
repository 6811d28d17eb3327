"""Block-scale bytes that a backend reads differently from the format are refused by prepare, or left to another backend."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from layer_cases import random_weight

import fp4
from fp4.gpu import registry, scale_range
from fp4.gpu.backends import reference
from fp4.gpu.backends import triton_kernels as tk
from fp4.gpu.device import Device
from fp4.gpu.problem import Problem
from fp4.gpu.registry import Ok
from fp4.prepared import Weights

LIMITS = {"nvfp4": (0x00, 0x7E), "mxfp4": (0x01, 0xFE)}


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The reference behind a backend that does not read every byte."""
    module = types.SimpleNamespace(
        name="narrow", probe=lambda: Ok(), supports=lambda p: Ok(1), layouts=reference.layouts, run=reference.run,
        exact_scale_range=lambda p: LIMITS[p.format.name],
    )  # fmt: skip
    monkeypatch.setattr(registry, "_discover", lambda: iter({"narrow": module, "reference": reference}.items()))
    registry.reset()
    yield
    monkeypatch.undo()
    registry.reset()


@pytest.mark.parametrize(("fmt", "bytes_"), [("nvfp4", (0x00, 0x01, 0x7E)), ("mxfp4", (0x01, 0xFE))])
def test_bytes_inside_are_stored(narrow: None, fmt: str, bytes_: tuple[int, ...]) -> None:
    w = random_weight(1, fmt, 48, 64)
    for i, byte in enumerate(bytes_):
        w.scale[i] = byte
    p = fp4.prepare(w)
    assert p.backend == "narrow"
    assert torch.equal(p.restore().scale, w.scale)


@pytest.mark.parametrize(("fmt", "byte"), [("nvfp4", 0x7F), ("nvfp4", 0x80), ("nvfp4", 0xB8), ("nvfp4", 0xFF), ("mxfp4", 0xFF)])
@pytest.mark.parametrize("code", [0x00, 0x13])
def test_nan_and_negative_scales_are_refused(narrow: None, fmt: str, byte: int, code: int) -> None:
    """Over zero codes too: NaN times zero is NaN."""
    w = random_weight(1, fmt, 48, 64)
    w.scale[5, 1], w.codes[5] = byte, code
    with pytest.raises(fp4.FormatMismatch, match=rf"prepare: block scale byte {byte:#04x} at \[5, 1\] is outside .* repair the checkpoint"):
        fp4.prepare(w)
    assert fp4.prepare(w, "reference").backend == "reference"


def test_zeros_of_eight_bits(narrow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """e4m3 codes are zero as 0x00 and 0x80 only; 0x08 is 2^-6."""
    monkeypatch.setitem(LIMITS, "mxfp8", (0x01, 0xFE))
    w = fp4.quantize(torch.randn(48, 64), "mxfp8")
    w.scale[5, 1] = 0
    w.codes[5] = 0x80
    assert fp4.prepare(w).backend == "narrow"
    w.codes[5, 40] = 0x08
    assert fp4.prepare(w).backend == "reference"


def test_what_is_broken_is_named_before_what_is_out_of_range(narrow: None) -> None:
    w = random_weight(1, "mxfp4", 48, 64)
    w.codes[:] = 0x11
    w.scale[3, 0], w.scale[9, 1] = 0x00, 0xFF
    with pytest.raises(fp4.FormatMismatch, match=r"block scale byte 0xff at \[9, 1\]"):
        fp4.prepare(w)


def test_a_number_that_the_backend_cannot_read_goes_to_the_next(narrow: None) -> None:
    """ue8m0 byte 0 is 2^-127, and 0.0 in kernels that shift it into an exponent. Over zeros both are zero."""
    w = random_weight(1, "mxfp4", 48, 64)
    w.scale[7, 1] = 0
    w.codes[7] = 0x80  # 0 and -0
    assert fp4.prepare(w).backend == "narrow"
    w.codes[7, 31] = 0x10
    p = fp4.prepare(w)
    assert p.backend == "reference"
    assert "passed over: these values: prepare: block scale byte 0x00 at [7, 1] is outside 0x01..0xfe" in p.reasons
    with pytest.raises(fp4.Unsupported, match="narrow cannot hold these block scales"):
        fp4.prepare(w, "narrow")


def test_experts_are_named(narrow: None) -> None:
    w13, w2 = random_weight(1, "mxfp4", 3, 64, 64), random_weight(2, "mxfp4", 3, 64, 32)
    w2.scale[2, 9, 0] = 0xFF
    with pytest.raises(fp4.FormatMismatch, match=r"prepare_moe: block scale byte 0xff at \[2, 9, 0\] of w2 is outside"):
        fp4.prepare_moe(w13, w2, gate_up="gate_up")


def problem(cc: tuple[int, int], fmt: str, **more: Any) -> Problem:
    return Problem("matmul", fmt, Device.fake(cc), n=48, k=64, **more)  # type: ignore[arg-type]


def test_what_each_backend_states() -> None:
    """The reference and our kernels read every byte, the block-scaled tensor cores no sign; vendor kernels less."""
    from fp4.gpu.backends import _flashinfer_scales, triton

    for fmt, vendor in LIMITS.items():
        for cc in ((8, 0), (9, 0), (10, 0), (12, 0)):
            assert scale_range.stated(reference, problem(cc, fmt)) == scale_range.EVERY
            assert scale_range.stated(triton, problem(cc, fmt)) == scale_range.EVERY
        assert scale_range.stated(triton, problem((12, 0), fmt, act=fmt)) == (vendor if fmt == "nvfp4" else scale_range.EVERY)
        assert _flashinfer_scales.exact_scale_range(problem((10, 0), fmt)) == vendor
        assert tk.exact_scale_range(problem((9, 0), fmt)) == vendor
    for name in registry.backends():
        if name.startswith("flashinfer"):
            assert registry.module(name).exact_scale_range is _flashinfer_scales.exact_scale_range  # type: ignore[union-attr]


@pytest.mark.parametrize("byte", [103, 104, 140, 141])
def test_half_precision_products_of_strided_weights(byte: int) -> None:
    """0.5 * 2^(104 - 127) is the smallest number of float16 and 6 * 2^(140 - 127) below its largest; one binade further they are not."""
    w = random_weight(1, "mxfp4", 48, 64)
    w.scale[3, 1] = byte
    scale = torch.tensor(2.0 ** (byte - 127))
    codes = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    fits = bool(((codes * scale).half().float() == codes * scale).all())
    assert fits is (byte in (104, 140))
    both = None if fits else (torch.bfloat16,)
    assert tk._act_dtypes(problem((8, 0), "mxfp4"), Weights(w=w)) == both
    half = problem((8, 0), "mxfp4", act_dtype=torch.float16)
    if fits:
        assert tk._act_dtypes(half, Weights(w=w)) is None
    else:
        with pytest.raises(fp4.Unsupported, match="leave the range of float16; use bfloat16 x"):
            tk._act_dtypes(half, Weights(w=w))
    assert tk._act_dtypes(problem((9, 0), "mxfp4"), Weights(w=w)) is None  # swizzled weights take bfloat16 only
