"""NVFP4 and MXFP4 formats, numerics, storage layouts and kernels, each described once.

::

    q = fp4.quantize(x, "nvfp4")            codes and scales, a QuantizedTensor; fp4.dequantize(q) gives values
    ck = fp4.open_checkpoint(path)          ck.quantized(name), ck.dequantize(name), of any producer
    w = fp4.prepare(q)                      the bytes of one backend; y = fp4.matmul(x, w)
    ex = fp4.prepare_moe(w13, w2, ...)      y = fp4.moe(x, ex, topk_ids, topk_weights)
    fp4.layouts["sf_128x4"].apply(q.scale)  the bytes of a kernel; .invert, .offset, .formula
    fp4.recipes["modelopt"]                 how a library rounds, for quantize(recipe=)
    fp4.explain(op="moe", device="sm100")   which backend, and why not each other one

``help(fp4.quantize)`` and so on have shapes, dtypes and errors; ``docs/reference.md`` lists every name. Names resolve on first use, so
``import fp4`` imports neither Triton nor any vendor library and creates no CUDA context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    "open_checkpoint": ("fp4.checkpoint", "open_checkpoint"),
    **{n: (f"fp4.{n}", "") for n in ("checkpoint", "encode", "errors", "formats", "fuse", "ref", "testing")},
}

__all__ = ["__version__", *sorted(_EXPORTS)]


def __dir__() -> list[str]:
    return sorted({*__all__, *(n for n in globals() if n.startswith("__"))})


# ``as`` with the same name is how a stub exports: type checkers and editors see these imports, Python sees ``__getattr__``. Hidden from
# them, ``__getattr__`` cannot turn a misspelt name into ``Any``.
if TYPE_CHECKING:
    from fp4 import checkpoint as checkpoint
    from fp4 import encode as encode
    from fp4 import errors as errors
    from fp4 import formats as formats
    from fp4 import fuse as fuse
    from fp4 import ref as ref
    from fp4 import testing as testing
    from fp4.checkpoint import open_checkpoint as open_checkpoint
    from fp4.errors import BackendUnavailable as BackendUnavailable
    from fp4.errors import CheckpointDialect as CheckpointDialect
    from fp4.errors import CheckpointError as CheckpointError
    from fp4.errors import FormatMismatch as FormatMismatch
    from fp4.errors import Fp4Error as Fp4Error
    from fp4.errors import LayoutError as LayoutError
    from fp4.errors import LayoutMismatch as LayoutMismatch
    from fp4.errors import Unsupported as Unsupported
    from fp4.formats import AMDFP4 as AMDFP4
    from fp4.formats import MXFP4 as MXFP4
    from fp4.formats import MXFP8 as MXFP8
    from fp4.formats import NVFP4 as NVFP4
    from fp4.formats import NVFP4_B32 as NVFP4_B32
    from fp4.formats import Format as Format
    from fp4.layer import explain as explain
    from fp4.layer import matmul as matmul
    from fp4.layer import moe as moe
    from fp4.layer import prepare as prepare
    from fp4.layer import prepare_moe as prepare_moe
    from fp4.layer import warmup as warmup
    from fp4.layout import Layout as Layout
    from fp4.layout import Segmented as Segmented
    from fp4.layouts import layouts as layouts
    from fp4.ops import dequantize as dequantize
    from fp4.ops import fake_quantize as fake_quantize
    from fp4.ops import quantize as quantize
    from fp4.ops import to_layout as to_layout
    from fp4.prepared import Prepared as Prepared
    from fp4.prepared import PreparedMoE as PreparedMoE
    from fp4.prepared import load as _load
    from fp4.recipe import Recipe as Recipe
    from fp4.recipe import recipes as recipes
    from fp4.ref.activation import ReLU2 as ReLU2
    from fp4.ref.activation import SiLU as SiLU
    from fp4.ref.activation import SiTU as SiTU
    from fp4.ref.activation import SwiGLU as SwiGLU
    from fp4.tensor import QuantizedTensor as QuantizedTensor

    load_prepared = _load
else:

    def __getattr__(name):
        import importlib

        target = _EXPORTS.get(name)
        if target is None:
            raise AttributeError(f"module 'fp4' has no attribute {name!r}")
        module = importlib.import_module(target[0])
        value = getattr(module, target[1]) if target[1] else module
        globals()[name] = value
        return value
