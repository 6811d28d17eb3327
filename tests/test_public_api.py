"""What the public names promise beyond their main road: the small ones that other people's code calls."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

import fp4
from fp4 import encode, errors
from fp4.gpu.device import Device
from fp4.gpu.problem import Problem

ROOT = Path(__file__).parents[1]
FORMATS = [fp4.NVFP4, fp4.MXFP4, fp4.MXFP8, fp4.NVFP4_B32, fp4.AMDFP4]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_scale_f32_is_the_value_of_each_byte(fmt: fp4.Format) -> None:
    """All 256 bytes, NaN ones too; with codes of 1.0 it is what dequantize gives without a global scale."""
    scale = torch.arange(256, dtype=torch.uint8).reshape(4, 64)
    one = {2: 0x22, 1: 0x38}[fmt.codes_per_byte]
    q = fp4.QuantizedTensor(fmt, torch.full((4, 64 * fmt.block // fmt.codes_per_byte), one, dtype=torch.uint8), scale)
    got = q.scale_f32
    assert got.dtype == torch.float32
    assert got.shape == (4, 64)
    np.testing.assert_array_equal(got.numpy().reshape(-1), fmt.scale.values)
    torch.testing.assert_close(fp4.dequantize(q)[:, :: fmt.block], got, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_float64_holds_the_float32_values(fmt: fp4.Format) -> None:
    q = fp4.quantize(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), fmt)
    wide = fp4.dequantize(q, torch.float64)
    assert wide.dtype == torch.float64
    assert torch.equal(wide, fp4.dequantize(q).double())


def test_plain_is_the_identity() -> None:
    x = torch.arange(15, dtype=torch.uint8).reshape(3, 5)
    assert fp4.layouts["plain"] == fp4.layouts.PLAIN
    assert torch.equal(fp4.layouts.PLAIN.apply(x), x.reshape(-1))
    assert torch.equal(fp4.to_layout(x, fp4.layouts.PLAIN).restore(), x)


def test_explain_takes_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    problem = Problem("matmul", fp4.MXFP4, Device.of("sm90"), n=128, k=256)
    by_problem = fp4.explain(problem)
    printed = capsys.readouterr().out
    by_words = fp4.explain("matmul", "mxfp4", "sm90", n=128, k=256)
    assert capsys.readouterr().out == printed
    assert list(by_problem) == list(by_words)
    for extra in ({"n": 3}, {"device": "cpu"}, {"format": "mxfp8"}):
        with pytest.raises(fp4.FormatMismatch, match="need one of them"):
            fp4.explain(problem, **extra)


def test_an_encode_says_what_it_loses() -> None:
    e = encode.Encode("twice", lambda x: encode.Encoded(x, 1.0), None, True)
    assert e.exact(torch.zeros(3, dtype=torch.uint8)).all()
    with pytest.raises(fp4.FormatMismatch, match="need exact"):
        encode.Encode("half", lambda x: encode.Encoded(x >> 1, 1.0), None, False)


def test_a_dialect_that_is_not_read_has_an_error_of_its_own(tmp_path: Path) -> None:
    """Damage and contradiction are CheckpointError; another dialect is the subclass that callers may skip."""
    from safetensors.torch import save_file

    save_file({"a.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    for method in ("bitsandbytes", "gptq", "nobody-knows"):
        (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "%s"}}' % method)  # noqa: UP031
        with pytest.raises(fp4.CheckpointDialect, match=method):
            fp4.open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP5"}}')
    with pytest.raises(fp4.CheckpointDialect, match="NVFP5"):
        fp4.open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(fp4.CheckpointError) as damaged:
        fp4.open_checkpoint(tmp_path)
    assert not isinstance(damaged.value, errors.CheckpointDialect)


def _undocumented(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    out = [] if ast.get_docstring(tree) else [f"{path}: module"]
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        if any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list):
            continue  # a signature of the function below, which has the docstring
        parts = [(node.name, node)]
        if isinstance(node, ast.ClassDef):
            parts += [(f"{node.name}.{m.name}", m) for m in node.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_")]
        out += [f"{path.relative_to(ROOT)}:{n.lineno} {name}" for name, n in parts if not ast.get_docstring(n)]
    return out


#: modules that people outside import from
PUBLIC = [
    "formats",
    "recipe",
    "layout",
    "layout_chain",
    "layouts",
    "tensor",
    "stored",
    "ops",
    "layer",
    "prepared",
    "errors",
    "env",
    "encode",
    "fuse",
]
PUBLIC += [
    "gpu/registry",
    "gpu/problem",
    "gpu/device",
    "gpu/build",
    "gpu/storage",
    "checkpoint/__init__",
    "checkpoint/base",
    "ref/activation",
    "ref/matmul",
]
PUBLIC += [
    "ref/moe",
    "ref/codes",
    "ref/quantize",
    "testing/__init__",
    "testing/compare",
    "testing/mutants",
    "testing/strategies",
    "testing/goldens",
]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented(name: str) -> None:
    missing = _undocumented(ROOT / "fp4" / f"{name}.py")
    assert not missing, missing


def test_verbs_say_what_they_raise() -> None:
    verbs = [n for n in fp4.__all__ if callable(getattr(fp4, n)) and not isinstance(getattr(fp4, n), type)]
    assert len(verbs) >= 12
    silent = [n for n in verbs if "Raises" not in (doc := getattr(fp4, n).__doc__ or "") and "errors as" not in doc]
    assert not silent, silent
