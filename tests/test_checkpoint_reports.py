"""Public bug reports about loading (groups A, B, F, H, and parts of D, E, G, J), each with the input that shows the fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import checkpoint_builder as cb
import pytest
import torch

import fp4

L = cb.L
E = f"{L}mlp.experts."


def opened(ex: cb.Example, folder: Path, **options: Any) -> Any:
    return fp4.open_checkpoint(ex.write(folder), **options)


def refused(ex: cb.Example, folder: Path, match: str, **options: Any) -> None:
    with pytest.raises(fp4.CheckpointError, match=match):
        fp4.open_checkpoint(ex.write(folder), **options)


# A: direction and second-level scales


def test_a1_gate_and_up_keep_their_own_scale(tmp_path: Path) -> None:
    """vllm#54974: gate's scale used for both."""
    ex = cb.moe(2)
    for e, (gate, up) in enumerate(((0.25, 0.5), (0.5, 0.05))):
        for name, second in (("gate_proj", gate), ("up_proj", up)):
            cb.add_nvfp4(ex, f"{E}{e}.{name}", 32, 64, second, 0.5)
            ex.tensors[f"{E}{e}.{name}.weight_scale"] = torch.full((32, 4), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    ck = opened(ex, tmp_path)
    element = cb.values(cb.codes(32, 64), torch.full((32, 4), 0x38, dtype=torch.uint8), 16)
    for e, (gate, up) in enumerate(((0.25, 0.5), (0.5, 0.05))):
        assert torch.equal(ck.dequantize(f"{E}{e}.gate_proj.weight"), element * torch.tensor(gate))
        assert torch.equal(ck.dequantize(f"{E}{e}.up_proj.weight"), element * torch.tensor(up))


def test_a3_experts_are_divided_and_leftovers_are_errors(tmp_path: Path) -> None:
    """transformers#48371: the expert path dropped weight_global_scale (its values are tested on the producer's sample)."""
    ex = cb.compressed_tensors()
    ex.tensors["model.layers.0.mlp.experts.0.gate_proj.weight_global_scale"] = cb.f32(4.0, (1,))
    refused(ex, tmp_path, r"1 tensor that nothing explains: model\.layers\.0\.mlp\.experts\.0\.gate_proj\.weight_global_scale")


@pytest.mark.parametrize("extra", [f"{L}self_attn.q_proj.weight_quantizer._double_scale", f"{L}mlp.up_proj.weight_scale.nvfp4_csf_fixed"])
def test_a13_private_names_are_listed(tmp_path: Path, extra: str) -> None:
    """Model-Optimizer PR #2038: leaked private names; and CSF's compressed scale planes."""
    ex = cb.modelopt()
    ex.tensors[extra] = torch.zeros(4, dtype=torch.uint8)
    refused(ex, tmp_path, extra.replace(".", r"\."))


def test_a13_half_width_scales(tmp_path: Path) -> None:
    ex = cb.modelopt()
    ex.tensors[f"{L}self_attn.k_proj.weight_scale"] = cb.e4m3_scales(32, 32)
    refused(ex, tmp_path, r"k_proj\.weight_scale has shape \[32, 2\].*\[32, 64\].*needs \[32, 4\]")


def test_a5_gate_fp4_up_fp8_stay_apart(tmp_path: Path) -> None:
    """ROCmFPX#79: the two are separate tensors here; nothing fuses them."""
    ex = cb.compressed_tensors()
    m = f"{L}mlp.up_proj"
    for leaf in ("weight_packed", "weight_global_scale", "input_global_scale"):
        ex.tensors.pop(f"{m}.{leaf}")
    ex.tensors |= {f"{m}.weight": cb.fp8_weight(128, 64), f"{m}.weight_scale": torch.ones(128, 1, dtype=torch.bfloat16)}
    groups = [cb.ct_group("fp8", targets=[m]), cb.ct_group()]
    ex.config = cb.model_config(**cb.ct_config(groups, fmt="mixed-precision"))
    ck = opened(ex, tmp_path)
    assert isinstance(ck[f"{L}mlp.gate_proj.weight"], fp4.QuantizedTensor)
    assert isinstance(ck[f"{m}.weight"], torch.Tensor)


def test_a6_quantised_lm_head(tmp_path: Path) -> None:
    """ROCmFPX#85: the head's second-level scale was never loaded."""
    ex = cb.modelopt()
    ex.nested = cb.nested_config(exclude=[])
    cb.add_nvfp4(ex, "lm_head", 64, 64, 0.5, 0.5)
    assert torch.equal(opened(ex, tmp_path / "a").dequantize("lm_head.weight"), ex.want["lm_head.weight"])
    ex.tensors.pop("lm_head.weight_scale_2")
    refused(ex, tmp_path / "b", r"lm_head\.weight_scale_2")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a7_second_level_is_read_by_value(tmp_path: Path, dtype: torch.dtype) -> None:
    """flashinfer#3398: BF16 bytes read as F32 are zero."""
    ex = cb.modelopt()
    ex.tensors[f"{L}self_attn.o_proj.weight_scale_2"] = torch.tensor(0.125, dtype=dtype)
    ex.tensors[f"{L}self_attn.o_proj.input_scale"] = torch.tensor(0.5, dtype=dtype)
    q = opened(ex, tmp_path)[f"{L}self_attn.o_proj.weight"]
    assert (float(q.global_scale), float(q.input_scale)) == (0.125, 0.5)
    assert q.global_scale.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_a7_other_dtypes_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    ex = cb.modelopt()
    ex.tensors[f"{L}self_attn.o_proj.weight_scale_2"] = torch.tensor(1, dtype=dtype)
    refused(ex, tmp_path, r"weight_scale_2 has dtype (F64|I32); need F32")


def test_a8_subnormal_block_scales_and_tiny_second_level(tmp_path: Path) -> None:
    """vllm PR #48536, flashinfer PR #3932: bytes 1 to 7 are 2^-9 times 1 to 7; a second level of 2e-5 is not folded in."""
    ex = cb.modelopt()
    scale = torch.arange(128 * 4, dtype=torch.uint8).reshape(128, 4) % 0x7E + 1
    packed = torch.full((128, 32), 0x22, dtype=torch.uint8)
    m = f"{L}mlp.up_proj"
    ex.tensors |= {f"{m}.weight": packed, f"{m}.weight_scale": scale.view(torch.float8_e4m3fn), f"{m}.weight_scale_2": cb.f32(2e-5)}
    ck = opened(ex, tmp_path)
    assert torch.equal(ck[f"{m}.weight"].scale, scale)
    want = torch.tensor(cb.SCALES["e4m3"], dtype=torch.float64)[scale.long()].repeat_interleave(16, 1) * float(torch.tensor(2e-5))
    torch.testing.assert_close(ck.dequantize(f"{m}.weight"), want.float(), rtol=2e-7, atol=0)


def test_a10_format_is_explicit(tmp_path: Path) -> None:
    """flashinfer#1592: a second-level scale beside MXFP4 is not read as NVFP4, and not dropped."""
    ex = cb.mxfp4_linears()
    ex.nested = cb.nested_config("mxfp4", group=None)
    ex.tensors[f"{L}mlp.up_proj.weight_scale_2"] = cb.f32(0.5)
    refused(ex, tmp_path, r"weight_scale_2 exists, but mxfp4 .* has no second-level scale")


@pytest.mark.parametrize("order", [("gate_proj", "up_proj"), ("up_proj", "gate_proj")])
def test_a11_input_scales_of_both_shards(tmp_path: Path, order: tuple[str, str]) -> None:
    """NeMo-RL PR #2983: up's value overwrote gate's, depending on the order of arrival."""
    ex = cb.modelopt()
    for name, value in (("gate_proj", 0.5), ("up_proj", 0.25)):
        ex.tensors.pop(f"{L}mlp.{name}.input_scale")
        ex.want[name] = torch.tensor(value)
    for name in order:
        ex.tensors[f"{L}mlp.{name}.input_scale"] = ex.want[name]
    ck = opened(ex, tmp_path)
    assert float(ck[f"{L}mlp.gate_proj.weight"].input_scale) == 0.5
    assert float(ck[f"{L}mlp.up_proj.weight"].input_scale) == 0.25


def test_a12_unknown_names_load_unfused(tmp_path: Path) -> None:
    """auto-round#2379: diffusion attention's to_q, to_k, to_v keep three second-level scales."""
    ex = cb.Example(config=cb.model_config(), nested=cb.nested_config(exclude=[]))
    for i, name in enumerate("qkv"):
        cb.add_nvfp4(ex, f"blocks.0.attn.to_{name}", 32, 64, 2.0**-i, 0.5, seed=i)
    ck = opened(ex, tmp_path)
    assert [float(ck[f"blocks.0.attn.to_{n}.weight"].global_scale) for n in "qkv"] == [1.0, 0.5, 0.25]


# B: missing tensors


@pytest.mark.parametrize("expert", [0, 3])
def test_b1_one_expert_without_input_scale(tmp_path: Path, expert: int) -> None:
    """vllm#45212: a missing activation scale became 0, then infinity; expert 0 counts too (sglang#33541)."""
    ex = cb.moe(4)
    for name in ("gate_proj", "up_proj", "down_proj"):
        ex.tensors.pop(f"{E}{expert}.{name}.input_scale")
    refused(ex, tmp_path, rf"3 activation scales not found: .*experts\.{expert}\.gate_proj\.input_scale")
    ck = fp4.open_checkpoint(tmp_path, activations="weight_only")
    assert ck[f"{E}{expert}.gate_proj.weight"].input_scale is None


def test_b1_zero_or_nan_input_scale_is_not_a_value(tmp_path: Path) -> None:
    for value, match in ((0.0, "must be above 0"), (float("nan"), "need a finite"), (float("inf"), "need a finite"), (-1.0, "negative")):
        ex = cb.modelopt()
        ex.tensors[f"{L}mlp.up_proj.input_scale"] = cb.f32(value)
        ck = opened(ex, tmp_path)
        with pytest.raises(fp4.CheckpointError, match=match):
            ck[f"{L}mlp.up_proj.weight"]
        assert torch.equal(ck.dequantize(f"{L}mlp.up_proj.weight"), ex.want[f"{L}mlp.up_proj.weight"])


def test_b2_weight_only_moe(tmp_path: Path) -> None:
    """vllm#54189: no activation scale exists, and none is made up."""
    ex = cb.moe(2, act=False)
    ex.nested = cb.nested_config("W4A16_NVFP4", exclude=["lm_head", f"{L}mlp.gate"])
    ck = opened(ex, tmp_path)
    assert all(ck[n].input_scale is None for n in ex.want)
    assert all(torch.equal(ck.dequantize(n), v) for n, v in ex.want.items())


def per_expert_mx(names: dict[str, str] | None = None) -> cb.Example:
    ex = cb.Example(config=cb.model_config(**cb.ct_config([cb.ct_group("mxfp4")])))
    for e in range(3):
        m = f"{E}{e}.down_proj"
        packed, scale = cb.codes(32, 32, e), torch.full((32, 1), 120 + e, dtype=torch.uint8)
        ex.tensors |= {f"{m}.weight_packed": packed, f"{m}.{(names or {}).get('scale', 'weight_scale')}": scale}
        ex.want[f"{m}.weight"] = cb.values(packed, scale, 32, "ue8m0")
    return ex


def test_b3_every_expert_gets_its_scale(tmp_path: Path) -> None:
    """sglang PR #33541: expert 0 was taken for "no expert"."""
    ex = per_expert_mx()
    ck = opened(ex, tmp_path)
    for e in range(3):
        assert torch.equal(ck[f"{E}{e}.down_proj.weight"].scale, torch.full((32, 1), 120 + e, dtype=torch.uint8))
        assert torch.equal(ck.dequantize(f"{E}{e}.down_proj.weight"), ex.want[f"{E}{e}.down_proj.weight"])


def test_b3_renamed_scales(tmp_path: Path) -> None:
    refused(per_expert_mx({"scale": "weight_scales_renamed"}), tmp_path, "3 block-scale tensors not found")


def test_b5_extra_input_scale_of_a_weight_only_layer(tmp_path: Path) -> None:
    """vllm#23826: accepted and ignored, with one line."""
    ex = cb.modelopt()
    ex.nested = cb.nested_config("W4A16_NVFP4")
    ck = opened(ex, tmp_path)
    assert ck[f"{L}mlp.up_proj.weight"].input_scale is None
    assert sum("does not use it" in n for n in ck.notes) == 1
    assert not ck.warnings


def test_b6_excluded_but_packed(tmp_path: Path) -> None:
    """vllm PR #45132: exclude lists lm_head*, the file has it in FP4."""
    ex = cb.modelopt()
    ex.nested = cb.nested_config(exclude=["lm_head*"])
    cb.add_nvfp4(ex, "lm_head", 64, 64, 0.5, 0.5)
    refused(ex, tmp_path, r"1 module packed as FP4 in the file though .*excludes 'lm_head' by 'lm_head\*'")
    with pytest.warns(UserWarning, match="packed as FP4"):
        ck = fp4.open_checkpoint(tmp_path, trust="tensors")
    assert torch.equal(ck.dequantize("lm_head.weight"), ex.want["lm_head.weight"])


def test_b7_no_input_scale_anywhere(tmp_path: Path) -> None:
    """FreeToken PR #462: exports without any activation scale are read as weight-only, and said so."""
    ex = cb.modelopt(act=False)
    with pytest.warns(UserWarning, match="read as weight-only"):
        ck = opened(ex, tmp_path)
    assert ck[f"{L}mlp.up_proj.weight"].input_scale is None


@pytest.mark.parametrize("nan", [False, True])
def test_b8_zero_tensor_scale(tmp_path: Path, nan: bool) -> None:
    """kekzl/imp#113 and Model-Optimizer#1633: an all-zero tensor, with NaN block scales and codes of 7 as ModelOpt writes it."""
    ex = cb.moe(2)
    m = f"{E}1.up_proj"
    ex.tensors[f"{m}.weight_scale_2"] = cb.f32(0.0)
    if nan:
        ex.tensors[f"{m}.weight_scale"] = torch.full((32, 4), 0xFF, dtype=torch.uint8).view(torch.float8_e4m3fn)
        ex.tensors[f"{m}.weight"] = torch.full((32, 32), 0x77, dtype=torch.uint8)
    ck = opened(ex, tmp_path)
    with pytest.warns(UserWarning, match="second-level scale is 0"):
        q = ck[f"{m}.weight"]
    value = ck.dequantize(f"{m}.weight")  # warned once
    assert len(ck.warnings) == 1
    assert torch.equal(value, torch.zeros(32, 64))
    assert torch.equal(fp4.dequantize(q), torch.zeros(32, 64))
    assert int(q.codes.max()) == 0


def test_b10_w4a4_without_activation_maximum(tmp_path: Path) -> None:
    """LightX2V#877."""
    ex = cb.compressed_tensors().drop(".input_global_scale")
    refused(ex, tmp_path, r"7 activation scales not found: .*activations='weight_only' or activations='dynamic'")
    assert fp4.open_checkpoint(tmp_path, activations="dynamic")[f"{L}mlp.up_proj.weight"].input_scale is None


# D, E where they concern loading


def test_d2_expert_indexed_scales_have_one_value_an_expert(tmp_path: Path) -> None:
    """sglang#36597: a vector of another length than the experts is refused, not sliced."""
    ex = cb.fastdeploy()
    ex.tensors[f"{E}down_proj_weight_scale_2"] = torch.ones(3)
    refused(ex, tmp_path, r"down_proj_weight_scale_2 has shape \[3\]; need one value or 2$")
    ex = cb.fastdeploy()
    ex.tensors[f"{E}up_gate_proj_weight_scale_2"] = torch.ones(3)
    refused(ex, tmp_path, r"up_gate_proj_weight_scale_2 has shape \[3\]; need one value or 2, or \[2, 2\]$")


def test_e5_no_gate_is_invented(tmp_path: Path) -> None:
    ck = opened(cb.nemotron(), tmp_path)
    with pytest.raises(fp4.CheckpointError, match="has no tensor"):
        ck["backbone.layers.1.mixer.experts.0.gate_proj.weight"]
    with pytest.raises(fp4.CheckpointError, match="not a stacked gate/up tensor"):
        ck.halves("backbone.layers.1.mixer.experts.0.up_proj.weight")


# F: names, exclude lists, mixed precision


def prefixed() -> cb.Example:
    """Tensors under language_model.model., exclusions under model.language_model. (Quark#25)."""
    ex = cb.modelopt()
    q = f"{L}self_attn.q_proj"
    for leaf in ("weight_scale", "weight_scale_2", "input_scale"):
        ex.tensors.pop(f"{q}.{leaf}")
    ex.tensors[f"{q}.weight"] = cb.floats(64, 64)
    ex.tensors = {f"language_model.{n}": t for n, t in ex.tensors.items()}
    ex.nested = cb.nested_config(exclude=["model.language_model.layers.0.self_attn.q_proj", "language_model.lm_head"])
    return ex


def test_f1_pattern_that_matches_nothing_as_spelled(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="1 exclude pattern matched no module"):
        ck = opened(prefixed(), tmp_path)
    name = f"language_model.{L}self_attn.q_proj.weight"
    assert ck[name].dtype == torch.bfloat16
    ck = fp4.open_checkpoint(tmp_path, rename={"model.language_model": "language_model.model"})
    assert not ck.warnings
    assert ck.patterns["model.language_model.layers.0.self_attn.q_proj"] == 1


def test_f1_zero_matches_are_counted(tmp_path: Path) -> None:
    ex = cb.modelopt()
    ex.nested = cb.nested_config(exclude=["lm_head", "vision_tower*", "thinker.talker"])
    with pytest.warns(UserWarning, match=r"2 exclude patterns matched no module: .*vision_tower\*"):
        ck = opened(ex, tmp_path)
    assert ck.patterns == {"lm_head": 1, "vision_tower*": 0, "thinker.talker": 0}


@pytest.mark.parametrize("pattern", ["model.visual*", "re:model.visual.*"])
def test_f2_patterns_follow_a_rename(tmp_path: Path, pattern: str) -> None:
    """vllm#28072."""
    ex = cb.compressed_tensors()
    ex.tensors["model.vision.blocks.0.fc.weight"] = cb.floats(32, 64)
    if pattern.startswith("re:"):
        ex.config["quantization_config"]["ignore"].append(pattern)
    else:
        ex = cb.modelopt()
        ex.tensors["model.vision.blocks.0.fc.weight"] = cb.floats(32, 64)
        ex.nested = cb.nested_config(exclude=["lm_head", pattern])
    ck = opened(ex, tmp_path, rename={"visual": "vision"})
    assert ck.patterns[pattern] >= 1
    assert not ck.warnings


def test_f3_rename_by_path_segments(tmp_path: Path) -> None:
    """vllm PR #51910: trailing dots in a rule must not make it miss."""
    ex = cb.modelopt()
    ex.nested = cb.nested_config(exclude=["lm_head", "enc.layers.0.mlp.fc1"])
    ex.tensors |= {"enc.layers.0.fc1.weight": cb.floats(32, 64), "enc.layers.0.fc11.weight": cb.floats(32, 64)}
    ck = opened(ex, tmp_path, rename={".mlp.fc1.": ".fc1."})
    assert ck.patterns["enc.layers.0.mlp.fc1"] == 1
    assert [w for w in ck.warnings if "fc11" in w or "fc*" in w]  # fc11 is another module, unlisted


@pytest.mark.parametrize("name", ["mtp.layers.0.fc.weight", "model.layers.1.self_attn.q_proj.weight", f"{L}mlp.gate.weight"])
def test_f5_f11_unlisted_bf16(tmp_path: Path, name: str) -> None:
    """vllm#44087, Model-Optimizer PR #1858: prediction layers and routers are BF16 and not listed: read so, one warning."""
    ex = cb.modelopt()
    ex.tensors[name] = cb.floats(32, 64)
    with pytest.warns(UserWarning, match="not listed as excluded; read as unquantised") as caught:
        ck = opened(ex, tmp_path)
    assert len(caught) == 1
    assert ck[name].dtype == torch.bfloat16


def test_f5_once_per_pattern(tmp_path: Path) -> None:
    ex = cb.modelopt()
    for i in range(20):
        ex.tensors[f"mtp.layers.{i}.fc.weight"] = cb.floats(32, 64)
    with pytest.warns(UserWarning, match=r"mtp\.layers\.\*\.fc\.weight: 20 weights") as caught:
        opened(ex, tmp_path)
    assert len(caught) == 1


def test_f11_router_packed_though_excluded(tmp_path: Path) -> None:
    ex = cb.moe(2)
    ex.tensors.pop(f"{L}mlp.gate.weight")
    cb.add_nvfp4(ex, f"{L}mlp.gate", 32, 64, 0.5, 0.5)
    refused(ex, tmp_path, r"packed as FP4 in the file though .*mlp\.gate")


def test_f6_format_only_in_the_group(tmp_path: Path) -> None:
    """vllm PR #55367: "mixed-precision" at the top hides NVFP4 groups."""
    ex = cb.compressed_tensors()
    ex.config["quantization_config"]["format"] = "mixed-precision"
    q = opened(ex, tmp_path)[f"{L}mlp.up_proj.weight"]
    assert q.format is fp4.NVFP4
    assert float(q.input_scale) == 0.5


def test_f8_two_names_of_one_fp8_multiplier(tmp_path: Path) -> None:
    """vllm PR #54556: weight_scale_inv multiplies too."""
    weight, scale = cb.fp8_weight(64, 64), cb.f32(0.5, (1, 1))
    got = []
    for i, leaf in enumerate(("weight_scale", "weight_scale_inv")):
        quant = {"quant_method": "fp8", "weight_block_size": [64, 64]}
        ex = cb.Example({"m.weight": weight, f"m.{leaf}": scale}, config=cb.model_config(**quant))
        got.append(opened(ex, tmp_path / str(i)).dequantize("m.weight"))
    assert torch.equal(got[0], got[1])
    assert torch.equal(got[0], weight.float() * 0.5)
    ex.tensors["m.weight_scale"] = scale
    refused(ex, tmp_path / "both", "has both weight_scale_inv and weight_scale")


def test_f10_bf16_shared_expert_beside_fp4_experts(tmp_path: Path) -> None:
    """sglang PR #40628."""
    ex = cb.moe(2)
    name = f"{L}mlp.shared_experts.gate_proj.weight"
    ex.tensors[name] = cb.floats(32, 64)
    ex.nested["quantization"]["exclude_modules"].append(f"{L}mlp.shared_experts*")
    ck = opened(ex, tmp_path)
    assert ck[name].dtype == torch.bfloat16
    assert isinstance(ck[f"{E}0.gate_proj.weight"], fp4.QuantizedTensor)


def test_f13_exclusion_is_not_a_substring(tmp_path: Path) -> None:
    """vllm PR #53248: shared_expert_gate must not exclude shared_expert."""
    ex = cb.moe(2)
    cb.add_nvfp4(ex, f"{L}mlp.shared_expert.gate_proj", 32, 64, 0.5, 0.5)
    ex.tensors[f"{L}mlp.shared_expert_gate.weight"] = cb.floats(1, 64)
    ex.nested["quantization"]["exclude_modules"].append(f"{L}mlp.shared_expert_gate")
    ck = opened(ex, tmp_path)
    assert isinstance(ck[f"{L}mlp.shared_expert.gate_proj.weight"], fp4.QuantizedTensor)
    assert not ck.warnings


@pytest.mark.parametrize(("pattern", "name"), [("mlp.gate", "mlp.gate_proj"), ("mlp.shared_expert", "mlp.shared_expert_gate")])
def test_f13_exclusion_ends_at_a_dot(tmp_path: Path, pattern: str, name: str) -> None:
    """As a substring, mlp.gate would hit mlp.gate_proj."""
    ex = cb.modelopt()
    ex.nested = cb.nested_config(exclude=["lm_head", L + pattern])
    ex.tensors[f"{L}{pattern}.weight"] = cb.floats(4, 64)
    cb.add_nvfp4(ex, L + name, 128, 64, 0.25, 0.5)
    ck = opened(ex, tmp_path)
    assert isinstance(ck[f"{L}{name}.weight"], fp4.QuantizedTensor)
    assert ck[f"{L}{pattern}.weight"].dtype == torch.bfloat16


def mixed(layers: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, **more}}


