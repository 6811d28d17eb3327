# mypy: ignore-errors
"""Routing on the device: a stable sort of (token, slot) pairs by expert, and the list of row blocks of a grouped product.

One launch of one program per local expert. Every program counts all pairs itself (a histogram of its own), so that it knows where its
expert starts without talking to another program: no global atomics, no second launch, no host synchronisation, and the same bytes
from run to run. The ids are read from L2 once per expert, which is cheap up to 64k pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp4.gpu.kernels.pdl import trigger, wait

__all__ = ["max_blocks", "reduce_kernel", "route_kernel", "route_reference"]


def max_blocks(pairs: int, experts: int, block: int) -> int:
    """Upper bound of ``sum_e ceil(count_e / block)`` over all ways to spread ``pairs`` over ``experts``; the fixed grid of a graph.

    Each of at most ``min(experts, pairs)`` experts in use adds less than one block to ``pairs / block``.
    """
    used = min(experts, pairs)
    return max(min(pairs, (pairs - used) // block + used), 1)


@triton.jit(do_not_specialize=["pairs", "first", "experts"], do_not_specialize_on_alignment=["ids_ptr"])
def route_kernel(
    ids_ptr,
    order_ptr,
    sched_ptr,
    pairs,
    first,
    experts,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    LIGHT: tl.constexpr = 0,
    PDL: tl.constexpr = False,
):
    """ids int [pairs] -> order i32 [pairs], sched i32 [1 + 3 * max_blocks].

    order: the local pairs, by expert and then by pair number; entries past the last local pair are not written.
    sched[0]: number of blocks; then for block b ``sched[1 + 3 b ..] = expert, first sorted row, rows`` with rows <= BLOCK. Blocks of one
    expert follow each other, those of experts with more than LIGHT rows come first: programs that take blocks in turn then differ by
    at most one block of each kind.
    A pair is local when ``first <= id < first + experts``. BINS: a power of two > experts. Grid: (experts,).
    """
    trigger(PDL)
    e = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    bins = tl.arange(0, BINS)
    hist = tl.zeros([BINS], tl.int32)
    for c in range(0, pairs, CHUNK):
        idx = c + lane
        raw = tl.load(ids_ptr + idx, mask=idx < pairs, other=-1)
        local = (raw >= first) & (raw < first + experts)  # compared in the ids' own width: a 64-bit id must not wrap into range
        hist += tl.histogram(tl.where(local, (raw - first).to(tl.int32), experts), BINS)
    hist = tl.where(bins < experts, hist, 0)
    before = bins < e
    start = tl.sum(tl.where(before, hist, 0), 0)
    count = tl.sum(tl.where(bins == e, hist, 0), 0)
    blocks = (hist + BLOCK - 1) // BLOCK
    ahead = before
    if LIGHT > 0:
        heavy = hist > LIGHT
        ahead = (before & (heavy == (count > LIGHT))) | (heavy & (count <= LIGHT))
    base = tl.sum(tl.where(ahead, blocks, 0), 0)
    if e == 0:
        tl.store(sched_ptr, tl.sum(blocks, 0))
    mine = (count + BLOCK - 1) // BLOCK
    for b in range(0, mine, 128):
        j = b + tl.arange(0, 128)
        p = sched_ptr + 1 + 3 * (base + j)
        m = j < mine
        tl.store(p, tl.zeros([128], tl.int32) + e, mask=m)
        tl.store(p + 1, start + j * BLOCK, mask=m)
        tl.store(p + 2, tl.minimum(count - j * BLOCK, BLOCK), mask=m)
    if count > 0:
        done = start
        for c in range(0, pairs, CHUNK):
            idx = c + lane
            raw = tl.load(ids_ptr + idx, mask=idx < pairs, other=-1)
            hit = (idx < pairs) & (raw == first + e)
            rank = tl.cumsum(hit.to(tl.int32), 0)
            tl.store(order_ptr + done + rank - 1, idx, mask=hit)
            done += tl.max(rank, 0)


@triton.jit(do_not_specialize=["first", "experts"], do_not_specialize_on_alignment=["ids_ptr"])
def reduce_kernel(
    y_ptr, ids_ptr, out_ptr, first, experts, H: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False
):
    """out [tokens, H] = fp32 sum over the slots, in slot order, of the rows y [tokens * TOPK, H] whose id is local; others are not read.

    Grid: (tokens, ceil(H / BLOCK)).
    """
    wait(PDL)
    t = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOPK):
        raw = tl.load(ids_ptr + t * TOPK + j)
        width = tl.where((raw >= first) & (raw < first + experts), H, 0)
        acc += tl.load(y_ptr + (t * TOPK + j) * H + col, mask=col < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * H + col, acc.to(out_ptr.dtype.element_ty), mask=col < H)


def route_reference(
    ids: torch.Tensor, first: int, experts: int, block: int, light: int = 0
) -> tuple[torch.Tensor, list[tuple[int, int, int]]]:
    """What ``route_kernel`` writes, in torch: (order of the local pairs, list of (expert, first row, rows))."""
    flat = ids.reshape(-1).long() - first
    local = (flat >= 0) & (flat < experts)
    key = torch.where(local, flat, experts)
    order = torch.argsort(key, stable=True)[: int(local.sum())].int()
    row, each = 0, []
    for e, n in enumerate(torch.bincount(key, minlength=experts + 1)[:experts].tolist()):
        each.append((n <= light, [(e, row + i, min(block, n - i)) for i in range(0, n, block)]))
        row += n
    return order, [b for last in (False, True) for is_light, blocks in each if is_light == last for b in blocks]
