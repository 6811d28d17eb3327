"""Each preset against the bytes that its library wrote: checkpoint files, FlashInfer's reference, and the edge-case tables."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fp4
from fp4.errors import Fp4Error
from fp4.recipe import CHOICES, Recipe, get
from fp4.testing import assert_same_bytes

DATA = Path(__file__).parent / "data" / "presets"
FILES = np.load(DATA / "vendor_bytes.npz")
EDGE = json.loads((DATA / "edge_cases.json").read_text())
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def bf16(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.copy()).view(torch.bfloat16)


def case(key: str) -> dict[str, Any]:
    """Arrays of one weight: x, codes, scale, and g or gs."""
    found = {name.rsplit("/", 1)[1]: FILES[name] for name in FILES.files if name.rsplit("/", 1)[0] == key}
    return {k: bf16(FILES[f"x/{int(v)}"]) if k == "x" else torch.from_numpy(np.array(v)) for k, v in found.items()}


def keys(prefix: str) -> list[str]:
    return sorted({name.rsplit("/", 1)[0] for name in FILES.files if name.startswith(prefix + "/")})


#: preset -> (case prefix, format)
WRITTEN = [
    ("modelopt", "modelopt_nvfp4", "nvfp4"),
    ("modelopt", "modelopt_mxfp4", "mxfp4"),
    ("modelopt_mxfp4", "deepseek_v4", "mxfp4"),
    ("compressed_tensors", "compressed_tensors_nvfp4", "nvfp4"),
    ("compressed_tensors", "compressed_tensors_mxfp4", "mxfp4"),
    ("quark", "quark_nvfp4", "nvfp4"),
    ("quark", "quark_mxfp4", "mxfp4"),
    ("quark", "quark_amdfp4", "amdfp4"),
    ("torchao", "torchao_nvfp4", "nvfp4"),
    ("torchao", "torchao_nvfp4_single", "nvfp4"),
    ("torchao", "torchao_mxfp4", "mxfp4"),
    ("triton_kernels_v1", "triton_kernels_v1", "mxfp4"),
    ("fouroversix", "fouroversix", "nvfp4"),
]


def check_files(preset: str | Recipe, prefix: str, format: str) -> int:
    """Compares every weight of a case; returns the bytes of codes compared."""
    return sum(check_written(preset, format, case(key), key) for key in keys(prefix))


def check_written(preset: str | Recipe, format: str, c: dict[str, Any], key: str) -> int:
    g = c.get("g", torch.tensor(1.0)) if format == "nvfp4" and not {"gs", "amax"} & set(c) else None
    q = fp4.quantize(c["x"], format, preset, global_scale=g, encode_scale=c.get("gs"))
    assert_same_bytes(q.scale, c["scale"], name=f"{preset}: scales of {key}")
    assert_same_bytes(q.codes, c["codes"], name=f"{preset}: codes of {key}")
    return int(c["codes"].numel())


@pytest.mark.parametrize(("preset", "prefix", "format"), WRITTEN)
def test_bytes_of_the_librarys_own_files(preset: str, prefix: str, format: str) -> None:
    assert check_files(preset, prefix, format) >= 2048


@pytest.mark.parametrize(("preset", "prefix", "format"), WRITTEN)
def test_another_preset_does_not_give_these_bytes(preset: str, prefix: str, format: str) -> None:
    """The data tell presets apart: a recipe that differs in tie rule or scale rule fails on the same files."""
    own = get(preset, format)
    tie = "away" if own.tie != "away" else "even"
    wrong = own.replace(tie=tie) if format != "nvfp4" else own.replace(elem_max=4.0)
    with pytest.raises(AssertionError):
        check_files(wrong, prefix, format)


def test_every_weight_of_the_complete_files(oracles: Path) -> None:
    """With --oracles: all seven projections of every sample (the repository ships three)."""
    from data.presets import make  # type: ignore[import-not-found]

    make.PROJECTIONS = (*make.PROJECTIONS, *(f"self_attn.{p}_proj" for p in "qvo"), "mlp.up_proj")
    global FILES
    small, FILES = FILES, make.shared(make.collect(oracles / "checkpoints"))
    try:
        FILES = type("Files", (dict,), {"files": property(lambda self: list(self))})(FILES)
        for preset, prefix, format in WRITTEN:
            test_bytes_of_the_librarys_own_files(preset, prefix, format)
    finally:
        FILES = small


@pytest.mark.parametrize("projection", ["mlp.down_proj"])
def test_compressed_tensors_default_global_scale(projection: str) -> None:
    """gs = bf16(2688 * bf16(1 / amax)): the observer's arithmetic, for a weight whose scale was not fused with another's."""
    c = case(f"compressed_tensors_nvfp4/{projection}")
    q = fp4.quantize(c["x"], "nvfp4", "compressed_tensors")
    assert q.global_scale == 1.0 / c["gs"]
    assert_same_bytes(q.codes, c["codes"])


def test_torchao_and_modelopt_default_global_scale() -> None:
    """g = amax / 2688, for weights that are not fused with another."""
    for preset, key in (("torchao", "torchao_nvfp4/mlp.gate_proj"), ("modelopt", "modelopt_nvfp4/mlp.down_proj")):
        c = case(key)
        assert fp4.quantize(c["x"], "nvfp4", preset).global_scale == c["g"]


@pytest.mark.parametrize(("preset", "mode"), [("microxcaling", "nearest"), ("microxcaling_even", "even")])
def test_microxcaling_values(preset: str, mode: str) -> None:
    c = case(f"microxcaling_{mode}")
    assert torch.equal(fp4.dequantize(fp4.quantize(c["x"], "mxfp4", preset)), c["values"])


# ---- FlashInfer's exact reference ---------------------------------------------------------------------------------------------


def flashinfer() -> dict[str, torch.Tensor]:
    z = np.load(DATA / "flashinfer_exact.npz")
    return {k: torch.from_numpy(np.array(z[k])) for k in z.files} | {"x": bf16(z["x"])}


@pytest.mark.parametrize("i", range(5))
def test_flashinfer_nvfp4(i: int) -> None:
    """Ties, signed zeros, NaN, infinity, underflowing blocks; global scales 1, 448, 3, 2688 / 37.25 and 0.013."""
    z = flashinfer()
    q = fp4.quantize(z["x"], "nvfp4", "flashinfer", encode_scale=z[f"nvfp4_{i}_gs"])
    assert_same_bytes(q.scale, z[f"nvfp4_{i}_scale"])
    assert_same_bytes(q.codes, z[f"nvfp4_{i}_codes"])


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
def test_flashinfer_mx(format: str) -> None:
    z = flashinfer()
    q = fp4.quantize(z["x"], format, "flashinfer")
    assert_same_bytes(q.scale, z[f"{format}_scale"])
    assert_same_bytes(q.codes, z[f"{format}_codes"])


@pytest.mark.parametrize("i", range(5))
def test_te_equals_flashinfer_exact_up_to_the_sign_of_zero(i: int) -> None:
    z = flashinfer()
    finite = torch.isfinite(z["x"]).all(-1)
    q = fp4.quantize(z["x"], "nvfp4", "te", encode_scale=z[f"nvfp4_{i}_gs"])
    assert_same_bytes(q.scale[finite], z[f"nvfp4_{i}_scale"][finite])
    ours, theirs = fp4.ref.codes.unpack_nibbles(q.codes[finite]), fp4.ref.codes.unpack_nibbles(z[f"nvfp4_{i}_codes"][finite])
    assert torch.equal(ours & 7, theirs & 7)
    differs = ours != theirs
    assert bool(differs.any())
    assert bool((z["x"][finite][differs] == 0).all())


def test_flashinfer_fast_equals_exact_for_powers_of_two_and_stays_close() -> None:
    """The stated relation: same bytes when gs is a power of two; else adjacent scale codes on at most 2.5% of blocks."""
    x = torch.randn(512, 1024, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    for gs in (1.0, 512.0):
        fast, exact = (fp4.quantize(x, "nvfp4", name, encode_scale=gs) for name in ("flashinfer_fast", "flashinfer"))
        assert_same_bytes(fast.scale, exact.scale)
        assert_same_bytes(fast.codes, exact.codes)
    fast, exact = (fp4.quantize(x, "nvfp4", name, encode_scale=448.0) for name in ("flashinfer_fast", "flashinfer"))
    step = (fast.scale.int() - exact.scale.int()).abs()
    assert step.max() == 1
    assert 0.001 < (step != 0).float().mean() < 0.025


def test_flashinfer_zero_rules_differ_in_codes_but_not_in_values() -> None:
    """amax * gs / 6 below 2^-10: magnitude 7 up to 0.7.0, zero from 0.7.4 on; the scale byte is 0 in both."""
    x = torch.full((1, 16), 2.0**-9)
    x[0, 3], x[0, 5] = 0.0, -(2.0**-9)
    new, old = (fp4.quantize(x, "nvfp4", name, encode_scale=1.0) for name in ("flashinfer_fast", "flashinfer_fast_070"))
    assert new.scale.item() == old.scale.item() == 0
    assert fp4.ref.codes.unpack_nibbles(new.codes)[0, :6].tolist() == [0, 0, 0, 0, 0, 8]
    assert fp4.ref.codes.unpack_nibbles(old.codes)[0, :6].tolist() == [7, 7, 7, 7, 7, 15]
    assert torch.equal(fp4.dequantize(new).abs(), fp4.dequantize(old).abs())


# ---- edge cases ----------------------------------------------------------------------------------------------------------------


def answers(name: str) -> dict[str, Any]:
    found: dict[str, Any] = EDGE["answers"][name]
    return found


def codes_of(x: torch.Tensor, format: str, preset: str | Recipe, **kw: Any) -> list[int]:
    codes: list[int] = fp4.ref.codes.unpack_nibbles(fp4.quantize(x.reshape(1, -1), format, preset, **kw).codes).flatten().tolist()
    return codes


TIES16, TIES32 = (torch.tensor(EDGE["inputs"][f"ties_block{n}"]) for n in (16, 32))


@pytest.mark.parametrize(
    ("preset", "format", "library", "answer"),
    [
        ("compressed_tensors", "nvfp4", "compressed_tensors", "round_torch.float32"),
        ("modelopt", "nvfp4", "modelopt", "round_nvfp4"),
        ("torchao", "nvfp4", "torchao", "round_nvfp4"),
        ("modelopt", "mxfp4", "modelopt", "round_mxfp4"),
        ("torchao", "mxfp4", "torchao", "round_mx_rceil"),
        ("triton_kernels_v1", "mxfp4", "triton_kernels", "round_ROUND_UP"),
    ],
)
def test_ties_and_signed_zero(preset: str, format: str, library: str, answer: str) -> None:
    """Blocks with amax 6 and scale 1, so every listed value meets its tie rule (bug G5)."""
    x = TIES16 if format == "nvfp4" else TIES32
    g = {"global_scale": 1.0 if preset != "compressed_tensors" else None} if format == "nvfp4" else {}
    want = answers(library)[answer]
    got = codes_of(x, format, preset, **g)
    assert got == want


@pytest.mark.parametrize(("preset", "answer"), [("microxcaling", "round_values_nearest"), ("microxcaling_even", "round_values_even")])
def test_microxcaling_ties(preset: str, answer: str) -> None:
    values = fp4.dequantize(fp4.quantize(TIES32.reshape(1, -1), "mxfp4", preset)).flatten().tolist()
    assert values == answers("microxcaling")[answer]


AMAXES = [float(a) for a in EDGE["inputs"]["amaxes"]]
#: above the region where libraries meet float32 subnormals, and finite
NORMAL = [i for i, a in enumerate(AMAXES) if a == 0 or 2.0**-120 < a < 1e6]


@pytest.mark.parametrize(
    ("recipe", "library", "answer", "also"),
    [
        (get("modelopt", "mxfp4"), "modelopt", "mx_stored", ()),
        (get("compressed_tensors"), "compressed_tensors", "mx_stored_torch.float32", ()),
        (get("torchao"), "torchao", "mx_stored_rceil", (1e-45, 3e38, float("inf"), float("nan"))),
        (get("torchao").replace(scale_rule="ocp_floor"), "torchao", "mx_stored_floor", (1e-45, 1e-38, 3e38, float("inf"), float("nan"))),
        (get("torchao").replace(scale_rule="ceil"), "torchao", "mx_stored_ceil", (3e38, float("inf"), float("nan"))),
        (get("torchao").replace(scale_rule="even"), "torchao", "mx_stored_even", (3e38, float("inf"), float("nan"))),
        (get("triton_kernels_v1"), "triton_kernels", "mx_stored_ROUND_UP", (1e-45, 5.9e-39, 1.2e-38, 3.6e-38, 3e38, float("inf"))),
        (
            get("triton_kernels_v1").replace(scale_rule="floor_amax_over_6"),
            "triton_kernels",
            "mx_stored_ROUND_DOWN",
            (1e-45, 3e38, float("inf")),
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_mx_scale_byte_for_amax(recipe: Recipe, library: str, answer: str, also: tuple[float, ...]) -> None:
    """The scale byte for 22 or more block maxima around powers of two and 1.5, 1.75 times them (bug G3), extremes where they agree."""
    stored = answers(library)[answer]
    extreme = [
        i for i, a in enumerate(AMAXES) for b in also if a == b or (a != a and b != b) or abs(a / b - 1 if b and a == a else 1) < 0.05
    ]
    for i in sorted({*NORMAL, *extreme}):
        x = torch.zeros(1, 32)
        x[0, 0] = AMAXES[i]
        assert fp4.quantize(x, "mxfp4", recipe).scale.item() == stored[i], AMAXES[i]


ROWS = {name: torch.tensor([float(v) for v in row]) for name, row in EDGE["inputs"]["nv_rows"].items()}


@pytest.mark.parametrize(
    "row", ["zero_second_block", "tiny_second_block", *(f"ratio_2pow-{n}_block" for n in (9, 10, 11)), "equal_blocks", "huge"]
)
@pytest.mark.parametrize("preset", ["compressed_tensors", "modelopt", "torchao"])
def test_nvfp4_degenerate_blocks(preset: str, row: str) -> None:
    """Zero, tiny, underflowing and equal blocks, and 3e38: global scale, scale bytes and all 32 codes."""
    want = answers(preset)[f"nv_{row}"]
    q = fp4.quantize(ROWS[row].reshape(1, -1), "nvfp4", preset)
    if preset == "compressed_tensors":
        assert 1.0 / q.global_scale == pytest.approx(float(want["global_scale"]), rel=2e-7)
    else:
        assert q.global_scale.item() == float(want["weight_scale_2" if preset == "modelopt" else "per_tensor_scale"])
    assert q.scale.flatten().tolist() == want["stored_scale_byte"]
    assert fp4.ref.codes.unpack_nibbles(q.codes).flatten().tolist() == want["nibbles"]


# ---- the mapping ---------------------------------------------------------------------------------------------------------------


def test_what_was_compared_is_what_is_compared_here() -> None:
    """The table of docs/recipes.md: a cell that says bytes has its test above, and each test has its cell."""
    tested = {(preset, format) for preset, _, format in WRITTEN} | {("flashinfer", f) for f in ("nvfp4", "mxfp4", "mxfp8")}
    told = {(name, f): what for name in fp4.recipes.names() for f, what in fp4.recipes.compared(name).items()}
    assert {pair for pair, what in told.items() if what.split()[0] == "bytes"} == {*tested, ("quark_amdfp4", "amdfp4"), ("te", "nvfp4")}
    assert {pair for pair, what in told.items() if what == "values"} == {("microxcaling", "mxfp4"), ("microxcaling_even", "mxfp4")}
    for (name, format), what in told.items():  # a cell in brackets names the preset that the format gets
        assert get(name, format).name == (what.split("(")[1].rstrip(")") if "(" in what else name)
    assert "Compared: nvfp4: bytes; mxfp4: bytes." in fp4.recipes.describe("torchao")
    assert "no library" in fp4.recipes.describe("default")
    with pytest.raises(Fp4Error, match="did you mean 'torchao'"):
        fp4.recipes.compared("torchoa")


def test_table_of_the_page_is_current() -> None:
    made = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "make_recipes.py"))
    text = made["PAGE"].read_text()
    assert text == made["page"](text), "run: python docs/make_recipes.py"
    assert "| `quark_amdfp4` |  |  |" in text


def test_names_and_errors() -> None:
    names = fp4.recipes.names()
    assert {"default", "te", "torchao", "modelopt", "compressed_tensors", "flashinfer", "flashinfer_fast", "quark"} <= set(names)
    assert {"microxcaling", "triton_kernels_v1", "triton_kernels_v2", "deepgemm"} <= set(names)
    for name in names:
        assert fp4.recipes[name].name == name
        assert len(fp4.recipes.describe(name)) > 60
        assert get(fp4.recipes[name].key) == fp4.recipes[name]
    for bad in ("floor", "TE", ""):
        with pytest.raises(Fp4Error, match=r"is not known; .*fp4.recipes.names\(\) lists all"):
            fp4.recipes[bad]
    with pytest.raises(Fp4Error, match="scale_rule is 'floor'"):
        Recipe(scale_rule="floor")
    with pytest.raises(Fp4Error, match="no field"):
        Recipe().replace(round="even")
    with pytest.raises(Fp4Error, match="need a Recipe"):
        get(3)  # type: ignore[arg-type]


def test_recipes_are_values() -> None:
    a, b = Recipe(tie="away"), Recipe(tie="away", name="mine")
    assert a == b
    assert hash(a) == hash(b)
    assert a != Recipe()
    assert str(Recipe(tie="away")) == "Recipe(tie='away')"
    assert get(a.key) == a
    with pytest.raises(AttributeError):
        a.tie = "even"  # type: ignore[misc]


def test_presets_are_distinct_and_every_choice_is_used_or_reachable() -> None:
    values = [fp4.recipes[n] for n in fp4.recipes.names()]
    assert len({hash(v) for v in values}) == len(values)
    for field, legal in CHOICES.items():
        for value in legal:
            assert getattr(Recipe(**{field: value}), field) == value


def test_repository_data_match_the_complete_files(oracles: Path) -> None:
    """With --oracles: the shipped arrays are the vendors' bytes."""
    file = load_file(oracles / "checkpoints/modelopt/nvfp4/model.safetensors")
    c = case("modelopt_nvfp4/mlp.down_proj")
    assert_same_bytes(c["codes"], file["model.layers.0.mlp.down_proj.weight"])
