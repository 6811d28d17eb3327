"""W4A4 product on tensor cores that multiply block-scaled 4-bit operands themselves (SM100, SM120): ``tl.dot_scaled`` on plain bytes.

Small on purpose: no TMA, no layout of its own, one kernel for NVFP4 (blocks of 16, e4m3) and MXFP4 (blocks of 32, ue8m0). On SM100 it
compiles to ``tcgen05.mma ... block_scale``, on SM120 to ``mma.sync ... block_scale``; tests look for both in the PTX. It was never run on
such a device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["block_scaled", "matmul"]


@triton.jit
def block_scaled(
    x_ptr,  # u8 [M, K / 2]
    xs_ptr,  # e4m3 or u8 (ue8m0) [M, K / BLOCK]
    w_ptr,  # u8 [N, K / 2]
    ws_ptr,  # [N, K / BLOCK]
    alpha_ptr,  # f32 [1]: product of the global scales
    bias_ptr,  # [N]
    y_ptr,  # [M, N]
    M,
    N,
    K,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """y = alpha * (x @ w^T) + bias; every ``e2m1 * e2m1 * scale * scale`` exact, float32 sums."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    byte = tl.arange(0, BK // 2)
    group = tl.arange(0, BK // BLOCK)
    x_row = x_ptr + m.to(tl.int64)[:, None] * (K // 2)
    w_row = w_ptr + n.to(tl.int64)[None, :] * (K // 2)
    xs_row = xs_ptr + m.to(tl.int64)[:, None] * (K // BLOCK)
    ws_row = ws_ptr + n.to(tl.int64)[:, None] * (K // BLOCK)
    in_m, in_n = m < M, n < N
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        b, g = k // 2 + byte, k // BLOCK + group
        in_b, in_g = b < K // 2, g < K // BLOCK
        x = tl.load(x_row + b[None, :], mask=in_m[:, None] & in_b[None, :], other=0)
        w = tl.load(w_row + b[:, None], mask=in_b[:, None] & in_n[None, :], other=0)
        xs = tl.load(xs_row + g[None, :], mask=in_m[:, None] & in_g[None, :], other=0.0)
        ws = tl.load(ws_row + g[None, :], mask=in_n[:, None] & in_g[None, :], other=0.0)
        acc = tl.dot_scaled(x, xs, "e2m1", w, ws, "e2m1", acc=acc)
    acc *= tl.load(alpha_ptr)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + m.to(tl.int64)[:, None] * N + n[None, :], acc.to(y_ptr.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


def matmul(
    x: tuple[torch.Tensor, torch.Tensor],
    w: tuple[torch.Tensor, torch.Tensor],
    alpha: torch.Tensor,
    bias: torch.Tensor | None,
    block: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``x``, ``w``: (codes u8 [rows, k / 2], scale u8 [rows, k / block]); alpha f32 [1] -> ``out_dtype [m, n]``."""
    (xc, xs), (wc, ws) = x, w
    m, n, k = xc.shape[0], wc.shape[0], xc.shape[1] * 2
    if block == 16:
        xs, ws = xs.view(torch.float8_e4m3fn), ws.view(torch.float8_e4m3fn)
    y = torch.empty((m, n), dtype=out_dtype, device=xc.device)
    bm, bn, bk = 128, 128, 128
    grid = (triton.cdiv(m, bm), triton.cdiv(n, bn))
    block_scaled[grid](
        xc, xs, wc, ws, alpha, alpha if bias is None else bias, y, m, n, k,
        BLOCK=block, HAS_BIAS=bias is not None, BM=bm, BN=bn, BK=bk, num_warps=4,
    )  # fmt: skip
    return y
