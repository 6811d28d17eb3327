"""A fixed input for layouts, and digests of storage: one line pins a layout in another project's test suite."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fp4.layout import Chain, Layout

__all__ = ["counter_bytes", "digest"]


def __dir__() -> list[str]:
    return __all__


def counter_bytes(shape: Sequence[int]) -> npt.NDArray[np.uint8]:
    """u8 ``shape``: byte i of the row-major order is ``(i * 2654435761 mod 2^32) >> 24``; neighbours differ and no short period repeats."""
    n = int(np.prod(shape, dtype=np.int64))
    return ((np.arange(n, dtype=np.uint64) * 2654435761 % (1 << 32)) >> 24).astype(np.uint8).reshape(tuple(shape))


def digest(layout: Layout | Chain, shape: Sequence[int]) -> str:
    """First 16 hex digits of the SHA-256 of ``layout.apply(counter_bytes(shape))``."""
    return hashlib.sha256(np.asarray(layout.apply(counter_bytes(shape))).tobytes()).hexdigest()[:16]
