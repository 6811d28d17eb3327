"""quantize, dequantize, fake_quantize, to_layout: torch twin == golden Triton byte for byte, values, errors, torch.library, layouts."""

from __future__ import annotations

import dataclasses
import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fp4
from fp4 import formats
from fp4.errors import FormatMismatch, Fp4Error, LayoutError, LayoutMismatch
from fp4.formats import Format
from fp4.recipe import CHOICES, Recipe
from fp4.ref import pace
from fp4.ref import quantize as ref
from fp4.ref import triton_quantize as golden
from fp4.ref.scales import default_global_scale
from fp4.ref.triton_amax import finite_amax, global_scale
from fp4.testing import assert_same_bytes

# 1 / 0 is meant (an underflowed scale); numpy, which runs the interpreter, warns of it
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = [formats.get(n) for n in formats.names()]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gen(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=gen(seed)).to(dtype)


# ---- the generator: ties, boundaries, specials (bug L3: random numbers never hit a tie) -------------------------------------------


def tie_aimed(shape: tuple[int, ...], fmt: Format, seed: int) -> torch.Tensor:
    """Blocks whose maximum fixes a known scale and whose other elements lie on, and one float32 step beside, the midpoints of codes."""
    g = gen(seed)
    values = np.unique(np.abs(fmt.elem.values[np.isfinite(fmt.elem.values)]))
    middle = torch.tensor((values[1:] + values[:-1]) / 2, dtype=torch.float32)
    n = math.prod(shape) // fmt.block
    x = middle[torch.randint(0, len(middle), (n, fmt.block), generator=g)]
    step = torch.randint(-1, 2, x.shape, generator=g, dtype=torch.int32) * (torch.rand(x.shape, generator=g) < 0.3)
    x = (x.view(torch.int32) + step.to(torch.int32)).view(torch.float32)
    x[:, 0] = fmt.elem.max
    x = x * torch.where(torch.rand(x.shape, generator=g) < 0.5, -1.0, 1.0)
    return (x * torch.exp2(torch.randint(-8, 9, (n, 1), generator=g).float())).reshape(shape)


