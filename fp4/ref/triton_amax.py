"""Largest finite magnitude of a tensor in one pass of a Triton kernel: what the default global scale is made of."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp4.ref.triton_codes import bits_of
from fp4.ref.triton_pairs import magnitudes

__all__ = ["finite_amax"]

#: 32-bit words a step, steps a program: 16 bytes a thread and step with four warps
STEP, STEPS = 2048, 4


@triton.jit(do_not_specialize=["programs"])
def _amax_kernel(x_ptr, out_ptr, items, programs, PAIRS: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr):
    """x [experts, items] (pairs of bf16 in words, f16 or f32) -> out i32 [experts], the bits of the largest finite magnitude.

    Adding 2^23 to the bits of a magnitude makes infinity and NaN negative and keeps the order of all others: one signed maximum.
    The maximum does not depend on the order of programs, so neither do the bits of the result.
    """
    expert = tl.program_id(0) // programs
    base = expert.to(tl.int64) * items
    first = (tl.program_id(0) % programs).to(tl.int64) * (STEP * STEPS)
    best = tl.full([STEP], 0x00800000, tl.int32)
    for i in tl.static_range(STEPS):
        at = first + i * STEP + tl.arange(0, STEP)
        x = tl.load(x_ptr + base + at, mask=at < items, other=0)
        if PAIRS:
            even, odd = magnitudes(x)
            best = tl.maximum(best, tl.maximum(even + 0x00800000, odd + 0x00800000))
        else:
            best = tl.maximum(best, (bits_of(x.to(tl.float32)) & 0x7FFFFFFF) + 0x00800000)
    tl.atomic_max(out_ptr + expert, tl.max(best, 0) - 0x00800000)


def _dense(x: torch.Tensor, keep: int) -> torch.Tensor:
    """x flat, dimensions from ``keep`` on in the order of memory, which a maximum does not mind; a copy only where memory has gaps."""
    order = sorted(range(keep, x.ndim), key=lambda d: -x.stride()[d])
    y = x.permute(*range(keep), *order) if x.ndim else x
    return (y if y.is_contiguous() else x.contiguous()).view(-1)


def finite_amax(x: torch.Tensor, per_expert: bool = False) -> torch.Tensor:
    """Largest finite |x|, f32 [], or f32 [x.shape[0]] of each x[e]; 0 where there is none. x: f32, bf16 or f16 of any shape and strides."""
    experts = x.shape[0] if per_expert else 1
    out = torch.zeros(experts, dtype=torch.int32, device=x.device)
    if x.numel():
        flat = _dense(x, int(per_expert))
        pairs = x.dtype == torch.bfloat16 and (flat.numel() // experts) % 2 == 0 and flat.data_ptr() % 4 == 0
        if x.dtype == torch.bfloat16:
            flat = flat.view(torch.int32) if pairs else flat.to(torch.float32)
        items = flat.numel() // experts
        programs = triton.cdiv(items, STEP * STEPS)
        _amax_kernel[(programs * experts,)](flat, out, items, programs, PAIRS=pairs, STEP=STEP, STEPS=STEPS, num_warps=4)
    amax = out.view(torch.float32)
    return amax if per_expert else amax.reshape(())
