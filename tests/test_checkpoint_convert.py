"""fp4 convert: every sample to every dialect that can hold it and back, by bytes and by meaning; refusals; the lossless cast."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import checkpoint_builder as cb
import pytest
import torch
from convert_cases import CT, GO, MO, ONCE, SAMPLES, TWICE, same, stored

import fp4
from fp4.checkpoint import convert as module
from fp4.checkpoint.convert import ConversionRefused, convert_checkpoint
from fp4.checkpoint.weights import Scalar
from fp4.cli import main
from fp4.cli.verify import collect
from fp4.errors import CheckpointError


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fp4.checkpoint.CheckpointWarning)
        yield


#: sample, target, exactness of its quantised tensors
CASES = [
    ("modelopt/nvfp4", CT, {"rounded"}),
    ("modelopt/mixed", CT, {"rounded", "bit-exact"}),
    ("modelopt/nvfp4_gptoss", CT, {"rounded"}),
    ("modelopt/nvfp4_qwen3moe", CT, {"rounded"}),
    ("compressed_tensors/nvfp4_kvfp8_bias", MO, {"rounded"}),
    ("compressed_tensors/mxfp4", MO, {"bit-exact"}),
    ("gpt_oss_mxfp4/hf", MO, {"bit-exact"}),
    ("gpt_oss_mxfp4/hf", CT, {"bit-exact"}),
    ("torchao/nvfp4_weight_only", MO, {"bit-exact"}),
    ("torchao/nvfp4_weight_only", CT, {"rounded"}),
    ("deepseek_v4_style", MO, {"bit-exact", "value-exact"}),
    ("deepseek_v4_style", CT, {"bit-exact", "value-exact"}),
    ("fouroversix/nvfp4_mse", MO, {"bit-exact"}),
    ("fouroversix/nvfp4_mse", CT, {"rounded", "bit-exact"}),
]


@pytest.mark.parametrize(("sample", "to", "kinds"), CASES, ids=[f"{s}->{t}" for s, t, _ in CASES])
def test_samples_there_and_back(sample: str, to: str, kinds: set[str], tmp_path: Path) -> None:
    """The output reopens under its dialect without a warning, and means the same; so does what comes back."""
    source = SAMPLES / sample
    out, back = tmp_path / "out", tmp_path / "back"
    report = convert_checkpoint(source, out, to)
    assert {t.exactness for t in report.tensors} == kinds
    worst = max(max(t.scale_change, t.input_change) for t in report.tensors)
    assert worst <= ONCE
    with fp4.open_checkpoint(source) as ck, fp4.open_checkpoint(out) as got:
        assert got.dialect == to
        assert not got.warnings
        home = {MO: MO, CT: CT, GO: GO}.get(ck.dialect, CT if to == MO else MO)
        assert set(got.kv_scales) == set(ck.kv_scales)
        for module_, scale in ck.kv_scales.items():
            assert torch.equal(got.kv_scales[module_].k, scale.k)
            assert torch.equal(got.kv_scales[module_].v, scale.v)
        assert (got.kv_config is None) == (ck.kv_config is None)
        apart = any(len(ck.record(n).logical) == 3 for n in ck) and to == CT
    tolerance = TWICE if worst else 0.0
    if not apart:
        same(source, out, tolerance)
    again = convert_checkpoint(out, back, home)
    assert again.source_dialect == to
    same(source, back, TWICE if worst or any(t.scale_change or t.input_change for t in again.tensors) else 0.0)


@pytest.mark.parametrize("sample", sorted({c[0] for c in CASES}))
def test_codes_and_block_scales_are_the_samples_bytes(sample: str, tmp_path: Path) -> None:
    """Not only by fp4's own reader: the bytes of each matrix appear in the output under the target's names."""
    report = convert_checkpoint(SAMPLES / sample, tmp_path / "ct", CT)
    out = stored(tmp_path / "ct")
    with fp4.open_checkpoint(SAMPLES / sample) as ck:
        checked = 0
        for row in report.tensors:
            q = ck[row.name]
            if isinstance(q, fp4.QuantizedTensor) and q.codes.ndim == 2:
                m = row.name.removesuffix(".weight")
                assert out[f"{m}.weight_packed"][2] == q.codes.numpy().tobytes()
                assert out[f"{m}.weight_scale"][2] == q.scale.numpy().tobytes()
                checked += 1
            elif isinstance(q, fp4.QuantizedTensor):
                head = row.name.rpartition(".")[0]
                for e in range(q.codes.shape[0]):
                    parts = {"gate": slice(0, None, 2), "up": slice(1, None, 2)} if "gate_up" in row.name else {"down": slice(None)}
                    for leaf, rows in parts.items():
                        assert out[f"{head}.{e}.{leaf}_proj.weight_packed"][2] == q.codes[e, rows].numpy().tobytes()
                        checked += 1
        assert checked


def pairs() -> list[tuple[str, cb.Example, cb.Example]]:
    """Example A and its variants against B and its own: one set of bytes under two dialects' names."""
    kv = cb.modelopt()
    kv.nested = cb.nested_config(kv_cache_quant_algo="FP8")
    other = cb.compressed_tensors()
    other.config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    for name, value in (("k", 0.01), ("v", 0.02)):
        kv.tensors[f"{cb.L}self_attn.{name}_proj.{name}_scale"] = cb.f32(value)
        other.tensors[f"{cb.L}self_attn.{name}_scale"] = cb.f32(value, (1,))
    a16 = cb.modelopt(act=False)
    a16.nested = cb.nested_config("W4A16_NVFP4")
    mx = cb.mxfp4_linears()
    mx.nested = cb.nested_config("mxfp4", group=None)
    packed = cb.mxfp4_linears("weight_packed")
    packed.config = cb.model_config(**cb.ct_config([cb.ct_group("mxfp4")]))
    return [
        ("W4A4", cb.modelopt(), cb.compressed_tensors()),
        ("kv", kv, other),
        ("W4A16", a16, cb.compressed_tensors(act=False)),
        ("mxfp4", mx, packed),
    ]


