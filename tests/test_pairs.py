"""Models of the instructions of ``triton_pair_codes`` that neither the interpreter nor a CPU runs, against the golden rule."""

from __future__ import annotations

import numpy as np
import torch

from fp4.ref import triton_pair_codes
from fp4.ref.codes import encode_e2m1


def test_e2m1_by_powers_of_two_in_half_words():
    """A model of the bf16 instructions, whose machine code only a GPU runs: every magnitude by every ue8m0 scale."""

    def bf16(t: torch.Tensor) -> torch.Tensor:
        return t.float().to(torch.bfloat16).double()

    m = torch.arange(0x8000).to(torch.int16).view(torch.bfloat16)
    for byte in range(255):
        factor = torch.tensor((254 - byte) << 23 if byte < 254 else 0x00400000, dtype=torch.int32).view(torch.float32)
        y = m.float() * factor
        want = torch.where(y != y, 7, encode_e2m1(y) & 7)
        y = torch.fmin(bf16(m.double() * factor.double()), torch.tensor(6.0, dtype=torch.float64))
        lines = torch.minimum(torch.minimum(bf16(2 * y + 192), bf16(y + 194)), bf16(y / 2 + 196))
        assert torch.equal(lines.to(torch.bfloat16).view(torch.int16) - 0x4340, want.to(torch.int16)), byte


def _lines_model(y):
    """The arithmetic of ``_by_lines`` on scaled magnitudes f32: fused sums rounded once, then the conversion to e4m3's smallest numbers."""
    middle, upper = ([int(v[2:], 16) for v in line.split(", ")] for line in (triton_pair_codes._MIDDLE, triton_pair_codes._UPPER))
    slope, height = (np.array([a, b], np.uint32).view(np.float32).astype(np.longdouble) for a, b in zip(middle, upper, strict=True))
    z = (y * np.float32(2.0**-8)).astype(np.longdouble)
    lines = [z.astype(np.float32), *((z * s + h).astype(np.float32) for s, h in zip(slope, height, strict=True))]
    return np.rint(np.minimum.reduce(lines).astype(np.float64) * 512).astype(np.int64)


def test_e2m1_by_lines():
    """A model of the SM89 instructions, which only a GPU runs: y next to every tie and code, and 4 million others
    below 8.5, to the codes of the golden rule. The widest sums have 55 bits, exact in an 80-bit float."""
    assert np.finfo(np.longdouble).nmant >= 63
    near = torch.tensor([0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 6.375, 8.0]).view(torch.int32)
    around = (near[:, None] + torch.arange(-5000, 5001, dtype=torch.int32)).view(torch.float32).reshape(-1)
    rng = torch.Generator().manual_seed(0)
    y = torch.cat([around, torch.rand(1 << 22, generator=rng) * 8.5, torch.exp2(-torch.rand(1 << 16, generator=rng) * 126), torch.zeros(1)])
    y = y[y < 8.5]
    assert torch.equal(torch.from_numpy(_lines_model(y.numpy())).to(torch.uint8), encode_e2m1(y))
    moved = y * (1 + 2.0**-22)  # the same test must see a line that is off by so little
    assert not torch.equal(torch.from_numpy(_lines_model(moved.numpy())).to(torch.uint8), encode_e2m1(y))
