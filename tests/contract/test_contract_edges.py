"""One bias of two, another dtype of the result, a rank without experts, and activations that a kernel has only in part."""

from __future__ import annotations

from typing import Any

import pretend
import pytest
import torch
from cases import Layer, poisoned
from emulate import Emulator
from test_contract_moe import GPT_OSS, agree, run

import fp4
from fp4.gpu.device import Device

SM100 = (10, 0)
#: backend, format, what its kernel makes of x
ROUTES = [
    ("flashinfer_cutlass", "nvfp4", Layer.nvfp4),
    ("flashinfer_trtllm", "nvfp4", Layer.nvfp4_shared),
    ("flashinfer_trtllm", "mxfp4", Layer.plain),
]


@pytest.mark.parametrize("missing", ["bias13", "bias2"])
@pytest.mark.parametrize(("backend", "format", "seen"), ROUTES)
def test_one_bias_of_two(backend: str, format: str, seen: Any, missing: str) -> None:
    layer = Layer(format, activation=GPT_OSS)
    setattr(layer, missing, None)
    y, emulator, _, _ = run(layer, backend, SM100)
    agree(layer, y, emulator.exact, layer.reference(lambda e: seen(layer, e)))


def test_a_result_in_another_dtype_is_rounded_once() -> None:
    """cutlass writes float16 itself; a bfloat16 result widened to it has lost three bits."""
    layer, emulator = Layer("nvfp4", activation=GPT_OSS), Emulator(SM100)
    with pretend.gpu(SM100, emulator.functions), poisoned():
        prepared = layer.prepare("flashinfer_cutlass", Device.fake(SM100))
        y = fp4.moe(layer.x, prepared, layer.ids, layer.weights, out_dtype=torch.float16)
    assert torch.equal(y, emulator.exact[:, : layer.hidden].half())
    assert not torch.equal(y, emulator.exact[:, : layer.hidden].bfloat16().half())


def test_a_rank_without_experts_launches_nothing() -> None:
    layer, emulator = Layer("mxfp4", activation=GPT_OSS, local=(2, 2)), Emulator(SM100)
    with pretend.gpu(SM100, emulator.functions), poisoned():
        prepared = layer.prepare("flashinfer_trtllm", Device.fake(SM100))
        y = fp4.moe(layer.x, prepared, layer.ids, layer.weights)
    assert torch.equal(y, torch.zeros_like(layer.x))
    assert not emulator.exact.numel()
    with pytest.raises(fp4.Unsupported, match="equal parts only"):
        layer.prepare("flashinfer_cutlass", Device.fake((12, 0)), act="mxfp8")


@pytest.mark.parametrize(
    ("format", "layer", "why"),
    [
        ("nvfp4", {"activation": GPT_OSS, "pair": "foldable"}, "one clamp limit"),
        ("mxfp4", {"activation": fp4.SiTU(linear_beta=None), "bias": False}, "no SiTU with a plain up half"),
    ],
)
def test_refused_in_words(format: str, layer: dict[str, Any], why: str) -> None:
    pretend.flashinfer()
    with pytest.raises(fp4.Unsupported, match=why):
        Layer(format, **layer).prepare("flashinfer_trtllm", Device.fake(SM100))
