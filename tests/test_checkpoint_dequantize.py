"""Streaming dequantisation: exact output, bounded memory, nothing half-written; and what inspect says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkpoint_builder as cb
import pytest
import torch
from safetensors.torch import load_file

import fp4
from fp4.checkpoint.dequantize import dequantize_checkpoint
from fp4.checkpoint.inspect import inspect, summary
from fp4.cli import main

L = cb.L
ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data" / "checkpoints"
MAKERS = [cb.modelopt, cb.compressed_tensors, cb.gpt_oss, cb.moe, cb.modelopt_fused, cb.torchao, cb.deepseek, cb.nemotron, cb.fastdeploy]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_output_is_the_unquantised_model(tmp_path: Path, make: Any, dtype: torch.dtype) -> None:
    ex = make()
    report = dequantize_checkpoint(ex.write(tmp_path / "in"), tmp_path / "out", dtype)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]
    got = load_file(tmp_path / "out" / "model.safetensors")
    for name, want in ex.want.items():
        assert got[name].dtype == dtype
        assert torch.equal(got[name], want.to(dtype)), name
    for name in got.keys() - ex.want.keys():
        assert torch.equal(got[name], ex.tensors[name])
        assert got[name].dtype == ex.tensors[name].dtype
    assert set(got) == set(fp4.open_checkpoint(tmp_path / "in").names())
    assert report.tensors == len(got)
    assert report.dequantized == len(ex.want)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not {"quantization_config", "expert_dtype"} & config.keys()
    again = fp4.open_checkpoint(tmp_path / "out")
    assert again.dialect == "plain"
    assert not again.warnings


def test_shards_index_side_files_and_progress(tmp_path: Path) -> None:
    ex = cb.compressed_tensors()
    ex.config = {"model_type": "vlm", "torch_dtype": "float16", "text_config": {**ex.config, "dtype": "float16"}}
    folder = ex.write(tmp_path / "in")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "recipe.yaml").write_text("a: 1")
    seen: list[tuple[int, int, str]] = []
    report = dequantize_checkpoint(folder, tmp_path / "deep" / "out", progress=lambda *a: seen.append(a), shard_bytes=30_000)
    out = tmp_path / "deep" / "out"
    shards = sorted(p.name for p in out.glob("*.safetensors"))
    assert len(shards) > 1
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert sorted(report.files) == sorted(p.name for p in out.iterdir())
    assert (out / "tokenizer.json").exists()
    assert not (out / "recipe.yaml").exists()
    ck = fp4.open_checkpoint(out)
    assert all(torch.equal(ck[n], v.to(torch.bfloat16)) for n, v in ex.want.items())
    assert [s[0] for s in seen] == list(range(1, len(ck) + 1))
    assert {s[1] for s in seen} == {len(ck)}
    config = json.loads((out / "config.json").read_text())
    assert config["torch_dtype"] == config["text_config"]["dtype"] == "bfloat16"
    assert "quantization_config" not in config["text_config"]


def test_single_file_target_and_mode(tmp_path: Path) -> None:
    ex = cb.modelopt()
    report = dequantize_checkpoint(ex.write(tmp_path / "in", shards=2), tmp_path / "w.safetensors", shard_bytes=1)
    assert report.files == ["w.safetensors"]
    assert set(load_file(tmp_path / "w.safetensors")) == set(ex.want) | set(cb.base_tensors())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "w.safetensors"]


def test_folds_what_a_plain_linear_would_lose(tmp_path: Path) -> None:
    ex = cb.modelopt()
    ex.nested = cb.nested_config("NVFP4_AWQ", pre_quant_scale=True)
    pqs = (2.0 ** (torch.arange(64) % 5 - 2)).to(torch.bfloat16)
    name = f"{L}self_attn.o_proj"
    ex.tensors[f"{name}.pre_quant_scale"] = pqs
    report = dequantize_checkpoint(ex.write(tmp_path / "in"), tmp_path / "out", torch.float32)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[f"{name}.weight"], ex.want[f"{name}.weight"] * pqs.float())
    assert report.notes == ["1 weights have their pre_quant_scale and low-rank branch folded in"]
    dequantize_checkpoint(tmp_path / "in", tmp_path / "raw", torch.float32, fold=False)
    assert torch.equal(load_file(tmp_path / "raw" / "model.safetensors")[f"{name}.weight"], ex.want[f"{name}.weight"])


def test_refuses_to_overwrite(tmp_path: Path) -> None:
    folder = cb.modelopt().write(tmp_path / "in")
    for target in (folder, tmp_path / "file", tmp_path / "link"):
        if target.name == "file":
            target.write_text("x")
        elif target.name == "link":
            target.symlink_to("nowhere")
        with pytest.raises(fp4.CheckpointError, match="exists; give a new name"):
            dequantize_checkpoint(folder, target)
    with pytest.raises(fp4.CheckpointError, match=r"dtype torch\.uint8 is not written"):
        dequantize_checkpoint(folder, tmp_path / "o", torch.uint8)


def test_bad_scale_byte_writes_nothing(tmp_path: Path) -> None:
    ex = cb.modelopt()
    scale = ex.tensors[f"{L}mlp.down_proj.weight_scale"].view(torch.uint8).clone()
    scale[63, 7] = 0x7F
    ex.tensors[f"{L}mlp.down_proj.weight_scale"] = scale.view(torch.float8_e4m3fn)
    with pytest.raises(fp4.CheckpointError, match=r"down_proj\.weight_scale.* at \[63, 7\] is NaN"):
        dequantize_checkpoint(ex.write(tmp_path / "in"), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full"), RuntimeError])
def test_interruption_leaves_nothing(tmp_path: Path, error: Any) -> None:
    def stop(done: int, total: int, name: str) -> None:
        if done == 3:
            raise error

    expected = fp4.CheckpointError if isinstance(error, OSError) else error
    with pytest.raises(expected):
        dequantize_checkpoint(cb.modelopt().write(tmp_path / "in"), tmp_path / "out", progress=stop)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def run(code: str, *args: object, **options: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **options)


def test_killed_run_leaves_no_half_file_that_looks_whole(tmp_path: Path) -> None:
    """SIGKILL in the middle: what remains is a hidden folder whose files are named .part, and the target does not exist."""
    folder = cb.modelopt().write(tmp_path / "in")
    code = (
        "import sys, time; from fp4.checkpoint.dequantize import dequantize_checkpoint as d\n"
        "def slow(done, total, name):\n    print(done, flush=True)\n    time.sleep(60 if done == 4 else 0)\n"
        "d(sys.argv[1], sys.argv[2], progress=slow)"
    )
    process = run(code, folder, tmp_path / "out")
    assert process.stdout is not None
    while process.stdout.readline().strip() != "4":
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    assert not (tmp_path / "out").exists()
    left = [p for p in tmp_path.rglob("*") if p.is_file() and (tmp_path / "in") not in p.parents]
    assert left
    assert all(p.name.endswith(".part") and p.parent.name.startswith(".out.partial-") for p in left)


#: a command of the command line that stops at its fourth step
_SLOW_COMMAND = """
import sys, time, contextlib
from fp4 import cli
from fp4.cli import convert, dequantize

