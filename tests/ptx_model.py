"""A model of the few PTX instructions that ``fp4.gpu.kernels.decode`` uses, over numpy lanes."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np

U32 = np.uint32


def _f(bits, half):
    """Packed 16-bit floats -> float64 [lanes, 2]."""
    pair = np.stack([bits & U32(0xFFFF), bits >> U32(16)], -1)
    if half:
        return pair.astype(np.uint16).view(np.float16).astype(np.float64)
    return (pair.astype(np.uint32) << U32(16)).view(np.float32).astype(np.float64)


def _b(values, half):
    """float64 [lanes, 2] -> packed bits; values must be exact in the target type (NaN allowed), or the model refuses."""
    with np.errstate(over="ignore", invalid="ignore"):
        if half:
            bits = values.astype(np.float16).view(np.uint16).astype(U32)
        else:
            bits = values.astype(np.float32).view(U32) >> U32(16)
    packed = bits[..., 0] | (bits[..., 1] << U32(16))
    back = _f(packed, half)
    assert np.array_equal(back, values, equal_nan=True), "a product is not exact in 16 bits"
    return packed


def run(asm: str, inputs: dict[int, np.ndarray], outputs: int, wide: bool = False) -> list[np.ndarray]:
    """Execute the asm; inputs by operand number (u32 words or u16 halves); returns u16 (wide: u32) outputs."""
    regs: dict[str, np.ndarray] = {f"${i}": v.astype(U32) for i, v in inputs.items()}
    lanes = len(next(iter(inputs.values())))

    def val(token):
        token = token.strip()
        if re.fullmatch(r"-?\d+|0x[0-9A-Fa-f]+", token):
            return np.full(lanes, int(token, 0), U32)
        return regs[token]

    body = asm.strip().removeprefix("{").removesuffix("}")
    for line in filter(None, (s.strip() for s in body.split(";"))):
        if line.startswith(".reg"):
            continue
        op, rest = line.split(None, 1)
        if op == "mov.b32" and rest.startswith("{"):
            dst, src = re.fullmatch(r"\{(.*)\},(.*)", rest).groups()
            lo, hi = dst.split(",")
            regs[lo.strip()], regs[hi.strip()] = val(src) & U32(0xFFFF), val(src) >> U32(16)
            continue
        if op == "mov.b32" and "{" in rest:
            dst, src = re.fullmatch(r"(.*?),\{(.*)\}", rest).groups()
            lo, hi = (val(t) for t in src.split(","))
            regs[dst.strip()] = (lo & U32(0xFFFF)) | (hi << U32(16))
            continue
        dst, *args = (t.strip() for t in rest.split(","))
        v = [val(a) for a in args]
        if op == "mov.b32":
            out = v[0]
        elif op == "and.b32":
            out = v[0] & v[1]
        elif op == "or.b32":
            out = v[0] | v[1]
        elif op == "shl.b32":
            out = v[0] << v[1]
        elif op == "shr.b32":
            out = v[0] >> v[1]
        elif op == "add.u32":
            out = v[0] + v[1]
        elif op == "sub.u32":
            out = v[0] - v[1]
        elif op == "mul.lo.u32":
            out = v[0] * v[1]
        elif op == "mad.lo.u32":
            out = v[0] * v[1] + v[2]
        elif op == "prmt.b32":
            both = v[0].astype(np.uint64) | (v[1].astype(np.uint64) << np.uint64(32))
            picks = [v[2].astype(np.uint64) >> np.uint64(4 * i) for i in range(4)]
            assert all(((p & np.uint64(8)) == 0).all() for p in picks), "a selector asks for a sign to be spread"
            parts = [((both >> (np.uint64(8) * (p & np.uint64(7)))) & np.uint64(0xFF)) << np.uint64(8 * i) for i, p in enumerate(picks)]
            out = sum(parts).astype(U32)
        elif op == "cvt.rn.f16x2.e4m3x2":
            pair = np.stack([v[0] & U32(0xFF), v[0] >> U32(8) & U32(0xFF)], -1).astype(np.uint8)
            out = _b(pair.view(ml_dtypes.float8_e4m3fn).astype(np.float64), True)
        elif op == "fma.rn.bf16x2":
            out = _b(_f(v[0], False) * _f(v[1], False) + _f(v[2], False), False)
        elif op == "mul.rn.f16x2":
            out = _b(_f(v[0], True) * _f(v[1], True), True)
        else:
            raise AssertionError(f"unknown instruction {line}")
        regs[dst] = out
    return [regs[f"${i}"].astype(np.uint32 if wide else np.uint16) for i in range(outputs)]


def to_float(bits: np.ndarray, half: bool) -> np.ndarray:
    if half:
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << U32(16)).view(np.float32).astype(np.float64)
