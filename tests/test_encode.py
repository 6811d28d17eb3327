"""Encode steps: every byte, against the recorded bytes and against a bit model of what the consumer reads."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fp4 import encode
from fp4.errors import FormatMismatch
from fp4.formats import E2M1, E4M3, UE8M0
from fp4.testing import assert_same_bytes

BF16, FP16 = torch.bfloat16, torch.float16
ALL = torch.arange(127, dtype=torch.uint8)
NORMAL = torch.cat((ALL[:1], ALL[8:]))


def test_marlin_v1_is_the_recorded_byte_for_all_127() -> None:
    with np.load(Path(__file__).parent / "data" / "layouts" / "other_backends.npz") as z:
        want = torch.from_numpy(z["nvfp4_marlin_scale_byte_v1"])
    for dtype in (BF16, FP16):
        data, factor = encode.marlin_nvfp4("v1", dtype)(ALL)
        assert_same_bytes(data, want)
        assert factor == 1.0


def test_v1_and_v3_exactness_by_byte() -> None:
    """bf16 loses bytes 1..7 with v1; v3 zeroes them for fp16, where v1 was exact (its factor is 1 there)."""
    lost = [1, 2, 3, 4, 5, 6, 7]
    assert (~encode.marlin_nvfp4("v1", BF16).exact(ALL)).nonzero().flatten().tolist() == lost
    assert encode.marlin_nvfp4("v1", FP16).exact(ALL).all()
    assert (~encode.marlin_nvfp4("v3", FP16).exact(ALL)).nonzero().flatten().tolist() == lost
    assert (encode.marlin_nvfp4("v3", FP16)(ALL).data[1:8] == 0).all()
    # with a maximum of 448 the v3 factor of bf16 is 1 as well
    assert (~encode.marlin_nvfp4("v3", BF16).exact(ALL)).nonzero().flatten().tolist() == lost


def test_v2_saves_small_scales_and_refuses_a_wide_range() -> None:
    small = ALL[:72]  # 2^-9 .. 1.875
    data, factor = encode.marlin_nvfp4("v2")(small)
    assert factor == 8.0  # ceil(log2(2 / (128 * 2^-9))) = 3
    assert (data[1:] >= 128).all()
    assert encode.marlin_nvfp4("v2").exact(small).all()
    assert_same_bytes(encode.marlin_nvfp4("v2").inverse(encode.Encoded(data, factor)), small)
    for byte, want in ((3, 4.0), (5, 2.0), (7, 2.0), (8, 1.0)):  # not a power of two: the next one above, or the smallest scale is lost
        x = torch.tensor([0, byte, 0x40], dtype=torch.uint8)
        assert encode.marlin_nvfp4("v2")(x).factor == want
        assert encode.marlin_nvfp4("v2").exact(x).all()
    with pytest.raises(FormatMismatch, match="range of the scales is too wide"):
        encode.marlin_nvfp4("v2")(torch.tensor([1, 0x7E], dtype=torch.uint8))


def test_v3_lifts_to_the_top_and_zeroes_the_rest() -> None:
    x = torch.tensor([0, 1, 0x30, 0x38], dtype=torch.uint8)  # 0, 2^-9, 0.5, 1
    data, factor = encode.marlin_nvfp4("v3")(x)
    assert factor == 256.0 == 2.0 ** math.floor(math.log2(448 / 1.0))
    assert encode.marlin_nvfp4("v3").exact(x).all()  # 2^-9 * 256 >= 2^-6
    wide = torch.tensor([1, 0x7E], dtype=torch.uint8)
    assert encode.marlin_nvfp4("v3")(wide).data.tolist() == [0, 246]
    assert encode.marlin_nvfp4("v3").inverse is None
    assert not encode.marlin_nvfp4("v3").lossless
    assert data[0] == 0


def test_one_factor_for_all_experts() -> None:
    experts = torch.stack((torch.full((4, 4), 0x38), torch.full((4, 4), 0x70))).to(torch.uint8)  # 1.0 and 128
    assert encode.marlin_nvfp4("v3")(experts).factor == 2.0


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("rule", ["v1", "v2", "v3"])
def test_kernel_algebra_gives_the_checkpoint_value(rule: str, dtype: torch.dtype) -> None:
    """decode(code) * decode(scale) * kernel's global scale == code * scale * global scale, exactly, over the exact bytes."""
    scale = NORMAL if rule != "v2" else ALL[:72]
    step = encode.marlin_nvfp4(rule, dtype)
    assert step.exact(scale).all()
    data, factor = step(scale)
    g = torch.tensor(3.1e-5)
    kernel_g = encode.marlin_global_scale(g, factor, dtype).double()
    code = torch.from_numpy(E2M1.values.copy()).double()
    weight = code * 2.0 ** (-126 if dtype == BF16 else -14)  # what the masks of the kernel leave
    got = weight[:, None] * encode.marlin_decode(data, dtype).double()[None] * kernel_g
    want = code[:, None] * torch.from_numpy(E4M3.values.copy()).double()[scale.long()][None] * g.double()
    assert torch.equal(got, want)


