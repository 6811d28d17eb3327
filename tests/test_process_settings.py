"""What else a process has set changes no number: autocast, float32 precision, default dtype and device, fake tensors."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import fp4
import fp4.ref.matmul as reference
from fp4 import formats
from fp4 import recipe as recipes
from fp4.ref import quantize as ref_quantize
from fp4.ref import scales
from fp4.ref.matmul import matmul
from fp4.ref.moe import moe

SAMPLES = Path(__file__).parent / "data" / "checkpoints"
X, W = torch.randn(5, 64), torch.randn(96, 64)
W13, W2 = fp4.quantize(torch.randn(4, 64, 64), "mxfp4"), fp4.quantize(torch.randn(4, 64, 32), "mxfp4")
IDS, WEIGHTS = torch.tensor([[0, 3], [2, -1], [1, 1], [0, 2], [3, 2]]), torch.rand(5, 2)


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.fixture(params=["highest", "high", "medium", "onednn bf16", "all tf32"])
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "onednn bf16":
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    elif request.param == "all tf32":
        torch.backends.fp32_precision = "tf32"
    else:
        torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.backends.fp32_precision = "none"
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


def _outputs() -> dict[str, torch.Tensor]:
    q = fp4.quantize(W, "nvfp4")
    ex = fp4.prepare_moe(W13, W2, gate_up="gate_up", activation=fp4.SiLU())
    how: dict[str, Any] = {"gate_up": "gate_up", "activation": fp4.SiLU()}
    return {
        "matmul": fp4.matmul(X, fp4.prepare(q)),
        "moe": fp4.moe(X, ex, IDS, WEIGHTS),
        "reference matmul": matmul(X, q),
        "reference moe": moe(X, W13, W2, IDS, WEIGHTS, **how),
        "float64": matmul(X, q, acc=torch.float64),
        "op": torch.ops.fp4.matmul(X, None, KEPT.handle, KEPT.n),
        "fold": fp4.open_checkpoint(SAMPLES / "modelopt" / "nvfp4_svd").dequantize(
            "model.layers.0.mlp.down_proj.weight", torch.float32, fold=True
        ),
    }


KEPT = fp4.prepare(fp4.quantize(W, "nvfp4"))
PLAIN = _outputs()


def test_autocast_does_not_shorten_products() -> None:
    """bfloat16 products are 3e-3 off, and the result would still be called float32."""
    with autocast():
        assert (X @ W.T).dtype == torch.bfloat16
        got = _outputs()
    for name, want in PLAIN.items():
        assert torch.equal(got[name], want), name


def test_float32_precision_does_not_shorten_products(precision: str) -> None:
    got = _outputs()
    for name, want in PLAIN.items():
        assert float((got[name] - want).norm() / want.norm()) < 1e-6, (precision, name)
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    exact = a.double() @ b.double()
    assert float((reference.product(a, b).double() - exact).norm() / exact.norm()) < 1e-6


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
def test_default_dtype_is_not_in_the_numbers(default: torch.dtype) -> None:
    """Engines set it to the model's while they load. 1 / 6 in bfloat16 is another code for one element in three hundred."""
    presets = [(recipes.get(name, fmt), formats.get(fmt)) for name in fp4.recipes.names() for fmt in ("nvfp4", "mxfp4")]

    def numbers() -> list[Any]:
        targets = [float(scales.reciprocal(torch.tensor(how.elem_max), how)) for how, _ in presets]
        return [targets, *(ref_quantize.quantize_blocks(W, fmt, how)[0].tolist() for how, fmt in presets)]

    want = numbers()
    torch.set_default_dtype(default)
    try:
        assert numbers() == want
        assert torch.equal(fp4.matmul(X, KEPT), PLAIN["matmul"])
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("setting", [torch.bfloat16, torch.float64, "meta"], ids=str)
def test_constants_of_the_kernels_are_float32_of_the_host(setting: torch.dtype | str) -> None:
    """1 / 5.3 of a recipe of one's own: 5.3 is no bfloat16 number, and on the meta device it is no number at all."""
    from fp4.ref import triton_quantize

    how, limit = recipes.Recipe(elem_max=5.3), fp4.SwiGLU().limit

    def numbers() -> list[Any]:
        triton_quantize._constants.cache_clear()
        triton_quantize._exact.cache_clear()
        made = triton_quantize._constants(fp4.NVFP4, how, torch.bfloat16)
        return [made["RCP_TARGET"], made["TARGET"], triton_quantize._exact(limit, torch.bfloat16)]

    want = numbers()
    assert want[0] == float(torch.tensor(5.3, dtype=torch.float32).reciprocal())
    dtype = setting if isinstance(setting, torch.dtype) else torch.float32
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cpu" if isinstance(setting, torch.dtype) else setting):
            assert numbers() == want
    finally:
        torch.set_default_dtype(torch.float32)
        triton_quantize._constants.cache_clear()
        triton_quantize._exact.cache_clear()


