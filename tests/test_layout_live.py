"""Layouts and encodes against vendor libraries that are installed: their own Python code runs here, on a CPU.

FlashInfer and triton_kernels are imported. Of vLLM, SGLang, DeepGEMM and aiter only single functions are taken out of the installed source
files and run, because importing those packages needs a GPU or many dependencies. A library that is not installed skips its tests.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import math
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fp4
from fp4 import encode
from fp4.layout import Layout, Segmented
from fp4.layouts import get
from fp4.testing import assert_same_bytes
from fp4.testing.goldens import counter_bytes

pytestmark = pytest.mark.vendor


def folder(package: str) -> Path:
    """Where a package is installed, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


class Quiet:
    """Stands for a logger."""

    def __getattr__(self, name: str) -> Any:
        return lambda *a, **k: None


def functions(path: Path, *names: str, **given: Any) -> types.SimpleNamespace:
    """Functions of a source file, run with torch, numpy and ``given`` as their only globals."""
    if not path.is_file():
        pytest.skip(f"this version has no {path.name}")
    tree = ast.parse(path.read_text())
    picked = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in names]
    assert {n.name for n in picked} == set(names), f"{path}: {set(names) - {n.name for n in picked}} not found"
    for node in picked:
        node.decorator_list, node.returns = [], None
        for a in [*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs]:
            a.annotation = None
    space: dict[str, Any] = {"torch": torch, "np": np, "math": math, "logger": Quiet(), **given}
    exec(compile(ast.Module(picked, []), str(path), "exec"), space)
    return types.SimpleNamespace(**{n: space[n] for n in names})


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.roll(counter_bytes(shape), seed))


# ---- FlashInfer ----------------------------------------------------------------------------------------------------------------------


def flashinfer(module: str) -> Any:
    folder("flashinfer")
    try:
        return importlib.import_module(f"flashinfer.{module}")
    except ImportError as error:
        pytest.skip(f"flashinfer.{module}: {error}")


@pytest.mark.parametrize("m", [128, 384, 640])
def test_flashinfer_row_orders(m: int) -> None:
    utils, core = flashinfer("utils"), flashinfer("fused_moe.core")
    x = tensor(m, 48)
    for tile, name in ((128, "trtllm_rows_32"), (64, "trtllm_rows_16")):
        want = x[utils.get_shuffle_matrix_a_row_indices(x, tile)]
        assert_same_bytes(get(name).apply(x).reshape(x.shape), want, name=name)
        sf = x[utils.get_shuffle_matrix_sf_a_row_indices(x, tile)]
        assert_same_bytes(get(name).apply(x).reshape(x.shape), sf, name=name)
        gated = x[core._maybe_get_cached_w3_w1_permute_indices({}, x, tile)]
        assert_same_bytes((get("gate_up_pairs") >> get(name)).apply(x).reshape(x.shape), gated, name=f"gated {name}")
        w2 = x[core.get_w2_permute_indices_with_cache({}, x, tile)]
        assert_same_bytes(get(name).apply(x).reshape(x.shape), w2, name=f"w2 {name}")
    assert_same_bytes(get("gate_up_pairs").apply(x).reshape(x.shape), core.reorder_rows_for_gated_act_gemm(x))


