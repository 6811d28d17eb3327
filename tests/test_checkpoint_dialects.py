"""Checkpoints of the other dialects made by hand, every variant: names, values, scales, order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoint_builder as cb
import pytest
import torch
from checkpoint_checks import check

import fp4

L = cb.L


# B, C: compressed-tensors


def test_b_equals_a_bit_for_bit(tmp_path: Path) -> None:
    """A2 (modular#6600): a divisor of 4.0 and a multiplier of 0.25 are the same numbers."""
    a, b = cb.modelopt(), cb.compressed_tensors()
    left, right = check(a.write(tmp_path / "a"), a, "modelopt"), check(b.write(tmp_path / "b"), b, "compressed-tensors")
    for name in a.want:
        p, q = left[name], right[name]
        for part in ("codes", "scale", "global_scale", "input_scale"):
            assert torch.equal(getattr(p, part), getattr(q, part)), (name, part)
    assert right[f"{L}mlp.up_proj.weight"].source["global_direction"] == "divisor"


def test_b_a16_and_no_group_format(tmp_path: Path) -> None:
    ex = cb.compressed_tensors(act=False)
    ex.config = cb.model_config(**cb.ct_config([cb.ct_group(act=False, fmt=None)], fmt="nvfp4-pack-quantized"))
    check(ex.write(tmp_path), ex, "compressed-tensors")


def test_b_inside_text_config(tmp_path: Path) -> None:
    ex = cb.compressed_tensors()
    ex.config = {"model_type": "vlm", "text_config": ex.config}
    check(ex.write(tmp_path), ex, "compressed-tensors")


def ct_mixed(order: int) -> cb.Example:
    """FP8 attention and (by exact name) up_proj, NVFP4 for all MLPs by regex (A5, ROCmFPX#79)."""
    ex = cb.compressed_tensors()
    fp8 = [L + n for n in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj")]
    for m in fp8:
        n, k = next((n, k) for name, n, k in cb.LINEARS if L + name == m)
        for leaf in ("weight_packed", "weight_global_scale", "input_global_scale"):
            ex.tensors.pop(f"{m}.{leaf}")
        weight, scale = cb.fp8_weight(n, k), (torch.arange(n) % 4 + 1).to(torch.bfloat16).reshape(n, 1) / 8
        ex.tensors |= {f"{m}.weight": weight, f"{m}.weight_scale": scale}
        ex.want[f"{m}.weight"] = weight.float() * scale.float()
    groups = [cb.ct_group("fp8", targets=[*fp8[4:], "re:.*self_attn.*_proj$"]), cb.ct_group(targets=[r"re:.*mlp\.(gate|up|down)_proj$"])]
    ex.config = cb.model_config(**cb.ct_config(groups[::order], fmt="mixed-precision"))
    return ex


@pytest.mark.parametrize("order", [1, -1])
def test_b_mixed_groups_exact_beats_regex(tmp_path: Path, order: int) -> None:
    ex = ct_mixed(order)
    ck = check(ex.write(tmp_path), ex, "compressed-tensors")
    assert ck.record(f"{L}mlp.up_proj.weight").kind == "fp8"
    assert ck[f"{L}mlp.gate_proj.weight"].format is fp4.NVFP4


def test_c_mxfp4(tmp_path: Path) -> None:
    ex = cb.mxfp4_linears("weight_packed")
    ex.config = cb.model_config(**cb.ct_config([cb.ct_group("mxfp4")]))
    check(ex.write(tmp_path), ex, "compressed-tensors")


def test_c_no_config(tmp_path: Path) -> None:
    ex = cb.mxfp4_linears("weight_packed")
    with pytest.warns(UserWarning, match="no quantization config"):
        check(ex.write(tmp_path), ex, "compressed-tensors")


# D, F: stacked experts


@pytest.mark.parametrize("openai", [False, True])
def test_d_gpt_oss(tmp_path: Path, openai: bool) -> None:
    ex = cb.gpt_oss(openai)
    ck = check(ex.write(tmp_path), ex, "gpt-oss")
    name = "block.0.mlp.mlp1_weight" if openai else f"{L}mlp.experts.gate_up_proj"
    q = ck[name]
    assert q.gate_up == "interleaved"
    assert q.shape == (2, 192, 64)
    values = fp4.dequantize(q)
    assert bool((values[:, 0::2] >= 0).all())
    assert bool((values[:, 1::2] <= 0).all())


@pytest.mark.parametrize("pattern", [f"{L}mlp.experts", "model.layers.*.mlp", "model.layers.*.mlp.experts"])
def test_d_excluded_but_packed(tmp_path: Path, pattern: str) -> None:
    """The config says that the experts are not MXFP4, the file holds them so: one of the two is wrong."""
    ex = cb.gpt_oss()
    assert ex.config is not None
    ex.config["quantization_config"]["modules_to_not_convert"].append(pattern)
    with pytest.raises(fp4.CheckpointError, match=r"packed in the file though modules_to_not_convert excludes them: .*gate_up_proj"):
        fp4.open_checkpoint(ex.write(tmp_path))
    with pytest.warns(fp4.checkpoint.CheckpointWarning, match="modules_to_not_convert excludes them"):
        ck = fp4.open_checkpoint(tmp_path, trust="tensors")
    assert isinstance(ck[f"{L}mlp.experts.gate_up_proj"], fp4.QuantizedTensor)
    ex.config["quantization_config"]["modules_to_not_convert"][-1] = pattern[:-1]  # a path ends at a dot
    with pytest.warns(fp4.checkpoint.CheckpointWarning, match="matched no module"):
        assert fp4.open_checkpoint(ex.write(tmp_path / "other")).dialect == "gpt-oss"


def test_d_no_config(tmp_path: Path) -> None:
    ex = cb.gpt_oss()
    ex.config = None
    check(ex.write(tmp_path), ex, "gpt-oss")


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_e_moe(tmp_path: Path, names: tuple[str, str, str]) -> None:
    ex = cb.moe(names=names)
    ck = check(ex.write(tmp_path), ex, "modelopt")
    for e in range(4):
        assert float(ck[f"{L}mlp.experts.{e}.{names[1]}.weight"].global_scale) == 2.0**-e


def test_e_block_sparse_moe_names(tmp_path: Path) -> None:
    ex = cb.moe(names=("w1", "w3", "w2"))
    for part in ("tensors", "want"):
        setattr(ex, part, {n.replace(".mlp.", ".block_sparse_moe."): t for n, t in getattr(ex, part).items()})
    ex.nested["quantization"]["exclude_modules"] = ["lm_head", f"{L}block_sparse_moe.gate"]
    check(ex.write(tmp_path), ex, "modelopt")


def test_f_modelopt_fused(tmp_path: Path) -> None:
    ex = cb.modelopt_fused()
    ck = check(ex.write(tmp_path), ex, "modelopt")
    q = ck[f"{L}mlp.experts.gate_up_proj"]
    assert q.shape == (2, 128, 64)
    assert q.gate_up == "interleaved"
    assert ck.shape(f"{L}mlp.experts.gate_up_proj") == (2, 64, 128)
    assert float(q.input_scale) == 0.5


def test_f_order_is_not_guessed(tmp_path: Path) -> None:
    ex = cb.modelopt_fused(bias=False)
    with pytest.warns(UserWarning, match="does not tell the order of gate and up"):
        ck = check(ex.write(tmp_path), ex, "modelopt")
    assert ck[f"{L}mlp.experts.gate_up_proj"].gate_up is None


def test_fastdeploy_equal_and_different_halves(tmp_path: Path) -> None:
    name = f"{L}mlp.experts.up_gate_proj_weight"
    ex = cb.fastdeploy()
    ck = check(ex.write(tmp_path / "a"), ex, "modelopt")
    assert ck[name].gate_up == "gate_up"
    assert ck[name].global_scale.tolist() == [0.25, 0.5]
    assert ck[name].input_scale.tolist() == [0.5, 1.0]  # one activation feeds both halves: the larger multiplier
    ex = cb.fastdeploy(up_second=2.0)
    ck = fp4.open_checkpoint(ex.write(tmp_path / "b"))
    assert torch.equal(ck.dequantize(name), ex.want[name])
    with pytest.raises(fp4.CheckpointError, match="gate and up have different second-level scales"):
        ck[name]
    gate, up = ck.halves(name)
    assert torch.equal(torch.cat([fp4.dequantize(gate), fp4.dequantize(up)], 1), ex.want[name])


# G: Quark


def test_g_quark_mxfp4(tmp_path: Path) -> None:
    ex = cb.mxfp4_linears()
    ex.config = cb.quark_config("mxfp4", cb.quark_spec("mxfp4"))
    check(ex.write(tmp_path), ex, "quark")


def test_g_quark_mxfp4_fp8_activations(tmp_path: Path) -> None:
    ex = cb.mxfp4_linears()
    ex.config = cb.quark_config("mxfp4", cb.quark_spec("fp8", static=True))
    for name, _, _ in cb.LINEARS:
        ex.tensors[f"{L}{name}.input_scale"] = torch.tensor(0.5, dtype=torch.bfloat16)
    assert float(check(ex.write(tmp_path), ex, "quark")[f"{L}mlp.up_proj.weight"].input_scale) == 0.5


def test_g_quark_nvfp4(tmp_path: Path) -> None:
    ex = cb.modelopt()
    ex.nested, ex.config = None, cb.quark_config("nvfp4", cb.quark_spec("nvfp4"))
    ex.tensors = {n.replace("input_scale", "input_scale_2"): t for n, t in ex.tensors.items()}
    assert float(check(ex.write(tmp_path), ex, "quark")[f"{L}mlp.up_proj.weight"].input_scale) == 0.5


def test_g_quark_amdfp4(tmp_path: Path) -> None:
    ex = cb.Example(cb.base_tensors(), config=cb.quark_config("amdfp4", cb.quark_spec("amdfp4")))
    for i, (name, n, k) in enumerate(cb.LINEARS):
        packed, scale = cb.codes(n, k, i), cb.e4m3_scales(n, k).view(torch.uint8) + 0x48
        scale[0, :3] = torch.tensor([0x78, 0x70, 0x7C], dtype=torch.uint8)
        ex.tensors |= {f"{L}{name}.weight": packed, f"{L}{name}.weight_scale": scale}
        ex.want[f"{L}{name}.weight"] = cb.values(packed, scale, 16, "ue5m3")
    assert [cb.ue5m3(b) for b in (0x78, 0x70, 0x7C)] == [1.0, 0.5, 1.5]
    check(ex.write(tmp_path), ex, "quark")


def test_g_quark_layer_override(tmp_path: Path) -> None:
    """F7 (vllm#57071): attention FP8 by layer_quant_config, the MLP MXFP4 by the global config."""
    ex = cb.mxfp4_linears()
    for name, n, k in cb.LINEARS[:4]:
        weight = cb.fp8_weight(n, k)
        ex.tensors |= {f"{L}{name}.weight": weight, f"{L}{name}.weight_scale": torch.tensor(0.5, dtype=torch.bfloat16)}
        ex.tensors[f"{L}{name}.input_scale"] = torch.tensor(0.5, dtype=torch.bfloat16)
        ex.want[f"{L}{name}.weight"] = weight.float() * 0.5
    layer = {"weight": cb.quark_spec("fp8"), "input_tensors": cb.quark_spec("fp8", True), "output_tensors": None, "bias": None}
    ex.config = cb.quark_config("mxfp4", cb.quark_spec("mxfp4"), {"*self_attn*": layer})
    ck = check(ex.write(tmp_path), ex, "quark")
    assert ck.record(f"{L}self_attn.q_proj.weight").kind == "fp8"


def test_g_quark_first_layer_pattern_wins(tmp_path: Path) -> None:
    """As engines look layers up: in the order of the config, the first that matches."""
    ex = cb.mxfp4_linears()
    wrong = {"weight": cb.quark_spec("nvfp4"), "input_tensors": None, "output_tensors": None, "bias": None}
    right = {**wrong, "weight": cb.quark_spec("mxfp4")}
    ex.config = cb.quark_config("mxfp4", cb.quark_spec("mxfp4"), {"*self_attn*": right, "*q_proj": wrong})
    check(ex.write(tmp_path / "first"), ex, "quark")
    ex.config = cb.quark_config("mxfp4", cb.quark_spec("mxfp4"), {"*q_proj": wrong, "*self_attn*": right})
    with pytest.raises(fp4.CheckpointError, match=r"q_proj"):
        fp4.open_checkpoint(ex.write(tmp_path / "last"))


# H to K


@pytest.mark.parametrize("swizzled", [True, False])
def test_h_torchao(tmp_path: Path, swizzled: bool) -> None:
    ex = cb.torchao(swizzled)
    check(ex.write(tmp_path), ex, "torchao")


def test_h_torchao_sharded(tmp_path: Path) -> None:
    ex = cb.torchao()
    check(ex.write(tmp_path, shards=2), ex, "torchao")


def test_i_deepseek(tmp_path: Path) -> None:
    ex = cb.deepseek()
    check(ex.write(tmp_path / "a"), ex, "deepseek")
    ex.config["quantization_config"]["expert_dtype"] = ex.config.pop("expert_dtype")  # V4.1 has it inside
    check(ex.write(tmp_path / "b"), ex, "deepseek")
    ex.config = None
    with pytest.warns(UserWarning, match="no quantization config"):
        check(ex.write(tmp_path / "c"), ex, "deepseek")


@pytest.mark.parametrize("algo", ["NVFP4", None])
def test_i_deepseek_nvfp4(tmp_path: Path, algo: str | None) -> None:
    ex = cb.deepseek()
    if algo:
        ex.config["moe_quant_algo"] = algo
    for e in range(2):
        for i, name in enumerate(("w1", "w2", "w3")):
            m = f"layers.0.ffn.experts.{e}.{name}"
            ex.tensors.pop(f"{m}.scale")
            cb.add_nvfp4(ex, m, 64, 64, 0.5, 0.25, seed=3 * e + i)
    check(ex.write(tmp_path), ex, "deepseek")


@pytest.mark.parametrize(("outer", "inner", "says"), [("MXFP4", None, "mxfp4 needs"), ("MXFP4", "NVFP4", "algo 'MXFP4'.*'NVFP4'")])
def test_i_deepseek_nvfp4_under_another_name(tmp_path: Path, outer: str, inner: str | None, says: str) -> None:
    """The key outside of the quantisation block counts as well, and must not contradict the one inside."""
    ex = cb.deepseek()
    ex.config["moe_quant_algo"] = outer
    if inner:
        ex.config["quantization_config"]["moe_quant_algo"] = inner
    for e in range(2):
        for i, name in enumerate(("w1", "w2", "w3")):
            m = f"layers.0.ffn.experts.{e}.{name}"
            ex.tensors.pop(f"{m}.scale")
            cb.add_nvfp4(ex, m, 64, 64, 0.5, 0.25, seed=3 * e + i)
    with pytest.raises(fp4.CheckpointError, match=says):
        fp4.open_checkpoint(ex.write(tmp_path))


def deepseek_v4_nvfp4() -> cb.Example:
    """As ModelOpt writes them: the experts of the layers in NVFP4, those of the prediction layer as they were."""
    ex = cb.deepseek()
    for e in range(2):
        for i, name in enumerate(("w1", "w2", "w3")):
            m, draft = f"layers.0.ffn.experts.{e}.{name}", f"mtp.0.ffn.experts.{e}.{name}"
            ex.tensors[f"{draft}.weight"], ex.tensors[f"{draft}.scale"] = ex.tensors[f"{m}.weight"], ex.tensors.pop(f"{m}.scale")
            ex.want[f"{draft}.weight"] = ex.want[f"{m}.weight"]
            cb.add_nvfp4(ex, m, 64, 64, 0.5, 0.25, seed=3 * e + i)
    ex.config["quantization_config"]["moe_quant_algo"] = "NVFP4"
    ex.tensors["embed.weight"] = cb.floats(64, 64)
    layers = {n.removesuffix(".weight_scale"): {"quant_algo": "NVFP4", "group_size": 16} for n in ex.tensors if n.endswith(".weight_scale")}
    exclude = ["*.attn.*", "*.ffn.shared_experts.*", "*.ffn.gate.*", "embed.weight", "*.hc_*"]
    ex.nested = {
        "producer": {"name": "modelopt", "version": "dsv4-nvfp4-experts"},
        "quantization": {
            "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "group_size": 16, "quantized_layers": layers,
            "exclude_modules": exclude,
        },
    }  # fmt: skip
    return ex


def test_i_deepseek_v4_with_modelopts_list(tmp_path: Path) -> None:
    """hf_quant_config.json beside config.json's FP8 block is no leftover: it lists the experts that are NVFP4."""
    ex = deepseek_v4_nvfp4()
    ck = check(ex.write(tmp_path / "a"), ex, "deepseek")
    assert ck.patterns["embed"] == 1
    assert {ck.record(f"{p}.0.ffn.experts.1.w2.weight").format.name for p in ("layers", "mtp")} == {"nvfp4", "mxfp4"}
    # newer files repeat the list in config.json, by containers and with the draft's experts excluded by name
    quant = ex.config["quantization_config"]
    quant |= {"quant_algo": "MIXED_PRECISION", "group_size": 16, "ignore": ["*.attn.*", "head", "mtp.*"], "kv_cache_quant_algo": None}
    quant["quantized_layers"] = {"layers.0.ffn.experts": {"group_size": 16, "quant_algo": "NVFP4"}}
    quant["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}}
    quant["producer"] = {"name": "modelopt"}
    check(ex.write(tmp_path / "b"), ex, "deepseek")
    nested, ex.nested = ex.nested, None
    check(ex.write(tmp_path / "c"), ex, "deepseek")
    for key in ("quant_algo", "quantized_layers", "ignore", "config_groups"):
        quant.pop(key)
    with pytest.raises(fp4.CheckpointError, match=r"layers|mtp"):  # moe_quant_algo alone means all experts, and the draft's are not
        fp4.open_checkpoint(ex.write(tmp_path / "d"))
    ex.nested = {"quantization": {**nested["quantization"], "moe_quant_algo": "NVFP4"}}
    quant.pop("moe_quant_algo")
    check(ex.write(tmp_path / "e"), ex, "deepseek")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"quant_algo": "NVFP4"}, None),
        ({"quant_algo": "FP8"}, None),  # of what is not listed
        ({"moe_quant_algo": "MXFP4"}, "moe_quant_algo contradicts"),
        ({"group_size": 32}, "group_size contradicts"),
        (
            {"quantized_layers": {"layers.0.ffn.experts": {"quant_algo": "MXFP4"}}},
            r"quantized_layers contradicts for layers\.0\.ffn\.experts\.0",
        ),
    ],
)
def test_i_deepseek_v4_real_contradictions(tmp_path: Path, change: dict[str, Any], match: str | None) -> None:
    ex = deepseek_v4_nvfp4()
    assert ex.nested is not None
    listed = ex.nested["quantization"]
    ex.config["quantization_config"] |= {"group_size": 16, "quantized_layers": listed["quantized_layers"]}
    ex.nested["quantization"] = {**listed, **change}
    if match is None:
        check(ex.write(tmp_path), ex, "deepseek")
        return
    with pytest.raises(fp4.CheckpointError, match=match):
        fp4.open_checkpoint(ex.write(tmp_path))


