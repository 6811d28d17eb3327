"""Samples written by the real producers: right dialect, and the producing library's own values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fp4

DATA = Path(__file__).parent / "data" / "checkpoints"
DIALECTS = {
    "amd_quark": "quark",
    "compressed_tensors": "compressed-tensors",
    "deepseek_v4_style": "deepseek",
    "fouroversix": "fouroversix",
    "gpt_oss_mxfp4": "gpt-oss",
    "modelopt": "modelopt",
    "torchao": "torchao",
}
SHIPPED = sorted(str(p.parent.relative_to(DATA)) for p in DATA.rglob("dequantized_by_library.safetensors"))


def check(folder: Path, producer: str) -> int:
    """Open one sample and compare every tensor that the library dequantised; returns how many."""
    ck = fp4.open_checkpoint(folder)
    assert ck.dialect == DIALECTS[producer]
    assert ck.reason
    library = load_file(folder / "dequantized_by_library.safetensors")
    tolerance = 2.0**-8 if producer == "compressed_tensors" else 1e-6
    for name, want in library.items():
        assert name in ck.names()
        got = ck.dequantize(name)
        assert got.shape == want.shape, name
        torch.testing.assert_close(got, want.float(), rtol=tolerance, atol=0)
        q = ck[name]
        if isinstance(q, fp4.QuantizedTensor):
            logical = fp4.dequantize(q)
            torch.testing.assert_close(logical.transpose(-1, -2) if ck.record(name).transposed else logical, got, rtol=0, atol=0)
    exact = folder / "dequantized_exact_fp32.safetensors"
    for name, want in (load_file(exact) if exact.exists() else {}).items():
        torch.testing.assert_close(ck.dequantize(name), want, rtol=1e-6, atol=0)
    for name in ck.names():  # what was not quantised is as stored
        if ck.record(name).kind == "plain":
            assert torch.equal(ck[name].float(), ck.dequantize(name))
    return len(library)


def test_shipped_list_is_complete() -> None:
    assert {s.split("/")[0] for s in SHIPPED} == set(DIALECTS)


@pytest.mark.parametrize("sample", SHIPPED)
def test_shipped(sample: str) -> None:
    assert check(DATA / sample, sample.split("/")[0]) > 0


def test_all_samples(oracles: Path) -> None:
    """Every complete sample folder (``--oracles``)."""
    root = oracles / "checkpoints"
    seen = 0
    for producer in DIALECTS:
        for file in sorted((root / producer).rglob("dequantized_by_library.safetensors")):
            seen += check(file.parent, producer)
    assert seen >= 180


def test_trap_is_refused_and_trusted_on_demand() -> None:
    trap = DATA / "amd_quark" / "trap_fused_experts_left_bf16"
    with pytest.raises(fp4.CheckpointError, match=r"2 tensors not quantised in the file though .*global_quant_config.*experts\.down_proj"):
        fp4.open_checkpoint(trap)
    with pytest.warns(UserWarning, match="2 tensors not quantised"):
        ck = fp4.open_checkpoint(trap, trust="tensors")
    assert ck["model.layers.0.mlp.experts.down_proj"].shape == (4, 64, 32)
    assert isinstance(ck["model.layers.0.self_attn.q_proj.weight"], fp4.QuantizedTensor)


def test_svd_branch_and_prequant_scale_are_exposed_and_folded() -> None:
    folder = DATA / "modelopt" / "nvfp4_svd"
    ck = fp4.open_checkpoint(folder)
    stored = load_file(folder / "model.safetensors")
    for name in (n for n in ck.names() if ck.record(n).kind == "block"):
        m = name.removesuffix(".weight")
        q = ck[name]
        assert torch.equal(q.extras["pre_quant_scale"], stored[f"{m}.pre_quant_scale"])
        a, b = (stored[f"{m}.weight_quantizer._svdquant_lora_{x}"].float() for x in "ab")
        want = (ck.dequantize(name) + b @ a) * stored[f"{m}.pre_quant_scale"].float()
        torch.testing.assert_close(ck.dequantize(name, fold=True), want, rtol=1e-6, atol=1e-7)


def test_gpt_oss_orientation_and_order() -> None:
    ck = fp4.open_checkpoint(DATA / "gpt_oss_mxfp4" / "hf")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert ck[name].shape == (2, 192, 64)
    assert ck.shape(name) == ck.dequantize(name).shape == (2, 64, 192)
    assert ck[name].gate_up == "interleaved"
    assert ck["model.layers.0.mlp.experts.down_proj"].gate_up is None


def test_kv_scales_of_samples(oracles: Path) -> None:
    root = oracles / "checkpoints"
    for sample, dtype in (
        ("modelopt/nvfp4_kvfp8", "fp8"),
        ("modelopt/nvfp4_kvnvfp4", "nvfp4"),
        ("compressed_tensors/nvfp4_kvfp8_bias", "fp8"),
    ):
        ck = fp4.open_checkpoint(root / sample)
        scale = ck.kv_scales["model.layers.0.self_attn"]
        assert scale.dtype == dtype
        assert scale.k is not None
        assert scale.v is not None
        assert 1e-3 < float(scale.k) < 1e-1
        assert scale.over == 448.0


def test_lossless_cast_file_without_its_config(oracles: Path) -> None:
    """ModelOpt's names without a config: accepted, with a warning; the folder's config belongs to another file."""
    with pytest.warns(UserWarning, match="no quantization config"):
        ck = fp4.open_checkpoint(oracles / "checkpoints" / "deepseek_v4_style" / "nvfp4_lossless_cast.safetensors")
    assert ck.dialect == "modelopt"
    mx = fp4.open_checkpoint(oracles / "checkpoints" / "deepseek_v4_style")
    lost = 0
    for name in ck.names():
        a, b = ck.dequantize(name), mx.dequantize(name)
        lost += int((a != b).sum())
    assert lost == 54  # expert 1 w1 row 3 lies 2^-22 below, as the file's maker says


def test_dtypes_sample(oracles: Path) -> None:
    ck = fp4.open_checkpoint(oracles / "checkpoints" / "safetensors_dtypes" / "dtypes.safetensors")
    assert ck.dialect == "plain"
    assert ck["w_f4"].shape == (4, 16)
    assert ck["s_e8m0"].dtype == torch.float8_e8m0fnu
