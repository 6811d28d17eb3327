"""Which backend, and why not the others: a table over capabilities with injected devices, forced and disabled backends, outside backends.

What is installed must not matter, so the vendor libraries are answered for: each is once taken as present and once as missing.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fp4
from fp4 import env
from fp4.gpu import registry
from fp4.gpu.backends import reference, triton
from fp4.gpu.backends import triton_kernels as tk
from fp4.gpu.device import SM8X, SM90, SM100, SM120, Capability, Device
from fp4.gpu.problem import Problem
from fp4.gpu.registry import No, Ok

CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]


class Shim:
    """Answers for an installed triton_kernels of a generation."""

    pad_n, pad_k = 64, 64

    def __init__(self, generation: str) -> None:
        self.found = types.SimpleNamespace(generation=generation)
        self.nvfp4, self.tensor_scale = generation in "CD", generation == "D"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("FP4_BACKEND", "FP4_DISABLE", "FP4_STRICT"):
        monkeypatch.delenv(name, raising=False)
    registry.reset()
    yield
    registry.reset()


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Restrict the registry to our three backends, with triton_kernels of a generation, or without."""

    def use(generation: str | None, **more: Any) -> None:
        modules = {"reference": reference, "triton": triton, "triton_kernels": tk, **more}
        monkeypatch.setattr(registry, "_discover", lambda: iter(modules.items()))
        monkeypatch.setattr(tk, "_shim", lambda: tk.Missing("not installed") if generation is None else Shim(generation))
        monkeypatch.setattr(tk, "probe", lambda: No("not installed") if generation is None else Ok(note=f"generation {generation}"))
        registry.reset()

    return use


def problem(cc: tuple[int, int] | None, op: str = "moe", fmt: str = "mxfp4", **more: Any) -> Problem:
    sizes: dict[str, Any] = {"n": 2880, "k": 2880} if op == "matmul" else {"experts": 32, "hidden": 2880, "intermediate": 2880}
    if op == "moe":
        sizes |= {"activation": fp4.SwiGLU(), "gate_up": "interleaved"}
    return Problem(op=op, format=fmt, device=Device.of("cpu") if cc is None else Device.fake(cc), **{**sizes, **more})


#: capability -> best backend for an MXFP4 MoE with triton_kernels installed | without | for an NVFP4 MoE with generation M
TABLE = {
    None: ("reference", "reference", "reference"),
    (7, 5): ("reference", "reference", "reference"),
    (8, 0): ("triton", "triton", "triton"),
    (8, 6): ("triton", "triton", "triton"),
    (8, 9): ("triton", "triton", "triton"),
    (9, 0): ("triton_kernels", "triton", "triton"),
    (10, 0): ("triton", "triton", "triton"),
    (10, 3): ("triton", "triton", "triton"),
    (11, 0): ("triton", "triton", "triton"),
    (12, 0): ("triton", "triton", "triton"),
    (12, 1): ("triton", "triton", "triton"),
}


@pytest.mark.parametrize("cc", list(TABLE))
def test_table_of_capabilities(only: Any, monkeypatch: pytest.MonkeyPatch, cc: tuple[int, int] | None) -> None:
    monkeypatch.setattr(triton, "_interpreted", lambda: False)
    with_it, without, nvfp4 = TABLE[cc]
    only("M")
    assert registry.rank(problem(cc)).best == with_it
    assert registry.rank(problem(cc, fmt="nvfp4")).best == nvfp4
    only(None)
    ranking = registry.rank(problem(cc))
    assert ranking.best == without
    for choice in ranking:  # every line says something
        assert choice.verdict.note if isinstance(choice.verdict, Ok) else len(choice.verdict.reason) > 10, choice


REASONS = {
    (7, 5): "not in its list",
    (10, 0): "Blackwell path",
    (11, 0): "not in its list",
    (12, 0): "shared memory",
    (12, 1): "shared memory",
    None: "needs an NVIDIA GPU",
}


@pytest.mark.parametrize("cc", list(REASONS))
def test_triton_kernels_says_why_not(only: Any, cc: tuple[int, int] | None) -> None:
    only("D")
    verdict = registry.verdict("triton_kernels", problem(cc))
    assert isinstance(verdict, No)
    assert REASONS[cc] in verdict.reason