def special(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Normal data of many magnitudes with zeros of both signs, subnormals, huge values, NaN, infinities and whole zero blocks."""
    g = gen(seed)
    x = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-30, 30, (*shape[:-1], 1), generator=g).float())
    values = torch.tensor([0.0, -0.0, 0.25, 5.0, -6.0, 1e-38, -1e-40, 3e38, 448.0, 65504.0, math.inf, -math.inf, math.nan])
    pick = values[torch.randint(0, len(values), shape, generator=g)]
    x = torch.where(torch.rand(shape, generator=g) < 0.02, pick, x)
    return torch.where(torch.rand((*shape[:-1], 1), generator=g) < 0.1, torch.zeros(()), x)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Any combination of choices that does not raise; half of the draws are presets."""
    if draw(st.booleans()):
        return fp4.recipes[draw(st.sampled_from(fp4.recipes.names()))]
    free = {name: draw(st.sampled_from([v for v in legal if v != "error"])) for name, legal in CHOICES.items()}
    return Recipe(
        **free,
        ue8m0_floor=draw(st.sampled_from([0, 1])),
        ue8m0_zero=draw(st.booleans()),
        scale_floor=draw(st.sampled_from([0.0, 2.0**-9, 2.0**-6])),
        zero_byte=draw(st.sampled_from([0, 0x38, 0x20])),
        underflow_byte=draw(st.sampled_from([0, 0x20])),
        amax_floor=draw(st.sampled_from([0.0, 1e-4])),
        flush=draw(st.booleans()),
        scale_max=draw(st.sampled_from([448.0, 256.0])),
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[torch.Tensor, Format, torch.Tensor | None]:
    """x of any dtype, rank, stride pattern and content, a format, and a second-level scale or None."""
    fmt = draw(st.sampled_from(FORMATS))
    lead = draw(st.sampled_from([(), (1,), (7,), (3, 5), (2, 3, 4)]))
    shape = (*lead, fmt.block * draw(st.sampled_from([1, 2, 5])))
    seed = draw(st.integers(0, 2**31))
    x = tie_aimed(shape, fmt, seed) if draw(st.booleans()) else special(shape, seed)
    x = x.to(draw(st.sampled_from(DTYPES)))
    view = draw(st.sampled_from(["plain", "wide", "transposed", "strided"]))
    if view == "wide":  # rows with a gap
        x = torch.cat((x, torch.full_like(x, math.nan)), -1)[..., : shape[-1]]
    elif view == "transposed" and x.ndim >= 2:
        x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    elif view == "strided" and x.ndim >= 3:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    g: torch.Tensor | None = None
    if fmt.tensor_scale and draw(st.booleans()):
        size = (x.shape[0],) if x.ndim >= 3 and draw(st.booleans()) else ()
        g = torch.rand(size, generator=gen(seed)) * draw(st.sampled_from([1.0, 1e-3, 50.0])) + 1e-5
    return x, fmt, g


def both(x: torch.Tensor, fmt: Format, recipe: Recipe, g: torch.Tensor | None) -> None:
    g, gs = ref.resolve_global_scale(x, fmt, recipe, g, None, False)
    codes, scale = ref.quantize_blocks(x, fmt, recipe, g, gs)
    on = [None if t is None else t.to(DEVICE) for t in (g, gs)]
    t_codes, t_scale = golden.quantize_blocks(x.to(DEVICE), fmt, recipe, *on)
    assert_same_bytes(t_scale, scale, elem=fmt.scale, name=f"scale of {fmt} {recipe}")
    assert_same_bytes(t_codes, codes, name=f"codes of {fmt} {recipe}")
    for dtype in DTYPES:
        want = ref.dequantize_blocks(codes, scale, g, fmt, dtype)
        got = golden.dequantize_blocks(t_codes, t_scale, on[0], fmt, dtype).cpu()
        assert torch.equal(torch.isnan(got), torch.isnan(want))
        assert_same_bytes(got.nan_to_num(0.5), want.nan_to_num(0.5), name=f"values of {fmt} {dtype}")


@given(problems(), recipes())
def test_torch_twin_equals_golden_triton(problem: tuple[torch.Tensor, Format, torch.Tensor | None], recipe: Recipe) -> None:
    both(*problem[:2], recipe, problem[2])


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("name", fp4.recipes.names())
def test_every_preset_on_ties_and_specials(fmt: Format, name: str) -> None:
    x = torch.cat((tie_aimed((24, 2 * fmt.block), fmt, 1), special((24, 2 * fmt.block), 2)))
    both(x, fmt, fp4.recipes[name], None)
    both(x.to(torch.bfloat16), fmt, fp4.recipes[name], None)


# ---- against exact arithmetic ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_default_recipe_against_float64(fmt: Format) -> None:
    """Scale byte and codes recomputed in float64 with ml_dtypes' rounding: the rule itself, not a second copy of the code."""
    import ml_dtypes

    x = randn(64, 128, seed=4)
    if fmt.scale.name == "ue8m0":  # exact for ties too; elsewhere a tie is decided by the float32 rounding of 1 / (d * g)
        x = torch.cat((tie_aimed((64, 128), fmt, 3), x))
    x = x.to(torch.bfloat16)
    q = fp4.quantize(x, fmt)
    blocks = x.double().numpy().reshape(-1, fmt.block)
    amax = np.abs(blocks).max(-1)
    g = float(q.global_scale) if q.global_scale is not None else 1.0
    if fmt.scale.name == "ue8m0":
        scale = 2.0 ** np.ceil(np.log2(amax / fmt.elem.max))
    else:
        v = (amax / (6 * g)).astype(np.float32)
        near = v.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) if fmt.scale.name == "e4m3" else None
        scale = near * g if near is not None else fp4.ref.codes.decode_ue5m3(q.scale).double().numpy().reshape(-1)
    got = torch.tensor(fmt.scale.values)[q.scale.int()].double().numpy().reshape(-1) * g
    same = got == scale
    assert same.mean() > 0.98  # ratios of bf16 numbers often are e4m3 ties, where one float32 rounding decides
    np.testing.assert_allclose(got, scale, rtol=2.0**-3, atol=2.0**-9 * g)  # one code, also below 2^-6
    kind = {"e2m1": ml_dtypes.float4_e2m1fn, "e4m3": ml_dtypes.float8_e4m3fn}[fmt.elem.name]
    top = fmt.elem.max
    y = np.clip(blocks / got[:, None], -top, top)
    want = y.astype(np.float32).astype(kind).astype(np.float64)
    values = fp4.dequantize(q).double().numpy().reshape(-1, fmt.block) / got[:, None]
    differs = np.abs(values - want) > 1e-6 * top
    assert differs.mean() < 2e-3  # only where 1 / (d * g) is rounded and x * (1 / ..) lands on a tie
    if fmt.scale.name == "ue8m0":
        assert not differs.any()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_against_float64(fmt: Format, dtype: torch.dtype) -> None:
    """Every code with every finite scale byte: elem * (scale * g) in float32, rounded once to dtype."""
    finite = [b for b in range(256) if math.isfinite(fmt.scale.values[b])]
    codes = torch.arange(256).to(torch.uint8).repeat(len(finite), 1)[:, : fmt.block // fmt.codes_per_byte * 2]
    codes = torch.stack([torch.roll(codes[0], -i) for i in range(len(finite))]) if fmt.codes_per_byte == 1 else codes
    k = codes.shape[1] * fmt.codes_per_byte
    scale = torch.tensor(finite, dtype=torch.uint8)[:, None].repeat(1, k // fmt.block)
    g = torch.tensor(0.37) if fmt.tensor_scale else None
    q = fp4.QuantizedTensor(fmt, codes, scale, g)
    flat = fp4.ref.codes.unpack_nibbles(codes) if fmt.codes_per_byte == 2 else codes
    s = torch.tensor(fmt.scale.values)[scale.int()]
    s = (s.double() * (g.double() if g is not None else 1.0)).float()
    want = (torch.tensor(fmt.elem.values)[flat.int()].double() * s.double().repeat_interleave(fmt.block, 1)).float().to(dtype)
    got = fp4.dequantize(q, dtype)
    nan = torch.isnan(want)
    assert torch.equal(torch.isnan(got), nan)
    assert_same_bytes(got[~nan], want[~nan])


def test_worked_row_of_the_field() -> None:
    """The hand-written row that compressed-tensors, ModelOpt, torchao and transformers decode alike (checkpoints specification 1)."""
    packed = torch.tensor(list(bytes.fromhex("1032547698BADCFEEFCDAB8967452301")), dtype=torch.uint8).reshape(1, 16)
    scale = torch.tensor([[0x38, 0x30]], dtype=torch.uint8)
    first = [0, 0.125, 0.25, 0.375, 0.5, 0.75, 1, 1.5, -0.0, -0.125, -0.25, -0.375, -0.5, -0.75, -1, -1.5]
    got = fp4.dequantize(fp4.QuantizedTensor("nvfp4", packed, scale, torch.tensor(0.25)))[0].tolist()
    assert got == first + [v / 2 for v in reversed(first)]
    mx = fp4.dequantize(fp4.QuantizedTensor("mxfp4", packed, torch.tensor([[125]], dtype=torch.uint8)))[0].tolist()
    assert mx == first + list(reversed(first))


@pytest.mark.parametrize("shape", ["4x64", "130x128"])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_h200_dequantised_values(fmt: str, shape: str) -> None:
    """FlashInfer 0.7.4's dequantiser, run on an H200, global scale 0.37 for NVFP4: the same float32 bits."""
    z = np.load(Path(__file__).parent / "data/presets/flashinfer_dequant_h200.npz")
    codes, scale, want = (torch.from_numpy(z[f"{fmt}_{shape}_{n}"]) for n in ("codes", "scale", "out"))
    g = torch.tensor(0.37) if fmt == "nvfp4" else None
    assert_same_bytes(fp4.dequantize(fp4.QuantizedTensor(fmt, codes, scale, g)), want)
    on = None if g is None else g.to(DEVICE)
    assert_same_bytes(golden.dequantize_blocks(codes.to(DEVICE), scale.to(DEVICE), on, formats.get(fmt)), want)


# ---- properties -------------------------------------------------------------------------------------------------------------------


@given(st.sampled_from(FORMATS), st.sampled_from(DTYPES), st.integers(0, 2**31))
def test_quantising_the_result_again_changes_nothing(fmt: Format, dtype: torch.dtype, seed: int) -> None:
    """Values of the format survive when the same g is used: codes and values are a fixed point."""
    q = fp4.quantize(randn(4, 2 * fmt.block, seed=seed).to(dtype), fmt)
    again = fp4.quantize(fp4.dequantize(q), fmt, global_scale=q.global_scale)
    assert torch.equal(fp4.dequantize(again), fp4.dequantize(q))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_error_bounds(fmt: Format) -> None:
    """|x - x'| is at most half the widest gap times the scale, plus the scale's own rounding (elements above 6 d saturate)."""
    x = randn(256, 512, seed=7)
    q = fp4.quantize(x, fmt)
    error = (fp4.dequantize(q) - x).reshape(-1, fmt.block).abs().amax(-1)
    amax = x.reshape(-1, fmt.block).abs().amax(-1)
    assert bool((error <= amax * (1 / 6 + 1 / 16 if fmt.elem.bits == 4 else 1 / 16)).all())
    snr = 10 * math.log10(float(x.square().sum() / (fp4.dequantize(q) - x).square().sum()))
    low, high = {"nvfp4": (20.2, 20.7), "mxfp4": (18.6, 18.9), "mxfp8": (30, 33), "nvfp4_b32": (19, 20.5), "amdfp4": (20.2, 20.8)}[fmt.name]
    assert low < snr < high  # features specification 2: 20.44 dB and 18.75 dB for N(0, 1)


def test_four_over_six_gains_what_the_survey_says() -> None:
    """Features specification 2: 20.44 dB by round to nearest, 21.21 / 21.08 / 20.98 dB by squares / magnitudes / maximum, for N(0, 1)."""
    x = randn(512, 1024, seed=12)
    base = fp4.recipes["fouroversix"]
    for rule, want in (("off", 20.44), ("mse", 21.21), ("mae", 21.08), ("abs_max", 20.98)):
        y = fp4.dequantize(fp4.quantize(x, "nvfp4", base.replace(four_over_six=rule)))
        assert 10 * math.log10(float(x.square().sum() / (y - x).square().sum())) == pytest.approx(want, abs=0.06)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2, -2])
def test_axis(fmt: Format, axis: int) -> None:
    x = randn(32, 64, 96, seed=8)
    q = fp4.quantize(x, fmt, axis=axis)
    assert q.shape == x.shape
    moved = fp4.quantize(x.movedim(axis, -1).contiguous(), fmt)
    assert_same_bytes(q.codes, moved.codes)
    y = fp4.dequantize(q)
    assert y.shape == x.shape
    assert torch.equal(y, fp4.dequantize(moved).movedim(-1, axis))


def test_global_scale_per_expert() -> None:
    x = randn(3, 32, 64, seed=9) * torch.tensor([1.0, 10.0, 0.01])[:, None, None]
    q = fp4.quantize(x, "nvfp4", global_scale="per_expert")
    assert q.global_scale is not None
    assert q.global_scale.shape == (3,)
    for e in range(3):
        one = fp4.quantize(x[e], "nvfp4")
        assert one.global_scale == q.global_scale[e]
        assert_same_bytes(q.codes[e], one.codes)
        assert_same_bytes(q.scale[e], one.scale)
        assert torch.equal(fp4.dequantize(q)[e], fp4.dequantize(one))
    one_for_all = fp4.quantize(x, "nvfp4")
    assert one_for_all.global_scale is not None
    assert one_for_all.global_scale.shape == ()
    given_each = fp4.quantize(x, "nvfp4", global_scale=q.global_scale)
    assert_same_bytes(given_each.codes, q.codes)
    assert_same_bytes(golden.quantize_blocks(x.to(DEVICE), fp4.NVFP4, Recipe(), q.global_scale.to(DEVICE))[0], q.codes)
    empty = fp4.quantize(x[:0], "nvfp4", global_scale="per_expert")
    assert empty.codes.shape == (0, 32, 32)


@pytest.mark.parametrize("m", [1, 3, 16, 128])
def test_bf16_global_scale_is_taken_by_value(m: int) -> None:
    """Bug A7 (flashinfer#3398): 420.0 as bf16 and as f32 give the same; int and f64 are refused."""
    x = randn(m, 64, seed=m, dtype=torch.bfloat16)
    want = fp4.quantize(x, "nvfp4", encode_scale=torch.tensor(420.0))
    got = fp4.quantize(x, "nvfp4", encode_scale=torch.tensor(420.0, dtype=torch.bfloat16))
    assert_same_bytes(got.codes, want.codes)
    assert_same_bytes(got.scale, want.scale)
    assert bool((got.scale != 0).any())
    g = fp4.quantize(x, "nvfp4", global_scale=torch.tensor(0.25, dtype=torch.bfloat16))
    assert g.global_scale is not None
    assert g.global_scale.dtype == torch.float32
    for bad in (torch.tensor(420), torch.tensor(420.0, dtype=torch.float64), 420):
        with pytest.raises(FormatMismatch, match="need a float32 multiplier"):
            fp4.quantize(x, "nvfp4", global_scale=bad)


def test_subnormal_second_level_keeps_block_scales() -> None:
    """Bug A8: g = 2e-5 stays beside the block scales 0x38..0x7E; nothing is folded into them."""
    scale = torch.arange(0x38, 0x7F, dtype=torch.uint8)[:, None]
    q = fp4.QuantizedTensor("nvfp4", torch.full((scale.shape[0], 8), 0x22, dtype=torch.uint8), scale, torch.tensor(2e-5))
    want = fp4.ref.codes.decode_e4m3(scale) * torch.tensor(2e-5)
    assert torch.equal(fp4.dequantize(q), want.expand(-1, 16))


# ---- zeros, NaN, infinity, empty ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", fp4.recipes.names())
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_zero_tensor(name: str, fmt: Format, dtype: torch.dtype) -> None:
    """Bug G1 (a): finite scales, values exactly zero, whatever the preset."""
    q = fp4.quantize(torch.zeros(32, 64, dtype=dtype), fmt, name)
    assert bool(torch.isfinite(torch.tensor(fmt.scale.values)[q.scale.int()]).all())
    assert q.global_scale is None or math.isfinite(q.global_scale)
    assert bool((fp4.dequantize(q) == 0).all())


@pytest.mark.parametrize("name", fp4.recipes.names())
def test_large_bf16_makes_no_nan(name: str) -> None:
    """Bug G1 (b): amax 1e5."""
    x = randn(8, 64, seed=1) * 3e4
    x[0, 0] = 1e5
    for fmt in ("nvfp4", "mxfp4", "mxfp8"):
        assert bool(torch.isfinite(fp4.dequantize(fp4.quantize(x.to(torch.bfloat16), fmt, name))).all())


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_block_is_contained(fmt: Format, bad: float) -> None:
    """Default recipe: the block reads NaN, every other block is as if the value had not been there."""
    x = randn(2, 3 * fmt.block, seed=2)
    clean = x.clone()
    clean[1, fmt.block : 2 * fmt.block] = 0
    x[1, fmt.block + 3] = bad
    got, want = fp4.quantize(x, fmt), fp4.quantize(clean, fmt)
    nan = torch.isnan(fp4.dequantize(got))
    assert bool(nan[1, fmt.block : 2 * fmt.block].all())
    assert int(nan.sum()) == fmt.block
    if bool(x[torch.isfinite(x)].abs().max() == clean.abs().max()):
        assert torch.equal(fp4.dequantize(got)[~nan], fp4.dequantize(want)[~nan])


def test_error_recipe_refuses_before_writing() -> None:
    x = randn(4, 64, seed=3)
    strict = Recipe(nan="error", inf="error")
    assert_same_bytes(fp4.quantize(x, "nvfp4", strict).codes, fp4.quantize(x, "nvfp4").codes)
    for bad in (math.nan, math.inf):
        y = x.clone()
        y[2, 5] = bad
        for run in (fp4.quantize, lambda t, f, r: golden.quantize_blocks(t, formats.get(f), r)):
            with pytest.raises(Fp4Error, match=r"row 2, column 5"):
                run(y, "mxfp4", strict)
    y[2, 5] = math.inf
    assert not torch.isnan(fp4.dequantize(fp4.quantize(y, "mxfp4", Recipe(nan="error", inf="saturate")))).any()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(0, 64), (0, 3, 64), (2, 0, 64)])
