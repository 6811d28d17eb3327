"""Mixture of experts: torch reference and plain Triton kernels against a float64 loop over tokens and slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer_cases import exact_moe, random_weight, relative, reorder

import fp4
from fp4.ref import activation as activations
from fp4.ref import moe as ref
from fp4.ref import triton_matmul as plain
from fp4.tensor import GATE_UP_ORDERS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ACTIVATIONS = (fp4.SwiGLU(), fp4.SwiGLU(alpha=1.0, beta=0.0, limit=None), fp4.SiLU(), fp4.SiTU(), fp4.SiTU(2.0, None), fp4.ReLU2())
FP32 = 5e-6


def _plain(x: torch.Tensor, w13: Any, w2: Any, ids: torch.Tensor, weights: torch.Tensor, **kw: Any) -> torch.Tensor:
    def there(v: Any) -> Any:
        if isinstance(v, tuple):
            return tuple(there(i) for i in v)
        return v.to(DEVICE) if isinstance(v, (torch.Tensor, fp4.QuantizedTensor)) else v

    moved = [there(v) for v in (x, w13, w2, ids, weights)]
    return plain.moe(*moved, **{k: there(v) for k, v in kw.items()}).cpu()


def _layer(seed: int, fmt: str, experts: int, hidden: int, inter: int, gated: bool = True) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(seed)
    rows = 2 * inter if gated else inter
    # a global scale of about 1 / (scale * sqrt(k)) keeps gates near 1, where every part of the activation matters
    w13 = random_weight(seed, fmt, experts, rows, hidden)
    w2 = random_weight(seed + 1, fmt, experts, hidden, inter)
    return w13, w2, torch.randn(experts, rows), torch.randn(experts, hidden)


def _input(hidden: int, tokens: int, w13: fp4.QuantizedTensor) -> torch.Tensor:
    """Tokens scaled so that gate and up are of order 4: on both sides of every clamp."""
    from layer_cases import exact_weight

    size = float(np.sqrt((exact_weight(w13) ** 2).sum(-1).mean()))
    return torch.randn(tokens, hidden) * (4.0 / size)


@given(
    seed=st.integers(0, 2**31),
    fmt=st.sampled_from(("nvfp4", "mxfp4")),
    act=st.sampled_from(ACTIVATIONS),
    order=st.sampled_from(GATE_UP_ORDERS),
    experts=st.integers(1, 5),
    tokens=st.integers(0, 9),
    topk=st.integers(1, 4),
    first=st.sampled_from((0, 3)),
    bias=st.booleans(),
)
def test_reference_and_kernel(
    seed: int, fmt: str, act: Any, order: str, experts: int, tokens: int, topk: int, first: int, bias: bool
) -> None:
    w13, w2, b13, b2 = _layer(seed, fmt, experts, 64, 32, act.gated)
    x = _input(64, tokens, w13)
    ids = torch.randint(-2, first + experts + 2, (tokens, topk))  # negative, foreign and repeated ids too
    weights = torch.rand(tokens, topk)
    biases = {"bias13": b13, "bias2": b2} if bias else {}
    exact = exact_moe(x, w13, w2, ids, weights, order, act, first=first, **biases)
    kw = dict(gate_up=order if act.gated else None, activation=act, local_experts=range(first, first + experts), **biases)
    assert relative(ref.moe(x, w13, w2, ids, weights, acc=torch.float64, out_dtype=torch.float64, **kw), exact) < 1e-13
    assert relative(ref.moe(x, w13, w2, ids, weights, **kw), exact) < FP32
    assert relative(_plain(x, w13, w2, ids, weights, **kw), exact) < FP32


@pytest.mark.parametrize("old", GATE_UP_ORDERS)
@pytest.mark.parametrize("new", GATE_UP_ORDERS)
def test_gate_up_orders(old: str, new: str) -> None:
    """The same layer in three orders: each gives the same numbers under its own name and far other ones under another."""
    w13, w2, b13, _ = _layer(11, "nvfp4", 3, 64, 32)
    x, ids, weights = _input(64, 6, w13), torch.randint(0, 3, (6, 2)), torch.rand(6, 2)
    exact = exact_moe(x, w13, w2, ids, weights, old, fp4.SwiGLU())
    moved = reorder(w13, old, new)
    for layer in (ref.moe, _plain):
        assert relative(layer(x, moved, w2, ids, weights, gate_up=new, activation=fp4.SwiGLU()), exact) < FP32
        if new != old:
            assert relative(layer(x, moved, w2, ids, weights, gate_up=old, activation=fp4.SwiGLU()), exact) > 0.1
    back = reorder(moved, new, old)
    assert torch.equal(back.codes, w13.codes)
    assert torch.equal(back.scale, w13.scale)
    assert b13.shape == (3, 64)


def test_pair_keeps_both_global_scales() -> None:
    """Gate and up with global scales 8 apart: the pair gives the exact product, one shared scale does not."""
    gate, up = random_weight(1, "nvfp4", 2, 32, 64), random_weight(2, "nvfp4", 2, 32, 64)
    gate, up = replace(gate, global_scale=torch.tensor([0.01, 0.02])), replace(up, global_scale=torch.tensor([0.08, 0.0025]))
    w2 = random_weight(3, "nvfp4", 2, 64, 32)
    x, ids, weights = torch.randn(5, 64) / 100, torch.tensor([[0, 1]] * 5), torch.rand(5, 2)
    bg, bu = torch.randn(2, 32), torch.randn(2, 32)
    from layer_cases import exact_activation, exact_weight

    exact = np.zeros((5, 64))
    for e in range(2):
        g = x.double().numpy() @ exact_weight(gate)[e].T + bg[e].double().numpy()
        u = x.double().numpy() @ exact_weight(up)[e].T + bu[e].double().numpy()
        exact += weights[:, e, None].double().numpy() * (exact_activation(fp4.SiLU(), g, u) @ exact_weight(w2)[e].T)
    stacked = replace(gate, codes=torch.cat((gate.codes, up.codes), 1), scale=torch.cat((gate.scale, up.scale), 1), shape=())
    for layer in (ref.moe, _plain):
        kw: dict[str, Any] = {"activation": fp4.SiLU()}
        assert relative(layer(x, (gate, up), w2, ids, weights, bias13=(bg, bu), **kw), exact) < FP32
        both = torch.cat((bu, bg), 1)
        assert relative(layer(x, (gate, up), w2, ids, weights, bias13=both, gate_up="up_gate", **kw), exact) < FP32
        fused = layer(x, stacked, w2, ids, weights, bias13=torch.cat((bg, bu), 1), gate_up="gate_up", **kw)
        assert relative(fused, exact) > 0.1
    with pytest.raises(fp4.FormatMismatch, match="order is not known"):
        ref.moe(x, (gate, up), w2, ids, weights, bias13=both, activation=fp4.SiLU())


def test_clamps_are_one_sided_for_the_gate() -> None:
    """Gate 10 and up -9 give 7 and -7 (limit 7); gate -10 is not clamped."""
    act = fp4.SwiGLU()
    got = act(torch.tensor([10.0, -10.0]).double(), torch.tensor([-9.0, 9.0]).double())
    sigmoid = lambda v: 1 / (1 + np.exp(-v))  # noqa: E731
    np.testing.assert_allclose(got.numpy(), [7 * sigmoid(1.702 * 7) * (-7 + 1), -10 * sigmoid(-17.02) * (7 + 1)], rtol=1e-14)
    assert fp4.SwiGLU(limit=None)(torch.tensor(100.0), torch.tensor(50.0)) == 5100.0


def test_zero_input_gives_the_activated_bias() -> None:
    w13, w2, _, _ = _layer(5, "mxfp4", 2, 64, 32)
    up = -torch.arange(1.0, 33.0)
    b13 = torch.stack((torch.arange(1.0, 33.0), up), -1).reshape(1, 64).expand(2, 64) / 8
    eye = replace(w2, codes=torch.zeros_like(w2.codes))
    eye.codes[:, torch.arange(32), torch.arange(32) // 2] = torch.where(torch.arange(32) % 2 == 0, 0x02, 0x20).to(torch.uint8)
    eye = replace(eye, scale=torch.full_like(w2.scale, 127))  # identity on the first 32 rows
    x, ids, weights = torch.zeros(1, 64), torch.tensor([[1]]), torch.ones(1, 1)
    want = fp4.SwiGLU()(b13[1, ::2], b13[1, 1::2])
    for layer in (ref.moe, _plain):
        got = layer(x, w13, eye, ids, weights, gate_up="interleaved", activation=fp4.SwiGLU(), bias13=b13)
        torch.testing.assert_close(got[0, :32], want, rtol=1e-6, atol=0)
        assert not got[0, 32:].any()


def test_foreign_ids_never_multiply() -> None:
    """An id outside the local range adds nothing, even with a weight of NaN beside it; so do two ranks add up to the whole."""
    w13, w2, b13, b2 = _layer(7, "nvfp4", 4, 64, 32)
    x, ids, weights = _input(64, 6, w13), torch.tensor([[0, 3], [1, 2], [2, 3], [-1, 0], [3, 3], [-1, -1]]), torch.rand(6, 2)
    kw: dict[str, Any] = {"gate_up": "gate_up", "activation": fp4.SiLU()}
    weights[ids < 0] = float("nan")
    for layer in (ref.moe, _plain):
        whole = layer(x, w13, w2, ids, weights, bias13=b13, bias2=b2, **kw)
        assert torch.isfinite(whole).all()
        assert not whole[5].any()
        parts = torch.zeros_like(whole)
        for r in (range(0, 2), range(2, 4)):
            cut = slice(r.start, r.stop)
            a, b = (replace(q, codes=q.codes[cut], scale=q.scale[cut], global_scale=q.global_scale[cut], shape=()) for q in (w13, w2))
            parts += layer(x, a, b, ids, weights, bias13=b13[cut], bias2=b2[cut], local_experts=r, **kw)
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_an_expert_that_overflows_stays_with_its_own_tokens(fmt: str) -> None:
    """0 * inf is NaN: an id that is not here must not be computed as a real expert (the outer ones, which clamping would name)."""
    w13, w2, b13, b2 = _layer(11, fmt, 4, 64, 32)
    w2 = replace(w2, scale=w2.scale.clone())
    w2.scale[[0, -1]] = 0x7E if fmt == "nvfp4" else 254
    if fmt == "nvfp4":
        w2.global_scale[[0, -1]] = 3e38
    x = _input(64, 8, w13)
    bad = torch.tensor([-1, 4, 2**40, -(2**40), 5, 99, -1, -2])
    ids, weights = torch.stack([bad, torch.full((8,), 2)], 1), torch.rand(8, 2)
    ids[4:] = ids[4:].flip(1)
    kw: dict[str, Any] = {"gate_up": "gate_up", "activation": fp4.SiLU(), "bias13": b13, "bias2": b2}
    alone = ref.moe(x, w13, w2, torch.full((8, 1), 2), weights[ids == 2].reshape(8, 1), **kw)
    for layer in (ref.moe, _plain):
        assert not layer(x, w13, w2, torch.full((8, 1), 3), torch.ones(8, 1), **kw).isfinite().all()
        torch.testing.assert_close(layer(x, w13, w2, ids, weights, **kw), alone, rtol=1e-3, atol=1e-3)
        moved = torch.where(ids == 2, 12, ids)  # experts 10 to 13: 2 and 3 of another rank among the bad ones
        moved[0, 0] = 3
        torch.testing.assert_close(layer(x, w13, w2, moved, weights, local_experts=range(10, 14), **kw), alone, rtol=1e-3, atol=1e-3)


def test_kernel_ignores_unused_experts() -> None:
    """Experts that no token chose may hold anything, NaN scales included."""
    w13, w2, _, _ = _layer(8, "mxfp4", 3, 64, 32)
    x, ids, weights = _input(64, 4, w13), torch.tensor([[0], [2], [0], [2]]), torch.ones(4, 1)
    kw: dict[str, Any] = {"gate_up": "gate_up", "activation": fp4.SiLU()}
    poison = [replace(q, scale=q.scale.clone()) for q in (w13, w2)]
    for q in poison:
        q.scale[1] = 0xFF
    for layer in (ref.moe, _plain):
        assert torch.equal(layer(x, *poison, ids, weights, **kw), layer(x, w13, w2, ids, weights, **kw))


def test_bf16_stays_near_the_reference() -> None:
    """bf16 in and out: one rounding of the input, the hidden values and the output, 2^-9 each."""
    w13, w2, _, _ = _layer(9, "nvfp4", 4, 128, 64)
    x, ids, weights = _input(128, 33, w13).bfloat16(), torch.randint(0, 4, (33, 2)), torch.rand(33, 2)
    exact = exact_moe(x, w13, w2, ids, weights, "interleaved", fp4.SwiGLU())
    got = _plain(x, w13, w2, ids, weights, gate_up="interleaved", activation=fp4.SwiGLU())
    assert got.dtype == torch.bfloat16
    assert relative(got, exact) < 2**-8


def test_bad_input_is_one_sentence() -> None:
    w13, w2, b13, b2 = _layer(10, "nvfp4", 2, 64, 32)
    x, ids, weights = torch.randn(3, 64), torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1)
    good: dict[str, Any] = {"gate_up": "gate_up", "activation": fp4.SiLU()}
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((x, w13, w2, ids, weights), {**good, "activation": "gelu"}, "activation: 'gelu' is not known; need"),
        ((x, w13, w2, ids, weights), {**good, "activation": None}, "activation: None is not known"),
        ((x, w13, w2, ids, weights), {**good, "gate_up": None}, "row order of w13 is not known; pass gate_up"),
        ((x, w13, w2, ids, weights), {**good, "gate_up": "halves"}, "gate_up is 'halves'"),
        ((x, replace(w13, gate_up="up_gate"), w2, ids, weights), good, "records its rows as 'up_gate' and gate_up says 'gate_up'"),
        ((x, w13, w2, ids, weights), {"gate_up": "gate_up", "activation": fp4.ReLU2()}, "relu2 has no gate"),
        (
            (x, w13, w2, ids, weights),
            {"activation": fp4.ReLU2()},
            "w2 is \\[2, 64, 32\\] and relu2 with w13 of 64 rows needs \\[2, 64, 64\\]",
        ),
        ((x, w13, w2, ids.float(), weights), good, "topk_ids is torch.float32"),
        ((x, w13, w2, ids, weights[:2]), good, "topk_weights is torch.float32 \\[2, 1\\]"),
        ((x[0], w13, w2, ids, weights), good, "x has shape \\[64\\]"),
        ((x, w13, w2, ids, weights), {**good, "local_experts": range(0, 3)}, "local_experts is range\\(0, 3\\)"),
        ((x, w13, w2, ids, weights), {**good, "bias13": b13[:1]}, "bias is torch.float32 \\[1, 64\\]; need floating point \\[2, 64\\]"),
        ((x, w13, w2, ids, weights), {**good, "bias2": b2.T}, "w2: bias is"),
        ((x, (w13, w13, w13), w2, ids, weights), good, "sequence of 3 tensors"),
        ((x, w13.codes, w2, ids, weights), good, "w13 is Tensor; need a QuantizedTensor"),
    ]
    for arguments, keywords, message in cases:
        for layer in (ref.moe, plain.moe):
            with pytest.raises(fp4.FormatMismatch, match=message):
                layer(*arguments, **keywords)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fp4.SwiGLU(limit=0.0), "limit is 0.0"),
        (lambda: fp4.SwiGLU(alpha=float("nan")), "alpha is nan"),
        (lambda: fp4.SiTU(beta=-1.0), "beta is -1.0"),
        (lambda: fp4.SiTU(linear_beta=0), "linear_beta is 0"),
    ],
)
def test_bad_parameters_are_refused(make: Any, message: str) -> None:
    with pytest.raises(fp4.FormatMismatch, match=message):
        make()


def test_names() -> None:
    assert [activations.get(n) for n in activations.names()] == [fp4.SiLU(), fp4.SwiGLU(), fp4.SiTU(), fp4.ReLU2()]
    assert hash(fp4.SwiGLU()) == hash(fp4.SwiGLU(1.702, 1.0, 7.0))


def test_rows_and_ranges_that_are_none() -> None:
    """An odd number of gate and up rows, and global ids below zero."""
    w13, w2, _, _ = _layer(12, "mxfp4", 3, 64, 32)
    odd = fp4.QuantizedTensor("mxfp4", torch.cat([w13.codes, w13.codes[:, :1]], 1), torch.cat([w13.scale, w13.scale[:, :1]], 1))
    x, ids, weights = _input(64, 4, w13), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    with pytest.raises(fp4.FormatMismatch, match="w13 has 65 rows; a gated activation needs an even number"):
        ref.moe(x, odd, w2, ids, weights, gate_up="gate_up", activation=fp4.SiLU())
    with pytest.raises(fp4.FormatMismatch, match=r"local_experts is range\(-2, 1\); need range\(first, first \+ 3\)"):
        ref.moe(x, w13, w2, ids, weights, gate_up="gate_up", activation=fp4.SiLU(), local_experts=range(-2, 1))
