"""fp4 convert on hand-made checkpoints: the MXFP4 to NVFP4 cast, experts apart and together, FP8 neighbours, exclusions."""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import checkpoint_builder as cb
import pytest
import torch
from convert_cases import CT, GO, MO, SAMPLES, same, stored
from safetensors.torch import load_file, save_file

import fp4
from fp4.checkpoint.convert import ConversionRefused, convert_checkpoint


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fp4.checkpoint.CheckpointWarning)
        yield


# MXFP4 to NVFP4


def test_cast_gives_modelopts_bytes(tmp_path: Path) -> None:
    """ModelOpt's own cast of these experts: scales and second level byte for byte, codes up to the sign of zero (it drops that)."""
    source = SAMPLES / "deepseek_v4_style"
    with pytest.raises(ConversionRefused, match="54 elements would change") as caught:
        convert_checkpoint(source, tmp_path / "no", MO, format="nvfp4")
    assert [t.name for t in caught.value.report.tensors if t.exactness == "refused"] == ["layers.0.ffn.experts.1.w1.weight"]
    report = convert_checkpoint(source, tmp_path / "out", MO, format="nvfp4", lossy=True)
    got, want = stored(tmp_path / "out"), stored(source / "nvfp4_lossless_cast.safetensors")
    compared = 0
    for name, (dtype, shape, data) in want.items():
        if name.endswith("input_scale"):  # ModelOpt writes 1.0, uncalibrated; here the cast is weight-only
            continue
        assert got[name][:2] == (dtype, shape)
        if name.endswith(".weight"):
            low, high = (torch.frombuffer(bytearray(b), dtype=torch.uint8) for b in (data, got[name][2]))
            codes = [torch.stack([c & 15, c >> 4], -1) for c in (low, high)]
            assert torch.equal(*(torch.where(c == 8, 0, c) for c in codes))
        else:
            assert got[name][2] == data, name
        compared += 1
    assert compared == 18
    rows = {t.name: t for t in report.tensors}
    assert rows["layers.0.ffn.experts.1.w1.weight"].exactness == "lossy"
    assert rows["layers.0.ffn.experts.1.w1.weight"].lost == 54
    exact = [n for n, t in rows.items() if t.exactness == "value-exact"]
    assert len(exact) == 6
    with fp4.open_checkpoint(source) as a, fp4.open_checkpoint(tmp_path / "out") as b:
        for name in exact:
            assert torch.equal(a.dequantize(name), b.dequantize(name))
        lost = (a.dequantize("layers.0.ffn.experts.1.w1.weight") != b.dequantize("layers.0.ffn.experts.1.w1.weight")).sum()
        assert int(lost) == 54


@pytest.mark.parametrize("to", [MO, CT])
def test_cast_of_stacked_experts(to: str, tmp_path: Path) -> None:
    source = cb.gpt_oss().write(tmp_path / "in")
    report = convert_checkpoint(source, tmp_path / "out", to, format="nvfp4")
    assert {t.exactness for t in report.tensors} == {"value-exact"}
    if to == MO:
        same(source, tmp_path / "out")
    else:
        with fp4.open_checkpoint(source) as a, fp4.open_checkpoint(tmp_path / "out") as b:
            want = a.dequantize(f"{cb.L}mlp.experts.gate_up_proj").transpose(1, 2)
            for e in range(2):
                assert torch.equal(b.dequantize(f"{cb.L}mlp.experts.{e}.gate_proj.weight"), want[e, 0::2])
                assert torch.equal(b.dequantize(f"{cb.L}mlp.experts.{e}.up_proj.weight"), want[e, 1::2])


