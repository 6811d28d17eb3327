"""FlashInfer's bytes as independent index formulas, from its public sources and from bytes of its kernels. Nothing here imports fp4.

Each formula gives, for a logical coordinate, the place where a kernel reads it; ``gather`` then reads. They share nothing with
``fp4.layout``.
"""

from __future__ import annotations

import numpy as np
import torch

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """u8 [..., k/2] -> codes [..., k]; the low nibble is the even element."""
    b = packed.contiguous().view(torch.uint8).long()
    return torch.stack([b & 15, b >> 4], -1).flatten(-2)


def e2m1(packed: torch.Tensor) -> torch.Tensor:
    return E2M1[nibbles(packed)]


def e4m3(byte: torch.Tensor) -> torch.Tensor:
    return byte.contiguous().view(torch.float8_e4m3fn).to(torch.float64)


def ue8m0(byte: torch.Tensor) -> torch.Tensor:
    """2^(byte - 127), 255 is NaN."""
    b = byte.contiguous().view(torch.uint8)
    return torch.where(b == 255, torch.nan, torch.pow(2.0, b.to(torch.float64) - 127.0))


def ue8m0_shifted(byte: torch.Tensor) -> torch.Tensor:
    """byte << 23 as float32: byte 0 is 0.0 and 255 infinity."""
    return (byte.contiguous().view(torch.uint8).to(torch.int32) << 23).view(torch.float32).to(torch.float64)


