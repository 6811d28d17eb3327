"""Anything at all as any argument of a public verb: it is taken, or it is one typed sentence on one line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fp4
from fp4 import check, fuse
from fp4.errors import shown
from fp4.layout import Layout
from fp4.ref.matmul import matmul as reference_matmul
from fp4.ref.moe import moe as reference_moe
from fp4.testing import mutants

X = torch.randn(4, 64)
Q = fp4.quantize(X, "nvfp4")
W13, W2 = fp4.quantize(torch.randn(2, 64, 64), "mxfp4"), fp4.quantize(torch.randn(2, 64, 32), "mxfp4")


class Subclass(torch.Tensor):
    pass


def _things() -> dict[str, Any]:
    sparse, ints = torch.eye(64).to_sparse(), torch.ones(4, 64, dtype=torch.int64)
    out: dict[str, Any] = {
        "none": None, "one": 1, "minus one": -1, "70 bits": 1 << 70, "thousands of digits": 10**4000, "float": 1.5, "nan": float("nan"),
        "infinity": float("inf"), "true": True, "text": "x", "no text": "", "lines": "a\nb" * 900, "bytes": b"x", "list": [1, 2],
        "object": object(), "dict": {}, "class": int, "function": len, "array": np.zeros(3), "float32": np.float32(2), "int64": np.int64(1),
        "scalar": torch.tensor(1.0), "scalar int": torch.tensor(1), "empty": torch.empty(0), "no rows": torch.empty(0, 64),
        "no columns": torch.empty(4, 0), "bool": ints.bool(), "float64": ints.double(), "complex": ints.to(torch.complex64), "ints": ints,
        "meta": torch.ones(4, 64, device="meta"), "sparse": sparse, "csr": sparse.to_sparse_csr(), "strides": torch.randn(64, 4).T,
        "gradient": torch.randn(4, 64, requires_grad=True), "subclass": X.as_subclass(Subclass), "float8": X.to(torch.float8_e4m3fn),
        "torch's own quantised": torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), "vector": torch.randn(64), "weight": Q,
        "negative bit": torch._neg_view(torch.randn(4, 64)),
        "nested": torch.nested.nested_tensor([torch.randn(2, 64), torch.randn(3, 64)]),
    }  # fmt: skip
    return out


def _layout(**more: Any) -> Any:
    return Layout(**({"name": "x", "spec": "(mo m4) k -> mo k m4"} | more))


def _moe(**more: Any) -> Any:
    ex = fp4.prepare_moe(W13, W2, gate_up="gate_up", activation=fp4.SiLU())
    given = {"x": torch.randn(3, 64), "ex": ex, "topk_ids": torch.zeros(3, 1, dtype=torch.int64), "topk_weights": torch.ones(3, 1)} | more
    return fp4.moe(**given)


def _matmul(**more: Any) -> Any:
    return fp4.matmul(**({"x": torch.randn(3, 64), "w": fp4.prepare(Q)} | more))


MOE = {"x": torch.randn(3, 64), "w13": W13, "w2": W2, "topk_ids": torch.zeros(3, 1, dtype=torch.int64), "topk_weights": torch.ones(3, 1)}
MOE |= {"gate_up": "gate_up", "activation": fp4.SiLU()}

VERBS: dict[str, tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]] = {
    "quantize": (fp4.quantize, {"x": X}, ("x", "format", "recipe", "global_scale", "axis", "encode_scale", "scale_layout")),
    "fake_quantize": (fp4.fake_quantize, {"x": X}, ("x", "format", "recipe", "global_scale", "axis", "encode_scale")),
    "dequantize": (fp4.dequantize, {"q": Q}, ("q", "dtype")),
    "to_layout": (fp4.to_layout, {"t": Q.scale, "layout": "sf_128x4"}, ("t", "layout")),
    "QuantizedTensor": (
        fp4.QuantizedTensor,
        {"format": "nvfp4", "codes": Q.codes, "scale": Q.scale},
        ("format", "codes", "scale", "global_scale", "shape", "axis", "input_scale", "gate_up", "source", "extras"),
    ),
    "prepare": (fp4.prepare, {"q": Q}, ("q", "backend", "device", "act", "act_dtype", "out_dtype")),
    "matmul": (_matmul, {}, ("x", "w", "bias", "out_dtype")),
    "prepare_moe": (
        fp4.prepare_moe,
        {"w13": W13, "w2": W2, "gate_up": "gate_up"},
        tuple(n for n in inspect.signature(fp4.prepare_moe).parameters if n != "extras_applied"),
    ),
    "moe": (_moe, {}, ("x", "ex", "topk_ids", "topk_weights", "out_dtype")),
    "warmup": (fp4.warmup, {"w": fp4.prepare(Q)}, ("w", "m_max", "topk")),
    "explain": (fp4.explain, {}, ("op", "format", "device", "n", "k", "experts", "activation", "gate_up", "act", "tp")),
    "Layout": (_layout, {}, ("name", "spec", "unit", "word", "pad", "fill")),
    "apply": (fp4.layouts["sf_128x4"].apply, {}, ("x",)),
    "apply_rows": (fp4.layouts["gate_up_pairs"].apply_rows, {}, ("x",)),
    "invert": (fp4.layouts["sf_128x4"].invert, {"y": X, "shape": (4, 4)}, ("y", "shape")),
    "offset": (fp4.layouts["sf_128x4"].offset, {"shape": (4, 4), "m": 0, "k": 0}, ("shape", "m", "k")),
    "mutants": (mutants, {}, ("layout",)),
    "to": (Q.to, {}, ("device",)),
    "reference matmul": (reference_matmul, {"x": torch.randn(3, 64), "q": Q}, ("x", "q", "bias", "out_dtype", "acc")),
    "reference moe": (reference_moe, MOE, tuple(inspect.signature(reference_moe).parameters)),
    "fuse": (fuse.fuse, {}, ("parts",)),
    "stack": (fuse.stack, {}, ("experts",)),
    "shard": (fuse.shard, {"q": Q, "dim": "n", "rank": 0, "size": 2}, ("q", "dim", "rank", "size", "gate_up", "unit")),
    "shard_bias": (fuse.shard_bias, {"bias": X[0], "dim": "n", "rank": 0, "size": 2}, ("bias", "dim", "rank", "size", "gate_up", "unit")),
    "slice_experts": (fuse.slice_experts, {"q": W13, "start": 0, "stop": 1}, ("q", "start", "stop")),
    "expert_range": (fuse.expert_range, {"experts": 4, "rank": 1, "size": 2}, ("experts", "rank", "size")),
    "SwiGLU": (fp4.SwiGLU, {}, ("alpha", "beta", "limit")),
    "SiTU": (fp4.SiTU, {}, ("beta", "linear_beta")),
}


@pytest.mark.parametrize(("verb", "name"), [(verb, name) for verb, (_, _, names) in VERBS.items() for name in names])
@pytest.mark.filterwarnings("ignore")
def test_anything_is_taken_or_refused_in_one_sentence(verb: str, name: str) -> None:
    call, given, _ = VERBS[verb]
    for kind, thing in _things().items():
        if name == "requantize" and callable(thing):
            continue  # it is called
        try:
            call(**(given | {name: thing}))
        except fp4.Fp4Error as error:
            text = str(error)
            assert len(text.splitlines()) == 1, f"{kind}: {text}"
            assert len(text) < 600, f"{kind}: {text}"
        except Exception as error:
            pytest.fail(f"{verb}({name}={kind}) raised {type(error).__name__}: {error}")


def test_signed_scales_are_not_raw_bits() -> None:
    """Exponents without a bias, as int8: -7 was byte 249, a weight of 1e36. Codes come as int8 from real libraries."""
    q = fp4.quantize(X, "mxfp4")
    with pytest.raises(fp4.FormatMismatch, match=r"scale is int8; mxfp4 has ue8m0, raw bits: \.view\(torch\.uint8\) when these are"):
        fp4.QuantizedTensor("mxfp4", q.codes, (q.scale.int() - 127).to(torch.int8))
    same = fp4.QuantizedTensor("mxfp4", q.codes.view(torch.int8), q.scale)
    assert torch.equal(fp4.dequantize(same), fp4.dequantize(q))


@pytest.mark.parametrize(
    "call",
    [
        lambda: fuse.shard(Q, "n", 0, 2, gate_up="interleave"),
        lambda: fuse.shard(Q, "n", 0, 2, unit=-1),
        lambda: fuse.shard(Q, "n", True, 2),
        lambda: fuse.shard_bias(torch.ones(4), "rows", 0, 2),
        lambda: fuse.shard_bias(torch.ones(4), "n", -1, 2),
        lambda: fuse.shard_bias(torch.ones(4), "k", 2, 2),
        lambda: fuse.shard_bias(torch.ones(4), "n", 0, 2, gate_up="up"),
        lambda: fuse.shard_bias(torch.ones(4, dtype=torch.int64), "n", 0, 2),
        lambda: fuse.slice_experts(W13, -1, 2),
        lambda: fuse.slice_experts(W13, 0, 3),
        lambda: fuse.expert_range(4, 0.5, 2),  # type: ignore[arg-type]
        lambda: fp4.QuantizedTensor(format="nvfp4", codes=Q.codes, scale=Q.scale, global_scale=True),  # type: ignore[arg-type]
    ],
)
def test_what_was_another_cut_or_another_number_is_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(fp4.FormatMismatch):
        call()


def test_expert_range_of_many_ranks() -> None:
    assert [fuse.expert_range(7, r, 3) for r in range(3)] == [(0, 3), (3, 5), (5, 7)]
    assert fuse.expert_range(1 << 40, (1 << 39) - 1, 1 << 39) == ((1 << 40) - 2, 1 << 40)  # without a list of all ranks


@pytest.mark.parametrize("value", [2.5, "2", True, np.True_, None, torch.ones(2), torch.tensor(True), 1 << 63])
def test_whole_numbers(value: Any) -> None:
    with pytest.raises(fp4.FormatMismatch, match=r"here: rows is .*; need a whole number"):
        check.whole("here", "rows", value)


def test_what_a_message_shows_is_short_and_reads_no_values() -> None:
    assert shown(torch.ones(3, 4, device="meta")) == "a Tensor float32 [3, 4]"
    assert shown(np.zeros(3)) == "a ndarray float64 [3]"
    assert shown("a\n" * 99).startswith("'a")
    assert len(shown("a" * 999)) == 80
    assert shown(10**5000) == "an integer of 16610 bits"


@pytest.mark.parametrize("kind", list(_things()))
@pytest.mark.parametrize("verb", ["open_checkpoint", "load_prepared", "save", "trust", "activations", "rename", "name", "dequantize"])
def test_any_path_option_or_name_of_a_checkpoint(verb: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    thing, file = _things()[kind], tmp_path / "a.safetensors"
    save_file({"a": torch.ones(2)}, file)
    calls: dict[str, Callable[[], Any]] = {
        "open_checkpoint": lambda: fp4.open_checkpoint(thing),
        "load_prepared": lambda: fp4.load_prepared(thing),
        "save": lambda: fp4.prepare(Q).save(thing),
        "trust": lambda: fp4.open_checkpoint(file, trust=thing),
        "activations": lambda: fp4.open_checkpoint(file, activations=thing),
        "rename": lambda: fp4.open_checkpoint(file, rename=thing),
        "name": lambda: fp4.open_checkpoint(file)[thing],
        "dequantize": lambda: fp4.open_checkpoint(file).dequantize("a", thing),
    }
    try:
        calls[verb]()
    except fp4.Fp4Error as error:
        said = str(error)
    else:
        return
    assert len(said.splitlines()) == 1
    assert len(said) < 600


@pytest.mark.parametrize("spec", ["m k " * 1000 + "-> m", "(" * 5000, "m k -> " + "m" * 5000])
def test_a_long_spec_is_cut_in_the_message(spec: str) -> None:
    with pytest.raises(fp4.LayoutError) as error:
        Layout("x", spec)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    "name", ["sf_128x4(", "sf_128x4)", "hopper_value_v3(pad_n=64", "hopper_value_v3(pad_n=64))", "hopper_value_v3(64) x"]
)
def test_a_name_with_a_bracket_too_few_or_too_many(name: str) -> None:
    with pytest.raises(fp4.LayoutError, match=r"is no name; need 'hopper_value_v3', or|is no name; need 'sf_128x4', or|is not known"):
        fp4.layouts[name]
    assert fp4.layouts[" hopper_value_v3 ( pad_n = 64 ) "] == fp4.layouts["hopper_value_v3(64)"]


@pytest.mark.parametrize("name", ["marlin_w(1, 2, 3)", "sf_128x4(7)", "sf_128x4(x=1)"])
def test_parameters_that_a_layout_does_not_take(name: str) -> None:
    with pytest.raises(fp4.LayoutError, match="takes"):
        fp4.layouts[name]


def test_a_name_that_is_nearly_one(tmp_path: Path) -> None:
    save_file({"model.layers.0.mlp.up.weight": torch.ones(2, 4), "lm_head.weight": torch.ones(2, 4)}, tmp_path / "model.safetensors")
    ck = fp4.open_checkpoint(tmp_path)
    for wrong, right in (("model.layers.0.mlp.up", "model.layers.0.mlp.up.weight"), ("lm_head.weigth", "lm_head.weight")):
        with pytest.raises(fp4.CheckpointError, match=f"has no tensor '{wrong}'; did you mean '{right}'"):
            ck[wrong]
    with pytest.raises(fp4.CheckpointError, match=r"has no tensor 'zzz'; names\(\)"):
        ck["zzz"]
