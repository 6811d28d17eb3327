"""Scale rules at every power-of-two boundary, the e4m3 scale arithmetic, reciprocals and default global scales."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp4 import formats
from fp4.formats import MXFP4, MXFP8, NVFP4
from fp4.recipe import Recipe, get
from fp4.ref import scales as S

ONE = torch.ones(())


def byte(amax: torch.Tensor, rule: str, fmt: formats.Format = MXFP4) -> torch.Tensor:
    return S.scale_bytes(amax, fmt, Recipe(scale_rule=rule), ONE, ONE)


def boundary_amaxes() -> torch.Tensor:
    """For each exponent: 1, 1.5 and 1.75 times the power of two, and the float32 numbers on both sides."""
    power = torch.arange(1, 255, dtype=torch.int32)[:, None] << 23
    mantissa = torch.tensor([0, 0x200000, 0x400000, 0x600000, 0x700000, 0x7FFFFF], dtype=torch.int32)
    bits = (power + mantissa).flatten()[:, None] + torch.arange(-1, 2, dtype=torch.int32)
    bits = bits.flatten()
    return bits[bits < 0x7F800000].view(torch.float32)


def exact_exponent(amax: float, rule: str, largest: float, mantissa_bits: int) -> int:
    """The rule's exponent in exact arithmetic, by the definition in fp4/recipe.py."""
    a = Fraction(amax)
    emax = math.floor(math.log2(largest))

    def floor_log2(v: Fraction) -> int:
        e = v.numerator.bit_length() - v.denominator.bit_length()
        return e if Fraction(2) ** e <= v else e - 1

    def ceil_log2(v: Fraction) -> int:
        e = floor_log2(v)
        return e if Fraction(2) ** e == v else e + 1

    if rule == "ocp_floor":
        return floor_log2(a) - emax
    if rule == "ceil":
        return ceil_log2(a) - emax
    if rule == "rceil":
        return ceil_log2(a / Fraction(largest))
    if rule == "floor_amax_over_6":
        return floor_log2(a / Fraction(largest))
    step = Fraction(2) ** (floor_log2(a) - mantissa_bits)
    return floor_log2(((a / step + Fraction(1, 2)) // 1) * step) - emax


@pytest.mark.parametrize("rule", ["ocp_floor", "rceil", "ceil", "even", "floor_amax_over_6"])
@pytest.mark.parametrize("fmt", [MXFP4, MXFP8], ids=str)
def test_ue8m0_rules_are_exact_at_every_boundary(rule: str, fmt: formats.Format) -> None:
    amax = boundary_amaxes()
    for a, got in zip(amax.tolist(), byte(amax, rule, fmt).tolist(), strict=True):
        want = exact_exponent(a, rule, fmt.elem.max, fmt.elem.man_bits) + 127
        assert got == min(max(want, 0), 254), (a, rule)


def test_named_values_of_the_rules() -> None:
    """Bug G3: amax 6.0 gives 127 and 1.0 gives 125 under all four usual rules but ceil; 1.75 tells even and floor apart."""
    table = {"ocp_floor": [125, 125, 127], "rceil": [125, 126, 127], "even": [125, 126, 127], "ceil": [125, 126, 128]}
    for rule, want in table.items():
        assert byte(torch.tensor([1.0, 1.75, 6.0]), rule).tolist() == want
    assert byte(torch.tensor([1.0, 1.75, 6.0]), "floor_amax_over_6").tolist() == [124, 125, 127]


@pytest.mark.parametrize("fmt", [MXFP4, MXFP8], ids=str)
def test_orders_between_rules(fmt: formats.Format) -> None:
    """floor <= even <= ceil, floor <= rceil <= ceil; rceil never clips, floor_amax_over_6 clips every block that is not exact."""
    amax = boundary_amaxes()
    amax = amax[amax > 2.0**-110]
    b = {rule: byte(amax, rule, fmt) for rule in ("ocp_floor", "rceil", "ceil", "even", "floor_amax_over_6")}
    for middle in ("rceil", "even"):
        assert bool((b["ocp_floor"] <= b[middle]).all())
        assert bool((b[middle] <= b["ceil"]).all())
    ratio = amax.double() / torch.exp2(b["rceil"].double() - 127)
    safe = b["rceil"] < 254
    assert bool((ratio[safe] <= fmt.elem.max).all())
    assert bool((ratio[safe] > fmt.elem.max / 2).all())
    down = amax.double() / torch.exp2(b["floor_amax_over_6"].double() - 127)
    assert bool((down >= fmt.elem.max).all())


def test_nan_and_infinity_bytes() -> None:
    bad = torch.tensor([float("nan"), float("inf")])
    for fmt, nan in ((MXFP4, 255), (NVFP4, 0x7F), (formats.AMDFP4, 0xFF)):
        assert S.scale_bytes(bad, fmt, Recipe(), ONE, ONE).tolist() == [nan, nan]
    assert S.scale_bytes(bad, MXFP4, Recipe(inf="saturate"), ONE, ONE).tolist() == [255, 254]
    assert S.scale_bytes(bad, NVFP4, Recipe(inf="saturate"), ONE, ONE).tolist() == [0x7F, 0x7E]


def test_division_is_ieee_on_this_torch() -> None:
    """The twin relies on correctly rounded float32 division by a 0-dimensional tensor (not a product with its reciprocal)."""
    a = torch.rand(1 << 16, generator=torch.Generator().manual_seed(0)) * 100
    want = (a.numpy().astype(np.float64) / 6.0).astype(np.float32)
    np.testing.assert_array_equal((a / torch.tensor(6.0)).numpy(), want)
    assert not np.array_equal((a * (torch.tensor(1.0) / 6.0)).numpy(), want)


@given(st.floats(2.0**-100, 2.0**100), st.floats(0.001, 1.0))
def test_scale_orders_agree_to_rounding(amax: float, share: float) -> None:
    """All five orders are amax / (6 g) but for a few roundings; the default g puts the tensor's amax at 448."""
    g, gs = S.default_global_scale(torch.tensor(amax), Recipe())
    block = torch.tensor([amax * share], dtype=torch.float32)
    want = float(block) / (6 * float(g))
    for order in ("amax/(max*g)", "(amax/max)/g", "(amax/max)*gs", "amax*(gs*(1/max))", "gs*(amax*(1/max))"):
        v = S.scale_value(block, Recipe(scale_order=order), g, gs, torch.float32)
        assert float(v) == pytest.approx(want, rel=2.0**-21)
    assert S.scale_bytes(torch.tensor([amax], dtype=torch.float32), NVFP4, Recipe(), g, gs).item() == 0x7E


@given(st.floats(0, 2.0**127, width=32))
def test_default_global_scale_is_finite_and_positive(amax: float) -> None:
    """Bugs G1 and G2: no zero, no infinity, no NaN for any tensor, the all-zero one included."""
    for name in ("default", "te", "torchao", "modelopt", "compressed_tensors", "flashinfer"):
        g, gs = S.default_global_scale(torch.tensor(amax), get(name))
        assert math.isfinite(g)
        assert g > 0
        assert gs > 0
    g, _ = S.default_global_scale(torch.tensor(amax), Recipe())
    assert g == (1.0 if amax == 0 else max(np.float32(amax) / np.float32(2688), np.float32(2.0**-117)))


def test_zero_and_underflow_bytes() -> None:
    amax = torch.tensor([0.0, 2.0**-20, 6.0])
    assert S.scale_bytes(amax, NVFP4, Recipe(), ONE, ONE).tolist() == [0, 0, 0x38]
    assert S.scale_bytes(amax, NVFP4, Recipe(zero_byte=0x38), ONE, ONE).tolist() == [0x38, 0, 0x38]
    assert S.scale_bytes(amax, NVFP4, Recipe(zero_byte=0x20, underflow_byte=0x20), ONE, ONE).tolist() == [0x20, 0x20, 0x38]
    assert S.scale_bytes(amax, NVFP4, Recipe(scale_floor=2.0**-6, zero_byte=8), ONE, ONE).tolist() == [8, 8, 0x38]
    assert S.scale_bytes(torch.tensor([1e9]), NVFP4, Recipe(), ONE, ONE).item() == 0x7E  # saturates, not NaN (triton#11668)


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=str)
def test_factor_is_the_reciprocal_of_the_scale(fmt: formats.Format) -> None:
    b = torch.arange(1, 0x7F if fmt is NVFP4 else 255, dtype=torch.int32)
    amax = torch.ones(b.shape)
    g = torch.tensor(0.37)
    factor, divide = S.block_factor(b, amax, fmt, Recipe(), g, 1 / g)
    value = torch.tensor(fmt.scale.values)[b].double() * (g.double() if fmt is NVFP4 else 1.0)
    assert not divide
    torch.testing.assert_close(factor.double() * value, torch.ones(b.shape, dtype=torch.float64), rtol=2.0**-22, atol=0)
    if fmt is MXFP4:
        assert torch.equal(factor.double() * value, torch.ones(b.shape, dtype=torch.float64))


def test_rcp_approx_table() -> None:
    """Pins the measured table: shares of results one ulp low, exact, one ulp high, and the reciprocals that formats use."""
    table = S.rcp_approx_table(torch.device("cpu"))
    assert table.numel() == 1 << 21
    two = torch.stack([(table >> shift) & 3 for shift in (0, 2, 4, 6)])
    share = [(two == v).float().mean().item() for v in range(4)]
    assert share == pytest.approx([0.0447, 0.8679, 0.0875, 0.0], abs=5e-4)
    x = torch.tensor([6.0, 448.0, 2688.0, 1.0, 0.5, *(1 + m / 8 for m in range(8))])
    assert torch.equal(S.rcp_approx(x), torch.reciprocal(x))
    assert S.rcp_approx(torch.tensor([0.0, 1e-40])).tolist() == [math.inf, math.inf]
    assert S.rcp_approx(torch.tensor([2.0**127])).item() == 0.0  # 2^-127 is subnormal and flushed
    x = torch.rand(1 << 16, generator=torch.Generator().manual_seed(1)) + 1
    assert (S.rcp_approx(x).view(torch.int32) - torch.reciprocal(x).view(torch.int32)).abs().max() == 1
    assert torch.equal(S.rcp_approx(x * 2.0**40), S.rcp_approx(x) * 2.0**-40)


@pytest.mark.parametrize("rule", ["amax/L", "L/amax", "L*(1/amax)"])
@pytest.mark.parametrize("amax", [2.0**-149, 2.0**-140, 2.0**-127, 1e-38])
def test_scales_of_a_nearly_zero_tensor_are_finite(rule: str, amax: float) -> None:
    """1 / g is infinite below 2^-128 and 2688 / amax below 2^-116, floor or not: a zero block times infinity is NaN."""
    recipe = get("default").replace(global_rule=rule, global_floor=0.0)
    g, gs = S.default_global_scale(torch.tensor(amax), recipe)
    assert torch.isfinite(gs) and gs > 0  # noqa: PT018
    assert torch.isfinite(g) and g >= 0  # noqa: PT018


@pytest.mark.parametrize("fmt", [MXFP4, MXFP8], ids=str)
def test_the_floor_holds_where_the_quotient_is_a_number(fmt: formats.Format) -> None:
    """triton_kernels: byte 0 is for a quotient of zero. float32(amax / largest) next to the smallest subnormal, by numpy."""
    bits = np.arange(1, 512, dtype=np.int32)
    amax = bits.view(np.float32)
    quotient = amax / np.float32(fmt.elem.max)
    got = S.scale_bytes(torch.from_numpy(amax), fmt, get("triton_kernels_v2"), ONE, ONE).numpy()
    assert 0 < (quotient == 0).sum() < len(bits) // 2
    np.testing.assert_array_equal(got == 0, quotient == 0)
