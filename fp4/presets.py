"""The named recipes: what each library chooses, and what the choice was compared with. Data of ``fp4.recipe``."""

from __future__ import annotations

from typing import Any

__all__ = ["COMPARED", "PRESETS"]

#: name -> (what it was compared with, its choices: fields of Recipe that differ from the default)
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {}


def _preset(name: str, proof: str, **choices: Any) -> None:
    PRESETS[name] = proof, choices


# Compared means: on the library's own files or outputs, every code and scale byte equal. Blocks that hold NaN or infinity, and tensors
# of float32 subnormals, were left out unless said: there the libraries contradict themselves. test_presets.py repeats each comparison.
_preset(
    "default",
    "No library: plain rules, stated above. Codes: ml_dtypes and gfloat, all bf16. NVFP4 bytes equal 'te' but for the sign of zero and for "
    "scales that underflow, whose codes are zero here. MX scales: never clip (rceil), as every inference path does.",
)
_preset(
    "te",
    "TransformerEngine's reference quantiser (nvfp4, float32 reciprocal and product). Compared: FlashInfer 0.7.4's exact reference, which "
    "the FlashInfer sources state to be equal, up to the sign of zero; -0.0 -> 0 from the survey of the code.",
    zero_sign="of_value",
    nan_code="zero",
    inf="saturate",
    underflow="saturate",
    global_rule="L/amax",
)
_preset(
    "torchao",
    "torchao 0.18.0: checkpoints nvfp4_weight_only, nvfp4_weight_only_single_level (g = 1) and mxfp4 (RCEIL), all seven weights each; edge "
    "cases: ties, -0.0, zero, 2^-9..2^-11 blocks. FLOOR, CEIL, EVEN: replace(scale_rule='ocp_floor'|'ceil'|'even'), amax table.",
    inf="saturate",
    scale_order="(amax/max)/g",
    encode_order="x*(gs/d)",
    scale_floor=2.0**-6,
    zero_byte=0x08,
)
_preset(
    "modelopt",
    "nvidia-modelopt 0.47.0, NVFP4: checkpoints nvfp4, w4a16_nvfp4, nvfp4_kvfp8, all seven weights each, the file's weight_scale_2; edge "
    "cases: ties, -0.0, zero, 2^-9..2^-11 blocks, 3e38. An all-zero tensor has g = 1 here; the library writes NaN scales (#1633).",
    zero_sign="of_value",
    nan_code="max",
    scale_order="amax/(max*g)",
    encode_order="x/(d*g)",
    scale_floor=2.0**-9,
    zero_byte=0x38,
)
_preset(
    "modelopt_mxfp4",
    "nvidia-modelopt 0.47.0, MXFP4QTensor: checkpoint mxfp4 (seven weights), DeepSeek-V4 style file (six), ties, amax table up to 65504. "
    "Ties toward zero and every exact zero is code 8, unlike its NVFP4.",
    tie="toward_zero",
    zero_sign="negative",
    nan_code="max",
)
_preset(
    "compressed_tensors",
    "llm-compressor 0.14 / compressed-tensors 0.19.0: checkpoints nvfp4a16 and nvfp4 with the file's weight_global_scale as encode_scale, "
    "mxfp4, all seven weights each; default gs equals the file's for the weights that are not fused (bf16); edge cases as for ModelOpt.",
    zero_sign="of_value",
    nan_code="zero",
    scale_rule="even",
    scale_order="(amax/max)*gs",
    encode_order="x/(d/gs)",
    zero_byte=0x20,
    underflow_byte=0x20,
    global_rule="L*(1/amax)",
    scale_dtype="input",
)
_FLASHINFER: dict[str, Any] = {"nan": "ignore", "inf": "saturate", "nan_code": "max", "global_rule": "L/amax"}
_preset(
    "flashinfer",
    "FlashInfer 0.7.4 batch_invariant / exact class (FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1): its own CPU reference, nvfp4 and mxfp4 and "
    "mxfp8, bf16 with ties, zeros, NaN, infinity and five global scales. Pass the global_scale tensor it takes as encode_scale.",
    underflow="saturate",
    **_FLASHINFER,
)
_preset(
    "flashinfer_fast",
    "FlashInfer >= 0.7.4 default (fast math) on SM90's measured rcp.approx: order of operations from the kernel source; 'flashinfer' "
    "itself for power-of-two global scales, within one e4m3 code on <= 2.5% of blocks otherwise. Not yet compared on an SM100 GPU.",
    scale_order="gs*(amax*(1/max))",
    encode_order="x*R(d*R(gs))",
    reciprocal="rcp_approx_sm90",
    ue8m0_zero=True,
    flush=True,
    **_FLASHINFER,
)
_preset(
    "flashinfer_fast_070",
    "FlashInfer <= 0.7.0 default: as flashinfer_fast, but a block whose scale underflows gets codes of magnitude 7 (its scale byte is 0).",
    scale_order="gs*(amax*(1/max))",
    encode_order="x*R(d*R(gs))",
    reciprocal="rcp_approx_sm90",
    underflow="saturate",
    flush=True,
    **_FLASHINFER,
)
_preset(
    "quark",
    "AMD Quark 0.13: checkpoints mxfp4 (even), nvfp4 with the file's weight_scale_2, seven weights each; a value that rounds to "
    "zero is +0.",
    zero_sign="positive",
    nan_code="max",
    scale_rule="even",
    scale_order="amax/(max*g)",
    encode_order="x/(d*g)",
    scale_floor=2.0**-9,
    zero_byte=0x38,
)
_preset(
    "quark_amdfp4",
    "AMD Quark 0.13, AMDFP4: checkpoint amdfp4, all seven weights. Zero blocks are not in the sample: byte 0 assumed.",
    zero_sign="positive",
    nan_code="max",
    scale_order="(amax/max)/g",
    encode_order="x/(d*g)",
)
_preset(
    "fouroversix",
    "fouroversix 1.0.5, rule 'mse' (normaliser 6 * 256): nvfp4_mse sample, all seven weights with their default g. 'mae', 'abs_max': "
    "replace(four_over_six=..), not compared.",
    zero_sign="of_value",
    scale_order="(amax/max)*gs",
    scale_max=256.0,
    global_rule="L/amax",
    four_over_six="mse",
)
_preset(
    "microxcaling",
    "microsoft/microxcaling 7bc4195, default 'nearest': dequantised values of seven weights, ties.",
    tie="away",
    zero_sign="of_value",
    scale_rule="ocp_floor",
)
_preset(
    "microxcaling_even",
    "microsoft/microxcaling 7bc4195, rounding 'even': dequantised values of seven weights, ties.",
    zero_sign="of_value",
    scale_rule="ocp_floor",
)
_TRITON_KERNELS: dict[str, Any] = {"nan": "ignore", "ue8m0_floor": 1, "ue8m0_zero": True, "scale_order": "(amax/max)/g"}
_preset(
    "triton_kernels_v1",
    "triton_kernels as vendored in vLLM 0.33 and GPT-OSS (ROUND_UP, ties away): gpt_oss_mxfp4 checkpoint, both experts' stacks; ties; amax "
    "table. ROUND_DOWN: replace(scale_rule='floor_amax_over_6'), amax table.",
    tie="away",
    **_TRITON_KERNELS,
)
_preset(
    "triton_kernels_v2",
    "triton_kernels of triton 3.5 and later (ties to even): as v1 but for the tie rule. NVFP4 there has no global scale: pass 1.0.",
    **_TRITON_KERNELS,
)
_preset(
    "deepgemm",
    "DeepGEMM's test helper (per_token_cast_to_fp4, ue8m0): rules from the survey of the code, not run.",
    tie="toward_zero",
    zero_sign="positive",
    nan_code="zero",
    amax_floor=1e-4,
)

