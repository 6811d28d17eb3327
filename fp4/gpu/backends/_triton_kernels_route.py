"""Routing for grouped products in expert order: one stable sort, no host synchronisation, any top-k, ids checked by construction."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Route", "combine", "route"]


class Route(NamedTuple):
    """``rows = tokens * slots`` positions sorted by local expert; positions of ids that are not here come last and are not computed."""

    hist: torch.Tensor  # i32 [local experts]
    token: torch.Tensor  # i32 [rows]: token of each sorted position
    weight: torch.Tensor  # f32 [rows]: routing weight of each sorted position
    position: torch.Tensor  # i64 [rows]: sorted position of each (token, slot)
    here: torch.Tensor  # bool [rows]: whether the expert of (token, slot) is here


def route(ids: torch.Tensor, weights: torch.Tensor, start: int, stop: int) -> Route:
    """ids int [t, slots], weights f32 [t, slots]; experts [start, stop) are here."""
    flat = ids.reshape(-1)
    here = (flat >= start) & (flat < stop)
    local = torch.where(here, flat - start, stop - start)
    order = torch.argsort(local, stable=True)
    hist = torch.zeros(stop - start + 1, dtype=torch.int32, device=ids.device)
    hist.scatter_add_(0, local.long(), torch.ones_like(local, dtype=torch.int32))
    position = torch.empty_like(order)
    position.scatter_(0, order, torch.arange(order.numel(), device=ids.device))
    token = (order // ids.shape[1]).to(torch.int32)
    return Route(hist[:-1], token, weights.reshape(-1)[order], position, here)


def combine(y: torch.Tensor, r: Route, slots: int, out_dtype: torch.dtype) -> torch.Tensor:
    """``y [rows, h]`` in expert order -> [t, h]: the slots of a token added in float32, slot by slot; slots that are not here add zero."""
    picked = torch.where(r.here[:, None], y[r.position], 0).view(-1, slots, y.shape[1])
    return picked.sum(1, dtype=torch.float32).to(out_dtype)
