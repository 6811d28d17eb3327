"""Arguments of the numeric verbs that are wrong without being a wrong type of call: each was accepted, or ended in a raw Python error."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fp4
from fp4 import recipe as recipe_module

X = torch.linspace(-3, 3, 128).reshape(2, 64)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("elem_max", [math.inf, math.nan, 0, -1, "6", None, True]),
        ("scale_max", [math.inf, "448", []]),
        ("global_zero", [math.inf, 0, None]),
        ("scale_floor", [math.nan, math.inf, -1, "x", True]),
        ("global_floor", [math.nan, math.inf, -1.0, "a"]),
        ("amax_floor", [math.nan, math.inf, -1e-4, []]),
        ("flush", ["yes", None, 1]),
        ("ue8m0_zero", ["no", 2]),
        ("zero_byte", [True, 1.0, "1"]),
        ("name", [3, None]),
    ],
)
def test_recipe_refuses_values_that_no_kernel_can_mean(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(fp4.Fp4Error, match=f"{field} is .*; need") as caught:
            fp4.Recipe(**{field: value})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", '{"foo": 1}', '{"tie": 1', '{"elem_max": NaN}', "{" * 50_000, "", "nope"])
def test_text_that_is_no_recipe(text: str) -> None:
    with pytest.raises(fp4.Fp4Error):
        fp4.quantize(X, recipe=text)


def test_recipes_are_a_mapping() -> None:
    assert fp4.recipes.get("nope") is None
    assert fp4.recipes.get("nope", 3) == 3
    assert fp4.recipes.get("te") is fp4.recipes["te"]
    assert [] not in fp4.recipes
    with pytest.raises(fp4.Fp4Error):
        fp4.recipes.__getitem__([])
    assert recipe_module.get(fp4.recipes["te"].replace(tie="away").key).tie == "away"


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xB8])
@pytest.mark.parametrize("field", ["zero_byte", "underflow_byte"])
def test_stand_in_scale_byte_must_be_a_finite_scale(field: str, byte: int) -> None:
    """0x7F would make a zero block NaN (Model-Optimizer#1633), 0xB8 is negative; for an unsigned scale both are numbers."""
    how = fp4.Recipe(**{field: byte})
    with pytest.raises(fp4.Fp4Error, match="up to 126"):
        fp4.quantize(torch.zeros(1, 16), "nvfp4", recipe=how)
    assert torch.equal(fp4.dequantize(fp4.quantize(torch.zeros(1, 16), "amdfp4", recipe=how)), torch.zeros(1, 16))


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e300])
@pytest.mark.parametrize("name", ["global_scale", "encode_scale"])
def test_second_level_scale_must_be_positive_and_finite(name: str, value: float) -> None:
    for given in (value, torch.tensor(value, dtype=torch.float32)):
        with pytest.raises(fp4.FormatMismatch, match=f"{name} is .*; need positive finite"):
            fp4.quantize(X, "nvfp4", **{name: given})
    with pytest.raises(fp4.FormatMismatch, match="need positive finite"):
        fp4.quantize(X.reshape(2, 1, 64), "nvfp4", **{name: torch.tensor([1.0, value], dtype=torch.float32)})


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp8", "nvfp4_b32", "amdfp4"])
@pytest.mark.parametrize(("shape", "axis"), [((0, 64), -1), ((64, 0), 0), ((3, 0, 64), -1), ((0, 2, 64), 2), ((64, 3, 0), 0)])
def test_no_rows_straight_into_a_layout(fmt: str, shape: tuple[int, ...], axis: int) -> None:
    """Zero tokens: restore() guessed the number of scale columns from no bytes at all."""
    plain = fp4.quantize(torch.zeros(shape), fmt, axis=axis)
    back = fp4.quantize(torch.zeros(shape), fmt, axis=axis, scale_layout="sf_128x4").restore()
    assert back.scale.shape == plain.scale.shape
    assert fp4.dequantize(back).shape == shape


def test_sparse_input_is_refused() -> None:
    with pytest.raises(fp4.FormatMismatch, match="need a dense tensor"):
        fp4.quantize(torch.eye(64).to_sparse())