#: constructors of torch whose result has the process's default device, and dtype where none is given
_MADE = {"tensor", "zeros", "ones", "empty", "full", "arange", "linspace", "eye", "rand", "randn", "randint", "randperm"}


def test_kernels_name_the_device_of_what_they_make() -> None:
    """Every torch constructor beside the kernels names its device, and its dtype unless it counts (arange): a default is the process's."""
    root = Path(fp4.__file__).parent
    files = [*(root / "ref").glob("triton_*.py"), *(root / "gpu" / "kernels").glob("*.py")]
    calls, wrong = 0, []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MADE):
                continue
            if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
                continue
            calls += 1
            given = {k.arg for k in node.keywords}
            if "device" not in given or not ("dtype" in given or node.func.attr == "arange"):
                wrong.append(f"{file.name}:{node.lineno} torch.{node.func.attr}")
    assert calls > 30
    assert not wrong


def test_default_device_is_not_where_a_checkpoint_goes() -> None:
    """Engines build models under ``torch.device("meta")`` or ``"cuda"``: values that go there are lost, or a copy that nobody asked for."""
    for folder in ("modelopt/nvfp4", "amd_quark/mxfp4", "gpt_oss_mxfp4/hf", "deepseek_v4_style", "torchao/mxfp4"):
        if not (SAMPLES / folder).exists():
            continue
        ck = fp4.open_checkpoint(SAMPLES / folder)
        want = {name: ck.dequantize(name, torch.float32) for name in ck.names()}
        with torch.device("meta"):
            again = fp4.open_checkpoint(SAMPLES / folder)
            for name, value in want.items():
                assert torch.equal(again.dequantize(name, torch.float32), value), (folder, name)
                got = again[name]
                assert got.device.type == "cpu"
    with torch.device("meta"):
        assert all(torch.equal(value, PLAIN[name]) for name, value in _outputs().items())


FAKE = """
import sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
import fp4
from fp4.ref.matmul import matmul

w, x = torch.randn(96, 64), torch.randn(3, 64)
for fmt in ("nvfp4", "mxfp4", "mxfp8"):
    for recipe in ("default", "flashinfer_fast"):
        if sys.argv[1] == "warm":
            fp4.dequantize(fp4.quantize(w, fmt, recipe))
        with FakeTensorMode():
            q = fp4.quantize(torch.randn(96, 64), fmt, recipe)
            assert fp4.dequantize(q).shape == (96, 64)
            assert matmul(torch.randn(3, 64), q).shape == (3, 96)
        q = fp4.quantize(w, fmt, recipe)
        assert torch.allclose(fp4.matmul(x, fp4.prepare(q)), x @ fp4.dequantize(q).T, atol=1e-4)
"""


