"""Encode steps: maps of scale values that a backend needs besides a layout. Each says whether it loses anything, and over which bytes.

A layout moves bytes and cannot change one; an Encode changes bytes and does not move them. ``forward`` gives the new bytes and the power
of two ``factor`` by which the scales were multiplied: the caller divides the global scale by it. ``inverse`` takes both back.

``encode.get("marlin_nvfp4_v3")(scale)``, ``encode.names()``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fp4 import check
from fp4.errors import FormatMismatch, unknown
from fp4.formats import E4M3

__all__ = [
    "FP32_TO_UE8M0",
    "Encode",
    "Encoded",
    "get",
    "marlin_decode",
    "marlin_global_scale",
    "marlin_mxfp4",
    "marlin_nvfp4",
    "names",
    "rebase",
    "ue8m0_range",
]


def __dir__() -> list[str]:
    return __all__


class Encoded(NamedTuple):
    """``data``: u8, the shape of the input. ``factor``: power of two by which the scales were multiplied, 1.0 when they were not."""

    data: torch.Tensor
    factor: float


def _every(x: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(x, dtype=torch.bool)


@dataclass(frozen=True)
class Encode:
    """One value map.

    lossless: ``inverse(forward(x)) == x`` for every accepted input. over: the input bytes for which the consumer reads exactly the
    value that was meant; ``exact(x)`` gives the same as a mask. forward raises FormatMismatch for input that it refuses.
    """

    name: str
    forward: Callable[[torch.Tensor], Encoded]
    inverse: Callable[[Encoded], torch.Tensor] | None
    lossless: bool
    over: str = "every accepted input"
    #: bool mask: which items the consumer reads exactly (times factor)
    exact: Callable[[torch.Tensor], torch.Tensor] = _every
    origin: str = ""

    def __post_init__(self) -> None:
        if not self.lossless and self.exact is _every:
            raise FormatMismatch(
                f"encode {self.name}: it loses something; need exact, the mask of the items that are read as they were meant"
            )

    def __repr__(self) -> str:
        return f"Encode({self.name}, {'lossless' if self.lossless else 'loses bytes'}, read exactly over {self.over})"

    def __call__(self, x: torch.Tensor) -> Encoded:
        return self.forward(x)


def _bytes(name: str, x: torch.Tensor) -> torch.Tensor:
    return check.raw_bytes(f"encode {name}", "scale", x)


def _refuse(name: str, x: torch.Tensor, bad: torch.Tensor, why: str) -> None:
    if bool(bad.any()):
        first = int(bad.reshape(-1).to(torch.uint8).argmax())
        value = x.reshape(-1)[first].item()
        shown = f"0x{value:02x}" if isinstance(value, int) else f"{value!r}"
        raise FormatMismatch(f"encode {name}: {int(bad.sum())} of {x.numel()} items are refused, first {shown} at {first}: {why}")


# ---- Marlin, NVFP4: e4m3 -> S0E5M3, the upper byte of fp16(scale * 2^7) shifted left by one ------------------------------------------


def _e4m3_values(scale: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(E4M3.values.copy()).to(scale.device)[scale.long()]


def _s0e5m3(value: torch.Tensor) -> torch.Tensor:
    """f32 scales -> u8: fp16(value * 2^7) without its sign bit, upper 8 bits; exact for e4m3 values times a power of two in range."""
    return ((value * 128).to(torch.float16).view(torch.int16) >> 7 & 0xFF).to(torch.uint8)


def marlin_decode(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the Marlin kernel reads from S0E5M3 bytes: f32 values of ``scale * factor * 2^7``, as its bit tricks give them.

    fp16: ``bits = byte << 7``, always exact. bf16: bit 7 to bit 14, bits 6..0 to bits 10..4: exact when bit 7 is set (scale * factor at
    least 2^-6), else too small by 2^112.
    """
    b = data.view(torch.uint8).to(torch.int16)
    if dtype == torch.float16:
        return (b << 7).view(torch.float16).float()
    if dtype == torch.bfloat16:
        return ((b & 0x80) << 7 | (b & 0x7F) << 4).view(torch.bfloat16).float()
    raise FormatMismatch(f"encode marlin_nvfp4: activations are {dtype}; need bfloat16 or float16")


