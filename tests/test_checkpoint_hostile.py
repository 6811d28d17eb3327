"""Files that lie in ways which the format allows: flags that contradict shapes, targets of modules, overflowing empty tensors, pipes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import checkpoint_builder as cb
import pytest
import torch
from safetensors.torch import save_file

import fp4

L = cb.L
pytestmark = pytest.mark.filterwarnings("ignore::fp4.checkpoint.CheckpointWarning")


def refused(path: Path, match: str) -> None:
    with pytest.raises(fp4.CheckpointError, match=match) as caught:
        fp4.open_checkpoint(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [[1 << 40, 1 << 40, 0], [0, 1 << 62, 1 << 62], [1 << 62, 1 << 62, 1 << 62, 0]])
@pytest.mark.parametrize("dtype", ["U8", "F32", "F4", "F8_E8M0"])
def test_empty_tensor_whose_other_dimensions_overflow(tmp_path: Path, shape: list[int], dtype: str) -> None:
    path = cb.raw_file(tmp_path / "model.safetensors", {"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}})
    refused(path, "overflow 64 bits")


@pytest.mark.parametrize("shape", [[0], [0, 5], [1 << 40, 0], [0] * 10])
def test_empty_tensor_is_fine(tmp_path: Path, shape: list[int]) -> None:
    path = cb.raw_file(tmp_path / "model.safetensors", {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}})
    with fp4.open_checkpoint(path) as ck:
        assert list(ck.dequantize("a").shape) == shape


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    refused(tmp_path, "not a regular file")
    refused(tmp_path / name, "not a regular file")


def torchao_with(changes: dict[str, Any], module: str = "mlp.gate_proj") -> cb.Example:
    """Example H with other metadata of one tensor; gate_proj's 128 x 4 scales have the same size in tiles and in rows."""
    ex = cb.torchao()
    assert ex.metadata is not None
    value = json.loads(ex.metadata[f"{L}{module}.weight"])
    value["_data"].update(changes)
    ex.metadata[f"{L}{module}.weight"] = json.dumps(value)
    return ex


def test_torchao_flag_that_contradicts_the_shape(tmp_path: Path) -> None:
    refused(torchao_with({"is_swizzled_scales": False}).write(tmp_path), r"\[32, 16\].*\[128, 4\] if is_swizzled_scales is false")


@pytest.mark.parametrize("flag", [None, "true", 1])
def test_torchao_flag_that_is_no_flag(tmp_path: Path, flag: Any) -> None:
    refused(torchao_with({"is_swizzled_scales": flag}).write(tmp_path), "is_swizzled_scales is .*; need true or false")


def lm_head_only(prefix: str, targets: list[str]) -> cb.Example:
    """compressed-tensors whose one group names lm_head: all else is BF16."""
    ex = cb.compressed_tensors()
    head, gate = f"{prefix}lm_head", f"{L}self_attn.q_proj"
    tensors = {f"{head}.{leaf}": ex.tensors[f"{gate}.{leaf}"] for leaf in ("weight_packed", "weight_scale", "weight_global_scale")}
    tensors[f"{head}.input_global_scale"] = cb.f32(2.0, (1,))
    want = {f"{head}.weight": ex.want[f"{gate}.weight"]}
    for name, n, k in cb.LINEARS:
        tensors[f"{prefix}{L}{name}.weight"] = want[f"{prefix}{L}{name}.weight"] = torch.ones(n, k, dtype=torch.bfloat16)
    return cb.Example(tensors, want, cb.model_config(**cb.ct_config([cb.ct_group(targets=targets)], ignore=[])))


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_target_without_a_dot_is_a_module_and_no_class(tmp_path: Path, prefix: str) -> None:
    ex = lm_head_only(prefix, ["lm_head"])
    with fp4.open_checkpoint(ex.write(tmp_path)) as ck:
        for name, value in ex.want.items():
            assert torch.equal(ck.dequantize(name), value.float()), name


