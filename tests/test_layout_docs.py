"""The generated layouts page and ``fp4 layout``."""

from __future__ import annotations

import json
import re
import runpy
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import fp4
from fp4.cli import main

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def made() -> dict:  # type: ignore[type-arg]
    return runpy.run_path(str(DOCS / "make_layouts.py"))


def test_page_and_pictures_are_current(made: dict) -> None:  # type: ignore[type-arg]
    assert (DOCS / "layouts.md").read_text() == made["page"](), "run: python docs/make_layouts.py"
    pictures = made["pictures"]()
    assert {p.name for p in (DOCS / "layouts").glob("*.svg")} == set(pictures)
    for name, text in pictures.items():
        assert (DOCS / "layouts" / name).read_text() == text, f"{name} is out of date; run: python docs/make_layouts.py"
    assert sum(map(len, pictures.values())) < 1_000_000


def test_pictures_are_xml_and_show_the_offsets(made: dict) -> None:  # type: ignore[type-arg]
    for name, text in made["pictures"]().items():
        root = ET.fromstring(text)
        labels = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
        layout = fp4.layouts[name.removesuffix(".svg")]
        assert layout.name in str(labels[0])
        shape = made["picture_shape"](layout)
        g = layout.geometry(shape)
        want = [str(layout.offset(shape, m, k)) for m in range(min(g.prows, 32)) for k in range(min(g.pcols, 8))]
        assert labels[2:] == want


def test_example_of_the_page_runs(made: dict) -> None:  # type: ignore[type-arg]
    code = re.search(r"```python\n(.*?)```", made["INTRO"], re.S)
    assert code is not None
    exec(code[1], {})


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in fp4.layouts.names())
    assert main(["layout", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [r["name"] for r in rows] == fp4.layouts.names()
    assert {r["name"]: r for r in rows}["aiter_sf_gu"]["fill"] == 0x7F


def test_show(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "x.svg"
    assert main(["layout", "show", "sf_128x4", "--shape", "1024x64", "--svg", str(file)]) == 0
    out = capsys.readouterr().out
    assert "((32,4,8),(4,16)):((16,4,8192),(1,512))" in out
    assert "blackwell_sf" in out
    assert file.read_text().startswith("<svg ")
    assert main(["layout", "show", "hopper_sf(num_warps=4)", "--shape", "2x130x3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["padded"] == [2, 256, 4]
    assert report["bytes"] == 2048
    assert main(["layout", "show", "gate_up_pairs >> sf_128x4", "--shape", "256x8"]) == 0
    assert "step" in capsys.readouterr().out
    assert main(["layout", "show", "(a b4) k -> a k b4", "--shape", "8x2"]) == 0
    assert "0   4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("a", "b", "status", "text"),
    [
        ("sf_128x4", "triton_gfx1250_sf", 0, "equal"),
        ("sf_128x4", "(a b4 c32) (d e4) -> a d c32 b4 e4", 0, "equal"),
        ("gate_up_pairs >> sf_128x4", "gate_up_pairs>>sf_128x4", 0, "equal"),
        ("sf_128x4", "blackwell_sf", 1, "same order, other padding"),
        ("sf_128x4", "sf_8x4", 1, "byte (0, 4) is stored at 512 by sf_128x4 and at 32 by sf_8x4"),
        ("sm90_mixed_int4", "sm90_mixed_fp4_fp8", 1, "other word table"),
        ("marlin_w", "sf_128x4", 1, "moves nibbles"),
        ("gate_up_pairs >> sf_128x4", "sf_128x4", 1, "other steps"),
    ],
)
def test_equal(a: str, b: str, status: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "equal", a, b]) == status
    assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["show", "nothing"], "is not known"),
        (["show", "sf_128x4", "--shape", "12"], "is not MxK"),
        (["show", "sf_128x4", "--shape", "axb"], "is not MxK"),
        (["show", "marlin_w", "--shape", "63x8"], "do not fit; need a multiple of 64"),
        (["show", "gate_up_pairs >> sf_128x4"], "give --shape MxK"),
        (["show", "gate_up_pairs >> sf_128x4", "--shape", "256x8", "--svg", "x.svg"], "single layouts"),
        (["show", "sf_128x4", "--svg", "/nonexistent/x.svg"], "No such file"),
        (["show", "(m a4) k -> m k"], "is not stored on the right"),
        (["equal", "sf_128x4", "sf"], "is not known"),
        (["equal", "sf_128x4"], "Missing argument"),
        (["paint"], "No such command"),
    ],
)
def test_bad_usage_is_one_sentence(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", *argv]) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
