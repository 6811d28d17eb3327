"""Figures in the README and the changelog are those of benchmarks/RESULTS.md: the same row, the same run, the ratio that they give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text()
NUMBER = re.compile(r"(?<![\w.])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\w])")


def _section(title: str) -> str:
    found = re.search(rf"^## {title}.*?(?=^## |\Z)", RESULTS, re.M | re.S)
    assert found, title
    return found[0]


def _numbers(text: str) -> list[str]:
    return [n.replace(",", "") for n in NUMBER.findall(text)]


def _units(text: str) -> list[str]:
    """Table rows, and the paragraphs between them."""
    out: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        out += rows or [" ".join(block.split())]
    return out


def _has(unit: str, figure: str) -> bool:
    """Whether the unit holds a number that rounds to the figure at the figure's own precision."""
    digits = len(figure.partition(".")[2])
    return any(abs(float(n) - float(figure)) <= 0.5 * 10.0**-digits + 1e-9 for n in _numbers(unit))


def _keys(label: str) -> tuple[str, list[str]]:
    """(section of RESULTS, words that its row or paragraph must hold)."""
    if found := re.match(r"(\w+) experts of GPT-OSS 120B, (\d+) tokens?", label):
        return "Mixture of experts, GPT-OSS shape", [found[2]]
    found = re.match(r"(\w+) (W4A16|W4A8), N = (\d+), M = (\d+)", label)
    assert found, label
    if found[2] == "W4A8":
        return "Dense W4A8", [found[3], found[4]]
    return "Dense W4A16", [found[1].lower(), found[3], found[4]]


def _readme_rows() -> list[tuple[str, str, str, str]]:
    text = (ROOT / "README.md").read_text().split("## Benchmarks")[1]
    rows = [[c.strip() for c in line[1:-1].split("|")] for line in text.splitlines() if line.startswith("| ") and "| fp4 |" not in line]
    return [(a, b, c, d) for a, b, c, d in rows]


ROWS = _readme_rows()


def _figures(cell: str) -> list[str]:
    return _numbers(re.sub(r"\(?(?:in )?runs? \d+\)?|bf16|fp8|e4m3", "", cell))


def _words(unit: str) -> set[str]:
    """Numbers and names of a unit; "8192 x 1024" of a first cell counts as its parts."""
    found = re.findall(r"[\w.,]+", unit.lower())
    return {w.replace(",", "") for w in found} | {w.rstrip(".,") for w in found}


def test_the_table_is_found() -> None:
    assert len(ROWS) > 20
    assert _has("| 1 | 42.31 |", "42.3")
    assert not _has("| 1 | 42.31 |", "41.8")


@pytest.mark.parametrize("row", [r for r in ROWS if not r[0].startswith("quantise")], ids=lambda r: r[0])
def test_readme_row_is_a_row_of_the_results(row: tuple[str, str, str, str]) -> None:
    label, ours, peers, _ = row
    title, words = _keys(label)
    units = [u for u in _units(_section(title)) if _named(u, words, "NVFP4" in label)]
    assert units, label
    for figure in [*_figures(ours), *_figures(peers)]:
        assert any(_has(u, figure) for u in units), f"{label}: {figure} is not in {units}"
    if "run" not in peers:  # else it says that its peer is of another run
        pairs = [u for u in units if _has(u, _figures(ours)[0])]
        assert any(all(_has(u, f) for f in _figures(peers)) for u in pairs), f"{label}: no row has {ours} and {peers}"


def _named(unit: str, words: list[str], nvfp4: bool) -> bool:
    have = _words(unit)
    if unit.startswith("| 8192 x") or unit.startswith("| 28672 x"):  # the table of NVFP4 rows that were changed
        return nvfp4 and set(words) - {"nvfp4"} <= have
    return set(words) <= have


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r[0])
def test_readme_ratio_is_that_of_its_figures(row: tuple[str, str, str, str]) -> None:
    label, ours, peers, verdict = row
    own = float(_figures(ours)[0])
    ratios = [float(p) / own for p in _figures(peers)]
    said = _numbers(verdict.split("(")[0])
    if verdict.startswith("equal"):
        assert abs(ratios[0] - 1) < 0.005, label
        return
    assert len(said) == len(ratios), label
    directions = re.findall(r"faster|slower", verdict.split("(")[0])
    directions += directions[-1:] * (len(said) - len(directions))
    for number, ratio, direction in zip(said, ratios, directions, strict=True):
        assert (ratio >= 1) == (direction == "faster"), label
        assert abs(max(ratio, 1 / ratio) - float(number)) < 0.0125, f"{label}: {ratio:.3f}, not {number} times {direction}"


def test_readme_quantiser_and_its_copy() -> None:
    """The peer is the device copy's rate on the same bytes: us times the ratio of the table."""
    (row,) = [r for r in ROWS if r[0].startswith("quantise bf16")]
    (line,) = re.findall(r"^\| quantize \| nvfp4 \| bfloat16 \| .*$", _section("Quantise and dequantise on the GPU"), re.M)
    us, ratio = (float(n) for n in _numbers(line)[:2])
    assert _figures(row[1]) == [f"{us:.1f}"]
    assert _figures(row[2]) == [f"{us * ratio:.1f}"]


def test_changelog_times_are_in_the_results() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    figures = []
    for span in re.findall(rf"((?:{NUMBER.pattern}(?: to |, | and )?)+) (?:us|TFLOP/s)", text):
        figures += _numbers(span)
    figures += [n for span in re.findall(r"TFLOP/s[^.;]*\(before,([^)]*)\)", text) for n in _numbers(span)]
    assert len(figures) > 8
    missing = [f for f in figures if not _has(RESULTS, f)]
    assert not missing, missing
