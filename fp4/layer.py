"""The layer verbs: prepare, prepare_moe, matmul, moe, explain, warmup, and the torch.library ops behind the two products.

The backend is chosen in ``prepare`` and never again; a call validates its tensors, and launches. Eager calls go straight to the
prepared weight's bound callable. Under ``torch.compile``, and for tensor subclasses or when a gradient is asked for, the same code runs
inside the ops ``fp4::matmul`` and ``fp4::moe``, which carry the weight as an integer handle: keep the Prepared object alive. Both capture
into CUDA graphs behind a ``warmup`` where their backend does: all but ``reference`` (docs/backends.md has the table).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from fp4 import check, env, formats
from fp4.errors import FormatMismatch, Fp4Error, LayoutMismatch, Unsupported, shown
from fp4.formats import Format
from fp4.gpu import registry
from fp4.gpu.build import prepare, prepare_moe
from fp4.gpu.device import Device
from fp4.gpu.problem import Problem
from fp4.library import watched
from fp4.prepared import Prepared, PreparedMoE, by_handle, exported_handle
from fp4.ref import activation as activations
from fp4.tensor import QuantizedTensor

__all__ = ["explain", "matmul", "moe", "prepare", "prepare_moe", "warmup"]

_INTS = (torch.int32, torch.int64)
#: rows of one call that ``warmup`` runs: more than any engine's batch of tokens, and still memory that a device has
_ROWS = 1 << 20


# ---------------------------------------------------------------------------------------------------------------- calls


def matmul(x: torch.Tensor, w: Prepared, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """``y[..., n] = x[..., k] @ W[n, k]^T + bias[n]``, accumulated in float32, rounded once to ``out_dtype`` (default: x's dtype).

    Shapes::

        x:    one of w.act_dtypes [..., k], on w's device, zero rows allowed; one that is not contiguous is copied
        bias: f32, bf16 or f16 [n] or None
        y:    out_dtype (f32, bf16 or f16) [..., n]

    Raises FormatMismatch for another dtype or shape, LayoutMismatch for x elsewhere than w or a w that is not prepared.
    Forward only: a backward through the result raises Unsupported, and so does an x with a tangent (forward-mode AD, torch.func).
    """
    if type(w) is not Prepared:
        raise _not_prepared("matmul", w, "fp4.prepare(w)")
    if forward_ad._current_level >= 0 and not torch.compiler.is_compiling():
        check.no_tangent("matmul", x, bias)
    if type(x) is torch.Tensor and not watched() and not (torch.is_grad_enabled() and _wants_gradient(x, bias)):
        return _matmul(x, w, bias, out_dtype)
    _need_tensors("matmul", x=x, bias=bias)
    if not torch.compiler.is_compiling():
        check.no_tangent("matmul", x, bias)
    return torch.ops.fp4.matmul(x, bias, _handle(w), w.n, out_dtype)  # type: ignore[no-any-return]


def moe(
    x: torch.Tensor, ex: PreparedMoE, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``y[t] = sum_s topk_weights[t, s] * (W2[e] @ act(W13[e] @ x[t] + bias13[e]) + bias2[e])`` with ``e = topk_ids[t, s]``.

    Shapes::

        x:            one of ex.act_dtypes [t, hidden], on ex's device, t >= 0
        topk_ids:     int32 or int64 [t, s], global: an id whose expert is not here adds zero, and so does any other outside
                      [0, experts); -1 is the usual one for "no expert". No id reads out of bounds
        topk_weights: floating point [t, s]
        y:            out_dtype (default: x's dtype) [t, hidden]

    Raises FormatMismatch for another dtype or shape, LayoutMismatch for x elsewhere than ex, and under FP4_STRICT FormatMismatch for an
    id outside [-1, experts). Forward only, as ``matmul``.
    """
    if type(ex) is not PreparedMoE:
        raise _not_prepared("moe", ex, "fp4.prepare_moe(w13, w2, ...)")
    if forward_ad._current_level >= 0 and not torch.compiler.is_compiling():
        check.no_tangent("moe", x, topk_weights)
    if type(x) is torch.Tensor and not watched() and not (torch.is_grad_enabled() and _wants_gradient(x, topk_weights)):
        return _moe(x, ex, topk_ids, topk_weights, out_dtype)
    _need_tensors("moe", x=x, topk_ids=topk_ids, topk_weights=topk_weights)
    if not torch.compiler.is_compiling():
        check.no_tangent("moe", x, topk_weights)
    return torch.ops.fp4.moe(x, topk_ids, topk_weights, _handle(ex), out_dtype)  # type: ignore[no-any-return]


def _wants_gradient(x: torch.Tensor, other: Any) -> bool:
    return x.requires_grad or getattr(other, "requires_grad", False)


def _handle(w: Prepared | PreparedMoE) -> int:
    return exported_handle(w.handle) if torch.compiler.is_exporting() else w.handle


def _need_tensors(where: str, **given: Any) -> None:
    for name, t in given.items():
        if not (t is None and name == "bias"):
            check.dense(where, name, t)


def _not_prepared(where: str, w: Any, how: str) -> Fp4Error:
    if isinstance(w, QuantizedTensor):
        return LayoutMismatch(
            f"{where}: the weight is a QuantizedTensor, not prepared for any backend; call {how} once and pass its result"
        )
    return FormatMismatch(f"{where}: the weight is {type(w).__name__}; need what {how} returns")


def _matmul(x: torch.Tensor, w: Prepared, bias: torch.Tensor | None, out_dtype: torch.dtype | None) -> torch.Tensor:
    n, k = w.shape
    if (
        x.device != w.device
        or x.layout is not torch.strided
        or x.is_nested
        or x.is_neg()
        or x.dtype not in w.act_dtypes
        or x.ndim == 0
        or x.shape[-1] != k
    ):
        raise _bad_x("matmul", x, w, k)
    if bias is not None:
        _need_tensors("matmul", bias=bias)
        if bias.shape != (n,) or bias.device != x.device or bias.dtype not in check.FLOATS:
            got = f"bias is {bias.dtype} {list(bias.shape)} on {bias.device}"
            raise FormatMismatch(f"matmul: {got}; need float32, bfloat16 or float16 [{n}] on {x.device}")
        bias = bias.contiguous()  # kernels read n elements from its address
    if out_dtype is not None:
        check.float_dtype("matmul", "out_dtype", out_dtype)
    call = w._call or w.bind()  # type: ignore[attr-defined]
    if x.ndim == 2 and x.is_contiguous():
        if x.shape[0]:
            return call(x, bias, out_dtype or x.dtype)  # type: ignore[no-any-return]
        return x.new_empty((0, n), dtype=out_dtype)
    flat = x.reshape(x.shape[:-1].numel(), k).contiguous()
    y = call(flat, bias, out_dtype or x.dtype) if flat.shape[0] else flat.new_empty((0, n), dtype=out_dtype or x.dtype)
    return y.view(*x.shape[:-1], n)  # type: ignore[no-any-return]


def _moe(
    x: torch.Tensor, ex: PreparedMoE, ids: torch.Tensor, weights: torch.Tensor, out_dtype: torch.dtype | None, in_op: bool = False
) -> torch.Tensor:
    hidden, experts = ex.shape[1], ex.experts
    if (
        x.device != ex.device
        or x.layout is not torch.strided
        or x.is_nested
        or x.is_neg()
        or x.dtype not in ex.act_dtypes
        or x.ndim != 2
        or x.shape[1] != hidden
    ):
        raise _bad_x("moe", x, ex, hidden)
    _need_tensors("moe", topk_ids=ids, topk_weights=weights)
    if out_dtype is not None:
        check.float_dtype("moe", "out_dtype", out_dtype)
    if (
        ids.ndim != 2
        or ids.shape != weights.shape
        or ids.shape[0] != x.shape[0]
        or ids.dtype not in _INTS
        or not weights.is_floating_point()
    ):
        raise FormatMismatch(
            f"moe: topk_ids {ids.dtype} {list(ids.shape)}, topk_weights {weights.dtype} {list(weights.shape)} for x {list(x.shape)}; "
            f"need int32 or int64 [{x.shape[0]}, topk] and floating point of the same shape"
        )
    if ids.device != x.device or weights.device != x.device:
        raise FormatMismatch(f"moe: topk_ids on {ids.device}, topk_weights on {weights.device}, x on {x.device}; move them to one device")
    if not x.shape[0] or not ids.shape[1]:
        return x.new_zeros((x.shape[0], hidden), dtype=out_dtype)
    if env.strict():
        bad = (ids < -1) | (ids >= experts)
        if bool(bad.any()):
            t, s = (int(i) for i in bad.nonzero()[0])
            raise FormatMismatch(f"moe: topk_ids[{t}, {s}] is {int(ids[t, s])}; need 0 <= id < {experts}, or -1 for none")
    call = ex._call or ex.bind()  # type: ignore[attr-defined]
    if in_op:  # a compiled graph has memory and captures of its own: no replays inside it
        call = getattr(call, "direct", call)
    if weights.dtype != torch.float32:
        weights = weights.float()
    return call(x.contiguous(), ids.contiguous(), weights.contiguous(), out_dtype or x.dtype)  # type: ignore[no-any-return]


def _bad_x(where: str, x: torch.Tensor, w: Prepared | PreparedMoE, k: int) -> Fp4Error:
    check.dense(where, "x", x)
    if x.device != w.device:
        return LayoutMismatch(
            f"{where}: x is on {x.device}, the weight was prepared on {w.device}; move x, or prepare again there: "
            "fp4.prepare(w.restore().to(device))"
        )
    if x.dtype not in w.act_dtypes:
        names = ", ".join(str(d).removeprefix("torch.") for d in w.act_dtypes)
        way = f"cast x or prepare with act_dtype={x.dtype}" if x.dtype in check.FLOATS else "cast x"
        return FormatMismatch(f"{where}: x is {x.dtype}, backend {w.backend!r} prepared this weight for {names}; {way}")
    need = f"[t, {k}]" if where == "moe" else f"[..., {k}]"
    return FormatMismatch(f"{where}: x has shape {list(x.shape)}; need {need}, the weight is {w.problem}")


# ---------------------------------------------------------------------------------------------------------------- ops

_lib: Any = torch.library.Library("fp4", "FRAGMENT")  # type: ignore[no-untyped-call]
_lib.define("matmul(Tensor x, Tensor? bias, SymInt handle, SymInt n, ScalarType? out_dtype=None) -> Tensor")
_lib.define("moe(Tensor x, Tensor topk_ids, Tensor topk_weights, SymInt handle, ScalarType? out_dtype=None) -> Tensor")


def _matmul_op(x: torch.Tensor, bias: torch.Tensor | None, handle: int, n: int, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    w = by_handle(handle)
    if type(w) is not Prepared or w.n != n:  # a graph that another process saved: handles mean something in one process only
        raise LayoutMismatch(f"fp4::matmul: handle {handle} is {w!r}, the graph was made for a weight of {n} rows; trace it again here")
    return _matmul(x, w, bias, out_dtype)


def _moe_op(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: int, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    ex = by_handle(handle)
    if type(ex) is not PreparedMoE:
        raise LayoutMismatch(f"fp4::moe: handle {handle} is {ex!r}, the graph was made for experts; trace it again here")
    return _moe(x, ex, ids, weights, out_dtype, in_op=True)


def _matmul_fake(x: torch.Tensor, bias: torch.Tensor | None, handle: int, n: int, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], n), dtype=out_dtype or x.dtype)


def _moe_fake(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: int, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype)


for _name, _impl, _fake in (("matmul", _matmul_op, _matmul_fake), ("moe", _moe_op, _moe_fake)):
    _lib.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp4::{_name}", _fake, lib=_lib)


# There is no backward. A graph that a compiler traces may hold one that never runs, so it is an op that raises when it does.
_lib.define("no_backward(Tensor grad, SymInt[] shape, ScalarType dtype, str where) -> Tensor")


def _no_backward(grad: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, where: str) -> torch.Tensor:
    raise Unsupported(f"{where}: has no backward; call it under torch.no_grad(), or train on fp4.fake_quantize(weight)")


def _no_backward_fake(grad: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, where: str) -> torch.Tensor:
    return grad.new_empty(shape, dtype=dtype)


_lib.impl("no_backward", _no_backward, "CompositeExplicitAutograd")
torch.library.register_fake("fp4::no_backward", _no_backward_fake, lib=_lib)


def _refuse_backward(where: str) -> None:
    def setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.like = [(t.shape, t.dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else None for t in inputs]

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return tuple(torch.ops.fp4.no_backward(grad, *like, where) if like else None for like in ctx.like)

    torch.library.register_autograd(f"fp4::{where}", backward, setup_context=setup, lib=_lib)


_refuse_backward("matmul")
_refuse_backward("moe")


# ---------------------------------------------------------------------------------------------------------------- words


def explain(
    op: str | Problem = "matmul",
    format: str | Format = "nvfp4",
    device: Device | torch.device | str | None = None,
    *,
    assume_installed: bool = False,
    **sizes: Any,
) -> registry.Ranking:
    """Print and return every backend's rank, or its reason, for a layer that need not exist.

    ``device``: a torch device, a Device, or a name such as "sm90" that needs no GPU; ``sizes``: any field of Problem (n, k, experts,
    hidden, intermediate, topk, activation, gate_up, act, act_dtype ...). ``assume_installed``: rank vendor libraries that are missing
    here as if they were present, in a release that has everything; each line then says whether it was assumed. ``prepare`` never does.
    ``op`` may be a Problem, which says all of it; ``format``, ``device`` and sizes are then left out. Raises FormatMismatch for an unknown
    op, format, device or size, and for a size that no layer can have.

    >>> fp4.explain(op="moe", format="mxfp4", device="sm90", experts=128, hidden=2880, intermediate=2880)   # doctest: +SKIP
    """
    if isinstance(op, Problem):
        if sizes or device is not None or formats.get(format) not in (formats.NVFP4, op.format):
            raise FormatMismatch(f"explain: a Problem ({op}) and {', '.join(['format or device', *sizes][:4])} too; need one of them")
        return _shown(op, assume_installed)
    known = set(Problem.__dataclass_fields__) - {"op", "format", "device"}
    unknown = sorted(set(sizes) - known)
    if unknown:
        raise FormatMismatch(f"explain: unknown size {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    fmt = formats.get(format)
    for name in ("n", "k", "experts", "hidden", "intermediate", "topk"):
        value = sizes.get(name)
        if value is not None:
            check.whole("explain", name, value, 1, (1 << 63) - 1)
        if value is not None and name in ("k", "hidden", "intermediate") and value % fmt.block:
            raise FormatMismatch(f"explain: {name} is {value}; {fmt} needs a multiple of its block {fmt.block}")
    if (sizes.get("topk") or 0) > (sizes.get("experts") or 1 << 63):
        raise FormatMismatch(f"explain: topk is {sizes['topk']} of {sizes['experts']} experts; need at most that many")
    if sizes.get("activation") is not None:
        sizes["activation"] = activations.get(sizes["activation"])
    if sizes.get("local") is not None:
        local = sizes["local"]
        if not isinstance(local, (tuple, list)) or len(local) != 2:
            raise FormatMismatch(f"explain: local is {shown(local)}; need (start, stop), the experts that are here")
        stop = check.whole("explain", "the end of local", local[1], 0, sizes.get("experts"))
        sizes["local"] = (check.whole("explain", "the start of local", local[0], 0, stop), stop)
    return _shown(Problem(op=op, format=fmt, device=Device.of(device), **sizes), assume_installed)


def _shown(problem: Problem, assume_installed: bool) -> registry.Ranking:
    ranking = registry.rank(problem, assume_installed)
    print(ranking)
    return ranking


def warmup(w: Prepared | PreparedMoE, m_max: int = 256, topk: int | None = None) -> None:
    """Compile and allocate what calls with up to ``m_max`` rows need, so that the first real call, or a graph capture, finds it done.

    ``m_max``: rows of x (tokens), 0 to 2^20; ``topk``: ids a token of experts, default what ``prepare_moe`` was told, else 1. Runs the
    layer on zeros and waits for the device. Raises FormatMismatch for a weight that is not prepared or a number out of range.
    """
    if not isinstance(w, (Prepared, PreparedMoE)):
        raise _not_prepared("warmup", w, "fp4.prepare(w)")
    m_max = max(check.whole("warmup", "m_max", m_max, 0, _ROWS), 1)
    topk = None if topk is None else check.whole("warmup", "topk", topk, 1, w.problem.experts)
    own = getattr(registry.get(w.backend), "warmup", None)
    if own is not None and own(w, m_max) is not False:
        return
    sizes = sorted({1, *(1 << i for i in range(1, m_max.bit_length())), m_max})
    for m in sizes:
        x = torch.zeros((m, w.shape[1]), dtype=w.act_dtypes[0], device=w.device)
        if isinstance(w, Prepared):
            _matmul(x, w, None, None)
        else:
            slots = topk or w.problem.topk or 1
            ids = torch.arange(m * slots, device=w.device).reshape(m, slots) % max(w.experts, 1)
            _moe(x, w, ids, torch.ones((m, slots), device=w.device), None)
    if w.device.type == "cuda":
        torch.cuda.synchronize(w.device)
