"""Which triton_kernels is here, if any: five generations of one import name, and a stranger that owns the name on PyPI.

``import triton_kernels`` proves nothing: every copy has an empty ``__init__``. Nor do versions: the code is shipped inside other wheels.
So the files that are there and the fields of ``PrecisionConfig`` decide::

    A  matmul_ogs with routing.py          sglang-kernel 0.4.0 (triton 3.5.1)
    B  matmul_ogs, ragged metadata         sglang-kernel 0.4.3 to 0.4.6 (3.6)
    M  matmul                              sglang-kernel 0.4.7, 0.4.8 (3.7)
    C  matmul, b_microblock_size           tokenspeed-triton-kernels 1.0.0.post20260510 (3.8)
    D  matmul, b_mx_tensor_scale           sglang-kernel 0.4.9, 0.4.10 (3.8)

The letter only names what was found; the shim passes the fields that exist.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["Found", "Missing", "find"]

#: what the real package always has, and what only the unrelated PyPI package "triton-kernels" 0.1.0 has
_REAL = ("tensor.py", "target_info.py")
_FAKE = ("add_vectors.py", "add_vectors2.py", "rotary_embedding.py", os.path.join("utils", "kernel_mapper.py"))
_NAME = "triton_kernels"
_INSTALL = "install the real one with: pip install --no-deps tokenspeed-triton-kernels (triton >= 3.8), or use the copy inside vllm"


@dataclass(frozen=True)
class Missing:
    """No usable triton_kernels, and why."""

    reason: str


@dataclass(frozen=True)
class Found:
    """A usable copy: its generation letter, where it is, and the modules that the shim needs."""

    generation: str
    root: Path
    matmul: ModuleType
    numerics: ModuleType
    swiglu: ModuleType
    tensor: ModuleType
    layout: ModuleType
    routing: ModuleType | None
    fields: frozenset[str]

    @property
    def ogs(self) -> bool:
        """True for the ``matmul_ogs`` API, False for ``matmul``."""
        return self.generation in ("A", "B")

    def __str__(self) -> str:
        return f"triton_kernels generation {self.generation} ({'matmul_ogs' if self.ogs else 'matmul'})"


def find() -> Found | Missing:
    """Look for ``triton_kernels`` as it would be imported, then for the copy that vllm carries."""
    root = _root()
    found = root if isinstance(root, Missing) else _inspect(root)
    if isinstance(found, Found):
        return found
    vendored = _vllm_copy()
    if vendored is None:
        return found
    for name in [n for n in sys.modules if n.split(".")[0] == _NAME]:
        del sys.modules[name]  # the stranger's modules: none of them is a module of the real package
    spec = importlib.util.spec_from_file_location(_NAME, vendored / "__init__.py", submodule_search_locations=[str(vendored)])
    if spec is None or spec.loader is None:
        return found
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module  # its modules import each other by the short name, as vllm itself arranges
    spec.loader.exec_module(module)
    copy = _inspect(vendored)
    return copy if isinstance(copy, Found) else Missing(f"{found.reason}; vllm's copy: {copy.reason}")


def _root() -> Path | Missing:
    """Directory of the package without importing it, unless something else already put it into ``sys.modules``."""
    loaded = sys.modules.get(_NAME)
    if loaded is not None:  # vllm aliases its own copy under the short name: a second import would mean two sets of classes
        paths = list(getattr(loaded, "__path__", []))
        return Path(paths[0]) if paths else Missing(f"sys.modules[{_NAME!r}] is not a package")
    try:
        spec = importlib.util.find_spec(_NAME)
    except Exception as e:
        return Missing(f"{_NAME} cannot be located: {type(e).__name__}: {e}")
    if spec is None or not spec.submodule_search_locations:
        return Missing(f"triton_kernels is not installed; {_INSTALL}")
    return Path(next(iter(spec.submodule_search_locations)))


def _vllm_copy() -> Path | None:
    """The folder ``vllm/third_party/triton_kernels``, found without importing vllm."""
    try:
        spec = importlib.util.find_spec("vllm")
    except Exception:
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / "third_party" / _NAME
    return path if (path / "__init__.py").is_file() else None


def _inspect(root: Path) -> Found | Missing:
    real = all((root / name).is_file() for name in _REAL)
    fake = [name for name in _FAKE if (root / name).exists()]
    if fake and not real:
        return Missing(
            f"{root} is PyPI's 'triton-kernels' ({fake[0]}), an unrelated package with the same import name; "
            f"pip uninstall triton-kernels, then {_INSTALL}"
        )
    if fake:
        return Missing(
            f"{root} is a mix of the real package and PyPI's unrelated 'triton-kernels' ({fake[0]}); remove both and reinstall the real one"
        )
    if not real:
        return Missing(f"{root} is no triton_kernels that this library knows ({', '.join(_REAL)} missing); {_INSTALL}")
    names = {"matmul": (root / "matmul.py").is_file(), "matmul_ogs": (root / "matmul_ogs.py").is_file()}
    if not any(names.values()):
        return Missing(f"{root} has neither matmul.py nor matmul_ogs.py; {_INSTALL}")
    api = "matmul" if names["matmul"] else "matmul_ogs"
    parts = ["tensor_details.layout", "numerics", "tensor", "swiglu", api]
    has_routing = api == "matmul_ogs" and (root / "routing.py").is_file()
    if has_routing:
        parts.append("routing")
    modules: dict[str, Any] = {}
    try:
        for part in parts:
            modules[part] = importlib.import_module(f"{_NAME}.{part}")
    except Exception as e:  # a package newer than triton: ragged_tma, target_info, is_hip_gfx1250, constexpr_function missing
        return Missing(f"{root} does not work with triton {_triton()}: {type(e).__name__}: {e}; install a matching pair")
    try:
        fields = frozenset(f.name for f in dataclasses.fields(modules[api].PrecisionConfig))
        callable_ = getattr(modules[api], api)
    except Exception as e:
        return Missing(f"{root}: {api}.py lacks what it should have ({type(e).__name__}: {e}); {_INSTALL}")
    assert callable(callable_), "the entry point is a function"
    if api == "matmul":
        generation = "D" if "b_mx_tensor_scale" in fields else "C" if "b_microblock_size" in fields else "M"
    else:
        generation = "A" if has_routing else "B"
    return Found(
        generation,
        root,
        modules[api],
        modules["numerics"],
        modules["swiglu"],
        modules["tensor"],
        modules["tensor_details.layout"],
        modules.get("routing"),
        fields,
    )


def _triton() -> str:
    try:
        return str(importlib.import_module("triton").__version__)
    except Exception as e:
        return f"(not importable: {e})"