@pytest.mark.parametrize(("span", "zero", "kind"), [(17, False, "value-exact"), (18, False, "refused"), (60, True, "value-exact")])
def test_cast_range_is_sharp(span: int, zero: bool, kind: str, tmp_path: Path) -> None:
    """18 exponents fit. A block of zeros fits whatever its scale, above or below."""
    ex = cb.mxfp4_linears()
    ex.nested = cb.nested_config("mxfp4", group=None)
    name = f"{cb.L}mlp.down_proj"
    packed, scale = torch.full((64, 64), 0x11, dtype=torch.uint8), torch.full((64, 4), 120, dtype=torch.uint8)  # 0.5 has no half
    scale[3, 1] = 120 - span
    if zero:
        scale[5, 2] = 120 + span
        packed[3, 16:32], packed[5, 32:48] = 0, 0x88
    ex.tensors[f"{name}.weight"], ex.tensors[f"{name}.weight_scale"] = packed, scale
    source = ex.write(tmp_path / "in")
    if kind == "refused":
        with pytest.raises(ConversionRefused, match="32 elements would change"):
            convert_checkpoint(source, tmp_path / "out", MO, format="nvfp4")
        return
    report = convert_checkpoint(source, tmp_path / "out", MO, format="nvfp4")
    assert {t.exactness for t in report.tensors} == {kind}
    same(source, tmp_path / "out")


def test_cast_shares_one_scale_between_gate_and_up(tmp_path: Path) -> None:
    ex = cb.mxfp4_linears()
    ex.nested = cb.nested_config("mxfp4", group=None)
    ex.tensors[f"{cb.L}mlp.up_proj.weight_scale"] = ex.tensors[f"{cb.L}mlp.up_proj.weight_scale"] - 5
    convert_checkpoint(ex.write(tmp_path / "in"), tmp_path / "out", MO, format="nvfp4")
    with fp4.open_checkpoint(tmp_path / "out") as ck:
        gate, up = (ck[f"{cb.L}mlp.{n}_proj.weight"].global_scale for n in ("gate", "up"))
        assert float(gate) == float(up) == 2.0 ** (130 - 127 - 8)
        assert len({float(ck[f"{cb.L}self_attn.{n}_proj.weight"].global_scale) for n in "qkv"}) == 1


# the other examples and their variants


def examples() -> list[tuple[str, cb.Example, str, set[str]]]:
    openai = cb.gpt_oss(openai=True)
    openai.config = None
    zero = cb.modelopt()
    zero.tensors[f"{cb.L}mlp.up_proj.weight_scale_2"] = cb.f32(0.0)
    zero.tensors[f"{cb.L}mlp.up_proj.weight_scale"] = torch.full((128, 4), 0xFF, dtype=torch.uint8).view(torch.float8_e4m3fn)
    single = cb.torchao()
    for name in [n for n in single.tensors if n.endswith("per_tensor_scale")]:
        del single.tensors[name]
    for name, text in single.metadata.items():
        if "NVFP4Tensor" in text:
            single.metadata[name] = text.replace(', "per_tensor_scale"', "")
    quark = cb.mxfp4_linears()
    quark.config = cb.quark_config("mxfp4", act=cb.quark_spec("fp8", static=True))
    for name in [n for n in quark.tensors if n.endswith("_proj.weight")]:
        quark.tensors[name.replace(".weight", ".input_scale")] = torch.tensor(0.3, dtype=torch.bfloat16)
    exact = {"bit-exact"}
    return [
        ("E", cb.moe(), CT, exact),
        ("E w1 w3 w2", cb.moe(names=("w1", "w3", "w2")), CT, exact),
        ("OpenAI to itself", openai, GO, exact),
        ("H", cb.torchao(), CT, exact),
        ("H to modelopt", cb.torchao(), MO, exact),
        ("I", cb.deepseek(), MO, {"bit-exact", "value-exact"}),
        ("J", cb.kimi(), MO, exact),
        ("H single level", single, MO, exact),
        ("G with FP8 activations", quark, CT, exact),
        ("G with FP8 activations to modelopt", quark, MO, exact),
        ("K", cb.nemotron(), CT, exact),
        ("zero tensor", zero, CT, {"bit-exact", "value-exact"}),
        ("zero tensor to itself", zero, MO, {"bit-exact", "value-exact"}),
    ]


