"""Second-level scales that are no scales: NaN, infinite, negative; and zero, which an all-zero tensor has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layer_cases import random_weight
from quantize_cases import DTYPES, both

import fp4
from fp4.ref.scales import default_global_scale

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BAD = (-1.0, float("nan"), float("inf"), float("-inf"), -(2.0**-100))


def tensor(shape: tuple[int, ...], **second: object) -> fp4.QuantizedTensor:
    codes, scale = (
        torch.zeros(*shape[:-1], shape[-1] // 2, dtype=torch.uint8),
        torch.full((*shape[:-1], shape[-1] // 16), 0x38, dtype=torch.uint8),
    )
    return fp4.QuantizedTensor("nvfp4", codes, scale, source={"name": "model.layers.7.mlp.up_proj.weight"}, **second)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", BAD)
def test_a_global_scale_that_is_none_is_refused_by_name(value: float) -> None:
    match = rf"up_proj\.weight: global_scale is {value:g}; need a finite multiplier, not negative"
    for given in (
        value,
        torch.tensor(value),
        torch.tensor([value]),
        torch.tensor(value, dtype=torch.bfloat16),
        torch.nn.Parameter(torch.tensor(value)),
    ):
        with pytest.raises(fp4.FormatMismatch, match=match):
            tensor((4, 32), global_scale=given)
    per_expert = torch.tensor([0.5, 0.0, value])
    with pytest.raises(fp4.FormatMismatch, match=rf"global_scale of expert 2 is {value:g}"):
        tensor((3, 4, 32), global_scale=per_expert)
    good = tensor((3, 4, 32), global_scale=torch.ones(3))
    with pytest.raises(fp4.FormatMismatch, match="global_scale of expert 2"):
        replace(good, global_scale=per_expert)


@pytest.mark.parametrize("value", [*BAD, 0.0])
def test_an_input_scale_must_be_above_zero(value: float) -> None:
    with pytest.raises(fp4.FormatMismatch, match=rf"up_proj\.weight: input_scale is {value:g}; need a finite multiplier above 0"):
        tensor((4, 32), input_scale=torch.tensor(value))


def test_zero_and_no_experts_are_legal() -> None:
    q = replace(random_weight(1, "nvfp4", 8, 64), global_scale=torch.tensor(0.0))
    assert not fp4.dequantize(q).any()
    assert tensor((0, 4, 32), global_scale=torch.zeros(0)).global_scale is not None
    bias = torch.randn(8)
    for backend in ("reference", "triton"):
        where = DEVICE if backend == "triton" else "cpu"
        y = fp4.matmul(torch.randn(3, 64, device=where), fp4.prepare(q.to(where), backend, act_dtype=torch.float32), bias.to(where))
        assert torch.equal(y.cpu(), bias.expand(3, 8))


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning")
@pytest.mark.parametrize("name", fp4.recipes.names())
@pytest.mark.parametrize("value", [2.0**-149, 1e-42, 2.0**-128, 2.0**-127])
def test_zero_blocks_under_a_global_scale_without_a_reciprocal(name: str, value: float) -> None:
    """1 / g is infinite below 2^-128, and infinity times a zero block's amax is a NaN: its scale byte was 0x90, negative, its codes 7."""
    for dtype in DTYPES:
        x = torch.tensor([[0.0, -0.0] * 8, [1.0, -3.0] * 8], dtype=dtype)
        q = fp4.quantize(x, "nvfp4", name, global_scale=value)
        zero_byte = fp4.recipes[name].zero_byte
        assert q.scale.tolist() == [[zero_byte], [0x7E]]
        assert not (q.codes[0] & 0x77).any()
        assert torch.equal(fp4.dequantize(q)[0], torch.zeros(16))
        both(x, fp4.NVFP4, fp4.recipes[name], torch.tensor(value))
    g, gs = default_global_scale(torch.tensor(2.0**-130), fp4.Recipe(global_floor=0.0))
    assert float(gs) == torch.finfo(torch.float32).max
    assert 0 < float(g) < 2.0**-128


@pytest.mark.parametrize("name", ["global_scale", "input_scale"])
def test_prepare_looks_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the constructor does not look, and a tensor may be written over: prepare reads the few values, names the tensor."""
    monkeypatch.setattr("fp4.tensor._readable", lambda t: False)  # as on a GPU
    q = tensor((4, 32), **{name: torch.tensor(0.5)})
    getattr(q, name).fill_(float("nan"))
    with pytest.raises(fp4.FormatMismatch, match=rf"prepare: model\.layers\.7\.mlp\.up_proj\.weight: {name} is nan"):
        fp4.prepare(q, "reference")
    w13, w2 = random_weight(1, "nvfp4", 3, 64, 32), random_weight(2, "nvfp4", 3, 32, 32)
    w2 = replace(w2, **{name: torch.ones(3)})
    getattr(w2, name)[1] = -2.0
    with pytest.raises(fp4.FormatMismatch, match=f"prepare_moe: {name} of expert 1 is -2"):
        fp4.prepare_moe(w13, w2, gate_up="gate_up", backend="reference")


def test_prepare_looks_at_gate_and_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp4.tensor._readable", lambda t: False)
    gate, up, w2 = (random_weight(s, "nvfp4", 3, 32, 32) for s in range(3))
    assert up.global_scale is not None
    up.global_scale[2] = float("inf")
    with pytest.raises(fp4.FormatMismatch, match="prepare_moe: up: global_scale of expert 2 is inf"):
        fp4.prepare_moe((gate, up), w2, backend="reference")


def test_nothing_is_read_where_that_would_synchronise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta and fake tensors have no values, and a compiler traces none."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr("fp4.tensor.check_second_level", lambda *_: pytest.fail("values were read"))
    codes, scale = torch.zeros(4, 16, dtype=torch.uint8, device="meta"), torch.zeros(4, 2, dtype=torch.uint8, device="meta")
    fp4.QuantizedTensor("nvfp4", codes, scale, torch.tensor(0.5, device="meta"))
    with FakeTensorMode():
        codes, scale = torch.zeros(4, 16, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8)
        fp4.QuantizedTensor("nvfp4", codes, scale, torch.full((), 0.5))
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    tensor((4, 32), global_scale=torch.tensor(0.5))
