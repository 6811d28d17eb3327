"""The definition of every number: torch references, and golden Triton kernels and device functions (``triton_*``).

``fp4.ref.matmul.matmul`` and ``fp4.ref.moe.moe`` are what backends are compared with. Modules are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = [
    "activation",
    "codes",
    "matmul",
    "moe",
    "quantize",
    "scales",
    "triton_activation",
    "triton_codes",
    "triton_layout",
    "triton_matmul",
    "triton_quantize",
    "triton_scales",
]


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:
    from fp4.ref import activation as activation
    from fp4.ref import codes as codes
    from fp4.ref import matmul as matmul
    from fp4.ref import moe as moe
    from fp4.ref import quantize as quantize
    from fp4.ref import scales as scales
    from fp4.ref import triton_activation as triton_activation
    from fp4.ref import triton_codes as triton_codes
    from fp4.ref import triton_layout as triton_layout
    from fp4.ref import triton_matmul as triton_matmul
    from fp4.ref import triton_quantize as triton_quantize
    from fp4.ref import triton_scales as triton_scales
else:

    def __getattr__(name):
        import importlib

        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"{__name__}.{name}")
