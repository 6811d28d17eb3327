"""Public test tools: byte comparison, layout mutants, vendor bytes and Hypothesis strategies (which need ``pip install hypothesis``).

``from fp4.testing import assert_same_bytes, mutants, strategies``
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp4.testing.compare import assert_same_bytes
from fp4.testing.mutants import mutants

__all__ = ["assert_same_bytes", "goldens", "mutants", "strategies"]


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:
    from fp4.testing import goldens as goldens
    from fp4.testing import strategies as strategies
else:

    def __getattr__(name):
        import importlib

        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"{__name__}.{name}")
