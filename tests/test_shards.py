"""Global scales that differ, tensor-parallel and expert-parallel pieces: exact, or refused with the reason; never approximated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer_cases import random_weight

import fp4
from fp4 import fuse
from fp4.errors import FormatMismatch
from fp4.formats import E4M3
from fp4.gpu.storage import reorder_gate_up
from fp4.ref.matmul import weight
from fp4.ref.moe import moe as reference_moe
from fp4.tensor import GATE_UP_ORDERS, QuantizedTensor


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Float32 sums in another order: relative Frobenius error at the level of float32 rounding."""
    assert float((got.double() - want.double()).norm() / want.double().norm()) < 3e-6


def nvfp4(rows: int, k: int, g: float, low: int = 0x38, high: int = 0x60, seed: int = 0) -> QuantizedTensor:
    gen = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, generator=gen)
    return QuantizedTensor("nvfp4", codes, torch.randint(low, high, (rows, k // 16), dtype=torch.uint8, generator=gen), torch.tensor(g))


# ---- joining ---------------------------------------------------------------------------------------------------------------------


@given(st.integers(-20, 20), st.lists(st.integers(0, 0x7E), min_size=1, max_size=8))
def test_rescaled_e4m3_bytes_are_the_product_or_none(exponent: int, bytes_: list[int]) -> None:
    table = torch.from_numpy(E4M3.values.copy()).double()
    scale = torch.tensor(bytes_, dtype=torch.uint8)
    wanted = table[scale.long()] * 2.0**exponent
    finite = table[:0x7F]
    exact = all(bool((finite == w).any()) for w in wanted)
    got = fuse.rescale(scale, exponent)
    assert (got is not None) == exact
    if got is not None:
        assert torch.equal(table[got.long()], wanted)


def test_fused_projections_keep_every_value() -> None:
    parts = [nvfp4(16, 64, 0.25, seed=1), nvfp4(32, 64, 0.5, seed=2), nvfp4(16, 64, 0.125, seed=3)]
    joined = fuse.fuse(parts)
    assert joined.global_scale is not None
    assert torch.equal(weight(joined), torch.cat([weight(p) for p in parts]))


def test_fused_projections_keep_the_activation_scale() -> None:
    """One x feeds all parts: the larger multiplier clips nothing (A11: gate 0.5, up 0.25, either order); never dropped in silence."""
    parts = [replace(nvfp4(16, 64, 0.25, seed=i), input_scale=torch.tensor(v)) for i, v in enumerate((0.5, 0.25))]
    for order in (parts, parts[::-1]):
        assert fuse.fuse(order).input_scale == torch.tensor(0.5)
    with pytest.raises(fp4.FormatMismatch, match="1 of 2 parts have an input_scale"):
        fuse.fuse([parts[0], nvfp4(16, 64, 0.25)])
    assert fuse.fuse([nvfp4(16, 64, 0.25)]).input_scale is None


def test_an_all_zero_part_fuses() -> None:
    """Global scale 0 (ModelOpt's all-zero tensor) beside another: no common power of two, and zero all the same."""
    parts = [nvfp4(16, 64, 0.25, seed=1), nvfp4(32, 64, 0.0, seed=2), nvfp4(16, 64, 0.5, seed=3)]
    for order in (parts, parts[::-1], [parts[1], parts[0]], [parts[1], parts[1]]):
        assert torch.equal(weight(fuse.fuse(order)), torch.cat([weight(p) for p in order]))


def test_experts_in_different_row_orders_do_not_stack() -> None:
    parts = [replace(nvfp4(16, 64, 0.25), gate_up=order) for order in ("gate_up", "up_gate")]
    with pytest.raises(fp4.FormatMismatch, match="expert 1 has its rows as 'up_gate', expert 0 as 'gate_up'"):
        fuse.stack(parts)


@pytest.mark.parametrize(("a", "b", "low"), [(0.25, 0.3, 0x38), (0.25, 0.25 * 2**12, 0x38), (1.0, 2e-5, 0x38)])
def test_fusing_what_has_no_exact_common_scale_is_refused(a: float, b: float, low: int) -> None:
    with pytest.raises(fp4.Unsupported, match=r"no exact common one exists .*relative\); prepare them separately"):
        fuse.fuse([nvfp4(16, 64, a, low), nvfp4(16, 64, b, low)])


def test_fusing_unlike_parts_is_refused() -> None:
    with pytest.raises(fp4.FormatMismatch, match="does not stack"):
        fuse.fuse([nvfp4(16, 64, 1.0), nvfp4(16, 96, 1.0)])
    with pytest.raises(fp4.FormatMismatch, match="no tensors"):
        fuse.fuse([])


def expert_case(gate_g: list[float], up_g: list[float], inter: int = 32, hidden: int = 64) -> tuple[Any, Any, Any]:
    e = len(gate_g)
    gate = replace(random_weight(1, "nvfp4", e, inter, hidden), global_scale=torch.tensor(gate_g))
    up = replace(random_weight(2, "nvfp4", e, inter, hidden), global_scale=torch.tensor(up_g))
    return gate, up, random_weight(3, "nvfp4", e, hidden, inter)


def test_experts_whose_gate_and_up_scales_differ() -> None:
    """vllm#54974: gate 0.25, up 0.5 (expert 0), 0.5 and 0.05 (expert 1). Each half keeps its own."""
    gate, up, w2 = expert_case([0.25, 0.5], [0.5, 0.05])
    x, ids, w = torch.randn(7, 64), torch.tensor([[0, 1]] * 7), torch.rand(7, 2)
    want = reference_moe(x, (gate, up), w2, ids, w, activation=fp4.SiLU(), acc=torch.float64)
    p = fp4.prepare_moe((gate, up), w2)
    assert p.problem.global_scales == "gate_up"
    close(fp4.moe(x, p, ids, w), want)
    (g, u), _ = p.restore()  # type: ignore[misc]
    assert torch.equal(g.global_scale, gate.global_scale)
    assert torch.equal(u.scale, up.scale)
    largest = torch.maximum(gate.global_scale, up.global_scale)
    wrong = reference_moe(x, (replace(gate, global_scale=largest), replace(up, global_scale=largest)), w2, ids, w, activation=fp4.SiLU())
    assert float((wrong - want).norm() / want.norm()) > 0.5  # what taking the larger one would have done


@pytest.mark.parametrize("order", GATE_UP_ORDERS)
def test_folding_powers_of_two_is_exact_and_reversible(order: str) -> None:
    gate, up, _ = expert_case([0.25, 0.5, 1.0], [0.5, 0.125, 1.0])
    gate, up = (replace(q, scale=q.scale.clamp(0x20, 0x60)) for q in (gate, up))
    halves = [reorder_gate_up(torch.cat([getattr(gate, n), getattr(up, n)], 1), "gate_up", order) for n in ("codes", "scale")]
    w13 = QuantizedTensor("nvfp4", *halves)
    scales = torch.stack([gate.global_scale, up.global_scale], 1)
    found = fuse.fold_gate_up(w13, scales, order)
    assert found is not None
    folded, exponent = found
    values = weight(folded)
    want = torch.cat([weight(gate), weight(up)], 1)
    index = reorder_gate_up(torch.arange(64, dtype=torch.uint8).view(1, 64, 1), "gate_up", order).flatten().long()
    assert torch.equal(values, want[:, index])
    s = reorder_gate_up(folded.scale, order, "gate_up").view(3, 2, 32, 4)
    back = fuse.rescale(s, -exponent[:, :, None, None])
    assert back is not None
    assert torch.equal(reorder_gate_up(back.view(3, 64, 4), "gate_up", order), w13.scale)


def test_an_expert_whose_gate_and_up_are_both_zero_folds() -> None:
    """A pruned expert stands in no one's way; one of whom only a half is zero has no common scale."""
    gate, up, _ = expert_case([0.25, 0.0], [0.5, 0.0])
    gate, up = (replace(q, scale=q.scale.clamp(0x20, 0x60)) for q in (gate, up))
    w13 = QuantizedTensor("nvfp4", torch.cat([gate.codes, up.codes], 1), torch.cat([gate.scale, up.scale], 1))
    found = fuse.fold_gate_up(w13, torch.tensor([[0.25, 0.5], [0.0, 0.0]]), "gate_up")
    assert found is not None
    assert found[1][1].tolist() == [0, 0]
    assert torch.equal(weight(found[0]), torch.cat([weight(gate), weight(up)], 1))
    for half in ([0.0, 0.5], [0.5, 0.0]):
        assert fuse.fold_gate_up(w13, torch.tensor([[0.25, 0.5], half]), "gate_up") is None


def test_folding_what_is_not_exact_gives_none() -> None:
    gate, up, _ = expert_case([0.25, 0.5], [0.3, 0.5])
    w13 = QuantizedTensor("nvfp4", torch.cat([gate.codes, up.codes], 1), torch.cat([gate.scale, up.scale], 1))
    assert fuse.fold_gate_up(w13, torch.tensor([[0.25, 0.3], [0.5, 0.5]]), "gate_up") is None
    assert fuse.fold_gate_up(w13, torch.tensor([[0.25, 0.25 * 2**14], [0.5, 0.5]]), "gate_up") is None  # would leave e4m3


def test_pair_with_equal_scales_is_one_stacked_tensor() -> None:
    gate, up, w2 = expert_case([0.25, 0.5], [0.25, 0.5])
    p = fp4.prepare_moe((gate, up), w2)
    assert p.problem.global_scales == "expert"
    assert torch.equal(p.arrays["w13.global_scale"], gate.global_scale)
    with pytest.raises(fp4.FormatMismatch, match="different input_scale"):
        fp4.prepare_moe((replace(gate, input_scale=torch.tensor(1.0)), up), w2)


# ---- tensor parallel --------------------------------------------------------------------------------------------------------------


def test_k_is_never_cut_inside_a_block() -> None:
    """vllm#49949: K = 48 over 2 ranks is one block and a half each."""
    w = random_weight(0, "nvfp4", 24, 48)
    with pytest.raises(fp4.FormatMismatch, match=r"k = 48 over tp = 2 cuts a block of 16 \(3 blocks\); pass uneven=True for 32, 16"):
        fuse.shard(w, "k", 0, 2)
    x = torch.randn(5, 48, dtype=torch.float64).float()
    parts = [fuse.shard(w, "k", r, 2, uneven=True) for r in range(2)]
    assert [p.k for p in parts] == [32, 16]
    total = fp4.matmul(x[:, :32], fp4.prepare(parts[0])) + fp4.matmul(x[:, 32:], fp4.prepare(parts[1]))
    close(total, fp4.matmul(x, fp4.prepare(w)))


@pytest.mark.parametrize(("k", "size", "columns"), [(96, 2, [64, 32]), (160, 4, [64, 32, 32, 32])])
def test_uneven_mxfp4_shards_put_together_are_the_original(k: int, size: int, columns: list[int]) -> None:
    w = random_weight(0, "mxfp4", 3, 16, k)
    parts = [fuse.shard(w, "k", r, size, uneven=True) for r in range(size)]
    assert [p.k for p in parts] == columns
    assert torch.equal(torch.cat([p.codes for p in parts], -1), w.codes)
    assert torch.equal(torch.cat([p.scale for p in parts], -1), w.scale)


def test_a_rank_without_a_block_is_refused() -> None:
    with pytest.raises(fp4.FormatMismatch, match="rank 3 of 4 would get none"):
        fuse.shard(random_weight(0, "mxfp4", 16, 96), "k", 3, 4, uneven=True)
    with pytest.raises(fp4.FormatMismatch, match=r"is \(2, 2\); need \(rank, size\) with 0 <= rank < size"):
        fuse.shard(random_weight(0, "mxfp4", 16, 96), "n", 2, 2)


@pytest.mark.parametrize("order", GATE_UP_ORDERS)
@pytest.mark.parametrize(("inter", "size"), [(96, 2), (160, 4)])
def test_tensor_parallel_experts_add_up(order: str, inter: int, size: int) -> None:
    """sglang#9433, #9473: rows of w13 and columns of w2 are cut at the same blocks, and the bias is added once (torchtitan#4245)."""
    e, hidden = 3, 64
    w13, w2 = random_weight(1, "mxfp4", e, 2 * inter, hidden), random_weight(2, "mxfp4", e, hidden, inter)
    b13, b2 = torch.arange(e * 2 * inter).view(e, -1) % 19 / 8.0, torch.ones(e, hidden)
    x, ids, w = torch.randn(6, hidden), torch.randint(0, e, (6, 2)), torch.rand(6, 2)
    kw: dict[str, Any] = {"gate_up": order, "bias13": b13, "bias2": b2, "activation": fp4.SwiGLU()}
    whole = fp4.moe(x, fp4.prepare_moe(w13, w2, **kw), ids, w)
    ranks = [fp4.prepare_moe(w13, w2, tp=(r, size), **kw) for r in range(size)]
    assert sum(r.shape[2] for r in ranks) == inter
    assert all(r.shape[2] % 32 == 0 for r in ranks)
    close(sum(fp4.moe(x, r, ids, w) for r in ranks), whole)


def test_stored_bytes_are_cut_where_the_layout_allows() -> None:
    w = random_weight(0, "nvfp4", 64, 128)
    p = fp4.prepare(w, "reference")
    for dim, axis in (("n", 0), ("k", 1)):
        for part, ranges in p.shards(dim, 2).items():
            stored, logical = p.arrays[part].flatten(), getattr(w, part)
            assert len(ranges) == 2, part
            for r, want in zip(ranges, logical.chunk(2, axis), strict=True):
                assert torch.equal(r.take(stored), want.flatten()), (dim, part)
    assert not p.shards("n", 3)["codes"]
    pytest.importorskip("triton", reason="stored for Triton's kernels")
    w13, w2 = random_weight(1, "mxfp4", 2, 64, 64), random_weight(2, "mxfp4", 2, 64, 32)
    experts = fp4.prepare_moe(w13, w2, gate_up="gate_up", device="sm90", backend="triton")
    reasons = experts.shards("n", 2)
    assert not reasons["w13.codes"]
    assert "gate and up of one shard are not together" in str(reasons["w13.codes"])
    scale = experts.layouts["w2.scale"]  # one block of 32 columns, stored as eight
    assert scale.shape == (64, 8)
    for dim in ("n", "k"):
        assert str(experts.shards(dim, 2)["w2.scale"]) == "64 x 1 is padded to 64 x 8 before it is stored"
    with pytest.raises(fp4.Fp4Error, match="dim is 'm'"):
        p.shards("m", 2)


# ---- expert parallel ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given_local", [False, True])
def test_expert_parallel_ranks_hold_their_own_of_everything(given_local: bool) -> None:
    """sglang#36597: every tensor with an expert dimension is sliced, input scales too; ids stay global."""
    e, hidden, inter = 8, 64, 32
    scales = torch.arange(1.0, 9.0)
    w13 = replace(random_weight(1, "nvfp4", e, 2 * inter, hidden), input_scale=scales, gate_up="up_gate")
    w2 = replace(random_weight(2, "nvfp4", e, hidden, inter), input_scale=scales * 10)
    b13, b2 = torch.randn(e, 2 * inter), torch.randn(e, hidden)
    x, ids, w = torch.randn(9, hidden), torch.randint(0, e, (9, 3)), torch.rand(9, 3)
    whole = fp4.moe(x, fp4.prepare_moe(w13, w2, bias13=b13, bias2=b2), ids, w)
    total = torch.zeros_like(whole)
    for rank in range(2):
        start, stop = fuse.expert_range(e, rank, 2)
        kw: dict[str, Any] = {"local_experts": (start, stop)}
        a, b, c, d = w13, w2, b13, b2
        if given_local:
            a, b, c, d = fuse.slice_experts(w13, start, stop), fuse.slice_experts(w2, start, stop), b13[start:stop], b2[start:stop]
            kw["num_experts"] = e
        p = fp4.prepare_moe(a, b, bias13=c, bias2=d, **kw)
        assert p.shape == (4, hidden, inter)
        assert p.experts == e
        assert p.arrays["w13.input_scale"].tolist() == scales[start:stop].tolist()
        assert {t.shape[0] for t in p.arrays.values()} == {4}
        total += fp4.moe(x, p, ids, w)
    close(total, whole)


def test_expert_ranges() -> None:
    assert [fuse.expert_range(10, r, 4) for r in range(4)] == [(0, 3), (3, 6), (6, 8), (8, 10)]
    with pytest.raises(fp4.FormatMismatch, match="0 <= rank < size <= experts"):
        fuse.expert_range(2, 0, 3)
    w13, w2 = random_weight(1, "mxfp4", 4, 64, 64), random_weight(2, "mxfp4", 4, 64, 32)
    with pytest.raises(fp4.FormatMismatch, match=r"local_experts \(2, 9\) is outside \[0, 4\]"):
        fp4.prepare_moe(w13, w2, gate_up="gate_up", local_experts=(2, 9))
    with pytest.raises(fp4.FormatMismatch, match="4 experts given; need all 16 or the 2"):
        fp4.prepare_moe(w13, w2, gate_up="gate_up", local_experts=(2, 4), num_experts=16)


def test_stack_keeps_every_value_and_refuses_what_does_not_fit() -> None:
    parts = [fp4.quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(e)) * 4.0**e, "nvfp4") for e in range(3)]
    parts = [replace(q, input_scale=torch.tensor(0.1 * (e + 1))) for e, q in enumerate(parts)]
    both = fp4.fuse.stack(parts)
    assert both.shape == (3, 32, 64)
    assert torch.equal(fp4.dequantize(both), torch.stack([fp4.dequantize(q) for q in parts]))
    assert both.input_scale is not None
    assert both.input_scale.tolist() == [q.input_scale.item() for q in parts if q.input_scale is not None]

    across = [fp4.quantize(torch.randn(64, 32), "mxfp4", axis=0) for _ in range(2)]
    assert torch.equal(fp4.dequantize(fp4.fuse.stack(across)), torch.stack([fp4.dequantize(q) for q in across]))

    other = fp4.quantize(torch.randn(16, 64), "nvfp4")
    for wrong in ([], [parts[0], other], [parts[0], replace(parts[1], input_scale=None)], [both, both]):
        with pytest.raises(FormatMismatch, match="stack: "):
            fp4.fuse.stack(wrong)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_part_has_the_orientation_of_the_whole(axis: int) -> None:
    """Quantised along dimension 1, as GPT-OSS holds its experts, a part came back transposed, unseen where the matrix is square."""
    x = torch.randn(4, 64, 64) if axis else torch.randn(64, 4, 64)
    q = fp4.quantize(x, "mxfp4", axis=axis)
    n, e = (2, 1) if axis == 0 else (3 - axis, 0)
    value = fp4.dequantize(q)
    assert torch.equal(fp4.dequantize(fuse.slice_experts(q, 1, 3)), value.narrow(e, 1, 2))
    for rank in range(2):
        assert torch.equal(fp4.dequantize(fuse.shard(q, "n", rank, 2)), value.narrow(n, 32 * rank, 32))
        assert torch.equal(fp4.dequantize(fuse.shard(q, "k", rank, 2)), value.narrow(axis, 32 * rank, 32))
    joined = fuse.fuse([fuse.shard(q, "n", rank, 2) for rank in range(2)])
    assert joined.axis % 3 == axis
    assert torch.equal(fp4.dequantize(joined), value)


def test_joined_parts_of_different_axes_are_rows() -> None:
    a, b = fp4.quantize(torch.randn(8, 64), "mxfp4"), fp4.quantize(torch.randn(64, 8), "mxfp4", axis=0)
    assert torch.equal(fp4.dequantize(fuse.fuse([a, b])), torch.cat([fp4.dequantize(a), fp4.dequantize(b).T]))


def test_joined_halves_are_no_halves() -> None:
    """[gate; up] under [gate; up] is neither: the rows of the second gate would be taken for an up."""
    plain = fp4.quantize(torch.randn(8, 64), "mxfp4")
    halves, pairs = replace(plain, gate_up="gate_up"), replace(plain, gate_up="interleaved")
    for parts in ([halves, halves], [halves, plain], [plain, pairs]):
        with pytest.raises(FormatMismatch, match="join gates with gates"):
            fuse.fuse(parts)
    assert fuse.fuse([pairs, pairs]).gate_up == "interleaved"
    assert fuse.fuse([halves]).gate_up == "gate_up"
    with pytest.raises(FormatMismatch, match="need rows to join"):
        fuse.fuse([fp4.quantize(torch.randn(64), "mxfp4")])
