"""fouroversix: rows padded to 128, swizzled scales, and an amax instead of a scale.

The multiplier is amax / (6 * 256) in its adaptive mode and amax / (6 * 448) in its static mode. The file does not say which,
but the block that holds amax does: its scale is 256 or 384 in the first, 448 in the second.
"""

from __future__ import annotations

import math

import torch

from fp4.checkpoint.base import Plan
from fp4.checkpoint.config import Config
from fp4.checkpoint.index import Store
from fp4.checkpoint.record import Record, Rule, unswizzle
from fp4.errors import CheckpointError
from fp4.formats import NVFP4

__all__ = ["FourOverSix"]

#: 6 * 256: largest e2m1 times the largest block scale of the adaptive mode, which leaves room for a scale 1.5 times larger
_FACTOR = 1.0 / (6 * 256)
#: (codes suffix, scale suffix, amax suffix, metadata suffix, suffix of the unquantised name)
_STYLES = (
    (".values", ".scale_factors", ".amax", ".metadata", ""),
    (".quantized_weight_values", ".quantized_weight_scale_factors", ".quantized_weight_amax", ".quantized_weight_metadata", ".weight"),
)


class FourOverSix:
    name = "fouroversix"

    def detect(self, store: Store, config: Config) -> str | None:
        for values, factors, *_ in _STYLES:
            for name in store.entries:
                if name.endswith(factors) and name.removesuffix(factors) + values in store.entries:
                    return f"{values[1:]} and {factors[1:]} are fouroversix's names"
        return None

    def plan(self, plan: Plan) -> None:
        entries = plan.store.entries
        for values, factors, amax, metadata, suffix in _STYLES:
            for name in [n for n in plan.free() if n.endswith(values)]:
                stem = name.removesuffix(values)
                parts = {"codes": name, "scale": stem + factors, "global": stem + amax}
                for other in parts.values():
                    if other not in entries:
                        raise CheckpointError(f"{plan.file(name)}: tensor {name!r}: {other} not found")
                plan.add(self._record(plan, stem + suffix, parts), used=[stem + metadata] if stem + metadata in entries else [])

    @staticmethod
    def _record(plan: Plan, name: str, parts: dict[str, str]) -> Record:
        entries = plan.store.entries
        codes, scale, amax = (entries[parts[r]] for r in ("codes", "scale", "global"))
        where = f"{plan.file(codes.name)}: tensor {name!r}"
        if codes.dtype not in ("U8", "I8", "F4") or len(codes.byte_shape) != 2:
            raise CheckpointError(f"{where}: {codes.name} is {codes.dtype} {list(codes.shape)}; need U8 [n, k / 2]")
        rows, k = codes.byte_shape[0], 2 * codes.byte_shape[1]
        if rows % 128 or k % 64 or scale.dtype != "F8_E4M3" or math.prod(scale.shape) != rows * (k // 16):
            raise CheckpointError(
                f"{where}: codes {list(codes.shape)} and scales {scale.dtype} {list(scale.shape)}; need rows padded to 128, k to 64 and "
                f"{rows * (k // 16)} F8_E4M3 scales in 128x4 tiles"
            )
        if amax.dtype not in ("F32", "BF16", "F16") or math.prod(amax.shape) != 1:
            raise CheckpointError(f"{where}: {amax.name} is {amax.dtype} {list(amax.shape)}; need one F32 value")
        n = _real_rows(plan, codes.name, scale.name, rows, k)
        if n < rows:
            plan.once("fouroversix-rows", f"{name}: rows {n} to {rows - 1} (and so on) have zero codes and scales; read as padding to 128")
        logical = (n, k)
        return Record(
            name=name,
            kind="block",
            parts=parts,
            shape=logical,
            logical=logical,
            format=NVFP4,
            scale_order="sf_128x4",
            global_rule=Rule(factor=_FACTOR, over_448=_FACTOR * 256 / 448),
            origin="the tensor names",
        )


def _real_rows(plan: Plan, codes: str, scale: str, rows: int, k: int) -> int:
    """Rows before the padding of the last 128: the file does not say, but padding alone has zero codes under zero scales."""
    start = rows - 128
    tail = plan.store.bytes(codes).reshape(rows, k // 2)[start:].ne(0).any(-1)
    tail |= unswizzle(plan.store.bytes(scale), (rows, k // 16))[start:].ne(0).any(-1)
    used = torch.nonzero(tail)
    return start + (int(used[-1]) + 1 if used.numel() else 128)
