"""Mistakes that fit every shape and give numbers, where the tensors themselves tell: matrices of an expert exchanged, experts sorted as
text, a second-level scale that is the reciprocal of one."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from layer_cases import random_weight

import fp4
from fp4 import fuse
from fp4.roles import role

SAMPLES = Path(__file__).parent / "data" / "checkpoints"
NAMES = {"llama": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}


def expert(seed: int, name: str) -> fp4.QuantizedTensor:
    return replace(random_weight(seed, "mxfp4", 32, 32), source={"name": name})


def stacks(names: tuple[str, ...], experts: int = 2) -> list[fp4.QuantizedTensor]:
    return [fuse.stack([expert(i, f"model.layers.3.mlp.experts.{i}.{n}.weight") for i in range(experts)]) for n in names]


@pytest.mark.parametrize("names", NAMES.values(), ids=list(NAMES))
def test_gate_up_and_down_in_each_others_place(names: tuple[str, ...]) -> None:
    gate, up, down = stacks(names)
    assert gate.source["name"] == f"model.layers.3.mlp.experts.*.{names[0]}.weight"
    assert [role(q) for q in (gate, up, down)] == ["gate", "up", "down"]
    fp4.prepare_moe((gate, up), down, backend="reference")
    for w13, w2, words in (
        ((up, gate), down, rf"w13\[0\] is '.*\*\.{names[1]}\.weight', the up projection; need the pair \(gate, up\); exchange them"),
        ((gate, down), up, r"w2 is .*, the up projection; need the down projection"),
        ((gate, down), down, r"w13\[1\] is .*, the down projection; need the pair"),
        ((gate, gate), down, r"w13\[1\] is .*, the gate projection; need the pair"),
    ):
        with pytest.raises(fp4.LayoutMismatch, match=words):
            fp4.prepare_moe(w13, w2, backend="reference")
    bare = [replace(q, source={}) for q in (up, gate)]
    fp4.prepare_moe((bare[0], bare[1]), down, backend="reference")  # without names the caller decides
    # no gate: one matrix, which is up or gate
    fp4.prepare_moe(up, down, activation=fp4.ReLU2(), backend="reference")
    with pytest.raises(fp4.LayoutMismatch, match=r"w13 is .*, the down projection; need gate and up"):
        fp4.prepare_moe(down, down, activation=fp4.ReLU2(), backend="reference")


def test_stacked_experts_of_a_checkpoint() -> None:
    ck = fp4.open_checkpoint(SAMPLES / "gpt_oss_mxfp4" / "hf")
    w13, w2 = (ck[f"model.layers.0.mlp.experts.{n}"] for n in ("gate_up_proj", "down_proj"))
    assert isinstance(w13, fp4.QuantizedTensor)
    assert isinstance(w2, fp4.QuantizedTensor)
    assert role(w13) == "gate and up"
    fp4.prepare_moe(w13, w2, backend="reference")
    with pytest.raises(fp4.LayoutMismatch, match=r"w2 is .*gate_up_proj', the gate and up projection"):
        fp4.prepare_moe(w13, w13, backend="reference")


def test_a_stack_is_of_one_matrix() -> None:
    gate, up = expert(0, "l.experts.0.gate_proj.weight"), expert(1, "l.experts.1.up_proj.weight")
    with pytest.raises(
        fp4.LayoutMismatch, match=r"item 1 is 'l\.experts\.1\.up_proj\.weight', the up projection; need the gate projection"
    ):
        fuse.stack([gate, up])


def test_experts_sorted_as_text() -> None:
    """sorted(names): expert 10 stands in the place of expert 2, and tokens go to other experts."""
    parts = {f"l.experts.{i}.up_proj.weight": expert(i, f"l.experts.{i}.up_proj.weight") for i in range(12)}
    with pytest.raises(fp4.LayoutMismatch, match=r"stack: item 3 is expert 11, item 4 is expert 2: the names are sorted as text"):
        fuse.stack([parts[n] for n in sorted(parts)])
    for order in (range(12), range(4, 12), (3, 3, 0, 7), reversed(range(12)), (11, 10, 2)):  # local experts, copies of busy ones
        chosen = [parts[f"l.experts.{i}.up_proj.weight"] for i in order]
        assert torch.equal(fuse.stack(chosen).codes, torch.stack([q.codes for q in chosen]))


@pytest.mark.parametrize("given", [{"global_scale": 672.0}, {"encode_scale": 1 / 672.0}])
def test_a_global_scale_that_is_its_reciprocal(given: dict[str, float]) -> None:
    """2688 / amax for amax / 2688: every scale byte rounds to zero or nearly, and so does the whole tensor, without a word."""
    x = torch.linspace(-3.9, 3.9, 256).reshape(4, 64)
    for top, words in ((1.0, "below 2\\^-6.*: the result is all zeros; .* exchanged"), (2.0, "precision; global_scale is a multiplier")):
        with pytest.warns(UserWarning, match=words) as said:
            q = fp4.quantize(x * top, "nvfp4", **given)
        assert said[0].filename == __file__
        assert bool(fp4.dequantize(q).any()) == (top == 2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fp4.dequantize(fp4.quantize(x, "nvfp4", **{n: 1 / v for n, v in given.items()})).any()
        fp4.quantize(torch.zeros(4, 64), "nvfp4", **given)
        fp4.quantize(x / 100, "nvfp4", **dict.fromkeys(given, 1.0))  # one level of scales: nothing to exchange


@pytest.mark.parametrize("experts", [None, 3])
def test_a_weight_of_millions_is_said(experts: int | None) -> None:
    shape = (32, 64) if experts is None else (experts, 32, 64)
    q = random_weight(1, "nvfp4", *shape)
    assert q.global_scale is not None
    bad = replace(q, global_scale=q.global_scale.clone().fill_(5376.0), source={"name": "l.up.weight"})

    def prepare(q: fp4.QuantizedTensor) -> None:
        if experts is None:
            fp4.prepare(q, "reference")
        else:
            fp4.prepare_moe(q, random_weight(2, "nvfp4", experts, 64, 32), activation=fp4.ReLU2(), backend="reference")

    with pytest.warns(
        UserWarning, match=r"l\.up\.weight: global_scale 5376 makes weights of up to 1\.45e\+07; .* its own reciprocal"
    ) as said:
        prepare(bad)
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare(q)
