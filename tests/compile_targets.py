"""Compiles our Triton kernels for one architecture without a GPU: ``python compile_targets.py 90``. One JSON line a kernel.

Runs in a process of its own because Triton's interpreter, which the other tests turn on, is chosen when a kernel is decorated.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from sass import disassemble, early_loads, straight_length
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fp4 import layouts, recipe
from fp4.formats import MXFP4, MXFP8, NVFP4, NVFP4_B32
from fp4.gpu.kernels import permute
from fp4.gpu.kernels.act_quantize import act_and_quantize
from fp4.gpu.kernels.block_scaled import block_scaled
from fp4.ref import triton_amax, triton_quantize
from fp4.ref.activation import SwiGLU
from fp4.ref.triton_matmul import _product

ARCH = int(sys.argv[1])
WORDS = ("tcgen05.mma", "block_scale", "mma.sync", "wgmma.mma_async", "kind::mxf4nvf4", "kind::mxf4")


def compile(fn: Any, types: dict[str, str], constants: dict[str, Any], **options: Any) -> Any:
    """``types``: name -> Triton type of every run-time argument. Pointers and strides are taken as aligned to 16."""
    names = list(fn.arg_names)
    signature = {n: types.get(n, "constexpr") for n in names}
    values = {(names.index(n),): v for n, v in constants.items()}
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n, t in types.items() if t.startswith("*") or n in ("K", "N")}
    return triton.compile(ASTSource(fn, signature, values, aligned), target=GPUTarget("cuda", ARCH, 32), options=options)


def product(x: str, scale: str, block: int, grouped: bool, dot: Any) -> Any:
    types = {
        "x": x, "codes": "*u8", "scale": "*u8", "global_scale": "*fp32", "bias": "*fp32", "y": "*fp32", "order": "*i32",
        "tile_expert": "*i32", "tile_row": "*i32", "segment_end": "*i32", "M": "i32", "N": "i32", "K": "i32", "x_row": "i32",
        "x_col": "i32",
    }  # fmt: skip
    constants = {
        "GROUPED": grouped, "GATHER": 4 if grouped else 0, "SCATTER": grouped, "HAS_BIAS": True, "SCALE": scale, "BLOCK": block, "DOT": dot,
        "BM": 64, "BN": 64, "BB": 32,
    }  # fmt: skip
    return compile(_product, types, constants)


def scaled(block: int) -> Any:
    scale = "*fp8e4nv" if block == 16 else "*u8"
    types = {
        "x_ptr": "*u8", "xs_ptr": scale, "w_ptr": "*u8", "ws_ptr": scale, "alpha_ptr": "*fp32", "bias_ptr": "*bf16", "y_ptr": "*bf16",
        "M": "i32", "N": "i32", "K": "i32",
    }  # fmt: skip
    return compile(block_scaled, types, {"BLOCK": block, "HAS_BIAS": True, "BM": 128, "BN": 128, "BK": 128}, num_warps=4)


class _Driver:
    """An active device that is not there: what a launch asks of the driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", ARCH, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def launched(host: Any) -> Any:
    """The kernel that ``host()`` would launch, compiled: its launches become warm-ups, so CPU tensors do."""
    kernels: list[Any] = []
    run = JITFunction.run

    def warm(self: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        kernels.append(kernel.result() if hasattr(kernel, "result") else kernel)
        return kernels[-1]

    driver.set_active(_Driver())
    JITFunction.run = warm
    try:
        host()
    finally:
        JITFunction.run = run
    assert len(kernels) == 1, f"one launch, got {len(kernels)}"
    return kernels[0]


def quantize(fmt: Any, dtype: torch.dtype, preset: str = "default", layout: str = "", chained: bool = False) -> Any:
    x = torch.zeros((256, 8192), dtype=dtype)
    how, order = recipe.get(preset, fmt.name), layouts.get(layout) if layout else None
    g = torch.ones(()) if fmt.tensor_scale else None
    return launched(lambda: triton_quantize.quantize_blocks(x, fmt, how, g, g, order, chained=chained))


def act(fmt: Any, order: str, activation: Any) -> Any:
    h, g = torch.zeros((256, 8192), dtype=torch.bfloat16), torch.ones(()) if fmt.tensor_scale else None
    return launched(lambda: act_and_quantize(h, activation, order, fmt, recipe.get("default", fmt.name), g))


def amax(dtype: torch.dtype) -> Any:
    return launched(lambda: triton_amax.finite_amax(torch.zeros((256, 512), dtype=dtype)))


def dequantize(fmt: Any) -> Any:
    codes, scale = torch.zeros((256, 256), dtype=torch.uint8), torch.zeros((256, 512 // fmt.block), dtype=torch.uint8)
    g = torch.ones(()) if fmt.tensor_scale else None
    return launched(lambda: triton_quantize.dequantize_blocks(codes, scale, g, fmt, torch.bfloat16))


def permuted(name: str, inverse: bool = False) -> Any:
    layout, shape = layouts.get(name), (256, 512)
    if inverse:
        return launched(lambda: permute.invert(layout, torch.zeros(layout.nbytes(shape), dtype=torch.uint8), shape))
    return launched(lambda: permute.apply(layout, torch.zeros(shape, dtype=torch.uint8)))


CASES: dict[str, Any] = {
    "quantize nvfp4 bf16": lambda: quantize(NVFP4, torch.bfloat16),
    "quantize nvfp4 bf16 to sf_128x4": lambda: quantize(NVFP4, torch.bfloat16, layout="sf_128x4"),
    "quantize nvfp4 bf16 te": lambda: quantize(NVFP4, torch.bfloat16, "te"),
    "quantize nvfp4 bf16 flashinfer": lambda: quantize(NVFP4, torch.bfloat16, "flashinfer"),
    "quantize nvfp4 bf16 behind its amax": lambda: quantize(NVFP4, torch.bfloat16, chained=True),
    "quantize mxfp4 bf16": lambda: quantize(MXFP4, torch.bfloat16),
    "quantize mxfp4 bf16 to sf_128x4": lambda: quantize(MXFP4, torch.bfloat16, layout="sf_128x4"),
    "quantize mxfp8 bf16": lambda: quantize(MXFP8, torch.bfloat16),
    "act nvfp4 gate_up silu": lambda: act(NVFP4, "gate_up", "silu"),
    "act nvfp4 gate_up swiglu": lambda: act(NVFP4, "gate_up", "swiglu_oai"),
    "act nvfp4 interleaved swiglu": lambda: act(NVFP4, "interleaved", "swiglu_oai"),
    "act mxfp4 interleaved swiglu": lambda: act(MXFP4, "interleaved", "swiglu_oai"),
    "act mxfp8 interleaved swiglu": lambda: act(MXFP8, "interleaved", "swiglu_oai"),
    "act nvfp4_b32 gate_up silu": lambda: act(NVFP4_B32, "gate_up", "silu"),
    "act mxfp4 interleaved silu": lambda: act(MXFP4, "interleaved", "silu"),
    "act mxfp8 gate_up swiglu": lambda: act(MXFP8, "gate_up", "swiglu_oai"),
    "act nvfp4 interleaved swiglu unlimited": lambda: act(NVFP4, "interleaved", SwiGLU(limit=None)),
    "act nvfp4 interleaved swiglu 0.3": lambda: act(NVFP4, "interleaved", SwiGLU(limit=0.3)),
    "amax bf16": lambda: amax(torch.bfloat16),
    "amax fp32": lambda: amax(torch.float32),
    "quantize nvfp4 fp16": lambda: quantize(NVFP4, torch.float16),
    "quantize mxfp4 fp16": lambda: quantize(MXFP4, torch.float16),
    "quantize mxfp4 ties toward zero": lambda: quantize(MXFP4, torch.float16, "modelopt"),
    "quantize nvfp4 four-over-six": lambda: quantize(NVFP4, torch.bfloat16, "fouroversix"),
    "quantize nvfp4 approximate reciprocal": lambda: quantize(NVFP4, torch.bfloat16, "flashinfer_fast"),
    "dequantize nvfp4": lambda: dequantize(NVFP4),
    "permute sf_128x4": lambda: permuted("sf_128x4"),
    "permute hopper_value_v3": lambda: permuted("hopper_value_v3"),
    "permute back sf_128x4": lambda: permuted("sf_128x4", inverse=True),
    "permute back hopper_value_v3": lambda: permuted("hopper_value_v3", inverse=True),
    "permute marlin_w": lambda: permuted("marlin_w"),
    "permute back cpu_amx_w": lambda: permuted("cpu_amx_w", inverse=True),
    "plain dense bf16 nvfp4": lambda: product("*bf16", "e4m3", 16, False, triton.language.bfloat16),
    "plain grouped bf16 mxfp4": lambda: product("*bf16", "ue8m0", 32, True, triton.language.bfloat16),
    "plain dense fp32 amdfp4": lambda: product("*fp32", "ue5m3", 16, False, triton.language.float32),
}
if ARCH in (100, 120):
    CASES |= {"block scaled nvfp4": lambda: scaled(16), "block scaled mxfp4": lambda: scaled(32)}

for name, build in CASES.items():
    try:
        kernel = build()
        ptx = kernel.asm["ptx"]
        found = {"cubin": len(kernel.asm["cubin"]), "words": [w for w in WORDS if w in ptx], "shared": kernel.metadata.shared}
        if ARCH == 90 and name.startswith(("quantize", "act", "permute")):
            code = disassemble(kernel.asm["cubin"])
            found |= {"instructions": straight_length(code), "early": early_loads(code)}
    except Exception as e:
        found = {"error": f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"}
    print(json.dumps({"case": name, **found}), flush=True)