def _nvfp4_factor(rule: str, scale: torch.Tensor, dtype: torch.dtype) -> float:
    nonzero = scale[scale > 0]
    if rule == "v1" or dtype == torch.float16 or not nonzero.numel():
        return 1.0
    if rule == "v2":
        least = 128 * float(nonzero.min())
        return 2.0 ** math.ceil(math.log2(2 / least)) if least < 2 else 1.0
    return 2.0 ** math.floor(math.log2(448 / float(nonzero.max())))


def marlin_nvfp4(rule: str = "v3", dtype: torch.dtype = torch.bfloat16) -> Encode:
    """e4m3 scale bytes (not negative, not NaN) -> S0E5M3 bytes, by the rule of one generation of the preprocessing.

    v1 (SGLang 0.5.23, vLLM before #34577): factor 1; bf16 reads bytes 1..7 as zero. v2 (vLLM #34577): bf16 factor
    2^ceil(log2(2 / (128 min))) when 128 min < 2; overflows at the top for a wide range, then refused. v3 (vLLM #37502, in 0.26 and
    0.33): bf16 factor 2^floor(log2(448 / max)); what stays below 2^-6 becomes 0, with fp16 too. One factor for the whole tensor, all
    experts: min and max are over everything that is passed. The byte then needs ``marlin_global_scale``.
    """
    if rule not in ("v1", "v2", "v3") or dtype not in (torch.bfloat16, torch.float16):
        raise FormatMismatch(f"encode marlin_nvfp4: rule {rule!r}, dtype {dtype}; need v1, v2 or v3 and bfloat16 or float16")
    name = f"marlin_nvfp4_{rule}" + ("_fp16" if dtype == torch.float16 else "")

    def forward(x: torch.Tensor) -> Encoded:
        scale = _bytes(name, x)
        _refuse(name, scale, scale > 0x7E, "the format has no sign and no NaN; need e4m3 bytes 0x00..0x7e")
        value = _e4m3_values(scale)
        factor = _nvfp4_factor(rule, value, dtype)
        value = value * factor
        _refuse(name, scale, value > 448, f"times the factor {factor:g} they exceed 448; the range of the scales is too wide, use v3")
        if rule == "v3":
            value = torch.where(value * 128 < 2, 0.0, value)
        return Encoded(_s0e5m3(value), factor)

    def exact(x: torch.Tensor) -> torch.Tensor:
        data, factor = forward(x)
        return marlin_decode(data, dtype) == _e4m3_values(x.view(torch.uint8)) * (factor * 128)

    def inverse(encoded: Encoded) -> torch.Tensor:
        codes = torch.arange(0x7F, dtype=torch.uint8, device=encoded.data.device)
        table = torch.zeros(256, dtype=torch.uint8, device=codes.device)
        value = _e4m3_values(codes) * encoded.factor
        ok = value <= 448
        table[_s0e5m3(value[ok]).long()] = codes[ok]
        return table[encoded.data.long()]

    over = {
        ("v1", torch.bfloat16): "0 and 8..0x7e (scales from 2^-6 on)",
        ("v1", torch.float16): "0..0x7e",
        ("v2", torch.bfloat16): "every byte of an accepted tensor",
        ("v2", torch.float16): "0..0x7e",
        ("v3", torch.bfloat16): "0 and scales with scale * factor >= 2^-6",
        ("v3", torch.float16): "0 and 8..0x7e (scales from 2^-6 on)",
    }[rule, dtype]
    return Encode(name, forward, inverse if rule != "v3" else None, rule != "v3", over, exact, "vLLM, SGLang Marlin NVFP4")


