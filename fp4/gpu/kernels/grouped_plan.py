"""Which kernel and tile sizes serve how many rows an expert: a small table, chosen by shape class, never tuned at run time."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Plan", "choose", "plans"]

Config = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Plan:
    """mt: rows of x in a block. kernel: "small" (mma.sync), "large" (wgmma) or "wide" (wgmma, warp groups that fetch and that multiply).

    config: constants of both products. overlap: each kernel's start overlaps the end of the one in front (SM90 and newer, ``pdl``).
    """

    kernel: str
    mt: int
    config: Config
    overlap: bool = False

    @property
    def large(self) -> bool:
        """Whether x comes in the fragments' k order (``permute_rows``)."""
        return self.kernel != "small"

    @property
    def light(self) -> int:
        """Most rows of an expert whose block takes the kernel's smaller tile; 0: all blocks cost the same."""
        f = dict(self.config)
        return f["MT"] if f.get("EX") else f["LOW"] if f.get("LOW", self.mt) < self.mt else 0


def small(mt: int, wk: int, r: int, u: int) -> Plan:
    return Plan("small", mt, (("WK", wk), ("R", r), ("U", u)))


def large(mt: int, wn: int, r: int, low: int = 0, overlap: bool = False) -> Plan:
    """wn warps of 16 r weight rows; blocks of at most ``low`` rows take a smaller tile."""
    return Plan("large", mt, (("WN", wn), ("R", r), ("XS", 4), ("LOW", low or mt)), overlap)


def wide(
    mt: int, ex: int, *, low: int = 0, c: int, xs: int, u: int, ahead: bool, rp: int, per: int, turn: int = 0, overlap: bool = False
) -> Plan:
    """c warp groups of 64 weight rows multiply; blocks of at most mt + ex rows. ``per`` programs an SM share all its registers.

    turn: chunks that the fetching warp group takes in one turn of its loop, 4 // u unless given.
    """
    maxnreg = min(65536 // (128 * (c + 1) * per) // 8 * 8, 232)
    regs = min((maxnreg * (c + 1) - rp) // c // 8 * 8, 232)
    f = (("C", c), ("U", u), ("MT", mt), ("LOW", low or mt), ("EX", ex), ("XS", xs), ("AHEAD", ahead), ("TURN", turn or 4 // u))
    f += (("RC", regs), ("RP", rp), ("maxnreg", maxnreg), ("per", per))
    return Plan("wide", mt + ex, f, overlap)


#: most rows an expert (pairs / experts) that a plan is chosen for, and the plan. Measured on an H200 with 128 experts at 0.03, 0.5, 2
#: and 4 rows, then 8, 16, 32, 64 and 128 (benchmarks/notes/moe.md); the limits lie between those points, where blocks begin to overflow
_ANY: tuple[tuple[float, Plan], ...] = ((1, small(8, 2, 2, 4)), (4, small(8, 1, 4, 4)))
_REST = small(16, 2, 4, 2)
_HOPPER: tuple[tuple[float, Plan], ...] = (
    *_ANY,
    (12, large(16, 4, 2, overlap=True)),
    (24, large(32, 4, 2, low=16)),
    (40, wide(32, 16, c=2, xs=4, u=2, ahead=True, rp=56, per=2, overlap=True)),
    (80, wide(64, 32, c=3, xs=6, u=1, ahead=True, rp=56, per=1)),
    (float("inf"), wide(128, 32, low=64, c=3, xs=6, u=1, ahead=False, rp=56, per=1, turn=1)),
)


def plans(capability: tuple[int, int]) -> list[tuple[float, Plan]]:
    """(most rows an expert, plan), all that ``choose`` can pick."""
    return list(_HOPPER if capability[0] == 9 else (*_ANY, (float("inf"), _REST)))


def choose(pairs: int, experts: int, capability: tuple[int, int]) -> Plan:
    """The plan for ``pairs`` (token, slot) pairs over ``experts``, all that ids speak of: a rank with some has its share of pairs."""
    return next(p for most, p in plans(capability) if pairs <= most * experts)
