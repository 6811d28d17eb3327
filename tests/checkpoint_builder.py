"""Checkpoints made by hand, byte by byte, and their exact values by an arithmetic that shares nothing with fp4.

The examples are a one-layer Llama with hidden 64, intermediate 128, 4 heads, 2 kv heads, head_dim 16, vocab 64 and some
relatives; codes are ``(7 r + 13 c + seed) mod 256``, scales small finite bytes, so every value is exact in float32.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 += [-v for v in E2M1]
L = "model.layers.0."
#: (module, n, k) of the Llama's linears
LINEARS = [
    ("self_attn.q_proj", 64, 64),
    ("self_attn.k_proj", 32, 64),
    ("self_attn.v_proj", 32, 64),
    ("self_attn.o_proj", 64, 64),
    ("mlp.gate_proj", 128, 64),
    ("mlp.up_proj", 128, 64),
    ("mlp.down_proj", 64, 128),
]
#: multiplier and activation multiplier of each linear in example A
SECOND = {"q_proj": 0.25, "k_proj": 0.25, "v_proj": 0.25, "o_proj": 0.125, "gate_proj": 0.25, "up_proj": 0.25, "down_proj": 1.0}
ACT = {**dict.fromkeys(SECOND, 0.5), "down_proj": 0.25}
DTYPES = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
}
Tensors = dict[str, torch.Tensor]


def e4m3(byte: int) -> float:
    """OCP E4M3, exactly."""
    e, m = byte >> 3 & 15, byte & 7
    value = Fraction(8 + m, 8) * Fraction(2) ** (e - 7) if e else Fraction(m, 8) * Fraction(2) ** -6
    return float(-value if byte & 128 else value)


def ue8m0(byte: int) -> float:
    return 2.0 ** (byte - 127)


def ue5m3(byte: int) -> float:
    e, m = byte >> 3, byte & 7
    return float(Fraction(8 + m, 8) * Fraction(2) ** (e - 15) if e else Fraction(m, 8) * Fraction(2) ** -14)


SCALES = {"e4m3": [e4m3(b) for b in range(256)], "ue8m0": [ue8m0(b) for b in range(256)], "ue5m3": [ue5m3(b) for b in range(256)]}


def codes(n: int, k: int, seed: int = 0) -> torch.Tensor:
    """u8 [n, k / 2]."""
    r, c = np.indices((n, k // 2))
    return torch.from_numpy(((7 * r + 13 * c + 31 * seed) % 256).astype(np.uint8))


def e4m3_scales(n: int, k: int, block: int = 16, seed: int = 0) -> torch.Tensor:
    r, c = np.indices((n, k // block))
    return torch.from_numpy((0x28 + (3 * r + 5 * c + 7 * seed) % 25).astype(np.uint8)).view(torch.float8_e4m3fn)


def e8m0_scales(n: int, k: int, block: int = 32, seed: int = 0) -> torch.Tensor:
    r, c = np.indices((n, k // block))
    return torch.from_numpy((120 + (3 * r + 5 * c + 7 * seed) % 11).astype(np.uint8))


def values(packed: torch.Tensor, scale: torch.Tensor, block: int, kind: str = "e4m3", second: float = 1.0) -> torch.Tensor:
    """f32 [n, k]: code * scale * second, from Python's own numbers."""
    raw = packed.view(torch.uint8).numpy()
    both = np.stack([raw & 15, raw >> 4], -1).reshape(*raw.shape[:-1], 2 * raw.shape[-1])
    element = np.array(E2M1, dtype=np.float64)[both]
    factor = np.array(SCALES[kind], dtype=np.float64)[scale.view(torch.uint8).numpy()].repeat(block, -1)
    return torch.from_numpy((element * factor * second).astype(np.float32))


def f32(value: float, shape: tuple[int, ...] = ()) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.float32)


@dataclass
class Example:
    """A checkpoint to be written: ``want`` holds the unquantised values that the reader must give."""

    tensors: Tensors = field(default_factory=dict)
    want: Tensors = field(default_factory=dict)
    config: dict[str, Any] | None = field(default_factory=dict)
    nested: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None

    def write(self, folder: Path, shards: int = 1) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        if self.config is not None:
            (folder / "config.json").write_text(json.dumps(self.config))
        if self.nested is not None:
            (folder / "hf_quant_config.json").write_text(json.dumps(self.nested))
        if shards == 1:
            save(folder / "model.safetensors", self.tensors, self.metadata)
            return folder
        names = list(self.tensors)
        where = {}
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            part = names[i::shards]
            save(folder / file, {n: self.tensors[n] for n in part}, self.metadata)
            where.update(dict.fromkeys(part, file))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
        return folder

    def drop(self, *suffixes: str) -> Example:
        for name in [n for n in self.tensors if n.endswith(suffixes)]:
            del self.tensors[name]
        return self