def test_lossless_steps_invert_and_say_so() -> None:
    inputs = {
        "marlin_nvfp4_v1": ALL,
        "marlin_nvfp4_v1_fp16": ALL,
        "marlin_nvfp4_v2": ALL[:72],
        "marlin_nvfp4_v2_fp16": ALL,
        "marlin_mxfp4": torch.arange(1, 255, dtype=torch.uint8),
        "marlin_mxfp4_a8": torch.arange(0, 249, dtype=torch.uint8),
        "cpu_amx_mxfp4": torch.arange(2, 253, dtype=torch.uint8),
        "deepgemm_ue8m0": torch.arange(1, 255, dtype=torch.uint8),
        "fp32_to_ue8m0": torch.from_numpy(UE8M0.values[1:255].copy()),
    }
    assert set(inputs) == {n for n in encode.names() if encode.get(n).lossless}
    for name, x in inputs.items():
        step = encode.get(name)
        assert_same_bytes(step.inverse(step(x)), x, name=name)
        assert step.exact(x).all() or name == "marlin_nvfp4_v1", name
        assert step.over


def test_rebase_multiplies_by_a_power_of_two() -> None:
    x = torch.arange(1, 249, dtype=torch.uint8)
    for add in (6, -1, 0, 3):
        y, factor = encode.rebase(add)(x[max(0, -add) :])
        values = torch.from_numpy(UE8M0.values.copy())
        assert factor == 2.0**add
        assert torch.equal(values[y.long()].double(), values[x[max(0, -add) :].long()].double() * factor)
    assert encode.rebase(3)(torch.tensor([251], dtype=torch.uint8)).data.tolist() == [254]
    for add, byte in ((3, 252), (-3, 2)):  # 255 would be NaN, and -1 wraps to it
        with pytest.raises(FormatMismatch, match="need e8m0 bytes"):
            encode.rebase(add)(torch.tensor([byte], dtype=torch.uint8))


def test_packing_takes_the_exponent_and_nothing_else() -> None:
    x = torch.tensor([[1.0, 0.5], [2.0**-126, 2.0**127]])
    assert encode.FP32_TO_UE8M0(x).data.tolist() == [[127, 126], [1, 254]]
    assert encode.FP32_TO_UE8M0.exact(torch.tensor([1.0, 3.0, 0.0, -1.0, float("inf"), float("nan"), 2.0**-127])).tolist() == [
        True,
        *[False] * 6,
    ]


@pytest.mark.parametrize(
    ("name", "x", "text"),
    [
        ("marlin_nvfp4_v1", torch.tensor([0x38, 0x80], dtype=torch.uint8), "1 of 2 items are refused, first 0x80 at 1"),
        ("marlin_nvfp4_v3", torch.tensor([0x7F], dtype=torch.uint8), "no sign and no NaN"),
        ("marlin_mxfp4", torch.tensor([0], dtype=torch.uint8), "need e8m0 bytes 1..254"),
        ("marlin_mxfp4_a8", torch.tensor([249], dtype=torch.uint8), "need e8m0 bytes 0..248"),
        ("deepgemm_ue8m0", torch.tensor([255], dtype=torch.uint8), "need e8m0 bytes 1..254"),
        ("cpu_amx_mxfp4", torch.tensor([1], dtype=torch.uint8), "need e8m0 bytes 2..252"),
        ("fp32_to_ue8m0", torch.tensor([1.0, 3.0]), "need powers of two"),
        ("fp32_to_ue8m0", torch.tensor([0.0]), "zero has no byte"),
        ("fp32_to_ue8m0", torch.tensor([1], dtype=torch.uint8), "need float32"),
        ("marlin_mxfp4", torch.tensor([1.0]), "need raw bytes"),
    ],
)
def test_bad_input_is_one_sentence(name: str, x: torch.Tensor, text: str) -> None:
    with pytest.raises(FormatMismatch, match=text) as error:
        encode.get(name)(x)
    assert "\n" not in str(error.value)


def test_bad_parameters() -> None:
    with pytest.raises(FormatMismatch, match="need v1, v2 or v3"):
        encode.marlin_nvfp4("v4")
    with pytest.raises(FormatMismatch, match="fp16 kernels do not exist"):
        encode.marlin_mxfp4("fp16")
    with pytest.raises(FormatMismatch, match="is not known"):
        encode.get("marlin")
    with pytest.raises(FormatMismatch, match="leaves the float32 range"):
        encode.marlin_global_scale(torch.tensor(1e4), 1.0, BF16)
    with pytest.raises(FormatMismatch, match="need bfloat16 or float16"):
        encode.marlin_decode(ALL, torch.float32)


def test_marlin_v2_range_ends_where_e4m3_does() -> None:
    """Byte 1 is 2^-9, so the factor is 8: 56 becomes 448, the largest e4m3 number; 60 would become 480."""
    v2 = encode.get("marlin_nvfp4_v2")
    good = torch.tensor([0x01, 0x66], dtype=torch.uint8)
    assert v2.forward(good).factor == 8
    assert torch.equal(v2.inverse(v2.forward(good)), good)
    with pytest.raises(FormatMismatch, match="first 0x67 at 1: times the factor 8 they exceed 448"):
        v2.forward(torch.tensor([0x01, 0x67], dtype=torch.uint8))


@pytest.mark.parametrize("value", [0.0, -0.0, math.inf, -math.inf, math.nan, -1.0, 1.5, 2.0**-127])
def test_what_has_no_exponent_byte_of_its_own_is_refused(value: float) -> None:
    """Infinity's exponent field is 255, which reads as NaN; a subnormal's is 0."""
    x = torch.tensor([1.0, value])
    with pytest.raises(FormatMismatch, match=r"first .* at 1: need powers of two"):
        encode.FP32_TO_UE8M0.forward(x)
    assert encode.FP32_TO_UE8M0.exact(x).tolist() == [True, False]
