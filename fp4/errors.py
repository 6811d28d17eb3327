"""Typed errors. Every message reads: where: what is wrong; got; need; do this.

All of them are ``Fp4Error``, which is a ``ValueError``, so callers may catch one class. They are raised before
anything is written or launched.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "BackendUnavailable",
    "CheckpointError",
    "FormatMismatch",
    "Fp4Error",
    "LayoutError",
    "LayoutMismatch",
    "Unsupported",
]


class Fp4Error(ValueError):
    """Base of every error that fp4 raises on purpose."""


class FormatMismatch(Fp4Error):
    """A tensor has another format, dtype or shape than the call needs."""


class LayoutError(Fp4Error):
    """A layout spec is malformed, or a shape does not fit it."""


class LayoutMismatch(Fp4Error):
    """Bytes are stored in one order and the reader needs another."""


class CheckpointError(Fp4Error):
    """A checkpoint is damaged, contradicts itself, or uses a dialect that fp4 refuses."""


class BackendUnavailable(Fp4Error):
    """A library that was asked for by name is missing or unusable."""


class Unsupported(Fp4Error):
    """No backend can serve a problem; ``reasons`` maps backend name to the reason.

    >>> raise Unsupported("prepare: no backend for moe/nvfp4 on SM86", {"flashinfer": "needs SM100"})
    Traceback (most recent call last):
    fp4.errors.Unsupported: prepare: no backend for moe/nvfp4 on SM86: flashinfer: needs SM100
    """

    def __init__(self, message: str, reasons: Mapping[str, str] | None = None) -> None:
        self.reasons: dict[str, str] = dict(reasons or {})
        tail = "; ".join(f"{name}: {why}" for name, why in self.reasons.items())
        super().__init__(f"{message}: {tail}" if tail else message)
