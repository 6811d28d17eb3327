"""The command line as a user meets it: output, JSON, exit status, and one sentence instead of a traceback."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fp4
from fp4.cli import main

SMALL = {"hidden_size": 64, "model_type": "llama"}


def _checkpoint(folder: Path, seed: int = 0, scale: float = 1.0) -> Path:
    """A ModelOpt NVFP4 checkpoint of two matrices, a norm and a head."""
    folder.mkdir(parents=True)
    torch.manual_seed(seed)
    tensors = {"model.norm.weight": torch.ones(64, dtype=torch.bfloat16), "lm_head.weight": torch.ones(8, 64, dtype=torch.bfloat16)}
    for name, shape in (("model.layers.0.mlp.gate_proj", (32, 64)), ("model.layers.0.mlp.down_proj", (64, 32))):
        q = fp4.quantize(torch.randn(shape) * scale, "nvfp4")
        assert q.global_scale is not None
        tensors |= {
            f"{name}.weight": q.codes,
            f"{name}.weight_scale": q.scale.view(torch.float8_e4m3fn),
            f"{name}.weight_scale_2": q.global_scale,
            f"{name}.input_scale": torch.tensor(0.01),
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quant = {"quant_algo": "NVFP4", "quant_method": "modelopt", "group_size": 16, "ignore": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps({**SMALL, "quantization_config": quant}))
    return folder


def _run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return status, out, err


def _bad(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The sentence of a failing command: status 2, nothing on stdout, one line on stderr."""
    status, out, err = _run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("fp4: ")
    assert len(err.strip().splitlines()) == 1
    return err


def test_python_m_fp4_and_version() -> None:
    done = subprocess.run([sys.executable, "-m", "fp4", "--version"], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"fp4 {fp4.__version__}\n", "")


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = _run(capsys)
    assert status == 2
    for command in ("doctor", "inspect", "dequantize", "explain", "layout", "verify", "error", "bench"):
        assert f"\n  {command} " in out


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = _run(capsys, "doctor")
    assert status == 0
    assert "torch " + torch.__version__.split("+")[0] in out
    assert "reference" in out
    status, out, _ = _run(capsys, "doctor", "--json")
    report = json.loads(out)
    assert status == 0
    assert {b["name"] for b in report["backends"]} >= {"reference"}
    assert {(c["op"], c["format"]) for c in report["choices"]} == {(o, f) for o in ("matmul", "moe") for f in ("nvfp4", "mxfp4")}
    if not torch.cuda.is_available():
        assert report["devices"] == []
        assert "sees no GPU" in report["no_gpu"]