def test_zero_tokens(fmt: Format, shape: tuple[int, ...]) -> None:
    q = fp4.quantize(torch.zeros(shape, dtype=torch.bfloat16), fmt)
    assert q.shape == shape
    assert fp4.dequantize(q).shape == shape
    assert golden.quantize_blocks(torch.zeros(shape, device=DEVICE), fmt, Recipe())[0].shape == q.codes.shape
    assert golden.dequantize_blocks(q.codes.to(DEVICE), q.scale.to(DEVICE), None, fmt).shape == shape


def test_zero_blocks_keep_the_sign_of_zero_and_bytes() -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 17] = 6.0, -0.0
    q = fp4.quantize(x, "nvfp4")
    assert q.scale.tolist() == [[0x7E, 0]]
    assert fp4.ref.codes.unpack_nibbles(q.codes)[0, 16:18].tolist() == [0, 8]


# ---- errors -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: fp4.quantize(torch.zeros(2, 72)), "k = 72 is not a multiple of the nvfp4 block 16; pad k to 80"),
        (lambda: fp4.quantize(torch.zeros(2, 48), "mxfp4"), "pad k to 64"),
        (lambda: fp4.quantize(torch.zeros(2, 64, dtype=torch.int32)), "x is torch.int32; need float32, bfloat16 or float16"),
        (lambda: fp4.quantize(torch.zeros(2, 64, dtype=torch.float64)), "round it to float32 yourself"),
        (lambda: fp4.quantize([1.0] * 16), "x is list; need a torch.Tensor"),
        (lambda: fp4.quantize(torch.zeros(())), "x is a scalar"),
        (lambda: fp4.quantize(torch.zeros(4, 0)), "is empty; need at least one block of 16"),
        (lambda: fp4.quantize(torch.zeros(2, 64), axis=2), r"axis 2 is outside shape \[2, 64\]"),
        (lambda: fp4.quantize(torch.zeros(2, 64), "fp4"), r"'fp4' is not known; did you mean '.*fp4'.*\? need one of nvfp4"),
        (
            lambda: fp4.quantize(torch.zeros(2, 64), recipe="TE"),
            r"'TE' is not known; did you mean 'te'\? fp4.recipes.names\(\) lists",
        ),
        (lambda: fp4.quantize(torch.zeros(2, 64), "mxfp4", global_scale=1.0), "mxfp4 has no global scale"),
        (lambda: fp4.quantize(torch.zeros(2, 64), global_scale="per_expert"), "need a multiplier, None, or 'per_expert'"),
        (lambda: fp4.quantize(torch.zeros(3, 2, 64), global_scale=torch.ones(2)), r"need \[\] or one value an expert, \[3\]"),
        (lambda: fp4.dequantize(torch.zeros(2, 64)), "got Tensor; need a QuantizedTensor"),
        (lambda: fp4.dequantize(fp4.quantize(torch.zeros(2, 64)), torch.int8), "need torch.float32, torch.bfloat16 or torch.float16"),
        (lambda: fp4.to_layout([1], "sf_128x4"), "got list; need a byte tensor"),
        (lambda: fp4.to_layout(torch.zeros(128, 4), "sf_128x4"), "need raw bytes"),
    ],
)
def test_errors_say_what_to_do(call: Any, text: str) -> None:
    with pytest.raises(Fp4Error, match=text):
        call()