@pytest.mark.parametrize(("ex", "to", "kinds"), [e[1:] for e in examples()], ids=[e[0] for e in examples()])
def test_examples_keep_their_values(ex: cb.Example, to: str, kinds: set[str], tmp_path: Path) -> None:
    source = ex.write(tmp_path / "in")
    report = convert_checkpoint(source, tmp_path / "out", to)
    assert {t.exactness for t in report.tensors} == kinds
    with fp4.open_checkpoint(tmp_path / "out") as ck:
        assert ck.dialect == to
        assert not [n for n in ck.notes if "does not use it" in n], "tensors that the written file itself has no use for"
    same(source, tmp_path / "out")


def test_static_scales_that_the_dialect_has_no_use_for_are_said(tmp_path: Path) -> None:
    """ModelOpt scales the activations of MXFP4 layers at run time: the scales were written, which nothing reads, and called exact."""
    ex, to = next((ex, to) for name, ex, to, _ in examples() if name == "G with FP8 activations to modelopt")
    report = convert_checkpoint(ex.write(tmp_path / "in"), tmp_path / "out", to)
    said = "the source has static activation scales, which W4A8_MXFP4_FP8 does not use; left out, activations are scaled at run time"
    assert report.notes.count(said) == 1
    assert not [n for n in stored(tmp_path / "out") if n.endswith("input_scale")]


def test_fastdeploys_halves_and_two_scales_an_expert(tmp_path: Path) -> None:
    """[experts, 2] second-level scales: each half of the rows gets its own, exactly."""
    ex = cb.fastdeploy(up_second=2.0)
    convert_checkpoint(ex.write(tmp_path / "in"), tmp_path / "out", CT)
    with fp4.open_checkpoint(tmp_path / "out") as ck:
        for e in range(2):
            want = ex.want[f"{cb.L}mlp.experts.up_gate_proj_weight"][e]
            assert torch.equal(ck.dequantize(f"{cb.L}mlp.experts.{e}.gate_proj.weight"), want[:32])
            assert torch.equal(ck.dequantize(f"{cb.L}mlp.experts.{e}.up_proj.weight"), want[32:])
            assert torch.equal(ck.dequantize(f"{cb.L}mlp.experts.{e}.down_proj.weight"), ex.want[f"{cb.L}mlp.experts.down_proj_weight"][e])
        assert [float(ck[f"{cb.L}mlp.experts.{e}.up_proj.weight"].input_scale) for e in range(2)] == [0.25, 1.0]


@pytest.mark.parametrize("half", [0, 1])
def test_one_half_whose_second_level_is_zero(half: int, tmp_path: Path) -> None:
    """A pruned gate or up of one expert: its codes are written as zeros, the other half's as they are."""
    ex, name = cb.fastdeploy(up_second=2.0), f"{cb.L}mlp.experts.up_gate_proj_weight"
    ex.tensors[f"{name}_scale_2"][1, half] = 0.0
    convert_checkpoint(ex.write(tmp_path / "in"), tmp_path / "out", CT)
    with fp4.open_checkpoint(tmp_path / "out") as ck:
        for e, (i, leaf) in itertools.product(range(2), enumerate(("gate_proj", "up_proj"))):
            got = ck[f"{cb.L}mlp.experts.{e}.{leaf}.weight"]
            pruned = (e, i) == (1, half)
            assert torch.equal(got.codes, ex.tensors[name][e, 32 * i : 32 * i + 32] * (0 if pruned else 1))
            want = ex.want[name][e, 32 * i : 32 * i + 32] * (0.0 if pruned else 1.0)
            assert torch.equal(fp4.dequantize(got), want)