def test_doctor_survives_missing_libraries() -> None:
    """No triton, no vendor library, no rich: doctor still answers and names what is missing."""
    code = (
        "import sys, importlib.abc, json\n"
        "class Hide(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('triton', 'rich', 'flashinfer', 'triton_kernels', 'vllm', 'matplotlib'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hide())\n"
        "from fp4.cli import main\n"
        "sys.exit(main(['doctor', '--json']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    usable = {b["name"]: b["usable"] for b in report["backends"]}
    assert usable["reference"]
    assert not any(ok for name, ok in usable.items() if name != "reference")
    if not torch.cuda.is_available():
        assert all(c["backend"] == "reference" for c in report["choices"])


def test_inspect(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ck = _checkpoint(tmp_path / "a")
    status, out, _ = _run(capsys, "inspect", ck)
    assert status == 0
    assert "modelopt" in out
    assert "suspicious signs: 0" in out
    status, out, _ = _run(capsys, "inspect", ck, "--json")
    report = json.loads(out)
    assert status == 0
    assert report["dialect"] == "modelopt"
    tensor = next(t for t in report["tensors"] if t["name"].endswith("down_proj.weight"))
    assert (tensor["format"], tensor["shape"]) == ("nvfp4", [64, 32])
    with fp4.open_checkpoint(ck) as opened:
        q = opened["model.layers.0.mlp.down_proj.weight"]
    assert tensor["scale_max"] == float(q.scale.view(torch.float8_e4m3fn).float().max())
    assert tensor["global_scale"] == [float(q.global_scale)] * 2


def test_inspect_shows_suspicious_signs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ck = _checkpoint(tmp_path / "a")
    tensors = load_file(ck / "model.safetensors")
    tensors["model.layers.0.mlp.gate_proj.weight_scale"].view(torch.uint8)[3, 1] = 0x7F
    save_file(tensors, ck / "model.safetensors")
    status, out, _ = _run(capsys, "inspect", ck)
    assert status == 0
    assert "gate_proj.weight: 1 scale bytes are NaN, the first at [3, 1]" in out
    assert _run(capsys, "inspect", ck, "--check")[0] == 1


def test_dequantize_and_verify(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ck = _checkpoint(tmp_path / "a")
    status, out, err = _run(capsys, "dequantize", ck, tmp_path / "b", "--dtype", "float32")
    assert status == 0
    assert "4 tensors, 2 dequantised to float32" in out
    assert "dequantize 100%" in err
    assert _run(capsys, "dequantize", ck, tmp_path / "c", "--quiet")[2] == ""
    status, out, _ = _run(capsys, "verify", ck, tmp_path / "b")
    assert status == 0
    assert "4 tensors: 4 equal values; 0 differ" in out
    assert "equal bytes" in _run(capsys, "verify", ck, ck)[1]

    # one code changed: found, located, exit status 1; inside a stated tolerance it is not a difference
    changed = shutil.copytree(ck, tmp_path / "d")
    tensors = load_file(changed / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][7, 2] ^= 0x01
    save_file(tensors, changed / "model.safetensors")
    status, out, _ = _run(capsys, "verify", ck, changed)
    assert status == 1
    assert "1 of 2048 values differ, first at [7, 4]" in out
    assert "1 differ" in out
    assert _run(capsys, "verify", ck, changed, "--tolerance", "0.5")[0] == 0
    status, out, _ = _run(capsys, "verify", ck, changed, "--json")
    assert json.loads(out)["different"] == 1

    # a tensor that only one side has
    del tensors["model.norm.weight"]
    save_file(tensors, changed / "model.safetensors")
    assert "only in" in _run(capsys, "verify", ck, changed)[1]
    # an activation scale that differs
    tensors = load_file(ck / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.input_scale"] *= 2
    save_file(tensors, changed / "model.safetensors")
    status, out, _ = _run(capsys, "verify", ck, changed)
    assert status == 1
    assert "input_scale" in out


def test_verify_follows_the_low_rank_branch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The weight of an SVD export is codes, smoothing vector and branch: what dequantize writes is what verify compares."""
    ck = Path(__file__).parent / "data" / "checkpoints" / "modelopt" / "nvfp4_svd"
    assert _run(capsys, "dequantize", ck, tmp_path / "plain", "--dtype", "float32", "--quiet")[0] == 0
    status, out, _ = _run(capsys, "verify", ck, tmp_path / "plain")
    assert (status, "; 0 differ" in out) == (0, True), out
    assert _run(capsys, "verify", ck, tmp_path / "plain", "--no-fold")[0] == 1

    # the same codes and scales with another branch are another weight
    changed = shutil.copytree(ck, tmp_path / "changed")
    tensors = load_file(changed / "model.safetensors")
    name = min(n for n in tensors if n.endswith("lora_a"))
    tensors[name] = tensors[name] * 2
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    status, out, _ = _run(capsys, "verify", ck, changed)
    assert (status, "; 1 differ" in out) == (1, True), out


def test_verify_counts_missing_tensors_apart(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ck = _checkpoint(tmp_path / "a")
    fewer = shutil.copytree(ck, tmp_path / "b")
    tensors = load_file(fewer / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, fewer / "model.safetensors", metadata={"format": "pt"})
    status, out, _ = _run(capsys, "verify", ck, fewer)
    assert status == 1
    assert out.strip().endswith("; 0 differ; 1 in one of the two only"), out


def test_bad_input_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ck = _checkpoint(tmp_path / "a")
    assert "/nowhere" in _bad(capsys, "inspect", "/nowhere")
    assert "No such command 'frobnicate'" in _bad(capsys, "frobnicate")
    assert "Missing argument" in _bad(capsys, "inspect")
    assert "--dtype is 'int8'; need one of float32, bfloat16, float16" in _bad(capsys, "dequantize", ck, tmp_path / "x", "--dtype", "int8")
    assert not (tmp_path / "x").exists()
    assert "exists" in _bad(capsys, "dequantize", ck, ck)
    assert "format: 'nvfp5' is not known" in _bad(capsys, "error", "--format", "nvfp5")
    assert "has no tensor 'nope'" in _bad(capsys, "error", ck, "--name", "nope")
    assert "op is 'conv'" in _bad(capsys, "explain", "--op", "conv")
    assert "activation: 'gelu' is not known" in _bad(capsys, "explain", "--op", "moe", "--activation", "gelu")
    assert "--elements is 0" in _bad(capsys, "bench", "--elements", "0")
    assert "--name x names a tensor of a file" in _bad(capsys, "error", "--name", "x")
    for command in (("inspect", ""), ("dequantize", ck, ""), ("verify", ck, ""), ("error", "--format", "")):  # "" is this folder to Path
        assert "an argument is empty" in _bad(capsys, *command)

    whole = (ck / "model.safetensors").read_bytes()
    for name, data in (("cut", whole[: len(whole) // 2]), ("head", whole[:5]), ("noise", bytes(range(256)) * 16), ("empty", b"")):
        folder = shutil.copytree(ck, tmp_path / name)
        (folder / "model.safetensors").write_bytes(data)
        assert "model.safetensors" in _bad(capsys, "inspect", folder), name
        assert "model.safetensors" in _bad(capsys, "dequantize", folder, tmp_path / "y"), name
        assert not (tmp_path / "y").exists()


@pytest.mark.parametrize("tolerance", ["nan", "-1", "inf", "1e400"])
def test_tolerance_that_nothing_meets_or_misses(capsys: pytest.CaptureFixture[str], tmp_path: Path, tolerance: str) -> None:
    ck = _checkpoint(tmp_path / "a")
    assert "--tolerance is" in _bad(capsys, "verify", ck, ck, "--tolerance", tolerance)


def test_names_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    save_file({"层.é.weight": torch.zeros(2, 2)}, tmp_path / "w.safetensors")
    done = subprocess.run(
        [sys.executable, "-m", "fp4", "inspect", str(tmp_path / "w.safetensors")],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u5c42.\\xe9.weight" in done.stdout


def test_unreadable_output_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ck = _checkpoint(tmp_path / "a")
    (tmp_path / "file").write_text("")
    assert "file" in _bad(capsys, "dequantize", "--quiet", ck, tmp_path / "file" / "out")


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = _run(capsys, "explain", "--op", "moe", "--format", "mxfp4", "--device", "sm90", "--experts", 8, "--hidden", 64)
    assert status == 0
    assert "moe/mxfp4 on SM90" in out
    status, out, _ = _run(capsys, "explain", "--device", "cpu", "--json")
    report = json.loads(out)
    assert report["chosen"] == "reference"
    assert all(("rank" in b) != ("reason" in b) for b in report["backends"])


def test_error_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = _run(capsys, "error", "--format", "mxfp4", "--format", "nvfp4", "--recipe", "default", "--json")
    rows = json.loads(out)
    assert status == 0
    sqnr = {(r["tensor"], r["format"]): r["sqnr_db"] for r in rows}
    # specs: N(0, 1) gives 20.44 dB for NVFP4 and 18.75 dB for MXFP4 with the scale rounded up
    assert sqnr["normal", "nvfp4"] == pytest.approx(20.44, abs=0.1)
    assert sqnr["normal", "mxfp4"] == pytest.approx(18.75, abs=0.1)
    save_file({"w": torch.randn(32, 64), "b": torch.randn(64)}, tmp_path / "w.safetensors")
    status, out, _ = _run(capsys, "error", tmp_path / "w.safetensors", "--format", "nvfp4")
    assert status == 0
    assert out.startswith("w\n")
    assert "'no such' is not known" in _bad(capsys, "error", "--format", "nvfp4", "--recipe", "no such", "--json")
    assert "--seed is 1180591620717411303424" in _bad(capsys, "error", "--seed", 1 << 70)


def test_bench(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = _run(capsys, "bench", "--elements", "1", "--json")
    rows = {r["what"].split(",")[0]: r for r in json.loads(out)["rows"]}
    assert status == 0
    assert {"copy bf16", "quantize nvfp4", "dequantize mxfp4"} <= set(rows)
    assert all(r["seconds"] > 0 and r["ratio"] > 0 for r in rows.values())


def test_closed_pipe_and_interrupt(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "fp4", "error", "--format", "nvfp4", "--recipe", "default"],
            stdout=closed, stderr=subprocess.PIPE, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "fp4: output was closed before the end\n"

    from fp4.cli import doctor

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "collect", interrupted)
    assert _bad(capsys, "doctor") == "fp4: interrupted\n"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 2), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("again", [False, True])
def test_a_swallowed_signal_still_ends_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: signal.Signals, status: int, again: bool
) -> None:
    """C code that imports a module clears any error, and leaves the module half imported."""
    from fp4.cli import doctor

    def collect() -> None:
        with contextlib.suppress(BaseException):
            signal.raise_signal(number)
            pytest.fail("nothing was raised")
        if not again:
            raise AttributeError("half imported")
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)  # what comes while cleaning up must not end the cleaning
            cleaned.append(True)

    cleaned: list[bool] = []
    monkeypatch.setattr(doctor, "collect", collect)
    got, out, err = _run(capsys, "doctor")
    assert (got, out) == (status, "")
    assert err in ("fp4: interrupted\n", "fp4: ended by SIGTERM; nothing is left half written\n")
    assert bool(cleaned) == again
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_warnings_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ck = _checkpoint(tmp_path / "a")
    tensors = load_file(ck / "model.safetensors")
    config = json.loads((ck / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["lm_head", "model.layers.0.mlp.down_proj"]
    (ck / "config.json").write_text(json.dumps(config))
    save_file(tensors, ck / "model.safetensors")
    assert "down_proj" in _bad(capsys, "inspect", ck)
    status, out, err = _run(capsys, "dequantize", ck, tmp_path / "plain", "--trust", "tensors", "--quiet")
    assert status == 0
    assert err.startswith("fp4: warning: ")
    assert len(err.splitlines()) == 1
    status, out, err = _run(capsys, "inspect", ck, "--trust", "tensors")  # its report has them
    assert (status, err, out.count("warning: ")) == (0, "", 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_demo(tmp_path: Path) -> None:
    """``make demo``: every comparison passes and is listed; a wrong byte in a sample makes it fail with status 1."""
    root = Path(__file__).parents[1]
    copy = tmp_path / "repository"
    shutil.copytree(root / "examples", copy / "examples")
    shutil.copytree(root / "tests" / "data" / "checkpoints", copy / "tests" / "data" / "checkpoints")
    env = {**os.environ, "PYTHONPATH": str(root), "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}

    def demo() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(copy / "examples" / "demo.py"), "--out", str(tmp_path / "out")]
        return subprocess.run(command, capture_output=True, text=True, timeout=420, check=False, env=env)

    done = demo()
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out" / "checks.json").read_text())
    assert len(rows) >= 20
    assert all(r["passed"] for r in rows)
    assert (tmp_path / "out" / "error_by_format.png").read_bytes().startswith(b"\x89PNG")

    # one code of one sample
    weights = copy / "tests" / "data" / "checkpoints" / "gpt_oss_mxfp4" / "hf" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    from safetensors import safe_open

    with safe_open(weights, "pt") as f:
        codes = f.get_tensor("model.layers.0.mlp.experts.down_proj_blocks").numpy().tobytes()
    data[data.index(codes) + 100] ^= 0x07
    weights.write_bytes(data)
    done = demo()
    assert done.returncode == 1
    assert "FAIL  gpt_oss_mxfp4/hf" in done.stdout
    assert "FAIL  MoE of gpt_oss_mxfp4/hf" in done.stdout


def test_layout_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert _bad(capsys, "layout") == "fp4: Missing command. Try: fp4 layout --help\n"


def test_too_little_memory_is_one_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4.cli import doctor

    for collect in (lambda: bytearray(1 << 62), lambda: torch.empty(1 << 60)):
        monkeypatch.setattr(doctor, "collect", collect)
        assert _bad(capsys, "doctor").startswith("fp4: not enough memory for this; ")


@pytest.mark.parametrize("closed", ["1", "2", "1 2"])
def test_output_that_is_closed_before_the_start(closed: str) -> None:
    shut, fp4 = "".join(f" {n}>&-" for n in closed.split()), f'"{sys.executable}" -m fp4'
    script = f"{fp4} layout equal plain plain{shut}; echo $?; {fp4} nonsense{shut}; echo $?"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert [line for line in done.stdout.splitlines() if not line.startswith("equal")] == ["0", "2"], done
    assert done.stderr == ("" if "2" in closed else "fp4: No such command 'nonsense'. Try: fp4 --help\n")


@pytest.mark.parametrize("source", ["gpt_oss_mxfp4/hf", "modelopt/nvfp4_gptoss"])
def test_verify_compares_stacked_experts_with_single_ones(capsys: pytest.CaptureFixture[str], tmp_path: Path, source: str) -> None:
    stacked = Path(__file__).parent / "data/checkpoints" / source
    assert _run(capsys, "convert", stacked, tmp_path / "single", "--to", "compressed-tensors", "--quiet")[0] == 0
    for pair in ((stacked, tmp_path / "single"), (tmp_path / "single", stacked)):
        status, out, _ = _run(capsys, "verify", *pair, "--tolerance", "2e-7")
        assert status == 0, out
        assert "0 differ" in out
        assert "only" not in out
    file = tmp_path / "single" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.experts.1.up_proj.weight_packed"][3, 1] ^= 0x77
    tensors["model.layers.0.mlp.experts.0.down_proj.bias"][5] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    status, out, _ = _run(capsys, "verify", stacked, tmp_path / "single", "--tolerance", "2e-7")
    assert status == 1
    assert "model.layers.0.mlp.experts.1.up_proj.weight: 2 of " in out
    assert "model.layers.0.mlp.experts.0.down_proj.bias: 1 of 64 values differ, first at [5]" in out
    assert "2 differ" in out


def test_error_measures_along_the_blocks_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    """GPT-OSS's experts come as [experts, in, out] from ``dequantize``; along ``out`` an MXFP4 file would lose 20 dB to its own format."""
    data = Path(__file__).parent / "data/checkpoints/gpt_oss_mxfp4/hf"
    names = [f"model.layers.0.mlp.experts.{n}" for n in ("gate_up_proj", "down_proj")]
    options = [o for name in names for o in ("--name", name)] + ["--format", "mxfp4", "--recipe", "triton_kernels_v1"] * 2
    rows = json.loads(_run(capsys, "error", data, "--json", *options)[1])
    assert [row["tensor"] for row in rows] == names  # asked for twice, measured once
    assert all(row["worst"] == 0 for row in rows), rows


def test_error_of_bytes_names_the_tensor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"codes": torch.zeros(64, 64, dtype=torch.uint8)}, file)
    assert "has no matrix of values" in _bad(capsys, "error", file)
    assert "codes is torch.uint8; need a floating-point tensor" in _bad(capsys, "error", file, "--name", "codes")