# ---- layouts ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["plain", "sf_128x4", "sf_8x4", "cdna4_sf", "sm90_mixed_sf", "deepgemm_sf", "up_gate_pairs"])
@pytest.mark.parametrize("shape", [(128, 256), (2, 96, 128), (130, 96), (3, 7, 4112), (1, 2064), (2, 250, 1008)])
def test_scales_written_straight_into_a_layout(layout: str, shape: tuple[int, ...]) -> None:
    """The kernel's own stores, torch's apply and the restored tensor agree; padding is the layout's fill.

    Blocks go in the order of rows or in that of the stored scales (``STORED_BYTES``): both are compared.
    """
    fmt, x = fp4.NVFP4, randn(*shape, seed=5)
    plain, order = fp4.quantize(x, fmt), fp4.layouts[layout]
    try:
        want = order.apply(plain.scale)
    except LayoutError:
        for run in (
            lambda: fp4.quantize(x, fmt, scale_layout=layout),
            lambda: golden.quantize_blocks(x, fmt, Recipe(), scale_layout=order),
        ):
            with pytest.raises(LayoutError):
                run()
        return
    q = fp4.quantize(x, fmt, scale_layout=layout)
    assert_same_bytes(q.scale.data, want)
    assert_same_bytes(q.restore().scale, plain.scale)
    g, gs = (t.to(DEVICE) for t in ref.resolve_global_scale(x, fmt, Recipe(), None, None, False))
    filled = dataclasses.replace(order, fill=0xA5)
    for in_stored_order in (math.inf, golden.STORED_BYTES, 0):
        with pytest.MonkeyPatch.context() as m:
            m.setattr(golden, "STORED_BYTES", in_stored_order)
            codes, scale = golden.quantize_blocks(x.to(DEVICE), fmt, Recipe(), g, gs, scale_layout=filled)
        assert_same_bytes(codes, plain.codes)
        assert_same_bytes(scale, filled.apply(plain.scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("fmt", "layout"), [(fp4.NVFP4, "sf_128x4"), (fp4.MXFP4, "sf_128x4"), (fp4.NVFP4, "sf_8x4")], ids=str)
def test_stored_scales_by_programs_of_the_device(fmt: Format, layout: str, dtype: torch.dtype) -> None:
    """As many blocks a program as on a GPU (the interpreter takes all at once): borders within tiles and experts, padding."""
    x, order = randn(3, 122, 4 * fmt.block, seed=6).to(dtype), dataclasses.replace(fp4.layouts[layout], fill=0xA5)
    g, gs = ref.resolve_global_scale(x, fmt, Recipe(), None, None, False)
    codes, plain = ref.quantize_blocks(x, fmt, Recipe(), g, gs)
    on = [None if t is None else t.to(DEVICE) for t in (g, gs)]
    tile = golden.PAIR_BLOCKS_STORED[0] * fmt.block
    got, scale = golden.quantize_blocks(x.to(DEVICE), fmt, Recipe(), *on, scale_layout=order, tile=tile)
    assert_same_bytes(got, codes)
    assert_same_bytes(scale, order.apply(plain))


def test_kernels_refuse_operands_of_another_device() -> None:
    """A host pointer in a launch is an opaque error of Triton (the first run on a GPU had one); the wrappers say which operand it is."""
    x, there = randn(4, 64).to(DEVICE), torch.ones((), device="meta")
    for name, args in (("global_scale", (there, None)), ("encode_scale", (None, there))):
        with pytest.raises(FormatMismatch, match=f"quantize: {name} is on meta, the data on {DEVICE}"):
            golden.quantize_blocks(x, fp4.NVFP4, Recipe(), *args)
    codes, scale = golden.quantize_blocks(x, fp4.NVFP4, Recipe())
    for name, args in (("scale", (scale.to("meta"), None)), ("global_scale", (scale, there))):
        with pytest.raises(FormatMismatch, match=f"dequantize: {name} is on meta"):
            golden.dequantize_blocks(codes, *args, fp4.NVFP4)


def test_second_level_scales_follow_the_codes() -> None:
    """A scale read on the host beside codes on a device must not reach a kernel as a host pointer."""
    codes, scale = torch.zeros(2, 8, dtype=torch.uint8, device="meta"), torch.zeros(2, 1, dtype=torch.uint8, device="meta")
    q = fp4.QuantizedTensor("nvfp4", codes, scale, torch.tensor(0.5), input_scale=torch.tensor(0.5))
    assert q.global_scale.device == q.input_scale.device == codes.device


def test_a_stored_tensor_is_not_stored_twice() -> None:
    """Bug A2 (modular#6600): a second swizzle is an error, and a StoredQuantized is no QuantizedTensor."""
    q = fp4.quantize(randn(128, 64))
    stored = fp4.to_layout(q.scale, "sf_128x4")
    assert_same_bytes(stored.restore(), q.scale)
    assert fp4.to_layout(stored, "sf_128x4") is stored
    with pytest.raises(LayoutMismatch, match="stored as sf_128x4; need plain bytes"):
        fp4.to_layout(stored, "sf_8x4")
    with pytest.raises(FormatMismatch, match=r"call \.restore\(\) first"):
        fp4.dequantize(fp4.quantize(randn(128, 64), scale_layout="sf_128x4"))


# ---- torch.library, compile, gradients, memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("quantize", lambda: (randn(4, 64), "nvfp4", "default", None, None, False)),
        ("quantize", lambda: (randn(2, 4, 64), "nvfp4", "te", None, None, True)),
        ("quantize", lambda: (randn(4, 64), "mxfp4", Recipe(tie="away").key, None, None, False)),
        ("fake_quantize", lambda: (randn(4, 64).requires_grad_(), "mxfp8", "default", None, None, False)),
        ("dequantize", lambda: (*_parts(randn(4, 64)), "nvfp4", torch.bfloat16)),
        ("quantize_stored", lambda: (randn(130, 96), "nvfp4", "default", None, None, False, "sf_128x4")),
        ("quantize_stored", lambda: (randn(2, 3, 96), "nvfp4", "te", None, None, True, "sf_8x4")),
        ("quantize_stored", lambda: (randn(96), "mxfp4", "default", None, None, False, "plain")),
        ("quantize_stored", lambda: (randn(2, 130, 96), "nvfp4", "default", torch.tensor([0.5, 2.0]), None, False, "sf_128x4")),
        ("to_layout", lambda: (fp4.quantize(randn(128, 64)).scale, "sf_128x4")),
        ("to_layout", lambda: (fp4.quantize(randn(128, 64)).scale, "plain")),
    ],
)
def test_opcheck(op: str, arguments: Any) -> None:
    torch.library.opcheck(getattr(torch.ops.fp4, op).default, arguments())