def rp(rows: int) -> int:
    return -(-rows // 128) * 128


def cp(cols: int) -> int:
    return -(-cols // 4) * 4


def sf_128x4(flat: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Read [rows, cols] from a 128x4 buffer."""
    r, c = np.ogrid[:rows, :cols]
    tiles = -(-cols // 4)
    at = ((r // 128) * tiles + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
    return flat.contiguous().view(torch.uint8).reshape(-1)[torch.from_numpy(at)]


def sf_8x4(flat: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Read [rows, cols] from an 8x4 buffer."""
    r, c = np.ogrid[:rows, :cols]
    tiles = -(-cols // 4)
    at = ((r // 8) * tiles + c // 4) * 32 + (r % 8) * 4 + c % 4
    return flat.contiguous().view(torch.uint8).reshape(-1)[torch.from_numpy(at)]


def put_sf(out: torch.Tensor, scale: torch.Tensor, layout: str) -> None:
    """Write u8 [rows, cols] into a flat buffer as a quantiser does, padding included (zero)."""
    rows, cols = scale.shape
    r, c = np.ogrid[:rows, :cols]
    tiles = -(-cols // 4)
    if layout == "128x4":
        at = ((r // 128) * tiles + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
    elif layout == "8x4":
        at = ((r // 8) * tiles + c // 4) * 32 + (r % 8) * 4 + c % 4
    else:
        at = r * cols + c
    flat = out.view(torch.uint8).view(-1)
    flat.zero_()
    flat[torch.from_numpy(at)] = scale


def shuffled_rows(n: int, tile: int = 32) -> torch.Tensor:
    """The row order p of trtllm-gen: stored row j holds source row p(j)."""
    j = torch.arange(n)
    q = tile // 8
    return (j // tile) * tile + q * (j % 8) + (j % tile) // 8


def unshuffle(stored: torch.Tensor) -> torch.Tensor:
    """[rows, ...] as the TRT-LLM epilogue sees it, from its shuffled storage."""
    out = torch.empty_like(stored)
    out[shuffled_rows(stored.shape[0])] = stored
    return out


def unpair(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(up_i, gate_i) pairs -> (gate, up)."""
    return rows[1::2], rows[0::2]


def sm90_weights(stored: torch.Tensor, layout: str) -> torch.Tensor:
    """Codes [n, k] from SM90 mixed-input storage u8 [n, k/2] (layouts A and B), element by element."""
    s = stored.contiguous().numpy().astype(np.int64)
    n, half = s.shape
    codes = np.zeros((n, 2 * half), dtype=np.int64)
    blocks, groups = n // 16, half // 32
    for b in range(blocks):
        for p in range(groups):
            tile = s[16 * b : 16 * b + 16, 32 * p : 32 * p + 32]
            (_tile_a if layout == "A" else _tile_b)(tile, codes, 16 * b, 64 * p)
    return torch.from_numpy(codes)


def _tile_a(tile: np.ndarray, codes: np.ndarray, row0: int, el0: int) -> None:
    for h, i, a, c, d, el, y in np.ndindex(2, 8, 2, 2, 2, 4, 2):
        byte = tile[8 * c + i, 16 * a + 4 * el + 2 * d + y]
        codes[row0 + 8 * h + i, el0 + 2 * (16 * a + 8 * c + 4 * d + el) + y] = (byte >> (4 * h)) & 15


def _tile_b(tile: np.ndarray, codes: np.ndarray, row0: int, el0: int) -> None:
    for m, i, el in np.ndindex(4, 8, 4):
        at = 16 * (m // 2) + 4 * el
        word = sum(int(tile[8 * (m % 2) + i, at + j]) << (8 * j) for j in range(4))
        for y in range(2):
            half = (word >> (16 * y)) & 0xFFFF
            sign = {0: half >> 15 & 1, 3: half >> 14 & 1, 1: half >> 12 & 1, 2: half >> 9 & 1}
            mag = {0: half >> 6 & 7, 1: half >> 3 & 7, 2: half & 7, 3: (half >> 13 & 1) | (half >> 10 & 3) << 1}
            for v, (h, d) in enumerate(((0, 0), (1, 0), (0, 1), (1, 1))):
                codes[row0 + 8 * h + i, el0 + 2 * (8 * m + 4 * d + el) + y] = sign[v] << 3 | mag[v]


def sm90_scales(flat: torch.Tensor, n: int, cols: int, layout: str) -> torch.Tensor:
    """u8 [n, k/32] from the SM90 scale fold."""
    r, c = np.ogrid[:n, :cols]
    kk, j = c // 4, c % 4
    if layout == "A":
        at = kk * 4 * n + 4 * r + j
    else:
        at = ((r // 64) * (cols // 4) + kk) * 256 + (r % 16) * 16 + 4 * ((r % 64) // 16) + j
    return flat.contiguous().view(torch.uint8).reshape(-1)[torch.from_numpy(at)]


def blocks(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """values [..., k] times scale [..., k / b]."""
    b = values.shape[-1] // scale.shape[-1]
    return values * scale.repeat_interleave(b, -1)


# --- quantisers --------------------------------------------------------------------------------------------------------------------


def to_e2m1(y: torch.Tensor) -> torch.Tensor:
    """f32 -> codes: round to nearest, ties to the even code, saturate; NaN -> 7; -0 -> 8."""
    y = y.to(torch.float64)
    a = y.abs()
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    low = torch.searchsorted(edges, a.contiguous(), right=False)  # ties go down ...
    high = torch.searchsorted(edges, a.contiguous(), right=True)  # ... or up
    code = torch.where(low % 2 == 0, low, high)
    code = torch.where(torch.isnan(y), 7, code)
    sign = torch.signbit(y) & ~torch.isnan(y)
    return torch.where(sign, code + 8, code)


def pack(codes: torch.Tensor) -> torch.Tensor:
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def nvfp4(x: torch.Tensor, gs: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [m, k], scale bytes [m, k/16]) by the default recipe; gs: f32 scalar or [m, 1]."""
    x = x.to(torch.float32)
    gs = torch.as_tensor(gs, dtype=torch.float32)
    b = x.unflatten(-1, (-1, 16))
    amax = b.abs().amax(-1)
    six = torch.tensor(1.0, dtype=torch.float32) / 6
    scale = (gs * (amax * six)).clamp(max=448.0).to(torch.float8_e4m3fn)
    d = scale.float()
    m = torch.where(d == 0, torch.zeros_like(d), 1 / (d * (1 / gs)))
    codes = to_e2m1((b * m.unsqueeze(-1)).flatten(-2))
    return codes, scale.view(torch.uint8)


def mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 bytes [m, k], ue8m0 bytes [m, k/32])."""
    b = x.to(torch.float32).unflatten(-1, (-1, 32))
    amax = b.abs().amax(-1)
    v = amax * (torch.tensor(1.0, dtype=torch.float32) / 448)
    bits = v.view(torch.int32)
    e = (((bits >> 23) & 255) + ((bits & 0x7FFFFF) != 0).int()).clamp(max=254)
    e = torch.where(v <= 2.0**-127, torch.zeros_like(e), e)
    m = torch.where(e == 0, torch.zeros_like(v), torch.pow(2.0, 127.0 - e))
    q = (b * m.unsqueeze(-1)).clamp(-448, 448).flatten(-2).to(torch.float8_e4m3fn)
    return q.view(torch.uint8), e.to(torch.uint8)


def held(v: torch.Tensor) -> torch.Tensor:
    """Rows between the second GEMM and the sum are bf16: what does not fit is infinite, as it is there, and 0 * inf is NaN."""
    return torch.where(v.abs() > torch.finfo(torch.bfloat16).max, v.sign() * float("inf"), v)


def counted(ids: torch.Tensor, first: int, experts: int, winner: str) -> torch.Tensor:
    """ids i64 [t, k]; -1 what the kernels pass over: an id outside [first, first + experts), and a repetition inside one row.

    trtllm-gen's small-batch routing keeps one lane for a token and expert (a comment there calls it a race: the last write stands), the
    cutlass prologue for large batches stops at the first one.
    """
    ids = ids.long()
    ids = torch.where((ids >= first) & (ids < first + experts), ids, -1)
    for row in ids:
        seen: dict[int, int] = {}
        for j in range(len(row)) if winner == "first" else reversed(range(len(row))):
            e = int(row[j])
            if e in seen:
                row[j] = -1
            seen[e] = j
    return ids
