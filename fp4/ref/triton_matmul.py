"""Plain Triton products with FP4 weights: one kernel, dense or grouped by expert, correct on every GPU from SM80 and in the interpreter.

No tuning and no hardware FP8 or FP4 type: codes and scales are decoded by integer arithmetic, so SM80 and SM86 run it. For each byte of
codes the even elements (low nibbles) and the odd ones (high nibbles) form one product each; nothing has to be interleaved in registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from fp4.errors import FormatMismatch
from fp4.formats import AMDFP4, MXFP4, NVFP4, NVFP4_B32, Format
from fp4.ref import activation as activations
from fp4.ref.activation import Activation
from fp4.ref.matmul import check_bias, check_input
from fp4.ref.moe import check, check_routing
from fp4.ref.triton_codes import decode_e2m1, decode_e4m3, decode_ue5m3, decode_ue8m0
from fp4.tensor import QuantizedTensor

__all__ = ["FORMATS", "matmul", "moe"]

#: formats that the kernel decodes
FORMATS = (NVFP4, MXFP4, NVFP4_B32, AMDFP4)


@triton.jit
def _scale(byte, SCALE: tl.constexpr):
    """u8 scale bytes -> f32 values. SCALE: "e4m3", "ue8m0" or "ue5m3"."""
    if SCALE == "ue8m0":
        value = decode_ue8m0(byte)
    elif SCALE == "e4m3":
        value = decode_e4m3(byte)
    else:
        value = decode_ue5m3(byte)
    return value


@triton.jit
def _product(
    x,  # float [rows, K], strides x_row, x_col
    codes,  # u8 [experts, N, K / 2]
    scale,  # u8 [experts, N, K / BLOCK]
    global_scale,  # f32 [experts]
    bias,  # f32 [experts, N]
    y,  # f32 [rows, N]
    order,  # i32: position in expert order -> token * TOPK + slot
    tile_expert,  # i32 [tiles]: expert of each tile of rows, or -1
    tile_row,  # i32 [tiles]: first position of the tile
    segment_end,  # i32 [experts]: end of each expert's positions
    M,
    N,
    K,
    x_row,
    x_col,
    GROUPED: tl.constexpr,
    GATHER: tl.constexpr,  # 0: x rows are positions; else x row = order[position] // GATHER
    SCATTER: tl.constexpr,  # y row = order[position], else the position
    HAS_BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,  # dtype of the products
    BM: tl.constexpr,
    BN: tl.constexpr,
    BB: tl.constexpr,  # bytes of codes along K, two elements each
):
    tile = tl.program_id(0)
    if GROUPED:
        expert = tl.load(tile_expert + tile).to(tl.int64)
        if expert < 0:
            return
        position = tl.load(tile_row + tile) + tl.arange(0, BM)
        live = position < tl.load(segment_end + expert)
    else:
        expert = tl.zeros((), dtype=tl.int64)
        position = tile * BM + tl.arange(0, BM)
        live = position < M
    source = position
    target = position
    if GATHER > 0 or SCATTER:
        slot = tl.load(order + position, mask=live, other=0)
        if GATHER > 0:
            source = slot // GATHER
        if SCATTER:
            target = slot
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = n < N
    # 64-bit offsets: experts * N * K passes 2^31 for real models
    w_row = expert * N + n.to(tl.int64)
    x_base = x + source.to(tl.int64)[:, None] * x_row
    code_base = codes + w_row[None, :] * (K // 2)
    scale_base = scale + w_row[None, :] * (K // BLOCK)

    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K // 2, BB):
        byte = start + tl.arange(0, BB)
        in_k = byte < K // 2
        w_mask = in_k[:, None] & inside[None, :]
        c = tl.load(code_base + byte[:, None], mask=w_mask, other=0)
        s = _scale(tl.load(scale_base + (byte // (BLOCK // 2))[:, None], mask=w_mask, other=0), SCALE)
        x_mask = live[:, None] & in_k[None, :]
        column = byte.to(tl.int64)[None, :] * 2
        even = tl.load(x_base + column * x_col, mask=x_mask, other=0.0).to(DOT)
        odd = tl.load(x_base + (column + 1) * x_col, mask=x_mask, other=0.0).to(DOT)
        acc = tl.dot(even, (decode_e2m1(c) * s).to(DOT), acc, input_precision="ieee")
        acc = tl.dot(odd, (decode_e2m1(c >> 4) * s).to(DOT), acc, input_precision="ieee")

    acc *= tl.load(global_scale + expert)
    if HAS_BIAS:
        acc += tl.load(bias + w_row, mask=inside, other=0.0)[None, :]
    tl.store(y + target.to(tl.int64)[:, None] * N + n[None, :], acc, mask=live[:, None] & inside[None, :])


@dataclass(frozen=True)
class _Groups:
    """Rows sorted by expert, cut into tiles of ``rows`` that never cross an expert. Built on the device, with no synchronisation."""

    order: torch.Tensor
    tile_expert: torch.Tensor
    tile_row: torch.Tensor
    segment_end: torch.Tensor
    rows: int


def _group(topk_ids: torch.Tensor, first: int, experts: int, rows: int) -> _Groups:
    flat = topk_ids.reshape(-1).long() - first
    local = torch.where((flat >= 0) & (flat < experts), flat, experts)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device).scatter_add_(0, local, torch.ones_like(local))[:experts]
    end = counts.cumsum(0)
    tiles = (counts + rows - 1) // rows
    tile_end = tiles.cumsum(0)
    # a bound on the number of tiles that needs no look at the counts
    total = (flat.numel() + rows - 1) // rows + min(experts, flat.numel())
    tile = torch.arange(total, device=flat.device)
    expert = torch.searchsorted(tile_end, tile, right=True)
    at = expert.clamp(max=experts - 1)
    row = (end - counts)[at] + (tile - (tile_end - tiles)[at]) * rows
    tile_expert = torch.where(expert < experts, expert, -1)
    order = torch.argsort(local, stable=True)
    return _Groups(order.to(torch.int32), tile_expert.to(torch.int32), row.to(torch.int32), end.to(torch.int32), rows)


def _dot_dtype(fmt: Format, x: torch.dtype) -> Any:
    """The narrowest dtype that holds both ``x`` and every ``elem * scale``, so that each product is exact before it is added.

    bf16 holds all products (8 significant bits, 8 exponent bits). fp16 holds those of NVFP4: at most 6 * 448, at least 2^-10.
    Triton's interpreter multiplies the raw bits of bf16 operands, so there everything is float32; exact products stay exact.
    """
    if isinstance(_product, triton.runtime.JITFunction):
        if x == torch.bfloat16:
            return tl.bfloat16
        if x == torch.float16 and fmt.scale.name == "e4m3":
            return tl.float16
    return tl.float32


def _launch(
    x: torch.Tensor,
    q: QuantizedTensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    groups: _Groups | None,
    *,
    gather: int = 0,
    scatter: bool = False,
    blocks: tuple[int, int, int] | None = None,
) -> None:
    n, k = q.codes.shape[-2], q.k
    experts = q.codes.shape[0] if q.codes.ndim == 3 else 1
    device = x.device
    g = (
        torch.ones(experts, dtype=torch.float32, device=device)
        if q.global_scale is None
        else q.global_scale.reshape(-1).expand(experts).contiguous()
    )
    m = x.shape[0]
    bm, bn, bb = blocks or (16 if m <= 16 else 64, 64, 32)
    if groups is not None:
        bm = groups.rows
    tiles = triton.cdiv(m, bm) if groups is None else groups.tile_expert.numel()
    none = torch.empty(0, dtype=torch.int32, device=device)
    index = (none,) * 4 if groups is None else (groups.order, groups.tile_expert, groups.tile_row, groups.segment_end)
    _product[(tiles, triton.cdiv(n, bn))](
        x,
        q.codes.contiguous(),
        q.scale.contiguous(),
        g,
        g if bias is None else bias.float().contiguous(),
        y,
        *index,
        m,
        n,
        k,
        x.stride(0),
        x.stride(1),
        GROUPED=groups is not None,
        GATHER=gather,
        SCATTER=scatter,
        HAS_BIAS=bias is not None,
        SCALE=q.format.scale.name,
        BLOCK=q.format.block,
        DOT=_dot_dtype(q.format, x.dtype),
        BM=bm,
        BN=bn,
        BB=bb,
    )


def _check_format(where: str, x: torch.Tensor, *weights: QuantizedTensor) -> None:
    for q in weights:
        if q.format not in FORMATS:
            raise FormatMismatch(f"{where}: the weight is {q.format}; this kernel decodes {', '.join(map(str, FORMATS))}")
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise FormatMismatch(f"{where}: x is {x.dtype}; this kernel reads bfloat16, float16 or float32")


def matmul(
    x: torch.Tensor,
    q: QuantizedTensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    blocks: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """``y = x @ dequantize(q).T + bias``: exact products, float32 accumulation, one rounding to ``out_dtype``.

    Shapes as in ``fp4.ref.matmul.matmul``. ``blocks`` is the tile: rows, columns, bytes of codes along k (powers of two, at least 16).
    Raises FormatMismatch when a shape, dtype, format or device disagrees.
    """
    where = "matmul (Triton reference)"
    if q.codes.ndim != 2:
        raise FormatMismatch(f"{where}: the weight has shape {list(q.shape)}; need [n, k]")
    check_input(where, x, q.k, q.codes.device)
    check_bias(where, bias, (q.codes.shape[0],), q.codes.device)
    _check_format(where, x, q)
    rows = x.reshape(x.shape[:-1].numel(), q.k)
    y = torch.zeros(rows.shape[0], q.codes.shape[0], dtype=torch.float32, device=x.device)
    if y.numel():
        _launch(rows, q, bias, y, None, blocks=blocks)
    return y.to(out_dtype or x.dtype).reshape(*x.shape[:-1], q.codes.shape[0])


def moe(
    x: torch.Tensor,
    w13: QuantizedTensor | tuple[QuantizedTensor, QuantizedTensor],
    w2: QuantizedTensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    gate_up: str | None = None,
    activation: Activation | str,
    bias13: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    bias2: torch.Tensor | None = None,
    local_experts: range | None = None,
    out_dtype: torch.dtype | None = None,
    blocks: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """The mixture of experts of ``fp4.ref.moe.moe``, same arguments, by two grouped products.

    The activation runs in float32 and its result is rounded to ``x.dtype`` before the second product; everything else is float32. Nothing
    is read back to the host, so a CUDA graph can capture it.
    """
    where = "moe (Triton reference)"
    p = check(w13, w2, gate_up=gate_up, activation=activation, bias13=bias13, bias2=bias2, local_experts=local_experts)
    check_input(where, x, p.hidden, w2.codes.device)
    check_routing(where, x, topk_ids, topk_weights)
    _check_format(where, x, *p.parts, w2)
    out_dtype = out_dtype or x.dtype
    tokens, topk = topk_ids.shape
    pairs = tokens * topk
    if not pairs or not p.experts or not p.hidden:
        return torch.zeros(tokens, p.hidden, dtype=out_dtype, device=x.device)

    rows = blocks[0] if blocks else (16 if pairs <= 32 * p.experts else 64)
    groups = _group(topk_ids, p.local.start, p.experts, rows)
    products = []
    for q, bias in zip(p.parts, p.biases, strict=True):
        h = torch.zeros(pairs, q.codes.shape[1], dtype=torch.float32, device=x.device)
        _launch(x, q, bias, h, groups, gather=topk, blocks=blocks)
        products.append(h)
    hidden = p.activation(*products) if len(products) == 2 else activations.apply(p.activation, products[0], p.order)
    y = torch.zeros(pairs, p.hidden, dtype=torch.float32, device=x.device)
    _launch(hidden.to(x.dtype), w2, bias2, y, groups, scatter=True, blocks=blocks)

    held = (topk_ids >= p.local.start) & (topk_ids < p.local.stop)
    gates = torch.where(held, topk_weights.float(), 0.0)
    return (y.reshape(tokens, topk, -1) * gates.unsqueeze(-1)).sum(1).to(out_dtype)