def test_i_deepseek_v4_one_algorithm_for_all(tmp_path: Path) -> None:
    ex = deepseek_v4_nvfp4()
    for name in [n for n in ex.tensors if n.startswith("mtp.")]:
        ex.tensors.pop(name), ex.want.pop(name, None)
    ex.nested = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["*.attn.*"]}}
    check(ex.write(tmp_path / "a"), ex, "deepseek")
    ex.nested["quantization"]["quant_algo"] = "W4A16_NVFP4"
    with pytest.raises(fp4.CheckpointError, match=r"quant_algo contradicts: .* says 'W4A16_NVFP4', .* moe_quant_algo 'NVFP4'"):
        fp4.open_checkpoint(ex.write(tmp_path / "b"))


def test_j_kimi(tmp_path: Path) -> None:
    ex = cb.kimi()
    ck = check(ex.write(tmp_path), ex, "compressed-tensors")
    assert ck.patterns["re:.*self_attn.*"] == 1
    assert any("shared_experts" not in w and "matched no module" in w for w in ck.warnings)  # the mlp regex hits nothing here


def test_k_nemotron(tmp_path: Path) -> None:
    ex = cb.nemotron()
    ck = check(ex.write(tmp_path), ex, "modelopt")
    assert not any("gate_proj" in n for n in ck.names())
    assert ck["backbone.layers.1.mixer.experts.0.up_proj.weight"].shape == (48, 64)


