"""Values to codes and back for e2m1, e4m3, ue8m0 and ue5m3, and two codes to a byte: the torch twins.

Exact for every float32 input. The Triton twins are in ``triton_codes``; both follow the same steps and give the same bytes.

How a magnitude a is rounded to a format with ``man`` mantissa bits and smallest normal exponent ``emin``: with
``e = max(floor(log2 a), emin)`` the codes around a are ``2^(e - man)`` apart. ``2^(e + 23 - man)`` has exactly that spacing in
float32, so the one addition ``t = a + 2^(e + 23 - man)`` rounds a to nearest even, and the low bits of t hold
``n = a / 2^(e - man)``. The code is ``n + (e - emin) * 2^man``: exponent and mantissa fields are adjacent, so a carry needs no
care. Float32 addition is IEEE on every CPU and GPU, needs no fp8 type and does not pass through a narrower format (a double
rounding would move values next to a tie).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache, wraps

import torch

from fp4.errors import FormatMismatch, Fp4Error
from fp4.formats import E2M1, E4M3, UE5M3, UE8M0, ElemFormat

__all__ = [
    "decode",
    "decode_e2m1",
    "decode_e4m3",
    "decode_ue5m3",
    "decode_ue8m0",
    "encode_e2m1",
    "encode_e4m3",
    "encode_ue5m3",
    "encode_ue8m0",
    "kept",
    "pack_nibbles",
    "unpack_nibbles",
    "value_table",
]

EXPONENT = 0x7F800000
MANTISSA = 0x007FFFFF
SIGN = -0x80000000
INT32 = torch.int32


def kept(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Keep the constant tensor that ``make`` gives for a device.

    Not where a dispatch mode or a functorch transform is active: what is made there may be a fake or a wrapped tensor, which breaks
    every later call outside, and what was kept outside is a foreign tensor there.
    """
    known = lru_cache(maxsize=64)(make)

    @wraps(make)
    def get(*key: object) -> torch.Tensor:
        special = torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None
        return make(*key) if special else known(*key)

    return get


@kept
def value_table(elem: ElemFormat, device: torch.device) -> torch.Tensor:
    """f32 [2^bits]: the value of each code of ``elem``."""
    return torch.tensor(elem.values, dtype=torch.float32, device=device)


