"""fp4: NVFP4 and MXFP4 formats, numerics, storage layouts and kernels, each described once.

Names resolve on first use, so ``import fp4`` imports neither Triton nor any vendor library and creates no CUDA context.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

#: public name -> (module, attribute); an empty attribute means the module itself
_EXPORTS: dict[str, tuple[str, str]] = {
    **{n: ("fp4.formats", n) for n in ("AMDFP4", "MXFP4", "MXFP8", "NVFP4", "NVFP4_B32", "Format")},
    **{n: ("fp4.errors", n) for n in ("BackendUnavailable", "CheckpointDialect", "CheckpointError", "FormatMismatch")},
    **{n: ("fp4.errors", n) for n in ("Fp4Error", "LayoutError", "LayoutMismatch", "Unsupported")},
    "QuantizedTensor": ("fp4.tensor", "QuantizedTensor"),
    "Recipe": ("fp4.recipe", "Recipe"),
    "recipes": ("fp4.recipe", "recipes"),
    "Layout": ("fp4.layout", "Layout"),
    "Segmented": ("fp4.layout", "Segmented"),
    "layouts": ("fp4.layouts", "layouts"),
    **{n: ("fp4.ref.activation", n) for n in ("SiLU", "SiTU", "SwiGLU", "ReLU2")},
    **{n: ("fp4.ops", n) for n in ("dequantize", "fake_quantize", "quantize", "to_layout")},
    **{n: ("fp4.layer", n) for n in ("explain", "matmul", "moe", "prepare", "prepare_moe", "warmup")},
    **{n: ("fp4.prepared", n) for n in ("Prepared", "PreparedMoE")},
    "load_prepared": ("fp4.prepared", "load"),
    "fuse": ("fp4.fuse", ""),
    "open_checkpoint": ("fp4.checkpoint", "open_checkpoint"),
    "testing": ("fp4.testing", ""),
}

__all__ = ["__version__", *sorted(_EXPORTS)]


def __getattr__(name: str) -> Any:
    target = _EXPORTS.get(name)
    if target is None:
        raise AttributeError(f"module 'fp4' has no attribute {name!r}")
    module = importlib.import_module(target[0])
    value = getattr(module, target[1]) if target[1] else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(n for n in globals() if n.startswith("__"))})


if TYPE_CHECKING:  # the same names, for type checkers and editors
    from fp4.errors import (  # noqa: F401
        BackendUnavailable,
        CheckpointDialect,
        CheckpointError,
        FormatMismatch,
        Fp4Error,
        LayoutError,
        LayoutMismatch,
        Unsupported,
    )
    from fp4.formats import AMDFP4, MXFP4, MXFP8, NVFP4, NVFP4_B32, Format  # noqa: F401
    from fp4.tensor import QuantizedTensor  # noqa: F401
