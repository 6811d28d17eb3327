"""Bad input: damaged files, missing or misshapen companions, hostile indices, unknown configs. One sentence, nothing else."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import checkpoint_builder as cb
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fp4
from fp4.checkpoint.inspect import inspect
from fp4.checkpoint.safetensors_file import SafetensorsFile

L = cb.L
pytestmark = pytest.mark.filterwarnings("ignore::fp4.checkpoint.CheckpointWarning")
GOOD = {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}


def refused(path: Path, match: str, **options: Any) -> None:
    with pytest.raises(fp4.CheckpointError, match=match) as caught:
        fp4.open_checkpoint(path, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 1500


# the file


@pytest.mark.parametrize(
    ("header", "data", "length", "match"),
    [
        (b"", b"", 5, "truncated inside its header"),
        (GOOD, b"1234", 1 << 60, "header length"),
        (GOOD, b"123", None, "truncated; header describes 4 bytes"),
        (GOOD, b"12345", None, "1 bytes after the last tensor"),
        (b"\xff\xfe\x00", b"", None, "not UTF-8 JSON"),
        (b"[1, 2]", b"", None, "top level is list"),
        (b'{"a": NaN}', b"", None, "NaN is not JSON"),
        (b"{" + b'"x":[' * 50_000, b"", None, "corrupt header"),
        (
            b'{"a": {"dtype":"U8","shape":[4],"data_offsets":[0,4]}, "a": {"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
            b"1234",
            None,
            "twice",
        ),
        (b'{"a": {"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', b"1234", None, "'dtype' appears twice"),
        ({"__metadata__": {"a": 1}}, b"", None, "__metadata__ must map"),
        ({"__metadata__": [1]}, b"", None, "__metadata__ must map"),
        ({"a": 3}, b"", None, "needs exactly dtype, shape and data_offsets"),
        ({"a": {**GOOD["a"], "more": 1}}, b"1234", None, "needs exactly"),
        ({"a": {"dtype": "U8", "shape": [4]}}, b"1234", None, "needs exactly"),
        ({"a": {**GOOD["a"], "dtype": "F8_E5M7"}}, b"1234", None, "dtype 'F8_E5M7'; need one of"),
        ({"a": {**GOOD["a"], "dtype": None}}, b"1234", None, "dtype 'None'"),
        ({"a": {**GOOD["a"], "dtype": ["U8"]}}, b"1234", None, "dtype"),
        ({"a": {**GOOD["a"], "shape": 4}}, b"1234", None, "has shape 4"),
        ({"a": {**GOOD["a"], "shape": [-4]}}, b"1234", None, r"has shape \[-4\]"),
        ({"a": {**GOOD["a"], "shape": [4.0]}}, b"1234", None, "has shape"),
        ({"a": {**GOOD["a"], "shape": [True, 4]}}, b"1234", None, "has shape"),
        ({"a": {**GOOD["a"], "shape": [1 << 62, 1 << 62]}}, b"1234", None, "says U8"),
        ({"a": {**GOOD["a"], "shape": [1 << 70]}}, b"1234", None, "has shape"),
        ({"a": {**GOOD["a"], "shape": [1] * 100}}, b"1234", None, "at most 64"),
        ({"a": {**GOOD["a"], "shape": [5]}}, b"1234", None, "5 bytes, but its data_offsets hold 4"),
        ({"a": {**GOOD["a"], "data_offsets": [4, 0]}}, b"1234", None, "data_offsets"),
        ({"a": {**GOOD["a"], "data_offsets": [-4, 0]}}, b"1234", None, "data_offsets"),
        ({"a": {**GOOD["a"], "data_offsets": [0]}}, b"1234", None, "data_offsets"),
        ({"a": {**GOOD["a"], "data_offsets": [0, 4.0]}}, b"1234", None, "data_offsets"),
        ({"a": {**GOOD["a"], "data_offsets": [1 << 80, (1 << 80) + 4]}}, b"1234", None, "hole in the data"),
        ({**GOOD, "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}}, b"123456", None, "overlaps another"),
        ({**GOOD, "b": {"dtype": "U8", "shape": [4], "data_offsets": [6, 10]}}, b"1234567890", None, "hole in the data before tensor 'b'"),
        ({"a": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}, b"123", None, "odd last dimension 3"),
    ],
)
def test_bad_header(tmp_path: Path, header: Any, data: bytes, length: int | None, match: str) -> None:
    refused(cb.raw_file(tmp_path / "m.safetensors", header, data, length), match)


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 100, -1, -100])
def test_truncated_anywhere(tmp_path: Path, cut: int) -> None:
    folder = cb.modelopt().write(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    refused(folder, r"model\.safetensors: is truncated")


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


def test_header_views_survive_close(tmp_path: Path) -> None:
    file = SafetensorsFile(cb.raw_file(tmp_path / "m.safetensors", GOOD, b"1234"))
    view = file.tensor("a")
    file.close()
    assert bytes(view.tolist()) == b"1234"
    with pytest.raises(fp4.CheckpointError, match="is closed"):
        file.tensor("a")


def test_unaligned_tensor(tmp_path: Path) -> None:
    header = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]}}
    ck = fp4.open_checkpoint(cb.raw_file(tmp_path / "m.safetensors", header, b"x" + struct.pack("<ff", 1.5, -2.0)))
    assert ck["b"].tolist() == [1.5, -2.0]


def test_writes_to_a_view_do_not_reach_the_file(tmp_path: Path) -> None:
    path = cb.raw_file(tmp_path / "m.safetensors", GOOD, b"1234")
    before = path.read_bytes()
    fp4.open_checkpoint(path)["a"].zero_()
    assert path.read_bytes() == before


# the folder


def test_paths(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "does not exist")
    refused(tmp_path, "holds no .safetensors file")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refused(tmp_path, "only pickles")
    refused(tmp_path / "pytorch_model.bin", "is a pickle")
    (tmp_path / "x.gguf").write_bytes(b"x")
    refused(tmp_path / "x.gguf", "is not a checkpoint")
    refused(Path("a\0b"), "not a usable path|control characters|does not exist")
    refused(Path("x" * 5000), "not a usable path")


@pytest.mark.parametrize("text", [b"{", b"\xff", b"[]", b"{" + b'"x":[' * 50_000])
@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "model.safetensors.index.json"])
def test_damaged_json(tmp_path: Path, text: bytes, name: str) -> None:
    folder = cb.modelopt().write(tmp_path)
    (folder / name).write_bytes(text)
    refused(folder, name.replace(".", r"\."))


def indexed(folder: Path, weight_map: Any) -> Path:
    cb.modelopt().write(folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "/tmp/x.safetensors",
        "a/../../x.safetensors",
        "..",
        "",
        "a\0.safetensors",
        "..\\x.safetensors",
    ],
)
def test_index_leaves_the_folder(tmp_path: Path, name: str) -> None:
    cb.save(tmp_path / "secret.safetensors", {"a": torch.zeros(1)})
    refused(indexed(tmp_path / "ck", {"a": name}), "need a relative path inside the folder|need a .safetensors file")


def test_index_through_a_link(tmp_path: Path) -> None:
    cb.save(tmp_path / "secret.safetensors", {"a": torch.zeros(1)})
    folder = indexed(tmp_path / "ck", {"a": "link.safetensors"})
    (folder / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    refused(folder, "outside the folder")
    (folder / "sub").symlink_to(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "sub/secret.safetensors"}}))
    refused(folder, "outside the folder")


def test_hub_cache_links_are_fine(tmp_path: Path) -> None:
    """A hub cache keeps blobs beside snapshots and links to them."""
    repo = tmp_path / "models--a--b"
    ex = cb.modelopt()
    folder = ex.write(repo / "snapshots" / "rev", shards=2)
    (repo / "blobs").mkdir()
    for i, file in enumerate(sorted(folder.glob("*.safetensors"))):
        file.rename(repo / "blobs" / str(i))
        file.symlink_to(Path("../../blobs") / str(i))
    assert len(fp4.open_checkpoint(folder)) == len(ex.want) + 5


def test_index_and_shards_disagree(tmp_path: Path) -> None:
    refused(indexed(tmp_path / "a", {"a": "absent.safetensors"}), r"names shard absent\.safetensors, which is missing")
    refused(indexed(tmp_path / "b", {"no.such": "model-00001-of-00001.safetensors"}), "'no.such' is not in model-00001")
    one = "model-00001-of-00001.safetensors"
    refused(indexed(tmp_path / "c", {"lm_head.weight": one}), r"tensors of the shards are not listed: .* fix the index")
    for bad in ({}, [], {"a": 1}, None):
        refused(indexed(tmp_path / str(id(bad)), bad), "weight_map")


def test_shards_without_an_index(tmp_path: Path) -> None:
    ex = cb.modelopt()
    folder = ex.write(tmp_path, shards=3)
    (folder / "model.safetensors.index.json").unlink()
    assert len(fp4.open_checkpoint(folder)) == len(ex.want) + 5
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(folder, r"shard model-00002-of-00003\.safetensors is missing")


def test_one_tensor_in_two_indexed_shards(tmp_path: Path) -> None:
    """The index says which: a second copy is passed over when it is equal, and an error when it is not."""
    one, two = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    cb.save(tmp_path / one, {"a": torch.arange(4.0), "b": torch.zeros(2)})
    cb.save(tmp_path / two, {"a": torch.arange(4.0), "c": torch.zeros(2)})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": two, "b": one, "c": two}}))
    (tmp_path / "config.json").write_text("{}")
    with fp4.open_checkpoint(tmp_path) as ck:
        assert ck.names() == ["a", "b", "c"]
        assert ck.store.where["a"].path.name == two
        assert any("in two shards with equal contents, read from the one that the index names: a" in w for w in ck.warnings)
    for other in (torch.tensor([0.0, 1.0, 2.0, 4.0]), torch.arange(5.0), torch.arange(4.0).to(torch.float16)):
        cb.save(tmp_path / one, {"a": other, "b": torch.zeros(2)})
        refused(tmp_path, r"'a' is in model-00002-of-00002\.safetensors, says the index, and with other contents in model-00001")


def test_one_tensor_in_two_shards(tmp_path: Path) -> None:
    for i in (1, 2):
        cb.save(tmp_path / f"model-0000{i}-of-00002.safetensors", {"a": torch.zeros(1)})
    refused(tmp_path, "'a' is also in model-00001-of-00002")


# companions, shapes, types


@pytest.mark.parametrize("leaf", ["weight_scale", "weight_scale_2", "input_scale"])
def test_missing_companion(tmp_path: Path, leaf: str) -> None:
    ex = cb.modelopt()
    ex.tensors.pop(f"{L}mlp.up_proj.{leaf}")
    refused(ex.write(tmp_path), rf"not found.*{L}mlp\.up_proj\.{leaf}|{L}mlp\.up_proj\.{leaf} not found")


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
    refused(ex.write(tmp_path), match)


def test_k_not_a_multiple_of_the_block(tmp_path: Path) -> None:
    """Example E's variant: down K = 24; example K's split would be another."""
    ex = cb.moe(1)
    m = f"{L}mlp.experts.0.down_proj"
    ex.tensors |= {f"{m}.weight": cb.codes(64, 24), f"{m}.weight_scale": cb.e4m3_scales(64, 32)}
    refused(ex.write(tmp_path), r"down_proj.*k = 24 \(packed 12 bytes\), not a multiple of the nvfp4 block 16")


@pytest.mark.parametrize("algo", ["NVFP5", "W4A4", "", "nvfp4_magic", None, 4])
def test_unknown_algo(tmp_path: Path, algo: Any) -> None:
    ex = cb.modelopt()
    ex.nested = cb.nested_config(algo)
    refused(ex.write(tmp_path), "quant_algo")


def test_group_size_that_contradicts_the_algo(tmp_path: Path) -> None:
    ex = cb.modelopt()
    ex.nested = cb.nested_config(group=32)
    refused(ex.write(tmp_path), "group_size is 32; need 16 for NVFP4")


@pytest.mark.parametrize("where", ["nested", "flat", "spec"])
def test_unknown_config_keys(tmp_path: Path, where: str) -> None:
    ex = cb.modelopt()
    if where == "nested":
        ex.nested["quantization"]["rotate"] = True
    else:
        ex.nested, ex.config = None, cb.flat_config()
        block = ex.config["quantization_config"]
        (block if where == "flat" else block["config_groups"]["group_0"]["weights"])["rotate"] = True
    refused(ex.write(tmp_path), "unknown key rotate")


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
    refused(ct(**change).write(tmp_path), match)


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
    refused(ex.write(tmp_path), match)


@pytest.mark.parametrize("method", ["bitsandbytes", "fp_quant", "gptq", "auto-round", "unheard_of"])
def test_other_methods_are_refused_with_a_reason(tmp_path: Path, method: str) -> None:
    ex = cb.modelopt()
    ex.nested, ex.config = None, cb.model_config(quant_method=method)
    refused(ex.write(tmp_path), "another format|rotated|integer format|extra_config|is not known")


def test_bitsandbytes_names_without_config(tmp_path: Path) -> None:
    tensors = {"l.weight": torch.zeros(64, 1, dtype=torch.uint8), "l.weight.absmax": torch.zeros(2)}
    tensors["l.weight.quant_state.bitsandbytes__fp4"] = torch.zeros(4, dtype=torch.uint8)
    ex = cb.Example(tensors, config=None)
    refused(ex.write(tmp_path), "float32 absmax per 64 values")


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
    refused(ex.write(tmp_path / "a"), r"gate_up_proj_bias has shape .*; its weight is \[2, 192, 64\] and needs \[2, 192\]")
    with fp4.open_checkpoint(tmp_path / "a", trust="tensors") as ck:
        assert any("gate_up_proj_bias has shape" in w for w in ck.warnings)
    ex = cb.modelopt()
    ex.tensors[f"{L}mlp.up_proj.bias"] = torch.zeros(64)
    refused(ex.write(tmp_path / "b"), r"up_proj\.bias has shape \[64\]; its weight is \[128, 64\] and needs \[128\]")


def test_divisor_zero_is_infinite(tmp_path: Path) -> None:
    ex = cb.compressed_tensors()
    ex.tensors[f"{L}mlp.up_proj.weight_global_scale"] = cb.f32(0.0, (1,))
    with pytest.raises(fp4.CheckpointError, match="that scale is infinite"):
        fp4.open_checkpoint(ex.write(tmp_path)).dequantize(f"{L}mlp.up_proj.weight")


def test_gpt_oss_missing_and_misshapen_scales(tmp_path: Path) -> None:
    ex = cb.gpt_oss().drop("_scales")
    refused(ex.write(tmp_path / "a"), "2 block-scale tensors not found")
    ex = cb.gpt_oss()
    ex.tensors[f"{L}mlp.experts.down_proj_scales"] = torch.zeros(2, 64, 2, dtype=torch.uint8)
    refused(ex.write(tmp_path / "b"), r"need U8 \[2, 64, 3\]")


def test_torchao_metadata(tmp_path: Path) -> None:
    ex = cb.torchao()
    name = f"{L}mlp.up_proj.weight"
    ex.tensors.pop(f"{L}mlp.up_proj._weight_scale")
    refused(ex.write(tmp_path / "a"), r"_weight_scale not found in the file")
    ex = cb.torchao()
    for change in ("not json _type", json.dumps({"_type": "Int4Tensor"}), json.dumps({"_type": "NVFP4Tensor", "_tensor_data_names": 3})):
        ex.metadata[name] = change
        refused(ex.write(tmp_path / "b"), "up_proj")


def test_names_that_are_not_tensors(tmp_path: Path) -> None:
    ck = fp4.open_checkpoint(cb.modelopt().write(tmp_path))
    with pytest.raises(fp4.CheckpointError, match=r"is a companion of 'model\.layers\.0\.mlp\.up_proj\.weight'"):
        ck[f"{L}mlp.up_proj.weight_scale"]
    with pytest.raises(fp4.CheckpointError, match="has no tensor"):
        ck.dequantize("nope")
    with pytest.raises(fp4.CheckpointError, match="cannot hold values"):
        ck.dequantize("lm_head.weight", torch.uint8)
    for options in ({"trust": "me"}, {"activations": "none"}):
        refused(tmp_path, "need", **options)


@pytest.mark.parametrize("name", ["a\nb", "a\x00", "\ud800", "\x1b[31m"])
def test_names_that_would_garble_a_terminal(tmp_path: Path, name: str) -> None:
    refused(cb.raw_file(tmp_path / "m.safetensors", {name: GOOD["a"]}, b"1234"), "control characters or lone surrogates")


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