@pytest.mark.parametrize(("e", "n", "k"), [(1, 64, 128), (3, 192, 384), (2, 320, 640)])
def test_flashinfer_sm90_scales(e: int, n: int, k: int) -> None:
    """Release decides between two incompatible orders; the number of dimensions of the result says which one it is."""
    helper = flashinfer("fused_moe").interleave_moe_scales_for_sm90_mixed_gemm
    s = tensor(e, n, k // 32)
    want = helper(s, group_size=32)
    assert want.dim() in (3, 5)
    layout = get("sm90_mixed_sf" if want.dim() == 5 else "sm90_mixed_sf_a")
    assert_same_bytes(layout.apply(s).reshape(want.shape), want, name=layout.name)


@pytest.mark.parametrize(("m", "blocks"), [(1, 1), (128, 4), (130, 7), (400, 18), (3, 33)])
@pytest.mark.parametrize("tile", ["128x4", "8x4"])
def test_flashinfer_reference_swizzle(tile: str, m: int, blocks: int) -> None:
    reference = flashinfer("batch_invariant.quantization.layout")
    s = tensor(m, blocks)
    want = reference.swizzle_sf(s, m, blocks * 16, 16, tile)
    assert_same_bytes(get(f"sf_{tile}").apply(s), want, layout=get(f"sf_{tile}"), shape=(m, blocks))
    padded = get(f"sf_{tile}").padded((m, blocks))
    assert reference.sf_offset(tile, m - 1, blocks - 1, padded[1]) == get(f"sf_{tile}").offset((m, blocks), m - 1, blocks - 1)


# ---- triton_kernels ------------------------------------------------------------------------------------------------------------------


def triton_kernels() -> Any:
    root = folder("triton_kernels")
    if not (root / "tensor_details" / "layout.py").is_file():
        pytest.skip("the installed triton_kernels is another package of that name")
    try:
        return importlib.import_module("triton_kernels.tensor_details.layout")
    except (ImportError, AttributeError) as error:
        pytest.skip(f"triton_kernels does not work with this triton: {error}")


def swizzled(layout: str, x: torch.Tensor, **parameters: Any) -> torch.Tensor:
    """What a layout class of any generation stores for bytes [experts, rows N, columns K], in memory order."""
    classes, api = triton_kernels(), importlib.import_module("triton_kernels.tensor")
    cls = getattr(classes, layout, None)
    if cls is None:
        pytest.skip(f"this generation has no {layout}")
    data = x.transpose(-1, -2)
    wrapped = api.wrap_torch_tensor(data, dtype=api.FP4) if "Value" in layout else api.wrap_torch_tensor(data)
    if "CDNA4" in layout and not hasattr(cls, "make_transformation") and (x.shape[1] % 32 or x.shape[2] % 8):
        pytest.skip("generations A and B do not pad CDNA4 scales")
    fields = getattr(cls, "__dataclass_fields__", {})
    if hasattr(cls, "make_transformation"):
        made = cls(mx_axis=-2, **parameters) if "mx_axis" in fields else cls(**parameters)
        out = api.convert_layout(wrapped, made).storage.data
    else:
        axis = {"mx_axis": 1} if "Hopper" in layout else {}
        out = api.convert_layout(wrapped, cls, **axis, **parameters).storage.data
    return out.permute(*sorted(range(out.dim()), key=lambda i: -out.stride(i))).contiguous().view(torch.uint8)


VALUES = [(1, 16, 32), (2, 64, 64), (1, 768, 192), (1, 48, 96), (2, 18, 33), (1, 320, 160)]
SCALES = [(1, 64, 4), (2, 256, 8), (1, 576, 90), (2, 130, 3), (1, 768, 24)]


@pytest.mark.parametrize("shape", VALUES, ids=str)
@pytest.mark.parametrize("version", [2, 3])
def test_triton_kernels_hopper_value(version: int, shape: tuple[int, int, int]) -> None:
    x = tensor(*shape)
    got = swizzled("HopperMXValueLayout", x, mma_version=version)
    for pad_n, pad_k in ((16, 32), (64, 64), (256, 64)):  # the generations differ in padding only: read it from the size
        layout = get(f"hopper_value_v{version}", pad_n=pad_n, pad_k=pad_k)
        if layout.nbytes(shape) == got.numel():
            assert_same_bytes(layout.apply(x).reshape(-1), got.reshape(-1), layout=layout, shape=shape)
            return
    raise AssertionError(f"{got.numel()} bytes for {shape}: a padding that no known generation has")


@pytest.mark.parametrize("shape", SCALES, ids=str)
@pytest.mark.parametrize("warps", [4, 8])
def test_triton_kernels_hopper_scale(warps: int, shape: tuple[int, int, int]) -> None:
    got = swizzled("HopperMXScaleLayout", tensor(*shape), num_warps=warps)
    layout = get("hopper_sf", num_warps=warps)
    assert_same_bytes(layout.apply(tensor(*shape)).reshape(-1), got.reshape(-1), layout=layout, shape=shape)


@pytest.mark.parametrize("shape", SCALES, ids=str)
@pytest.mark.parametrize(
    ("cls", "name"),
    [("BlackwellMXScaleLayout", "blackwell_sf"), ("CDNA4MXScaleLayout", "cdna4_sf"), ("GFX1250MXScaleLayout", "triton_gfx1250_sf")],
)
def test_triton_kernels_other_scales(cls: str, name: str, shape: tuple[int, int, int]) -> None:
    got = swizzled(cls, tensor(*shape))
    layout = get(name, columns=shape[-1]) if name == "triton_gfx1250_sf" else get(name)
    assert_same_bytes(layout.apply(tensor(*shape)).reshape(-1), got.reshape(-1), layout=layout, shape=shape)


@pytest.mark.parametrize("blocks", [(128, 256), (256, 128), (64, 32)])
def test_triton_kernels_blackwell_shuffled(blocks: tuple[int, int]) -> None:
    x = tensor(2, 3 * blocks[1], 3 * 128)
    got = swizzled("BlackwellMX4ValueShuffledLayout", x, block_k=blocks[0], block_n=blocks[1])
    layout = get("blackwell_value_shuffled", block_k=blocks[0], block_n=blocks[1])
    assert_same_bytes(layout.apply(x).reshape(-1), got.reshape(-1), layout=layout, shape=tuple(x.shape))


def act_scale_layout() -> Any:
    cls = getattr(triton_kernels(), "BlackwellActMXScaleLayout", None)
    if cls is None:
        pytest.skip("this generation has no BlackwellActMXScaleLayout")
    return cls


def test_triton_kernels_activation_scales() -> None:
    x = tensor(2, 130, 6)
    got = act_scale_layout()(None).make_transformation([2, 130, 6], False).swizzle_data(x)
    assert_same_bytes(get("blackwell_act_sf").apply(x).reshape(-1), got.reshape(-1))


def test_triton_kernels_ragged_activation_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """One padded block range an expert, empty experts, unused blocks zero: the vendor's padding kernel in the interpreter."""
    cls = act_scale_layout()
    if torch.cuda.is_available():
        pytest.skip("runs in Triton's interpreter, which is for machines without a GPU")
    monkeypatch.setattr("triton_kernels.target_info.num_sms", lambda: 4)
    sizes = [130, 0, 5, 256]
    blocks = [-(-n // 128) for n in sizes]
    schedule = [(b << 16) | e for e, n in enumerate(blocks) for b in range(n)]
    total = -(-(sum(sizes) - len(sizes) + 1) // 128) + len(sizes) - 1  # the library's static bound
    metadata = types.SimpleNamespace(
        slice_sizes=torch.tensor(sizes, dtype=torch.int32),
        slice_offs=torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32),
        block_offs=lambda size: torch.tensor([0, *np.cumsum(blocks)], dtype=torch.int32),
        block_schedule=lambda size: torch.tensor([*schedule, *[-1] * (total - len(schedule))], dtype=torch.int32),
        n_blocks=lambda *a: total,
    )
    x = tensor(sum(sizes), 6)
    got = cls(metadata).make_transformation([sum(sizes), 6], False).swizzle_data(x)
    segmented = Segmented(get("blackwell_act_sf"), (0, *np.cumsum(sizes).tolist()), capacity=128 * total)
    assert_same_bytes(segmented.apply(x), got.reshape(-1))


# ---- Marlin: vLLM and SGLang ---------------------------------------------------------------------------------------------------------

VLLM = "model_executor/layers/quantization/utils"
MARLIN = [("vllm", f"{VLLM}/marlin_utils"), ("sglang", "srt/layers/quantization/marlin_utils")]


@pytest.mark.parametrize(("n", "k"), [(64, 32), (192, 96), (320, 160), (128, 512)])
@pytest.mark.parametrize("eight", [False, True])
def test_vllm_marlin_weights(n: int, k: int, eight: bool) -> None:
    path = folder("vllm") / f"{VLLM}/marlin_utils_test.py"
    f = functions(
        path, "get_weight_perm", "marlin_permute_weights", "marlin_weights", GPTQ_MARLIN_TILE=16, get_pack_factor=lambda bits: 32 // bits
    )
    codes = tensor(n, k // 2)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).reshape(n, k)
    want = f.marlin_weights(nibbles.t().contiguous().int(), k, n, 4, f.get_weight_perm(4, eight), is_a_8bit=eight)
    layout = get("marlin_w_a8" if eight else "marlin_w")
    assert_same_bytes(layout.apply(codes), want.view(torch.uint8).reshape(-1), layout=layout, shape=(n, k // 2))


@pytest.mark.parametrize(("package", "path"), MARLIN, ids=["vllm", "sglang"])
@pytest.mark.parametrize(("n", "groups"), [(64, 4), (192, 3), (320, 1), (128, 1)])
def test_marlin_scale_and_bias_orders(package: str, path: str, n: int, groups: int) -> None:
    f = functions(folder(package) / f"{path}.py", "get_scale_perms", "marlin_permute_scales", "marlin_permute_bias")
    x = tensor(n, groups)
    grouped = f.marlin_permute_scales(x.t().contiguous(), groups * 32, n, 32)
    assert_same_bytes(get("marlin_sf" if groups > 1 else "marlin_sf_single").apply(x), grouped.reshape(-1))
    if package == "vllm":
        eight = f.marlin_permute_scales(x.t().contiguous(), groups * 32, n, 32, is_a_8bit=True)
        assert_same_bytes(get("marlin_sf_single").apply(x), eight.reshape(-1))
    bias = torch.arange(n, dtype=torch.float32)
    assert torch.equal(get("marlin_bias").apply_rows(bias), f.marlin_permute_bias(bias))


@pytest.mark.parametrize(("package", "path"), MARLIN, ids=["vllm", "sglang"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "groups", "top"), [(64, 4, 0x7E), (192, 3, 0x50), (128, 1, 0x38), (64, 2, 0x08)])
def test_marlin_nvfp4_scales_with_their_encode(package: str, path: str, dtype: torch.dtype, n: int, groups: int, top: int) -> None:
    """Encode then layout == the library's permute then process: SGLang is rule v1, vLLM 0.26 and later rule v3."""
    root = folder(package)
    f = functions(root / f"{path}.py", "get_scale_perms", "marlin_permute_scales")
    source = (root / f"{path}_fp4.py").read_text() if (root / f"{path}_fp4.py").is_file() else ""
    rule = "v1" if "_nvfp4_compute_scale_factor" not in source else "v3" if "floor()" in source else "v2"
    names = ["nvfp4_marlin_process_scales", "nvfp4_marlin_process_global_scale"]
    g = functions(root / f"{path}_fp4.py", *names, *(["_nvfp4_compute_scale_factor"] if rule != "v1" else []))
    scale = (tensor(n, groups, seed=3) % (top + 1)).to(torch.uint8)
    permuted = f.marlin_permute_scales(scale.view(torch.float8_e4m3fn).t().contiguous().to(dtype), groups * 16, n, 16)
    made = g.nvfp4_marlin_process_scales(permuted, a_dtype=dtype) if rule != "v1" else (g.nvfp4_marlin_process_scales(permuted), 1.0)
    want, factor = made if isinstance(made, tuple) else (made, 1.0)
    data, mine = encode.marlin_nvfp4(rule, dtype)(scale)
    layout = get("marlin_mx_sf" if groups > 1 else "marlin_mx_sf_single")
    assert mine == factor
    assert_same_bytes(layout.apply(data), want.view(torch.uint8).reshape(-1), layout=layout, shape=(n, groups))
    global_scale = torch.tensor([3.1e-5])
    kernel = g.nvfp4_marlin_process_global_scale(global_scale, dtype) if rule != "v1" else None
    if kernel is not None:
        assert torch.equal(encode.marlin_global_scale(global_scale, mine, dtype), kernel / factor)


@pytest.mark.parametrize(("package", "path"), MARLIN, ids=["vllm", "sglang"])
@pytest.mark.parametrize(("n", "groups"), [(64, 4), (192, 3), (128, 1)])
def test_marlin_mxfp4_scales(package: str, path: str, n: int, groups: int) -> None:
    root = folder(package)
    f = functions(root / f"{path}.py", "get_scale_perms", "marlin_permute_scales")
    g = functions(root / f"{path}_fp4.py", "mxfp4_marlin_process_scales")
    scale = (tensor(n, groups) % 253 + 1).to(torch.uint8)
    permuted = f.marlin_permute_scales(scale.view(torch.float8_e8m0fnu).t().contiguous().to(torch.bfloat16), groups * 32, n, 32)
    want = g.mxfp4_marlin_process_scales(permuted)
    layout = get("marlin_mx_sf" if groups > 1 else "marlin_mx_sf_single")
    assert_same_bytes(layout.apply(encode.marlin_mxfp4()(scale).data), want.view(torch.uint8).reshape(-1), layout=layout, shape=(n, groups))


def test_vllm_marlin_mxfp4_with_8_bit_activations() -> None:
    root = folder("vllm")
    f = functions(root / f"{VLLM}/marlin_utils.py", "get_scale_perms", "marlin_permute_scales")
    g = functions(root / f"{VLLM}/marlin_utils_fp4.py", "mxfp4_marlin_process_scales")
    scale = (tensor(192, 6) % 248 + 1).to(torch.uint8)
    permuted = f.marlin_permute_scales(scale.view(torch.float8_e8m0fnu).t().contiguous().to(torch.bfloat16), 192, 192, 32, is_a_8bit=True)
    want = g.mxfp4_marlin_process_scales(permuted, input_dtype=torch.float8_e4m3fn)
    assert_same_bytes(get("marlin_sf_single").apply(encode.marlin_mxfp4("a8")(scale).data), want.view(torch.uint8).reshape(-1))


# ---- DeepGEMM ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mn", "groups"), [(4, 4), (130, 7), (512, 12), (64, 1)])
def test_deepgemm_packed_ue8m0(mn: int, groups: int) -> None:
    """The strided view is compared: rows up to the aligned count are undefined on the device."""
    path = folder("deep_gemm") / "utils" / "layout.py"
    f = functions(
        path,
        "_pack_fp32_into_ue8m0_fallback",
        align=lambda x, y: -(-x // y) * y,
        get_tma_aligned_size=lambda mn, size: -(-mn // (16 // size)) * (16 // size),
    )
    scale = torch.exp2((tensor(2, mn, groups).int() % 200 - 100).float())
    want = f._pack_fp32_into_ue8m0_fallback(scale)
    data, _ = encode.FP32_TO_UE8M0(scale)
    got = get("deepgemm_sf").apply(data).view(torch.int32).reshape(2, want.shape[2], -1).transpose(1, 2)[:, :mn]
    assert_same_bytes(got, want)
    assert get("deepgemm_sf").padded((2, mn, groups))[1] * 1 == want.stride(2)


@pytest.mark.parametrize(("mn", "words"), [(128, 1), (384, 3), (640, 2)])
def test_deepgemm_mega_moe(mn: int, words: int) -> None:
    path = folder("deep_gemm") / "mega" / "__init__.py"
    f = functions(path, "_interleave_weights", "_interleave_weights_packed_fp4", "_transpose_sf_for_utccp")
    w = tensor(2, mn, 24)
    assert_same_bytes(get("deepgemm_gate_up").apply(w).reshape(w.shape), f._interleave_weights(w))
    assert_same_bytes(get("deepgemm_gate_up_fp4").apply(w).reshape(w.shape), f._interleave_weights_packed_fp4(w))
    sf = tensor(2, mn, 4 * words)
    packed = sf.view(torch.int32)
    assert_same_bytes(get("deepgemm_utccp").apply(sf).view(torch.int32).reshape(packed.shape), f._transpose_sf_for_utccp(packed))
    # the whole road of the first layer's scales: gate/up rows, UTCCP rows, MN-major words
    chain = get("deepgemm_gate_up") >> get("deepgemm_utccp") >> get("deepgemm_sf")
    want = f._transpose_sf_for_utccp(f._interleave_weights(packed)).transpose(1, 2).contiguous()
    assert_same_bytes(chain.apply(sf).view(torch.int32).reshape(want.shape), want)


# ---- aiter ---------------------------------------------------------------------------------------------------------------------------


def test_aiter_shuffles() -> None:
    root = folder("aiter")
    f = functions(root / "ops" / "shuffle.py", "shuffle_weight", "shuffle_weight_a16w4", "shuffle_scale_a16w4")
    for shape in ((1, 16, 64), (3, 96, 192), (2, 160, 320)):
        w = tensor(*shape)
        assert_same_bytes(get("aiter_w").apply(w).reshape(shape), f.shuffle_weight(w))
        assert_same_bytes(get("aiter_w_a16w4").apply(w).reshape(shape), f.shuffle_weight_a16w4(w, 16, False))
        if shape[1] % 32 == 0:
            assert_same_bytes(get("aiter_w_gu").apply(w).reshape(shape), f.shuffle_weight_a16w4(w, 16, True))
    for e, n, g in ((1, 64, 8), (3, 192, 24), (2, 96, 16)):
        s = tensor(e, n, g)
        flat = s.reshape(e * n, g)
        assert_same_bytes(get("aiter_sf_gu").apply(s).reshape(-1), f.shuffle_scale_a16w4(flat, e, True).reshape(-1))
        assert_same_bytes(get("cdna4_sf").apply(s).reshape(-1), f.shuffle_scale_a16w4(flat, e, False).reshape(-1))


@pytest.mark.parametrize(("m", "n"), [(256, 8), (300, 13), (768, 24)])
def test_aiter_e8m0_shuffle(m: int, n: int) -> None:
    """Its padding is uninitialised memory: only the stored places of real cells are compared."""
    f = functions(folder("aiter") / "utility" / "fp4_utils.py", "e8m0_shuffle")
    s = tensor(m, n)
    want = f.e8m0_shuffle(s).reshape(-1)
    layout = get("aiter_sf")
    assert want.numel() == layout.nbytes((m, n))
    at = layout.offset((m, n), torch.arange(m)[:, None], torch.arange(n))
    assert_same_bytes(layout.apply(s)[at], want[at])


# ---- CPU packs (vLLM's CPU wheel) ----------------------------------------------------------------------------------------------------


def cpu_ops() -> Any:
    library = folder("vllm") / "_C.abi3.so"
    if not library.is_file():
        pytest.skip("the installed vllm has no CPU library")
    try:
        torch.ops.load_library(str(library))
        return torch.ops._C.convert_weight_packed, torch.ops._C.convert_scale_packed
    except (OSError, AttributeError) as error:
        pytest.skip(f"vLLM's CPU library does not load here: {str(error)[:120]}")


@pytest.mark.parametrize(("e", "n", "k"), [(1, 32, 64), (2, 96, 192), (3, 160, 320)])
def test_cpu_packs(e: int, n: int, k: int) -> None:
    weight, scale = cpu_ops()
    w, s = tensor(e, n, k // 2), tensor(e, n, k // 32)
    assert_same_bytes(get("cpu_amx_w").apply(w).reshape(-1), weight(w).reshape(-1))
    assert_same_bytes(get("cpu_amx_sf").apply(s).reshape(-1), scale(s).reshape(-1))


def test_a_wrong_layout_would_be_seen() -> None:
    """The comparison of this file can fail: a layout with two axes exchanged does not equal FlashInfer's reference."""
    reference = flashinfer("batch_invariant.quantization.layout")
    s = tensor(256, 8)
    wrong = Layout("wrong", "(mo m4 m32) (ko k4) -> ko mo m32 m4 k4", pad=(128, 4))
    with pytest.raises(AssertionError, match="bytes differ"):
        assert_same_bytes(wrong.apply(s), reference.swizzle_sf(s, 256, 128, 16, "128x4"))
    assert fp4.layouts["sf_128x4"] != wrong
