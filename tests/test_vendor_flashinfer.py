"""FlashInfer 0.7.4's own CPU references as live oracles for our quantisers (preset ``flashinfer``) and scale layouts.

``flashinfer.batch_invariant`` describes the exact class of its kernels in torch and in fractions; it needs no GPU. Releases without it
skip, the bytes that it made are tested in test_presets.py anyway.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fp4

os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", tempfile.mkdtemp(prefix="fp4-flashinfer-"))
pytestmark = pytest.mark.vendor
pytest.importorskip("flashinfer", reason="flashinfer-python is not installed (pip install --no-deps flashinfer-python apache-tvm-ffi)")

#: every kind of bf16: ties of e2m1 and e4m3 appear by themselves because bf16 has 8 significant bits
SPECIAL = [0.0, -0.0, 1e-40, -3e-39, 2.0**-126, 2.0**-133, 3.3e38, -3.3e38, float("inf"), float("-inf"), float("nan"), 6.0, 448.0]


def reference(module: str) -> Any:
    try:
        return importlib.import_module(f"flashinfer.batch_invariant.quantization.{module}")
    except ImportError:
        pytest.skip("this flashinfer has no batch_invariant CPU reference (0.7.4 and newer have)")


def tensor(m: int, k: int, seed: int, spread: float, special: int) -> torch.Tensor:
    """bf16 [m, k]: normal values over a range of exponents, some of them replaced by SPECIAL."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=g) * torch.exp2(spread * torch.randn(m, k // 16, generator=g)).repeat_interleave(16, -1)
    at = torch.randint(0, m * k, (special,), generator=g)
    x.view(-1)[at] = torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL), (special,), generator=g)]
    return x.to(torch.bfloat16)


SHAPES = st.tuples(st.sampled_from([1, 5, 33, 130]), st.sampled_from([64, 96, 320]))


@given(shape=SHAPES, seed=st.integers(0, 2**16), spread=st.sampled_from([0.0, 3.0, 12.0]), gs=st.floats(1e-6, 1e6))
def test_nvfp4_bytes(shape: tuple[int, int], seed: int, spread: float, gs: float) -> None:
    theirs, (m, k) = reference("nvfp4_reference"), shape
    x, scale = tensor(m, k, seed, spread, m), torch.tensor(gs, dtype=torch.float32)
    packed, sf, _ = theirs.quantize_reference(x, scale)
    ours = fp4.quantize(x, "nvfp4", "flashinfer", encode_scale=scale)
    fp4.testing.assert_same_bytes(ours.codes, packed)
    fp4.testing.assert_same_bytes(ours.scale, theirs.unswizzle_sf_128x4(sf, m, k))
    fp4.testing.assert_same_bytes(fp4.layouts["sf_128x4"].apply(ours.scale).reshape(-1), sf.reshape(-1))


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
@given(
    shape=SHAPES, seed=st.integers(0, 2**16), spread=st.sampled_from([0.0, 3.0, 12.0]), swizzled=st.sampled_from(["128x4", "8x4", False])
)
def test_mx_bytes(name: str, shape: tuple[int, int], seed: int, spread: float, swizzled: str | bool) -> None:
    theirs, (m, k) = reference("mx_reference"), shape
    x = tensor(m, k, seed, spread, m)
    packed, sf, rows = theirs.quantize_mx_reference(x, getattr(theirs.S, name.upper()), swizzled=swizzled)
    ours = fp4.quantize(x, name, "flashinfer")
    fp4.testing.assert_same_bytes(ours.codes, packed.view(torch.uint8).reshape(ours.codes.shape))
    fp4.testing.assert_same_bytes(ours.scale, rows)
    layout = {"128x4": "sf_128x4", "8x4": "sf_8x4", False: "plain"}[swizzled]
    fp4.testing.assert_same_bytes(fp4.layouts[layout].apply(ours.scale).reshape(-1), sf.reshape(-1))


def test_nvfp4_against_fractions() -> None:
    """A few rows through FlashInfer's exact evaluator: no float arithmetic on its side at all."""
    theirs, x = reference("nvfp4_reference"), tensor(6, 64, 5, 3.0, 0)
    scale = torch.tensor(317.3)
    packed, rows, _ = theirs.exact_rows(x, scale, range(6))
    ours = fp4.quantize(x, "nvfp4", "flashinfer", encode_scale=scale)
    fp4.testing.assert_same_bytes(ours.codes, packed)
    fp4.testing.assert_same_bytes(ours.scale, rows)


def test_nvfp4_dequantised_values() -> None:
    """value = code * scale / gs there, code * scale * global_scale here: equal up to the rounding of 1 / gs."""
    theirs, x = reference("nvfp4_reference"), tensor(33, 96, 7, 1.0, 0)
    scale = torch.tensor(420.0)
    packed, sf, _ = theirs.quantize_reference(x, scale)
    want = theirs.dequantize(packed, sf, scale, 33, 96)
    got = fp4.dequantize(fp4.quantize(x, "nvfp4", "flashinfer", encode_scale=scale), dtype=torch.float32).double()
    assert (got - want).abs().max() <= 2.0**-22 * want.abs().max()


@pytest.mark.parametrize("gs", [1.0, 512.0, 2.0**-3])
def test_the_fast_recipe_is_exact_for_powers_of_two(gs: float) -> None:
    """With a power-of-two global scale the default kernels' order of operations gives the exact bytes."""
    theirs, x = reference("nvfp4_reference"), tensor(130, 320, 11, 1.0, 0)
    scale = torch.tensor(gs)
    packed, sf, _ = theirs.quantize_reference(x, scale)
    ours = fp4.quantize(x, "nvfp4", "flashinfer_fast", encode_scale=scale)
    fp4.testing.assert_same_bytes(ours.codes, packed)
    fp4.testing.assert_same_bytes(ours.scale, theirs.unswizzle_sf_128x4(sf, 130, 320))


@pytest.mark.parametrize("gs", [448.0, 3.0])
def test_the_fast_recipe_is_close_otherwise(gs: float) -> None:
    """Adjacent scale codes on at most 2.5 % of the blocks."""
    theirs, x = reference("nvfp4_reference"), tensor(512, 1024, 13, 0.0, 0)
    scale = torch.tensor(gs)
    _, sf, _ = theirs.quantize_reference(x, scale)
    ours = fp4.quantize(x, "nvfp4", "flashinfer_fast", encode_scale=scale)
    gap = (ours.scale.int() - theirs.unswizzle_sf_128x4(sf, 512, 1024).int()).abs()
    assert int(gap.max()) <= 1
    assert 0 < float((gap > 0).float().mean()) <= 0.025


@pytest.mark.parametrize("rows", [64, 128, 256])
def test_row_orders(rows: int) -> None:
    """FlashInfer's own index tables against the chains that the back end uses."""
    core = importlib.import_module("flashinfer.fused_moe.core")
    weight = torch.arange(rows, dtype=torch.int32).view(rows, 1).expand(rows, 8).contiguous().view(torch.uint8)
    order = [weight[i] for i in core._maybe_get_cached_w3_w1_permute_indices({}, weight, 128).tolist()]
    chain = fp4.layouts["gate_up_pairs"] >> fp4.layouts["trtllm_rows_32"]
    assert torch.equal(chain.apply(weight).reshape(weight.shape), torch.stack(order))
    order = [weight[i] for i in core.get_w2_permute_indices_with_cache({}, weight, 128).tolist()]
    assert torch.equal(fp4.layouts["trtllm_rows_32"].apply(weight).reshape(weight.shape), torch.stack(order))