def _parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    q = fp4.quantize(x)
    return q.codes, q.scale, q.global_scale


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_compile_fullgraph(fmt: str) -> None:
    """One graph, no break, any batch size; quantize returns its object from inside the graph too."""
    fake = torch.compile(lambda x: fp4.fake_quantize(x * 2, fmt) + 1, fullgraph=True, backend="aot_eager", dynamic=True)
    round_trip = torch.compile(lambda x: fp4.dequantize(fp4.quantize(x, fmt, "te")), fullgraph=True, backend="aot_eager")
    for m in (4, 7):
        x = randn(m, 64, seed=m)
        assert torch.equal(fake(x), fp4.fake_quantize(x * 2, fmt) + 1)
        assert torch.equal(round_trip(x), fp4.dequantize(fp4.quantize(x, fmt, "te")))


@pytest.mark.parametrize("given", [None, 0.25, torch.tensor(0.25), "per_expert"])
def test_stored_scales_compile_fullgraph(given: Any) -> None:
    """Bug K1: the stored path is one op whose fake knows the padding; the graph's own results are the eager bytes, whatever the rows."""
    lead = (2,) if isinstance(given, str) else ()

    def run(x: torch.Tensor) -> Any:
        q = fp4.quantize(x * 2, "nvfp4", global_scale=given, scale_layout="sf_128x4")
        return q.codes + 0, q.scale.data + 0, q.global_scale + 0

    nodes: list[str] = []

    def look(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nodes.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function" and "fp4" in str(n.target))
        return graph.forward

    torch.compile(run, fullgraph=True, backend=look)(randn(*lead, 4, 64))
    assert nodes == ["fp4.quantize_stored"]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (4, 130, 300):
        x = randn(*lead, rows, 64, seed=rows)
        for got, want in zip(compiled(x), run(x), strict=True):
            assert got.shape == want.shape
            assert torch.equal(got, want)


def test_stored_scales_stay_dynamic() -> None:
    """The fake computes with symbolic rows: one graph serves them all."""
    from torch._dynamo.testing import CompileCounter

    frames = CompileCounter()
    run = torch.compile(lambda x: fp4.quantize(x, scale_layout="sf_128x4").scale.data + 1, fullgraph=True, backend=frames, dynamic=True)
    for rows in (5, 130, 300):
        assert torch.equal(run(randn(rows, 64)), fp4.quantize(randn(rows, 64), scale_layout="sf_128x4").scale.data + 1)
    assert frames.frame_count == 1


def test_stored_in_a_layout_without_a_name_compiles() -> None:
    chain = fp4.layouts["plain"] >> fp4.layouts["sf_128x4"]
    run = torch.compile(lambda x: fp4.quantize(x, "nvfp4", scale_layout=chain).scale.data + 1, fullgraph=True, backend="aot_eager")
    x = randn(128, 64)
    assert torch.equal(run(x), fp4.quantize(x, "nvfp4", scale_layout="sf_128x4").scale.data + 1)


class _Host(TorchDispatchMode):
    """Lists what would make the host wait for the device, or end a graph capture: values read, copies between host and device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        devices = {t.device.type for t in (*torch.utils._pytree.tree_leaves((args, kwargs)), out) if isinstance(t, torch.Tensor)}
        if len(devices) > 1 or func is torch.ops.aten._local_scalar_dense.default:
            self.seen.append(str(func))
        return out


@pytest.mark.parametrize("stored", [None, "sf_128x4"])
@pytest.mark.parametrize("given", [None, 0.25, "tensor", "per_expert"])
@pytest.mark.parametrize("recipe", ["default", "te", "compressed_tensors", "torchao"])
def test_no_hidden_wait_for_the_device(monkeypatch: pytest.MonkeyPatch, recipe: str, given: Any, stored: str | None) -> None:
    """All of quantize but the kernel launch, on a device that is not there: nothing is read back, nothing comes from the host."""

    def launch(x: torch.Tensor, fmt: Any, how: Any, g: Any, gs: Any, scale_layout: Any = None) -> Any:
        codes = x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8)
        shape = (*x.shape[:-1], x.shape[-1] // fmt.block)
        return codes, x.new_empty(shape if scale_layout is None else (x.shape[0], scale_layout.nbytes(shape[-2:])), dtype=torch.uint8)

    monkeypatch.setattr(golden, "quantize_blocks", launch)
    with FakeTensorMode(allow_non_fake_inputs=False), _Host() as host:
        x = torch.empty(2, 130, 64, device="cuda", dtype=torch.bfloat16)
        g = torch.empty(2, device="cuda") if given == "tensor" else given
        q = fp4.quantize(x, "nvfp4", recipe, g, scale_layout=stored)
        assert q.codes.device.type == "cuda"
    assert host.seen == []


def test_straight_through_gradient() -> None:
    x = randn(4, 64).requires_grad_()
    fp4.fake_quantize(x, "nvfp4").square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * fp4.fake_quantize(x.detach(), "nvfp4"))


def test_fake_quantize_is_dequantize_of_quantize() -> None:
    for fmt, dtype, axis in itertools.product(FORMATS, DTYPES, (-1, 0)):
        x = randn(64, 64, seed=6).to(dtype)
        got = fp4.fake_quantize(x, fmt, axis=axis)
        assert got.dtype == dtype
        assert torch.equal(got, fp4.dequantize(fp4.quantize(x, fmt, axis=axis), dtype))


@pytest.mark.parametrize("shape", [(37, 160), (3, 5, 160)])
def test_64_bit_offsets_give_the_same_bytes(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels for tensors beyond 2^31 elements, on small ones; strided too."""
    x = randn(*shape, seed=11)
    wide = torch.cat((x, x), -1)[..., :160]
    want = fp4.quantize(x, "mxfp4")
    monkeypatch.setattr(golden, "WIDE_FROM", 0)
    monkeypatch.setattr(golden, "STORED_BYTES", math.inf)
    for t in (x, wide):
        codes, scale = golden.quantize_blocks(t.to(DEVICE), fp4.MXFP4, Recipe())
        assert_same_bytes(codes, want.codes)
        assert_same_bytes(scale, want.scale)
    for name in ("sf_128x4", "cdna4_sf") if len(shape) == 3 else ("sf_128x4", "gfx1250_sf"):
        order = fp4.layouts[name]
        if order.pad is not None:
            codes, stored = golden.quantize_blocks(wide.to(DEVICE), fp4.MXFP4, Recipe(), scale_layout=order)
            assert_same_bytes(codes, want.codes)
            assert_same_bytes(stored, order.apply(want.scale))
    assert torch.equal(golden.dequantize_blocks(codes, scale, None, fp4.MXFP4).cpu(), fp4.dequantize(want))


@pytest.mark.parametrize("preset", ["default", "te", "flashinfer", "flashinfer_fast"])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_of_16_bits(fmt: Format, preset: str, dtype: torch.dtype) -> None:
    """All 65,536, among neighbours and among values of any size, NaN and infinities included; both scale orders of storage."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    mixed = every[torch.randperm(65536, generator=gen(3))]
    x = torch.cat((every, mixed)).reshape(256, 512)
    g = torch.tensor(0.37) if fmt.tensor_scale else None
    both(x, fmt, fp4.recipe.get(preset, fmt.name), g)


@pytest.mark.parametrize("d", [1, 2, 3, 7, 180, 512, 513, 65535, 65536, 2**30 - 1, 2**31 - 1])
def test_division_by_multiplication(d: int) -> None:
    factor, shift = golden.divider(d)
    assert -(2**31) <= factor < 0
    for n in {0, 1, d - 1, d, d + 1, 2 * d - 1, 2 * d, (2**31 - 1) // d * d, (2**31 - 1) // d * d - 1, 2**31 - 1}:
        if not 0 <= n < 2**31:
            continue
        assert ((2 * n * (factor + 2**32)) >> 32) >> shift == n // d


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 64, 96), (1, 1, 7), (2, 5, 33), (4, 200, 208)])
def test_one_pass_amax(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The kernel behind the default global scale on a GPU: as the CPU's, for any strides; NaN and infinity do not count."""
    x = randn(*shape, seed=8, dtype=dtype)
    x.view(-1)[0], x.view(-1)[3], x.view(-1)[-1] = math.nan, -math.inf, -5.5
    for t in (x, x.transpose(1, 2), x[..., 1:], x.transpose(0, 1), x[:, ::2]):
        assert torch.equal(finite_amax(t.to(DEVICE)).cpu(), ref.tensor_amax(t))
        assert torch.equal(finite_amax(t.to(DEVICE), per_expert=True).cpu(), torch.stack([ref.tensor_amax(part) for part in t]))
    for t in (torch.full((4, 8), math.nan, dtype=dtype), torch.zeros(0, 8, dtype=dtype), torch.full((4, 8), -0.0, dtype=dtype)):
        assert finite_amax(t.to(DEVICE)).view(torch.int32).item() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [n for n in fp4.recipes.names() if fp4.recipes[n] is not None])
