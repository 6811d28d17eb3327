"""FlashInfer on a CPU, pretending to be a given GPU, with the compiled modules replaced by a recorder.

Everything in Python runs for real: signatures, argument checks, capability decorators, the autotuner's fallback. Only these
are replaced:

* the answers about the device (``get_compute_capability``, ``torch.cuda.device``, the SM count),
* ``JitSpec.build_and_load``: returns a ``CompiledModule`` whose functions record their arguments and call the emulator,
* for back ends that are no FlashInfer module (cuDNN graphs, CuTe-DSL kernels): the getter of the compiled object.

The emulators (``emulate.py``) hang on the recorder by function name and fill the output buffers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", tempfile.mkdtemp(prefix="fp4-flashinfer-"))
os.environ.setdefault("FLASHINFER_DISABLE_VERSION_CHECK", "1")

WHY = "flashinfer-python is not installed (pip install --no-deps flashinfer-python apache-tvm-ffi)"


def flashinfer() -> Any:
    """The flashinfer package, or a skip that says how to get it."""
    return pytest.importorskip("flashinfer", reason=WHY)


@dataclass
class Call:
    """One call of a compiled function: its name and positional arguments as FlashInfer passed them."""

    name: str
    args: tuple[Any, ...]
    module: str = ""


@dataclass
class Recorder:
    """Collects calls; ``emulators[name](*args)`` computes what the compiled function would have written."""

    emulators: dict[str, Callable[..., Any]]
    calls: list[Call] = field(default_factory=list)
    #: applied to (name, args) before the emulator sees them; used by the fault tests
    tamper: Callable[[str, tuple[Any, ...]], tuple[Any, ...]] | None = None

    def call(self, module: str, name: str, args: tuple[Any, ...]) -> Any:
        if self.tamper is not None:
            args = self.tamper(name, args)
        self.calls.append(Call(name, args, module))
        if name not in self.emulators:
            raise AssertionError(f"compiled function {module}.{name} was called; no emulator is written for it")
        return self.emulators[name](*args)

    def last(self, name: str) -> Call:
        found = [c for c in self.calls if c.name == name]
        assert found, f"{name} was never called; saw {[c.name for c in self.calls]}"
        return found[-1]

    def count(self, name: str) -> int:
        return sum(c.name == name for c in self.calls)


class CompiledModule:
    """Stands for a loaded tvm-ffi module: any attribute is a compiled function."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self._name, self._recorder = name, recorder

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "set_deepgemm_jit_include_dirs":
            return lambda *a: None
        if name == "init":
            return lambda *a: RunnerHandle(self._name, self._recorder, a)
        return lambda *a: self._recorder.call(self._name, name, a)


class RunnerHandle:
    """The object that ``fused_moe.init`` returns: methods record with the init arguments in front."""

    def __init__(self, module: str, recorder: Recorder, init_args: tuple[Any, ...]) -> None:
        self._module, self._recorder, self._init = module, recorder, init_args

    def get_tactic_num(self, *args: Any) -> int:
        return 1

    get_gemm1_tactic_count = get_gemm2_tactic_count = get_tactic_num

    def run_moe(self, *args: Any) -> Any:
        return self._recorder.call(self._module, "run_moe", (self._init, *args))


