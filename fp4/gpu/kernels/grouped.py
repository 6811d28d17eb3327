"""Grouped (mixture of experts) product with 4-bit weights and 16-bit activations: route, product and activation, product, sum over slots.

Four or five launches on one stream, no host synchronisation, and grids that depend on the number of tokens only: a captured graph
stays right when the tokens spread differently. Results do not depend on the order in which programs run.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from fp4.errors import FormatMismatch, Unsupported
from fp4.gpu import storage
from fp4.gpu.kernels import frag, launch
from fp4.gpu.kernels.grouped_plan import Plan, choose
from fp4.gpu.kernels.routing import max_blocks, reduce_kernel, route_kernel
from fp4.gpu.storage import Stored
from fp4.ref import activation as activations
from fp4.tensor import QuantizedTensor

__all__ = ["Grouped", "layouts", "prepare", "restore", "run", "supports", "warmup"]

_ACTS = {"relu2": 0, "swiglu": 1, "silu": 2, "situ": 3}
_INF = float("inf")
#: row order of a gated first matrix: eight gate rows, their eight up rows, and so on; the bias follows its rows
_ROWS, _BIAS_ROWS = "deepgemm_gate_up", Stored("deepgemm_gate_up", order="gate_up")


def supports(*, format: str, hidden: int | None, intermediate: int | None, activation: Any, capability: tuple[int, int]) -> str | None:
    """None when these kernels can serve the layer, else the reason. ``capability`` is (major, minor) of the device."""
    if format not in ("nvfp4", "mxfp4"):
        return f"reads nvfp4 and mxfp4 weights, got {format}"
    if capability < (8, 0):
        return f"needs SM80 or newer for 16-bit tensor cores, got SM{capability[0]}{capability[1]}"
    block = 16 if format == "nvfp4" else 32
    for what, value in (("hidden", hidden), ("intermediate", intermediate)):
        if value is not None and (value % block or value <= 0):
            return f"{what} = {value} is not a positive multiple of {block}"
    if activation is not None and getattr(activation, "name", activation) not in (*_ACTS, "swiglu_oai"):
        return f"has no activation {activation!r}"
    return None


def layouts(block: int, gated: bool, hidden: int, inter: int, fill: tuple[int, int] = (0, 0)) -> dict[str, Stored]:
    """Storage of the four arrays. A gated first matrix alternates eight gate rows and their eight up rows.

    fill: scale bytes (w13, w2) that pad MXFP4 scale columns, one that the layer uses, so that padding widens no exponent window.
    """
    rows = f"{_ROWS} >> " if gated else ""
    order = "gate_up" if gated else None
    codes, scale = frag.CODES_LAYOUT, frag.SCALE_LAYOUT[block]
    n13 = inter * (2 if gated else 1)
    pad = [None, None] if block == 16 else [(n13, -(-hidden // 256) * 8), (hidden, -(-inter // 256) * 8)]
    return {
        "w13.codes": Stored(rows + codes, order=order),
        "w13.scale": Stored(rows + scale, order=order, shape=pad[0], fill=fill[0]),
        "w2.codes": Stored(codes),
        "w2.scale": Stored(scale, shape=pad[1], fill=fill[1]),
    }


def used_byte(scale: torch.Tensor) -> int:
    """A raw ue8m0 byte that occurs in ``scale``, the largest but NaN; 127 when there is none. One host read."""
    numbers = torch.where(scale == 0xFF, torch.zeros_like(scale), scale)
    return int(numbers.max()) if scale.numel() else 127


@dataclass(eq=False)
class Grouped:
    """Weights of the local experts as the kernels read them.

    w13, s13, w2, s2: bytes as ``layouts`` says, one leading entry an expert; alpha13, alpha2: f32 [experts, 2] per activation dtype, global
    scales (gate, up) times the power of two that the decode leaves over; bias13 f32 [experts, n] in stored row order, bias2 f32.
    """

    block: int
    experts: int
    first: int
    hidden: int
    inter: int
    act: Any
    w13: torch.Tensor
    s13: torch.Tensor
    w2: torch.Tensor
    s2: torch.Tensor
    bias13: torch.Tensor | None
    bias2: torch.Tensor | None
    windows: dict[torch.dtype, Any]
    logical: dict[str, Any] = field(default_factory=dict)
    calls: dict[Any, Any] = field(default_factory=dict)

    @property
    def n13(self) -> int:
        return self.inter * (2 if self.act.gated else 1)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.w13, self.s13, self.w2, self.s2, self.bias13, self.bias2) if t is not None)


def _alpha(scale: torch.Tensor | None, factor: float, experts: int, device: torch.device) -> torch.Tensor:
    """f32 [] | [experts] | [experts, 2] -> f32 [experts, 2] times a power of two."""
    g = torch.ones((), device=device) if scale is None else scale.to(device=device, dtype=torch.float32)
    if g.ndim < 2:
        g = g.reshape(-1, 1)
    return (g.expand(experts, 2) * factor).contiguous()


def from_arrays(
    arrays: Mapping[str, torch.Tensor],
    *,
    block: int,
    first: int,
    hidden: int,
    intermediate: int,
    activation: Any,
    gate_up: str | None,
) -> Grouped:
    """The kernels' view of prepared arrays: names of ``PreparedMoE.arrays``, bytes as ``layouts``, bias13 in ``gate_up`` order.

    Raises Unsupported when the scale exponents leave no exact window for bfloat16; float16 is left out when it has none.
    """
    act = activations.get(activation)
    w13, w2 = arrays["w13.codes"], arrays["w2.codes"]
    experts, device = w13.shape[0], w13.device
    windows: dict[torch.dtype, Any] = {}
    for dtype in (torch.bfloat16, torch.float16):
        try:
            pair = [frag.scale_window(arrays[f"{n}.scale"], block, dtype == torch.float16) for n in ("w13", "w2")]
        except Unsupported as e:
            windows[dtype] = e
            if dtype == torch.bfloat16:
                raise
            continue
        alphas = [_alpha(arrays.get(f"{n}.global_scale"), p.alpha, experts, device) for n, p in zip(("w13", "w2"), pair, strict=True)]
        windows[dtype] = tuple((a, p.oc, p.any_byte) for a, p in zip(alphas, pair, strict=True))
    bias13, bias2 = arrays.get("bias13"), arrays.get("bias2")
    if bias13 is not None:
        bias13 = bias13.to(torch.float32).contiguous()
        if act.gated:  # the rows' own order
            raw = bias13.view(torch.uint8).reshape(experts, -1, 4)
            bias13 = storage.apply(raw, _BIAS_ROWS, gate_up).view(torch.float32).reshape(experts, -1)
    if bias2 is not None:
        bias2 = bias2.to(torch.float32).contiguous()
    parts = w13, arrays["w13.scale"], w2, arrays["w2.scale"]
    return Grouped(block, experts, first, hidden, intermediate, act, *parts, bias13, bias2, windows)


def prepare(
    w13: QuantizedTensor,
    w2: QuantizedTensor,
    *,
    gate_up: str | None,
    activation: Any,
    bias13: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    gate_up_scale: torch.Tensor | None = None,
    first: int = 0,
) -> Grouped:
    """w13 [experts, 2i (or i), h], w2 [experts, h, i], rows and bias13 in ``gate_up`` order -> Grouped, on the weights' device.

    gate_up_scale: f32 [experts, 2] (gate, up), instead of w13.global_scale. first: global id of expert 0 here.
    Raises FormatMismatch or Unsupported before anything is written.
    """
    act = activations.get(activation)
    hidden, inter, block = w13.k, w2.k, w13.format.block
    why = supports(format=w13.format.name, hidden=hidden, intermediate=inter, activation=act, capability=(8, 0))
    if why is not None or w2.format != w13.format:
        raise Unsupported("grouped", {"grouped": why or f"w13 is {w13.format} and w2 is {w2.format}"})
    rows = inter * (2 if act.gated else 1)
    if tuple(w13.codes.shape[:2]) != (w2.codes.shape[0], rows) or w2.codes.shape[1] != hidden:
        raise FormatMismatch(f"grouped: w13 is {list(w13.shape)}, w2 is {list(w2.shape)}; need [e, {rows}, h] and [e, h, {inter}]")
    order = (gate_up or w13.gate_up) if act.gated else None
    if act.gated and order is None:
        raise FormatMismatch("grouped: the row order of w13 is not known; pass gate_up")
    fill = (0, 0) if block == 16 else (used_byte(w13.scale), used_byte(w2.scale))
    stored = layouts(block, act.gated, hidden, inter, fill)
    arrays: dict[str, torch.Tensor] = {}
    for name, q in (("w13", w13), ("w2", w2)):
        for part in ("codes", "scale"):
            arrays[f"{name}.{part}"] = storage.apply(getattr(q, part), stored[f"{name}.{part}"], order if name == "w13" else None)
        if q.global_scale is not None:
            arrays[f"{name}.global_scale"] = q.global_scale
    if gate_up_scale is not None:
        arrays["w13.global_scale"] = gate_up_scale
    if bias13 is not None:
        arrays["bias13"] = bias13
    if bias2 is not None:
        arrays["bias2"] = bias2
    g = from_arrays(arrays, block=block, first=first, hidden=hidden, intermediate=inter, activation=act, gate_up=order)
    g.logical = {
        n: (q.format, tuple(q.codes.shape), tuple(q.scale.shape), q.global_scale, q.gate_up) for n, q in (("w13", w13), ("w2", w2))
    }
    g.logical["order"] = order
    return g


def restore(g: Grouped) -> tuple[QuantizedTensor, QuantizedTensor]:
    """(w13, w2) as ``prepare`` got them, bit for bit."""
    stored, out = layouts(g.block, g.act.gated, g.hidden, g.inter), []
    for name, codes, scale in (("w13", g.w13, g.s13), ("w2", g.w2, g.s2)):
        fmt, cs, ss, second, gate_up = g.logical[name]
        order = g.logical["order"] if name == "w13" else None
        c = storage.invert(codes, stored[f"{name}.codes"], cs, order)
        s = storage.invert(scale, stored[f"{name}.scale"], ss, order)
        out.append(QuantizedTensor(fmt, c, s, second, gate_up=gate_up))
    return out[0], out[1]


_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
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
    fn: Any, pointers: dict[str, torch.dtype], constants: dict[str, Any], warps: int, target: Any = None, maxnreg: int | None = None
) -> Any:
    """(kernel, constants in argument order). ``pointers``: element type of each ``*_ptr``, int32 when not named."""
    signature = {}
    for name in fn.arg_names:
        if name.endswith("_ptr"):
            signature[name] = "*" + _TYPES[pointers.get(name, torch.int32)]
        elif name in _SCALARS and name not in constants:
            signature[name] = _SCALARS[name]
    kernel = launch.build(fn, signature, constants, num_warps=warps, target=target, maxnreg=maxnreg)
    return kernel, tuple(constants[n] for n in fn.arg_names if n in constants)


@functools.lru_cache(maxsize=8)
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _align(n: int) -> int:
    return (n + 255) // 256 * 256


class _Chain:
    """All launches for one (tokens, topk, dtypes): sizes, offsets in the workspace, kernels. Pointers go to the launcher as integers."""

    def __init__(
        self, g: Grouped, tokens: int, topk: int, x: torch.dtype, ids: torch.dtype, gamma: torch.dtype, plan: Plan, target: Any
    ) -> None:
        from fp4.gpu.kernels.grouped_large import grouped_large, permute_rows
        from fp4.gpu.kernels.grouped_small import grouped_small

        window = g.windows[x]
        if isinstance(window, Exception):
            raise window
        self.pairs = pairs = tokens * topk
        self.blocks = max_blocks(pairs, g.experts, plan.mt)
        wide = plan.large
        hp, ip = -(-g.hidden // 64) * 64, -(-g.inter // 64) * 64
        #: one row a pair before the sum over slots: float32 while it stays in the L2 cache
        row = torch.float32 if pairs * g.hidden <= 1 << 22 else x
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

        bins = triton.next_power_of_2(g.experts + 1)
        chunk = min(max(triton.next_power_of_2(pairs), 128), 4096)
        self.route = _compile(
            route_kernel, {"ids_ptr": ids}, {"BLOCK": plan.mt, "CHUNK": chunk, "BINS": bins}, 8 if chunk > 2048 else 4, target
        )
        ends: list[Any] = []
        for i, config in enumerate((plan.first, plan.second)):
            c = dict(config)
            warps, limit = c["WN"] if wide else c["WK"], c.pop("maxnreg", None)
            n, bias = (g.hidden, g.bias2) if i else (g.n13, g.bias13)
            c |= {"N": n, "K": g.inter if i else g.hidden, "KIND": g.block, "ANY": window[i][2], "ACT": 0 if i else _ACTS[a.name]}
            c |= {"FIRST": not i, "BIAS": bias is not None, "HALF": x == torch.float16, "MT": plan.mt}
            if wide:
                c.setdefault("LOW", plan.mt)
            f32 = dict.fromkeys(("alpha_ptr", "bias_ptr"), torch.float32)
            pointers = {"x_ptr": x, "out_ptr": row if i else x, "gamma_ptr": gamma, **f32}
            kernel, tail = _compile(grouped_large if wide else grouped_small, pointers, c, warps, target, limit)
            alpha = window[i][0]
            weights = ((g.w13, g.s13), (g.w2, g.s2))[i]
            fixed = (*(t.data_ptr() for t in weights), alpha.data_ptr(), (alpha if bias is None else bias).data_ptr())
            tiles = -(-n // (16 * c["R"] * (c["WN"] if wide else 1)))
            ends.append((kernel, fixed, window[i][1], tail, tiles * self.blocks))
        self.first, self.second = ends
        if wide:
            self.permute = _compile(permute_rows, {}, {"K": g.hidden, "BLOCK": 1024}, 4, target)
            self.permute_grid = -(-tokens * hp // 2 // 1024)
        pointers = {"y_ptr": row, "ids_ptr": ids, "out_ptr": x}
        self.reduce = _compile(reduce_kernel, pointers, {"H": g.hidden, "TOPK": topk, "BLOCK": 1024}, 4, target)
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
    """x bf16/fp16 [tokens, hidden], topk_ids int32/int64 [tokens, k], topk_weights [tokens, k] -> [tokens, hidden] in x's dtype.

    out = sum over the local slots, in slot order, of weight * (act(x w13^T + b13) w2^T + b2). Ids outside the local range add nothing.
    """
    tokens, topk = topk_ids.shape
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if tokens == 0 or topk == 0 or g.experts == 0:
        return out.zero_()
    x, topk_ids, topk_weights = _dense(x), _dense(topk_ids), _dense(topk_weights)
    key = (tokens, topk, x.dtype, topk_ids.dtype, topk_weights.dtype, plan)
    chain = g.calls.get(key)
    index = x.device.index
    if chain is None:
        _check(x, g, topk_ids, topk_weights, out)
        p = plan or choose(tokens * topk, g.experts, g.n13, g.hidden, _capability(index))
        with torch.cuda.device(index):
            chain = g.calls[key] = _Chain(g, *key[:5], p, None)
    if x.shape[1] != g.hidden or not out.is_contiguous() or out.dtype != x.dtype or out.data_ptr() % 16:
        _check(x, g, topk_ids, topk_weights, out)
    ws = torch.empty(chain.at[5], dtype=torch.uint8, device=x.device)
    if torch.cuda.current_device() != index:
        with torch.cuda.device(index):
            return run(x, g, topk_ids, topk_weights, out, plan)
    stream = torch._C._cuda_getCurrentRawStream(index)
    chain.launch(g, x.data_ptr(), topk_ids.data_ptr(), topk_weights.data_ptr(), out.data_ptr(), ws.data_ptr(), stream)
    return out


def _dense(t: torch.Tensor) -> torch.Tensor:
    return t if t.is_contiguous() and t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)


def _check(x: torch.Tensor, g: Grouped, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """Raises FormatMismatch for what the kernels cannot take."""
    if x.dtype not in g.windows or x.ndim != 2 or x.shape != (ids.shape[0], g.hidden):
        raise FormatMismatch(f"grouped: x is {x.dtype} {list(x.shape)}; need bfloat16 or float16 [{ids.shape[0]}, {g.hidden}]")
    if ids.dtype not in (torch.int32, torch.int64) or weights.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise FormatMismatch(
            f"grouped: topk_ids is {ids.dtype}, topk_weights is {weights.dtype}; need int32 or int64, and float32 or 16-bit"
        )
    if weights.shape != ids.shape:
        raise FormatMismatch(f"grouped: topk_weights is {list(weights.shape)}; need the shape of topk_ids, {list(ids.shape)}")
    if out.dtype != x.dtype or out.shape != x.shape or not out.is_contiguous() or out.data_ptr() % 16:
        raise FormatMismatch(
            f"grouped: out is {out.dtype} {list(out.shape)}; need {x.dtype} {list(x.shape)}, contiguous and 16-byte aligned"
        )
    if any(t.device != g.w13.device for t in (x, ids, weights, out)):
        raise FormatMismatch(f"grouped: x is on {x.device}, the weights are on {g.w13.device}; move all to one device")


def warmup(g: Grouped, m_max: int, topk: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Compile and load every kernel that up to ``m_max`` tokens can need (one call for each plan)."""
    device = g.w13.device
    seen = set()
    m = 1
    while m <= m_max:
        for t in sorted({m, min(m * 3 // 2, m_max)}):
            p = choose(t * topk, g.experts, g.n13, g.hidden, _capability(device.index or 0))
            key = (p, t * topk * g.hidden <= 1 << 22)
            if key not in seen:
                seen.add(key)
                x = torch.zeros(t, g.hidden, dtype=dtype, device=device)
                ids = torch.arange(t * topk, device=device, dtype=torch.int32).reshape(t, topk) % g.experts + g.first
                run(x, g, ids, torch.ones(t, topk, device=device))
        m *= 2
    torch.cuda.synchronize(device)
