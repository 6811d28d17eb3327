"""ModelOpt checkpoints made by hand, every variant: names, values, scales, order."""

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


# A: ModelOpt NVFP4


def test_a_modelopt(tmp_path: Path) -> None:
    ck = check(cb.modelopt().write(tmp_path), cb.modelopt(), "modelopt")
    q = ck[f"{L}self_attn.q_proj.weight"]
    assert q.format is fp4.NVFP4
    assert float(q.global_scale) == 0.25
    assert float(q.input_scale) == 0.5
    assert q.source["tensors"]["codes"] == f"{L}self_attn.q_proj.weight"
    assert q.source["file"] == "model.safetensors"
    assert q.source["global_direction"] == "multiplier"
    assert not ck.warnings
    assert ck.patterns == {"lm_head": 1}


def test_a_v_scale_differs(tmp_path: Path) -> None:
    ex = cb.modelopt({**cb.SECOND, "v_proj": 0.5, "up_proj": 0.5})
    ck = check(ex.write(tmp_path), ex, "modelopt")
    assert [float(ck[f"{L}self_attn.{p}_proj.weight"].global_scale) for p in "qkv"] == [0.25, 0.25, 0.5]


@pytest.mark.parametrize("where", ["nested", "flat", "flat_null", "with_input_scale"])
def test_a_w4a16(tmp_path: Path, where: str) -> None:
    """Weight-only said by quant_algo, by null activations, or by with_input_scale (B7)."""
    ex = cb.modelopt(act=False)
    if where == "nested":
        ex.nested = cb.nested_config("W4A16_NVFP4")
    elif where == "with_input_scale":
        ex.nested = cb.nested_config(with_input_scale=False)
    else:
        ex.nested, ex.config = None, cb.flat_config("W4A16_NVFP4" if where == "flat" else "NVFP4")
        group = ex.config["quantization_config"]["config_groups"]["group_0"]
        group["input_activations"] = None
    ck = check(ex.write(tmp_path), ex, "modelopt")
    assert ck[f"{L}mlp.up_proj.weight"].input_scale is None
    assert not ck.warnings


def test_a_awq(tmp_path: Path) -> None:
    ex = cb.modelopt()
    ex.nested = cb.nested_config("NVFP4_AWQ", has_zero_point=False, pre_quant_scale=True)
    pqs = (2.0 ** (torch.arange(64) % 5 - 2)).to(torch.bfloat16)
    ex.tensors[f"{L}self_attn.o_proj.pre_quant_scale"] = pqs
    ck = check(ex.write(tmp_path), ex, "modelopt")
    name = f"{L}self_attn.o_proj.weight"
    assert torch.equal(ck[name].extras["pre_quant_scale"], pqs)
    assert torch.equal(ck.dequantize(name, fold=True), ex.want[name] * pqs.float())


def test_a_mixed(tmp_path: Path) -> None:
    """MIXED_PRECISION: FP8 attention, NVFP4 MLP, keys as leaves and containers; absent modules are unquantised."""
    ex = cb.modelopt()
    layers: dict[str, Any] = {f"{L}mlp": {"quant_algo": "NVFP4", "group_size": 16}}
    for name, n, k in cb.LINEARS[:4]:
        m = L + name
        weight = cb.fp8_weight(n, k, seed=n)
        for leaf in ("weight_scale_2", "weight_scale", "input_scale"):
            ex.tensors.pop(f"{m}.{leaf}")
        ex.tensors[f"{m}.weight"], ex.tensors[f"{m}.weight_scale"] = weight, cb.f32(0.5)
        ex.tensors[f"{m}.input_scale"] = cb.f32(0.25)
        ex.want[f"{m}.weight"] = weight.float() * 0.5
        layers[m] = {"quant_algo": "FP8"}
    ex.nested = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    ck = check(ex.write(tmp_path), ex, "modelopt")
    assert ck.patterns[f"{L}mlp"] >= 3


def test_a_w4a8_nvfp4_fp8(tmp_path: Path) -> None:
    ex = cb.modelopt(block=32)
    ex.nested = cb.nested_config("W4A8_NVFP4_FP8", group=32)
    assert check(ex.write(tmp_path), ex, "modelopt")[f"{L}mlp.up_proj.weight"].format is fp4.NVFP4_B32


@pytest.mark.parametrize("algo", ["mxfp4", "MXFP4", "W4A8_MXFP4_FP8"])
def test_a_mxfp4(tmp_path: Path, algo: str) -> None:
    ex = cb.mxfp4_linears()
    ex.nested = cb.nested_config(algo, group=32)
    assert check(ex.write(tmp_path), ex, "modelopt")[f"{L}mlp.up_proj.weight"].format is fp4.MXFP4


