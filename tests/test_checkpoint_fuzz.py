"""Damaged headers, tensors and configs at random: only typed errors of one line come out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoint_builder as cb
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fp4
from fp4.checkpoint.inspect import inspect

L = cb.L
pytestmark = pytest.mark.filterwarnings("ignore::fp4.checkpoint.CheckpointWarning")
GOOD = {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}


def read_all(path: Path, trust: str = "tensors") -> None:
    """Open and read everything; only fp4's errors may come out."""
    try:
        ck = fp4.open_checkpoint(path, trust=trust)
        for name in ck:
            ck[name]
            ck.dequantize(name)
        assert ck.kv_scales is not None
    except fp4.Fp4Error as error:
        text = str(error)
    else:
        return
    assert "\n" not in text


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 1 << 70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["U8", "F4", "F8_E4M3", "F32"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["a.weight", "a.weight_scale", "__metadata__", "b"]), JSON, max_size=4), st.binary(max_size=64))
def test_fuzz_header_values(tmp_path_factory: pytest.TempPathFactory, header: Any, data: bytes) -> None:
    read_all(cb.raw_file(tmp_path_factory.mktemp("f") / "m.safetensors", header, data))


@given(st.binary(max_size=200))
def test_fuzz_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("f") / "m.safetensors"
    path.write_bytes(data)
    read_all(path)


ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "I8", "F4", "F8_E4M3", "F8_E8M0", "F32", "BF16", "U32", "F8_E5M2"]),
        "shape": st.lists(st.integers(0, 64), max_size=3),
    }
)
LEAVES = [
    "weight",
    "weight_scale",
    "weight_scale_2",
    "input_scale",
    "weight_packed",
    "weight_global_scale",
    "input_global_scale",
    "scale",
    "bias",
]
LEAVES += [
    "weight_scale_inv",
    "pre_quant_scale",
    "k_scale",
    "comfy_quant",
    "scales",
    "weight.values",
    "weight.scale_factors",
    "weight.amax",
]
STEMS = ["l.q_proj", "l.mlp.experts.0.w1", "l.experts.gate_up_proj", "lm_head"]
STACKED = [
    f"l.mlp.experts.gate_up_proj{s}" for s in ("", "_blocks", "_scales", "_weight_scale", "_weight_scale_2", "_input_scale", "_bias")
]
CONFIGS: list[dict[str, Any] | None] = [
    None,
    cb.flat_config(ignore=[]),
    cb.flat_config("MXFP4", ignore=[]),
    cb.model_config(**cb.ct_config([cb.ct_group()], [])),
    cb.model_config(**cb.ct_config([cb.ct_group("mxfp4")], [])),
    cb.quark_config("mxfp4", exclude=[]),
    cb.quark_config("amdfp4", exclude=[]),
    cb.model_config(quant_method="mxfp4"),
    {"expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}},
    {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}},
]


