"""``flashinfer_trtllm``: the routes of ``flashinfer`` that run on FlashInfer's trtllm kernels."""

from __future__ import annotations

from fp4.gpu.backends.flashinfer import Variant, exact_scale_range, probe, restore, run

__all__ = ["assumed", "exact_scale_range", "family", "layouts", "name", "prepare", "probe", "restore", "run", "supports"]

name = "flashinfer_trtllm"
#: FP4_DISABLE=flashinfer means these kernels too
family = "flashinfer"
_own = Variant("trtllm", 11)
supports, assumed, layouts, prepare = _own.supports, _own.assumed, _own.layouts, _own.prepare