@pytest.mark.parametrize("first", ["cold", "warm"])
def test_fake_tensors_leave_nothing_behind(first: str) -> None:
    """A table kept from inside FakeTensorMode (export, estimates of memory) made every later call of the process fail."""
    done = subprocess.run([sys.executable, "-c", FAKE, first], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def _derivatives() -> dict[str, Callable[[], Any]]:
    ex = fp4.prepare_moe(W13, W2, gate_up="gate_up", activation=fp4.SiLU())
    verbs: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "matmul": lambda x: fp4.matmul(x, KEPT),
        "moe": lambda x: fp4.moe(x, ex, IDS, WEIGHTS),
        "fake_quantize": fp4.fake_quantize,
    }

    def dual(verb: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(verb(forward_ad.make_dual(X, torch.ones_like(X)))).tangent

    out: dict[str, Callable[[], Any]] = {}
    for name, verb in verbs.items():
        out[f"{name}, forward mode"] = lambda v=verb: dual(v)  # type: ignore[misc]
        out[f"{name}, jvp"] = lambda v=verb: torch.func.jvp(v, (X,), (X,))  # type: ignore[misc]
        out[f"{name}, vjp"] = lambda v=verb: torch.func.vjp(v, X)[1](X)  # type: ignore[misc]
    out["fake_quantize, grad of vmap"] = lambda: torch.func.grad(lambda x: torch.vmap(fp4.fake_quantize)(x[None]).sum())(X)
    return out


@pytest.mark.parametrize("case", list(_derivatives()))
def test_a_tangent_is_refused_and_not_dropped(case: str) -> None:
    """A Triton kernel, and fake_quantize on any device, gave no tangent: a derivative of zero."""
    with pytest.raises(fp4.Unsupported, match="forward-mode AD"):
        _derivatives()[case]()


def test_a_dual_level_without_a_tangent_is_no_reason() -> None:
    with forward_ad.dual_level():
        assert torch.equal(fp4.matmul(X, KEPT), PLAIN["matmul"])
    assert torch.allclose(torch.vmap(lambda row: fp4.matmul(row, KEPT))(X), PLAIN["matmul"], atol=1e-5)


def test_bytes_do_not_go_to_the_meta_device(tmp_path: Path) -> None:
    """``prepare(q, device="meta")`` was a weight without bytes, which save met with an error of safetensors."""
    with pytest.raises(fp4.FormatMismatch, match="no bytes"):
        fp4.prepare(fp4.quantize(W), device="meta")
    with pytest.raises(fp4.FormatMismatch, match="no bytes"):
        fp4.prepare_moe(W13, W2, gate_up="gate_up", device="meta")
    KEPT.save(tmp_path / "w.safetensors")
    with pytest.raises(fp4.FormatMismatch, match="would be lost"):
        fp4.load_prepared(tmp_path / "w.safetensors", device="meta")


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "quant_cfg.json"])
@pytest.mark.parametrize("kind", ["dangling link", "folder", "loop"])
def test_a_config_that_is_there_and_cannot_be_read(tmp_path: Path, name: str, kind: str) -> None:
    """A snapshot whose download broke off has links to blobs that never came; it was read as if it had no config."""
    folder = tmp_path / "ck"
    shutil.copytree(SAMPLES / "modelopt" / "nvfp4", folder)
    (folder / name).unlink(missing_ok=True)
    if kind == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to(name if kind == "loop" else "../blobs/0123")
    with pytest.raises(fp4.CheckpointError, match=name):
        fp4.open_checkpoint(folder)


@pytest.mark.gpu
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_default_dtype_is_not_in_the_bytes_of_a_gpu(default: torch.dtype) -> None:
    """The GPU quantiser keeps its constants; the first call of a process that loads a bfloat16 model made them in bfloat16."""
    from fp4.ref import triton_quantize

    x = torch.randn(256, 512).bfloat16()
    want = {name: fp4.quantize(x, "nvfp4", name) for name in ("default", "te", "flashinfer_fast")}
    triton_quantize._constants.cache_clear()
    torch.set_default_dtype(default)
    try:
        got = {name: fp4.quantize(x.cuda(), "nvfp4", name) for name in want}
    finally:
        torch.set_default_dtype(torch.float32)
        triton_quantize._constants.cache_clear()
    for name, q in want.items():
        assert torch.equal(got[name].codes.cpu(), q.codes), name
        assert torch.equal(got[name].scale.cpu(), q.scale), name


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["high", "medium", "autocast"])
def test_the_reference_on_a_gpu_stays_in_float32(how: str) -> None:
    """TF32 is 1e-3 off, and is what engines set."""
    q, x = fp4.quantize(torch.randn(96, 512).cuda(), "nvfp4"), torch.randn(32, 512).cuda()
    want = matmul(x, q, acc=torch.float64)
    if how != "autocast":
        torch.set_float32_matmul_precision(how)
    try:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=how == "autocast"):
            got = fp4.matmul(x, fp4.prepare(q, "reference"))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert float((got.double() - want.double()).norm() / want.double().norm()) < 1e-6
