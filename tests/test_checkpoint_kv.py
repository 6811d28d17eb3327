"""Scales of the key/value cache: under every name, asked for or not, checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoint_builder as cb
import pytest
import torch
from checkpoint_checks import check, opened, refused

import fp4

L = cb.L


@pytest.mark.parametrize("names", ["k_proj.k_scale", "k_scale", "k_proj.output_scale", "attn.k_scale"])
@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_a_kv_fp8_every_naming(tmp_path: Path, names: str, prefix: str) -> None:
    """H1 (vllm#54623): cache scales are found under every name."""
    ex = cb.modelopt()
    ex.tensors = {prefix + n: t for n, t in ex.tensors.items()}
    ex.want = {prefix + n: t for n, t in ex.want.items()}
    ex.nested = cb.nested_config(kv_cache_quant_algo="FP8")
    for letter, value in (("k", 0.01), ("v", 0.02)):
        ex.tensors[f"{prefix}{L}self_attn.{names.replace('k_proj', f'{letter}_proj').replace('k_scale', f'{letter}_scale')}"] = cb.f32(
            value
        )
    ck = check(ex.write(tmp_path), ex, "modelopt")
    scale = ck.kv_scales[f"{prefix}{L}self_attn"]
    assert float(scale.k) == pytest.approx(0.01)
    assert float(scale.v) == pytest.approx(0.02)
    assert scale.dtype == "fp8"


@pytest.mark.parametrize("bits", ["NVFP4", {"dynamic": False, "num_bits": 8, "type": "float"}])
def test_a_kv_flat_scheme(tmp_path: Path, bits: Any) -> None:
    """H5: the flat config gives a bare string for NVFP4 and an object for FP8."""
    ex = cb.modelopt()
    ex.nested, ex.config = None, cb.flat_config(kv_cache_scheme=bits)
    ex.tensors |= {f"{L}self_attn.k_proj.k_scale": cb.f32(0.01), f"{L}self_attn.v_proj.v_scale": cb.f32(0.02)}
    ck = check(ex.write(tmp_path), ex, "modelopt")
    assert ck.kv_config.dtype == ("nvfp4" if bits == "NVFP4" else "fp8")
    assert ck.kv_config.static


def test_a_kv_missing_is_an_error(tmp_path: Path) -> None:
    ex = cb.modelopt()
    ex.nested = cb.nested_config(kv_cache_quant_algo="FP8")
    ex.tensors[f"{L}self_attn.k_proj.k_scale"] = cb.f32(0.01)
    with pytest.raises(fp4.CheckpointError, match=r"cache scales not found .*kv_cache_quant_algo 'FP8'.*self_attn \(v\)"):
        fp4.open_checkpoint(ex.write(tmp_path))


def test_a_kv_unasked_is_one_note(tmp_path: Path) -> None:
    """H3: the cache is BF16, the file has scales: information, no warning."""
    ex = cb.modelopt()
    ex.tensors |= {f"{L}self_attn.k_proj.k_scale": cb.f32(0.01), f"{L}self_attn.v_proj.v_scale": cb.f32(0.02)}
    ck = check(ex.write(tmp_path), ex, "modelopt")
    assert not ck.warnings
    assert len(ck.notes) == 1


def test_a_kv_affine_bias(tmp_path: Path) -> None:
    ex = cb.modelopt()
    ex.nested = cb.nested_config(kv_cache_quant_algo="NVFP4_AFFINE")
    for letter in "kv":
        ex.tensors[f"{L}self_attn.{letter}_proj.{letter}_scale"] = cb.f32(0.01)
        ex.tensors[f"{L}self_attn.{letter}_proj.{letter}_bias"] = torch.ones(32)
    scale = check(ex.write(tmp_path), ex, "modelopt").kv_scales[f"{L}self_attn"]
    assert torch.equal(scale.k_bias, torch.ones(32))


def test_b_kv_scales(tmp_path: Path) -> None:
    ex = cb.compressed_tensors()
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    ex.config["quantization_config"]["kv_cache_scheme"] = scheme
    for letter in "kv":
        ex.tensors[f"{L}self_attn.{letter}_scale"] = torch.tensor([0.0125], dtype=torch.bfloat16)
    assert float(check(ex.write(tmp_path), ex, "compressed-tensors").kv_scales[f"{L}self_attn"].k) == pytest.approx(0.0125, rel=1e-2)


def test_g_quark_kv(tmp_path: Path) -> None:
    ex = cb.mxfp4_linears()
    ex.config = cb.quark_config("mxfp4", cb.quark_spec("mxfp4"))
    layer = {"weight": cb.quark_spec("mxfp4"), "input_tensors": None, "output_tensors": cb.quark_spec("fp8", True), "bias": None}
    ex.config["quantization_config"]["kv_cache_quant_config"] = {"*k_proj": layer, "*v_proj": layer}
    for letter in "kv":
        ex.tensors[f"{L}self_attn.{letter}_proj.output_scale"] = torch.tensor(0.25, dtype=torch.bfloat16)
    ck = check(ex.write(tmp_path), ex, "quark")
    assert float(ck.kv_scales[f"{L}self_attn"].v) == 0.25
    ex.drop("v_proj.output_scale")
    with pytest.raises(fp4.CheckpointError, match=r"cache scales not found .*self_attn \(v\)"):
        fp4.open_checkpoint(ex.write(tmp_path))


def test_kv_scales_of_every_head_and_parameters_of_that_name(tmp_path: Path) -> None:
    """A vector k_scale is a cache scale only when the config quantises the cache; else it is the model's parameter."""
    ex = cb.modelopt()
    vector = torch.tensor([0.5, 0.25])
    ex.tensors |= {f"{L}self_attn.k_scale": vector, f"{L}self_attn.v_scale": vector}
    ck = opened(ex, tmp_path / "a")
    assert torch.equal(ck[f"{L}self_attn.k_scale"], vector)
    assert not ck.kv_scales
    ex.nested = cb.nested_config(kv_cache_quant_algo="FP8")
    ck = opened(ex, tmp_path / "b")
    assert f"{L}self_attn.k_scale" not in ck.names()
    assert torch.equal(ck.kv_scales[f"{L}self_attn"].k, vector)


@pytest.mark.parametrize("producer", ["modelopt", "compressed-tensors"])
def test_only_the_cache_is_quantised(tmp_path: Path, producer: str) -> None:
    ex = cb.Example(cb.base_tensors(), config=cb.model_config())
    for letter in "kv":
        ex.tensors[f"{L}self_attn.{letter}_proj.weight"] = cb.floats(32, 64)
        ex.tensors[f"{L}self_attn.{letter}_scale"] = cb.f32(0.5)
    if producer == "modelopt":
        ex.nested = cb.nested_config(None, kv_cache_quant_algo="FP8")
    else:
        scheme = {"num_bits": 8, "type": "float", "dynamic": False}
        ex.config = cb.model_config(**{**cb.ct_config([cb.ct_group()]), "config_groups": {}, "kv_cache_scheme": scheme})
    ck = opened(ex, tmp_path)
    assert ck.dialect == producer
    assert float(ck.kv_scales[f"{L}self_attn"].v) == 0.5
    assert all(ck.record(n).kind == "plain" for n in ck)
    assert not ck.warnings


def with_cache(**more: torch.Tensor) -> cb.Example:
    """A file whose config asks for a static FP8 cache and whose one layer has its scales."""
    ex = cb.modelopt()
    ex.nested = cb.nested_config(kv_cache_quant_algo="FP8")
    ex.tensors |= {f"{L}self_attn.k_proj.k_scale": cb.f32(0.01), f"{L}self_attn.v_proj.v_scale": cb.f32(0.02)}
    ex.tensors |= {f"{L}self_attn.{name.replace('__', '.')}": t for name, t in more.items()}
    return ex


@pytest.mark.parametrize("value", [0.0, -0.5, float("nan"), float("inf"), float("-inf")])
def test_a_scale_that_is_no_multiplier_is_refused_by_name(tmp_path: Path, value: float) -> None:
    """0 would make every key zero: engines take 1.0 for it, or divide by it."""
    ck = opened(with_cache(k_proj__k_scale=cb.f32(value)), tmp_path)
    with pytest.raises(fp4.CheckpointError, match=rf"k_proj\.k_scale' is {value:g}; a cache scale must be positive and finite"):
        _ = ck.kv_scales
    heads = torch.tensor([0.5, value])
    ck = opened(with_cache(k_proj__k_scale=heads), tmp_path / "heads")
    with pytest.raises(fp4.CheckpointError, match=r"k_proj\.k_scale' is partly not so"):
        _ = ck.kv_scales


def test_two_names_of_one_scale(tmp_path: Path) -> None:
    refused(with_cache(k_scale=cb.f32(0.01)), tmp_path, r"are both the k cache scale of 'model\.layers\.0\.self_attn'")


@pytest.mark.parametrize("aside", ["mtp.layers.0.", "visual.blocks.0.attn.", "model.layers.1."])
def test_attention_beside_the_main_layers_needs_no_scale(tmp_path: Path, aside: str) -> None:
    """Extra prediction layers and towers keep a cache of 16 bits, or none."""
    ex = with_cache()
    ex.tensors |= {f"{aside}self_attn.{p}_proj.weight": cb.floats(32, 64) for p in "kv"}
    ck = opened(ex, tmp_path)
    assert list(ck.kv_scales) == [f"{L}self_attn"]
    ex.tensors[f"{L}cross_attn.k_proj.weight"] = cb.floats(32, 64)  # of the main layers: it does need one
    refused(ex, tmp_path / "cross", r"cache scales not found .*cross_attn \(k\)")