def test_global_scale_in_one_launch(name: str, dtype: torch.dtype) -> None:
    """The kernel of a GPU against the torch twin, bit for bit: zero, subnormal, ordinary and largest amax."""
    recipe = fp4.recipe.get(name, "nvfp4")
    exponents = torch.arange(-149, 128).double()
    amax = torch.cat([torch.zeros(1), torch.exp2(exponents).float(), (torch.exp2(exponents) * 1.37).float(), randn(200, seed=3).abs()])
    amax = torch.cat([amax, torch.tensor([torch.finfo(torch.float32).max, 2688.0, 65504.0])])
    for recipe_ in (recipe, *(dataclasses.replace(recipe, global_rule=rule) for rule in CHOICES["global_rule"])):
        want = default_global_scale(amax, recipe_, dtype)
        got = global_scale(amax.to(DEVICE), recipe_, dtype)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.cpu().view(torch.int32), b.view(torch.int32))
    assert [t.shape for t in global_scale(amax[5].to(DEVICE), recipe, dtype)] == [(), ()]


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any chunk size gives the same bytes, for rows that are and are not contiguous."""
    x = randn(37, 160, seed=11)
    wide = torch.cat((x, x), 1)[:, :160]
    want, values = fp4.quantize(x), fp4.dequantize(fp4.quantize(x))
    for chunk in (16, 100, 1 << 12):
        for name in ("NARROW", "ALONE", "WIDE"):
            monkeypatch.setattr(pace, name, chunk)
        monkeypatch.setattr(ref, "GROUP", 3 * chunk)
        for t in (x, wide):
            got = fp4.quantize(t)
            assert_same_bytes(got.codes, want.codes)
            assert_same_bytes(got.scale, want.scale)
            assert torch.equal(fp4.dequantize(got), values)


MEMORY = """
import resource, torch, fp4
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
x = torch.randn(1024, 16).to(torch.bfloat16).repeat(2048, 1)
fp4.dequantize(fp4.quantize(x[:1024]), torch.bfloat16)
start = peak()
q = fp4.quantize(x)
after = peak()
y = fp4.dequantize(q, torch.bfloat16)
print(after - start, peak() - after)
"""


def test_memory_is_output_plus_a_bounded_chunk() -> None:
    """2^25 bf16 elements: 18 MB of codes and scales, 64 MB of values; temporaries below 40 MB."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=120, check=True)
    first, second = (float(v) for v in done.stdout.split())
    assert first < 18 + 40
    assert second < 64 + 40


