"""Largest finite magnitude of a tensor in one pass of a Triton kernel, and the default global scale that comes of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp4.recipe import Recipe
from fp4.ref.triton_chain import launched, overlaps, trigger, wait
from fp4.ref.triton_codes import bits_of
from fp4.ref.triton_pairs import magnitudes
from fp4.ref.triton_scales import encode_of, step_of

__all__ = ["finite_amax", "global_scale"]

#: 32-bit words a step, steps and warps a program: 16 bytes a load of a thread
STEP, STEPS, WARPS = 2048, 4, 4


@triton.jit
def _larger(best, x, PAIRS: tl.constexpr, F16: tl.constexpr, HALVES: tl.constexpr):
    """What ``_end`` ends: magnitudes so changed that infinity and NaN are below all others, whose order stays.

    Adding 2^23 to the bits of an f32 magnitude makes infinity and NaN negative: one signed maximum. HALVES: the same in both halves of a
    word (SM90): 2^7 for bf16, 2^10 for f16.
    """
    if HALVES:
        ASM: tl.constexpr = """{
            .reg .b32 m, one;
            mov.b32 one, $3;
            and.b32 m, $2, 0x7FFF7FFF;
            add.s16x2 m, m, one;
            max.s16x2 $0, $1, m;
        }"""
        BIAS: tl.constexpr = 0x04000400 if F16 else 0x00800080
        best = tl.inline_asm_elementwise(ASM, "=r,r,r,r", [best, x, BIAS], dtype=tl.int32, is_pure=True, pack=1)
    elif PAIRS:
        even, odd = magnitudes(x, False, F16)
        best = tl.maximum(best, tl.maximum(even + 0x00800000, odd + 0x00800000))
    else:
        best = tl.maximum(best, (bits_of(x.to(tl.float32)) & 0x7FFFFFFF) + 0x00800000)
    return best


@triton.jit
def _end(best, F16: tl.constexpr, HALVES: tl.constexpr):
    """-> bits of the largest magnitude as f32."""
    if HALVES:
        top = tl.max(tl.maximum(best >> 16, (best << 16) >> 16), 0)
        if F16:
            bits = bits_of((top - 0x0400).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32))
        else:
            bits = (top - 0x0080) << 16
    else:
        bits = tl.max(best, 0) - 0x00800000
    return bits


@triton.jit(do_not_specialize=["programs"])
def _amax_kernel(
    x_ptr, out_ptr, items, programs,
    PAIRS: tl.constexpr, F16: tl.constexpr, HALVES: tl.constexpr, PDL: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """x [experts, items] (pairs of bf16 or f16 in words, or f32) -> out i32 [experts], zero before: bits of the largest finite magnitude.

    The maximum does not depend on the order of programs, so neither do the bits of the result. The order is from the end of x to its
    start: what wrote x left its end in the cache, and what reads x next finds its start there.
    """
    at = tl.num_programs(0) - 1 - tl.program_id(0)
    expert = at // programs
    first = (at - expert * programs).to(tl.int64) * (STEP * STEPS)
    start = x_ptr + expert.to(tl.int64) * items + first
    BIAS: tl.constexpr = (0x04000400 if F16 else 0x00800080) if HALVES else 0x00800000
    best = tl.full([STEP], BIAS, tl.int32)
    if first + STEP * STEPS <= items:
        for i in tl.static_range(STEPS):
            best = _larger(best, tl.load(start + i * STEP + tl.arange(0, STEP)), PAIRS, F16, HALVES)
    else:
        for i in tl.static_range(STEPS):
            place = i * STEP + tl.arange(0, STEP)
            best = _larger(best, tl.load(start + place, mask=first + place < items, other=0), PAIRS, F16, HALVES)
    trigger(PDL)
    bits = _end(best, F16, HALVES)
    wait(PDL)  # for the zeros; x was there before them
    tl.atomic_max(out_ptr + expert, bits, sem="relaxed")


def _dense(x: torch.Tensor, keep: int) -> torch.Tensor:
    """x flat, dimensions from ``keep`` on in the order of memory, which a maximum does not mind; a copy only where memory has gaps."""
    order = sorted(range(keep, x.ndim), key=lambda d: -x.stride()[d])
    y = x.permute(*range(keep), *order) if x.ndim else x
    return (y if y.is_contiguous() else x.contiguous()).view(-1)


def finite_amax(x: torch.Tensor, per_expert: bool = False) -> torch.Tensor:
    """Largest finite |x|, f32 [], or f32 [x.shape[0]] of each x[e]; 0 where there is none. x: f32, bf16 or f16 of any shape and strides."""
    experts = x.shape[0] if per_expert else 1
    if not x.numel():
        return torch.zeros(x.shape[:1] if per_expert else (), dtype=torch.float32, device=x.device)
    flat = _dense(x, int(per_expert))
    pairs = x.dtype != torch.float32 and (flat.numel() // experts) % 2 == 0 and flat.data_ptr() % 4 == 0
    if pairs or x.dtype == torch.bfloat16:
        flat = flat.view(torch.int32) if pairs else flat.to(torch.float32)
    items = flat.numel() // experts
    programs = triton.cdiv(items, STEP * STEPS)
    out = torch.zeros(experts, dtype=torch.int32, device=x.device)  # last: the kernel may start beside it, but not beside a copy of x
    sm90 = overlaps(x.device)
    _amax_kernel[(programs * experts,)](
        flat, out, items, programs, PAIRS=pairs, F16=x.dtype == torch.float16, HALVES=pairs and sm90, PDL=sm90,
        STEP=STEP, STEPS=STEPS, num_warps=WARPS, **launched(sm90),
    )  # fmt: skip
    amax = out.view(torch.float32)
    return amax if per_expert else amax.reshape(())


@triton.jit(do_not_specialize=["n"])
def _scale_kernel(
    amax_ptr, g_ptr, gs_ptr, n,
    RULE: tl.constexpr, LIMIT: tl.constexpr, FLOOR: tl.constexpr, ZERO: tl.constexpr, RCP_ZERO: tl.constexpr, ROUND: tl.constexpr,
    N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``scales.default_global_scale``, step by step. RULE in the order of ``CHOICES["global_rule"]``: amax/L, L/amax, rcp(amax)*L."""
    i = tl.program_id(0) * N + tl.arange(0, N)
    trigger(PDL)
    wait(PDL)
    amax = tl.load(amax_ptr + i, mask=i < n, other=0.0)
    limit = tl.full([N], LIMIT, tl.float32)
    if RULE == 0:
        g = tl.div_rn(amax, limit)
        g = tl.where(g < FLOOR, FLOOR, g)
        g = tl.where(amax == 0, ZERO, g)
        gs = encode_of(g)
    else:
        if RULE == 1:
            gs = step_of(tl.div_rn(limit, amax), ROUND)
        else:
            gs = step_of(step_of(tl.div_rn(1.0, amax), ROUND) * limit, ROUND)
        gs = tl.where(gs > 3.4028234663852886e38, 3.4028234663852886e38, gs)
        gs = tl.where(amax == 0, RCP_ZERO, gs)
        g = tl.div_rn(1.0, gs)
    tl.store(g_ptr + i, g, mask=i < n)
    tl.store(gs_ptr + i, gs, mask=i < n)


def global_scale(amax: torch.Tensor, recipe: Recipe, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``scales.default_global_scale`` in one launch instead of seven: amax f32 [...] -> (g, gs), equal bits."""
    g, gs = torch.empty_like(amax), torch.empty_like(amax)
    if amax.numel():
        rounded, sm90 = recipe.scale_dtype == "input", overlaps(amax.device)
        _scale_kernel[(triton.cdiv(amax.numel(), 32),)](
            amax, g, gs, amax.numel(),
            RULE=recipe.code("global_rule"), LIMIT=6.0 * recipe.scale_max, FLOOR=recipe.global_floor, ZERO=recipe.global_zero,
            RCP_ZERO=1.0 / recipe.global_zero, ROUND={torch.bfloat16: 1, torch.float16: 2}.get(dtype, 0) if rounded else 0,
            N=32, PDL=sm90, num_warps=1, **launched(sm90),
        )  # fmt: skip
    return g, gs
