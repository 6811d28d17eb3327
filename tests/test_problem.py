"""What backends are asked about is the layer that was given: a fact that ``prepare`` leaves out is a layer that is served wrongly."""

from __future__ import annotations

import importlib.metadata
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import fp4
from fp4.gpu import registry
from fp4.gpu.backends import reference
from fp4.gpu.device import Device
from fp4.gpu.problem import Problem
from fp4.gpu.registry import Ok

LINEAR = fp4.quantize(torch.randn(96, 64), "nvfp4")
W13, W2 = fp4.quantize(torch.randn(4, 128, 32), "mxfp4"), fp4.quantize(torch.randn(4, 32, 64), "mxfp4")
N13, N2 = fp4.quantize(torch.randn(4, 128, 32), "nvfp4"), fp4.quantize(torch.randn(4, 32, 64), "nvfp4")
EACH = torch.tensor([0.5, 0.25, 0.125, 0.0625])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Problem]]:
    """The problems that the winning backend is asked about."""
    seen: list[Problem] = []
    names = {"name": "mine", "probe": lambda: Ok(), "supports": lambda p: seen.append(p) or Ok(1, "mine"), "layouts": reference.layouts}
    module = types.SimpleNamespace(**names, run=reference.run)
    entry = types.SimpleNamespace(name="mine", value="mine_fp4", load=lambda: module)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry])
    registry.reset()
    yield seen
    monkeypatch.undo()
    registry.reset()


@pytest.mark.parametrize(
    ("q", "more", "want"),
    [
        (
            LINEAR,
            {},
            {"op": "matmul", "n": 96, "k": 64, "format": fp4.NVFP4, "global_scales": "tensor", "input_scale": False, "bias": False},
        ),
        (fp4.quantize(torch.randn(8, 64), "mxfp4"), {}, {"n": 8, "format": fp4.MXFP4, "global_scales": "none"}),
        (replace(LINEAR, input_scale=torch.tensor(0.5)), {}, {"input_scale": True}),
        (LINEAR, {"act": "keep"}, {"act": "keep"}),
        (LINEAR, {"act_dtype": torch.float16, "out_dtype": torch.float32}, {"act_dtype": torch.float16, "out_dtype": torch.float32}),
    ],
)
def test_linear(asked: list[Problem], q: Any, more: dict[str, Any], want: dict[str, Any]) -> None:
    fp4.prepare(q, **more)
    assert asked
    assert all({name: getattr(p, name) for name in want} == want for p in asked if p.act_dtype == more.get("act_dtype", torch.bfloat16))


@pytest.mark.parametrize(
    ("w13", "w2", "more", "want"),
    [
        (W13, W2, {}, {"op": "moe", "experts": 4, "local": None, "hidden": 32, "intermediate": 64, "topk": None, "tp": (0, 1)}),
        (W13, W2, {}, {"bias": False, "global_scales": "none", "input_scale": False, "activation": fp4.SiLU(), "gate_up": "up_gate"}),
        (W13, W2, {"bias13": torch.ones(4, 128)}, {"bias": True}),
        (W13, W2, {"bias2": torch.ones(4, 32)}, {"bias": True}),
        (W13, W2, {"topk": 3, "activation": fp4.SwiGLU(limit=None)}, {"topk": 3, "activation": fp4.SwiGLU(limit=None)}),
        (W13, W2, {"local_experts": (1, 3)}, {"experts": 4, "local": (1, 3), "local_experts": 2}),
        (W13, W2, {"tp": (1, 2)}, {"tp": (1, 2), "intermediate": 32, "hidden": 32}),
        (W13, W2, {"act": "keep", "act_dtype": torch.float16}, {"act": "keep", "act_dtype": torch.float16}),
        (W13, W2, {"out_dtype": torch.float32}, {"out_dtype": torch.float32}),
        (N13, N2, {}, {"global_scales": "tensor"}),
        (N13, replace(N2, global_scale=EACH), {}, {"global_scales": "expert"}),
        (replace(N13, global_scale=EACH), N2, {}, {"global_scales": "expert"}),
        (replace(N13, input_scale=torch.tensor(0.5)), N2, {}, {"input_scale": True}),
    ],
)
def test_experts(asked: list[Problem], w13: Any, w2: Any, more: dict[str, Any], want: dict[str, Any]) -> None:
    fp4.prepare_moe(w13, w2, gate_up="up_gate", **more)
    assert asked
    assert all({name: getattr(p, name) for name in want} == want for p in asked if p.act_dtype == more.get("act_dtype", torch.bfloat16))


@pytest.mark.parametrize("group", ["tp", "ep"])
def test_a_rank_is_one_of_its_group(group: str) -> None:
    with pytest.raises(fp4.FormatMismatch, match=rf"{group} is \(2, 2\); need \(rank, size\)"):
        Problem("matmul", fp4.NVFP4, Device.of("sm90"), **{group: (2, 2)})  # type: ignore[arg-type]


@pytest.mark.parametrize(("ratio", "scales"), [(1.0, "expert"), (2.0, "gate_up_foldable"), (3.0, "gate_up")])
def test_gate_and_up_apart(asked: list[Problem], ratio: float, scales: str) -> None:
    """Codes of small scales, which a factor of two leaves e4m3 numbers."""
    half = fp4.QuantizedTensor("nvfp4", N13.codes[:, :64], torch.full_like(N13.scale[:, :64], 0x30), torch.tensor(0.5))
    fp4.prepare_moe((half, replace(half, global_scale=torch.tensor(0.5 * ratio))), N2, activation=fp4.SiLU())
    assert {p.global_scales for p in asked} == {scales}
