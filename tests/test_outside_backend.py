"""Backends of other distributions: whatever they answer, the others stay usable and no wrong result goes on as numbers."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fp4
from fp4.gpu import registry
from fp4.gpu.backends import reference
from fp4.gpu.registry import No, Ok
from fp4.gpu.storage import Stored
from fp4.prepared import Packed

Q = fp4.quantize(torch.randn(96, 64), "nvfp4")
X = torch.randn(5, 64)


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """``outside(name=..., run=...)``: an installed backend that wins, with some names replaced."""

    def install(**names: Any) -> None:
        good = {"name": "mine", "probe": lambda: Ok(), "supports": lambda p: Ok(1, "mine"), "layouts": reference.layouts}
        module = types.SimpleNamespace(**(good | {"run": reference.run} | names))
        entry = types.SimpleNamespace(name="mine", value="mine_fp4", load=lambda: module)
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry])
        registry.reset()

    yield install
    monkeypatch.undo()
    registry.reset()


def test_a_good_one_is_used(outside: Callable[..., None]) -> None:
    outside()
    w = fp4.prepare(Q)
    assert w.backend == "mine"
    assert torch.equal(fp4.matmul(X, w), X @ fp4.dequantize(Q).T)
    assert fp4.matmul(X[None], w, out_dtype=torch.bfloat16).shape == (1, 5, 96)


def test_the_probe_speaks_once_behind_the_verdict(outside: Callable[..., None]) -> None:
    """Which copy of a library was found stands in every ranking; not twice where the verdict says it too."""
    outside(probe=lambda: Ok(note="lib 1.2"))
    assert fp4.explain("matmul", "nvfp4", "cpu")[0].verdict == Ok(1, "mine [lib 1.2]")
    outside(probe=lambda: Ok(note="lib 1.2"), supports=lambda p: Ok(1, "mine of lib 1.2"))
    assert fp4.explain("matmul", "nvfp4", "cpu")[0].verdict == Ok(1, "mine of lib 1.2")


def test_each_decision_is_logged_once(
    outside: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outside()
    monkeypatch.setattr(registry, "_logged", set())
    with caplog.at_level("INFO", logger="fp4"):
        for _ in range(3):
            fp4.prepare(Q)
        assert [r.message for r in caplog.records] == ["CPU: matmul/nvfp4 -> mine               rank 1   mine"]
        fp4.prepare(fp4.quantize(torch.randn(4, 64), "mxfp4"))
    assert len(caplog.records) == 2


def _exits(*args: Any) -> Any:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("what", "answer"),
    [
        ("supports", lambda p: Ok("high")),  # type: ignore[arg-type]
        ("supports", lambda p: Ok(None)),  # type: ignore[arg-type]
        ("supports", lambda p: Ok(float("nan"))),  # type: ignore[arg-type]
        ("supports", lambda p: Ok(True)),
        ("supports", lambda p: Ok(1, None)),  # type: ignore[arg-type]
        ("supports", lambda p: No(None)),  # type: ignore[arg-type]
        ("supports", _exits),
        ("probe", lambda: Ok(0, 5)),  # type: ignore[arg-type]
        ("probe", _exits),
        ("name", None),
        ("name", ""),
        ("name", "a,b"),
        ("name", "a\nb"),
        ("name", ["a"]),
    ],
)
def test_what_is_no_answer_is_listed_and_not_used(outside: Callable[..., None], what: str, answer: Any) -> None:
    outside(**{what: answer})
    w = fp4.prepare(Q)
    assert w.backend == "reference"
    ranking = fp4.explain(device="cpu", n=96, k=64)
    assert ranking.best == "reference"
    assert "mine" in ranking.reasons
    assert len(ranking.reasons["mine"].splitlines()) == 1


def test_a_family_that_is_no_name(outside: Callable[..., None]) -> None:
    outside(family=["x"])
    assert fp4.prepare(Q).backend == "mine"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"run": lambda p: None}, "run returned None"),
        ({"prepare": lambda p, w: None}, "returned None; need a Packed"),
        ({"prepare": lambda p, w: Packed({})}, "need a Packed"),
        ({"prepare": lambda p, w: Packed({"codes": 3})}, "need a Packed"),  # type: ignore[dict-item]
        ({"layouts": lambda p: {"codes": "plain", "scale": "plain"}}, "need a Stored"),
        ({"layouts": lambda p: {"codes": Stored(), "scale": Stored(), "more": 3}}, "need a Stored"),
    ],
)
def test_what_cannot_be_run_is_one_sentence(outside: Callable[..., None], names: dict[str, Any], words: str) -> None:
    outside(**names)
    with pytest.raises(fp4.BackendUnavailable, match=words) as error:
        fp4.prepare(Q)
    assert "'mine'" in str(error.value)


@pytest.mark.parametrize("op", ["matmul", "moe"])
@pytest.mark.parametrize(
    "result", [None, torch.zeros(1, 1), torch.zeros(6, 96), torch.zeros(5, 96).double(), torch.zeros(5, 96, device="meta")]
)
def test_a_result_of_another_shape_or_dtype_is_no_result(outside: Callable[..., None], op: str, result: Any) -> None:
    outside(run=lambda p: lambda *args: result)
    w13, w2 = fp4.quantize(torch.randn(2, 64, 64), "mxfp4"), fp4.quantize(torch.randn(2, 64, 32), "mxfp4")
    w, ex = fp4.prepare(Q), fp4.prepare_moe(w13, w2, gate_up="gate_up")
    ids, weights = torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1)
    calls = {"matmul": lambda: fp4.matmul(X, w), "moe": lambda: fp4.moe(X, ex, ids, weights)}
    with pytest.raises(fp4.BackendUnavailable, match="'mine': its call returned"):
        calls[op]()


def test_metadata_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(group: str) -> Any:
        raise ValueError("no metadata here")

    monkeypatch.setattr(importlib.metadata, "entry_points", broken)
    registry.reset()
    try:
        assert fp4.prepare(Q).backend == "reference"
        assert "no metadata here" in registry.rank(fp4.prepare(Q).problem).reasons["fp4.backends"]
    finally:
        monkeypatch.undo()
        registry.reset()


def test_spaces_around_a_name_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP4_DISABLE took them off, FP4_BACKEND did not."""
    for value, backend in ((" reference ", "reference"), ("  ", "reference")):
        monkeypatch.setenv("FP4_BACKEND", value)
        assert fp4.prepare(Q).backend == backend
    monkeypatch.setenv("FP4_BACKEND", "refer ence")
    with pytest.raises(fp4.BackendUnavailable, match="did you mean 'reference'"):
        fp4.prepare(Q)


