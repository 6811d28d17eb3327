"""Layouts one after the other, layouts of ragged segments, and per-row vectors in a row order."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fp4
from fp4.errors import LayoutError
from fp4.layout import Chain, Layout, Segmented
from fp4.testing import assert_same_bytes
from fp4.testing.goldens import counter_bytes

CHAINS = [
    ("gate_up_pairs", "trtllm_rows_32", "sf_128x4"),
    ("deepgemm_gate_up", "deepgemm_utccp", "deepgemm_sf"),
    ("up_gate_halves", "trtllm_rows_16", "plain"),
    ("swap_halves", "sm90_mixed_fp4", "plain"),
    ("gate_up_halves", "marlin_w", "trtllm_rows_32"),
]


@pytest.mark.parametrize("names", CHAINS, ids="-".join)
def test_chain_is_associative_and_applies_in_order(names: tuple[str, str, str]) -> None:
    a, b, c = (fp4.layouts[n] for n in names)
    left, right = (a >> b) >> c, a >> (b >> c)
    assert isinstance(left, Chain)
    assert left == right
    assert hash(left) == hash(right)
    shape = (2, 768, 64)
    x = torch.from_numpy(counter_bytes(shape))
    step = x
    for layout in (a, b, c):
        step = layout.apply(step.reshape(shape))
    assert_same_bytes(left.apply(x), step)
    assert_same_bytes(right.apply(x), step)
    assert_same_bytes(left.invert(step, shape), x)
    assert left.nbytes(shape) == step.numel()
    if len({layout.unit for layout in (a, b, c)}) == 1 and all(layout.word is None for layout in (a, b, c)):
        m, k = np.arange(768)[:, None], np.arange(64)
        assert np.array_equal(step.numpy().reshape(-1)[left.offset(shape, m, k, 1)], x[1].numpy())
        assert eval(left.formula(shape), {"m": 700, "k": 61}) == left.offset(shape, 700, 61)


def test_a_chain_of_nibble_layouts_counts_nibbles() -> None:
    chain = Layout("a", "m (ko k4) -> ko m k4", unit="nibble") >> Layout("b", "(mo m2) (ko k2) -> mo ko k2 m2", unit="nibble")
    x = torch.from_numpy(counter_bytes((3, 4, 4)))
    units = torch.stack((x & 15, x >> 4), -1).reshape(3, 4, 8)
    y = chain.apply(x).flatten()
    stored = torch.stack((y & 15, y >> 4), -1).flatten()
    m, k = torch.arange(4)[:, None], torch.arange(8)
    for e in range(3):
        assert torch.equal(stored[chain.offset((3, 4, 4), m, k, e)], units[e])


def test_chain_pads_at_the_step_that_pads() -> None:
    chain = fp4.layouts["gate_up_pairs"] >> fp4.layouts["sf_128x4"]
    x = torch.from_numpy(counter_bytes((130, 6)))
    pairs = fp4.layouts["gate_up_pairs"].apply(x).reshape(130, 6)
    assert chain.padded((130, 6)) == (256, 8)
    assert_same_bytes(chain.apply(x), fp4.layouts["sf_128x4"].apply(pairs))
    assert_same_bytes(chain.invert(chain.apply(x), (130, 6)), x)
    with pytest.raises(LayoutError, match="offset needs one unit"):
        (fp4.layouts["gate_up_pairs"] >> fp4.layouts["marlin_w"]).offset((64, 8), 0, 0)


@given(sizes=st.lists(st.integers(0, 300), max_size=5), columns=st.integers(1, 9), extra=st.integers(0, 2), seed=st.integers(0, 99))
def test_segments_are_the_layout_of_each_expert(sizes: list[int], columns: int, extra: int, seed: int) -> None:
    starts = tuple(np.cumsum([0, *sizes]).tolist())
    layout = fp4.layouts["blackwell_act_sf"]
    used = sum(-(-n // 128) * 128 for n in sizes)
    segmented = Segmented(layout, starts, capacity=used + 128 * extra)
    x = np.random.default_rng(seed).integers(0, 256, (starts[-1], columns), dtype=np.uint8)
    y = segmented.apply(x)
    want = [layout.apply(x[a:b]) for a, b in pairwise(starts)]
    rest = np.zeros(extra * 128 * (-(-columns // 8) * 8), np.uint8)
    assert_same_bytes(y, np.concatenate([*want, rest]))
    assert_same_bytes(segmented.invert(y, x.shape), x)
    assert segmented.nbytes(x.shape) == y.size
    first = [s for s in starts if s < starts[-1]]  # a first row belongs to its own segment, not to the padding of the one before
    for m in {starts[-1] // 2, starts[-1] - 1, *first} if starts[-1] else ():
        assert y[segmented.offset(x.shape, m, columns - 1)] == x[m, columns - 1]


def test_per_row_vectors_of_any_dtype() -> None:
    bias = torch.randn(3, 64)
    got = fp4.layouts["trtllm_rows_32"].apply_rows(bias)
    order = torch.tensor([n // 32 * 32 + 4 * (n % 8) + n % 32 // 8 for n in range(64)])
    assert torch.equal(got, bias[:, order])
    assert torch.equal(fp4.layouts["swap_pairs"].apply_rows(bias.to(torch.bfloat16)), bias.to(torch.bfloat16)[:, torch.arange(64) ^ 1])
    chain = fp4.layouts["gate_up_pairs"] >> fp4.layouts["trtllm_rows_32"]
    assert torch.equal(chain.apply_rows(bias), fp4.layouts["trtllm_rows_32"].apply_rows(fp4.layouts["gate_up_pairs"].apply_rows(bias)))
    with pytest.raises(LayoutError, match="without padding"):
        fp4.layouts["sf_128x4"].apply_rows(bias)
