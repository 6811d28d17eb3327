"""Grouped (mixture of experts) product with 4-bit weights and 16-bit activations: route, product and activation, product, sum over slots.

Four or five launches on one stream, no host synchronisation, and grids that depend on the number of tokens only: a captured graph
stays right when the tokens spread differently. Results do not depend on the order in which programs run.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from fp4.errors import FormatMismatch
from fp4.gpu.kernels import launch
from fp4.gpu.kernels.grouped import ACTS, Grouped
from fp4.gpu.kernels.grouped_plan import Plan, choose, plans
from fp4.gpu.kernels.routing import max_blocks, reduce_kernel, route_kernel

__all__ = ["Call", "Chain", "run", "warmup"]

_INF = float("inf")
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_OUT = (torch.float32, torch.bfloat16, torch.float16)
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
_CHUNKS = (128, 1024, 4096)
#: values of pair rows that stay in the L2 cache as float32
_LOCAL = 1 << 22
_SCALARS = {
    "pairs": "i32",
    "first": "i32",
    "experts": "i32",
    "oc": "i32",
    "topk": "i32",
    "rows": "i32",
    "p0": "fp32",
    "p1": "fp32",
    "p2": "fp32",
}


def _compile(
    fn: Any,
    pointers: dict[str, torch.dtype],
    constants: dict[str, Any],
    warps: int,
    target: Any = None,
    maxnreg: int | None = None,
    pdl: bool = False,
    ring: dict[str, Any] | None = None,
) -> Any:
    """(kernel, constants in argument order). ``pointers``: element type of each ``*_ptr``, int32 when not named; ring: ``build_ring``'s."""
    signature = {}
    for name in fn.arg_names:
        if name.endswith("_ptr"):
            signature[name] = "*" + _TYPES[pointers.get(name, torch.int32)]
        elif name in _SCALARS and name not in constants:
            signature[name] = _SCALARS[name]
    how = {"num_warps": warps, "target": target, "maxnreg": maxnreg, "pdl": pdl}
    make: Any = launch.build if ring is None else functools.partial(launch.build_ring, **ring)
    kernel = make(fn, signature, constants, **how)
    return kernel, tuple(constants[n] for n in fn.arg_names if n in constants)


@functools.lru_cache(maxsize=8)
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _overlaps(device: int, target: Any) -> bool:
    """Whether the GPU knows programmatic dependent launch."""
    return bool((target.arch if target is not None else _capability(device)[0] * 10) >= 90)


def _chunk(pairs: int) -> int:
    """Ids that one step of the route kernel takes; few values, so that few kernels exist."""
    return next((c for c in _CHUNKS if pairs <= c), _CHUNKS[-1])


def _align(n: int) -> int:
    return (n + 255) // 256 * 256


