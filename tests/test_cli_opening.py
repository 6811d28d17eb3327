"""What a command line user needs of ``open_checkpoint``: every option in every command, messages in the command's words, tables that say
what decides."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp4.cli import main

SAMPLES = Path(__file__).parent / "data" / "checkpoints"
NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: object) -> tuple[int, str, str]:
        status = main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def _edited(folder: Path, edit: Any) -> Path:
    shutil.copytree(SAMPLES / "modelopt" / "nvfp4", folder)
    for name in ("original_bf16", "dequantized_by_library", "expected_logits"):
        (folder / f"{name}.safetensors").unlink()
    tensors = {k: v.clone() for k, v in load_file(folder / "model.safetensors").items()}
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def _nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NAME][0, :8] = 0
    tensors[f"{NAME}_scale"].view(torch.uint8)[0, 0] = 0x7F


def test_repair_is_named_and_taken_by_every_command(run: Any, tmp_path: Path) -> None:
    bad = _edited(tmp_path / "bad", _nan)
    commands = [
        ("dequantize", bad, tmp_path / "plain", "--quiet"),
        ("convert", bad, tmp_path / "other", "--to", "compressed-tensors", "--quiet"),
        ("error", bad, "--name", NAME, "--format", "mxfp4", "--recipe", "default"),
        ("verify", bad, bad),
    ]
    for command in commands:
        status, _, err = run(*command)
        assert status == 2, command
        assert "open it with --repair, which takes 1.0" in err
        assert "repair=True" not in err
        assert run(*command, "--repair")[0] == 0, command


def test_missing_activation_scales_can_be_waived(run: Any, tmp_path: Path) -> None:
    bad = _edited(tmp_path / "bad", lambda t: t.pop(NAME.replace("weight", "input_scale")))
    status, _, err = run("inspect", bad)
    assert status == 2
    assert "--activations weight_only or --activations dynamic" in err
    status, out, _ = run("inspect", bad, "--activations", "weight_only")
    assert status == 0
    assert f"\n{NAME} " in out
    assert [x.endswith("  nvfp4, no scale") for x in out.splitlines() if x.startswith(NAME)] == [True]
    assert run("dequantize", bad, tmp_path / "plain", "--activations", "dynamic", "--quiet")[0] == 0


def test_trust_is_an_option_of_verify_too(run: Any) -> None:
    lies = SAMPLES / "amd_quark" / "trap_fused_experts_left_bf16"
    status, _, err = run("verify", lies, lies)
    assert status == 2
    assert "open with --trust tensors to believe the file" in err
    assert run("verify", lies, lies, "--trust", "tensors")[0] == 0


def test_rename_reaches_the_config(run: Any, tmp_path: Path) -> None:
    """The config excludes ``head`` for what the file calls ``lm_head``; the wrong spelling is an error, a pair without ``=`` another."""
    folder = _edited(tmp_path / "renamed", lambda t: None)
    for name in ("config.json", "hf_quant_config.json"):
        (folder / name).write_text((folder / name).read_text().replace('"model.embed_tokens"', '"model.visual"'))
    assert run("inspect", folder, "--rename", "embed_tokens")[0] == 2
    status, out, _ = run("inspect", folder, "--rename", "visual=embed_tokens", "--json")
    assert status == 0
    assert json.loads(out)["patterns"]["model.visual"] == 1


def test_inspect_says_what_the_activations_are(run: Any) -> None:
    shown = {
        "modelopt/nvfp4": "nvfp4 scale 0.001395",
        "compressed_tensors/mxfp4": " mxfp4",
        "modelopt/nvfp4_svd": "pre_quant_scale, lora_a, lora_b",
    }
    for sample, cell in shown.items():
        out = run("inspect", SAMPLES / sample)[1]
        (line,) = [x for x in out.splitlines() if x.startswith(NAME)]
        assert line.endswith(cell), line
    out = run("inspect", SAMPLES / "gpt_oss_mxfp4" / "hf")[1]
    assert "activations" not in out  # a column of dashes says nothing
    assert "gate/up" in out


def test_inspect_says_each_warning_once(run: Any, tmp_path: Path) -> None:
    bad = _edited(tmp_path / "bad", lambda t: [t.pop(k) for k in list(t) if k.endswith("input_scale")])
    status, out, err = run("inspect", bad)
    assert (status, err) == (0, "")
    assert out.count("read as weight-only") == 1


def test_error_lists_recipes_of_equal_figures_once_and_says_what_is_quantised_already(run: Any) -> None:
    status, out, _ = run("error", SAMPLES / "modelopt" / "nvfp4", "--name", NAME, "--name", "lm_head.weight", "--format", "mxfp4")
    assert status == 0
    assert f"{NAME} (stored as nvfp4: what is lost on top of that)" in out
    assert "\nlm_head.weight\n" in out
    for block in out.split("\n\n")[:2]:
        figures = [line.split()[:4] for line in block.splitlines()[3:]]
        assert len({tuple(f) for f in figures}) == len(figures) > 1, block
    assert "SQNR: 10 log10(sum x^2 / sum (x - x')^2)" in out
    rows = json.loads(run("error", SAMPLES / "modelopt" / "nvfp4", "--name", NAME, "--format", "mxfp4", "--json")[1])
    assert {r["stored_as"] for r in rows} == {"nvfp4"}


def test_one_file_is_a_file(run: Any, tmp_path: Path) -> None:
    out = run("dequantize", SAMPLES / "modelopt" / "nvfp4", tmp_path / "one.safetensors", "--quiet")[1]
    assert out.endswith("written in 1 file\n")


def test_usage_errors_end_their_sentence(run: Any) -> None:
    assert run("explain", "--n", "many")[2].endswith(" as an integer. Try: fp4 explain --help\n")
