"""Element and block formats, as data.

Sources: OCP Microscaling Formats (MX) v1.0 for e2m1, e4m3, ue8m0 and the MX blocks; NVIDIA's NVFP4 description for the
two-level scale; AMD Quark for the unsigned e5m3 scale.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fp4.errors import FormatMismatch, unknown

__all__ = [
    "AMDFP4",
    "E2M1",
    "E4M3",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "NVFP4_B32",
    "UE5M3",
    "UE8M0",
    "ElemFormat",
    "Format",
    "get",
    "names",
]


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class ElemFormat:
    """One scalar format.

    ``value = (-1)^s * 2^(max(e, 1) - bias) * (m / 2^man_bits + (e > 0))`` with the fields ``[s] e m`` from the top bit down;
    ue8m0 has no mantissa and no subnormals: ``value = 2^(byte - 127)``.
    """

    name: str
    bits: int
    exp_bits: int
    man_bits: int
    bias: int
    signed: bool
    #: codes (sign bit cleared) that are NaN
    nan_codes: tuple[int, ...] = ()
    #: ue8m0: exponent field 0 is 2^-bias, not a subnormal
    subnormals: bool = True

    @property
    def codes(self) -> int:
        """Number of codes, ``2^bits``."""
        return 1 << self.bits

    @cached_property
    def values(self) -> npt.NDArray[np.float32]:
        """f32 [2^bits]: the value of each code, NaN where the code is NaN. Exact in float32 for every format here."""
        code = np.arange(self.codes)
        magnitude = code & ((1 << (self.exp_bits + self.man_bits)) - 1)
        e, m = magnitude >> self.man_bits, magnitude & ((1 << self.man_bits) - 1)
        if self.subnormals:
            value = np.ldexp(m / 2.0**self.man_bits + (e > 0), np.maximum(e, 1) - self.bias)
        else:
            value = np.ldexp(1.0 + m / 2.0**self.man_bits, e - self.bias)
        value = np.where(np.isin(magnitude, self.nan_codes), np.nan, value)
        if self.signed:
            value = np.where(code >> (self.bits - 1), -value, value)
        table = value.astype(np.float32)
        table.setflags(write=False)
        return table

    @property
    def max(self) -> float:
        """Largest finite value."""
        return float(np.nanmax(self.values))


E2M1 = ElemFormat("e2m1", 4, 2, 1, 1, signed=True)
E4M3 = ElemFormat("e4m3", 8, 4, 3, 7, signed=True, nan_codes=(0x7F,))
UE8M0 = ElemFormat("ue8m0", 8, 8, 0, 127, signed=False, nan_codes=(0xFF,), subnormals=False)
#: AMD Quark's scale for AMDFP4: exponent 5 bits, bias 15, mantissa 3 bits, no sign. 0x78 = 1.0, 0x70 = 0.5, 0x7C = 1.5.
UE5M3 = ElemFormat("ue5m3", 8, 5, 3, 15, signed=False, nan_codes=(0xFF,))


@dataclass(frozen=True)
class Format:
    """A block format: elements of ``elem`` in blocks of ``block`` along one axis, one ``scale`` byte a block.

    ``value = elem[code] * scale[byte] * global_scale``; ``global_scale`` exists when ``tensor_scale`` is set.
    """

    name: str
    elem: ElemFormat
    block: int
    scale: ElemFormat
    #: a float32 multiplier for the whole tensor (or one an expert) is part of the format
    tensor_scale: bool = False
    aliases: tuple[str, ...] = field(default=(), compare=False)

    @property
    def codes_per_byte(self) -> int:
        """2 for e2m1 (low nibble = even element), 1 for e4m3."""
        return 8 // self.elem.bits

    @property
    def bits_per_element(self) -> float:
        """Storage in bits, block scales included: 4.5 for NVFP4, 4.25 for MXFP4."""
        return self.elem.bits + self.scale.bits / self.block

    def __str__(self) -> str:
        return self.name


NVFP4 = Format("nvfp4", E2M1, 16, E4M3, tensor_scale=True)
MXFP4 = Format("mxfp4", E2M1, 32, UE8M0)
MXFP8 = Format("mxfp8", E4M3, 32, UE8M0)
#: ModelOpt W4A8_NVFP4_FP8: NVFP4 with blocks of 32.
NVFP4_B32 = Format("nvfp4_b32", E2M1, 32, E4M3, tensor_scale=True)
#: AMD Quark AMDFP4: blocks of 16, unsigned e5m3 scales, no tensor scale.
AMDFP4 = Format("amdfp4", E2M1, 16, UE5M3)

_ALL = {f.name: f for f in (NVFP4, MXFP4, MXFP8, NVFP4_B32, AMDFP4)}


def names() -> list[str]:
    """Names that ``get`` accepts."""
    return list(_ALL)


def get(format: str | Format) -> Format:
    """The Format of a name; a Format is returned as it is. Raises FormatMismatch for an unknown name."""
    if isinstance(format, Format):
        return format
    found = _ALL.get(format.lower()) if isinstance(format, str) else None
    if found is None:
        raise FormatMismatch(f"format: {unknown(format, _ALL, 'fp4.formats.names()')}")
    return found