class _Spec:
    """A JitSpec that builds nothing."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name, self._recorder = name, recorder

    def build_and_load(self, *args: Any, **kwargs: Any) -> CompiledModule:
        return CompiledModule(self.name, self._recorder)

    def get_library_paths(self) -> list[str]:
        return []

    def get_library_path(self) -> str:
        return ""


_SUBMODULES = (
    "flashinfer.fused_moe.core",
    "flashinfer.fused_moe.prepare",
    "flashinfer.gemm.gemm_base",
    "flashinfer.quantization.fp4_quantization",
    "flashinfer.quantization.fp8_quantization",
    "flashinfer.cute_dsl.utils",
    "flashinfer.gemm.kernels.grouped_gemm_masked_wrapper",
    "flashinfer.gemm.kernels.grouped_gemm_masked_blackwell",
)


@functools.lru_cache(maxsize=1)
def _surface() -> tuple[list[tuple[Any, str]], list[Any]]:
    """((module, name) of everything that answers for the device or builds a module, caches to clear), found once: it is a slow walk."""
    for name in _SUBMODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    targets, caches = [], []
    for where, m in list(sys.modules.items()):
        if where.partition(".")[0] != "flashinfer" or m is None:
            continue
        for name, value in list(vars(m).items()):
            if name in _ANSWERS or (name.startswith("gen_") and "_module" in name):
                targets.append((m, name))
            if isinstance(value, functools._lru_cache_wrapper):
                caches.append(value)
    return targets, caches


#: device questions -> answer(cc)
_ANSWERS: dict[str, Callable[[tuple[int, int]], Any]] = {
    "get_compute_capability": lambda cc: lambda device: cc,
    "device_support_pdl": lambda cc: lambda device: cc[0] >= 9,
    "_device_support_moe_pdl": lambda cc: lambda device: cc[0] >= 9,
    "get_device_sm_count": lambda cc: lambda device: 132,
    "get_num_sm": lambda cc: lambda device: 132,
    "is_cuda_version_at_least": lambda cc: lambda version: True,
    "setup_cubin_loader": lambda cc: lambda path: None,
    "_match_sm_version": lambda cc: lambda device, versions: f"{cc[0]}{cc[1]}" in versions,
    # scratch memory, one a CUDA stream: its contents mean nothing
    "_get_stream_cache_buf": lambda cc: lambda name, nbytes, device: torch.empty(min(nbytes, 1 << 16), dtype=torch.uint8),
}


def _clear(caches: list[Any]) -> None:
    """Forget compiled modules and runners that an earlier test cached."""
    for cached in caches:
        cached.cache_clear()


@contextlib.contextmanager
def gpu(cc: tuple[int, int], emulators: dict[str, Callable[..., Any]]) -> Iterator[Recorder]:
    """Answer every device question of FlashInfer as compute capability ``cc`` and record compiled calls."""
    flashinfer()
    recorder = Recorder(emulators)
    targets, caches = _surface()
    patch = pytest.MonkeyPatch()
    _clear(caches)
    props = SimpleNamespace(major=cc[0], minor=cc[1], multi_processor_count=132, name=f"SM{cc[0]}{cc[1]}", total_memory=1 << 37)
    try:
        patch.setattr(torch.cuda, "device", lambda *a, **k: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "get_device_capability", lambda *a: cc)
        patch.setattr(torch.cuda, "get_device_properties", lambda *a: props)
        patch.setattr(torch.cuda, "get_device_name", lambda *a: props.name)
        patch.setattr(torch.cuda, "current_stream", lambda *a: SimpleNamespace(cuda_stream=0))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.version, "cuda", "13.0")
        for m, name in targets:
            if name in _ANSWERS:
                patch.setattr(m, name, _ANSWERS[name](cc))
            else:
                patch.setattr(m, name, functools.partial(lambda spec, *a, **k: _Spec(spec, recorder), name))
        _patch_foreign_kernels(patch, recorder)
        yield recorder
    finally:
        patch.undo()
        _clear(caches)


def _patch_foreign_kernels(patch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    """cuDNN graphs and CuTe-DSL kernels are no FlashInfer modules: replace the object that holds the compiled kernel."""
    gemm = importlib.import_module("flashinfer.gemm.gemm_base")

    class Runner(gemm.TunableRunner):  # type: ignore[misc, name-defined]
        def __init__(self, name: str) -> None:
            self.name = name

        def get_valid_tactics(self, inputs: Any, profile: Any) -> list[int]:
            return [-1]

        def forward(self, inputs: list[Any], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any) -> Any:
            return recorder.call(self.name, self.name, tuple(inputs))

    for getter, name in (("_cudnn_gemm_fp4_runner", "cudnn_fp4_gemm"), ("_cute_dsl_gemm_fp4_runner", "cute_dsl_fp4_gemm")):
        patch.setattr(gemm, getter, functools.partial(lambda n, *a, **k: Runner(n), name))
    for check in (
        "_cudnn_available_or_raise_for_backend",
        "_check_cudnn_fp4_availability",
        "_check_cute_dsl_availability",
        "_check_cute_dsl_arch",
    ):
        if hasattr(gemm, check):
            patch.setattr(gemm, check, lambda *a, **k: True)
    masked = sys.modules.get("flashinfer.gemm.kernels.grouped_gemm_masked_blackwell")
    if masked is not None:
        patch.setattr(
            masked,
            "get_cute_dsl_compiled_masked_gemm_kernel",
            lambda **shape: lambda **tensors: recorder.call("masked", "masked_gemm", (shape, tensors)),
        )
