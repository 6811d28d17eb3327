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
from fp4.gpu.kernels import frag
from fp4.gpu.kernels.grouped_plan import Plan, choose
from fp4.gpu.kernels.routing import max_blocks, reduce_kernel, route_kernel
from fp4.gpu.storage import Stored
from fp4.ref import activation as activations
from fp4.tensor import QuantizedTensor

__all__ = ["Grouped", "layouts", "prepare", "restore", "run", "supports", "warmup"]

_ACTS = {"relu2": 0, "swiglu": 1, "silu": 2, "situ": 3}
_INF = float("inf")


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


def layouts(block: int, gated: bool) -> dict[str, Stored]:
    """Storage of the four arrays. A gated first matrix alternates eight gate rows and their eight up rows."""
    rows = "deepgemm_gate_up >> " if gated else ""
    order = "gate_up" if gated else None
    codes, scale = frag.CODES_LAYOUT, frag.SCALE_LAYOUT[block]
    return {
        "w13.codes": Stored(rows + codes, order=order),
        "w13.scale": Stored(rows + scale, order=order),
        "w2.codes": Stored(codes),
        "w2.scale": Stored(scale),
    }


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


def from_arrays(arrays: Mapping[str, torch.Tensor], *, block: int, first: int, hidden: int, intermediate: int, activation: Any) -> Grouped:
    """The kernels' view of a prepared layer's arrays: names as in ``PreparedMoE.arrays``, bytes as ``layouts``, bias13 as [gate; up].

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
        bias13 = bias13.to(torch.float32)
        if act.gated:  # [gate; up] -> eight and eight, as the rows
            bias13 = bias13.reshape(experts, 2, -1, 8).transpose(1, 2).reshape(experts, -1)
        bias13 = bias13.contiguous()
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
    stored = layouts(block, act.gated)
    arrays: dict[str, torch.Tensor] = {}
    for name, q in (("w13", w13), ("w2", w2)):
        for part in ("codes", "scale"):
            arrays[f"{name}.{part}"] = storage.apply(getattr(q, part), stored[f"{name}.{part}"], order if name == "w13" else None)
        if q.global_scale is not None:
            arrays[f"{name}.global_scale"] = q.global_scale
    if gate_up_scale is not None:
        arrays["w13.global_scale"] = gate_up_scale
    if bias13 is not None:
        arrays["bias13"] = storage.reorder_gate_up(bias13.unsqueeze(-1), str(order), "gate_up").squeeze(-1) if act.gated else bias13
    if bias2 is not None:
        arrays["bias2"] = bias2
    g = from_arrays(arrays, block=block, first=first, hidden=hidden, intermediate=inter, activation=act)
    g.logical = {"w13": w13, "w2": w2, "order": order}
    g.logical = {
        n: (q.format, tuple(q.codes.shape), tuple(q.scale.shape), q.global_scale, q.gate_up) for n, q in (("w13", w13), ("w2", w2))
    }
    g.logical["order"] = order
    return g


def restore(g: Grouped) -> tuple[QuantizedTensor, QuantizedTensor]:
    """(w13, w2) as ``prepare`` got them, bit for bit."""
    stored, out = layouts(g.block, g.act.gated), []
    for name, codes, scale in (("w13", g.w13, g.s13), ("w2", g.w2, g.s2)):
        fmt, cs, ss, second, gate_up = g.logical[name]
        order = g.logical["order"] if name == "w13" else None
        c = storage.invert(codes, stored[f"{name}.codes"], cs, order)
        s = storage.invert(scale, stored[f"{name}.scale"], ss, order)
        out.append(QuantizedTensor(fmt, c, s, second, gate_up=gate_up))
    return out[0], out[1]


class _Kernel:
    """A kernel with its constants: compiled at the first launch, launched from then on without Triton's argument analysis.

    Sound because nothing is specialised on a value: integers are not, and every pointer is 16-byte aligned or declared as not specialised.
    """

    def __init__(self, fn: Any, warps: int, **constants: Any) -> None:
        self.fn, self.warps, self.constants, self.made = fn, warps, constants, None
        self.tail = tuple(constants[p.name] for p in fn.params if p.name in constants)

    def __call__(self, grid: tuple[int, int, int], *args: Any) -> None:
        if self.made is None:
            self.made = self.fn[grid](*args, **self.constants, num_warps=self.warps)
        else:
            self.made[grid](*args, *self.tail)


@functools.lru_cache(maxsize=8)
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _align(n: int) -> int:
    return (n + 255) // 256 * 256


class _Chain:
    """All launches for one (tokens, topk, dtypes): sizes, offsets in the workspace, kernels."""

    def __init__(self, g: Grouped, tokens: int, topk: int, x: torch.Tensor, ids: torch.dtype, gamma: torch.dtype, plan: Plan) -> None:
        from fp4.gpu.kernels.grouped_large import grouped_large, permute_rows
        from fp4.gpu.kernels.grouped_small import grouped_small

        window = g.windows[x.dtype]
        if isinstance(window, Exception):
            raise window
        self.pairs, self.topk, self.tokens, self.plan = tokens * topk, topk, tokens, plan
        half, size = x.dtype == torch.float16, 2
        self.blocks = max_blocks(self.pairs, g.experts, plan.mt)
        hp, ip = -(-g.hidden // 64) * 64, -(-g.inter // 64) * 64
        self.row_dtype = torch.float32 if self.pairs * g.hidden <= 1 << 22 else x.dtype
        parts = {
            "sched": (4 * (1 + 3 * self.blocks), torch.int32),
            "order": (4 * self.pairs, torch.int32),
            "h": (size * self.pairs * (ip if plan.large else g.inter), x.dtype),
            "y": (self.row_dtype.itemsize * self.pairs * g.hidden, self.row_dtype),
            "x": (size * tokens * hp if plan.large else 0, torch.int32),
        }
        self.offsets: dict[str, tuple[int, int, torch.dtype]] = {}
        at = 0
        for name, (n, dtype) in parts.items():
            self.offsets[name] = (at, n, dtype)
            at += _align(n)
        self.nbytes = at

        bins = triton.next_power_of_2(g.experts + 1)
        chunk = min(max(triton.next_power_of_2(self.pairs), 128), 2048)
        self.route = _cached(g, ("route", ids, plan.mt, chunk), route_kernel, 4, BLOCK=plan.mt, CHUNK=chunk, BINS=bins)
        common: dict[str, Any] = {"KIND": g.block, "HALF": half}
        code = _ACTS[g.act.name]
        first: dict[str, Any] = {"N": g.n13, "K": g.hidden, "ACT": code, "FIRST": True, "BIAS": g.bias13 is not None, "ANY": window[0][2]}
        second: dict[str, Any] = {"N": g.hidden, "K": g.inter, "ACT": 0, "FIRST": False, "BIAS": g.bias2 is not None, "ANY": window[1][2]}
        key = (x.dtype, gamma, self.row_dtype)
        fn = grouped_large if plan.large else grouped_small
        tiles = []
        self.products = []
        for n, (which, config) in enumerate(((first, plan.first), (second, plan.second))):
            own = {**common, **which, **dict(config), "MT": plan.mt}
            warps = own["WN"] if plan.large else own["WK"]
            tiles.append(-(-which["N"] // (16 * own["R"] * (own["WN"] if plan.large else 1))))
            self.products.append(_cached(g, ("product", n, *key, plan), fn, warps, **own))
        self.grids = [(t * self.blocks, 1, 1) for t in tiles]
        if plan.large:
            self.permute = _cached(g, ("permute",), permute_rows, 4, K=g.hidden, BLOCK=1024)
            self.permute_grid = (-(-tokens * hp // 2 // 1024), 1, 1)
        self.reduce = _cached(g, ("reduce", x.dtype, self.row_dtype, ids, topk), reduce_kernel, 4, H=g.hidden, TOPK=topk, BLOCK=1024)
        self.reduce_grid = (tokens, -(-g.hidden // 1024), 1)
        a = g.act
        self.act = {
            "swiglu": lambda: (a.alpha, a.beta, _INF if a.limit is None else a.limit),
            "situ": lambda: (a.beta, a.linear_beta or 0.0, 0.0),
        }.get(a.name, lambda: (0.0, 0.0, 0.0))()
        self.act = tuple(float(v) for v in self.act)
        self.window = window
        self.warm = False

    def launch(self, g: Grouped, x: torch.Tensor, ids: torch.Tensor, gamma: torch.Tensor, out: torch.Tensor) -> None:
        ws = torch.empty(self.nbytes, dtype=torch.uint8, device=x.device)
        part: Any
        if self.warm:  # plain addresses: the launcher takes them for pointers
            base = ws.data_ptr()
            part = {name: base + at for name, (at, _, _) in self.offsets.items()}
        else:
            part = {name: ws[at : at + max(n, 256)].view(dtype) for name, (at, n, dtype) in self.offsets.items()}
        (a13, oc13, _), (a2, oc2, _) = self.window
        self.route((g.experts, 1, 1), ids, part["order"], part["sched"], self.pairs, g.first, g.experts)
        rows = x
        if self.plan.large:
            self.permute(self.permute_grid, x if self.warm else x.view(torch.int32), part["x"], self.tokens)
            rows = part["x"] if self.warm else part["x"].view(x.dtype)
        tail = (part["order"], part["sched"], gamma)
        b13 = a13 if g.bias13 is None else g.bias13
        b2 = a2 if g.bias2 is None else g.bias2
        w = [t if self.warm else t.view(-1).view(torch.int32) for t in (g.w13, g.s13, g.w2, g.s2)]
        p0, p1, p2 = self.act
        self.products[0](self.grids[0], rows, w[0], w[1], a13, b13, part["h"], *tail, oc13, p0, p1, p2, self.topk)
        self.products[1](self.grids[1], part["h"], w[2], w[3], a2, b2, part["y"], *tail, oc2, p0, p1, p2, self.topk)
        self.reduce(self.reduce_grid, part["y"], ids, out, g.first, g.experts)
        self.warm = True


def _cached(g: Grouped, key: Any, fn: Any, warps: int, **constants: Any) -> _Kernel:
    found = g.calls.get(key)
    if found is None:
        found = g.calls[key] = _Kernel(fn, warps, **constants)
    return found  # type: ignore[no-any-return]


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
    if tokens == 0:
        return out
    if topk == 0 or g.experts == 0:
        return out.zero_()
    x = x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    key = (tokens, topk, x.dtype, topk_ids.dtype, topk_weights.dtype, out.dtype, plan)
    chain = g.calls.get(key)
    if chain is None:
        if x.dtype not in g.windows or x.shape[1] != g.hidden:
            raise FormatMismatch(f"grouped: x is {x.dtype} {list(x.shape)}; need bfloat16 or float16 [tokens, {g.hidden}]")
        device = x.device.index or 0
        p = plan or choose(tokens * topk, g.experts, g.n13, g.hidden, _capability(device))
        chain = g.calls[key] = _Chain(g, tokens, topk, x, topk_ids.dtype, topk_weights.dtype, p)
    chain.launch(g, x, topk_ids, topk_weights, out)
    return out


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