@given(
    st.dictionaries(st.sampled_from([f"{s}.{x}" for s in STEMS for x in LEAVES] + STACKED), ENTRY, max_size=6),
    st.sampled_from(CONFIGS),
    st.integers(0, 255),
)
def test_fuzz_tensors_under_every_config(tmp_path_factory: pytest.TempPathFactory, entries: dict[str, Any], config: Any, byte: int) -> None:
    """Valid files with any names, dtypes and shapes: every dialect either reads them or says why not."""
    folder = tmp_path_factory.mktemp("f")
    header, at = {}, 0
    for name, entry in entries.items():
        shape = list(entry["shape"])
        if entry["dtype"] == "F4" and shape and shape[-1] % 2:
            shape[-1] += 1
        size = int(torch.Size(shape).numel()) * {"F4": 4, "F32": 32, "BF16": 16, "U32": 32}.get(entry["dtype"], 8)
        if size % 8:
            continue
        header[name] = {"dtype": entry["dtype"], "shape": shape, "data_offsets": [at, at + size // 8]}
        at += size // 8
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    cb.raw_file(folder / "model.safetensors", header, bytes([byte]) * at)
    read_all(folder)
    read_all(folder, "config")


@given(JSON, st.sampled_from(["quant_algo", "exclude_modules", "group_size", "kv_cache_quant_algo", "quantized_layers", "quantization"]))
def test_fuzz_modelopt_config(tmp_path_factory: pytest.TempPathFactory, value: Any, key: str) -> None:
    folder = cb.modelopt().write(tmp_path_factory.mktemp("f"))
    nested = cb.nested_config()
    (nested if key == "quantization" else nested["quantization"])[key] = value
    (folder / "hf_quant_config.json").write_text(json.dumps(nested))
    read_all(folder)
    read_all(folder, "config")


FIELDS = ["config_groups", "ignore", "format", "kv_cache_scheme", "sparsity_config", "transform_config", "exclude", "global_quant_config"]
FIELDS += ["layer_quant_config", "export", "weight_block_size", "modules_to_not_convert", "quant_method", "quantization_status", "fmt"]


@given(JSON, st.sampled_from(FIELDS), st.sampled_from(CONFIGS[1:9]))
def test_fuzz_other_configs(tmp_path_factory: pytest.TempPathFactory, value: Any, key: str, config: dict[str, Any]) -> None:
    ex = cb.compressed_tensors()
    ex.config = json.loads(json.dumps(config))
    assert ex.config is not None
    ex.config["quantization_config"][key] = value
    read_all(ex.write(tmp_path_factory.mktemp("f")))


BUILDERS = [
    cb.modelopt,
    cb.compressed_tensors,
    cb.gpt_oss,
    cb.moe,
    cb.modelopt_fused,
    cb.torchao,
    cb.deepseek,
    cb.kimi,
    cb.nemotron,
    cb.fastdeploy,
]


def mutate(tensors: cb.Tensors, pick: int, how: str, size: int) -> None:
    """One fault in one tensor."""
    name = sorted(tensors)[pick % len(tensors)]
    t = tensors[name]
    if how == "drop":
        tensors.pop(name)
    elif how == "rename":
        tensors[name + "_x"] = tensors.pop(name)
    elif how == "swap":
        other = sorted(tensors)[(pick + size + 1) % len(tensors)]
        tensors[name], tensors[other] = tensors[other], t
    elif how == "flatten":
        tensors[name] = t.reshape(-1)
    elif how == "transpose":
        tensors[name] = t.transpose(0, -1).contiguous() if t.ndim else t.reshape(1, 1)
    elif how == "shrink":
        tensors[name] = t[:size] if t.ndim else t
    elif how == "fill":
        tensors[name] = torch.full(t.shape, size % 256, dtype=torch.uint8).view(t.dtype) if t.element_size() == 1 else t * size
    else:
        tensors[name] = t.reshape(-1).view(torch.uint8).clone() if how == "bytes" else t.reshape(-1).view(torch.uint8).to(torch.float32)


HOW = ["drop", "rename", "swap", "flatten", "transpose", "shrink", "fill", "bytes", "float"]


@given(st.sampled_from(BUILDERS), st.integers(0, 999), st.sampled_from(HOW), st.integers(0, 255))
def test_fuzz_one_fault_in_a_good_checkpoint(tmp_path_factory: pytest.TempPathFactory, make: Any, pick: int, how: str, size: int) -> None:
    """A good checkpoint of each dialect with one tensor dropped, renamed, swapped, reshaped or overwritten."""
    ex = make()
    mutate(ex.tensors, pick, how, size)
    folder = ex.write(tmp_path_factory.mktemp("f"))
    read_all(folder)
    read_all(folder, "config")
    if openable(folder):
        inspect(fp4.open_checkpoint(folder, trust="tensors"))


def openable(folder: Path) -> bool:
    try:
        fp4.open_checkpoint(folder, trust="tensors")
    except fp4.Fp4Error:
        return False
    return True


@given(st.sampled_from(BUILDERS), st.integers(0, 1 << 30), st.integers(0, 255))
def test_fuzz_one_byte_of_the_header(tmp_path_factory: pytest.TempPathFactory, make: Any, at: int, byte: int) -> None:
    folder = make().write(tmp_path_factory.mktemp("f"))
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[at % (8 + int.from_bytes(data[:8], "little"))] = byte
    file.write_bytes(data)
    read_all(folder)
    read_all(folder, "config")
