"""Which kernel and tile sizes serve how many rows an expert: a small table, chosen by shape class, never tuned at run time."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Plan", "choose"]

Config = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Plan:
    """mt: rows of x in a block. kernel: "small" (mma.sync), "large" (wgmma) or "wide" (wgmma, warp groups that fetch and that multiply).

    first, second: constants of the two products.
    """

    kernel: str
    mt: int
    first: Config
    second: Config

    @property
    def large(self) -> bool:
        """Whether x comes in the fragments' k order (``permute_rows``)."""
        return self.kernel != "small"


def small(mt: int, wk: int, r: int, u: int) -> Plan:
    c = (("WK", wk), ("R", r), ("U", u))
    return Plan("small", mt, c, c)


def large(mt: int, wn: int, r: int, xs: int, deep: int = 1, low: int = 0, maxnreg: int = 0, u: int = 2) -> Plan:
    c = (("WN", wn), ("R", r), ("U", u), ("XS", xs), ("DEEP", deep), ("LOW", low or mt)) + ((("maxnreg", maxnreg),) if maxnreg else ())
    return Plan("large", mt, c, c)


def wide(
    mt: int,
    ex: int = 0,
    low: int = 0,
    c: int = 3,
    r: int = 1,
    xs: int = 6,
    u: int = 1,
    g: int = 2,
    deep: int = 0,
    rp: int = 56,
    per: int = 1,
) -> Plan:
    """c warp groups of 64 r weight rows multiply; blocks of at most mt + ex rows. ``per`` programs an SM share all its registers."""
    maxnreg = min(65536 // (128 * (c + 1) * per) // 8 * 8, 232)
    regs = min((maxnreg * (c + 1) - rp) // c // 8 * 8, 232)
    f = (("C", c), ("R", r), ("U", u), ("MT", mt), ("LOW", low or mt), ("EX", ex), ("XS", xs), ("G", g), ("DEEP", deep))
    f += (("RC", regs), ("RP", rp), ("maxnreg", maxnreg), ("per", per))
    return Plan("wide", mt + ex, f, f)


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
    if load < 96:
        return large(64, 8, 1, 5, low=32, u=1)
    return wide(128, 32, low=64)
