r"""FlashInfer's Hopper route on a real GPU: bf16 x MXFP4 through ``cutlass_fused_moe(use_w4_group_scaling=True)``, and its byte orders.

Run on an H100 or H200 with FlashInfer importable (a build of its fused_moe_90 and fp4_quantization_90 modules is enough)::

    FLASHINFER_DISABLE_VERSION_CHECK=1 PYTHONPATH=.:<flashinfer>:<apache-tvm-ffi> \
        python -m pytest tests/gpu/test_flashinfer_sm90.py -m gpu -rA
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import fp4
from fp4.ref.moe import moe as golden

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.vendor]
fi = pytest.importorskip("flashinfer", reason="flashinfer-python (or a build of its SM90 modules) is not on the path")

#: norm-relative. The kernel rounds to bf16 after the first product, after the activation and after the second product: three
#: roundings of 2^-9 each give about 0.003; a wrong byte order gives about 1
BOUND = 0.01
GPT_OSS = fp4.SwiGLU(alpha=1.702, beta=1.0, limit=7.0)


def _find(name: str) -> Any:
    for where in ("flashinfer", "flashinfer.fused_moe", "flashinfer.quantization", "flashinfer.fp4_quantization"):
        try:
            found = getattr(importlib.import_module(where), name, None)
        except ImportError:
            continue
        if found is not None:
            return found
    pytest.fail(f"flashinfer has no {name}")


def _quantized(*shape: int, seed: int) -> fp4.QuantizedTensor:
    g = torch.Generator(device="cuda").manual_seed(seed)
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device="cuda", generator=g)
    scale = torch.randint(118, 123, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8, device="cuda", generator=g)
    return fp4.QuantizedTensor(format="mxfp4", codes=codes, scale=scale)


class Layer:
    def __init__(self, experts: int, hidden: int, inter: int, order: str, activation: Any, bias: bool, seed: int = 0) -> None:
        self.experts, self.hidden, self.order, self.activation = experts, hidden, order, activation
        self.w13, self.w2 = _quantized(experts, 2 * inter, hidden, seed=seed), _quantized(experts, hidden, inter, seed=seed + 1)
        g = torch.Generator(device="cuda").manual_seed(seed + 2)
        self.bias13 = torch.randn(experts, 2 * inter, device="cuda", generator=g).bfloat16().float() if bias else None
        self.bias2 = torch.randn(experts, hidden, device="cuda", generator=g).bfloat16().float() if bias else None

    def batch(self, tokens: int, topk: int, seed: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        g = torch.Generator(device="cuda").manual_seed(seed + tokens)
        x = (torch.randn(tokens, self.hidden, device="cuda", generator=g) * 0.3).bfloat16()
        ids = torch.rand(tokens, self.experts - 1, device="cuda", generator=g).argsort(-1)[:, :topk]  # the last expert stays empty
        return x, ids, torch.rand(tokens, topk, device="cuda", generator=g) + 0.1

    def prepare(self, order: str | None = None, **kw: Any) -> fp4.PreparedMoE:
        return fp4.prepare_moe(
            self.w13, self.w2, gate_up=order or self.order, bias13=self.bias13, bias2=self.bias2, activation=self.activation,
            backend="flashinfer_cutlass", **kw,
        )  # fmt: skip

    def golden(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, local: tuple[int, int] | None = None) -> torch.Tensor:
        """float32; with ``local`` the part that experts [start, stop) contribute."""
        if local is not None:
            weights = weights * ((ids >= local[0]) & (ids < local[1]))
        return golden(
            x.float(), self.w13, self.w2, ids, weights, gate_up=self.order, activation=self.activation, bias13=self.bias13,
            bias2=self.bias2, acc=torch.float32, out_dtype=torch.float32,
        )  # fmt: skip


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want| in the 2-norm; NaN counts as infinite."""
    got = got.float()
    return float("inf") if bool(torch.isnan(got).any()) else float((got - want).norm() / want.norm())


@pytest.mark.parametrize("shape", [(128, 4), (256, 16), (200, 5), (33, 7), (3, 256, 8), (2, 160, 6)])
def test_block_scale_interleave_is_sf_128x4(shape: tuple[int, ...]) -> None:
    scale = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    theirs = _find("block_scale_interleave")(scale)
    experts = scale if scale.ndim == 3 else scale.unsqueeze(0)
    ours = torch.cat([fp4.layouts["sf_128x4"].apply(e).reshape(-1) for e in experts])
    assert torch.equal(theirs.reshape(-1), ours)