def marlin_global_scale(global_scale: torch.Tensor, factor: float, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """``global_scale / factor * 2^119`` (bf16) or ``* 2^7`` (fp16), float32: undoes 2^-126 (2^-14) of the weight decode and 2^7.

    Raises FormatMismatch when float32 cannot hold it exactly.
    """
    power = {torch.bfloat16: 119, torch.float16: 7}.get(dtype)
    if power is None or global_scale.dtype != torch.float32:
        raise FormatMismatch(f"encode marlin_global_scale: {global_scale.dtype} for {dtype}; need float32, and bfloat16 or float16")
    out = global_scale.double() / factor * 2.0**power
    if bool((out.float().double() != out).any()):
        raise FormatMismatch(f"encode marlin_global_scale: the result leaves the float32 range, largest {float(out.abs().max()):g}")
    return out.float()


# ---- e8m0 bytes ----------------------------------------------------------------------------------------------------------------------


def rebase(add: int, low: int = 1, high: int = 254, name: str = "", origin: str = "") -> Encode:
    """Add ``add`` to e8m0 exponents: the scales times 2^add. Refuses bytes outside low..high and results outside 0..254."""
    name = name or f"rebase({add:+d})"
    low, high = max(low, -add), min(high, 254 - add)

    def forward(x: torch.Tensor) -> Encoded:
        scale = _bytes(name, x)
        _refuse(name, scale, (scale < low) | (scale > high), f"need e8m0 bytes {low}..{high}")
        return Encoded(scale + add if add >= 0 else scale - -add, 2.0**add)

    def inverse(encoded: Encoded) -> torch.Tensor:
        return encoded.data - add if add >= 0 else encoded.data + -add

    def exact(x: torch.Tensor) -> torch.Tensor:
        scale = _bytes(name, x)
        return (scale >= low) & (scale <= high)

    return Encode(name, forward, inverse, True, f"{low}..{high}", exact, origin)


def ue8m0_range(low: int, high: int, name: str, origin: str) -> Encode:
    """The bytes as they are, for a consumer that reads only low..high exactly; others are refused."""
    return rebase(0, low, high, name, origin)


def marlin_mxfp4(activation: str = "bf16") -> Encode:
    """MXFP4 scale bytes for Marlin: kept for bf16 (0 is read as 0.0, so 1..254 are exact); + 6 for 8-bit activations (0..248 in).

    fp16 is refused: the public preprocessing sends the byte through fp16, which destroys 214 of 256.
    """
    if activation == "bf16":
        return ue8m0_range(1, 254, "marlin_mxfp4", "vLLM, SGLang Marlin MXFP4")
    if activation == "a8":
        return rebase(6, 0, 248, "marlin_mxfp4_a8", "vLLM Marlin W4A8: exponent bias of fp4 -> fp8 is 2^3 - 2^1 = 6")
    raise FormatMismatch(f"encode marlin_mxfp4: activation {activation!r}; need 'bf16' or 'a8' (fp16 kernels do not exist for MXFP4)")


def _pack_forward(x: torch.Tensor) -> Encoded:
    if not isinstance(x, torch.Tensor) or x.dtype != torch.float32:
        raise FormatMismatch("encode fp32_to_ue8m0: need float32 scales")
    bits = x.contiguous().view(torch.int32)
    bad = (bits & -0x7F800001).ne(0) | (bits == 0) | (bits == 0x7F800000)
    _refuse("fp32_to_ue8m0", x, bad, "need powers of two from 2^-126 to 2^127 (bytes 1..254); zero has no byte, pad with 1.0")
    return Encoded((bits >> 23).to(torch.uint8), 1.0)


def _pack_inverse(encoded: Encoded) -> torch.Tensor:
    return (encoded.data.to(torch.int32) << 23).view(torch.float32)


def _pack_exact(x: torch.Tensor) -> torch.Tensor:
    bits = x.contiguous().view(torch.int32)
    return (bits & -0x7F800001).eq(0) & (bits != 0) & (bits != 0x7F800000)


#: float32 scales -> their exponent bytes, before ``deepgemm_sf``. Old DeepGEMM kernels truncate other values silently, new ones trap.
FP32_TO_UE8M0 = Encode(
    "fp32_to_ue8m0", _pack_forward, _pack_inverse, True, "powers of two 2^-126..2^127, bytes 1..254", _pack_exact, "DeepGEMM packed UE8M0"
)


def _all() -> Iterable[Encode]:
    for dtype in (torch.bfloat16, torch.float16):
        for rule in ("v1", "v2", "v3"):
            yield marlin_nvfp4(rule, dtype)
    yield marlin_mxfp4()
    yield marlin_mxfp4("a8")
    yield FP32_TO_UE8M0
    yield ue8m0_range(2, 252, "cpu_amx_mxfp4", "SGLang, vLLM CPU: int16 addition to the exponent field wraps outside 2..252")
    yield ue8m0_range(1, 254, "deepgemm_ue8m0", "DeepGEMM: bytes 0 and 255 trap on the device from sgl-deep-gemm 0.1.4 on")


_TABLE = {e.name: e for e in _all()}


def names() -> list[str]:
    """Names that ``get`` accepts."""
    return list(_TABLE)


def get(name: str) -> Encode:
    """The Encode of a name. Raises FormatMismatch for an unknown one."""
    if name not in _TABLE:
        raise FormatMismatch(f"encode: {unknown(name, _TABLE, 'fp4.encode.names()')}")
    return _TABLE[name]
