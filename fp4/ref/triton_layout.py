"""Where a layout stores an element, and which element lies at a place, as Triton device functions: the same digits as ``Layout.offset``.

    RO, CO = layout.extents(shape)
    kernel[grid](..., RO, CO, DIGITS=layout.digits)           # DIGITS: tl.constexpr, RO and CO run-time integers

``layout.digits`` depends on the layout only, so one binary serves every shape (decorate the kernel with
``do_not_specialize=["RO", "CO"]``). Offsets are 64-bit when row or col are. With row, col, RO and CO all unsigned, divisions by powers of
two are single shifts.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

__all__ = ["divider", "layout_index", "layout_offset", "quotient"]


@lru_cache(maxsize=4096)
def divider(d: int) -> tuple[int, int]:
    """(multiplier as i32, shift) so that n // d = n * multiplier >> (31 + shift) for 0 <= n < 2^31 (Granlund and Montgomery 1994)."""
    shift = (d - 1).bit_length()
    return (1 << (31 + shift)) // d + 1 - (1 << 32), shift


@triton.jit
def quotient(n, factor, shift):
    """n // d for 0 <= n < 2^31, u32, by the two numbers of ``divider(d)``."""
    return tl.umulhi(n.to(tl.uint32) << 1, factor.to(tl.uint32)) >> shift.to(tl.uint32)


@triton.jit
def layout_offset(row, col, RO, CO, DIGITS: tl.constexpr):
    """Unit offset of (row, col), broadcast. DIGITS: ``Layout.digits``; RO, CO: ``Layout.extents(shape)``.

    Each digit is (dim, size, div, div_free, wrap, mul, mul_r, mul_c, flip), see ``fp4.layout_spec.Digit``. Divisors that are constants
    are powers of two in the whole catalogue and compile to shifts.
    """
    off = (row + col) * 0
    for i in tl.static_range(len(DIGITS)):
        index = col if DIGITS[i][0] else row
        free = CO if DIGITS[i][0] else RO
        place = DIGITS[i][2] * free if DIGITS[i][3] else DIGITS[i][2]
        size = DIGITS[i][1] if DIGITS[i][1] else free
        digit = index // tl.cast(place, index.dtype)
        if DIGITS[i][4]:
            digit = digit % tl.cast(size, index.dtype)
        if DIGITS[i][8]:
            digit = size - 1 - digit
        if DIGITS[i][6]:
            digit = digit * RO
        if DIGITS[i][7]:
            digit = digit * CO
        off += digit * DIGITS[i][5]
    return off


@triton.jit
def _over(n, d, factor, shift, WIDE: tl.constexpr):
    return n // d if WIDE else quotient(n, factor, shift)


@triton.jit
def layout_index(at, RO, CO, by_ro, ro_shift, by_co, co_shift, DIGITS: tl.constexpr, WIDE: tl.constexpr):
    """(row, col) stored at unit offset ``at``, the inverse of ``layout_offset``, padding included.

    (by_ro, ro_shift) and (by_co, co_shift): ``divider`` of RO and CO, unless WIDE, where ``at``, RO and CO are i64. Otherwise ``at`` is u32
    below 2^31, RO and CO are u32. The first digit is the outermost: nothing lies above it.
    """
    row, col = at * 0, at * 0
    for i in tl.static_range(len(DIGITS)):
        digit = at // tl.cast(DIGITS[i][5], at.dtype)
        if DIGITS[i][7]:
            digit = _over(digit, CO, by_co, co_shift, WIDE)
        if DIGITS[i][6]:
            digit = _over(digit, RO, by_ro, ro_shift, WIDE)
        free = CO if DIGITS[i][0] else RO
        if i > 0:
            if DIGITS[i][1]:
                digit = digit % tl.cast(DIGITS[i][1], at.dtype)
            elif DIGITS[i][0]:
                digit = digit - _over(digit, CO, by_co, co_shift, WIDE) * CO
            else:
                digit = digit - _over(digit, RO, by_ro, ro_shift, WIDE) * RO
        if DIGITS[i][8]:
            digit = (tl.cast(DIGITS[i][1], at.dtype) if DIGITS[i][1] else free) - 1 - digit
        place = digit * tl.cast(DIGITS[i][2], at.dtype)
        if DIGITS[i][3]:
            place = place * free
        if DIGITS[i][0]:
            col += place
        else:
            row += place
    return row, col