@pytest.mark.parametrize(("a", "b"), [p[1:] for p in pairs()], ids=[p[0] for p in pairs()])
def test_examples_a_and_b_become_each_other(a: cb.Example, b: cb.Example, tmp_path: Path) -> None:
    """Byte for byte, in both directions: the scales are powers of two, so every reciprocal is exact."""
    for left, right, to in ((a, b, CT), (b, a, MO)):
        source = left.write(tmp_path / f"from-{to}")
        report = convert_checkpoint(source, tmp_path / to, to)
        assert {t.exactness for t in report.tensors} == {"bit-exact"}
        assert stored(tmp_path / to) == stored(right.write(tmp_path / f"want-{to}"))
    config = json.loads((tmp_path / CT / "config.json").read_text())["quantization_config"]
    want = b.config["quantization_config"]
    group, other = config["config_groups"]["group_0"], want["config_groups"]["group_0"]
    assert config["format"] == want["format"]
    assert group["targets"] == ["Linear"]
    assert {k: group["weights"][k] for k in ("strategy", "group_size", "num_bits")} == {
        k: other["weights"][k] for k in ("strategy", "group_size", "num_bits")
    }
    assert (group["input_activations"] is None) == (other["input_activations"] is None)
    assert "lm_head" in config["ignore"]
    assert (config["kv_cache_scheme"] is None) == (want["kv_cache_scheme"] is None)
    nested = json.loads((tmp_path / MO / "hf_quant_config.json").read_text())["quantization"]
    assert nested["quant_algo"] == a.nested["quantization"]["quant_algo"]
    assert "lm_head" in nested["exclude_modules"]
    assert nested["kv_cache_quant_algo"] == a.nested["quantization"]["kv_cache_quant_algo"]