@pytest.mark.parametrize(
    ("generation", "more", "word"),
    [
        ("M", {"fmt": "nvfp4"}, "no NVFP4"),
        ("C", {"fmt": "nvfp4", "global_scales": "expert"}, "per-expert global scale"),
        ("D", {"act_dtype": torch.float16}, "bfloat16"),
        ("D", {"act": "mxfp8"}, "act='mxfp8'"),
        ("D", {"hidden": 2888}, "not a multiple of the block 32"),
        ("D", {"fmt": "amdfp4"}, "takes MXFP4 and NVFP4"),
    ],
)
def test_triton_kernels_refuses_what_its_generation_cannot_do(only: Any, generation: str, more: dict[str, Any], word: str) -> None:
    only(generation)
    verdict = registry.verdict("triton_kernels", problem((9, 0), **more))
    assert isinstance(verdict, No)
    assert word in verdict.reason


@pytest.mark.parametrize("act", [fp4.SwiGLU(beta=0.0), fp4.SwiGLU(beta=2.0), fp4.SiLU(), fp4.SiTU(), fp4.ReLU2()], ids=str)
def test_activations_that_triton_kernels_cannot_fuse_come_after_our_kernel(only: Any, act: Any) -> None:
    """Its fused SwiGLU adds 1 to the linear half, whatever beta says; other activations are a step of their own."""
    only("D")
    gate_up = "interleaved" if act.gated else None
    given = ((fp4.SwiGLU(beta=1.0), "interleaved"), (act, gate_up))
    fused, other = (registry.verdict("triton_kernels", problem((9, 0), activation=a, gate_up=g)) for a, g in given)
    assert isinstance(fused, Ok)
    assert isinstance(other, Ok)
    assert (fused.rank, other.rank) == (15, 35)
    assert registry.rank(problem((9, 0), activation=act, gate_up=gate_up)).best == "triton"


def test_sizes_may_be_unknown() -> None:
    for op in ("matmul", "moe"):
        ranking = registry.rank(Problem(op=op, format="mxfp4", device=Device.fake((9, 0))))
        assert ranking.best is not None


def test_capabilities_are_names_and_have_no_order() -> None:
    with pytest.raises(TypeError, match="not ordered"):
        assert Capability(12, 1) >= Capability(10, 0)
    with pytest.raises(TypeError, match="not ordered"):
        assert Capability(8, 0) < Capability(9, 0)
    assert Capability(9, 0) == (9, 0)
    assert (12, 1) not in SM100
    assert not SM8X & SM90
    assert not SM100 & SM120
    assert str(Device.fake((12, 1))) == "SM121"
    assert Device.of("sm103").cc == (10, 3)


def test_bytes_of_one_capability_are_no_other_ones() -> None:
    hopper = Device.fake((9, 0))
    assert hopper.same_target(Device.fake((9, 0), name="H200", sms=1))
    for other in (Device.fake((8, 9)), Device.fake((10, 0)), Device.fake((12, 1)), Device.of("cpu")):
        assert not hopper.same_target(other)
        assert not other.same_target(hopper)


# ---- forcing and excluding -----------------------------------------------------------------------------------------------------


def weight() -> fp4.QuantizedTensor:
    return fp4.quantize(torch.arange(32 * 64, dtype=torch.float32).view(32, 64) % 13 - 6, "mxfp4")