@contextlib.contextmanager
def slow(label, total, quiet):
    def step(done, name):
        print(done, flush=True)
        time.sleep(60 if done >= 4 else 0)
    yield step

convert.progress = dequantize.progress = slow
sys.exit(cli.main(sys.argv[1:]))
"""


def started(*args: object) -> subprocess.Popen[str]:
    """A run that has written something and waits. Signals are as a shell leaves them: ``nohup`` would pass on an ignored SIGHUP."""
    process = run(_SLOW_COMMAND, *args, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))
    assert process.stdout is not None
    while (line := process.stdout.readline().strip()) not in ("4", "5", "6", "7", "8", "9", "10", "11", "12"):
        assert process.poll() is None, (line, process.communicate())
    return process


def commands(tmp_path: Path) -> dict[str, list[object]]:
    folder, out = cb.modelopt().write(tmp_path / "in"), tmp_path / "out"
    return {"dequantize": ["dequantize", folder, out], "convert": ["convert", folder, out, "--to", "compressed-tensors"]}


@pytest.mark.parametrize("command", ["dequantize", "convert"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_ending_signal_leaves_nothing(tmp_path: Path, command: str, number: signal.Signals) -> None:
    """As Ctrl-C does; exit status 128 + n."""
    process = started(*commands(tmp_path)[command])
    assert list(tmp_path.glob(".out.partial-*"))
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number, err
    assert err.strip() == f"fp4: ended by {number.name}; nothing is left half written"
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("command", ["dequantize", "convert"])
def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path, command: str) -> None:
    args = commands(tmp_path)[command]
    killed = started(*args)
    (left,) = tmp_path.glob(".out.partial-*")
    other = tmp_path / ".outer.partial-0123abcd"
    other.mkdir()  # of another target
    with pytest.raises(fp4.CheckpointError, match=rf"another run is writing .*out \({re.escape(left.name)}\); wait for it"):
        dequantize_checkpoint(tmp_path / "in", tmp_path / "out")
    killed.send_signal(signal.SIGKILL)
    killed.wait(timeout=30)
    assert left.is_dir()
    done = run("import sys; from fp4.cli import main; sys.exit(main(sys.argv[1:]))", *args, "--quiet")
    _, err = done.communicate(timeout=60)
    assert done.returncode == 0, err
    assert err.strip() == f"fp4: warning: {command}: {left} was left by a run that was killed; removed"
    assert sorted(p.name for p in tmp_path.iterdir()) == [other.name, "in", "out"]


def big(folder: Path, rows: int, k: int, experts: int) -> Path:
    """A large file without large memory: one stacked MXFP4 tensor and one plain BF16 tensor, written in pieces."""
    shapes = {
        "e.gate_up_proj_blocks": ("U8", [experts, rows, k // 32, 16]),
        "e.gate_up_proj_scales": ("U8", [experts, rows, k // 32]),
        "norm": ("BF16", [experts * rows, k // 2]),
    }
    header, at = {}, 0
    for name, (dtype, shape) in shapes.items():
        size = int(torch.Size(shape).numel()) * (2 if dtype == "BF16" else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    folder.mkdir()
    cb.raw_file(folder / "model.safetensors", header)
    piece = bytes([0x7B]) * (1 << 20)
    with open(folder / "model.safetensors", "ab") as handle:
        for start in range(0, at, len(piece)):
            handle.write(piece[: min(len(piece), at - start)])
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}))
    return folder


@pytest.mark.slow
def test_memory_is_one_output_and_200_megabytes(tmp_path: Path) -> None:
    """The largest output is 256 MiB (bf16). The promise is one output plus 200 MB above the baseline; held here to 80 MB,

    so that the input's pages (71 MB), if they stayed mapped, would be noticed.
    """
    folder = big(tmp_path / "in", 4096, 4096, 8)
    code = (
        "import sys, json, resource, torch, fp4\nfrom fp4.checkpoint.dequantize import dequantize_checkpoint as d\n"
        "from fp4.ref import quantize\n"
        "peak = lambda: int(next(l for l in open('/proc/self/status') if l.startswith('VmHWM')).split()[1]) * 1024\n"
        "base = peak()\nd(sys.argv[1], sys.argv[2])\nprint(base, peak())"
    )
    process = run(code, folder, tmp_path / "out")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    base, top = map(int, out.split())
    output = 8 * 4096 * 4096 * 2
    assert top - base < output + 80_000_000, f"{(top - base) / 1e6:.0f} MB above the baseline"


# inspect


def one(reports: list[Any], name: str) -> Any:
    return next(r for r in reports if r.name == name)


def test_inspect_good(tmp_path: Path) -> None:
    ck = fp4.open_checkpoint(cb.modelopt().write(tmp_path))
    reports = inspect(ck)
    assert [r.name for r in reports] == ck.names()
    q = one(reports, f"{L}self_attn.q_proj.weight")
    assert (q.format, q.shape, q.quantized, q.file) == ("nvfp4", [64, 64], True, "model.safetensors")
    assert (q.scale_min, q.scale_max) == (cb.e4m3(0x28), cb.e4m3(0x40))
    assert q.global_scale == [0.25, 0.25]
    assert q.input_scale == [0.5, 0.5]
    assert q.bits_per_element == pytest.approx(4.5, abs=0.02)
    assert not any(r.signs for r in reports)
    total = summary(ck, reports)
    assert total["formats"]["nvfp4"]["tensors"] == 7
    assert total["suspicious"] == 0
    json.dumps([total, [r.to_dict() for r in reports]])


def signs(ex: cb.Example, folder: Path, name: str) -> str:
    ck = fp4.open_checkpoint(ex.write(folder))
    return " | ".join(one(inspect(ck), name).signs)


def test_inspect_suspicious(tmp_path: Path) -> None:
    m = f"{L}mlp.up_proj"
    cases: list[tuple[str, str, Any]] = [
        ("weight_scale", "scale bytes are NaN, the first at [2, 1]", None),
        ("weight_scale", "block scales are negative", 0x80 | 0x30),
        ("weight_scale", "all 512 block scales are the same byte 0x38", "constant"),
        ("weight_scale_2", "second-level scale is 0", cb.f32(0.0)),
        ("weight_scale_2", "looks like its own reciprocal", cb.f32(4096.0)),
        ("weight_scale_2", "gate and up have different second-level scales (0.25 and 0.5)", cb.f32(0.5)),
        ("weight_scale_2", "need a finite multiplier", cb.f32(float("nan"))),
        ("input_scale", "activation scale is 0", cb.f32(0.0)),
    ]
    for i, (leaf, want, change) in enumerate(cases):
        ex = cb.modelopt()
        t = ex.tensors[f"{m}.{leaf}"]
        if leaf == "weight_scale":
            raw = t.view(torch.uint8).clone()
            if change == "constant":
                raw[:] = 0x38
            else:
                raw[2, 1] = 0x7F if change is None else change
            t = raw.view(torch.float8_e4m3fn)
        else:
            t = change
        ex.tensors[f"{m}.{leaf}"] = t
        assert want in signs(ex, tmp_path / str(i), f"{m}.weight"), want


def test_inspect_stacked_halves(tmp_path: Path) -> None:
    name = f"{L}mlp.experts.up_gate_proj_weight"
    assert "gate and up have different" not in signs(cb.fastdeploy(), tmp_path / "a", name)
    assert "gate and up have different second-level scales" in signs(cb.fastdeploy(2.0), tmp_path / "b", name)


@pytest.mark.filterwarnings("ignore::fp4.checkpoint.CheckpointWarning")
@pytest.mark.parametrize("sample", ["torchao/nvfp4_weight_only", "fouroversix/nvfp4_mse"])
def test_inspect_own_scales_of_gate_and_up_are_a_note(sample: str, capsys: pytest.CaptureFixture[str]) -> None:
    """These producers scale each tensor by itself; a file as they wrote it is not suspicious."""
    with fp4.open_checkpoint(DATA / sample) as ck:
        reports = inspect(ck)
        assert not any(r.signs for r in reports)
        gate, up = (one(reports, f"model.layers.0.mlp.{w}_proj.weight") for w in ("gate", "up"))
        assert gate.global_scale != up.global_scale
        assert gate.notes == up.notes
        assert re.fullmatch(rf"gate and up have different second-level scales \(.*\), as {ck.dialect} writes them: .*", gate.notes[0])
        assert sum(bool(r.notes) for r in reports) == 2
        assert summary(ck, reports)["suspicious"] == 0
    assert main(["inspect", str(DATA / sample), "--check"]) == 0
    out = capsys.readouterr().out
    assert "note: model.layers.0.mlp.gate_proj.weight: gate and up have different" in out
    assert "suspicious signs: 0" in out


def test_inspect_unified_scales_that_differ_are_a_sign(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a ModelOpt file the same difference means that a loader which keeps one scale changes the values."""
    ex = cb.modelopt()
    ex.tensors[f"{L}mlp.up_proj.weight_scale_2"] = cb.f32(0.5)
    folder = ex.write(tmp_path)
    report = one(inspect(fp4.open_checkpoint(folder)), f"{L}mlp.up_proj.weight")
    assert report.signs == ["gate and up have different second-level scales (0.25 and 0.5)"]
    assert report.notes == []
    assert main(["inspect", str(folder), "--check"]) == 1


def test_inspect_fp8_scale(tmp_path: Path) -> None:
    weight = cb.fp8_weight(64, 64)
    for i, (value, want) in enumerate(((float("nan"), "not finite"), (-1.0, "negative"), (0.5, ""))):
        quant = {"quant_method": "fp8"}
        ex = cb.Example({"m.weight": weight, "m.weight_scale_inv": cb.f32(value)}, config=cb.model_config(**quant))
        text = signs(ex, tmp_path / str(i), "m.weight")
        assert want in text if want else not text
