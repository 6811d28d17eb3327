"""``flashinfer_cutedsl``: the routes of ``flashinfer`` that run on FlashInfer's cutedsl kernels."""

from __future__ import annotations

from fp4.gpu.backends.flashinfer import Variant, exact_scale_range, probe, restore, run

__all__ = ["assumed", "exact_scale_range", "family", "layouts", "name", "prepare", "probe", "restore", "run", "supports"]

name = "flashinfer_cutedsl"
#: FP4_DISABLE=flashinfer means these kernels too
family = "flashinfer"
_own = Variant("cutedsl", 14)
supports, assumed, layouts, prepare = _own.supports, _own.assumed, _own.layouts, _own.prepare