@pytest.mark.parametrize("more", [{"shape": "ab"}, {"shape": 3}, {"shape": (2.0, 64)}, {"axis": "x"}, {"axis": 0.5}])
def test_quantized_tensor_of_no_shape(more: dict[str, Any]) -> None:
    q = fp4.quantize(X)
    with pytest.raises(fp4.FormatMismatch, match=r"need a (tuple of )?whole number"):
        fp4.QuantizedTensor(format="nvfp4", codes=q.codes, scale=q.scale, **more)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"device": ""}, "is no torch device"),
        ({"device": "tpu"}, "is no torch device"),
        ({"device": "cuda:-3"}, "is no torch device"),
        ({"device": "sm²0"}, "is no capability"),
        ({"device": "sm" + "9" * 400}, "is no capability"),
        ({"device": "cpu", "n": -5}, "n is -5"),
        ({"device": "cpu", "n": 0}, "n is 0"),
        ({"device": "cpu", "n": 1 << 70}, "64 bits"),
        ({"device": "cpu", "k": 63}, "k is 63; nvfp4 needs a multiple of its block 16"),
        ({"device": "cpu", "op": "moe", "experts": -1}, "experts is -1"),
        ({"device": "cpu", "op": "moe", "activation": "gelu"}, "'gelu' is not known"),
        ({"device": "cpu", "op": "moe", "experts": 4, "local": (0, 9)}, "the end of local is 9; need a whole number from 0 to 4"),
        ({"device": "cpu", "op": "moe", "local": (5, 2)}, "the start of local is 5"),
        ({"device": "cpu", "op": "moe", "local": "x"}, "local is 'x'"),
        ({"device": "cpu", "op": "moe", "experts": 8, "topk": 9}, "topk is 9 of 8 experts"),
    ],
)
def test_explain_refuses_layers_that_cannot_exist(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(fp4.Fp4Error, match=text):
        fp4.explain(**arguments)


def test_objects_of_bytes_compare_and_hash_by_identity() -> None:
    """As a tensor's ``==`` has no truth value; a generated ``__eq__`` would raise from inside ``in`` and ``list.remove``."""
    pairs = [[fp4.quantize(X) for _ in range(2)], [fp4.to_layout(fp4.quantize(X).scale, "sf_128x4") for _ in range(2)]]
    pairs.append([fp4.quantize(X, scale_layout="sf_128x4") for _ in range(2)])
    for a, b in pairs:
        assert a == a
        assert a != b
        assert len({a, b}) == 2
        assert [a, b].index(b) == 1


def test_the_scale_of_a_stored_parameter_carries_no_gradient() -> None:
    stored = fp4.quantize(torch.nn.Parameter(torch.randn(4, 64)), scale_layout="sf_128x4")
    assert not stored.global_scale.requires_grad


def test_explain_takes_the_name_of_an_activation(capsys: pytest.CaptureFixture[str]) -> None:
    """A name must be asked about as the value that prepare_moe makes of it."""
    for name, value in (("silu", fp4.SiLU()), ("situ", fp4.SiTU()), ("relu2", fp4.ReLU2())):
        answers = [
            fp4.explain(op="moe", format="nvfp4", device="sm100", activation=a, input_scale=True, assume_installed=True)
            for a in (name, value)
        ]
        assert answers[0] == answers[1]
        assert answers[0].problem.activation == value


@pytest.mark.parametrize(
    ("fmt", "codes", "scale"),
    [
        ("nvfp4", "float4_e2m1fn_x2", "float8_e4m3fn"),
        ("mxfp4", "float4_e2m1fn_x2", "float8_e8m0fnu"),
        ("mxfp8", "float8_e4m3fn", "float8_e8m0fnu"),
        ("amdfp4", "float4_e2m1fn_x2", "uint8"),
    ],
)
def test_bytes_of_one_type_are_not_read_as_another(fmt: str, codes: str, scale: str) -> None:
    """An e8m0 tensor given as an e4m3 scale became other numbers without a word (the kind of flashinfer#3398)."""
    q = fp4.quantize(X, fmt)
    labels = ("float4_e2m1fn_x2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
    for name, right in (("codes", codes), ("scale", scale)):
        for label in {*labels, "uint8", "int8", right}:
            parts = {"codes": q.codes, "scale": q.scale}
            parts[name] = parts[name].view(getattr(torch, label))
            if name == "scale" and label == "int8":  # may as well be exponents without their bias
                with pytest.raises(fp4.FormatMismatch, match=f"scale is int8; {fmt} has .* raw bits"):
                    fp4.QuantizedTensor(format=fmt, global_scale=q.global_scale, **parts)
            elif label in (right, "uint8", "int8"):
                again = fp4.QuantizedTensor(format=fmt, global_scale=q.global_scale, **parts)
                assert torch.equal(fp4.dequantize(again), fp4.dequantize(q))
            else:
                with pytest.raises(fp4.FormatMismatch, match=f"{name} is torch.{label}; {fmt} has"):
                    fp4.QuantizedTensor(format=fmt, global_scale=q.global_scale, **parts)
