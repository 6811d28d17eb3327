r"""Marlin's storage orders, scale bytes and global scales against the vendor's own compiled kernels (SGLang 0.5.23) on a real GPU.

``benchmarks/marlin.py`` builds them and puts weights in order with ``fp4.layouts`` and ``fp4.encode`` alone. Run on an H100 or H200::

    MARLIN_LIBRARY=marlin.so PYTHONPATH=. python -m pytest tests/gpu/test_marlin.py -m gpu -rA
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fp4
from fp4.ref.moe import moe as golden

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import marlin

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.vendor]
#: norm-relative. bf16 rounding after each product, the activation, the global scale and the routing weight: about 0.004 in all; a wrong
#: byte order gives about 1
BOUND = 0.01
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def lib() -> marlin.Library:
    try:
        return marlin.Library(marlin.find())
    except FileNotFoundError as e:
        pytest.skip(str(e))


def every_byte(fmt: str, experts: int, n: int, k: int, low: int, high: int) -> fp4.QuantizedTensor:
    """Random codes; block scales that count through low..high; a power of two as global scale, another for each expert."""
    g = torch.Generator(device="cuda").manual_seed(n + k)
    block = 16 if fmt == "nvfp4" else 32
    codes = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device="cuda", generator=g)
    at = torch.arange(experts * n * k // block, device="cuda")
    scale = (low + at * 5 % (high - low + 1)).to(torch.uint8).view(experts, n, k // block)
    second = 2.0 ** -torch.arange(3, 3 + experts, device="cuda", dtype=torch.float32) if fmt == "nvfp4" else None
    return fp4.QuantizedTensor(fmt, codes, scale, second)


def values(q: fp4.QuantizedTensor) -> torch.Tensor:
    return fp4.dequantize(q, torch.float32)


# (format, rule, first byte, last byte): the bytes that `encode` says the kernel reads exactly; e8m0 up to where 6 * 2^e is a bf16 number
SCALES = [
    ("mxfp4", "v1", 3, 251),
    ("nvfp4", "v1", 0x08, 0x7E),
    ("nvfp4", "v2", 0x01, 0x47),
    ("nvfp4", "v3", 0x01, 0x3F),
    ("nvfp4", "v3", 0x30, 0x7E),
]


@pytest.mark.parametrize(("fmt", "rule", "low", "high"), SCALES)
@pytest.mark.parametrize("k", [192, 256])  # Marlin takes other tiles when 128 divides k
def test_one_hot_input_reads_every_weight_back_exactly(lib: marlin.Library, fmt: str, rule: str, low: int, high: int, k: int) -> None:
    """x = identity: each output is one weight, exact in bf16. Both kernels, several experts, all row blocks."""
    n, experts = 256, 3
    q = every_byte(fmt, experts, n, k, low, high)
    want = values(q).to(BF16)
    assert torch.equal(want.float(), values(q))
    w = marlin.Weight(q, n, k, rule=rule)
    eye = torch.eye(k, dtype=BF16, device="cuda")
    for block in marlin.BLOCKS:
        for e in range(experts):
            route = marlin.Route(torch.full((k, 1), e, device="cuda"), experts, block)
            for atomic_add in (False, True):
                got = lib.moe(eye, w, route, top_k=1, atomic_add=atomic_add)
                assert torch.equal(got, want[e].T), (block, e, atomic_add)
    if fmt == "nvfp4":
        one = fp4.QuantizedTensor(fmt, q.codes[1:2], q.scale[1:2], q.global_scale[1:2])
        assert torch.equal(lib.dense(eye, marlin.Weight(one, n, k, rule=rule)), want[1].T)


def test_a_wrong_scale_order_is_seen(lib: marlin.Library) -> None:
    q = every_byte("mxfp4", 1, 256, 192, 100, 140)
    w = marlin.Weight(q, 256, 192, scale_layout="marlin_sf")
    got = lib.dense(torch.eye(192, dtype=BF16, device="cuda"), w).T
    assert 0.3 < float((got == values(q)[0].to(BF16)).float().mean()) < 0.9  # two of four columns keep their place


def test_rule_v1_loses_the_smallest_scales_as_encode_says(lib: marlin.Library) -> None:
    q = every_byte("nvfp4", 1, 256, 192, 0x01, 0x10)
    got = lib.dense(torch.eye(192, dtype=BF16, device="cuda"), marlin.Weight(q, 256, 192, rule="v1")).T.float()
    kept = fp4.encode.marlin_nvfp4("v1").exact(q.scale)[0].repeat_interleave(16, -1)
    assert torch.equal(got[kept], values(q)[0][kept])
    assert not got[~kept].any()


def layer(fmt: str, experts: int, hidden: int, inter: int) -> tuple[Any, ...]:
    g = torch.Generator(device="cuda").manual_seed(experts + hidden)
    block, low, high = {"mxfp4": (32, 118, 123), "nvfp4": (16, 0x20, 0x38)}[fmt]

    def weight(n: int, k: int) -> fp4.QuantizedTensor:
        codes = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device="cuda", generator=g)
        scale = torch.randint(low, high, (experts, n, k // block), dtype=torch.uint8, device="cuda", generator=g)
        second = torch.rand(experts, device="cuda", generator=g) * 0.05 + 0.01 if fmt == "nvfp4" else None
        return fp4.QuantizedTensor(fmt, codes, scale, second)

    def bias(n: int) -> torch.Tensor:
        return torch.randn(experts, n, device="cuda", generator=g).to(BF16).float()

    return weight(2 * inter, hidden), weight(hidden, inter), bias(2 * inter), bias(hidden)


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize(("hidden", "inter"), [(256, 192), (320, 224)])  # the second is padded to 384 and 256
@pytest.mark.parametrize("tokens", [1, 5, 96])
@pytest.mark.parametrize("block", [None, 64])
def test_a_whole_layer(lib: marlin.Library, fmt: str, hidden: int, inter: int, tokens: int, block: int | None) -> None:
    """Interleaved gate/up, uneven halves padded, both biases, expert 0 without a token, routing weights above and below one."""
    experts, top_k = 6, 2
    w13, w2, b13, b2 = layer(fmt, experts, hidden, inter)
    out, mid = -(-hidden // 128) * 128, -(-inter // 128) * 128
    m13 = marlin.Weight(w13, mid, hidden, bias=b13, pairs=True)
    m2 = marlin.Weight(w2, out, mid, bias=b2, weighted=True)
    g = torch.Generator(device="cuda").manual_seed(tokens)
    x = (torch.randn(tokens, hidden, device="cuda", generator=g) * 0.5).to(BF16)
    ids = 1 + torch.rand(tokens, experts - 1, device="cuda", generator=g).argsort(-1)[:, :top_k]
    p = torch.rand(tokens, top_k, device="cuda", generator=g) * 2
    act = fp4.SwiGLU()
    exact = {"acc": torch.float64, "out_dtype": torch.float64}
    want = golden(x, w13, w2, ids, p, gate_up="interleaved", activation=act, bias13=b13, bias2=b2, **exact)
    route = marlin.Route(ids, experts, block)
    gate, up = lib.moe(x, m13, route, top_k=top_k).double().chunk(2, -1)
    gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
    h = (gate * torch.sigmoid(act.alpha * gate) * (up + act.beta)).to(BF16)
    y = lib.moe(h, m2, route, top_k=1, weights=p).view(tokens, top_k, -1)
    got = lib.topk_sum(y, torch.empty(tokens, m2.n, dtype=BF16, device="cuda"))[:, :hidden].double()
    assert float((got - want).norm() / want.norm()) < BOUND
