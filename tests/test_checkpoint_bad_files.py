"""Damaged files, folders and indices, hostile ones too. One sentence, nothing else."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import checkpoint_builder as cb
import pytest
import torch
from checkpoint_checks import refused_path

import fp4
from fp4.checkpoint.safetensors_file import SafetensorsFile

L = cb.L
pytestmark = pytest.mark.filterwarnings("ignore::fp4.checkpoint.CheckpointWarning")
GOOD = {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}


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
    refused_path(cb.raw_file(tmp_path / "m.safetensors", header, data, length), match)


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 100, -1, -100])
def test_truncated_anywhere(tmp_path: Path, cut: int) -> None:
    folder = cb.modelopt().write(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    refused_path(folder, r"model\.safetensors: is truncated")


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
    refused_path(tmp_path / "absent", "does not exist")
    refused_path(tmp_path, "holds no .safetensors file")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refused_path(tmp_path, "only pickles")
    refused_path(tmp_path / "pytorch_model.bin", "is a pickle")
    (tmp_path / "x.gguf").write_bytes(b"x")
    refused_path(tmp_path / "x.gguf", "is not a checkpoint")
    refused_path(Path("a\0b"), "not a usable path|control characters|does not exist")
    refused_path(Path("x" * 5000), "not a usable path")


@pytest.mark.parametrize("text", [b"{", b"\xff", b"[]", b"{" + b'"x":[' * 50_000])
@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "model.safetensors.index.json"])
def test_damaged_json(tmp_path: Path, text: bytes, name: str) -> None:
    folder = cb.modelopt().write(tmp_path)
    (folder / name).write_bytes(text)
    refused_path(folder, name.replace(".", r"\."))


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
    refused_path(indexed(tmp_path / "ck", {"a": name}), "need a relative path inside the folder|need a .safetensors file")


def test_index_through_a_link(tmp_path: Path) -> None:
    cb.save(tmp_path / "secret.safetensors", {"a": torch.zeros(1)})
    folder = indexed(tmp_path / "ck", {"a": "link.safetensors"})
    (folder / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    refused_path(folder, "outside the folder")
    (folder / "sub").symlink_to(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "sub/secret.safetensors"}}))
    refused_path(folder, "outside the folder")


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
    last = max(folder.glob("*.safetensors"))  # what lies in the cache beside the blobs belongs to something else
    last.unlink()
    (repo / "blobs" / "1").rename(repo / "1.safetensors")
    last.symlink_to("../../1.safetensors")
    refused_path(folder, "outside the folder")


def test_index_and_shards_disagree(tmp_path: Path) -> None:
    refused_path(indexed(tmp_path / "a", {"a": "absent.safetensors"}), r"names shard absent\.safetensors, which is missing")
    refused_path(indexed(tmp_path / "b", {"no.such": "model-00001-of-00001.safetensors"}), "'no.such' is not in model-00001")
    one = "model-00001-of-00001.safetensors"
    refused_path(indexed(tmp_path / "c", {"lm_head.weight": one}), r"tensors of the shards are not listed: .* fix the index")
    for bad in ({}, [], {"a": 1}, None):
        refused_path(indexed(tmp_path / str(id(bad)), bad), "weight_map")


def test_shards_without_an_index(tmp_path: Path) -> None:
    ex = cb.modelopt()
    folder = ex.write(tmp_path, shards=3)
    (folder / "model.safetensors.index.json").unlink()
    assert len(fp4.open_checkpoint(folder)) == len(ex.want) + 5
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused_path(folder, r"shard model-00002-of-00003\.safetensors is missing")


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
        refused_path(tmp_path, r"'a' is in model-00002-of-00002\.safetensors, says the index, and with other contents in model-00001")


def test_one_tensor_in_two_shards(tmp_path: Path) -> None:
    for i in (1, 2):
        cb.save(tmp_path / f"model-0000{i}-of-00002.safetensors", {"a": torch.zeros(1)})
    refused_path(tmp_path, "'a' is also in model-00001-of-00002")
