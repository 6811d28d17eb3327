"""The only reader of the process environment.

Environment variables choose a backend or its verbosity; they never change a number that a call returns.
"""

from __future__ import annotations

import os

__all__ = ["backend", "disabled", "strict"]


def backend() -> str | None:
    """``FP4_BACKEND``: the backend that ``prepare`` must use, as if passed as ``backend=``; None when unset."""
    return os.environ.get("FP4_BACKEND") or None


def disabled() -> frozenset[str]:
    """``FP4_DISABLE``: comma-separated backend names that ``prepare`` must not choose."""
    return frozenset(name.strip() for name in os.environ.get("FP4_DISABLE", "").split(",") if name.strip())


def strict() -> bool:
    """``FP4_STRICT=1``: check values too (top-k ids in range, block scales), at the cost of a device synchronisation."""
    return os.environ.get("FP4_STRICT", "0") not in ("", "0")
