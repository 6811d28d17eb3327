"""``triton``: our own kernels. A tuned path where one supports the layer, the plain kernel everywhere else.

A path is a module ``_triton_<name>.py`` beside this file with the names of a backend (``supports``, ``layouts``, ``prepare``, ``run``,
optionally ``restore`` and ``warmup``). Paths are asked in the order of PATHS; one that turns out in ``prepare`` not to fit the values
raises Unsupported, and the next is asked. Which one was taken is in ``Prepared.meta["path"]``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fp4.errors import Unsupported
from fp4.formats import AMDFP4, MXFP4, NVFP4, NVFP4_B32
from fp4.gpu import scale_range
from fp4.gpu.device import Capability
from fp4.gpu.problem import Problem
from fp4.gpu.registry import No, Ok
from fp4.gpu.storage import PLAIN, Stored
from fp4.prepared import Packed, Prepared, PreparedMoE, Weights, pack

name = "triton"

#: tuned paths, first choice first; each is fp4/gpu/backends/_triton_<name>.py
PATHS = ("dense", "moe", "block_scaled")

#: what the plain kernel decodes
FORMATS = (NVFP4, MXFP4, NVFP4_B32, AMDFP4)

#: bf16 tensor cores start at SM80; Triton does not support older ones
_TOO_OLD = frozenset(Capability(*cc) for cc in ((5, 0), (5, 2), (6, 0), (6, 1), (7, 0), (7, 2), (7, 5)))


@functools.lru_cache(maxsize=1)
def _paths() -> dict[str, Any]:
    found = {}
    for path in PATHS:
        full = f"fp4.gpu.backends._triton_{path}"
        if importlib.util.find_spec(full) is not None:
            found[path] = importlib.import_module(full)
    return found


def _interpreted() -> bool:
    """True when Triton's interpreter is on, so that kernels run on a CPU."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def probe() -> Ok | No:
    if importlib.util.find_spec("triton") is None:
        return No("Triton is not installed; pip install triton (Linux)")
    import triton

    return Ok(note=f"triton {triton.__version__}")


def _candidates(problem: Problem) -> dict[str, Any]:
    return {path: module for path, module in _paths().items() if module.supports(problem)}


def supports(problem: Problem) -> Ok | No:
    if problem.device.kind == "cpu" and not _interpreted():
        return No("runs on GPUs; on a CPU only in Triton's interpreter (TRITON_INTERPRET=1)")
    if problem.device.kind not in ("cpu", "cuda"):
        return No(f"was written for NVIDIA GPUs, this is {problem.device}")
    if problem.device.cc in _TOO_OLD:
        return No(f"{problem.device} has no bf16 tensor cores; needs SM80 or newer")
    for module in _candidates(problem).values():
        answer: Ok | No = module.supports(problem)
        return answer
    return _plain(problem)


def _plain(problem: Problem) -> Ok | No:
    if problem.act not in ("any", "keep"):
        return No(f"its plain kernel keeps activations as they are; act={problem.act!r} needs a path that none serves here")
    if problem.format not in FORMATS:
        return No(f"its kernel decodes {', '.join(map(str, FORMATS))}, not {problem.format}")
    return Ok(95 if problem.device.kind == "cpu" else 40, "plain kernel")


def exact_scale_range(problem: Problem) -> tuple[int, int]:
    """That of the first path; the plain kernel reads every byte."""
    return scale_range.stated(next(iter(_candidates(problem).values()), None), problem)


def _plain_layouts(problem: Problem) -> dict[str, Stored]:
    prefixes = ("",) if problem.op == "matmul" else ("w13.", "w2.")
    return {prefix + part: PLAIN for prefix in prefixes for part in ("codes", "scale")}


def layouts(problem: Problem) -> dict[str, Stored]:
    for module in _candidates(problem).values():
        wants: dict[str, Stored] = module.layouts(problem)
        return wants
    return _plain_layouts(problem)


def prepare(problem: Problem, weights: Weights) -> Packed:
    notes = []
    for path, module in _candidates(problem).items():
        try:
            packed: Packed = module.prepare(problem, weights)
        except Unsupported as e:
            notes.append(f"{path}: {e}")
            continue
        wants = packed.layouts or module.layouts(problem)
        return replace(packed, layouts=wants, meta={**packed.meta, "path": path})
    answer = _plain(problem)
    if isinstance(answer, No):
        raise Unsupported(f"prepare: no Triton path for {problem}", {"triton": "; ".join([*notes, answer.reason])})
    wants = _plain_layouts(problem)
    return Packed(pack(problem, weights, wants), wants, meta={"path": "plain", **({"why": "; ".join(notes)} if notes else {})})


def _path(prepared: Any) -> Any:
    return _paths().get(prepared.meta.get("path", "plain"))


def restore(prepared: Prepared | PreparedMoE) -> Any:
    """The path's own inverse, or None: the layouts are enough."""
    own = getattr(_path(prepared), "restore", None)
    return None if own is None else own(prepared)


def warmup(prepared: Prepared | PreparedMoE, m_max: int) -> bool:
    """False when the path has no warm-up of its own."""
    own = getattr(_path(prepared), "warmup", None)
    if own is None:
        return False
    own(prepared, m_max)
    return True


def run(prepared: Prepared | PreparedMoE) -> Callable[..., torch.Tensor]:
    module = _path(prepared)
    if module is not None:
        call: Callable[..., torch.Tensor] = module.run(prepared)
        return call
    return _run_moe(prepared) if isinstance(prepared, PreparedMoE) else _run_matmul(prepared)


def _run_matmul(prepared: Prepared) -> Callable[..., torch.Tensor]:
    from fp4.ref.triton_matmul import matmul

    q = prepared.restore()

    def call(x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        return matmul(x, q, bias=bias, out_dtype=out_dtype)

    return call


def _run_moe(prepared: PreparedMoE) -> Callable[..., torch.Tensor]:
    from fp4.ref.triton_matmul import moe

    p = prepared.problem
    w13, w2 = prepared.restore()
    bias13, bias2 = prepared.restore_bias()
    local = None if p.local is None else range(*p.local)
    order = "gate_up" if isinstance(w13, tuple) else p.gate_up

    def call(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        return moe(
            x, w13, w2, ids, weights, gate_up=order, activation=p.activation, bias13=bias13, bias2=bias2,
            local_experts=local, out_dtype=out_dtype,
        )  # fmt: skip

    return call