def test_f13_mixed_map_with_another_prefix(tmp_path: Path) -> None:
    ex = cb.modelopt()
    ex.tensors = {f"language_model.{n}": t for n, t in ex.tensors.items()}
    ex.nested = mixed({"model.language_model.layers.0": {"quant_algo": "NVFP4", "group_size": 16}})
    ck = opened(ex, tmp_path)
    assert isinstance(ck[f"language_model.{L}mlp.up_proj.weight"], fp4.QuantizedTensor)
    ex.nested = mixed({"model.layers.0": {"quant_algo": "MIXED_PRECISION"}})
    refused(ex, tmp_path / "b", "quant_algo 'MIXED_PRECISION' is not a layer's")


def test_mixed_container_key_ends_at_a_dot(tmp_path: Path) -> None:
    """`experts` is a prefix of experts.5.gate_proj, not of experts_extra or shared_expert."""
    ex = cb.moe(2)
    ex.tensors |= {f"{L}mlp.experts_extra.gate_proj.weight": cb.floats(32, 64), f"{L}mlp.shared_expert.gate_proj.weight": cb.floats(32, 64)}
    ex.nested = mixed({f"{L}mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}})
    ck = opened(ex, tmp_path)
    assert ck[f"{L}mlp.experts_extra.gate_proj.weight"].dtype == torch.bfloat16
    assert not ck.warnings


def test_mixed_longest_key_wins(tmp_path: Path) -> None:
    ex = cb.modelopt()
    m = f"{L}mlp.up_proj"
    for leaf in ("weight_scale_2", "input_scale"):
        ex.tensors.pop(f"{m}.{leaf}")
    ex.tensors |= {f"{m}.weight": cb.fp8_weight(128, 64), f"{m}.weight_scale": cb.f32(0.5)}
    layers = {m: {"quant_algo": "FP8"}, L.rstrip("."): {"quant_algo": "NVFP4", "group_size": 16}}
    for keys in (layers, dict(reversed(layers.items()))):
        ex.nested = mixed(keys)
        assert opened(ex, tmp_path).record(f"{m}.weight").kind == "fp8"


def test_mixed_unknown_entry_key(tmp_path: Path) -> None:
    ex = cb.modelopt()
    ex.nested = mixed({L.rstrip("."): {"quant_algo": "NVFP4", "group_size": 16, "weight_scale_encoding": "csf"}})
    refused(ex, tmp_path, "unknown key weight_scale_encoding")


def test_f14_sizes_are_told_as_logical_and_packed(tmp_path: Path) -> None:
    """vllm#49141: 256 against 512 for a packed w2."""
    ex = cb.moe(1)
    ex.tensors[f"{E}0.down_proj.weight_scale"] = cb.e4m3_scales(64, 64)
    refused(ex, tmp_path, r"shape \[64, 4\]; weight \[64, 32\] \(packed \[64, 16\]\) needs \[64, 2\]")


# G, J


@pytest.mark.parametrize(("byte", "match"), [(0x7F, "is NaN"), (0xFF, "is NaN"), (0xB8, "negative block scale")])
def test_g1_g10_bad_scale_bytes(tmp_path: Path, byte: int, match: str) -> None:
    """Model-Optimizer#1633, compressed-tensors PR #687: the error names tensor, file and index; no abs(), no sign flip."""
    ex = cb.modelopt()
    scale = ex.tensors[f"{L}mlp.up_proj.weight_scale"].view(torch.uint8).clone()
    scale[5, 3] = byte
    ex.tensors[f"{L}mlp.up_proj.weight_scale"] = scale.view(torch.float8_e4m3fn)
    ck = opened(ex, tmp_path)
    for read in (ck.__getitem__, ck.dequantize):
        with pytest.raises(
            fp4.CheckpointError, match=rf"model\.safetensors: tensor .*up_proj\.weight_scale.* 0x{byte:02X} at \[5, 3\] .*{match}"
        ):
            read(f"{L}mlp.up_proj.weight")
    assert torch.equal(ck.dequantize(f"{L}mlp.gate_proj.weight"), ex.want[f"{L}mlp.gate_proj.weight"])


def test_g1_e8m0_nan_and_highest_byte(tmp_path: Path) -> None:
    ex = cb.gpt_oss()
    name = f"{L}mlp.experts.down_proj"
    for byte in (255, 252, 0):
        ex.tensors[f"{name}_scales"][1, 7, 2] = byte
        ck = opened(ex, tmp_path)
        if byte == 255:
            with pytest.raises(fp4.CheckpointError, match=r"down_proj_scales.* 0xFF at \[1, 7, 2\] is NaN"):
                ck[name]
        else:
            assert bool(torch.isfinite(ck.dequantize(name, torch.float64)).all())


def test_g11_fp8_bytes_under_an_nvfp4_label(tmp_path: Path) -> None:
    ex = cb.modelopt()
    ex.tensors[f"{L}mlp.up_proj.weight"] = cb.fp8_weight(128, 64)
    ex.tensors[f"{L}mlp.up_proj.weight_scale"] = cb.f32(0.5)
    refused(ex, tmp_path, r"up_proj\.weight has dtype F8_E4M3 though .*NVFP4")


def many_names(folder: Path, layers: int) -> float:
    """Write a checkpoint of about 1,000 names a layer; the processor seconds that opening it takes, best of three."""
    folder.mkdir()
    header: dict[str, Any] = {}
    at = 0

    def put(name: str, dtype: str, shape: list[int], size: int) -> None:
        nonlocal at
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size

    for layer in range(layers):
        for e in range(83):
            for proj in ("gate_proj", "up_proj", "down_proj"):
                m = f"model.layers.{layer}.mlp.experts.{e}.{proj}"
                put(f"{m}.weight", "U8", [1, 8], 8)
                put(f"{m}.weight_scale", "F8_E4M3", [1, 1], 1)
                put(f"{m}.weight_scale_2", "F32", [], 4)
                put(f"{m}.input_scale", "F32", [], 4)
        for name in ("k_proj.k_scale", "v_proj.v_scale"):
            put(f"model.layers.{layer}.self_attn.{name}", "F32", [], 4)
    cb.raw_file(folder / "model.safetensors", header, b"?" * at)  # 0x3F: 0.747 as F32
    exclude = ["lm_head", *(f"model.layers.{i}.self_attn*" for i in range(layers)), *(f"model.layers.{i}.mlp.gate" for i in range(layers))]
    (folder / "hf_quant_config.json").write_text(json.dumps(cb.nested_config(exclude=exclude, kv_cache_quant_algo="FP8")))
    best = 9.0
    for _ in range(3):
        start = time.process_time()
        ck = fp4.open_checkpoint(folder)
        best = min(best, time.process_time() - start)
    assert len(ck.kv_scales) == layers
    assert len(ck.names()) == layers * 83 * 3
    return best


@pytest.mark.filterwarnings("ignore:.*matched no module")
def test_h2_sixty_thousand_names(tmp_path: Path) -> None:
    """vllm PR #25968: 60,000 names with 120 cache scales in under a second, or, on a slow machine, in time that grows linearly."""
    whole = many_names(tmp_path / "60", 60)
    assert whole < 1.0 or whole < 6 * many_names(tmp_path / "15", 15)


def test_j2_each_shard_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang PR #18858."""
    ex = cb.modelopt()
    ex.write(tmp_path, shards=4)
    opened_files: list[str] = []
    real = open

    def counting(file: Any, *args: Any, **kwargs: Any) -> Any:
        if str(file).endswith(".safetensors"):
            opened_files.append(str(file))
        return real(file, *args, **kwargs)

    monkeypatch.setattr("builtins.open", counting)
    ck = fp4.open_checkpoint(tmp_path)
    for name in ck:
        ck.dequantize(name)
    assert len(opened_files) == len(set(opened_files)) == 4


@pytest.mark.slow
def test_j3_experts_within_a_memory_budget(tmp_path: Path) -> None:
    """NeMo Automodel#3667: 64 experts [1024, 1024] dequantised with a peak below 64 MiB above the baseline."""
    header: dict[str, Any] = {}
    at = 0
    for e in range(64):
        for leaf, shape in (("weight_packed", [1024, 512]), ("weight_scale", [1024, 32])):
            size = shape[0] * shape[1]
            header[f"{E}{e}.up_proj.{leaf}"] = {"dtype": "U8", "shape": shape, "data_offsets": [at, at + size]}
            at += size
    folder = tmp_path / "in"
    folder.mkdir()
    cb.raw_file(folder / "model.safetensors", header, b"{" * at)
    (folder / "config.json").write_text(json.dumps(cb.model_config(**cb.ct_config([cb.ct_group("mxfp4")], []))))
    code = (
        "import sys, torch, fp4\nfrom fp4.checkpoint.dequantize import dequantize_checkpoint as d\n"
        "peak = lambda: int(next(l for l in open('/proc/self/status') if l.startswith('VmHWM')).split()[1]) * 1024\n"
        "base = peak()\nd(sys.argv[1], sys.argv[2])\nprint(peak() - base)"
    )
    root = Path(__file__).parent.parent
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(tmp_path / "out")], capture_output=True, text=True, env=env, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64 << 20


# options


@pytest.mark.parametrize("zero", [True, False])
def test_g1_repair_on_demand(tmp_path: Path, zero: bool) -> None:
    """A NaN byte over zero codes may be replaced; over other codes it stays an error."""
    ex = cb.modelopt()
    m = f"{L}mlp.up_proj"
    scale = ex.tensors[f"{m}.weight_scale"].view(torch.uint8).clone()
    scale[5, 3] = 0x7F
    ex.tensors[f"{m}.weight_scale"] = scale.view(torch.float8_e4m3fn)
    if zero:
        ex.tensors[f"{m}.weight"][5, 24:32] = 0x80  # zeros of both signs
        ex.want[f"{m}.weight"][5, 48:64] = 0
    ex.write(tmp_path)
    with pytest.raises(fp4.CheckpointError, match="is NaN"):
        fp4.open_checkpoint(tmp_path).dequantize(f"{m}.weight")
    ck = fp4.open_checkpoint(tmp_path, repair=True)
    if not zero:
        with pytest.raises(fp4.CheckpointError, match=r"0x7F at \[5, 3\] is NaN"):
            ck[f"{m}.weight"]
        return
    with pytest.warns(UserWarning, match="1 NaN scale bytes over blocks of zero codes replaced"):
        q = ck[f"{m}.weight"]
    assert int(q.scale[5, 3]) == 0x38
    assert torch.equal(ck.dequantize(f"{m}.weight"), ex.want[f"{m}.weight"])


@pytest.mark.parametrize("activations", ["weight_only", "dynamic"])
def test_activations_on_demand(tmp_path: Path, activations: str) -> None:
    for i, ex in enumerate((cb.modelopt(), cb.modelopt_fused())):
        ck = opened(ex, tmp_path / str(i), activations=activations)
        assert all(ck[n].input_scale is None for n in ex.want)
        assert not ck.warnings


def test_kv_scales_of_every_head_and_parameters_of_that_name(tmp_path: Path) -> None:
    """A vector k_scale is a cache scale only when the config quantises the cache; else it is the model's parameter."""
    ex = cb.modelopt()
    vector = torch.tensor([0.5, 0.25])
    ex.tensors |= {f"{L}self_attn.k_scale": vector, f"{L}self_attn.v_scale": vector}
    ck = opened(ex, tmp_path / "a")
    assert torch.equal(ck[f"{L}self_attn.k_scale"], vector)
    assert not ck.kv_scales
    ex.nested = cb.nested_config(kv_cache_quant_algo="FP8")
    ck = opened(ex, tmp_path / "b")
    assert f"{L}self_attn.k_scale" not in ck.names()
    assert torch.equal(ck.kv_scales[f"{L}self_attn"].k, vector)


@pytest.mark.parametrize("producer", ["modelopt", "compressed-tensors"])
def test_only_the_cache_is_quantised(tmp_path: Path, producer: str) -> None:
    ex = cb.Example(cb.base_tensors(), config=cb.model_config())
    for letter in "kv":
        ex.tensors[f"{L}self_attn.{letter}_proj.weight"] = cb.floats(32, 64)
        ex.tensors[f"{L}self_attn.{letter}_scale"] = cb.f32(0.5)
    if producer == "modelopt":
        ex.nested = cb.nested_config(None, kv_cache_quant_algo="FP8")
    else:
        scheme = {"num_bits": 8, "type": "float", "dynamic": False}
        ex.config = cb.model_config(**{**cb.ct_config([cb.ct_group()]), "config_groups": {}, "kv_cache_scheme": scheme})
    ck = opened(ex, tmp_path)
    assert ck.dialect == producer
    assert float(ck.kv_scales[f"{L}self_attn"].v) == 0.5
    assert all(ck.record(n).kind == "plain" for n in ck)
    assert not ck.warnings


def test_fp8_under_an_exclusion_is_read_and_told(tmp_path: Path) -> None:
    """DeepSeek's kv_b_proj stays FP8 in files whose other linears became NVFP4."""
    ex = cb.modelopt()
    weight = cb.fp8_weight(128, 128)
    ex.tensors |= {f"{L}self_attn.kv_b_proj.weight": weight, f"{L}self_attn.kv_b_proj.weight_scale_inv": cb.f32(0.5, (1, 1))}
    ex.nested = cb.nested_config(exclude=["lm_head", f"{L}self_attn.kv_b_proj"])
    with pytest.warns(UserWarning, match="1 FP8 weight though the config leaves them unquantised"):
        ck = opened(ex, tmp_path)
    assert torch.equal(ck.dequantize(f"{L}self_attn.kv_b_proj.weight"), weight.float() * 0.5)


def test_names_are_in_natural_order(tmp_path: Path) -> None:
    ex = cb.Example({f"model.layers.{i}.norm.weight": cb.floats(4) for i in (10, 2, 1)}, config=None)
    assert [n.split(".")[2] for n in opened(ex, tmp_path).names()] == ["1", "2", "10"]
