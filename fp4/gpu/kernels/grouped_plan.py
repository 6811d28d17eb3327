"""Which kernel and tile sizes serve how many rows an expert: a small table, chosen by shape class, never tuned at run time."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Plan", "choose"]

Config = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Plan:
    """mt: rows of x in a block. large: the wgmma kernel. first, second: constants of the two products."""

    large: bool
    mt: int
    first: Config
    second: Config


def small(mt: int, wk: int, r: int, u: int) -> Plan:
    c = (("WK", wk), ("R", r), ("U", u))
    return Plan(False, mt, c, c)


def large(mt: int, wn: int, r: int, xs: int, deep: int = 1, low: int = 0, maxnreg: int = 0, u: int = 2) -> Plan:
    c = (("WN", wn), ("R", r), ("U", u), ("XS", xs), ("DEEP", deep), ("LOW", low or mt)) + ((("maxnreg", maxnreg),) if maxnreg else ())
    return Plan(True, mt, c, c)


def choose(pairs: int, experts: int, n: int, k: int, capability: tuple[int, int]) -> Plan:
    """The plan for ``pairs`` (token, slot) pairs over ``experts`` local experts."""
    load = pairs / experts
    wgmma = capability[0] == 9
    if load <= 1:
        return small(8, 2, 2, 4)
    if load <= 4:
        return small(8, 1, 4, 4)
    if not wgmma:
        return small(16, 2, 4, 2)
    if load <= 12:
        return large(16, 4, 2, 5, u=1)
    return large(64, 8, 1, 5, low=32, u=1)