def test_forced_backend_is_used_or_raises_its_reason(only: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    only(None)
    assert fp4.prepare(weight(), "reference").backend == "reference"
    with pytest.raises(fp4.BackendUnavailable, match="'triton_kernels' cannot be used: not installed"):
        fp4.prepare(weight(), "triton_kernels")
    with pytest.raises(fp4.BackendUnavailable, match=r"'\w+' is not known; .*(need one of reference|fp4 doctor lists all)"):
        fp4.prepare(weight(), "tritn")
    only("B")
    with pytest.raises(fp4.Unsupported, match="needs an NVIDIA GPU") as e:
        fp4.prepare(weight(), "triton_kernels")
    assert set(e.value.reasons) == {"triton_kernels"}
    monkeypatch.setenv("FP4_BACKEND", "triton_kernels")
    with pytest.raises(fp4.Unsupported, match="FP4_BACKEND='triton_kernels' cannot serve"):
        fp4.prepare(weight())
    assert fp4.prepare(weight(), "reference").backend == "reference"  # an argument beats the environment


def test_disabled_backends(only: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    only("B")
    monkeypatch.setenv("FP4_DISABLE", "triton_kernels, triton")
    assert registry.rank(problem((9, 0))).best == "reference"
    monkeypatch.setenv("FP4_DISABLE", "reference,triton,triton_kernels")
    with pytest.raises(fp4.Unsupported, match="disabled by FP4_DISABLE") as e:
        fp4.prepare(weight())
    assert set(e.value.reasons) == {"reference", "triton", "triton_kernels"}
    with pytest.raises(fp4.Unsupported, match="disabled by FP4_DISABLE"):
        fp4.prepare(weight(), "reference")


def test_numbers_do_not_depend_on_the_environment(only: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    only(None)
    x, w = torch.randn(3, 64), fp4.prepare(weight())
    y = fp4.matmul(x, w)
    for name, value in (("FP4_STRICT", "1"), ("FP4_DISABLE", "triton"), ("FP4_BACKEND", "reference")):
        monkeypatch.setenv(name, value)
        assert torch.equal(fp4.matmul(x, w), y)


# ---- discovery -----------------------------------------------------------------------------------------------------------------


def test_backend_of_another_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry-point group, with a distribution made by hand: one good backend, one that does not import."""
    (tmp_path / "outside_fp4.py").write_text(
        "from fp4.gpu.backends.reference import layouts, probe, run\n"
        "from fp4.gpu.registry import No, Ok\n"
        "name = 'outside'\n"
        "def supports(problem):\n"
        "    return Ok(5, 'from outside') if problem.op == 'matmul' else No('linear layers only, use another backend')\n"
    )
    (tmp_path / "broken_fp4.py").write_text("import a_library_that_is_not_there\n")
    info = tmp_path / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fp4.backends]\noutside = outside_fp4\nbroken = broken_fp4\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.reset()
    assert {"outside", "broken", "reference", "triton", "triton_kernels"} <= set(registry.backends())
    w = fp4.prepare(weight())
    assert w.backend == "outside"
    assert torch.equal(fp4.matmul(torch.ones(2, 64), w), fp4.matmul(torch.ones(2, 64), fp4.prepare(weight(), "reference")))
    assert "linear layers only" in str(registry.rank(problem(None)))
    with pytest.raises(fp4.BackendUnavailable, match="a_library_that_is_not_there"):
        fp4.prepare(weight(), "broken")
    for name in ("outside_fp4", "broken_fp4"):
        sys.modules.pop(name, None)


def test_probe_that_raises_is_a_reason_and_is_asked_once(only: Any) -> None:
    calls = []

    def probe() -> Ok:
        calls.append(1)
        raise OSError("libsomething.so.1: cannot open shared object file")

    only(None, bad=types.SimpleNamespace(name="bad", probe=probe, supports=lambda p: Ok(1)))
    for _ in range(3):
        assert "libsomething.so.1" in str(registry.rank(problem((9, 0))))
    assert len(calls) == 1


@pytest.mark.parametrize("fault", ["raises", "answers None", "answers True"])
@pytest.mark.parametrize("what", ["probe", "supports"])
def test_a_faulty_backend_does_not_take_the_others_with_it(only: Any, what: str, fault: str) -> None:
    def bad(*args: Any) -> Any:
        if fault == "raises":
            raise ZeroDivisionError("a fault of its own")
        return {"answers None": None, "answers True": True}[fault]

    module = types.SimpleNamespace(name="bad", probe=lambda: Ok(), supports=lambda p: Ok(1))
    setattr(module, what, bad)
    only(None, bad=module)
    ranking = registry.rank(problem((9, 0)))
    assert ranking.best == "triton"
    assert ("ZeroDivisionError: a fault of its own" if fault == "raises" else "neither Ok nor No") in ranking.reasons["bad"]
    assert fp4.prepare(weight()).backend == "reference"
    with pytest.raises(fp4.Fp4Error, match="'bad'"):
        fp4.prepare(weight(), "bad")


def test_a_name_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution that calls its backend 'reference' is listed with the reason; it does not replace ours."""
    stranger = types.SimpleNamespace(name="reference", probe=lambda: Ok(), supports=lambda p: Ok(1))
    monkeypatch.setattr(registry, "_discover", lambda: iter([("reference", reference), ("reference", stranger)]))
    registry.reset()
    assert fp4.prepare(weight()).backend == "reference"
    assert registry.module("reference") is reference
    assert "the name 'reference' is taken by fp4.gpu.backends.reference" in str(registry.rank(problem(None)))


def test_an_entry_point_that_is_no_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_fp4.py").write_text("name = 'half'\ndef probe(): pass\n")
    info = tmp_path / "half-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: half\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fp4.backends]\nhalf = half_fp4\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.reset()
    assert "is no backend: it has no supports, layouts, run" in registry.rank(problem(None)).reasons["half"]


def test_an_entry_point_that_exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exit_fp4.py").write_text("import sys\nsys.exit(3)\n")
    info = tmp_path / "exits-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: exits\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fp4.backends]\nexits = exit_fp4\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.reset()
    assert "fails to load: SystemExit: 3" in registry.rank(problem(None)).reasons["exits"]


def _no_layouts(p: Problem) -> Any:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("layouts", "words"),
    [(lambda p: {}, "names no storage for codes, scale"), (lambda p: 3, "names"), (_no_layouts, "failed: ZeroDiv")],
)
def test_a_backend_whose_layouts_are_none(monkeypatch: pytest.MonkeyPatch, layouts: Any, words: str) -> None:
    stranger = types.SimpleNamespace(name="stranger", probe=lambda: Ok(), supports=lambda p: Ok(1), layouts=layouts, run=lambda p: None)
    monkeypatch.setattr(registry, "_discover", lambda: iter([("stranger", stranger), ("reference", reference)]))
    registry.reset()
    with pytest.raises(fp4.BackendUnavailable, match=f"backend 'stranger': layouts {words}.*FP4_DISABLE=stranger hides it"):
        fp4.prepare(weight())


def test_disabling_flashinfer_disables_its_variants(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """FP4_DISABLE=flashinfer must not leave the same kernels under another name; a name that is none is said once."""
    monkeypatch.setattr(registry, "_logged", set())
    monkeypatch.setenv("FP4_DISABLE", "flashinfer,flashinfr")
    p = problem((10, 0), fmt="mxfp4")
    with caplog.at_level("WARNING", logger="fp4"):
        reasons = registry.rank(p).reasons
        registry.rank(p)
    named = [n for n in registry.backends() if n.startswith("flashinfer")]
    assert len(named) == 5
    assert all("disabled by FP4_DISABLE" in reasons[n] for n in named)
    assert [r.message for r in caplog.records if "'flashinfr', which is no backend" in r.message] == [caplog.records[0].message]
    assert len(caplog.records) == 1
    monkeypatch.setenv("FP4_DISABLE", "triton")
    assert "disabled" not in registry.rank(p).reasons.get("triton_kernels", "")


def test_explain_prints_and_returns_the_ranking(only: Any, capsys: pytest.CaptureFixture[str]) -> None:
    only("C")
    ranking = fp4.explain(op="moe", format="mxfp4", device="sm90", experts=128, hidden=2880, intermediate=2880, activation=fp4.SwiGLU())
    assert capsys.readouterr().out.strip() == str(ranking)
    assert ranking.best == "triton_kernels"
    with pytest.raises(fp4.FormatMismatch, match="unknown size hiden"):
        fp4.explain(op="moe", format="mxfp4", hiden=3)
    with pytest.raises(fp4.FormatMismatch, match="op is 'conv'"):
        fp4.explain(op="conv")


@pytest.mark.parametrize(
    ("value", "on"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("false", False), ("No ", False), ("", False)]
)
def test_strict_is_on_or_off(monkeypatch: pytest.MonkeyPatch, value: str, on: bool) -> None:
    monkeypatch.setenv("FP4_STRICT", value)
    assert env.strict() is on


def test_strict_that_is_neither_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP4_STRICT", "maybe")
    with pytest.raises(fp4.Fp4Error, match="FP4_STRICT is 'maybe'; need 1 or 0"):
        fp4.prepare(fp4.quantize(torch.ones(4, 64)))


@pytest.mark.parametrize(
    ("forced", "best", "words"),
    [
        ("reference", "reference", "FP4_BACKEND is set: prepare takes reference"),
        ("triton_kernels", None, "FP4_BACKEND='triton_kernels' cannot be used: .*; prepare raises this"),
        ("nonsense", None, "FP4_BACKEND='nonsense' cannot be used: 'nonsense' is not known"),
    ],
)
def test_a_forced_backend_is_what_explain_and_doctor_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], forced: str, best: str | None, words: str
) -> None:
    from fp4.cli import doctor

    monkeypatch.setenv("FP4_BACKEND", forced)
    ranking = fp4.explain(format="amdfp4", device="cpu")
    assert ranking.best == best
    assert re.search(words, capsys.readouterr().out.splitlines()[-1])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # what doctor asks about is the default device
    assert {row["backend"] for row in doctor.collect()["choices"] if row["op"] == "matmul"} == {best}
