"""Fragment-order storage: the layouts by name, the powers of two that the decode leaves over, and the exponent windows.

``frag_w`` (nibbles) and ``frag_sf16`` / ``frag_sf32`` (scale bytes) are lines of the layout catalogue; this file only names them.
A 16-row x 64-column tile of codes is 128 words in lane order, k inside a tile permuted so that lane t of a quad owns the 16
columns 16 t .. 16 t + 15, that is one NVFP4 scale group (half an MXFP4 one) a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp4.errors import Unsupported

CODES_LAYOUT = "frag_w"
SCALE_LAYOUT = {16: "frag_sf16", 32: "frag_sf32"}

#: bit i of a stored word comes from bit WORD[i] of eight nibbles in the order (e, h, l), lowest nibble first
_PLACES = {(0, 0): (15, 6), (0, 1): (12, 3), (1, 0): (13, 9), (1, 1): (14, 0)}  # (e, h) -> sign bit, lowest magnitude bit


def word_table() -> tuple[int, ...]:
    """The 32-entry word table of ``frag_w``: output bit i comes from input bit table[i]."""
    table = [-1] * 32
    for (e, h), (sign, low) in _PLACES.items():
        for pair in range(2):
            source = 4 * (4 * e + 2 * h + pair)
            for bit in range(3):
                table[16 * pair + low + bit] = source + bit
            table[16 * pair + sign] = source + 3
    return tuple(table)


#: products of the decode = code * scale * 2^-LEFT for e4m3 scales
LEFT_E4M3 = {False: 8, True: 7}
#: exponent bias added to a ue8m0 byte unless the tensor needs another window
BIAS_UE8M0 = {False: 118, True: -97}


@dataclass(frozen=True)
class Window:
    """How one tensor's scale bytes are decoded for one activation type.

    alpha: power of two for the fp32 epilogue; bias: what is added to a ue8m0 byte; any_byte: the slower decode that keeps signs
    and NaN; half: products are fp16.
    """

    alpha: float
    bias: int
    any_byte: bool
    half: bool

    @property
    def oc(self) -> int:
        """The bias as the scale asm wants it in both 16-bit halves, as a signed 32-bit word."""
        word = (self.bias + 256 if self.half else self.bias << 7) * 0x10001 & 0xFFFFFFFF
        return word - (1 << 32) if word >= 1 << 31 else word


def scale_window(scale: torch.Tensor, block: int, half: bool) -> Window:
    """Choose the window for raw scale bytes (u8, any shape); one host read. Raises Unsupported when no window is exact.

    e4m3: every byte is exact. ue8m0: with s the smallest and S the largest byte used, bf16 products are exact while S - s <= 133,
    fp16 ones while S - s <= 24 (half: the caller then splits fp16 activations into two bf16 terms instead).
    """
    if block == 16:
        any_byte = bool(scale.numel()) and bool((scale > 0x7E).any())
        return Window(2.0 ** LEFT_E4M3[half], 0, any_byte, half)
    any_byte, low, high = False, 127, 127
    if scale.numel():
        any_byte = bool((scale == 0xFF).any())
        used = scale[scale != 0xFF] if any_byte else scale
        if used.numel():
            low, high = int(used.min()), int(used.max())
    return ue8m0_window(low, high, any_byte, half)


def ue8m0_window(low: int, high: int, any_byte: bool, half: bool) -> Window:
    """The window for ue8m0 bytes low .. high. bf16: field in 3 + 118 .. 254; fp16: field in 6 .. 30."""
    if half:
        bias, least = 30 - high, 6
        alpha = 2.0 ** -(bias + 98)
    else:
        bias, least = min(118, 254 - high) if low >= 3 else 254 - high, 121
        alpha = 2.0 ** (126 - bias)
    if low + bias < least:
        kind, spread = ("float16", 24) if half else ("bfloat16", 133)
        raise Unsupported(
            f"prepare: MXFP4 scale exponents {low - 127} .. {high - 127} span {high - low} binades; {kind} products are exact up to "
            f"{spread}; use the reference backend for this tensor"
        )
    return Window(alpha, bias, any_byte, half)
