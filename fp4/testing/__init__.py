"""Public test tools: byte comparison, layout mutants, vendor bytes and Hypothesis strategies (which need ``pip install hypothesis``).

``from fp4.testing import assert_same_bytes, mutants, strategies``
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fp4.testing.compare import assert_same_bytes
from fp4.testing.mutants import mutants

__all__ = ["assert_same_bytes", "goldens", "mutants", "strategies"]


def __getattr__(name: str) -> Any:
    if name in ("goldens", "strategies"):
        return importlib.import_module(f"fp4.testing.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if TYPE_CHECKING:
    from fp4.testing import goldens, strategies
