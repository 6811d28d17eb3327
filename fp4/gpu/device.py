"""Device facts, as plain values. Nothing here creates a CUDA context until ``Device.of`` is asked about a CUDA device.

A capability is a name, not a number: code built for 10.0 does not run on 12.1, so capabilities refuse ``<`` and ``>=``.
Backends list the capabilities that they serve and test membership. Tests inject devices: ``Device.fake((12, 1))``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from fp4.errors import Fp4Error, shown

__all__ = ["KNOWN", "SM8X", "SM90", "SM100", "SM120", "Capability", "Device"]


class Capability(tuple[int, int]):
    """(major, minor) of a CUDA device. Equality and membership only.

    >>> Capability(12, 1) >= Capability(10, 0)
    Traceback (most recent call last):
    TypeError: compute capabilities are not ordered: test membership in a set of them
    """

    __slots__ = ()

    def __new__(cls, major: int, minor: int) -> Capability:
        return super().__new__(cls, (major, minor))

    @property
    def major(self) -> int:
        """9 of 9.0."""
        return self[0]

    @property
    def minor(self) -> int:
        """0 of 9.0."""
        return self[1]

    def _refuse(self, other: object) -> NoReturn:
        raise TypeError("compute capabilities are not ordered: test membership in a set of them")

    __lt__ = _refuse
    __le__ = _refuse
    __gt__ = _refuse
    __ge__ = _refuse

    def __reduce__(self) -> tuple[type[Capability], tuple[int, int]]:
        return Capability, (self[0], self[1])

    def __repr__(self) -> str:
        return f"Capability({self[0]}, {self[1]})"

    def __str__(self) -> str:
        return f"SM{self[0]}{self[1]}"


SM8X = frozenset({Capability(8, 0), Capability(8, 6), Capability(8, 7), Capability(8, 9)})
SM90 = frozenset({Capability(9, 0)})
#: datacenter Blackwell: tcgen05 tensor cores
SM100 = frozenset({Capability(10, 0), Capability(10, 3)})
#: consumer Blackwell and GB10: mma.sync block-scaled, about 100 KB of shared memory
SM120 = frozenset({Capability(12, 0), Capability(12, 1)})

#: opt-in shared memory of one block in bytes, CUDA programming guide, "Technical Specifications per Compute Capability"
KNOWN: dict[Capability, int] = {
    Capability(7, 0): 98304,
    Capability(7, 5): 65536,
    Capability(8, 0): 166912,
    Capability(8, 6): 101376,
    Capability(8, 7): 166912,
    Capability(8, 9): 101376,
    Capability(9, 0): 232448,
    Capability(10, 0): 232448,
    Capability(10, 3): 232448,
    Capability(11, 0): 232448,
    Capability(12, 0): 101376,
    Capability(12, 1): 101376,
}


@dataclass(frozen=True)
class Device:
    """What a backend may know about a device.

    ``kind`` is "cpu", "cuda" or "hip"; ``cc`` is None off CUDA; ``shared_memory`` is the opt-in size of one block in bytes;
    ``index`` is None for an injected device, which nothing can run on.
    """

    kind: str
    cc: Capability | None = None
    name: str = ""
    shared_memory: int = 0
    sms: int = 0
    index: int | None = None

    @staticmethod
    def of(device: Device | torch.device | str | int | None) -> Device:
        """Facts of a real device; None means the current CUDA device, or the CPU where there is none. A Device is returned as it is."""
        if isinstance(device, Device):
            return device
        if device is None:
            device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        if isinstance(device, str) and device.lower().startswith("sm"):
            return Device.fake(_parse_sm(device))
        try:
            d = torch.device(device)
        except (RuntimeError, TypeError, ValueError) as e:
            raise Fp4Error(
                f"device: {shown(device)} is no torch device ({str(e).splitlines()[0]}); need 'cpu', 'cuda', 'cuda:1' ... "
                "or, for a GPU that is not here, its capability such as 'sm90'"
            ) from e
        if d.type != "cuda":
            return _CPU if d.type == "cpu" else Device(kind=d.type, name=d.type)
        if not torch.cuda.is_available():
            raise Fp4Error(
                f"device: {d} was asked for and torch sees no CUDA device; install a CUDA build of torch, or name 'cpu' "
                "or a capability such as 'sm90'"
            )
        if d.index is not None and d.index >= torch.cuda.device_count():
            raise Fp4Error(f"device: {d} was asked for and torch sees {torch.cuda.device_count()} CUDA devices")
        return _cuda(torch.cuda.current_device() if d.index is None else d.index)

    @staticmethod
    def fake(cc: tuple[int, int], name: str = "injected", shared_memory: int | None = None, sms: int = 132) -> Device:
        """A CUDA device that is not there: for ``explain`` and tests."""
        c = Capability(*cc)
        return Device("cuda", c, name, KNOWN.get(c, 101376) if shared_memory is None else shared_memory, sms)

    @property
    def torch(self) -> torch.device:
        """The torch device; "meta" for an injected one."""
        if self.kind == "cpu":
            return torch.device("cpu")
        return torch.device("meta") if self.index is None else torch.device("cuda", self.index)

    def to_json(self) -> dict[str, Any]:
        """Plain values that ``from_json`` reads back."""
        cc = None if self.cc is None else list(self.cc)
        return {"kind": self.kind, "cc": cc, "name": self.name, "shared_memory": self.shared_memory, "sms": self.sms}

    @staticmethod
    def from_json(d: dict[str, Any]) -> Device:
        """What ``to_json`` gave."""
        cc = None if d["cc"] is None else Capability(*d["cc"])
        return Device(d["kind"], cc, d["name"], d["shared_memory"], d["sms"])

    def same_target(self, other: Device) -> bool:
        """True when bytes prepared for one may run on the other: same kind and the same capability."""
        return self.kind == other.kind and self.cc == other.cc

    def __str__(self) -> str:
        if self.cc is None:
            return self.kind.upper()
        return f"{self.cc} ({self.name})" if self.name and self.name != "injected" else str(self.cc)


_CPU = Device("cpu", name="cpu")


def _parse_sm(text: str) -> Capability:
    digits = text.lower().removeprefix("sm").lstrip("_")
    if not (digits.isascii() and digits.isdigit()) or not 2 <= len(digits) <= 4:
        raise Fp4Error(f"device: {shown(text)} is no capability; need 'sm90', 'sm120' ...")
    return Capability(int(digits[:-1]), int(digits[-1]))


@functools.lru_cache(maxsize=64)
def _cuda(index: int) -> Device:
    p = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return Device("hip", None, p.name, 65536, p.multi_processor_count, index)
    cc = Capability(p.major, p.minor)
    shared = getattr(p, "shared_memory_per_block_optin", None) or KNOWN.get(cc, 49152)
    return Device("cuda", cc, p.name, int(shared), p.multi_processor_count, index)