# MLX, ComfyUI


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4"])
def test_mlx(tmp_path: Path, mode: str) -> None:
    block, kind = (32, "ue8m0") if mode == "mxfp4" else (16, "e4m3")
    ex = cb.Example(cb.base_tensors(), config={"model_type": "llama", "quantization": {"group_size": block, "bits": 4, "mode": mode}})
    for i, (name, n, k) in enumerate(cb.LINEARS):
        packed = cb.codes(n, k, i)
        scale = cb.e8m0_scales(n, k) if mode == "mxfp4" else cb.e4m3_scales(n, k).view(torch.uint8)
        ex.tensors |= {f"{L}{name}.weight": packed.view(torch.uint32), f"{L}{name}.scales": scale}
        ex.want[f"{L}{name}.weight"] = cb.values(packed, scale, block, kind)
    check(ex.write(tmp_path), ex, "mlx")


def comfy(marker: str) -> cb.Example:
    ex = cb.modelopt(act=False)
    ex.config = ex.nested = None
    layers = {}
    for name, n, k in cb.LINEARS:
        m = L + name
        scale = cb.swizzle(ex.tensors[f"{m}.weight_scale"]).reshape(-(-n // 128) * 128, -(-(k // 16) // 4) * 4)
        ex.tensors[f"{m}.weight_scale"] = scale.view(torch.float8_e4m3fn)
        layers[m] = {"format": "nvfp4"}
        if marker == "tensor":
            ex.tensors[f"{m}.comfy_quant"] = torch.tensor(list(json.dumps(layers[m]).encode()), dtype=torch.uint8)
    if marker == "metadata":
        ex.metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
    return ex


@pytest.mark.parametrize("marker", ["tensor", "metadata"])
def test_comfyui(tmp_path: Path, marker: str) -> None:
    ex = comfy(marker)
    check(ex.write(tmp_path), ex, "comfyui")


def test_comfyui_without_marker_is_suspected(tmp_path: Path) -> None:
    ex = comfy("none")
    ex.nested, ex.config = cb.nested_config("W4A16_NVFP4"), cb.model_config()
    with pytest.raises(fp4.CheckpointError, match="size of swizzled 128x4 tiles"):
        fp4.open_checkpoint(ex.write(tmp_path))