#: preset -> format -> what was compared. A name with a format's own preset ("modelopt" for MXFP4) means that preset there.
COMPARED: dict[str, dict[str, str]] = {
    "te": {"nvfp4": "bytes up to the sign of zero, by FlashInfer's reference"},
    "torchao": {"nvfp4": "bytes", "mxfp4": "bytes"},
    "modelopt": {"nvfp4": "bytes", "mxfp4": "bytes (modelopt_mxfp4)"},
    "modelopt_mxfp4": {"mxfp4": "bytes"},
    "compressed_tensors": {"nvfp4": "bytes", "mxfp4": "bytes"},
    "flashinfer": {"nvfp4": "bytes", "mxfp4": "bytes", "mxfp8": "bytes"},
    "flashinfer_fast": {"nvfp4": "rules from the kernel source"},
    "flashinfer_fast_070": {"nvfp4": "rules from the kernel source"},
    "quark": {"nvfp4": "bytes", "mxfp4": "bytes", "amdfp4": "bytes (quark_amdfp4)"},
    "quark_amdfp4": {"amdfp4": "bytes"},
    "fouroversix": {"nvfp4": "bytes"},
    "microxcaling": {"mxfp4": "values"},
    "microxcaling_even": {"mxfp4": "values"},
    "triton_kernels_v1": {"mxfp4": "bytes"},
    "triton_kernels_v2": {"mxfp4": "rules; v1 but for the tie"},
    "deepgemm": {"mxfp4": "rules from the code, not run"},
}
