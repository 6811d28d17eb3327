"""Collects what the presets are tested against from the complete vendor-made files: python tests/data/presets/make.py ORACLES.

``vendor_bytes.npz``: per case ``NAME/x`` (the i of ``x/i``, bf16 bits), ``codes``, ``scale`` (plain order), ``g`` or ``gs``.
``edge_cases.json``: the libraries' answers to ties, signed zero, zero and tiny blocks, and the MX scale byte for 36 block maxima.
``flashinfer_dequant_h200.npz`` is two shapes of the vendor file of that name. ``flashinfer_exact.npz``
was written by FlashInfer 0.7.4's ``batch_invariant`` CPU references from its ``x``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

import fp4

PROJECTIONS = ("self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj")
#: case -> (folder, suffixes of codes, scale, second level, direction)
FILES = {
    "modelopt_nvfp4": ("modelopt/nvfp4", "weight", "weight_scale", "weight_scale_2", "g"),
    "modelopt_mxfp4": ("modelopt/mxfp4", "weight", "weight_scale", None, ""),
    "compressed_tensors_nvfp4": ("compressed_tensors/nvfp4a16", "weight_packed", "weight_scale", "weight_global_scale", "gs"),
    "compressed_tensors_mxfp4": ("compressed_tensors/mxfp4", "weight_packed", "weight_scale", None, ""),
    "quark_nvfp4": ("amd_quark/nvfp4", "weight", "weight_scale", "weight_scale_2", "g"),
    "quark_mxfp4": ("amd_quark/mxfp4", "weight", "weight_scale", None, ""),
    "quark_amdfp4": ("amd_quark/amdfp4", "weight", "weight_scale", None, ""),
    "torchao_nvfp4": ("torchao/nvfp4_weight_only", "_weight_qdata", "_weight_scale", "_weight_per_tensor_scale", "g"),
    "torchao_nvfp4_single": ("torchao/nvfp4_weight_only_single_level", "_weight_qdata", "_weight_scale", None, ""),
    "torchao_mxfp4": ("torchao/mxfp4", "_weight_qdata", "_weight_scale", None, ""),
}


def bits(t: torch.Tensor) -> np.ndarray:
    return t.contiguous().view(torch.int16 if t.dtype == torch.bfloat16 else torch.uint8).numpy()


def collect(root: Path) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    for case, (folder, codes, scale, second, direction) in FILES.items():
        file, original = load_file(root / folder / "model.safetensors"), load_file(root / folder / "original_bf16.safetensors")
        for projection in PROJECTIONS:
            name, key = f"model.layers.0.{projection}", f"{case}/{projection}"
            x = original[f"{name}.weight"]
            stored = file[f"{name}.{scale}"].view(torch.uint8)
            columns = file[f"{name}.{codes}"].shape[1] * 2 // (32 if "mxfp4" in case else 16)
            plain = (
                stored if tuple(stored.shape) == (x.shape[0], columns) else fp4.layouts["sf_128x4"].invert(stored, (x.shape[0], columns))
            )
            out[f"{key}/x"], out[f"{key}/codes"], out[f"{key}/scale"] = bits(x), bits(file[f"{name}.{codes}"]), bits(plain)
            if second:
                out[f"{key}/{direction}"] = file[f"{name}.{second}"].reshape(()).numpy()
    folder = root / "gpt_oss_mxfp4/hf"
    file, original = load_file(folder / "model.safetensors"), load_file(folder / "original_bf16.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    out["triton_kernels_v1/x"] = bits(original[name].transpose(1, 2))
    out["triton_kernels_v1/codes"], out["triton_kernels_v1/scale"] = bits(file[f"{name}_blocks"].flatten(-2)), bits(file[f"{name}_scales"])
    folder = root / "deepseek_v4_style"
    file, original = load_file(folder / "model.safetensors"), load_file(folder / "original_bf16.safetensors")
    name = "layers.0.ffn.experts.1.w1"
    out["deepseek_v4/x"], out["deepseek_v4/codes"] = bits(original[f"{name}.weight"]), bits(file[f"{name}.weight"].view(torch.uint8))
    out["deepseek_v4/scale"] = bits(file[f"{name}.scale"].view(torch.uint8))
    x = load_file(root / "microxcaling/original_bf16.safetensors")
    for mode in ("even", "nearest"):
        values = load_file(root / f"microxcaling/mxfp4_floor_scale_round_{mode}_dequantized.safetensors")
        key = "model.layers.0.mlp.gate_proj.weight"
        out[f"microxcaling_{mode}/x"], out[f"microxcaling_{mode}/values"] = bits(x[key]), values[key].numpy()
    file = load_file(root / "fouroversix/nvfp4_mse/quantized_tensors.safetensors")
    original = load_file(root / "fouroversix/nvfp4_mse/original_bf16.safetensors")
    for projection in PROJECTIONS:
        name, key = f"model.layers.0.{projection}.weight", f"fouroversix/{projection}"
        x = original[name]
        n, k = x.shape
        out[f"{key}/x"], out[f"{key}/amax"] = bits(x), file[f"{name}.amax"].reshape(()).numpy()
        out[f"{key}/codes"] = bits(file[f"{name}.values"].view(torch.uint8)[:n, : k // 2])
        out[f"{key}/scale"] = bits(fp4.layouts["sf_128x4"].invert(file[f"{name}.scale_factors"].view(torch.uint8), (n, k // 16)))
    return out


def shared(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Equal inputs once: ``KEY/x`` becomes the number i of ``x/i``."""
    out: dict[str, np.ndarray] = {}
    seen: dict[bytes, int] = {}
    for key, value in arrays.items():
        if key.endswith("/x"):
            at = seen.setdefault(value.tobytes(), len(seen))
            out[f"x/{at}"], value = value, np.int64(at)
        out[key] = value
    return out


def main() -> None:
    root, here = Path(sys.argv[1]) / "checkpoints", Path(__file__).parent
    np.savez_compressed(here / "vendor_bytes.npz", **shared(collect(root)))
    cases = {p.stem: json.loads(p.read_text()) for p in (root / "edge_cases").glob("*.json") if p.stem != "worked_example"}
    common = {k: cases["modelopt"][k] for k in ("ties_block16", "ties_block32", "amaxes", "nv_rows")}
    answers = {name: case["results"] for name, case in cases.items()}
    (here / "edge_cases.json").write_text(json.dumps({"inputs": common, "answers": answers}))


if __name__ == "__main__":
    main()
