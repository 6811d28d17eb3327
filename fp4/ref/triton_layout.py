"""Where a layout stores an element, as a Triton device function: the same digits as ``Layout.offset``, inside any kernel.

    RO, CO = layout.extents(shape)
    kernel[grid](..., RO, CO, DIGITS=layout.digits)           # DIGITS: tl.constexpr, RO and CO run-time integers

``layout.digits`` depends on the layout only, so one binary serves every shape (decorate the kernel with
``do_not_specialize=["RO", "CO"]``). Offsets are 64-bit when row or col are. With row, col, RO and CO all unsigned, divisions by powers of
two are single shifts.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["layout_offset"]


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