def test_the_backend_of_the_page_installs_and_runs(tmp_path: Path) -> None:
    """``docs/backends.md``: its module and its entry point, as an installed distribution in a process of its own."""
    page = (Path(__file__).parents[1] / "docs" / "backends.md").read_text()
    module, entry = (re.findall(rf"```{kind}\n(.*?)```", page, re.S)[0] for kind in ("python", "toml"))
    (tmp_path / "my_kernels.py").write_text(module)
    group, line = entry.strip().splitlines()
    assert group == '[project.entry-points."fp4.backends"]'
    info = tmp_path / "my_kernels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_kernels\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fp4.backends]\n" + line.replace('"', "") + "\n")
    code = """
import sys, torch, fp4
q, x, bias = fp4.quantize(torch.randn(96, 64)), torch.randn(5, 64), torch.randn(96)
w = fp4.prepare(q)
assert w.backend == "my_kernels", w.explain()
assert torch.allclose(fp4.matmul(x, w, bias), x @ fp4.dequantize(q).T + bias, atol=1e-5)
assert torch.equal(w.restore().scale, q.scale) and w.arrays["scale"].shape == (512,)
w.save(sys.argv[1])
assert torch.equal(fp4.matmul(x, fp4.load_prepared(sys.argv[1])), fp4.matmul(x, w))
for device, op, act, why in (("sm90", "matmul", "any", "runs on CPUs"), ("cpu", "moe", "any", "linear layers only"),
                             ("cpu", "matmul", "nvfp4", "keeps activations")):
    assert why in fp4.explain(op, "nvfp4", device, act=act).reasons["my_kernels"], (device, op, act)
"""
    where = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", code, str(tmp_path / "w.fp4")]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": where}, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