def test_a_mxfp8_neighbour(tmp_path: Path) -> None:
    ex = cb.modelopt()
    m = f"{L}mlp.up_proj"
    for leaf in ("weight_scale_2", "input_scale"):
        ex.tensors.pop(f"{m}.{leaf}")
    weight, scale = cb.fp8_weight(128, 64), cb.e8m0_scales(128, 64)
    ex.tensors |= {f"{m}.weight": weight, f"{m}.weight_scale": scale}
    factor = torch.tensor(cb.SCALES["ue8m0"], dtype=torch.float64)[scale.long()].repeat_interleave(32, 1)
    ex.want[f"{m}.weight"] = (weight.double() * factor).float()
    layers = {L.rstrip("."): {"quant_algo": "NVFP4", "group_size": 16}, m: {"quant_algo": "MXFP8", "group_size": 32}}
    ex.nested = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    assert check(ex.write(tmp_path), ex, "modelopt")[f"{m}.weight"].format is fp4.MXFP8


@pytest.mark.parametrize(
    ("shape", "block"),
    [((), None), ((1,), None), ((64, 1), "row"), ((64,), "row"), ((1, 1), (64, 64)), ((2, 2), (32, 32)), ((2, 1, 2, 1), (32, 32))],
)
def test_fp8_neighbours(tmp_path: Path, shape: tuple[int, ...], block: Any) -> None:
    """FP8 per tensor, per channel and per block, whole model on one machine's config."""
    weight = cb.fp8_weight(64, 64)
    scale = (torch.arange(1, 1 + max(1, torch.Size(shape).numel())) / 8).reshape(shape)
    quant = {"quant_method": "fp8", "fmt": "e4m3"} | ({"weight_block_size": list(block)} if isinstance(block, tuple) else {})
    ex = cb.Example({"m.weight": weight, "m.weight_scale_inv": scale}, config=cb.model_config(**quant))
    factor = scale.reshape(-1, 1).expand(64, 64) if block == "row" else scale
    if isinstance(block, tuple):
        factor = scale.reshape(64 // block[0], -1).repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    ex.want["m.weight"] = weight.float() * factor
    check(ex.write(tmp_path), ex, "deepseek")


def test_fp8_ragged_blocks(tmp_path: Path) -> None:
    weight = cb.fp8_weight(160, 192)
    scale = torch.tensor([[1.0, 0.5], [0.25, 2.0]])
    quant = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    ex = cb.Example({"m.weight": weight, "m.weight_scale_inv": scale}, config=cb.model_config(**quant))
    factor = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:160, :192]
    ex.want["m.weight"] = weight.float() * factor
    check(ex.write(tmp_path), ex, "deepseek")


def test_a_flat_only_equals_nested_only(tmp_path: Path) -> None:
    """F12, first two directories: leftover absent on either side, equal values."""
    nested, flat = cb.modelopt(), cb.modelopt()
    flat.nested, flat.config = None, cb.flat_config()
    a = check(nested.write(tmp_path / "a"), nested, "modelopt")
    b = check(flat.write(tmp_path / "b"), flat, "modelopt")
    assert a.names() == b.names()


@pytest.mark.parametrize(
    ("flat", "field"),
    [
        (cb.flat_config("W4A16_NVFP4"), "quant_algo"),
        (cb.flat_config(ignore=["lm_head", "model.layers.0.mlp*"]), "exclude_modules"),
        (cb.flat_config(kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False}), "kv_cache_quant_algo"),
        (cb.model_config(quant_method="fp8", fmt="e4m3"), "quant_method"),
        (cb.flat_config(group_size=32), "group_size"),
    ],
)
def test_a_both_configs_conflict(tmp_path: Path, flat: dict[str, Any], field: str) -> None:
    """F12, third directory: the two config files contradict each other; the error names the field."""
    ex = cb.modelopt()
    ex.config = flat
    with pytest.raises(fp4.CheckpointError, match=field):
        fp4.open_checkpoint(ex.write(tmp_path))


def test_a_nested_content_inside_config_json(tmp_path: Path) -> None:
    ex = cb.modelopt()
    assert ex.nested is not None
    ex.config, ex.nested = cb.model_config(quant_method="modelopt", **ex.nested), None
    check(ex.write(tmp_path), ex, "modelopt")


def test_a_no_config(tmp_path: Path) -> None:
    ex = cb.modelopt()
    ex.config = ex.nested = None
    with pytest.warns(UserWarning, match="no quantization config"):
        check(ex.write(tmp_path), ex, "modelopt")


