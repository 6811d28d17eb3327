"""FlashInfer, found at run time. Functions are bound by keyword, options are probed by attribute and signature, never by version.

Positions moved in almost every release (``cutlass_fused_moe`` in 0.6.11, 0.6.15, 0.6.17 and 0.6.18), so nothing here passes a
positional argument, and an argument that an installed release does not know is either dropped by name (``optional``) or an error.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from fp4.errors import BackendUnavailable
from fp4.gpu.registry import No, Ok

__all__ = ["Function", "enum", "find", "need", "probe", "reset", "version"]

#: name -> where it may live, first hit wins
_WHERE: dict[str, tuple[str, ...]] = {
    "fp4_quantize": ("flashinfer", "flashinfer.fp4_quantization"),
    "mxfp8_quantize": ("flashinfer", "flashinfer.fp8_quantization"),
    "mm_fp4": ("flashinfer", "flashinfer.gemm"),
    "cutlass_fused_moe": ("flashinfer.fused_moe", "flashinfer"),
    "trtllm_fp4_block_scale_moe": ("flashinfer.fused_moe", "flashinfer"),
    "trtllm_fp4_block_scale_routed_moe": ("flashinfer.fused_moe", "flashinfer"),
    "scaled_fp4_grouped_quantize": ("flashinfer", "flashinfer.fp4_quantization"),
    "silu_and_mul_scaled_nvfp4_experts_quantize": ("flashinfer", "flashinfer.activation"),
    "grouped_gemm_nt_masked": ("flashinfer.gemm", "flashinfer.cute_dsl.blockscaled_gemm"),
    "interleave_moe_scales_for_sm90_mixed_gemm": ("flashinfer.fused_moe", "flashinfer.fused_moe.prepare"),
    "interleave_moe_weights_for_sm90_mixed_gemm": ("flashinfer.fused_moe", "flashinfer.fused_moe.prepare"),
    "ActivationType": ("flashinfer.fused_moe", "flashinfer.tllm_enums", "flashinfer"),
    "RoutingMethodType": ("flashinfer.fused_moe", "flashinfer.tllm_enums", "flashinfer"),
    "SfLayout": ("flashinfer", "flashinfer.tllm_enums"),
}


class Function:
    """One FlashInfer function with the parameter names of the installed release.

    ``bind(("a",), {"b": None})`` is the function to be called with ``a=...``; ``b`` is filled in only where the release has it. A
    required name that the release does not know raises BackendUnavailable before anything is launched.
    """

    def __init__(self, name: str, fn: Callable[..., Any]) -> None:
        self.name, self.fn = name, fn
        parameters = inspect.signature(fn).parameters.values()
        self.parameters = {p.name: p for p in parameters}
        self.open = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def has(self, parameter: str) -> bool:
        """Whether the installed release knows the parameter by name."""
        return parameter in self.parameters

    def bind(self, required: tuple[str, ...], optional: dict[str, Any] | None = None) -> Callable[..., Any]:
        """The function with ``optional`` arguments that it knows already filled in; ``required`` names are checked here, once."""
        missing = [n for n in required if n not in self.parameters and not self.open]
        if missing:
            raise BackendUnavailable(
                f"flashinfer {version()}: {self.name} has no parameter {', '.join(missing)}; it has {', '.join(self.parameters)}; "
                "install a release between 0.6.11 and 0.7.4"
            )
        known = {n: v for n, v in (optional or {}).items() if n in self.parameters}
        return functools.partial(self.fn, **known)

    def takes_tuple(self, parameter: str) -> bool:
        """Whether the annotation of a parameter allows a tuple (``topk_ids`` of the routed MoE, since 0.6.13)."""
        return parameter in self.parameters and "uple" in str(self.parameters[parameter].annotation)


@functools.lru_cache(maxsize=64)
def _find(name: str) -> Any:
    for where in _WHERE[name]:
        try:
            found = getattr(importlib.import_module(where), name, None)
        except ImportError:
            continue
        if found is not None:
            return found
    return None


@functools.lru_cache(maxsize=64)
def find(name: str) -> Function | None:
    """The function, or None where the installed release does not have it (or its dependencies are missing)."""
    found = _find(name)
    return None if found is None else Function(name, found)


def need(name: str) -> Function:
    """The function; raises BackendUnavailable where it is missing."""
    found = find(name)
    if found is None:
        raise BackendUnavailable(f"flashinfer {version()}: {name} is not there; looked in {', '.join(_WHERE[name])}")
    return found


def enum(name: str, member: str) -> Any:
    """A member of one of FlashInfer's enums by name, or None where the release does not have it."""
    return getattr(_find(name), member, None)


def version() -> str:
    """Version string, for messages and for ``Prepared.versions`` only: no decision depends on it."""
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return "(unknown version)"


@functools.lru_cache(maxsize=1)
def probe() -> Ok | No:
    """Is FlashInfer importable? It costs seconds, so a missing package is noticed before the import."""
    if importlib.util.find_spec("flashinfer") is None:
        return No("not installed; pip install flashinfer-python")
    try:
        importlib.import_module("flashinfer")
    except Exception as e:
        return No(f"flashinfer {version()} fails to import: {type(e).__name__}: {e}")
    return Ok(0, f"flashinfer {version()}")


def reset() -> None:
    """Forget what was found (tests install and patch releases)."""
    for cached in (_find, find, probe):
        cached.cache_clear()
