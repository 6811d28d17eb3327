"""Public bug reports about loading: scales and missing tensors (groups A, B, D, E), each with the input that shows the fault."""

from __future__ import annotations

from pathlib import Path

import checkpoint_builder as cb
import pytest
import torch
from checkpoint_checks import opened, refused

import fp4

L = cb.L
E = f"{L}mlp.experts."


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
