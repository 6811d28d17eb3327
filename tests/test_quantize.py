"""quantize and dequantize: torch twin == golden Triton byte for byte, exact arithmetic, properties, special values, errors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quantize_cases import DEVICE, DTYPES, FORMATS, both, gen, randn, special, tie_aimed

import fp4
from fp4 import formats
from fp4.errors import FormatMismatch, Fp4Error
from fp4.formats import Format
from fp4.recipe import CHOICES, Recipe
from fp4.ref import triton_quantize as golden
from fp4.testing import assert_same_bytes

# 1 / 0 is meant (an underflowed scale); numpy, which runs the interpreter, warns of it
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning")


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
    """The hand-written row that compressed-tensors, ModelOpt, torchao and transformers decode alike."""
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
    assert low < snr < high  # 20.44 dB and 18.75 dB for N(0, 1)


def test_four_over_six_gains_what_the_survey_says() -> None:
    """20.44 dB by round to nearest, 21.21 / 21.08 / 20.98 dB by squares / magnitudes / maximum, for N(0, 1)."""
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
        (
            lambda: fp4.dequantize(fp4.quantize(torch.zeros(2, 64)), torch.int8),
            "need torch.float32, torch.float64, torch.bfloat16 or torch.float16",
        ),
        (lambda: fp4.to_layout([1], "sf_128x4"), "got list; need a byte tensor"),
        (lambda: fp4.to_layout(torch.zeros(128, 4), "sf_128x4"), "need raw bytes"),
    ],
)
def test_errors_say_what_to_do(call: Any, text: str) -> None:
    with pytest.raises(Fp4Error, match=text):
        call()