@pytest.mark.parametrize("shape", [(1, 16, 32), (2, 64, 64), (3, 256, 160), (1, 5760, 1472)])
def test_weight_interleave_is_our_layout(shape: tuple[int, int, int]) -> None:
    from fp4.gpu.backends._flashinfer_cutlass import sm90_layout

    name = {"A": "sm90_mixed_fp4_a", "B": "sm90_mixed_fp4"}[sm90_layout()]
    weight = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    theirs = _find("interleave_moe_weights_for_sm90_mixed_gemm")(weight, "fp4")
    ours = torch.stack([fp4.layouts[name].apply(e).reshape(shape[1:]) for e in weight])
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("tokens", [1, 7, 64, 257])
@pytest.mark.parametrize(
    ("order", "activation", "bias"), [("interleaved", GPT_OSS, True), ("gate_up", fp4.SiLU(), False), ("up_gate", GPT_OSS, False)]
)
def test_moe_equals_the_reference(order: str, activation: Any, bias: bool, tokens: int) -> None:
    """Hidden 320 and intermediate 192 need padding to 384 and 256."""
    layer = Layer(8, 320, 192, order, activation, bias)
    x, ids, weights = layer.batch(tokens, 3)
    y = fp4.moe(x, layer.prepare(), ids, weights)
    d = distance(y, layer.golden(x, ids, weights))
    print(f"tokens {tokens} {order} {activation.name}: |y - golden| / |golden| = {d:.5f}")
    assert d < BOUND


def test_the_bound_sees_swapped_halves() -> None:
    layer = Layer(8, 320, 192, "gate_up", fp4.SiLU(), False)
    x, ids, weights = layer.batch(64, 3)
    assert distance(fp4.moe(x, layer.prepare("up_gate"), ids, weights), layer.golden(x, ids, weights)) > 0.3


def test_gpt_oss_sizes() -> None:
    layer = Layer(32, 2880, 2880, "interleaved", GPT_OSS, True)
    x, ids, weights = layer.batch(64, 4)
    prepared = layer.prepare()
    d = distance(fp4.moe(x, prepared, ids, weights), layer.golden(x, ids, weights))
    print(f"gpt-oss-20b layer: |y - golden| / |golden| = {d:.5f}")
    assert d < BOUND
    for got, given in zip(prepared.restore(), (layer.w13, layer.w2), strict=True):
        assert torch.equal(got.codes, given.codes)
        assert torch.equal(got.scale, given.scale)


@pytest.mark.parametrize("tokens", [5, 257, 4096])
@pytest.mark.parametrize("local", [None, (2, 4)])
def test_ids_that_are_not_here_and_experts_named_twice(tokens: int, local: tuple[int, int] | None) -> None:
    """-1 reaches the kernel for every id that is not here; the outer experts overflow, and 0 * inf would be NaN. An expert named twice by
    one token counts twice. Three sizes: FlashInfer sorts small and large batches by different kernels."""
    layer = Layer(8, 320, 192, "interleaved", GPT_OSS, True)
    layer.w2.scale[[0, -1]] = 254
    x, ids, weights = layer.batch(tokens, 4)
    ids = 2 + ids % 2  # experts 2 and 3, most of them twice
    ids[:, 1] = torch.tensor([-1, 8, 2**40, -(2**40), 99], device="cuda")[torch.arange(tokens, device="cuda") % 5]
    if local:
        ids[::3, 2] = 0  # another rank's
    y = fp4.moe(x, layer.prepare(local_experts=local), ids, weights)
    here = torch.where(ids == 0, -1, ids)
    assert distance(y, layer.golden(x, here, weights)) < BOUND


def test_local_experts() -> None:
    layer = Layer(8, 256, 128, "interleaved", GPT_OSS, True)
    x, ids, weights = layer.batch(33, 3)
    whole = layer.golden(x, ids, weights)
    parts = []
    for start in (0, 4):
        y = fp4.moe(x, layer.prepare(local_experts=(start, start + 4)), ids, weights)
        assert distance(y, layer.golden(x, ids, weights, (start, start + 4))) < BOUND
        parts.append(y.float())
    assert distance(sum(parts), whole) < BOUND


def test_repeats_are_bit_equal() -> None:
    """The separate finalize sums in a fixed order (vllm#54945), and layout B has no race (flashinfer#5438)."""
    layer = Layer(8, 256, 256, "interleaved", GPT_OSS, True)
    prepared = layer.prepare()
    x, ids, weights = layer.batch(200, 4)
    first = fp4.moe(x, prepared, ids, weights)
    for _ in range(100):
        assert torch.equal(fp4.moe(x, prepared, ids, weights), first)


def test_zero_tokens() -> None:
    layer = Layer(4, 256, 128, "interleaved", GPT_OSS, True)
    x, ids, weights = layer.batch(0, 2)
    assert tuple(fp4.moe(x, layer.prepare(), ids, weights).shape) == (0, 256)


def test_graph_capture() -> None:
    layer = Layer(8, 256, 256, "interleaved", GPT_OSS, True)
    prepared = layer.prepare()
    x, ids, weights = layer.batch(32, 4)
    for _ in range(3):
        fp4.moe(x, prepared, ids, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fp4.moe(x, prepared, ids, weights)
    other, _, _ = layer.batch(32, 4, seed=77)
    x.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, fp4.moe(other, prepared, ids, weights))
