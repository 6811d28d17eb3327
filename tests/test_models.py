"""Whole models through fp4: logits and MoE outputs of the libraries that made the sample checkpoints."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fp4
from fp4.ref import moe as ref
from fp4.ref import triton_matmul as plain
from fp4.tensor import QuantizedTensor

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from tiny_model import TinyModel

SHIPPED = Path(__file__).parent / "data" / "checkpoints"
pytestmark = pytest.mark.filterwarnings("ignore::fp4.checkpoint.base.CheckpointWarning")
#: both sides are float32; the sums run in another order
FP32 = 2e-6


def _relative(y: torch.Tensor, want: torch.Tensor) -> float:
    return float((y - want).norm() / want.norm())


def _samples(root: Path, name: str) -> list[Path]:
    return sorted(p.parent for p in root.rglob(name))


def _check_logits(folder: Path) -> None:
    oracle = load_file(folder / "expected_logits.safetensors")
    model = TinyModel(folder)
    logits = model(oracle["input_ids"][0])
    want, original = oracle["logits_dequantized_fp32"][0], oracle["logits_original_fp32"][0]
    assert _relative(logits, want) < FP32, folder
    # the oracle can tell: the unquantised model is far away
    assert _relative(original, want) > 0.05, folder
    # every quantised tensor went through fp4, except those that need folding
    held = {n for n in model.ck.names() if isinstance(model.ck[n], QuantizedTensor)}
    folded = {n for n in held if {"pre_quant_scale", "lora_a"} & set(model.ck.record(n).parts)}
    assert model.quantized == held - folded, folder


def _experts(folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """The sample's MoE layer as arguments (w13, w2, keywords), and its oracle."""
    model = TinyModel(folder)
    layer = next(n.split(".experts.")[0] for n in model.ck.names() if ".experts." in n)
    ready = model.experts(f"{layer}.experts")
    w13, w2 = ready.restore()
    bias13, bias2 = ready.restore_bias()
    order = "gate_up" if isinstance(w13, tuple) else w13.gate_up or ready.problem.gate_up
    kw = {"gate_up": order, "activation": ready.problem.activation, "bias13": bias13, "bias2": bias2}
    return (w13, w2, kw, ready), load_file(folder / "moe_oracle.safetensors")


def _check_experts(folder: Path) -> None:
    (w13, w2, kw, ready), oracle = _experts(folder)
    routed = (oracle["topk_ids"], oracle["topk_weights"])
    want = oracle["experts_out"]
    x = oracle["mlp_in"].reshape(-1, want.shape[-1])
    assert _relative(fp4.moe(x, ready, *routed), want) < FP32, folder
    assert _relative(ref.moe(x, w13, w2, *routed, **kw, acc=torch.float64), want) < FP32, folder
    if not torch.cuda.is_available():
        assert _relative(plain.moe(x, w13, w2, *routed, **kw), want) < FP32, folder
    # gate and up exchanged: a legal number, far away
    if isinstance(w13, tuple):
        wrong = ref.moe(x, (w13[1], w13[0]), w2, *routed, **kw)
    else:
        other = {"interleaved": "gate_up", "gate_up": "up_gate", "up_gate": "gate_up"}[kw["gate_up"]]
        wrong = ref.moe(x, replace(w13, gate_up=None), w2, *routed, **{**kw, "gate_up": other})
    assert _relative(wrong, want) > 0.1, folder


@pytest.mark.parametrize("folder", _samples(SHIPPED, "expected_logits.safetensors"), ids=lambda p: str(p.relative_to(SHIPPED)))
def test_logits(folder: Path) -> None:
    _check_logits(folder)


@pytest.mark.parametrize("folder", _samples(SHIPPED, "moe_oracle.safetensors"), ids=lambda p: str(p.relative_to(SHIPPED)))
def test_experts(folder: Path) -> None:
    _check_experts(folder)


def test_samples_are_shipped() -> None:
    assert len(_samples(SHIPPED, "expected_logits.safetensors")) >= 3
    assert len(_samples(SHIPPED, "moe_oracle.safetensors")) >= 2


def test_all_vendor_files(oracles: Path) -> None:
    """Llama, Qwen3-MoE, GPT-OSS and DeepSeek-V3 models by ModelOpt, llm-compressor, Quark, torchao and transformers."""
    logits = _samples(oracles / "checkpoints", "expected_logits.safetensors")
    assert len(logits) >= 28
    for folder in logits:
        _check_logits(folder)
    layers = _samples(oracles / "checkpoints", "moe_oracle.safetensors")
    assert len(layers) >= 5
    for folder in layers:
        _check_experts(folder)
