"""The README's device table is what ``explain(assume_installed=True)`` answers, and each line says what was assumed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import fp4
from fp4.cli import main
from fp4.gpu import registry
from fp4.gpu.backends import triton
from fp4.gpu.device import KNOWN, SM8X, SM90, SM100, SM120, Device

README = Path(__file__).parents[1] / "README.md"
#: what the table calls a backend
NAMES = {"our Triton W4A16": "triton", "torch reference": "reference", "FlashInfer": "flashinfer", "triton_kernels": "triton_kernels"}
LINEAR: dict[str, Any] = {"op": "matmul", "n": 2880, "k": 2880}
EXPERTS: dict[str, Any] = {"op": "moe", "experts": 128, "hidden": 2880, "intermediate": 2880, "gate_up": "interleaved"}
GPT_OSS = EXPERTS | {"activation": fp4.SwiGLU(alpha=1.702, beta=1.0, limit=7.0)}
#: column -> the layers that it speaks of
COLUMNS: dict[str, list[dict[str, Any]]] = {
    "weight-only": [
        LINEAR | {"format": "nvfp4", "global_scales": "tensor"},
        LINEAR | {"format": "mxfp4"},
        EXPERTS | {"format": "nvfp4", "activation": fp4.SiLU(), "global_scales": "expert"},
    ],
    "activation scales": [
        LINEAR | {"format": "nvfp4", "global_scales": "tensor", "input_scale": True},
        EXPERTS | {"format": "nvfp4", "activation": fp4.SiLU(), "global_scales": "expert", "input_scale": True},
    ],
    "MXFP4 experts": [GPT_OSS | {"format": "mxfp4"}],
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FP4_BACKEND", "FP4_DISABLE", "FP4_STRICT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(triton, "_interpreted", lambda: False)  # the interpreter of the tests is no CPU backend


def test_each_capability_is_in_the_set_of_its_generation() -> None:
    """Kernels ask for membership, so a capability that a set leaves out is served by nothing that was made for it."""
    for major, members in ((8, SM8X), (9, SM90), (10, SM100), (12, SM120)):
        assert members == {cc for cc in KNOWN if cc.major == major}


def test_bytes_of_another_kind_of_device_do_not_run() -> None:
    """A CPU and an AMD GPU have no capability: that alone does not make them one."""
    assert not Device(kind="hip").same_target(Device.of("cpu"))
    assert Device.of("cpu").same_target(Device.of("cpu"))


def table() -> list[list[str]]:
    """The rows of the device table, the header first."""
    text = README.read_text()
    rows = text[text.index("| device |") :].split("\n\n")[0].splitlines()
    return [[c.strip() for c in r.strip("|").split("|")] for r in rows if not r.startswith("|---")]


def devices(cell: str) -> list[str]:
    return [d.lower() for d in re.findall(r"SM\d+|CPU", cell)]


@pytest.mark.parametrize("column", COLUMNS)
def test_readme_table(column: str, capsys: pytest.CaptureFixture[str]) -> None:
    header, *rows = table()
    at = next(i for i, title in enumerate(header) if column in title)
    seen = set()
    for row in rows:
        for device in devices(row[0]):
            for layer in COLUMNS[column]:
                ranking = fp4.explain(device=device, assume_installed=True, **layer)
                assert ranking.best == NAMES[row[at]], f"{device}: the README says {row[at]!r}\n{ranking}"
            seen.add(device)
    assert {"cpu", "sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121"} == seen
    assert len(COLUMNS) == len(header) - 1


def test_every_line_says_what_was_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    for cc in KNOWN:
        for layer in (LINEAR | {"format": "nvfp4"}, GPT_OSS | {"format": "mxfp4"}):
            ranking = fp4.explain(device=Device.fake(cc), assume_installed=True, **layer)
            head, *lines = str(ranking).splitlines()
            assert head.endswith("vendor libraries assumed installed")
            assert len(lines) == len(registry.backends())
            for choice, line in zip(ranking, lines, strict=True):
                here = bool(registry.probe(choice.name))
                assert line.endswith("[installed]" if here else "[assumed installed]"), line


def test_prepare_assumes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    if registry.probe("flashinfer"):
        pytest.skip("flashinfer is installed here: there is nothing to assume")
    layer: dict[str, Any] = LINEAR | {"format": "nvfp4", "device": "sm100", "input_scale": True}
    assert fp4.explain(assume_installed=True, **layer).best == "flashinfer"
    plain = fp4.explain(**layer)
    assert plain.best == "triton"
    assert "assumed" not in str(plain)


def test_disabled_stays_disabled(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FP4_DISABLE", "flashinfer")
    ranking = fp4.explain(device="sm100", input_scale=True, format="nvfp4", assume_installed=True, **LINEAR)
    assert ranking.best == "triton"
    assert "disabled by FP4_DISABLE" in ranking.reasons["flashinfer"]


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--format", "nvfp4", "--device", "sm100", "--input-scale", "--assume-installed", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["assumed_installed"] is True
    assert out["chosen"] == "flashinfer"
