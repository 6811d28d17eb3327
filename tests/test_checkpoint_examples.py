"""Checkpoints made by hand (specs: hand-made examples A to L), every dialect and variant: names, values, scales, order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoint_builder as cb
import pytest
import torch

import fp4

L = cb.L


def check(folder: Path, ex: cb.Example, dialect: str, **options: Any) -> fp4.checkpoint.Checkpoint:
    """Open, and require the exact values of every quantised tensor, both ways, and the untouched rest."""
    ck = fp4.open_checkpoint(folder, **options)
    assert ck.dialect == dialect
    for name, want in ex.want.items():
        got = ck.dequantize(name)
        assert got.shape == want.shape == ck.shape(name)
        assert torch.equal(got, want), name
        q = ck[name]
        if isinstance(q, fp4.QuantizedTensor):
            logical = fp4.dequantize(q)
            assert torch.equal(logical.transpose(-1, -2) if ck.record(name).transposed else logical, want), name
    for name in ck.names():
        if name not in ex.want:
            assert torch.equal(ck[name], ex.tensors[name]), name
    hidden = {n for n in ex.tensors if n.endswith(("_scale", "_scale_2", "_scales", "_blocks", ".scale", "_packed")) and "norm" not in n}
    assert not hidden & set(ck.names())
    return ck


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


@pytest.mark.parametrize("names", ["k_proj.k_scale", "k_scale", "k_proj.output_scale", "attn.k_scale"])
@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_a_kv_fp8_every_naming(tmp_path: Path, names: str, prefix: str) -> None:
    """H1 (vllm#54623): cache scales are found under every name."""
    ex = cb.modelopt()
    ex.tensors = {prefix + n: t for n, t in ex.tensors.items()}
    ex.want = {prefix + n: t for n, t in ex.want.items()}
    ex.nested = cb.nested_config(kv_cache_quant_algo="FP8")
    for letter, value in (("k", 0.01), ("v", 0.02)):
        ex.tensors[f"{prefix}{L}self_attn.{names.replace('k_proj', f'{letter}_proj').replace('k_scale', f'{letter}_scale')}"] = cb.f32(
            value
        )
    ck = check(ex.write(tmp_path), ex, "modelopt")
    scale = ck.kv_scales[f"{prefix}{L}self_attn"]
    assert float(scale.k) == pytest.approx(0.01)
    assert float(scale.v) == pytest.approx(0.02)
    assert scale.dtype == "fp8"


@pytest.mark.parametrize("bits", ["NVFP4", {"dynamic": False, "num_bits": 8, "type": "float"}])
def test_a_kv_flat_scheme(tmp_path: Path, bits: Any) -> None:
    """H5: the flat config gives a bare string for NVFP4 and an object for FP8."""
    ex = cb.modelopt()
    ex.nested, ex.config = None, cb.flat_config(kv_cache_scheme=bits)
    ex.tensors |= {f"{L}self_attn.k_proj.k_scale": cb.f32(0.01), f"{L}self_attn.v_proj.v_scale": cb.f32(0.02)}
    ck = check(ex.write(tmp_path), ex, "modelopt")
    assert ck.kv_config.dtype == ("nvfp4" if bits == "NVFP4" else "fp8")
    assert ck.kv_config.static


def test_a_kv_missing_is_an_error(tmp_path: Path) -> None:
    ex = cb.modelopt()
    ex.nested = cb.nested_config(kv_cache_quant_algo="FP8")
    ex.tensors[f"{L}self_attn.k_proj.k_scale"] = cb.f32(0.01)
    with pytest.raises(fp4.CheckpointError, match=r"cache scales not found .*kv_cache_quant_algo 'FP8'.*self_attn \(v\)"):
        fp4.open_checkpoint(ex.write(tmp_path))


def test_a_kv_unasked_is_one_note(tmp_path: Path) -> None:
    """H3: the cache is BF16, the file has scales: information, no warning."""
    ex = cb.modelopt()
    ex.tensors |= {f"{L}self_attn.k_proj.k_scale": cb.f32(0.01), f"{L}self_attn.v_proj.v_scale": cb.f32(0.02)}
    ck = check(ex.write(tmp_path), ex, "modelopt")
    assert not ck.warnings
    assert len(ck.notes) == 1


def test_a_kv_affine_bias(tmp_path: Path) -> None:
    ex = cb.modelopt()
    ex.nested = cb.nested_config(kv_cache_quant_algo="NVFP4_AFFINE")
    for letter in "kv":
        ex.tensors[f"{L}self_attn.{letter}_proj.{letter}_scale"] = cb.f32(0.01)
        ex.tensors[f"{L}self_attn.{letter}_proj.{letter}_bias"] = torch.ones(32)
    scale = check(ex.write(tmp_path), ex, "modelopt").kv_scales[f"{L}self_attn"]
    assert torch.equal(scale.k_bias, torch.ones(32))


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


def test_b_kv_scales(tmp_path: Path) -> None:
    ex = cb.compressed_tensors()
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    ex.config["quantization_config"]["kv_cache_scheme"] = scheme
    for letter in "kv":
        ex.tensors[f"{L}self_attn.{letter}_scale"] = torch.tensor([0.0125], dtype=torch.bfloat16)
    assert float(check(ex.write(tmp_path), ex, "compressed-tensors").kv_scales[f"{L}self_attn"].k) == pytest.approx(0.0125, rel=1e-2)


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


def test_g_quark_kv(tmp_path: Path) -> None:
    ex = cb.mxfp4_linears()
    ex.config = cb.quark_config("mxfp4", cb.quark_spec("mxfp4"))
    layer = {"weight": cb.quark_spec("mxfp4"), "input_tensors": None, "output_tensors": cb.quark_spec("fp8", True), "bias": None}
    ex.config["quantization_config"]["kv_cache_quant_config"] = {"*k_proj": layer, "*v_proj": layer}
    for letter in "kv":
        ex.tensors[f"{L}self_attn.{letter}_proj.output_scale"] = torch.tensor(0.25, dtype=torch.bfloat16)
    ck = check(ex.write(tmp_path), ex, "quark")
    assert float(ck.kv_scales[f"{L}self_attn"].v) == 0.25
    ex.drop("v_proj.output_scale")
    with pytest.raises(fp4.CheckpointError, match=r"cache scales not found .*self_attn \(v\)"):
        fp4.open_checkpoint(ex.write(tmp_path))


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