@pytest.mark.parametrize("attribute", ["second", "input"])
def test_a_forgotten_inversion_is_caught(attribute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken on purpose: one scalar written in the source's direction. verify must say so (weights or activation scales)."""
    source = cb.modelopt({**cb.SECOND, "o_proj": 0.001}).write(tmp_path / "in")
    good = tmp_path / "good"
    convert_checkpoint(source, good, CT)
    assert not collect(source, good, 1e-6)["different"]
    right = Scalar.stored
    blobs = module.WRITERS[CT].blobs

    def wrong(loader: Any, weight: Any) -> Any:
        victim = getattr(weight, attribute)
        monkeypatch.setattr(Scalar, "stored", lambda s, divide: (s.multiplier, 0.0) if s is victim else right(s, divide))
        return blobs(loader, weight)

    monkeypatch.setattr(module.WRITERS[CT], "blobs", wrong, raising=False)
    convert_checkpoint(source, tmp_path / "bad", CT)
    monkeypatch.undo()
    if attribute == "input":
        assert collect(source, tmp_path / "bad", 1e-6)["different"] == len(cb.LINEARS)
        return
    with pytest.raises(CheckpointError, match="looks like its own reciprocal"):  # o_proj's 0.001 read as a divisor is 1000
        collect(source, tmp_path / "bad", 1e-6)


REFUSED = [
    ("modelopt/nvfp4", GO, "MXFP4 experts only"),
    ("compressed_tensors/mxfp4", GO, "not a stacked expert"),
    ("deepseek_v4_style", GO, "gpt-oss"),
    ("modelopt/nvfp4_svd", CT, "pre_quant_scale"),
    ("amd_quark/amdfp4", MO, "amdfp4"),
    ("amd_quark/amdfp4", CT, "amdfp4"),
]


@pytest.mark.parametrize(("sample", "to", "why"), REFUSED, ids=[f"{s}->{t}" for s, t, _ in REFUSED])
def test_refused_before_anything_is_written(sample: str, to: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConversionRefused, match=why) as caught:
        convert_checkpoint(SAMPLES / sample, tmp_path / "out", to)
    assert caught.value.report.count("refused")
    assert not list(tmp_path.iterdir())


# writing


def test_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists"):
        convert_checkpoint(SAMPLES / "modelopt" / "nvfp4", tmp_path / "out", CT)
    assert not list((tmp_path / "out").iterdir())


def test_a_target_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists"):
        convert_checkpoint(
            SAMPLES / "modelopt" / "nvfp4", tmp_path / "out", CT, progress=lambda *_: (tmp_path / "out").mkdir(exist_ok=True)
        )
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_run_leaves_nothing(error: Any, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def stop(done: int, total: int, name: str) -> None:
        if done == 9:
            seen.append(sorted(p.name for p in next(tmp_path.glob(".out.partial-*")).iterdir()))
            raise error

    with pytest.raises((KeyboardInterrupt, CheckpointError)):
        convert_checkpoint(SAMPLES / "modelopt" / "nvfp4", tmp_path / "out", CT, progress=stop, shard_bytes=4000)
    assert not list(tmp_path.iterdir())
    assert seen
    assert all(name.endswith(".part") for name in seen[0]), "half-written shards have temporary names"


def test_shards_and_index(tmp_path: Path) -> None:
    source = SAMPLES / "modelopt" / "nvfp4_qwen3moe"
    report = convert_checkpoint(source, tmp_path / "out", CT, shard_bytes=6000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_size"] == report.bytes_out
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(report.files)
    same(source, tmp_path / "out", TWICE)


def test_memory_is_one_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No chunk that reaches the disk is larger than one expert, taken apart, transposed or put together."""
    ex = cb.gpt_oss()
    source = ex.write(tmp_path / "in")
    largest: list[int] = []
    monkeypatch.setattr("fp4.checkpoint.output._write", lambda handle, data: largest.append(memoryview(data).nbytes) or handle.write(data))
    for i, to in enumerate((MO, CT)):
        convert_checkpoint(source, tmp_path / str(i), to)
        convert_checkpoint(tmp_path / str(i), tmp_path / f"{i}-back", GO)
    assert max(n for n in largest if n > 5000) <= max(192 * 32, 64 * 64 * 2)


# the command


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    status = main([str(a) for a in args])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = SAMPLES / "modelopt" / "nvfp4"
    status, out, err = run(capsys, "convert", source, tmp_path / "ct", "--to", CT, "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert report["counts"] == {"bit-exact": 0, "value-exact": 0, "rounded": 7, "lossy": 0, "refused": 0}
    assert 0 < report["max_scale_change"] < ONCE
    status, out, err = run(capsys, "convert", source, tmp_path / "go", "--to", GO, "--json")
    assert status == 1
    assert json.loads(out)["counts"]["refused"] == 7
    assert err.startswith("fp4: convert: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "go").exists()
    for bad in (
        (source, tmp_path / "x", "--to", "gguf"),
        (source, tmp_path / "ct", "--to", CT),
        (tmp_path / "no", tmp_path / "x", "--to", MO),
    ):
        status, out, err = run(capsys, "convert", *bad)
        assert (status, out) == (2, "")
        assert err.startswith("fp4: ")
        assert err.count("\n") == 1
    status, out, err = run(capsys, "convert", source, tmp_path / "again", "--to", CT, "--quiet")
    assert status == 0
    assert "7 rounded" in out
