"""A few PTX instructions on numpy, so that kernels with inline assembly run in Triton's interpreter. Only what triton_kernels uses."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

_U32 = np.uint32


def to_float(v: np.ndarray) -> np.ndarray:
    return (v.astype(_U32) << _U32(16)).view(np.float32)


def round_bf16(v: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(v, dtype=np.float32).view(_U32)
    rounded = (bits + _U32(0x7FFF) + ((bits >> _U32(16)) & _U32(1))) >> _U32(16)
    return np.where(np.isnan(v), _U32(0x7FC0), rounded).astype(_U32)


def _packed_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """bf16x2 multiply: each half on its own."""
    with np.errstate(all="ignore"):
        halves = [round_bf16(to_float((a >> s) & _U32(0xFFFF)) * to_float((b >> s) & _U32(0xFFFF))) for s in (_U32(0), _U32(16))]
    return halves[0] | (halves[1] << _U32(16))


def _prmt(a: np.ndarray, b: np.ndarray, selector: int) -> np.ndarray:
    source = np.stack([*((a >> _U32(8 * i)) & _U32(255) for i in range(4)), *((b >> _U32(8 * i)) & _U32(255) for i in range(4))])
    out = np.zeros_like(a)
    for i in range(4):
        out |= source[(selector >> (4 * i)) & 7] << _U32(8 * i)
    return out


def run(asm: str, registers: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Execute ``asm`` on u32 registers named "$0", "$1" ..."""
    regs = dict(registers)
    some = next(iter(registers.values()))
    text = re.sub(r"//[^\n]*", "", asm).replace("{", " ").replace("}", " ")
    for statement in (s.strip() for s in text.split(";")):
        if not statement or statement.startswith(".reg"):
            continue
        op, rest = statement.split(None, 1)
        dst, *src = [a.strip() for a in rest.split(",")]
        values = [regs[a] if a in regs else np.full_like(some, int(a, 0)) for a in src]
        if op.startswith("mov"):
            out = values[0]
        elif op.startswith("and"):
            out = values[0] & values[1]
        elif op.startswith("or"):
            out = values[0] | values[1]
        elif op.startswith("shl"):
            out = values[0] << values[1]
        elif op.startswith("shr"):
            out = values[0] >> values[1]
        elif op.startswith("prmt"):
            out = _prmt(values[0], values[1], int(values[2].flat[0]))
        elif op in ("mul.bf16x2", "fma.rn.bf16x2"):
            out = _packed_product(values[0], values[1])
        elif op == "ex2.approx.ftz.f32":
            with np.errstate(all="ignore"):
                out = np.exp2(values[0].view(np.float32)).astype(np.float32).view(_U32)
        else:
            raise NotImplementedError(f"PTX {op}")
        regs[dst] = out
    return regs


def inline_asm_elementwise(asm: Any, constraints: Any, args: Any, dtype: Any, is_pure: bool = True, pack: int = 1, **_: Any) -> Any:
    """Stands in for ``tl.inline_asm_elementwise``: consecutive elements of the last axis share a register."""
    asm, constraints, pack = (getattr(v, "value", v) for v in (asm, constraints, pack))
    many = isinstance(dtype, (tuple, list))
    dtypes = list(dtype) if many else [dtype]
    shape = args[0].shape
    shape = tuple(int(getattr(s, "value", s)) for s in shape)
    outputs = sum(c.strip().startswith("=") for c in constraints.split(","))
    registers: dict[str, np.ndarray] = {}
    at = outputs
    for a in args:
        data = np.ascontiguousarray(np.broadcast_to(a.handle.data, shape))
        words = data.reshape(-1, pack).view(_U32) if data.dtype.itemsize * pack >= 4 else data.reshape(-1, pack).astype(_U32)
        for i in range(words.shape[1]):
            registers[f"${at}"] = np.ascontiguousarray(words[:, i])
            at += 1
    regs = run(asm, registers)
    result, at = [], 0
    for d in dtypes:
        numpy_type = {16: np.uint16, 32: np.float32 if d == tl.float32 else np.int32, 8: np.uint8}[d.primitive_bitwidth]
        count = max(1, d.primitive_bitwidth * pack // 32)
        words = np.stack([regs[f"${at + i}"] for i in range(count)], -1)
        at += count
        data = np.ascontiguousarray(words).view(numpy_type).reshape(shape)
        result.append(tl.tensor(TensorHandle(data, d), tl.block_type(d, list(shape))))
    return tuple(result) if many else result[0]