@settings(max_examples=10)
@given(st.sampled_from(FORMATS), st.integers(0, 2**31))
def test_rows_are_independent(fmt: Format, seed: int) -> None:
    """Bug L1, L2: a row's bytes depend on that row only (given g), and blocks are told apart."""
    x = tie_aimed((6, 3 * fmt.block), fmt, seed)
    g = 0.01 if fmt.tensor_scale else None
    whole = fp4.quantize(x, fmt, global_scale=g)
    for i in range(6):
        assert_same_bytes(fp4.quantize(x[i : i + 1], fmt, global_scale=g).codes[0], whole.codes[i])
    shifted = fp4.QuantizedTensor(fmt, whole.codes, whole.scale.roll(1, 1), whole.global_scale)
    swapped = fp4.QuantizedTensor(fmt, whole.codes.flip(-1), whole.scale, whole.global_scale)
    assert not torch.equal(fp4.dequantize(swapped), fp4.dequantize(whole))
    if not torch.equal(whole.scale, whole.scale.roll(1, 1)):
        assert not torch.equal(fp4.dequantize(shifted), fp4.dequantize(whole))


def test_stored_repr_is_one_line() -> None:
    q = fp4.quantize(randn(130, 64), "nvfp4", global_scale=0.5, scale_layout="sf_128x4")
    assert repr(q) == "StoredQuantized(nvfp4, shape=[130, 64], global_scale=0.5, scale=sf_128x4, device=cpu)"
    assert repr(q.scale) == "Stored(sf_128x4, shape=[130, 4], 1024 bytes, device=cpu)"
