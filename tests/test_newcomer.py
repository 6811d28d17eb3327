"""Answers that a first user meets: each says what is meant here, once, and names a way on that exists."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import fp4
from fp4.cli import main
from fp4.cli.doctor import collect
from fp4.recipe import CHOICES, MEANING


def test_equal_reasons_are_one_part_of_the_message() -> None:
    error = fp4.Unsupported("where", {"a": "not installed", "b": "other", "c": "not installed"})
    assert str(error) == "where: a, c: not installed; b: other"
    assert error.reasons == {"a": "not installed", "b": "other", "c": "not installed"}


def test_a_wrong_device_is_told_of_capabilities() -> None:
    with pytest.raises(fp4.Fp4Error, match="its capability such as 'sm90'"):
        fp4.explain(device="h100")
    if not torch.cuda.is_available():
        with pytest.raises(fp4.Fp4Error, match="or a capability such as 'sm90'"):
            fp4.explain(device="cuda")


def test_a_prompt_that_echoes_a_ranking_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    ranking = fp4.explain(device="sm90", n=64, k=64)
    assert str(ranking) == capsys.readouterr().out.rstrip("\n")
    assert repr(ranking) == f"Ranking(matmul/nvfp4 on SM90 n=64 k=64 -> triton, {len(ranking)} backends)"


def test_an_encode_shows_no_addresses() -> None:
    assert repr(fp4.encode.get("marlin_mxfp4")) == "Encode(marlin_mxfp4, lossless, read exactly over 1..254)"


def test_doctor_names_a_variable_that_nothing_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP4_BACKNED", "triton")
    problems = [p for p in collect()["problems"] if "FP4_BACKNED" in p]
    assert len(problems) == 1
    assert "did you mean 'FP4_BACKEND'" in problems[0]


@pytest.mark.parametrize("local", [[2, 3], [0, 4]])
def test_a_list_of_experts_is_not_taken_for_a_range(local: Any) -> None:
    w13, w2 = (fp4.quantize(torch.randn(4, 64, 64), "mxfp4") for _ in range(2))
    w2 = fp4.quantize(torch.randn(4, 64, 32), "mxfp4")
    with pytest.raises(fp4.FormatMismatch, match=r"need \(start, stop\) or range\(start, stop\)"):
        fp4.prepare_moe(w13, w2, gate_up="gate_up", local_experts=local)


def test_every_rank_refuses_a_cut_that_leaves_one_empty() -> None:
    q = fp4.quantize(torch.randn(64, 32), "mxfp4")
    for rank in range(2):
        with pytest.raises(fp4.FormatMismatch, match="rank 1 of 2 would get none"):
            fp4.fuse.shard(q, "k", rank, 2, uneven=True)
    w13, w2 = fp4.quantize(torch.randn(4, 64, 64), "mxfp4"), fp4.quantize(torch.randn(4, 64, 32), "mxfp4")
    for rank in range(2):
        with pytest.raises(fp4.FormatMismatch, match="rank 1 would get none"):
            fp4.prepare_moe(w13, w2, gate_up="gate_up", tp=(rank, 2))


TEXTS = ["gate_up_pairs >> trtllm_rows_32 >> sf_128x4", "(mo m4) k -> mo k m4", "swap_halves >> (mo m4) k -> mo k m4"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_layout_has_one_text_everywhere(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    order = fp4.layouts.parse(text)
    assert order.name == text
    scale = torch.randint(0, 256, (256, 8), dtype=torch.uint8)
    stored = fp4.to_layout(scale, text)
    assert torch.equal(stored.data, order.apply(scale))
    assert torch.equal(stored.restore(), scale)
    x = torch.randn(256, 128)
    quantized = fp4.quantize(x, scale_layout=text)
    assert torch.equal(quantized.scale.data, order.apply(fp4.quantize(x).scale))
    assert main(["layout", "equal", text, text]) == 0
    capsys.readouterr()
    with pytest.raises(fp4.LayoutError, match=r"fp4\.layouts\.parse\(\.\.\.\) reads it"):
        fp4.layouts[text]


def test_a_malformed_spec_is_shown_once() -> None:
    with pytest.raises(fp4.LayoutError, match=r"^layout '\(mo m4\) k -> mo k m5': unknown axis 'm5'"):
        fp4.layouts.parse("(mo m4) k -> mo k m5")


def test_what_a_checkpoint_does_not_hold_quantised_is_named() -> None:
    ck = fp4.open_checkpoint(Path(__file__).parent / "data" / "checkpoints" / "modelopt" / "mixed")
    with pytest.raises(fp4.CheckpointError, match=r"k_proj.weight' is per-tensor or 2-D block FP8, it has no 4-bit codes; ck.dequantize"):
        ck.quantized("model.layers.0.self_attn.k_proj.weight")
    with pytest.raises(fp4.CheckpointError, match=r"norm.weight' is not quantised, it has no 4-bit codes"):
        ck.quantized("model.norm.weight")
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(ck.quantized(name).codes, ck[name].codes)  # type: ignore[union-attr]


def test_every_recipe_field_says_what_it_decides() -> None:
    """In help() and in the types: a newcomer finds the legal values without an error."""
    names = [f.name for f in dataclasses.fields(fp4.Recipe)]
    assert [*MEANING] == names
    assert all(f"\n    {name}: " in str(fp4.Recipe.__doc__) for name in names)
    assert all(f" {value}" in str(fp4.Recipe.__doc__) for values in CHOICES.values() for value in values)
    text = {f.name for f in dataclasses.fields(fp4.Recipe) if isinstance(f.default, str)} - {"name"}
    assert {*CHOICES} == text
    for name, text_of in MEANING.items():  # one part a value, or none of them explained
        assert len(text_of.split(" | ")) in (1, len(CHOICES.get(name, ()))), name


def test_a_cut_that_does_not_come_out_says_so() -> None:
    assert str(fp4.layouts["plain"].shard(-1, 3, (4, 32))).endswith("32 columns (bytes) do not split into 3 equal parts")
    assert str(fp4.layouts["sf_128x4"].shard(0, 4, (256, 8))).endswith("256 rows do not split into 4 equal parts, each a multiple of 128")


def test_numel_is_called_as_on_a_tensor() -> None:
    x = torch.randn(3, 64)
    assert fp4.quantize(x).numel() == x.numel()
