"""``flashinfer``: FlashInfer's FP4 kernels. The best route of each library for a problem; ``docs/flashinfer.md`` is the table.

``backend="flashinfer_cutlass"``, ``"flashinfer_trtllm"``, ``"flashinfer_cudnn"`` and ``"flashinfer_cutedsl"`` are the same code held
to one kernel library, so that a route can be forced and ``explain`` shows why each can or cannot serve.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp4.gpu.backends import _flashinfer_bind as bind
from fp4.gpu.backends import _flashinfer_cutlass, _flashinfer_linear, _flashinfer_masked, _flashinfer_trtllm
from fp4.gpu.backends._flashinfer_route import Route, unfolded
from fp4.gpu.backends._flashinfer_scales import exact_scale_range
from fp4.gpu.backends._flashinfer_trtllm import deferred, from_logits, routed
from fp4.gpu.problem import Problem
from fp4.gpu.registry import No, Ok
from fp4.gpu.storage import Stored
from fp4.prepared import Packed, Prepared, PreparedMoE, Weights

__all__ = [
    "ROUTES", "Variant", "assumed", "deferred", "exact_scale_range", "from_logits", "layouts", "name", "prepare", "probe", "restore",
    "routed", "run", "supports",
]  # fmt: skip

#: order of preference. trtllm first for MoE: the kernels made for datacenter Blackwell; cuDNN before CuTe-DSL for linear layers, as
#: FlashInfer's own "auto" has it, and cutlass before both because it needs nothing beside FlashInfer
ROUTES: tuple[Route, ...] = (
    *_flashinfer_linear.ROUTES,
    *_flashinfer_trtllm.ROUTES,
    *_flashinfer_cutlass.ROUTES,
    *_flashinfer_masked.ROUTES,
)

_BY_NAME = {route.name: route for route in ROUTES}


class Variant:
    """The backend protocol over the routes of one kernel library, or of all for ``library=None``."""

    def __init__(self, library: str | None, rank: int) -> None:
        self.library, self.rank = library, rank
        self.routes = tuple(r for r in ROUTES if library in (None, r.library))

    def route(self, problem: Problem, assumed: bool = False) -> Route | dict[str, str]:
        """The first route that serves the problem, or each route's reason."""
        reasons = {}
        for route in self.routes:
            reason = route.refuse(problem, assumed)
            if reason is None:
                return route
            reasons[route.name] = reason
        return reasons

    def supports(self, problem: Problem) -> Ok | No:
        return self._answer(problem, self.route(problem))

    def assumed(self, problem: Problem) -> Ok | No:
        """``supports`` as if FlashInfer were installed, in a release that has every function."""
        return self._answer(problem, self.route(problem, assumed=True))

    def _answer(self, problem: Problem, found: Route | dict[str, str]) -> Ok | No:
        if isinstance(found, Route):
            return Ok(self.rank + found.behind, found.name)
        on_topic = {n: why for n, why in found.items() if not why.startswith("is for ")}
        if not on_topic:
            return No(
                f"has no route for {problem.op}/{problem.format}; it has {', '.join(sorted({f'{r.op}/{r.format}' for r in self.routes}))}"
            )
        return No("; ".join(f"{n}: {why}" for n, why in on_topic.items()))

    def layouts(self, problem: Problem) -> dict[str, Stored]:
        found = self.route(problem)
        return found.layouts(problem) if isinstance(found, Route) else {}

    def prepare(self, problem: Problem, weights: Weights) -> Packed:
        found = self.route(problem)
        assert isinstance(found, Route), "internal: prepare of a problem that supports refused"
        return found.prepare(problem, weights)


def run(prepared: Prepared | PreparedMoE) -> Callable[..., torch.Tensor]:
    """The callable of the route that prepared the object."""
    return _BY_NAME[str(prepared.meta["route"])].run(prepared)


def restore(prepared: Prepared | PreparedMoE) -> Any:
    """Undo a folded gate/up scale; None where the layouts alone restore the tensors."""
    return unfolded(prepared) if isinstance(prepared, PreparedMoE) else None


name = "flashinfer"
probe = bind.probe
_all = Variant(None, 10)
supports, assumed, layouts, prepare = _all.supports, _all.assumed, _all.layouts, _all.prepare
