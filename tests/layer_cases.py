"""Random layers for the tests of products: every expert, row and block has its own magnitude, and the exact values come from ml_dtypes."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import torch

import fp4
from fp4 import formats
from fp4.tensor import QuantizedTensor

SCALE_BYTES = {"e4m3": (1, 0x7F), "ue8m0": (118, 137), "ue5m3": (60, 160)}


def random_weight(seed: int, fmt: str, *shape: int, global_scale: bool = True) -> QuantizedTensor:
    """A QuantizedTensor of random codes and scales, subnormal scale bytes included."""
    f = formats.get(fmt)
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8)
    scale = rng.integers(*SCALE_BYTES[f.scale.name], (*shape[:-1], shape[-1] // f.block), dtype=np.uint8)
    second = None
    if f.tensor_scale and global_scale:
        second = torch.from_numpy(rng.uniform(0.01, 2.0, shape[:1] if len(shape) == 3 else ()).astype(np.float32).reshape(shape[:-2]))
    return QuantizedTensor(format=f, codes=torch.from_numpy(codes), scale=torch.from_numpy(scale), global_scale=second)


def exact_weight(q: QuantizedTensor) -> np.ndarray:
    """float64 [..., n, k] by ml_dtypes' own tables (AMDFP4's e5m3 by its formula)."""
    codes = q.codes.numpy()
    nibbles = np.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:-1], -1)
    elem = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    raw = q.scale.numpy()
    if q.format.scale.name == "e4m3":
        scale = raw.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    elif q.format.scale.name == "ue8m0":
        scale = raw.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    else:
        e, m = raw.astype(int) >> 3, raw.astype(int) & 7
        scale = np.where(e > 0, np.ldexp(1 + m / 8, e - 15), np.ldexp(m / 8, -14))
    value = elem * np.repeat(scale, q.format.block, axis=-1)
    if q.global_scale is not None:
        g = q.global_scale.numpy().astype(np.float64)
        value = value * g.reshape(-1, *[1] * (value.ndim - 1)) if g.ndim else value * g
    return value


def relative(y: torch.Tensor, exact: np.ndarray) -> float:
    """Relative Frobenius error against float64 values."""
    got, norm = y.double().numpy(), np.linalg.norm(exact)
    return float(np.linalg.norm(got - exact) / norm) if norm else float(np.abs(got).max(initial=0.0))


def exact_activation(act: fp4.SwiGLU | fp4.SiLU | fp4.SiTU | fp4.ReLU2, gate: np.ndarray, up: np.ndarray | None) -> np.ndarray:
    """The published formulas in float64."""

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    if isinstance(act, fp4.ReLU2):
        return np.maximum(gate, 0) ** 2
    assert up is not None
    if isinstance(act, fp4.SwiGLU):
        limit = np.inf if act.limit is None else act.limit
        g, u = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return g * sigmoid(act.alpha * g) * (u + act.beta)
    if isinstance(act, fp4.SiTU):
        u = up if act.linear_beta is None else act.linear_beta * np.tanh(up / act.linear_beta)
        return act.beta * np.tanh(gate / act.beta) * sigmoid(gate) * u
    return gate * sigmoid(gate) * up


def split(rows: np.ndarray, order: str) -> tuple[np.ndarray, np.ndarray]:
    half = rows.shape[-1] // 2
    if order == "interleaved":
        return rows[..., ::2], rows[..., 1::2]
    first, second = rows[..., :half], rows[..., half:]
    return (first, second) if order == "gate_up" else (second, first)


def exact_moe(x, w13, w2, ids, weights, order, act, bias13=None, bias2=None, first=0) -> np.ndarray:  # type: ignore[no-untyped-def]
    """Token by token, slot by slot, in float64: the definition."""
    a, b = exact_weight(w13), exact_weight(w2)
    y = np.zeros((x.shape[0], b.shape[1]))
    for t in range(x.shape[0]):
        for j in range(ids.shape[1]):
            e = int(ids[t, j]) - first
            if not 0 <= e < a.shape[0]:
                continue
            h = a[e] @ x[t].double().numpy()
            h = h if bias13 is None else h + bias13[e].double().numpy()
            h = exact_activation(act, *(split(h, order) if act.gated else (h, None)))
            out = b[e] @ h
            out = out if bias2 is None else out + bias2[e].double().numpy()
            y[t] += float(weights[t, j]) * out
    return y


def reorder(q: QuantizedTensor, old: str, new: str) -> QuantizedTensor:
    """Rows of a stacked gate/up matrix from one order to another."""
    rows = torch.arange(q.codes.shape[1]).numpy()
    gate, up = split(rows, old)
    target = {"gate_up": np.concatenate((gate, up)), "up_gate": np.concatenate((up, gate)), "interleaved": np.stack((gate, up), 1).ravel()}
    index = torch.from_numpy(target[new])
    return replace(q, codes=q.codes[:, index], scale=q.scale[:, index], gate_up=None)
