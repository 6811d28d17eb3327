"""Public bug reports about loading: names, lists, bytes, size (groups F, G, H, J), each with the input that shows the fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_builder as cb
import pytest
import torch
from checkpoint_checks import opened, refused

import fp4

L = cb.L
E = f"{L}mlp.experts."


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


def many_names(folder: Path, layers: int) -> Callable[[], float]:
    """Write a checkpoint of about 1,000 names a layer; opens it once and returns the processor seconds that it took."""
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

    def seconds() -> float:
        start = time.process_time()
        ck = fp4.open_checkpoint(folder)
        took = time.process_time() - start
        assert len(ck.kv_scales) == layers
        assert len(ck.names()) == layers * 83 * 3
        return took

    return seconds


@pytest.mark.filterwarnings("ignore:.*matched no module")
def test_h2_sixty_thousand_names(tmp_path: Path) -> None:
    """vllm PR #25968: 60,000 names with 120 cache scales in under a second, or, on a slow machine, in time that grows linearly."""
    whole, quarter = many_names(tmp_path / "60", 60), many_names(tmp_path / "15", 15)
    # in pairs: a machine may be twice as slow a second later
    pairs = [(whole(), quarter()) for _ in range(3)]
    assert any(w < 1.0 or w < 6 * q for w, q in pairs), pairs


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
        ex.tensors[f"{m}.weight"][5, 24:32] = torch.tensor([0x80, 0x08] * 4)  # zeros of both signs
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