class Chain:
    """All launches for one (tokens, topk, dtypes): sizes, offsets in the workspace, kernels. Pointers go to the launcher as integers."""

    def __init__(
        self,
        g: Grouped,
        tokens: int,
        topk: int,
        x: torch.dtype,
        ids: torch.dtype,
        gamma: torch.dtype,
        out: torch.dtype,
        plan: Plan,
        target: Any,
    ) -> None:
        from fp4.gpu.kernels.grouped_large import grouped_large, permute_rows
        from fp4.gpu.kernels.grouped_small import grouped_small
        from fp4.gpu.kernels.grouped_wide import grouped_wide

        window = g.windows[x]
        if isinstance(window, Exception):
            raise window
        self.pairs = pairs = tokens * topk
        self.blocks = max_blocks(pairs, g.experts, plan.mt)
        wide, ring = plan.large, plan.kernel == "wide"
        product = {"small": grouped_small, "large": grouped_large, "wide": grouped_wide}[plan.kernel]
        hp, ip = -(-g.hidden // 64) * 64, -(-g.inter // 64) * 64
        #: one row a pair before the sum over slots: float32 while it stays in the L2 cache
        row = torch.float32 if pairs * g.hidden <= _LOCAL else x
        sizes = (
            4 * (1 + 3 * self.blocks),
            4 * pairs,
            2 * pairs * (ip if wide else g.inter),
            row.itemsize * pairs * g.hidden,
            2 * tokens * hp if wide else 0,
        )
        self.at = [sum(_align(n) for n in sizes[:i]) for i in range(6)]
        a = g.act
        acts: dict[str, tuple[float, ...]] = {
            "swiglu": (
                getattr(a, "alpha", 0.0),
                getattr(a, "beta", 0.0),
                _INF if getattr(a, "limit", None) is None else getattr(a, "limit", 0.0),
            ),
            "situ": (getattr(a, "beta", 0.0), getattr(a, "linear_beta", None) or 0.0, 0.0),
        }
        self.act = tuple(float(v) for v in acts.get(a.name, (0.0, 0.0, 0.0)))
        self.topk, self.tokens, self.large, self.window = topk, tokens, wide, window

        #: the kernels are the same with and without overlap (``pdl`` does nothing after an ordinary launch), so plans share them
        pdl = _overlaps(g.w13.device.index or 0, target)
        over = pdl and plan.overlap
        bins = triton.next_power_of_2(g.experts + 1)
        chunk = _chunk(pairs)
        sort = {"BLOCK": plan.mt, "CHUNK": chunk, "BINS": bins, "LIGHT": plan.light, "PDL": pdl}
        self.route = _compile(route_kernel, {"ids_ptr": ids}, sort, 8 if chunk > 2048 else 4, target)
        ends: list[Any] = []
        for i in (0, 1):
            c = dict(plan.config)
            warps, limit, per = c.get("WN") or c.get("WK") or 4, c.pop("maxnreg", None), c.pop("per", 1)
            n, bias = (g.hidden, g.bias2) if i else (g.n13, g.bias13)
            c |= {"N": n, "K": g.inter if i else g.hidden, "KIND": g.block, "ANY": window[i][2], "ACT": 0 if i else ACTS[a.name]}
            c |= {"FIRST": not i, "BIAS": bias is not None, "HALF": x == torch.float16}
            c.setdefault("MT", plan.mt)
            c["PDL"] = pdl
            f32 = dict.fromkeys(("alpha_ptr", "bias_ptr"), torch.float32)
            pointers = {"x_ptr": x, "out_ptr": row if i else x, "gamma_ptr": gamma, **f32}
            fit = None
            if ring:
                fit = {"slot": 128 * c["U"] * (c["MT"] + c["EX"]) + 512 * c["C"] * (4 * c["U"] + 1), "per": per}
            kernel, tail = _compile(product, pointers, c, warps, target, limit, over, fit)
            alpha = window[i][0]
            weights = ((g.w13, g.s13), (g.w2, g.s2))[i]
            fixed = (*(t.data_ptr() for t in weights), alpha.data_ptr(), (alpha if bias is None else bias).data_ptr())
            tiles = -(-n // (64 * c["C"] if ring else 16 * c["R"] * c.get("WN", 1)))
            grid = tiles * self.blocks
            if ring:  # as many programs as stay resident take tiles in turn
                grid = min(grid, per * launch.processors(g.w13.device))
            ends.append((kernel, fixed, window[i][1], tail, grid))
        self.first, self.second = ends
        if wide:
            self.permute = _compile(permute_rows, {}, {"K": g.hidden, "BLOCK": 1024, "PDL": pdl}, 4, target, pdl=over)
            self.permute_grid = -(-tokens * hp // 2 // 1024)
        pointers = {"y_ptr": row, "ids_ptr": ids, "out_ptr": out}
        self.reduce = _compile(reduce_kernel, pointers, {"H": g.hidden, "TOPK": topk, "BLOCK": 1024, "PDL": pdl}, 4, target, pdl=over)
        self.reduce_grid = -(-g.hidden // 1024)

    def launch(self, g: Grouped, x: int, ids: int, gamma: int, out: int, base: int, stream: int) -> None:
        sched, order, h, y, xp, _ = (base + n for n in self.at)
        kernel, tail = self.route
        kernel(g.experts, 1, stream, ids, order, sched, self.pairs, g.first, g.experts, *tail)
        if self.large:
            kernel, tail = self.permute
            kernel(self.permute_grid, 1, stream, x, xp, self.tokens, *tail)
            x = xp
        kernel, fixed, oc, tail, grid = self.first
        kernel(grid, 1, stream, x, *fixed, h, order, sched, gamma, oc, *self.act, self.topk, *tail)
        kernel, fixed, oc, tail, grid = self.second
        kernel(grid, 1, stream, h, *fixed, y, order, sched, gamma, oc, *self.act, self.topk, *tail)
        kernel, tail = self.reduce
        kernel(self.tokens, self.reduce_grid, stream, y, ids, out, g.first, g.experts, *tail)


def run(
    x: torch.Tensor,
    g: Grouped,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """x bf16 or fp16 [tokens, hidden], topk_ids int32 or int64 [tokens, k], topk_weights [tokens, k] -> out [tokens, hidden].

    out = sum over the local slots, in slot order, of weight * (act(x w13^T + b13) w2^T + b2). Ids outside the local range add nothing.
    """
    tokens, topk = topk_ids.shape
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if tokens == 0 or topk == 0 or g.experts == 0:
        return out.zero_()
    x, topk_ids, topk_weights = _dense(x), _dense(topk_ids), _dense(topk_weights)
    index = x.get_device()
    if (
        x.shape != out.shape
        or x.shape != (tokens, g.hidden)
        or topk_weights.shape != topk_ids.shape
        or not out.is_contiguous()
        or out.data_ptr() % 16
        or not index == topk_ids.get_device() == topk_weights.get_device() == out.get_device() == g.w13.get_device()
    ):
        _check(x, g, topk_ids, topk_weights, out)
    key = (tokens, topk, x.dtype, topk_ids.dtype, topk_weights.dtype, out.dtype, plan)
    chain = g.calls.get(key)
    if chain is None:
        _check(x, g, topk_ids, topk_weights, out)
        if len(g.calls) >= 4096:  # token counts seen; a chain is small, but a server may see many
            g.calls.clear()
        p = plan or choose(tokens * topk, g.total, _capability(index))
        with torch.cuda.device(index):
            chain = g.calls[key] = Chain(g, *key[:6], p, None)
    ws = torch.empty(chain.at[5], dtype=torch.uint8, device=x.device)
    if torch.cuda.current_device() != index:
        with torch.cuda.device(index):
            return run(x, g, topk_ids, topk_weights, out, plan)
    stream = _raw_stream(index) if _raw_stream is not None else torch.cuda.current_stream(index).cuda_stream
    chain.launch(g, x.data_ptr(), topk_ids.data_ptr(), topk_weights.data_ptr(), out.data_ptr(), ws.data_ptr(), stream)
    return out


def _dense(t: torch.Tensor) -> torch.Tensor:
    return t if t.is_contiguous() and t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)


def _check(x: torch.Tensor, g: Grouped, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """Raises FormatMismatch for what the kernels cannot take."""
    if x.dtype not in g.windows or x.ndim != 2 or x.shape != (ids.shape[0], g.hidden):
        raise FormatMismatch(f"grouped: x is {x.dtype} {list(x.shape)}; need bfloat16 or float16 [{ids.shape[0]}, {g.hidden}]")
    if ids.dtype not in (torch.int32, torch.int64) or weights.dtype not in _OUT:
        raise FormatMismatch(
            f"grouped: topk_ids is {ids.dtype}, topk_weights is {weights.dtype}; need int32 or int64, and float32 or 16-bit"
        )
    if weights.shape != ids.shape:
        raise FormatMismatch(f"grouped: topk_weights is {list(weights.shape)}; need the shape of topk_ids, {list(ids.shape)}")
    if out.dtype not in _OUT or out.shape != x.shape or not out.is_contiguous() or out.data_ptr() % 16:
        raise FormatMismatch(
            f"grouped: out is {out.dtype} {list(out.shape)}; need float32 or 16-bit {list(x.shape)}, contiguous and 16-byte aligned"
        )
    if any(t.device != g.w13.device for t in (x, ids, weights, out)):
        raise FormatMismatch(f"grouped: x is on {x.device}, the weights are on {g.w13.device}; move all to one device")


class Call:
    """What ``fp4.moe`` calls."""

    def __init__(self, g: Grouped) -> None:
        self.g = g

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=out_dtype if out_dtype in _OUT else x.dtype, device=x.device)
        return run(x, self.g, ids, weights, out).to(out_dtype)


def kinds(experts: int, hidden: int, topk: int, m_max: int, capability: tuple[int, int]) -> list[int]:
    """Token counts up to ``m_max``, one for every set of kernels that a chain can need: the first past each limit of its choices.

    experts: all that ids speak of.
    """
    limits = [most * experts for most, _ in plans(capability)[:-1]] + [_LOCAL // hidden, *_CHUNKS[:-1]]
    return sorted(t for t in {1, *(int(most) // topk + 1 for most in limits)} if t <= m_max)


def warmup(g: Grouped, m_max: int, topk: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Compile and load every kernel that up to ``m_max`` tokens with ``topk`` slots and float32 routing weights can need."""
    device = g.w13.device
    for t in kinds(g.total, g.hidden, topk, m_max, _capability(device.index or 0)):
        x = torch.zeros(t, g.hidden, dtype=dtype, device=device)
        ids = torch.arange(t * topk, device=device, dtype=torch.int32).reshape(t, topk) % g.experts + g.first
        for wide in (ids, ids.long()):
            run(x, g, wide, torch.ones(t, topk, dtype=torch.float32, device=device))
    torch.cuda.synchronize(device)
