"""Codes of e2m1, e4m3, ue8m0 and ue5m3: every code and every finite bf16 value, against ml_dtypes, gfloat and exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from gfloat.formats import format_info_ocp_e2m1, format_info_ocp_e4m3, format_info_ocp_e8m0
from hypothesis import given
from hypothesis import strategies as st

from fp4.errors import FormatMismatch, Fp4Error
from fp4.formats import E2M1, E4M3, UE5M3, UE8M0, ElemFormat
from fp4.ref import codes as C
from fp4.ref import triton_codes as T

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
FINITE = BF16[torch.isfinite(BF16)]
TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]


def near_ties(elem: ElemFormat) -> torch.Tensor:
    """Every midpoint of two neighbouring values of ``elem``, and the four float32 numbers on each side of it, both signs."""
    values = np.unique(elem.values[np.isfinite(elem.values)].astype(np.float64))
    middle = torch.tensor(((values[1:] + values[:-1]) / 2).astype(np.float32))
    middle = middle[middle != 0]
    return (middle.view(torch.int32)[:, None] + torch.arange(-4, 5, dtype=torch.int32)).view(torch.float32).flatten()


def random_bits(n: int, seed: int) -> torch.Tensor:
    x = torch.randint(-(2**31), 2**31, (n,), generator=torch.Generator().manual_seed(seed)).to(torch.int32).view(torch.float32)
    return x[torch.isfinite(x)]


# ---- decoding: every code ------------------------------------------------------------------------------------------------------

WITNESS = {"e2m1": ml_dtypes.float4_e2m1fn, "e4m3": ml_dtypes.float8_e4m3fn, "ue8m0": ml_dtypes.float8_e8m0fnu}
GFLOAT = {"e2m1": format_info_ocp_e2m1, "e4m3": format_info_ocp_e4m3, "ue8m0": format_info_ocp_e8m0}


@pytest.mark.parametrize("elem", [E2M1, E4M3, UE8M0], ids=str)
def test_every_code_agrees_with_ml_dtypes_and_gfloat(elem: ElemFormat) -> None:
    code = np.arange(elem.codes, dtype=np.uint8)
    got = C.decode(torch.from_numpy(code), elem).numpy()
    np.testing.assert_array_equal(got, code.view(WITNESS[elem.name]).astype(np.float32))
    np.testing.assert_array_equal(got, np.array([gfloat.decode_float(GFLOAT[elem.name], int(c)).fval for c in code], dtype=np.float32))
    assert (np.signbit(got) == np.signbit(code.view(WITNESS[elem.name]).astype(np.float32)))[np.isfinite(got)].all()


def test_every_ue5m3_code_is_its_formula() -> None:
    for code, value in enumerate(C.decode_ue5m3(torch.arange(256).to(torch.uint8)).tolist()):
        e, m = code >> 3, code & 7
        want = Fraction(8 * (e > 0) + m, 8) * Fraction(2) ** (max(e, 1) - 15)
        assert (value != value) if code == 255 else Fraction(value) == want
    assert [C.decode_ue5m3(torch.tensor([c], dtype=torch.uint8)).item() for c in (0x78, 0x70, 0x7C)] == [1.0, 0.5, 1.5]


def test_subnormal_and_special_scale_bytes() -> None:
    """Bugs A8 and G7: bytes 1..7 of e4m3 are 2^-9 * 1..7. Bug G6: ue8m0 bytes 0, 1, 127, 254, 255."""
    assert C.decode_e4m3(torch.arange(1, 8).to(torch.uint8)).tolist() == [2.0**-9 * n for n in range(1, 8)]
    got = C.decode_ue8m0(torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8)).tolist()
    assert got[:4] == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert got[4] != got[4]


# ---- encoding: every finite bf16, ties, random float32 --------------------------------------------------------------------------


def saturated(x: torch.Tensor, elem: ElemFormat) -> np.ndarray:
    return np.clip(x.to(torch.float32).numpy(), -elem.max, elem.max)


@pytest.mark.parametrize("elem", [E2M1, E4M3], ids=str)
@pytest.mark.parametrize("source", ["bf16", "near_ties", "random"])
def test_encode_agrees_with_ml_dtypes(elem: ElemFormat, source: str) -> None:
    x = {"bf16": FINITE, "near_ties": near_ties(elem), "random": random_bits(1 << 20, 1)}[source]
    got = (C.encode_e2m1 if elem is E2M1 else C.encode_e4m3)(x)
    want = saturated(x, elem).astype(WITNESS[elem.name]).view(np.uint8)
    np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize("elem", [E2M1, E4M3], ids=str)
def test_encode_of_every_finite_bf16_agrees_with_gfloat(elem: ElemFormat) -> None:
    fi = GFLOAT[elem.name]
    x = FINITE.to(torch.float32)
    got = (C.encode_e2m1 if elem is E2M1 else C.encode_e4m3)(x)
    want = gfloat.encode_ndarray(fi, gfloat.round_ndarray(fi, x.numpy().astype(np.float64), sat=True))
    np.testing.assert_array_equal(got.numpy(), want.astype(np.uint8))


@pytest.mark.parametrize(
    ("tie", "mode"), [("even", gfloat.RoundMode.TiesToEven), ("away", gfloat.RoundMode.TiesToAway), ("toward_zero", None)]
)
def test_tie_rules(tie: str, mode: gfloat.RoundMode | None) -> None:
    """Bug G5: the 14 tie values, and everything that is not a tie is nearest under each rule."""
    x = torch.cat((FINITE.to(torch.float32), near_ties(E2M1)))
    got = C.decode_e2m1(C.encode_e2m1(x, tie)).numpy().astype(np.float64)
    clipped = np.clip(x.numpy().astype(np.float64), -6, 6)
    if mode is not None:
        want = gfloat.round_ndarray(format_info_ocp_e2m1, clipped, rnd=mode, sat=True)
        np.testing.assert_array_equal(got, want)
    else:  # nearest, and of two equally near ones the smaller magnitude
        grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        below = grid[np.searchsorted(grid, np.abs(clipped), side="right") - 1]
        above = grid[np.minimum(np.searchsorted(grid, np.abs(clipped), side="left"), 7)]
        want = np.where(np.abs(clipped) - below <= above - np.abs(clipped), below, above)
        np.testing.assert_array_equal(np.abs(got), want)
    expected = {"even": [0, 1, 1, 2, 2, 4, 4], "away": [0.5, 1, 1.5, 2, 3, 4, 6], "toward_zero": [0, 0.5, 1, 1.5, 2, 3, 4]}[tie]
    for sign in (1.0, -1.0):
        values = C.decode_e2m1(C.encode_e2m1(torch.tensor(TIES) * sign, tie)).tolist()
        assert values == [sign * v for v in expected]


def test_special_values() -> None:
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e38, -1e-38])
    assert C.encode_e2m1(x).tolist() == [7, 15, 7, 0, 8, 7, 8]
    assert C.encode_e2m1(x, nan_code="zero", zero_sign="positive").tolist() == [7, 15, 0, 0, 0, 7, 0]
    assert C.encode_e2m1(x, zero_sign="negative").tolist() == [7, 15, 7, 8, 8, 7, 8]
    assert C.encode_e2m1(x, zero_sign="of_value").tolist() == [7, 15, 7, 0, 0, 7, 8]
    assert C.encode_e4m3(x).tolist() == [0x7E, 0xFE, 0x7F, 0, 0x80, 0x7E, 0x80]
    assert C.encode_ue5m3(x).tolist() == [0xFE, 0xFF, 0xFF, 0, 0, 0xFE, 0xFF]
    assert C.encode_ue8m0(x).tolist() == [254, 255, 255, 0, 0, 254, 255]
    assert C.encode_e4m3(torch.tensor([464.0, 448.1, 2.0**-10, 2.0**-10 * 1.01])).tolist() == [0x7E, 0x7E, 0, 1]


@pytest.mark.parametrize("rounding", ["ceil", "floor", "nearest"])
def test_ue8m0_around_every_power_of_two(rounding: str) -> None:
    power = torch.arange(1, 255, dtype=torch.int32) << 23
    bits = torch.cat([power + d for d in (-1, 0, 1, 0x3FFFFF, 0x400000, 0x400001)])
    x = bits.view(torch.float32)
    got = C.encode_ue8m0(x, rounding)
    for value, byte in zip(x.tolist(), got.tolist(), strict=True):
        exact = Fraction(value)
        e = next(n for n in range(byte - 129, byte - 124) if Fraction(2) ** n <= exact < Fraction(2) ** (n + 1))
        up = {"ceil": exact != Fraction(2) ** e, "floor": False, "nearest": exact >= Fraction(3, 2) * Fraction(2) ** e}[rounding]
        assert byte == min(max(e + up + 127, 0), 254), value
    assert C.encode_ue8m0(torch.tensor([2.0**-127, 2.0**-128, 0.0])).tolist() == [0, 0, 0]


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(0, 3))
def test_pack_and_unpack_are_inverse(seed: int, half: int, lead: int) -> None:
    shape = (*((3, 2, 1)[:lead]), 2 * half)
    code = torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = C.pack_nibbles(code)
    assert packed.shape == (*shape[:-1], half)
    assert torch.equal(packed & 15, code[..., 0::2])
    assert torch.equal(packed >> 4, code[..., 1::2])
    assert torch.equal(C.unpack_nibbles(packed), code)
    assert torch.equal(C.pack_nibbles(code.transpose(0, -1).contiguous().transpose(0, -1)), packed)


def test_errors() -> None:
    with pytest.raises(FormatMismatch, match="float64"):
        C.encode_e2m1(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(FormatMismatch, match="int64"):
        C.encode_e4m3(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(FormatMismatch, match="even last dimension"):
        C.pack_nibbles(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(FormatMismatch, match="need uint8"):
        C.decode_e2m1(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(Fp4Error, match="rounding is 'up'"):
        C.encode_ue8m0(torch.zeros(2), "up")
    with pytest.raises(Fp4Error, match="tie is 'odd'"):
        C.encode_e2m1(torch.zeros(2), "odd")


# ---- the Triton twins -----------------------------------------------------------------------------------------------------------


@triton.jit
def _encode_all(x_ptr, out_ptr, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    x = tl.load(x_ptr + i, mask=m, other=0.0)
    a = tl.abs(x)
    tl.store(out_ptr + i, T.encode_e2m1(x), mask=m)
    tl.store(out_ptr + n + i, T.encode_e2m1(x, 1), mask=m)
    tl.store(out_ptr + 2 * n + i, T.encode_e2m1(x, 2), mask=m)
    tl.store(out_ptr + 3 * n + i, T.encode_e4m3(x), mask=m)
    tl.store(out_ptr + 4 * n + i, T.encode_ue5m3(a), mask=m)
    tl.store(out_ptr + 5 * n + i, T.encode_ue8m0(a), mask=m)
    tl.store(out_ptr + 6 * n + i, T.encode_ue8m0(a, 1), mask=m)
    tl.store(out_ptr + 7 * n + i, T.encode_ue8m0(a, 2), mask=m)


@triton.jit
def _decode_all(out_ptr, packed_ptr):
    i = tl.arange(0, 256)
    tl.store(out_ptr + i, T.decode_e2m1(i))
    tl.store(out_ptr + 256 + i, T.decode_e4m3(i))
    tl.store(out_ptr + 512 + i, T.decode_ue5m3(i))
    tl.store(out_ptr + 768 + i, T.decode_ue8m0(i))
    rows = tl.arange(0, 8)[:, None] * 32
    nibbles = T.unpack_nibbles(tl.load(packed_ptr + rows + tl.arange(0, 32)[None, :]))
    tl.store(packed_ptr + 256 + rows + tl.arange(0, 32)[None, :], T.pack_nibbles(nibbles))


def test_triton_encodes_like_torch() -> None:
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0])
    x = torch.cat((FINITE.to(torch.float32), near_ties(E2M1), near_ties(E4M3), near_ties(UE5M3), random_bits(1 << 17, 2), special))
    n = x.numel()
    out = torch.zeros(8, n, dtype=torch.uint8, device=DEVICE)
    _encode_all[(triton.cdiv(n, 1 << 16),)](x.to(DEVICE), out, n, B=1 << 16)
    want = [C.encode_e2m1(x, tie) for tie in ("even", "away", "toward_zero")] + [C.encode_e4m3(x), C.encode_ue5m3(x.abs())]
    want += [C.encode_ue8m0(x.abs(), rounding) for rounding in ("ceil", "floor", "nearest")]
    for row, twin in zip(out.cpu(), want, strict=True):
        assert torch.equal(row, twin)


def test_triton_decodes_and_packs_like_torch() -> None:
    out = torch.zeros(4, 256, device=DEVICE)
    packed = torch.arange(512, device=DEVICE).to(torch.uint8)
    packed[256:] = 0
    _decode_all[(1,)](out, packed)
    code = torch.arange(256).to(torch.uint8)
    for row, elem in zip(out.cpu(), (E2M1, E4M3, UE5M3, UE8M0), strict=True):
        want = C.decode(code, elem)
        assert torch.equal(torch.isnan(row), torch.isnan(want))
        assert torch.equal(row.nan_to_num(0), want.nan_to_num(0))
        assert torch.equal(row[~torch.isnan(row)].view(torch.int32), want[~torch.isnan(want)].view(torch.int32))
    assert torch.equal(packed[256:].cpu(), code)