def test_target_that_names_nothing_is_warned_of(tmp_path: Path) -> None:
    with fp4.open_checkpoint(lm_head_only("", ["lm_head", "score"]).write(tmp_path)) as ck:
        assert any("score" in w and "matched no module" in w for w in ck.warnings)


def test_mlx_biases_beside_a_mode_without_them(tmp_path: Path) -> None:
    tensors = {
        "a.weight": cb.codes(32, 64).view(torch.uint32),
        "a.scales": cb.e8m0_scales(32, 64),
        "a.biases": torch.zeros(32, 2, dtype=torch.bfloat16),
    }
    ex = cb.Example(tensors, config={"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}})
    refused(ex.write(tmp_path), "affine integer mode.*a.biases")


@pytest.mark.parametrize("size", [[], {}, "16", 16.0])
def test_modelopt_group_size_of_another_type(tmp_path: Path, size: Any) -> None:
    ex = cb.modelopt()
    ex.config = cb.flat_config(config_groups={"group_0": {"weights": {"group_size": size}, "targets": ["Linear"]}})
    refused(ex.write(tmp_path), "group_size is .*; need an integer")


def test_modelopt_with_input_scale_of_another_type(tmp_path: Path) -> None:
    ex = cb.modelopt()
    ex.nested = cb.nested_config(with_input_scale={})
    refused(ex.write(tmp_path), "with_input_scale is {}; need true or false")


def test_pre_quant_scale_of_an_fp8_module_is_checked(tmp_path: Path) -> None:
    module = f"{L}self_attn.o_proj"
    tensors = {
        f"{module}.weight": cb.fp8_weight(64, 64),
        f"{module}.weight_scale": cb.f32(0.5),
        f"{module}.pre_quant_scale": torch.ones(32, dtype=torch.bfloat16),
    }
    ex = cb.Example(tensors, nested=cb.nested_config("FP8", exclude=[], group=None))
    refused(ex.write(tmp_path), r"pre_quant_scale has shape \[32\]; need \[64\]")


def test_comfy_marker_that_is_no_object(tmp_path: Path) -> None:
    refused(cb.Example({"a.comfy_quant": torch.tensor(list(b"[1]"), dtype=torch.uint8)}).write(tmp_path), "is list; need an object")


def test_leftover_modelopt_file_beside_compressed_tensors(tmp_path: Path) -> None:
    """The two config files speak of different producers: neither may win in silence (sglang#7593)."""
    ex = cb.compressed_tensors()
    ex.nested = cb.nested_config("FP8", group=None)
    refused(ex.write(tmp_path), "hf_quant_config.json is ModelOpt's, but .*'compressed-tensors'.*remove the leftover")
    with fp4.open_checkpoint(tmp_path, trust="tensors") as ck:
        assert any("leftover" in w for w in ck.warnings)


def stacked(last: str, second: list[list[float]] | list[float], model_type: str) -> cb.Example:
    """Three experts [64, 64] under ``experts.<last>.weight`` with second-level scales [3] or [3, 2]."""
    module = f"{L}mlp.experts.{last}"
    tensors = {
        f"{module}.weight": torch.stack([cb.codes(64, 64, e) for e in range(3)]),
        f"{module}.weight_scale": torch.stack([cb.e4m3_scales(64, 64, seed=e).view(torch.uint8) for e in range(3)]).view(
            torch.float8_e4m3fn
        ),
        f"{module}.weight_scale_2": torch.tensor(second),
    }
    return cb.Example(tensors, config=cb.model_config() | {"model_type": model_type}, nested=cb.nested_config("W4A16_NVFP4", exclude=[]))


@pytest.mark.parametrize(("last", "model_type"), [("down_proj", "qwen3_moe"), ("gate_up_proj", "gpt_oss")])
def test_two_scales_an_expert_need_rows_in_halves(tmp_path: Path, last: str, model_type: str) -> None:
    """[experts, 2] was read as the first and second half of the rows whatever the rows were: of a down projection, of gate, up, gate .."""
    pairs = [[0.25, 0.5], [1.0, 2.0], [0.5, 0.25]]
    refused(stacked(last, pairs, model_type).write(tmp_path), r"weight_scale_2 has shape \[3, 2\].*a value for each half means nothing")


def test_two_scales_of_fused_interleaved_experts(tmp_path: Path) -> None:
    ex = cb.modelopt_fused()
    name = next(n for n in ex.tensors if n.endswith("gate_up_proj_weight_scale_2"))
    ex.tensors[name] = torch.tensor([[0.25, 0.5], [1.0, 2.0]])
    refused(ex.write(tmp_path), "rows are interleaved, so a value for each half means nothing")


@pytest.mark.parametrize(("model_type", "order"), [("gpt_oss", "interleaved"), ("llama4_text", "gate_up")])
def test_order_of_stacked_experts_is_the_models(tmp_path: Path, model_type: str, order: str) -> None:
    ex = stacked("gate_up_proj", [0.25, 0.5, 1.0], model_type)
    with fp4.open_checkpoint(ex.write(tmp_path)) as ck:
        q = ck[f"{L}mlp.experts.gate_up_proj.weight"]
        assert isinstance(q, fp4.QuantizedTensor)
        assert q.gate_up == order


def test_deepseek_nvfp4_experts_without_activation_scales(tmp_path: Path) -> None:
    a, module = cb.modelopt(act=False), f"{L}mlp.gate_proj"
    tensors, want = {}, {}
    for e in range(2):
        expert = f"layers.0.ffn.experts.{e}.w1"
        tensors |= {f"{expert}.{leaf}": a.tensors[f"{module}.{leaf}"] for leaf in ("weight", "weight_scale", "weight_scale_2")}
        want[f"{expert}.weight"] = a.want[f"{module}.weight"]
    quant = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    config = {"model_type": "deepseek_v4", "expert_dtype": "fp4", "moe_quant_algo": "NVFP4", "quantization_config": quant}
    with fp4.open_checkpoint(cb.Example(tensors, want, config).write(tmp_path)) as ck:
        assert any("weight-only" in w for w in ck.warnings)
        for name, value in want.items():
            assert torch.equal(ck.dequantize(name), value)


@pytest.mark.parametrize(("n", "k"), [(32, 0), (0, 64), (0, 0)])
def test_quantised_tensor_without_elements(tmp_path: Path, n: int, k: int) -> None:
    tensors = {
        "a.weight": torch.zeros(n, k // 2, dtype=torch.uint8),
        "a.weight_scale": torch.zeros(n, k // 16, dtype=torch.float8_e4m3fn),
        "a.weight_scale_2": cb.f32(0.5),
    }
    with fp4.open_checkpoint(cb.Example(tensors, nested=cb.nested_config("W4A16_NVFP4", exclude=[])).write(tmp_path)) as ck:
        q = ck["a.weight"]
        assert isinstance(q, fp4.QuantizedTensor)
        assert q.shape == (n, k)
        assert ck.dequantize("a.weight").shape == (n, k)


def test_a_long_name_is_cut_in_the_message(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    for where, tensor in (("x" * 50_000, "a"), ("x.safetensors", "b" * 50_000)):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {tensor: where}}))
        with pytest.raises(fp4.CheckpointError) as error:
            fp4.open_checkpoint(tmp_path)
        assert len(str(error.value)) < 1000


@pytest.mark.parametrize("key", ["quant_method", "strategy", "group_size", "num_bits", "actorder"])
def test_a_long_value_is_cut_in_the_message(tmp_path: Path, key: str) -> None:
    """The middle goes, not the end, which says what is needed."""
    ex = cb.compressed_tensors()
    quant = json.loads(json.dumps(ex.config))["quantization_config"]
    (quant if key in quant else quant["config_groups"]["group_0"]["weights"])[key] = "a" * 50_000
    ex.config = {**(ex.config or {}), "quantization_config": quant}
    with pytest.raises(fp4.CheckpointError) as error:
        fp4.open_checkpoint(ex.write(tmp_path))
    assert len(str(error.value)) <= 1000
    assert "aaa ... " in str(error.value)
    assert not str(error.value).endswith("a")