def save(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file, wide elements first."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at, blobs = 0, []
    for name, t in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        blob = t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + len(blob)]}
        at += len(blob)
        blobs.append(blob)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def raw_file(path: Path, header: bytes | Any, data: bytes = b"", length: int | None = None) -> Path:
    """Write a file with any header, true or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def base_tensors() -> Tensors:
    """The unquantised rest of the Llama."""
    return {
        "model.embed_tokens.weight": floats(64, 64, seed=1),
        f"{L}input_layernorm.weight": floats(64, seed=2),
        f"{L}post_attention_layernorm.weight": floats(64, seed=3),
        "model.norm.weight": floats(64, seed=4),
        "lm_head.weight": floats(64, 64, seed=5),
    }


def model_config(**quant: Any) -> dict[str, Any]:
    out: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1}
    if quant:
        out["quantization_config"] = quant
    return out


def nested_config(algo: str = "NVFP4", exclude: list[str] | None = None, group: int | None = 16, **more: Any) -> dict[str, Any]:
    quant: dict[str, Any] = {
        "quant_algo": algo,
        "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head"] if exclude is None else exclude,
    }
    if group is not None:
        quant["group_size"] = group
    quant.update(more)
    return {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": quant}


def flat_config(algo: str = "NVFP4", ignore: list[str] | None = None, **more: Any) -> dict[str, Any]:
    spec = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    quant: dict[str, Any] = {
        "quant_method": "modelopt",
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quant_algo": algo,
        "ignore": ["lm_head"] if ignore is None else ignore,
        "config_groups": {"group_0": {"weights": spec, "input_activations": dict(spec), "targets": ["Linear"]}},
    }
    quant.update(more)
    return model_config(**quant)


def add_nvfp4(ex: Example, module: str, n: int, k: int, second: float, act: float | None = None, block: int = 16, seed: int = 0) -> None:
    """ModelOpt's tensors of one linear."""
    packed, scale = codes(n, k, seed), e4m3_scales(n, k, block, seed)
    ex.tensors[f"{module}.weight"] = packed
    ex.tensors[f"{module}.weight_scale"] = scale
    ex.tensors[f"{module}.weight_scale_2"] = f32(second)
    if act is not None:
        ex.tensors[f"{module}.input_scale"] = f32(act)
    ex.want[f"{module}.weight"] = values(packed, scale, block, second=second)


def modelopt(second: Mapping[str, float] = SECOND, act: bool = True, block: int = 16) -> Example:
    """Example A."""
    ex = Example(base_tensors(), config=model_config(), nested=nested_config())
    for i, (name, n, k) in enumerate(LINEARS):
        leaf = name.rpartition(".")[2]
        add_nvfp4(ex, L + name, n, k, second[leaf], ACT[leaf] if act else None, block, seed=i)
    return ex


