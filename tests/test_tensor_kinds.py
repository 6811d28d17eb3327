"""Tensors of other kinds: distributed, masked, batched by vmap, without values; and gradients that nobody would get."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

import fp4
from fp4 import fuse

X, W = torch.randn(4, 64), torch.randn(96, 64)
Q = fp4.quantize(W, "nvfp4")
P = fp4.prepare(Q, "reference")
W13, W2 = fp4.quantize(torch.randn(4, 64, 64), "mxfp4"), fp4.quantize(torch.randn(4, 64, 32), "mxfp4")
EX = fp4.prepare_moe(W13, W2, gate_up="gate_up", activation=fp4.SiLU(), backend="reference")
IDS, WEIGHTS = torch.tensor([[0, 3], [2, -1], [1, 1], [0, 2]]), torch.rand(4, 2)


@pytest.fixture
def spread(tmp_path: Path) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """A tensor -> the DTensor of it, rows on the ranks of a group of one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield lambda t: distribute_tensor(t, mesh, [Shard(0)] if t.ndim else None)
    dist.destroy_process_group()


CALLS: dict[str, Callable[[Any], Any]] = {
    "matmul": lambda d: fp4.matmul(d(X), P),
    "bias": lambda d: fp4.matmul(X, P, d(torch.zeros(96))),
    "moe": lambda d: fp4.moe(d(X), EX, IDS, WEIGHTS),
    "ids": lambda d: fp4.moe(X, EX, d(IDS), WEIGHTS),
    "quantize": lambda d: fp4.quantize(d(W)),
    "fake_quantize": lambda d: fp4.fake_quantize(d(W)),
    "global_scale": lambda d: fp4.quantize(W, global_scale=d(torch.tensor(0.01))),
    "codes": lambda d: fp4.QuantizedTensor("nvfp4", d(Q.codes), Q.scale, Q.global_scale),
    "second level": lambda d: fp4.QuantizedTensor("nvfp4", Q.codes, Q.scale, d(Q.global_scale)),
    "to_layout": lambda d: fp4.to_layout(d(Q.scale), "sf_128x4"),
}


@pytest.mark.parametrize("case", list(CALLS))
def test_a_distributed_tensor_is_refused_with_the_way_out(spread: Callable[[torch.Tensor], torch.Tensor], case: str) -> None:
    """prepare took a sharded weight for the whole one; a call then ended in an error of torch's sharding propagation."""
    with pytest.raises(fp4.Fp4Error, match=r"is a DTensor, .*pass \.to_local\(\), this rank's part"):
        CALLS[case](spread)


def test_a_local_part_is_a_plain_tensor(spread: Callable[[torch.Tensor], Any]) -> None:
    assert torch.equal(fp4.quantize(spread(W).to_local()).codes, Q.codes)


@pytest.mark.filterwarnings("ignore")
def test_a_masked_tensor_is_refused() -> None:
    from torch.masked import masked_tensor

    with pytest.raises(fp4.FormatMismatch, match=r"x is a MaskedTensor, .*\.to_tensor\(0\)"):
        fp4.quantize(masked_tensor(X, X > 0))


BATCHED: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "quantize": (lambda x: fp4.quantize(x).codes, (torch.randn(3, 4, 64),)),
    "scales": (lambda x: fp4.quantize(x, "mxfp4", scale_layout="sf_128x4").scale.data, (torch.randn(3, 4, 64),)),
    "global_scale": (lambda g: fp4.quantize(X, global_scale=g).scale, (torch.tensor([0.1, 0.2, 0.3]),)),
    "dequantize": (
        lambda c, s: fp4.dequantize(fp4.QuantizedTensor("mxfp4", c, s)),
        (torch.randint(0, 256, (3, 4, 32), dtype=torch.uint8), torch.randint(100, 140, (3, 4, 2), dtype=torch.uint8)),
    ),
    "fake_quantize": (fp4.fake_quantize, (torch.randn(3, 4, 64),)),
    "matmul": (lambda x: fp4.matmul(x, P), (torch.randn(3, 4, 64),)),
    "bias": (lambda b: fp4.matmul(X, P, b), (torch.randn(3, 96),)),
    "moe": (lambda x: fp4.moe(x, EX, IDS, WEIGHTS), (torch.randn(3, 4, 64),)),
    "routing": (lambda i, w: fp4.moe(X, EX, i, w), (torch.randint(-1, 4, (3, 4, 2)), torch.rand(3, 4, 2))),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("case", list(BATCHED))
def test_vmap_is_the_loop(case: str) -> None:
    """Outside the dispatcher vmap meets branches on values, dynamic shapes and out= arguments."""
    verb, given = BATCHED[case]
    want = torch.stack([verb(*one) for one in zip(*given, strict=True)])
    assert torch.equal(torch.vmap(verb)(*given), want)


def test_tensors_without_values_are_refused_by_name() -> None:
    """Each was an error of torch: "Tensor.item() cannot be called on meta tensors"."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    meta = fp4.quantize(torch.randn(4, 64, device="meta"))
    with pytest.raises(fp4.FormatMismatch, match=r"fuse: global_scale has no values here \(meta device\)"):
        fuse.fuse([meta, meta])
    with pytest.raises(fp4.FormatMismatch, match=r"QuantizedTensor\.to: the tensor has no values here"):
        meta.to("cpu")
    with FakeTensorMode(), pytest.raises(fp4.FormatMismatch, match=r"fuse: global_scale has no values here \(fake tensor\)"):
        fuse.fuse([fp4.quantize(torch.randn(4, 64)) for _ in range(2)])
    part = fp4.quantize(torch.randn(2, 32, 64, device="meta"))
    with pytest.raises(fp4.FormatMismatch, match=r"prepare_moe: .* holds no bytes; load the weight first"):
        fp4.prepare_moe((part, part), fp4.quantize(torch.randn(2, 64, 32, device="meta")))
    # without a second-level scale there is nothing to read
    assert fuse.fuse([fp4.quantize(torch.randn(4, 64, device="meta"), "mxfp4")] * 2).shape == (8, 64)


@pytest.mark.parametrize("name", ["global_scale", "encode_scale"])
def test_a_scale_that_learns_nothing_is_refused(name: str) -> None:
    """The result asked for a gradient, and the scale's ``.grad`` stayed None: a step size that is never trained."""
    scale = torch.tensor(0.01, requires_grad=True)
    with pytest.raises(fp4.Unsupported, match=rf"fake_quantize: {name} asks for a gradient, and x alone gets one; pass {name}\.detach"):
        fp4.fake_quantize(X, **{name: scale})
    x = X.clone().requires_grad_()
    fp4.fake_quantize(x, **{name: scale.detach()}).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    with torch.no_grad():
        assert fp4.fake_quantize(X, **{name: scale}).shape == X.shape
    assert not fp4.quantize(X, **{name: scale}).global_scale.requires_grad
    with forward_ad.dual_level(), pytest.raises(fp4.Unsupported, match="forward-mode AD"):
        fp4.fake_quantize(X, **{name: forward_ad.make_dual(scale.detach(), torch.tensor(1.0))})


def test_warmup_without_experts() -> None:
    """A layer of no experts: an id modulo zero."""
    none = fp4.prepare_moe(fp4.quantize(torch.zeros(0, 64, 64), "mxfp4"), fp4.quantize(torch.zeros(0, 64, 32), "mxfp4"), gate_up="gate_up")
    fp4.warmup(none)
    assert torch.equal(fp4.moe(X, none, IDS, WEIGHTS), torch.zeros(4, 64))
