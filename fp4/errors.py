"""Typed errors. Every message reads: where: what is wrong; got; need; do this.

All of them are ``Fp4Error``, which is a ``ValueError``, so callers may catch one class. They are raised before
anything is written or launched.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "BackendUnavailable",
    "CheckpointDialect",
    "CheckpointError",
    "FormatMismatch",
    "Fp4Error",
    "LayoutError",
    "LayoutMismatch",
    "Unsupported",
    "shown",
    "unknown",
]


def __dir__() -> list[str]:
    return __all__


def shown(value: Any) -> str:
    """``value`` as a message shows it: on one line, at most 80 characters. A tensor or array by dtype and shape: its values may be many,
    and on another device.

    >>> shown("nvfp5"), shown([1, 2])
    ("'nvfp5'", '[1, 2]')
    """
    try:
        if hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type):
            return f"a {type(value).__name__} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        if isinstance(value, int) and value.bit_length() > 256:
            return f"an integer of {value.bit_length()} bits"
        text = " ".join(repr(value).split())
    except Exception:  # whose own repr or shape fails
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def unknown(name: object, names: Iterable[str], listed_by: str) -> str:
    """The part of a message about a name that is none of ``names``: the nearest ones first, then all of them, or, beyond six, how many
    there are and what lists them.

    >>> unknown("sf128x4", [*"abcdef", "sf_128x4"], "fp4.layouts.names()")
    "'sf128x4' is not known; did you mean 'sf_128x4'? fp4.layouts.names() lists all 7"
    """
    by_lower = {n.lower(): n for n in names}
    near = [by_lower[n] for n in difflib.get_close_matches(name[:80].lower(), by_lower, 3, 0.6)] if isinstance(name, str) else []
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    rest = f"need one of {', '.join(by_lower.values())}" if len(by_lower) <= 6 else f"{listed_by} lists all {len(by_lower)}"
    return f"{shown(name)} is not known; {hint}{rest}"


class Fp4Error(ValueError):
    """Base of every error that fp4 raises on purpose."""


class FormatMismatch(Fp4Error):
    """A tensor has another format, dtype or shape than the call needs."""


class LayoutError(Fp4Error):
    """A layout spec is malformed, or a shape does not fit it."""


class LayoutMismatch(Fp4Error):
    """Bytes are stored in one order and the reader needs another."""


class CheckpointError(Fp4Error):
    """A checkpoint is damaged or contradicts itself. What it quotes of a file may be any length: a message over 1,000 characters loses its
    middle."""

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= 1000 else f"{message[:700]} ... {message[-250:]}")


class CheckpointDialect(CheckpointError):
    """A checkpoint is of a dialect, or names a quantisation method or algorithm, that fp4 does not know or refuses to read."""


class BackendUnavailable(Fp4Error):
    """A library that was asked for by name is missing or unusable."""


class Unsupported(Fp4Error):
    """No backend can serve a problem; ``reasons`` maps backend name to the reason. The message names those of one reason together.

    >>> raise Unsupported("prepare: no backend for moe/nvfp4 on SM86", {"flashinfer": "needs SM100"})
    Traceback (most recent call last):
    fp4.errors.Unsupported: prepare: no backend for moe/nvfp4 on SM86: flashinfer: needs SM100
    """

    def __init__(self, message: str, reasons: Mapping[str, str] | None = None) -> None:
        self.reasons: dict[str, str] = dict(reasons or {})
        by_reason: dict[str, list[str]] = {}
        for name, why in self.reasons.items():
            by_reason.setdefault(why, []).append(name)
        tail = "; ".join(f"{', '.join(names)}: {why}" for why, names in by_reason.items())
        super().__init__(f"{message}: {tail}" if tail else message)
