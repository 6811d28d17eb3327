"""Values to codes and back as Triton device functions: the golden twins of ``codes``, callable from any kernel.

They run in Triton's interpreter on a CPU and compile for every NVIDIA GPU since SM80: bits and float32 only, no hardware fp8 type, no
cast between float32 and fp8 (the interpreter's loses a rounding carry, triton#8322, and SM80 has none). ``codes`` explains the steps.
Every product here is exact except the one addition that rounds, so it does not matter whether a compiler fuses them.

A format is given as three constants: MAN mantissa bits, EMIN smallest normal exponent (1 - bias), TOP largest finite value,
TOP_CODE its code: e2m1 (1, 0, 6.0, 7), e4m3 (3, -6, 448.0, 0x7E), ue5m3 (3, -14, 114688.0, 0xFE).
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "decode_e2m1",
    "decode_e4m3",
    "decode_ue5m3",
    "decode_ue8m0",
    "encode_e2m1",
    "encode_e4m3",
    "encode_magnitude",
    "encode_ue5m3",
    "encode_ue8m0",
    "fields_of",
    "pack_nibbles",
    "round_even",
    "unpack_nibbles",
]


@triton.jit
def bits_of(x):
    """f32 -> its bits, i32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def from_bits(b):
    """i32 -> the f32 with these bits."""
    return b.to(tl.float32, bitcast=True)


@triton.jit
def round_even(a, MAN: tl.constexpr, EMIN: tl.constexpr):
    """f32 [...], of any sign -> the nearest |value| of the format without an upper limit, ties to even mantissa, f32.

    NaN, infinity and whatever overflows on the way give NaN, of any sign.
    """
    SPREAD: tl.constexpr = 2.0 ** (23 - MAN)
    wide = from_bits(tl.maximum(bits_of(a) & 0x7F800000, (EMIN + 127) << 23)) * SPREAD
    return (tl.abs(a) + wide) - wide


@triton.jit
def fields_of(r, MAN: tl.constexpr, EMIN: tl.constexpr, TOP_CODE: tl.constexpr):
    """A result of ``round_even`` to its code, which starts at bit 23 - MAN, u32; larger values and NaN give TOP_CODE.

    2^EMIN is moved to 2^-126, the smallest normal float32: then the exponent and mantissa fields are the code.
    """
    SHIFT: tl.constexpr = 2.0 ** (-126 - EMIN)
    LIMIT: tl.constexpr = TOP_CODE << (23 - MAN)
    return tl.minimum((r * SHIFT).to(tl.uint32, bitcast=True), tl.full([], LIMIT, tl.uint32))


@triton.jit
def encode_magnitude(a, MAN: tl.constexpr, EMIN: tl.constexpr, TOP: tl.constexpr, TOP_CODE: tl.constexpr, TIE: tl.constexpr = 0):
    """f32 [...], of any sign -> code of |a|, i32; saturates at TOP, NaN too. TIE: 0 even, 1 away, 2 toward zero."""
    if TIE == 0:
        code = (fields_of(round_even(a, MAN, EMIN), MAN, EMIN, TOP_CODE) >> (23 - MAN)).to(tl.int32)
    else:
        # on the bits, where NaN is larger than TOP: tl.minimum of floats treats NaN in two ways, by version and by interpreter
        a = from_bits(tl.minimum(bits_of(a) & 0x7FFFFFFF, bits_of(tl.full([], TOP, tl.float32))))
        power = tl.maximum(bits_of(a) & 0x7F800000, (EMIN + 127) << 23)
        SCALE: tl.constexpr = 2.0**MAN
        n = a * (from_bits((254 << 23) - power) * SCALE)  # a / 2^(e - MAN), exact
        whole = tl.floor(n)
        rest = n - whole
        if TIE == 1:
            up = rest >= 0.5
        else:
            up = rest > 0.5
        code = whole.to(tl.int32) + up.to(tl.int32) + (((power >> 23) - (EMIN + 127)) << MAN)
    return code


@triton.jit
def encode_e2m1(x, TIE: tl.constexpr = 0):
    """f32 [...] -> u8 code; the sign bit of x is kept, also for zero and NaN (NaN is +-6)."""
    code = encode_magnitude(x, 1, 0, 6.0, 7, TIE) | ((bits_of(x) >> 28) & 8)
    return code.to(tl.uint8)


@triton.jit
def encode_e4m3(x, TIE: tl.constexpr = 0):
    """f32 [...] -> u8 code; saturates to +-448, NaN gives 0x7F."""
    code = encode_magnitude(x, 3, -6, 448.0, 0x7E, TIE) | ((bits_of(x) >> 24) & 128)
    return tl.where(x != x, 0x7F, code).to(tl.uint8)


@triton.jit
def encode_ue5m3(x, TIE: tl.constexpr = 0):
    """f32 [...] -> u8 code; saturates to 0xFE; NaN or x < 0 gives 0xFF."""
    code = encode_magnitude(x, 3, -14, 114688.0, 0xFE, TIE)
    return tl.where((x != x) | (x < 0), 0xFF, code).to(tl.uint8)


@triton.jit
def encode_ue8m0(x, ROUNDING: tl.constexpr = 0):
    """f32 [...] -> u8, exponent + 127. ROUNDING: 0 up to a power of two, 1 down, 2 nearest. NaN or x < 0 gives 255."""
    b = bits_of(x)
    if ROUNDING == 0:
        code = tl.where(b <= 0x00400000, 0, (b + 0x007FFFFF) >> 23)
    elif ROUNDING == 1:
        code = b >> 23
    else:
        code = (b + 0x00400000) >> 23
    return tl.where((x != x) | (x < 0), 255, tl.minimum(code, 254)).to(tl.uint8)


@triton.jit
def decode_e2m1(code):
    """u8 or i32 [...], low nibble used -> f32, exact."""
    c = code.to(tl.int32)
    return from_bits(((c & 8) << 28) | ((c & 7) << 22)) * 8.507059173023462e37  # 2^126


@triton.jit
def decode_e4m3(code):
    """u8 or i32 [...] -> f32, exact; 0x7F and 0xFF are NaN."""
    c = code.to(tl.int32)
    value = from_bits(((c & 128) << 24) | ((c & 127) << 20)) * 1.329227995784916e36  # 2^120
    return tl.where((c & 127) == 127, float("nan"), value)


@triton.jit
def decode_ue5m3(code):
    """u8 or i32 [...] -> f32, exact; 0xFF is NaN."""
    c = code.to(tl.int32) & 255
    value = from_bits(c << 20) * 5.192296858534828e33  # 2^112
    return tl.where(c == 255, float("nan"), value)


@triton.jit
def decode_ue8m0(code):
    """u8 or i32 [...] -> f32, 2^(code - 127), exact; 0 is 2^-127, 255 is NaN."""
    c = code.to(tl.int32) & 255
    b = tl.where(c == 0, 0x00400000, c << 23)
    return from_bits(tl.where(c == 255, 0x7FC00000, b))


@triton.jit
def pack_nibbles(codes):
    """u8 or i32 [..., k], each 0..15 -> u8 [..., k/2]; the low nibble is the even element."""
    low, high = tl.split(tl.reshape(codes, [codes.shape[0], codes.shape[1] // 2, 2]))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def unpack_nibbles(packed):
    """u8 [r, k/2] -> u8 [r, k], each 0..15."""
    return tl.reshape(tl.join(packed & 15, packed >> 4), [packed.shape[0], packed.shape[1] * 2])
