"""One Triton kernel that stores or reads back any layout of the catalogue: bytes, nibbles and word tables.

A program moves one tile: all fixed axes of the layout times a chunk of each free axis. It reads the tile in logical order (rows of
contiguous bytes), reorders it in registers and shared memory, and writes it in storage order (runs of contiguous bytes), so that both
sides are coalesced. Where the layout keeps up to 8 neighbouring bytes together, they move as one item. The free extents are run-time
arguments: one binary for each layout and alignment class (largest power of two, up to 16, that divides the row length), two where large
tensors want longer runs, not one a shape. Index arithmetic is 64-bit between tiles and, from 2^31 bytes on, inside them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from fp4.errors import LayoutError
from fp4.gpu.kernels.permute_plan import RANK, plan, whole_rows, words
from fp4.layout import Layout

__all__ = ["Launch", "apply", "arguments", "can", "invert"]

_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: bytes moved by one program, and its warps; with a map of the bits inside a word the arithmetic is the limit, and a warp of its own waits
#: for no other. Measured by benchmarks/permute.py
TILE_BYTES, WARPS = 8192, 4
WORD_TILE_BYTES, WORD_WARPS = 2048, 1
#: from here on columns that are stored apart are far enough to be written in longer runs; 64 and 256 MiB were measured
FAR_BYTES = 128 << 20


@triton.jit
def _row_index(base, RO, wide: tl.constexpr, ROWS: tl.constexpr, PLAIN: tl.constexpr, N: tl.constexpr):
    """Logical rows of the tile, and which of them exist in the free axis."""
    local = tl.arange(0, N)
    if wide:
        local = local.to(tl.int64)
    ok = local >= 0
    row = local * 0
    if PLAIN:
        row = local
        if len(ROWS) and ROWS[0][4]:
            row += base * ROWS[0][2]
    else:
        for i in tl.static_range(len(ROWS)):
            digit = (local // ROWS[i][1]) % ROWS[i][0]
            if ROWS[i][4]:
                digit += base
                ok = ok & (digit < RO)
            digit = digit * ROWS[i][2]
            if ROWS[i][3]:
                digit = digit * RO
            row += digit
    return row, ok


@triton.jit
def _outer_offset(local, base_r, base_c, RO, CO, STORE: tl.constexpr, LAST: tl.constexpr, INNER: tl.constexpr):
    """Storage offset (items) of the tile's runs over the axes before LAST, and which exist."""
    off = local * 0
    ok = local >= 0
    for i in tl.static_range(LAST):
        digit = (local // (STORE[i][2] // INNER)) % STORE[i][1]
        if STORE[i][6]:
            digit += base_c if STORE[i][0] else base_r
            ok = ok & (digit < (CO if STORE[i][0] else RO))
        if STORE[i][7]:
            if STORE[i][8]:
                digit = STORE[i][8] - 1 - digit
            else:
                digit = (CO if STORE[i][0] else RO) - 1 - digit
        if STORE[i][4]:
            digit = digit * RO
        if STORE[i][5]:
            digit = digit * CO
        off += digit * STORE[i][3]
    return off, ok


@triton.jit
def _permute_axes(x, P: tl.constexpr):
    """tl.permute by a constexpr tuple of RANK entries; Triton 3.6 takes them only one by one."""
    return tl.permute(x, P[0], P[1], P[2], P[3], P[4], P[5], P[6], P[7], P[8], P[9])


@triton.jit
def _swap_bits(w, SWAPS: tl.constexpr):
    for i in tl.static_range(len(SWAPS)):
        t = (w ^ (w >> SWAPS[i][0])) & SWAPS[i][1]
        w = w ^ t ^ (t << SWAPS[i][0])
    return w


@triton.jit
def _exchange_pair(a, b, SHIFT: tl.constexpr, MASK: tl.constexpr):
    return (a & MASK) | ((b << SHIFT) & ~MASK), ((a >> SHIFT) & MASK) | (b & ~MASK)


@triton.jit
def _exchange(x, STEPS: tl.constexpr, AXES: tl.constexpr, BACK: tl.constexpr, N: tl.constexpr):
    """Words [N, 2 * 2 ..] with AXES axes of two, which change places with index bits inside the words. All of them lie in one thread.

    A step is (axis, shift, mask): a word keeps its units under the mask and takes the others of its partner on that axis.
    """
    for axis in tl.static_range(AXES):  # the last one first; each becomes the first of all, so that in the end the order is the old one
        a, b = tl.split(tl.reshape(x, (N, 2 ** (AXES - 1), 2)))
        for i in tl.static_range(len(STEPS)):
            if BACK:
                if STEPS[len(STEPS) - 1 - i][0] == AXES - 1 - axis:
                    a, b = _exchange_pair(a, b, STEPS[len(STEPS) - 1 - i][1], STEPS[len(STEPS) - 1 - i][2])
            else:
                if STEPS[i][0] == AXES - 1 - axis:
                    a, b = _exchange_pair(a, b, STEPS[i][1], STEPS[i][2])
        x = tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (N, 2**AXES))
    return x


