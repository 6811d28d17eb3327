"""The only reader of the process environment.

Environment variables choose a backend or its verbosity; they never change a number that a call returns.
"""

from __future__ import annotations

import os

from fp4.errors import Fp4Error, shown

__all__ = ["NAMES", "backend", "disabled", "settings", "strict", "unknown_settings"]


#: every variable that something here reads
NAMES = ("FP4_BACKEND", "FP4_DISABLE", "FP4_STRICT")
_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def backend() -> str | None:
    """``FP4_BACKEND``: the backend that ``prepare`` must use, as if passed as ``backend=``; None when unset."""
    return os.environ.get("FP4_BACKEND", "").strip() or None


def disabled() -> frozenset[str]:
    """``FP4_DISABLE``: comma-separated backend names that ``prepare`` must not choose."""
    return frozenset(name.strip() for name in os.environ.get("FP4_DISABLE", "").split(",") if name.strip())


def strict() -> bool:
    """``FP4_STRICT=1``: check values too (every top-k id, every block scale), at the cost of a device synchronisation. Raises Fp4Error
    for a value that is neither on nor off: "false" must not switch it on."""
    value = os.environ.get("FP4_STRICT", "").strip().lower()
    if value not in _ON and value not in _OFF:
        raise Fp4Error(f"environment: FP4_STRICT is {shown(value)}; need 1 or 0")
    return value in _ON


def settings() -> dict[str, str]:
    """Every variable that is set and speaks to fp4, or chooses Triton's interpreter; for ``fp4 doctor``."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(("FP4_", "TRITON_INTERPRET"))}


def unknown_settings() -> list[str]:
    """Variables named ``FP4_...`` that nothing reads: misspelt, most likely, and without effect."""
    return [name for name in settings() if name.startswith("FP4_") and name not in NAMES]
