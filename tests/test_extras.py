"""AWQ and SVD weights are more than codes and scales: what is beside the codes travels with them, and nobody drops it in silence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fp4
from fp4.ref.matmul import matmul as reference

SVD = Path(__file__).parent / "data" / "checkpoints" / "modelopt" / "nvfp4_svd"
NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def ck() -> fp4.Checkpoint:
    return fp4.open_checkpoint(SVD)


def every(ck: fp4.Checkpoint) -> list[str]:
    names = [n for n in ck if isinstance(ck[n], fp4.QuantizedTensor)]
    assert len(names) == 7
    return names


def test_extras_travel_with_the_tensor(ck: fp4.Checkpoint) -> None:
    for name in every(ck):
        q = ck[name]
        assert list(q.extras) == ["pre_quant_scale", "lora_a", "lora_b"]
        assert "extras=pre_quant_scale+lora_a+lora_b" in repr(q)
        assert list(q.to("cpu").extras) == list(q.extras)
        assert q.bare().extras == {}
        assert torch.equal(q.bare().codes, q.codes)
    plain = fp4.open_checkpoint(SVD.parent / "nvfp4")
    assert all(plain[n].extras == {} for n in every(plain))


@pytest.mark.parametrize("verb", ["prepare", "fuse", "stack", "shard", "matmul"])
def test_refused_with_the_way_out(ck: fp4.Checkpoint, verb: str) -> None:
    calls = {
        "prepare": lambda q: fp4.prepare(q),
        "fuse": lambda q: fp4.fuse.fuse([q]),
        "stack": lambda q: fp4.fuse.stack([q]),
        "shard": lambda q: fp4.fuse.shard(q, "n", 0, 2),
        "matmul": lambda q: reference(torch.ones(1, q.k), q),
    }
    for name in every(ck):
        with pytest.raises(fp4.FormatMismatch, match=rf"^{verb}: '{name}' has pre_quant_scale, lora_a, lora_b, .*fold=True") as caught:
            calls[verb](ck[name])
        assert ("extras_applied=True" if verb == "prepare" else "q.bare()") in str(caught.value)
        calls[verb](ck[name].bare())


def test_smoothing_alone_is_refused_too(ck: fp4.Checkpoint) -> None:
    q = ck[NAME]
    awq = replace(q, extras={"pre_quant_scale": q.extras["pre_quant_scale"]})
    with pytest.raises(fp4.FormatMismatch, match=r"multiply x by pre_quant_scale yourself \(q.extras\) and pass extras_applied=True$"):
        fp4.prepare(awq)


def test_experts_are_refused() -> None:
    w13, w2 = fp4.quantize(torch.randn(2, 64, 64), "nvfp4"), fp4.quantize(torch.randn(2, 64, 32), "nvfp4")
    gate = fp4.quantize(torch.randn(2, 32, 64), "nvfp4")
    pre = {"pre_quant_scale": torch.ones(64)}
    for bad in (
        (replace(w13, extras=pre), w2),
        (w13, replace(w2, extras={"pre_quant_scale": torch.ones(32)})),
        ((gate, replace(gate, extras=pre)), w2),
    ):
        order = None if isinstance(bad[0], tuple) else "gate_up"
        with pytest.raises(fp4.FormatMismatch, match="prepare_moe: the weight has pre_quant_scale"):
            fp4.prepare_moe(*bad, gate_up=order)
        fp4.prepare_moe(*bad, gate_up=order, extras_applied=True)


def test_applied_by_the_caller_is_the_folded_layer(ck: fp4.Checkpoint) -> None:
    for name in every(ck):
        q = ck[name]
        x = torch.randn(5, q.k)
        want = x @ ck.dequantize(name, fold=True).T
        w = fp4.prepare(q, extras_applied=True, act="keep", act_dtype=torch.float32)
        assert w.restore().extras == {}
        pre, a, b = (q.extras[part].float() for part in ("pre_quant_scale", "lora_a", "lora_b"))
        smooth = x * pre.reshape(-1)
        torch.testing.assert_close(fp4.matmul(smooth, w) + smooth @ a.T @ b.T, want, rtol=1e-4, atol=1e-5)
        alone = fp4.matmul(x, w)
        assert float((alone - want).norm() / want.norm()) > 0.1  # what dropping them in silence would cost


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ({"lora_c": torch.ones(1)}, "extras holds 'lora_c'; need one of pre_quant_scale, lora_a, lora_b"),
        ({"lora_a": torch.ones(1, 64)}, "extras holds one of lora_a and lora_b; need both"),
        ({"pre_quant_scale": 2.0}, "pre_quant_scale of extras is float; need a torch.Tensor"),
    ],
)
def test_extras_are_checked(extras: dict[str, object], message: str) -> None:
    q = fp4.quantize(torch.randn(2, 64), "nvfp4")
    with pytest.raises(fp4.FormatMismatch, match=message):
        replace(q, extras=extras)


def test_repr_says_the_scalar() -> None:
    q = fp4.quantize(torch.ones(2, 64), "nvfp4", global_scale=0.25)
    assert repr(q) == "QuantizedTensor(nvfp4, shape=[2, 64], global_scale=0.25, device=cpu)"
    each = fp4.quantize(torch.ones(3, 2, 64), "nvfp4", global_scale="per_expert")
    assert "global_scale=[3]" in repr(each)