def test_a_bias_that_does_not_fit_its_experts_is_not_cut_up(tmp_path: Path) -> None:
    """Believing the file does not make 60 values the rows of 64: it is copied whole, under its own name."""
    ex, name = cb.gpt_oss(), f"{cb.L}mlp.experts.gate_up_proj_bias"
    ex.tensors[name] = ex.tensors[name][:, :-4].contiguous()
    source = ex.write(tmp_path / "in")
    with pytest.raises(fp4.CheckpointError, match="gate_up_proj_bias has shape"):
        convert_checkpoint(source, tmp_path / "out", CT)
    convert_checkpoint(source, tmp_path / "out", CT, trust="tensors")
    out = stored(tmp_path / "out")
    assert out[name] == stored(source)[name]
    assert not [n for n in out if n.endswith(("gate_proj.bias", "up_proj.bias"))]


def test_biases_follow_their_experts(tmp_path: Path) -> None:
    """GPT-OSS apart and together: biases too, gate rows even, and back to the same bytes."""
    ex = cb.gpt_oss()
    source = ex.write(tmp_path / "in")
    convert_checkpoint(source, tmp_path / "ct", CT)
    out = stored(tmp_path / "ct")
    bias = ex.tensors[f"{cb.L}mlp.experts.gate_up_proj_bias"]
    assert out[f"{cb.L}mlp.experts.1.up_proj.bias"][2] == bias[1, 1::2].contiguous().view(torch.uint8).numpy().tobytes()
    assert f"{cb.L}mlp.experts.gate_up_proj_bias" not in out
    convert_checkpoint(tmp_path / "ct", tmp_path / "go", GO)
    assert stored(tmp_path / "go") == stored(source)
    patterns = json.loads((tmp_path / "go" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.*.mlp.router" in patterns
    convert_checkpoint(source, tmp_path / "mo", MO)
    convert_checkpoint(tmp_path / "mo", tmp_path / "back", GO)
    assert stored(tmp_path / "back") == stored(source)
    # the last expert without its biases: a stack of those that have some would be too short
    path = tmp_path / "ct" / "model.safetensors"
    save_file({n: t for n, t in load_file(path).items() if not (".experts.1." in n and n.endswith(".bias"))}, path)
    with pytest.raises(ConversionRefused, match=r"only some experts of .* have biases"):
        convert_checkpoint(tmp_path / "ct", tmp_path / "short", GO)


def test_fp8_neighbours_and_mixed_groups(tmp_path: Path) -> None:
    """FP8 attention stays FP8, byte for byte, with static scales in both dialects' shapes."""
    source = SAMPLES / "modelopt" / "mixed"
    convert_checkpoint(source, tmp_path / "ct", CT)
    before, after = stored(source), stored(tmp_path / "ct")
    for p in "qkvo":
        for leaf in ("weight", "weight_scale", "input_scale"):
            name = f"{cb.L}self_attn.{p}_proj.{leaf}"
            assert after[name][2] == before[name][2]
        assert after[name][1] == (1,)
    config = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert sorted(g["format"] for g in config["config_groups"].values()) == ["float-quantized", "nvfp4-pack-quantized"]
    convert_checkpoint(tmp_path / "ct", tmp_path / "mo", MO)
    nested = json.loads((tmp_path / "mo" / "hf_quant_config.json").read_text())["quantization"]
    assert nested["quantized_layers"] == json.loads((source / "hf_quant_config.json").read_text())["quantization"]["quantized_layers"]


def test_ignore_lists_become_the_other_rule(tmp_path: Path) -> None:
    """A prefix pattern of ModelOpt is no name to compressed-tensors, and a regex none to ModelOpt: exact names are both."""
    ex = cb.moe()
    ex.nested = cb.nested_config(exclude=["lm_head", "model.layers.0.mlp.gate*"])
    convert_checkpoint(ex.write(tmp_path / "in"), tmp_path / "ct", CT)
    ignore = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]["ignore"]
    assert set(ignore) == {"lm_head", "model.layers.0.mlp.gate", "model.embed_tokens"}
    convert_checkpoint(cb.kimi().write(tmp_path / "kimi"), tmp_path / "mo", MO)
    exclude = json.loads((tmp_path / "mo" / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    assert "language_model.lm_head" in exclude
    assert not any(p.startswith("re:") for p in exclude)