@triton.jit
def _map_bits(w, BEFORE: tl.constexpr, PAIRS: tl.constexpr, AFTER: tl.constexpr):
    """``fp4.layout_spec.WordProgram`` on int32 words."""
    w = _swap_bits(w, BEFORE)
    out = w & 0 if len(PAIRS) else w
    for i in tl.static_range(len(PAIRS)):
        if PAIRS[i][0] >= 0:
            out = out | ((w >> PAIRS[i][0]) & PAIRS[i][1])
        else:
            out = out | ((w << -PAIRS[i][0]) & PAIRS[i][1])
    return _swap_bits(out, AFTER)


@triton.jit(do_not_specialize=["R", "C", "RO", "CO", "n_row", "n_col", "stored"])
def _permute_kernel(
    plain,
    storage,
    R,
    C,
    RO,
    CO,
    n_row,
    n_col,
    stored,
    FILL: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    PLAIN_ROWS: tl.constexpr,
    TR: tl.constexpr,
    TC: tl.constexpr,
    CHUNK_R: tl.constexpr,
    CHUNK_C: tl.constexpr,
    LOGICAL: tl.constexpr,
    EXCHANGE: tl.constexpr,
    EXCHANGED: tl.constexpr,
    GATHER: tl.constexpr,
    GATHERED: tl.constexpr,
    UNGATHER: tl.constexpr,
    PERM: tl.constexpr,
    STORED_TILE: tl.constexpr,
    UNPERM: tl.constexpr,
    STORE: tl.constexpr,
    N_OUT: tl.constexpr,
    RUN: tl.constexpr,
    GROUP: tl.constexpr,
    PLACE_C: tl.constexpr,
    NIBBLE: tl.constexpr,
    BEFORE: tl.constexpr,
    PAIRS: tl.constexpr,
    AFTER: tl.constexpr,
    VEC_C: tl.constexpr,
    VEC_R: tl.constexpr,
    VEC_CO: tl.constexpr,
    VEC_S: tl.constexpr,
    WIDE: tl.constexpr,
    INVERT: tl.constexpr,
):
    """plain [experts, R, C * VEC_C] items <-> storage [experts, stored] elements; RO * VEC_R and CO * VEC_CO are the free extents."""
    pid = tl.program_id(0)
    near = n_row if ROWS_FIRST else n_col  # programs go along the innermost free axis of the storage
    rest = pid // near
    row_at = pid % near if ROWS_FIRST else rest % n_row
    col_at = rest % n_col if ROWS_FIRST else pid % near
    expert = (rest // (n_col if ROWS_FIRST else n_row)).to(tl.int64)
    C = C * VEC_C  # the products tell the compiler what divides them
    RO = RO * VEC_R
    CO = CO * VEC_CO
    if WIDE:
        row_at = row_at.to(tl.int64)
        col_at = col_at.to(tl.int64)
        C = C.to(tl.int64)
        RO = RO.to(tl.int64)
        CO = CO.to(tl.int64)
    base_r = row_at * CHUNK_R
    base_c = col_at * CHUNK_C

    row, row_ok = _row_index(base_r, RO, WIDE, ROWS, PLAIN_ROWS, TR)
    TB: tl.constexpr = TC // 2 if NIBBLE else TC
    col = (base_c * PLACE_C) // (2 if NIBBLE else 1) + tl.arange(0, TB)
    p_mask = (row_ok & (row < R))[:, None] & (col < C)[None, :]
    p_ptr = plain + expert * R * C + (row[:, None] * C + col[None, :])

    outer, outer_ok = _outer_offset(tl.arange(0, (TR * TC) // RUN), base_r, base_c, RO, CO, STORE, N_OUT, RUN)
    inner = tl.arange(0, RUN // GROUP)
    s_mask = outer_ok[:, None]
    s_ptr = storage + expert * stored * VEC_S
    if len(STORE) != N_OUT and STORE[N_OUT][6]:  # the run is a chunk of a free axis
        at = base_c if STORE[N_OUT][0] else base_r
        s_ptr += at * (STORE[N_OUT][3] // GROUP)
        s_mask = s_mask & (at + inner // (STORE[N_OUT][2] // GROUP) < (CO if STORE[N_OUT][0] else RO))[None, :]
    s_ptr = s_ptr + (outer[:, None] // GROUP + inner[None, :])

    if INVERT:
        y = tl.load(s_ptr, mask=s_mask, other=0)
        y = _map_bits(y, BEFORE, PAIRS, AFTER)
        if GROUP >= 4:
            half = tl.join(y & 0xFFFF, (y >> 16) & 0xFFFF)
            y = tl.join(half & 0xFF, half >> 8).to(tl.int8)
        if NIBBLE:
            y = tl.join(y & 15, (y >> 4) & 15)
        x = _permute_axes(tl.reshape(y, STORED_TILE), UNPERM)
        if len(EXCHANGE):
            x = tl.reshape(x, ((TR * TC) // (2**EXCHANGED), 2**EXCHANGED))
            x = _exchange(x, EXCHANGE, EXCHANGED, True, (TR * TC) // (2**EXCHANGED))
            x = _permute_axes(tl.reshape(x, GATHERED), UNGATHER)
        if NIBBLE:
            low, high = tl.split(tl.reshape(x, (TR, TB, 2)))
            x = low | (high << 4)
        tl.store(p_ptr, tl.reshape(x, (TR, TB)), mask=p_mask)
    else:
        x = tl.load(p_ptr, mask=p_mask, other=FILL)
        if NIBBLE:
            x = tl.join(x & 15, (x >> 4) & 15)
        x = tl.reshape(x, LOGICAL)
        if len(EXCHANGE):
            x = tl.reshape(_permute_axes(x, GATHER), ((TR * TC) // (2**EXCHANGED), 2**EXCHANGED))
            x = tl.reshape(_exchange(x, EXCHANGE, EXCHANGED, False, (TR * TC) // (2**EXCHANGED)), GATHERED)
        y = _permute_axes(x, PERM)
        if NIBBLE:
            low, high = tl.split(tl.reshape(y, ((TR * TC) // RUN, RUN // 2, 2)))
            y = low | (high << 4)
        if GROUP >= 4:
            low, high = tl.split(tl.reshape(y.to(tl.int32) & 0xFF, ((TR * TC) // RUN, RUN // GROUP, 2, 2)))
            low, high = tl.split(low | (high << 8))
            y = low | (high << 16)
        y = _map_bits(y, BEFORE, PAIRS, AFTER)
        tl.store(s_ptr, tl.reshape(y, ((TR * TC) // RUN, RUN // GROUP)), mask=s_mask)


def _gcd16(*values: int) -> int:
    """Largest power of two up to 16 that divides all values (0 is divisible by all)."""
    return math.gcd(16, *values)


def can(layout: Layout) -> bool:
    """Whether the kernel serves a layout: at least one axis, powers of two, free column axis outermost."""
    return len(layout.axes) > 0 and plan(layout, 1, TILE_BYTES) is not None


def tile(layout: Layout) -> tuple[int, int]:
    """(bytes, warps) of a program."""
    return (WORD_TILE_BYTES, WORD_WARPS) if layout.word_program(False).pairs else (TILE_BYTES, WARPS)


@dataclass(frozen=True)
class Launch:
    """Everything of a launch but the tensors: also what a compile-only test needs."""

    programs: int
    #: dtypes of the logical and the stored tensor
    views: tuple[torch.dtype, torch.dtype]
    #: run-time integers R, C, RO, CO, n_row, n_col, stored
    numbers: tuple[int, ...]
    constants: dict[str, object]


@lru_cache(maxsize=4096)
def arguments(layout: Layout, shape: tuple[int, ...], align: int, inverse: bool, tile_bytes: int = TILE_BYTES) -> Launch:
    """Launch for a byte shape [..., rows, columns] whose pointers are multiples of ``align`` bytes."""
    g = layout.geometry(shape)
    columns, padded = shape[-1], g.pcols // layout.units_per_byte
    split = words(layout)
    # rows kept whole in storage must be aligned there too, and whole words may not reach over the end of a row
    align = _gcd16(align, columns, padded if whole_rows(layout) or (split is not None and split.split_cols > 1) else 0)
    p = plan(layout, align, tile_bytes, not inverse and math.prod(shape) >= FAR_BYTES)
    if p is None:
        raise AssertionError(f"permute kernel: no plan for {layout}; callers ask can() first")
    element = p.item * p.group >> p.nibble
    ro, co = g.free[0], g.free[1] // (p.item if p.whole_rows else p.split_cols)
    vec_c = max(align // p.item, 1)
    # row extents inside the stride of a short run decide how wide a store may be
    short = any(s[4] and s[3] * p.item * 8 // (8 << p.nibble) < 16 for s in p.store)
    vec_r = _gcd16(ro) if short else 1
    vec_co = vec_c if p.whole_rows else 1
    n_row, n_col = triton.cdiv(ro, p.chunk_rows), triton.cdiv(co, p.chunk_cols)
    experts = math.prod(g.lead)
    stored = g.prows * padded // element if experts != 1 else 0
    vec_s = math.gcd(max(16 // element, 1), stored)
    n_out, tail = len(p.store), 1
    while tail < p.run:
        n_out -= 1
        tail *= p.store[n_out][1]
    program = layout.word_program(inverse)
    fill_up = tuple(range(len(p.logical), RANK))
    logical = p.logical + (1,) * len(fill_up)
    gather = fill_up + p.gather  # axes of one item first: those that are exchanged stay last
    gathered = tuple(logical[i] for i in gather)
    perm = tuple(gather.index(i) for i in p.perm + fill_up) if p.exchange else p.perm + fill_up
    before, after = p.inside + (() if p.halves else program.before), program.after
    if inverse:
        before, after = program.before, (() if p.halves else program.after) + p.inside[::-1]
    constants: dict[str, object] = {
        "FILL": int.from_bytes(bytes([layout.fill]) * p.item, "little", signed=True),
        "ROWS_FIRST": p.rows_first,
        "ROWS": p.rows,
        "PLAIN_ROWS": p.plain_rows,
        "TR": p.tile_rows,
        "TC": p.tile_cols,
        "CHUNK_R": p.chunk_rows,
        "CHUNK_C": p.chunk_cols,
        "LOGICAL": logical,
        "EXCHANGE": p.exchange,
        "EXCHANGED": p.exchanged,
        "GATHER": gather,
        "GATHERED": gathered,
        "UNGATHER": tuple(gather.index(i) for i in range(RANK)),
        "PERM": perm,
        "STORED_TILE": tuple((gathered if p.exchange else logical)[i] for i in perm),
        "UNPERM": tuple(perm.index(i) for i in range(RANK)),
        "STORE": p.store,
        "N_OUT": n_out,
        "RUN": p.run,
        "GROUP": p.group,
        "PLACE_C": p.place_cols,
        "NIBBLE": p.nibble,
        "BEFORE": before,
        "PAIRS": program.pairs,
        "AFTER": after,
        "VEC_C": vec_c,
        "VEC_R": vec_r,
        "VEC_CO": vec_co,
        "VEC_S": vec_s,
        "WIDE": max(g.prows * padded, shape[-2] * columns) << p.nibble >= 2**31,  # offsets count nibbles where those move
        "INVERT": inverse,
    }
    numbers = (shape[-2], columns // p.item // vec_c, ro // vec_r, co // vec_co, n_row, n_col, stored // vec_s)
    return Launch(experts * n_row * n_col, (_INTS[p.item], _INTS[element]), numbers, constants)


def _launch(layout: Layout, plain: torch.Tensor, storage: torch.Tensor, inverse: bool, tile_bytes: int | None, warps: int | None) -> None:
    """plain: u8 [..., rows, columns] contiguous; storage: u8, contiguous."""
    if not (plain if inverse else storage).numel():
        return
    if plain.numel() == 0:  # nothing but padding
        storage.fill_(layout.fill)
        return
    size, own = tile(layout)
    c = arguments(layout, tuple(plain.shape), _gcd16(plain.data_ptr(), storage.data_ptr()), inverse, tile_bytes or size)
    if c.programs >= 2**31:
        raise LayoutError(f"permute kernel: {c.programs} tiles for shape {list(plain.shape)}; need fewer than 2^31, pass fewer experts")
    warps = (warps or own) * (2 if c.constants["ROWS_FIRST"] else 1)
    _permute_kernel[(c.programs,)](plain.view(c.views[0]), storage.view(c.views[1]), *c.numbers, **c.constants, num_warps=warps)


def apply(layout: Layout, x: torch.Tensor, *, tile_bytes: int | None = None, warps: int | None = None) -> torch.Tensor:
    """As ``Layout.apply`` for u8 [..., rows, columns]; every byte of the result is written, padding as ``fill``."""
    g = layout.geometry(x.shape)
    layout.check_words(g)
    y = torch.empty(*g.lead, g.prows * g.pcols // layout.units_per_byte, dtype=torch.uint8, device=x.device)
    _launch(layout, x.contiguous(), y, False, tile_bytes, warps)
    return y


def invert(
    layout: Layout, flat: torch.Tensor, shape: tuple[int, ...], *, tile_bytes: int | None = None, warps: int | None = None
) -> torch.Tensor:
    """As ``Layout.invert`` for flat u8 storage."""
    layout.check_words(layout.geometry(shape))
    x = torch.empty(shape, dtype=torch.uint8, device=flat.device)
    _launch(layout, x, flat, True, tile_bytes, warps)
    return x
