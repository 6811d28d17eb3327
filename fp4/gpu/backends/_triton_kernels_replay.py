"""Small batches of triton_kernels' MoE without its Python: one CUDA graph for each power of two of tokens, replayed on copied inputs.

Everything that their ``matmul`` computes on the host depends on the number of tokens only, so the second call of a size is captured,
and from then on a call costs three small copies, a replay and a copy of the result. A batch is filled up to the next power of two with
slots of id -1, which add nothing. Inside a capture of the caller's, and for large batches, the call goes straight through.

Plans belong to one stream: replays share a memory pool, which is safe because a result leaves it before the next replay starts.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["ROWS", "Replay"]

#: largest batch that is replayed; larger ones hide the host time behind the kernels. 0 turns replays off
ROWS = 256

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]
_pools: dict[int, Any] = {}
_lock = threading.Lock()


def _mend(like: torch.Tensor) -> None:
    """After a failed capture the device's random generator still believes in it (pytorch issue 171263), and the caller's next
    ``torch.randn`` would raise. A capture that succeeds puts it back."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    torch.zeros_like(like)
    graph.capture_end()


class _Plan:
    """A captured call: static inputs, static result."""

    def __init__(self, call: Call, rows: int, like: tuple[torch.Tensor, torch.Tensor, torch.Tensor], out: torch.dtype, stream: Any) -> None:
        self.x, self.ids, self.weights = (t.new_zeros((rows, t.shape[1])) for t in like)
        self.ids.fill_(-1)
        self.used = 0
        self.graph = torch.cuda.CUDAGraph()
        pool = _pools.get(stream.cuda_stream)
        if pool is None:
            pool = _pools[stream.cuda_stream] = torch.cuda.graph_pool_handle()
        side: Any = torch.cuda.Stream(self.x.device)  # type: ignore[no-untyped-call]
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            call(self.x, self.ids, self.weights, out)  # compiles this size, which must not happen in the capture
            try:
                self.graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    self.y = call(self.x, self.ids, self.weights, out)
                finally:
                    self.graph.capture_end()
            except BaseException:
                _pools.pop(stream.cuda_stream)  # the allocator believes that it still records into this one
                _mend(self.x)
                raise
        stream.wait_stream(side)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if rows < self.used:
            self.ids[rows : self.used].fill_(-1)
        self.used = rows
        full = rows == self.x.shape[0]
        (self.x if full else self.x[:rows]).copy_(x)
        (self.ids if full else self.ids[:rows]).copy_(ids)
        (self.weights if full else self.weights[:rows]).copy_(weights)
        self.graph.replay()
        return (self.y if full else self.y[:rows]).clone()


class Replay:
    """``call`` with the plans of one layer; ``direct`` is the call itself, for compiled graphs."""

    def __init__(self, call: Call, plan: Callable[..., Any] = _Plan) -> None:
        self.direct, self.plan = call, plan
        self.seen: set[Any] = set()
        self.plans: dict[Any, Any] = {}
        self.failed: str | None = None

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        rows = x.shape[0]
        if rows > ROWS or self.failed or x.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return self.direct(x, ids, weights, out_dtype)
        stream = torch.cuda.current_stream(x.device)
        size = 1 << (rows - 1).bit_length()
        key = (size, ids.shape[1], x.dtype, ids.dtype, out_dtype, stream.cuda_stream)
        with _lock:
            plan = self.plans.get(key)
            if plan is None:
                exact = (rows, *key[1:])
                if exact not in self.seen:  # an engine warms up with the very size that it captures next: compile that one
                    self.seen.add(exact)
                    return self.direct(x, ids, weights, out_dtype)
                try:
                    plan = self.plans[key] = self.plan(self.direct, size, (x, ids, weights), out_dtype, stream)
                except Exception as e:  # a library that cannot be captured still works, slowly
                    self.failed = f"{type(e).__name__}: {e}"
                    why = self.failed.splitlines()[0]
                    warnings.warn(
                        f"triton_kernels: this layer's calls cannot be captured and replayed, so each costs its Python: {why}", stacklevel=2
                    )
                    return self.direct(x, ids, weights, out_dtype)
            y: torch.Tensor = plan(x, ids, weights)
            return y