def ct_group(kind: str = "nvfp4", act: bool = True, targets: list[str] | None = None, fmt: str | None = "") -> dict[str, Any]:
    """One config group of compressed-tensors."""
    if kind == "fp8":
        weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
        inputs: dict[str, Any] | None = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
        name = "float-quantized"
    else:
        size, strategy = (16, "tensor_group") if kind == "nvfp4" else (32, "group")
        weights = {"num_bits": 4, "type": "float", "strategy": strategy, "group_size": size, "symmetric": True, "dynamic": False}
        inputs = {**weights, "dynamic": "local" if kind == "nvfp4" else True} if act else None
        name = f"{kind}-pack-quantized"
    group: dict[str, Any] = {"targets": targets or ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    if fmt is not None:
        group["format"] = fmt or name
    return group


def ct_config(groups: list[dict[str, Any]], ignore: list[str] | None = None, fmt: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "version": "0.19.0",
        "format": fmt or groups[0].get("format", "mixed-precision"),
        "config_groups": {f"group_{i}": g for i, g in enumerate(groups)},
        "ignore": ["lm_head"] if ignore is None else ignore,
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        **more,
    }


def compressed_tensors(act: bool = True) -> Example:
    """Example B: A's bytes under compressed-tensors' names, with divisors."""
    a = modelopt()
    ex = Example({n: t for n, t in a.tensors.items() if not n.startswith(L) or "layernorm" in n}, a.want)
    ex.config = model_config(**ct_config([ct_group(act=act)]))
    for name, _, _ in LINEARS:
        m = L + name
        ex.tensors[f"{m}.weight_packed"] = a.tensors[f"{m}.weight"]
        ex.tensors[f"{m}.weight_scale"] = a.tensors[f"{m}.weight_scale"]
        ex.tensors[f"{m}.weight_global_scale"] = f32(1 / float(a.tensors[f"{m}.weight_scale_2"]), (1,))
        if act:
            ex.tensors[f"{m}.input_global_scale"] = f32(1 / float(a.tensors[f"{m}.input_scale"]), (1,))
    return ex


def mxfp4_linears(leaf: str = "weight") -> Example:
    """The Llama with MXFP4 linears; codes under ``leaf``."""
    ex = Example(base_tensors(), config=model_config())
    for i, (name, n, k) in enumerate(LINEARS):
        packed, scale = codes(n, k, i), e8m0_scales(n, k, seed=i)
        ex.tensors[f"{L}{name}.{leaf}"] = packed
        ex.tensors[f"{L}{name}.weight_scale"] = scale
        ex.want[f"{L}{name}.weight"] = values(packed, scale, 32, "ue8m0")
    return ex


def gpt_oss(openai: bool = False) -> Example:
    """Example D: two experts, hidden 64, intermediate 96; gate rows positive, up rows negative."""
    ex = Example(
        config=model_config(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router"])
    )
    assert ex.config is not None
    ex.config["model_type"] = "gpt_oss"
    prefix, (up, down), sep = (L + "mlp.experts.", ("gate_up_proj", "down_proj"), "_")
    if openai:
        prefix, (up, down), sep = "block.0.mlp.", ("mlp1_weight", "mlp2_weight"), "."
    for name, n, k in ((up, 192, 64), (down, 64, 96)):
        packed = torch.stack([codes(n, k, e) for e in range(2)])
        if name == up:
            packed[:, 0::2] &= 0x77
            packed[:, 1::2] |= 0x88
        scale = torch.stack([e8m0_scales(n, k, seed=e) for e in range(2)])
        ex.tensors[f"{prefix}{name}{sep}blocks"] = packed.reshape(2, n, k // 32, 16)
        ex.tensors[f"{prefix}{name}{sep}scales"] = scale
        bias = f"{prefix}{name.replace('_weight', '')}_bias"
        ex.tensors[bias] = floats(2, n, seed=n)
        value = values(packed, scale, 32, "ue8m0")
        ex.want[prefix + name] = value if openai else value.transpose(1, 2)
    if openai:
        ex.tensors["block.0.attn.norm.scale"] = f32(1.0, (64,))
        ex.tensors["block.0.mlp.gate.weight"] = floats(2, 64)
        ex.tensors["block.0.attn.sinks"] = floats(4)
    else:
        ex.tensors |= {f"{L}mlp.router.weight": floats(2, 64), f"{L}mlp.router.bias": floats(2), f"{L}self_attn.sinks": floats(4)}
        ex.tensors |= base_tensors()
    return ex


def moe(experts: int = 4, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"), act: bool = True) -> Example:
    """Example E: per-expert ModelOpt tensors, scale_2 = 2^-e."""
    ex = Example(
        base_tensors(), config={**model_config(), "model_type": "qwen3_moe"}, nested=nested_config(exclude=["lm_head", f"{L}mlp.gate"])
    )
    ex.tensors[f"{L}mlp.gate.weight"] = floats(experts, 64)
    for e in range(experts):
        for i, (name, n, k) in enumerate(zip(names, (32, 32, 64), (64, 64, 32), strict=True)):
            add_nvfp4(ex, f"{L}mlp.experts.{e}.{name}", n, k, 2.0**-e, 0.5 if act else None, seed=3 * e + i)
    return ex


def modelopt_fused(bias: bool = True) -> Example:
    """Example F: stacked experts packed along dimension 1."""
    ex = Example(base_tensors(), config=model_config(), nested=nested_config())
    prefix = f"{L}mlp.experts."
    for name, n, k, second in (("gate_up_proj", 128, 64, 0.25), ("down_proj", 64, 64, 0.5)):
        packed = torch.stack([codes(n, k, e) for e in range(2)])
        scale = torch.stack([e4m3_scales(n, k, seed=e).view(torch.uint8) for e in range(2)])
        ex.tensors[prefix + name] = packed.transpose(1, 2).contiguous()
        ex.tensors[f"{prefix}{name}_weight_scale"] = scale.transpose(1, 2).contiguous().view(torch.float8_e4m3fn)
        ex.tensors[f"{prefix}{name}_weight_scale_2"] = f32(second)
        ex.tensors[f"{prefix}{name}_input_scale"] = f32(0.5)
        if bias:
            ex.tensors[f"{prefix}{name}_bias"] = floats(2, n)
        ex.want[prefix + name] = values(packed, scale, 16, second=second).transpose(1, 2)
    return ex


def quark_spec(kind: str, static: bool = False) -> Any:
    """Quark's spec of one tensor."""
    fp8 = {
        "dtype": "fp8_e4m3",
        "qscheme": "per_tensor",
        "is_dynamic": not static,
        "scale_format": None,
        "group_size": None,
        "ch_axis": None,
    }
    if kind == "fp8":
        return fp8
    group, scale = {"mxfp4": (32, "e8m0"), "amdfp4": (16, "e5m3"), "nvfp4": (16, "float32")}[kind]
    spec = {"dtype": "fp4", "qscheme": "per_group", "group_size": group, "ch_axis": -1, "is_dynamic": not static, "scale_format": scale}
    return [spec, {**fp8, "is_scale_quant": True, "is_dynamic": False}] if kind == "nvfp4" else spec


def quark_config(kind: str, act: Any = None, layers: dict[str, Any] | None = None, exclude: list[str] | None = None) -> dict[str, Any]:
    one = {"weight": quark_spec(kind), "input_tensors": act, "output_tensors": None, "bias": None}
    return model_config(
        quant_method="quark",
        version="0.13",
        exclude=["lm_head"] if exclude is None else exclude,
        global_quant_config=one,
        layer_quant_config=layers or {},
        layer_type_quant_config={},
        kv_cache_quant_config={},
        export={"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
    )


def swizzle(scale: torch.Tensor) -> torch.Tensor:
    """u8 flat 128x4 tiles, from the published offset formula, padding zero."""
    m, k = scale.shape
    tiles = -(-k // 4)
    out = np.zeros(-(-m // 128) * 128 * tiles * 4, dtype=np.uint8)
    raw = scale.view(torch.uint8).numpy()
    for r in range(m):
        for c in range(k):
            out[((r // 128) * tiles + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4] = raw[r, c]
    return torch.from_numpy(out)


def torchao(swizzled: bool = True) -> Example:
    """Example H: A's bytes as NVFP4Tensor parts."""
    a = modelopt()
    ex = Example({n: t for n, t in a.tensors.items() if not n.startswith(L) or "layernorm" in n}, a.want, {"model_type": "llama"})
    names = list(ex.tensors)
    ex.metadata = {n: json.dumps({"_type": "Tensor"}) for n in names}
    for name, n, k in LINEARS:
        m, stem = L + name, f"{L}{name}._weight"
        scale = a.tensors[f"{m}.weight_scale"]
        if swizzled:
            shape = (-(-n // 128) * 32, -(-(k // 16) // 4) * 16)
            scale = swizzle(scale).reshape(shape).view(torch.float8_e4m3fn)
        ex.tensors |= {f"{stem}_qdata": a.tensors[f"{m}.weight"], f"{stem}_scale": scale}
        ex.tensors[f"{stem}_per_tensor_scale"] = a.tensors[f"{m}.weight_scale_2"]
        data = {"block_size": 16, "is_swizzled_scales": swizzled, "use_triton_kernel": False, "act_quant_kwargs": None, "orig_dtype": {}}
        parts = ["qdata", "scale", "per_tensor_scale"]
        ex.metadata[f"{m}.weight"] = json.dumps({"_type": "NVFP4Tensor", "_data": data, "_tensor_data_names": parts})
        names.append(f"{m}.weight")
    ex.metadata["tensor_names"] = json.dumps(names)
    return ex


def deepseek() -> Example:
    """Example I."""
    quant = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    ex = Example(config={"model_type": "deepseek_v4", "expert_dtype": "fp4", "quantization_config": quant})
    for e in range(2):
        for i, name in enumerate(("w1", "w2", "w3")):
            m = f"layers.0.ffn.experts.{e}.{name}"
            packed, scale = codes(64, 64, 3 * e + i), e8m0_scales(64, 64, seed=3 * e + i)
            ex.tensors[f"{m}.weight"] = packed.view(torch.int8)
            ex.tensors[f"{m}.scale"] = scale.view(torch.float8_e8m0fnu)
            ex.want[f"{m}.weight"] = values(packed, scale, 32, "ue8m0")
    fp8 = fp8_weight(64, 64)
    ex.tensors["layers.0.attn.wq_a.weight"] = fp8
    ex.tensors["layers.0.attn.wq_a.scale"] = torch.tensor([[125]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    ex.want["layers.0.attn.wq_a.weight"] = fp8.float() * 0.25
    ex.tensors |= {"layers.0.ffn.gate.weight": floats(2, 64), "layers.0.ffn.gate.bias": torch.tensor([0.5, -0.25])}
    return ex


def fp8_weight(n: int, k: int, seed: int = 0) -> torch.Tensor:
    """F8_E4M3 [n, k] without NaN."""
    r, c = np.indices((n, k))
    raw = ((5 * r + 3 * c + seed) % 120).astype(np.uint8) | (((r + c) % 2) << 7).astype(np.uint8)
    return torch.from_numpy(raw).view(torch.float8_e4m3fn)


def kimi() -> Example:
    """Example J: compressed-tensors MXFP4 inside text_config, format only in the group, regex ignores."""
    group = ct_group("mxfp4", act=False, targets=["Linear"])
    ignore = ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*"]
    quant = ct_config([group], ignore)
    del quant["format"]
    ex = Example(config={"model_type": "kimi_k3", "text_config": {"model_type": "kimi_k3", "quantization_config": quant}})
    prefix = "language_model.model.layers.1."
    for e in range(2):
        for i, name in enumerate(("w1", "w2", "w3")):
            m = f"{prefix}block_sparse_moe.experts.{e}.{name}"
            packed, scale = codes(32, 32, 3 * e + i), e8m0_scales(32, 32, seed=3 * e + i)
            ex.tensors |= {f"{m}.weight_packed": packed, f"{m}.weight_scale": scale}
            ex.want[f"{m}.weight"] = values(packed, scale, 32, "ue8m0")
    ex.tensors |= {f"{prefix}self_attn.q_proj.weight": floats(32, 32), f"{prefix}block_sparse_moe.gate.weight": floats(2, 32)}
    ex.tensors |= {
        f"{prefix}block_sparse_moe.shared_experts.gate_proj.weight": floats(32, 32),
        "language_model.lm_head.weight": floats(8, 32),
    }
    return ex


def nemotron() -> Example:
    """Example K: experts without a gate, n = 48."""
    prefix = "backbone.layers.1.mixer."
    ex = Example(config={"model_type": "nemotron_h"}, nested=nested_config(exclude=["lm_head", f"{prefix}gate", f"{prefix}conv1d"]))
    for e in range(2):
        add_nvfp4(ex, f"{prefix}experts.{e}.up_proj", 48, 64, 0.5, 0.5, seed=e)
        add_nvfp4(ex, f"{prefix}experts.{e}.down_proj", 64, 48, 0.25, 0.5, seed=e + 2)
    ex.tensors |= {f"{prefix}gate.weight": floats(2, 64), f"{prefix}conv1d.weight": floats(8, 1, 4), "lm_head.weight": floats(8, 64)}
    return ex


def fastdeploy(up_second: float = 1.0) -> Example:
    """FastDeploy's stacked experts: up_gate_proj_weight [e, 2 i, h / 2] with one second-level scale for gate and one for up."""
    ex = Example(base_tensors(), config=model_config(), nested=nested_config())
    prefix = f"{L}mlp.experts."
    gate, up = 0.25, 0.25 * up_second
    packed = torch.stack([codes(64, 64, e) for e in range(2)])
    scale = torch.stack([e4m3_scales(64, 64, seed=e).view(torch.uint8) for e in range(2)])
    ex.tensors |= {f"{prefix}up_gate_proj_weight": packed, f"{prefix}up_gate_proj_weight_scale": scale.view(torch.float8_e4m3fn)}
    ex.tensors[f"{prefix}up_gate_proj_weight_scale_2"] = torch.tensor([[gate, up], [2 * gate, 2 * up]])
    ex.tensors[f"{prefix}up_gate_proj_input_scale"] = torch.tensor([[0.5, 0.25], [0.5, 1.0]])
    value = values(packed, scale, 16)
    factor = torch.tensor([[gate, up], [2 * gate, 2 * up]]).repeat_interleave(32, 1)
    ex.want[f"{prefix}up_gate_proj_weight"] = value * factor[..., None]
    down = torch.stack([codes(64, 32, e) for e in range(2)])
    scale = torch.stack([e4m3_scales(64, 32, seed=e).view(torch.uint8) for e in range(2)])
    ex.tensors |= {f"{prefix}down_proj_weight": down, f"{prefix}down_proj_weight_scale": scale.view(torch.float8_e4m3fn)}
    ex.tensors |= {
        f"{prefix}down_proj_weight_scale_2": torch.tensor([0.5, 0.25]),
        f"{prefix}down_proj_input_scale": torch.tensor([0.5, 0.25]),
    }
    ex.want[f"{prefix}down_proj_weight"] = values(down, scale, 16) * torch.tensor([0.5, 0.25])[:, None, None]
    return ex