def test_a_sharded(tmp_path: Path) -> None:
    ex = cb.modelopt()
    ck = check(ex.write(tmp_path, shards=3), ex, "modelopt")
    assert len(ck.store.files) == 3
    check(tmp_path / "model.safetensors.index.json", ex, "modelopt")


@pytest.mark.parametrize("method", ["modelopt_fp4", "ModelOpt", "nvfp4"])
def test_a_method_names(tmp_path: Path, method: str) -> None:
    ex = cb.modelopt()
    ex.nested, ex.config = None, cb.flat_config(quant_method=method)
    check(ex.write(tmp_path), ex, "modelopt")


@pytest.mark.parametrize("view", [torch.int8, torch.uint8, "F4"])
def test_packed_dtypes(tmp_path: Path, view: Any) -> None:
    """U8, I8 and F4 codes are the same bytes."""
    ex = cb.modelopt()
    if view == "F4":
        ex.write(tmp_path)
        data = (tmp_path / "model.safetensors").read_bytes()
        n = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + n])
        for name, entry in header.items():
            if name.endswith("proj.weight"):
                entry["dtype"], entry["shape"] = "F4", [entry["shape"][0], 2 * entry["shape"][1]]
        cb.raw_file(tmp_path / "model.safetensors", header, data[8 + n :])
    else:
        ex.tensors = {n: t.view(view) if n.endswith("proj.weight") else t for n, t in ex.tensors.items()}
        ex.write(tmp_path)
    check(tmp_path, ex, "modelopt")


def deepseek_v3_nvfp4() -> cb.Example:
    """nvidia/DeepSeek-V3-0324-FP4: hf_quant_config.json is right, config.json still holds the FP8 block of the source (sglang#7593)."""
    ex = cb.moe()
    ex.config = cb.model_config(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128])
    ex.config["num_hidden_layers"] = 1
    for name in [n for n in ex.tensors if "self_attn" in n]:
        ex.tensors.pop(name), ex.want.pop(name, None)
    for name in ("self_attn.kv_b_proj", "self_attn.q_a_proj", "mlp.gate"):
        ex.tensors[f"{L}{name}.weight"] = cb.floats(32, 64)
    ex.tensors["model.layers.1.self_attn.o_proj.weight"] = cb.floats(32, 64)  # the prediction layer, in BF16
    ex.nested = cb.nested_config(exclude=["lm_head", f"{L}self_attn*", "model.layers.1*", f"{L}mlp.gate"], kv_cache_quant_algo="FP8")
    return ex


def test_a_deepseek_v3_with_its_sources_fp8_block(tmp_path: Path) -> None:
    ex = deepseek_v3_nvfp4()
    folder = ex.write(tmp_path / "a", shards=2)
    index = folder / "model.safetensors.index.json"  # ModelOpt's script rewrites the shards, adds no scale to the index
    listed = json.loads(index.read_text())
    listed["weight_map"] = {n: f for n, f in listed["weight_map"].items() if not n.endswith(("_scale", "_scale_2"))}
    index.write_text(json.dumps(listed))
    ck = check(folder, ex, "modelopt")
    assert any("no cache scale; latent attention" in w for w in ck.warnings)
    assert any("36 scales of listed weights are in the shards and not in the index" in w for w in ck.warnings)
    assert any("left over from the model that was quantised" in w for w in ck.warnings)
    ex.tensors["model.layers.1.mlp.up_proj.weight"] = cb.fp8_weight(128, 128)
    ex.tensors["model.layers.1.mlp.up_proj.weight_scale_inv"] = cb.f32(0.5, (1, 1))
    with pytest.raises(fp4.CheckpointError, match=r"quant_method 'fp8', hf_quant_config\.json is ModelOpt's"):  # it speaks of that tensor
        fp4.open_checkpoint(ex.write(tmp_path / "b"))


def test_a_lists_that_differ_about_nothing_quantised(tmp_path: Path) -> None:
    """The nested list of older exports is short ("lm_head" alone), prefixes differ; only a quantised module makes it a contradiction."""
    ex = cb.modelopt()
    ex.tensors[f"{L}mlp.router.weight"] = cb.floats(4, 64)
    ex.nested = cb.nested_config(exclude=["lm_head"])
    ex.config = cb.flat_config(ignore=["lm_head", "language_model.model.layers.0.mlp.router", "model.embed_tokens"])
    ck = check(ex.write(tmp_path / "a"), ex, "modelopt")
    assert any("about no tensor that is quantised" in n for n in ck.notes)
    ex.config = cb.flat_config(ignore=["lm_head", f"{L}mlp.up_proj"])
    with pytest.raises(fp4.CheckpointError, match=r"exclude_modules contradicts for model\.layers\.0\.mlp\.up_proj: "):
        fp4.open_checkpoint(ex.write(tmp_path / "b"))