def _bits(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little")


def encode_magnitude(a: torch.Tensor, elem: ElemFormat, tie: str = "even") -> torch.Tensor:
    """Magnitudes f32 [...], >= 0, to codes without sign, i32 [...]; saturates at the largest finite value, NaN too."""
    man, emin = elem.man_bits, 1 - elem.bias
    bits = a.view(INT32).clamp(max=_bits(elem.max))  # on the bits, where NaN is larger than every number
    a = bits.view(torch.float32)
    power = bits.bitwise_and(EXPONENT).clamp_(min=(emin + 127) << 23)
    if tie == "even":
        power += (23 - man) << 23
        t = power.view(torch.float32).add_(a).view(INT32)
        code = t >> 23
        code -= emin + 127 + 23 - man
        code <<= man
        return code.add_(t.bitwise_and_(MANTISSA))
    # n = a / 2^(e - man) is exact (a power of two), so are its integer part and the rest
    exponent = (power >> 23) - 127
    n = torch.ldexp(a, man - exponent)
    whole = n.floor()
    rest = n - whole
    up = rest >= 0.5 if tie == "away" else rest > 0.5
    return whole.to(INT32) + up + ((exponent - emin) << man)


def signed_code(
    code: torch.Tensor, x: torch.Tensor, y: torch.Tensor, elem: ElemFormat, zero_sign: str, nan_code: str, nan: bool = True
) -> torch.Tensor:
    """Puts the sign on magnitude codes i32 and the code for NaN, see ``Recipe``; y is x after scaling, both f32. Returns i32.

    ``nan=False`` promises that y holds no NaN and skips its share, a third of a CPU's work.
    """
    top = 1 << (elem.bits - 1)
    sign = (x.view(INT32) >> (32 - elem.bits)).bitwise_and_(top)
    if zero_sign == "keep":
        code |= sign
    elif zero_sign == "of_value":
        code |= (y < 0).to(INT32) * top
    elif zero_sign == "positive":
        code |= ((y < 0) & (code != 0)).to(INT32) * top
    else:  # "negative": every exact zero gets the minus sign
        code |= (y <= 0).to(INT32) * top
    if not nan:
        return code
    largest = elem.nan_codes[0] if elem.nan_codes else top - 1
    if nan_code == "zero":
        return code.masked_fill_(y != y, 0)
    if nan_code == "signed_max":
        return torch.where(y != y, sign.bitwise_or_(largest), code)
    return code.masked_fill_(y != y, largest)


def _to_f32(x: torch.Tensor, where: str) -> torch.Tensor:
    if not x.is_floating_point() or x.dtype == torch.float64:
        raise FormatMismatch(f"{where}: x is {x.dtype}; need float32, bfloat16 or float16 (a float64 would be rounded twice)")
    return x.to(torch.float32)


def _encode(x: torch.Tensor, elem: ElemFormat, tie: str, zero_sign: str, nan_code: str, where: str) -> torch.Tensor:
    if tie not in ("even", "away", "toward_zero"):
        raise Fp4Error(f"{where}: tie is {tie!r}; need one of even, away, toward_zero")
    x = _to_f32(x, where).contiguous()
    code = encode_magnitude(x.abs(), elem, tie)
    return signed_code(code, x, x, elem, zero_sign, nan_code).to(torch.uint8)


def encode_e2m1(x: torch.Tensor, tie: str = "even", zero_sign: str = "keep", nan_code: str = "signed_max") -> torch.Tensor:
    """Nearest e2m1 code. x: f32, bf16 or f16 [...] -> u8 [...] in 0..15; |x| > 5 (and infinity) gives 6.

    ``tie``, ``zero_sign`` and ``nan_code`` as in ``Recipe``. Source: OCP MX v1.0 section 5.3.3.

    >>> encode_e2m1(torch.tensor([0.25, 0.75, 5.0, -0.0, 1e9])).tolist()
    [0, 2, 6, 8, 7]
    """
    return _encode(x, E2M1, tie, zero_sign, nan_code, "encode_e2m1")


def encode_e4m3(x: torch.Tensor, tie: str = "even") -> torch.Tensor:
    """Nearest e4m3 code. x: f32, bf16 or f16 [...] -> u8 [...]; saturates to +-448 (0x7E, infinity too); NaN gives 0x7F.

    >>> [hex(c) for c in encode_e4m3(torch.tensor([1.0, 448.0, 1e9, 2.0**-10, float("nan")])).tolist()]
    ['0x38', '0x7e', '0x7e', '0x0', '0x7f']
    """
    return _encode(x, E4M3, tie, "keep", "max", "encode_e4m3")


def encode_ue5m3(x: torch.Tensor, tie: str = "even") -> torch.Tensor:
    """Nearest ue5m3 code (unsigned, bias 15). x: f32, bf16 or f16 [...], >= 0 -> u8 [...]; saturates to 0xFE; NaN or x < 0 gives 0xFF.

    >>> [hex(c) for c in encode_ue5m3(torch.tensor([1.0, 0.5, 1.5])).tolist()]
    ['0x78', '0x70', '0x7c']
    """
    x = _to_f32(x, "encode_ue5m3").contiguous()
    code = encode_magnitude(x.abs(), UE5M3, tie)
    return torch.where((x != x) | (x < 0), 0xFF, code).to(torch.uint8)


def encode_ue8m0(x: torch.Tensor, rounding: str = "ceil") -> torch.Tensor:
    """Power of two at or above (``ceil``), at or below (``floor``) or nearest in the exponent's sense (``nearest``, 1.5 goes up).

    x: f32, bf16 or f16 [...], >= 0 -> u8 [...], ``byte = exponent + 127``. 0 and everything up to 2^-127 give 0, above 2^127 (and
    infinity) 254, NaN and negative numbers 255.

    >>> encode_ue8m0(torch.tensor([1.0, 1.1, 2.0, 0.0])).tolist()
    [127, 128, 128, 0]
    """
    x = _to_f32(x, "encode_ue8m0").contiguous()
    bits = x.view(INT32)
    if rounding == "ceil":
        code = (bits + MANTISSA) >> 23
        code = torch.where(bits <= 0x00400000, 0, code)  # 2^-127 is a float32 subnormal
    elif rounding == "floor":
        code = bits >> 23
    elif rounding == "nearest":
        code = (bits + 0x00400000) >> 23
    else:
        raise Fp4Error(f"encode_ue8m0: rounding is {rounding!r}; need one of ceil, floor, nearest")
    return torch.where((x != x) | (x < 0), 255, code.clamp(max=254)).to(torch.uint8)


def decode(code: torch.Tensor, elem: ElemFormat) -> torch.Tensor:
    """code: u8 [...] -> f32 [...], exact; the NaN codes give NaN. Raises FormatMismatch for another dtype."""
    if code.dtype != torch.uint8:
        raise FormatMismatch(f"decode_{elem.name}: codes are {code.dtype}; need uint8 (raw bits; view an 8-bit float as uint8)")
    which = code.to(INT32).bitwise_and_(elem.codes - 1).reshape(-1)
    return value_table(elem, code.device).index_select(0, which).view(code.shape)


def decode_e2m1(code: torch.Tensor) -> torch.Tensor:
    """code: u8 [...], one code a byte (bits 4 to 7 are ignored) -> f32 [...] in 0, .5, 1, 1.5, 2, 3, 4, 6 with sign in bit 3."""
    return decode(code, E2M1)


def decode_e4m3(code: torch.Tensor) -> torch.Tensor:
    """code: u8 [...] -> f32 [...]; 0x7F and 0xFF are NaN; bytes 1 to 7 are 2^-9 * 1..7."""
    return decode(code, E4M3)


def decode_ue8m0(code: torch.Tensor) -> torch.Tensor:
    """code: u8 [...] -> f32 [...], 2^(code - 127); byte 0 is 2^-127, not zero; 255 is NaN (OCP MX v1.0 section 5.4.1)."""
    return decode(code, UE8M0)


def decode_ue5m3(code: torch.Tensor) -> torch.Tensor:
    """code: u8 [...] -> f32 [...]; 0xFF is NaN."""
    return decode(code, UE5M3)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """codes: u8 [..., k], each 0..15, k even -> u8 [..., k/2]; the low nibble is the even element.

    >>> [hex(b) for b in pack_nibbles(torch.tensor([1, 2, 3, 4], dtype=torch.uint8)).tolist()]
    ['0x21', '0x43']
    """
    if codes.dtype != torch.uint8:
        raise FormatMismatch(f"pack_nibbles: codes are {codes.dtype}; need uint8")
    if codes.ndim == 0 or codes.shape[-1] % 2:
        raise FormatMismatch(f"pack_nibbles: codes have shape {list(codes.shape)}; need an even last dimension")
    pair = codes.contiguous().view(torch.int16)  # hi << 8 | lo
    return ((pair >> 4) | pair).to(torch.uint8)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """packed: u8 [..., k/2] -> u8 [..., k], each 0..15; inverse of ``pack_nibbles``."""
    if packed.dtype != torch.uint8:
        raise FormatMismatch(f"unpack_nibbles: bytes are {packed.dtype}; need uint8")
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2) if packed.ndim else _scalar(packed)


def _scalar(packed: torch.Tensor) -> torch.Tensor:
    raise FormatMismatch(f"unpack_nibbles: packed has shape {list(packed.shape)}; need at least one dimension")
