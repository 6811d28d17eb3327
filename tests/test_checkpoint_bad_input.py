"""Missing or misshapen companions, unknown configs. One sentence, nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import checkpoint_builder as cb
import pytest
import torch
from checkpoint_checks import refused_path

import fp4
from fp4.checkpoint.inspect import inspect

L = cb.L
pytestmark = pytest.mark.filterwarnings("ignore::fp4.checkpoint.CheckpointWarning")
GOOD = {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}


# companions, shapes, types


@pytest.mark.parametrize("leaf", ["weight_scale", "weight_scale_2", "input_scale"])
def test_missing_companion(tmp_path: Path, leaf: str) -> None:
    ex = cb.modelopt()
    ex.tensors.pop(f"{L}mlp.up_proj.{leaf}")
    refused_path(ex.write(tmp_path), rf"not found.*{L}mlp\.up_proj\.{leaf}|{L}mlp\.up_proj\.{leaf} not found")


@pytest.mark.parametrize(
    ("leaf", "tensor", "match"),
    [
        ("weight", torch.zeros(128, 32, dtype=torch.float64), "tensors? not quantised|nothing explains"),
        ("weight", torch.zeros(128, 64, dtype=torch.bfloat16), "nothing explains|not quantised"),
        ("weight", torch.zeros(128, 32, dtype=torch.int64), "nothing explains"),
        ("weight", torch.zeros(128 * 32, dtype=torch.uint8), r"weight_scale is F8_E4M3 \[128, 4\]|has shape \[4096\]"),
        ("weight_scale", torch.zeros(128, 4), "has dtype F32; nvfp4 needs F8_E4M3"),
        ("weight_scale", torch.zeros(128, 4, dtype=torch.uint8), "only a config that says e5m3 explains that"),
        ("weight_scale", torch.zeros(4, 128, dtype=torch.uint8).view(torch.float8_e4m3fn), r"has shape \[4, 128\].*needs \[128, 4\]"),
        ("weight_scale", torch.zeros(512, dtype=torch.uint8).view(torch.float8_e4m3fn), r"has shape \[512\].*swizzled 128x4 tiles"),
        ("weight_scale_2", torch.zeros(2), r"has shape \[2\]; need one value"),
        ("input_scale", torch.zeros(3, 1), r"has shape \[3, 1\]; need one value"),
    ],
)
def test_wrong_dtype_or_shape(tmp_path: Path, leaf: str, tensor: torch.Tensor, match: str) -> None:
    ex = cb.modelopt()
    ex.tensors[f"{L}mlp.up_proj.{leaf}"] = tensor
    refused_path(ex.write(tmp_path), match)


def test_k_not_a_multiple_of_the_block(tmp_path: Path) -> None:
    """Example E's variant: down K = 24; example K's split would be another."""
    ex = cb.moe(1)
    m = f"{L}mlp.experts.0.down_proj"
    ex.tensors |= {f"{m}.weight": cb.codes(64, 24), f"{m}.weight_scale": cb.e4m3_scales(64, 32)}
    refused_path(ex.write(tmp_path), r"down_proj.*k = 24 \(packed 12 bytes\), not a multiple of the nvfp4 block 16")


@pytest.mark.parametrize("algo", ["NVFP5", "W4A4", "", "nvfp4_magic", None, 4])
def test_unknown_algo(tmp_path: Path, algo: Any) -> None:
    ex = cb.modelopt()
    ex.nested = cb.nested_config(algo)
    refused_path(ex.write(tmp_path), "quant_algo")


def test_group_size_that_contradicts_the_algo(tmp_path: Path) -> None:
    ex = cb.modelopt()
    ex.nested = cb.nested_config(group=32)
    refused_path(ex.write(tmp_path), "group_size is 32; need 16 for NVFP4")


@pytest.mark.parametrize("where", ["nested", "flat", "spec"])
def test_unknown_config_keys(tmp_path: Path, where: str) -> None:
    ex = cb.modelopt()
    if where == "nested":
        ex.nested["quantization"]["rotate"] = True
    else:
        ex.nested, ex.config = None, cb.flat_config()
        block = ex.config["quantization_config"]
        (block if where == "flat" else block["config_groups"]["group_0"]["weights"])["rotate"] = True
    refused_path(ex.write(tmp_path), "unknown key rotate")


def ct(**change: Any) -> cb.Example:
    ex = cb.compressed_tensors()
    ex.config["quantization_config"].update(change)
    return ex


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"transform_config": {"rotations": 1}}, "transform_config is not empty"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is not dense"),
        ({"quantization_status": "initialized"}, "quantization_status"),
        ({"config_groups": {}}, "config_groups is empty"),
        ({"ignore": ["re:("]}, "not a regular expression"),
        ({"ignore": "lm_head"}, "need a list of strings"),
        ({"kv_cache_scheme": {"num_bits": 3}}, "num_bits 3"),
        ({"new_key": 1}, "unknown key new_key"),
        ({"config_groups": {"g": cb.ct_group(fmt="int-quantized")}}, "format 'int-quantized' is not known"),
        ({"config_groups": {"g": {**cb.ct_group(), "weights": {"num_bits": 4, "type": "int"}}}}, "4-bit 'int'"),
        ({"config_groups": {"a": cb.ct_group(), "b": cb.ct_group("mxfp4")}}, "two groups target classes"),
    ],
)
def test_bad_compressed_tensors_config(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    refused_path(ct(**change).write(tmp_path), match)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"export": {"weight_format": "fake_quantized"}}, "fake-quantised"),
        ({"layer_type_quant_config": {"Linear": {}}}, "layer_type_quant_config is not empty"),
        ({"global_quant_config": {"weight": {"dtype": "mx"}}}, "legacy packing of 17 bytes"),
        ({"global_quant_config": {"weight": {"dtype": "int4"}}}, "dtype 'int4' is not read"),
        (
            {"global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 64, "scale_format": "e8m0"}}},
            "group_size 64",
        ),
    ],
)
def test_bad_quark_config(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    ex = cb.mxfp4_linears()
    ex.config = cb.quark_config("mxfp4")
    ex.config["quantization_config"].update(change)
    refused_path(ex.write(tmp_path), match)


@pytest.mark.parametrize("method", ["bitsandbytes", "fp_quant", "gptq", "auto-round", "unheard_of"])
def test_other_methods_are_refused_with_a_reason(tmp_path: Path, method: str) -> None:
    ex = cb.modelopt()
    ex.nested, ex.config = None, cb.model_config(quant_method=method)
    refused_path(ex.write(tmp_path), "another format|rotated|integer format|extra_config|is not known")


def test_bitsandbytes_names_without_config(tmp_path: Path) -> None:
    tensors = {"l.weight": torch.zeros(64, 1, dtype=torch.uint8), "l.weight.absmax": torch.zeros(2)}
    tensors["l.weight.quant_state.bitsandbytes__fp4"] = torch.zeros(4, dtype=torch.uint8)
    ex = cb.Example(tensors, config=None)
    refused_path(ex.write(tmp_path), "float32 absmax per 64 values")


def test_inverted_second_level(tmp_path: Path) -> None:
    """Example L: 4096 under weight_scale_2, and a multiplier under compressed-tensors' divisor name."""
    ex = cb.modelopt()
    ex.tensors[f"{L}mlp.up_proj.weight_scale_2"] = cb.f32(4096.0)
    ck = fp4.open_checkpoint(ex.write(tmp_path / "a"))
    with pytest.raises(fp4.CheckpointError, match="looks like its own reciprocal"):
        ck.dequantize(f"{L}mlp.up_proj.weight")
    ex = cb.compressed_tensors()
    ex.tensors[f"{L}mlp.up_proj.weight_global_scale"] = cb.f32(2.4e-4, (1,))
    ck = fp4.open_checkpoint(ex.write(tmp_path / "b"))
    with pytest.raises(fp4.CheckpointError, match=r"as a divisor gives the factor 4166\.67"):
        ck[f"{L}mlp.up_proj.weight"]


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), -0.25])
@pytest.mark.parametrize("producer", ["modelopt", "compressed_tensors", "torchao"])
def test_second_level_that_is_no_multiplier(tmp_path: Path, producer: str, value: float) -> None:
    """Every way to the values refuses and names the tensor; inspect lists it and goes on."""
    from fp4.checkpoint.convert import convert_checkpoint
    from fp4.checkpoint.inspect import inspect

    ex = getattr(cb, producer)()
    leaf = {"modelopt": ".weight_scale_2", "compressed_tensors": ".weight_global_scale", "torchao": "._weight_per_tensor_scale"}
    stored = f"{L}mlp.up_proj{leaf[producer]}"
    ex.tensors[stored] = torch.full_like(ex.tensors[stored], value)
    path = ex.write(tmp_path / "in")
    ck = fp4.open_checkpoint(path)
    (bad,) = [r for r in inspect(ck) if any(stored in sign for sign in r.signs)]
    match = rf"{re.escape(stored)}.* is (nan|-inf|-0\.25); "
    for read in (ck.dequantize, ck.__getitem__):
        with pytest.raises(fp4.CheckpointError, match=match):
            read(bad.name)
    to = "modelopt" if producer == "compressed_tensors" else "compressed-tensors"
    with pytest.raises(fp4.CheckpointError, match=match):
        convert_checkpoint(ck, tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shape", [(2, 0), (2, 64), (1, 192), (384,)])
def test_a_bias_that_does_not_fit_its_weight(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Found by mutation: a conversion cut such a bias among experts."""
    ex = cb.gpt_oss()
    name = f"{L}mlp.experts.gate_up_proj_bias"
    assert ex.tensors[name].shape == (2, 192)
    ex.tensors[name] = torch.zeros(shape, dtype=torch.bfloat16)
    refused_path(ex.write(tmp_path / "a"), r"gate_up_proj_bias has shape .*; its weight is \[2, 192, 64\] and needs \[2, 192\]")
    with fp4.open_checkpoint(tmp_path / "a", trust="tensors") as ck:
        assert any("gate_up_proj_bias has shape" in w for w in ck.warnings)
    ex = cb.modelopt()
    ex.tensors[f"{L}mlp.up_proj.bias"] = torch.zeros(64)
    refused_path(ex.write(tmp_path / "b"), r"up_proj\.bias has shape \[64\]; its weight is \[128, 64\] and needs \[128\]")


def test_divisor_zero_is_infinite(tmp_path: Path) -> None:
    ex = cb.compressed_tensors()
    ex.tensors[f"{L}mlp.up_proj.weight_global_scale"] = cb.f32(0.0, (1,))
    with pytest.raises(fp4.CheckpointError, match="that scale is infinite"):
        fp4.open_checkpoint(ex.write(tmp_path)).dequantize(f"{L}mlp.up_proj.weight")


def test_gpt_oss_missing_and_misshapen_scales(tmp_path: Path) -> None:
    ex = cb.gpt_oss().drop("_scales")
    refused_path(ex.write(tmp_path / "a"), "2 block-scale tensors not found")
    ex = cb.gpt_oss()
    ex.tensors[f"{L}mlp.experts.down_proj_scales"] = torch.zeros(2, 64, 2, dtype=torch.uint8)
    refused_path(ex.write(tmp_path / "b"), r"need U8 \[2, 64, 3\]")


def test_torchao_metadata(tmp_path: Path) -> None:
    ex = cb.torchao()
    name = f"{L}mlp.up_proj.weight"
    ex.tensors.pop(f"{L}mlp.up_proj._weight_scale")
    refused_path(ex.write(tmp_path / "a"), r"_weight_scale not found in the file")
    ex = cb.torchao()
    for change in ("not json _type", json.dumps({"_type": "Int4Tensor"}), json.dumps({"_type": "NVFP4Tensor", "_tensor_data_names": 3})):
        ex.metadata[name] = change
        refused_path(ex.write(tmp_path / "b"), "up_proj")


def test_names_that_are_not_tensors(tmp_path: Path) -> None:
    ck = fp4.open_checkpoint(cb.modelopt().write(tmp_path))
    with pytest.raises(fp4.CheckpointError, match=r"is a companion of 'model\.layers\.0\.mlp\.up_proj\.weight'"):
        ck[f"{L}mlp.up_proj.weight_scale"]
    with pytest.raises(fp4.CheckpointError, match="has no tensor"):
        ck.dequantize("nope")
    with pytest.raises(fp4.CheckpointError, match="cannot hold values"):
        ck.dequantize("lm_head.weight", torch.uint8)
    for options in ({"trust": "me"}, {"activations": "none"}):
        refused_path(tmp_path, "need", **options)


@pytest.mark.parametrize("name", ["a\nb", "a\x00", "\ud800", "\x1b[31m"])
def test_names_that_would_garble_a_terminal(tmp_path: Path, name: str) -> None:
    refused_path(cb.raw_file(tmp_path / "m.safetensors", {name: GOOD["a"]}, b"1234"), "control characters or lone surrogates")


@pytest.mark.parametrize(("n", "experts"), [(0, 2), (32, 0)])
def test_empty_tensors(tmp_path: Path, n: int, experts: int) -> None:
    """No rows or no experts: empty values, no failure."""
    ex = cb.Example(config=cb.model_config(), nested=cb.nested_config(exclude=[]))
    cb.add_nvfp4(ex, "m", 0, 64, 0.5, 0.5)
    ex.tensors |= {"e.experts.gate_up_proj": torch.zeros(experts, 32, n, dtype=torch.uint8)}
    ex.tensors["e.experts.gate_up_proj_weight_scale"] = torch.zeros(experts, 4, n, dtype=torch.uint8).view(torch.float8_e4m3fn)
    ex.tensors |= {"e.experts.gate_up_proj_weight_scale_2": cb.f32(0.0), "e.experts.gate_up_proj_input_scale": cb.f32(0.5)}
    ck = fp4.open_checkpoint(ex.write(tmp_path))
    assert ck.dequantize("m.weight").shape == (0, 64)
    assert ck["m.weight"].shape == (0, 64)
    assert ck.dequantize("e.experts.gate_up_proj").shape == (experts, 64, n)
    assert ck["e.experts.gate_up_proj"].shape == (experts, n, 64)
    inspect(ck)
