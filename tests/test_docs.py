"""The documentation runs: Python blocks execute, and a text block right after one is exactly what it printed."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fp4
from fp4.cli import main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SAMPLES = ROOT / "tests" / "data" / "checkpoints"
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.M | re.S)


def _blocks(page: Path) -> list[tuple[str, str, bool]]:
    """(language, text, follows the block before with nothing but blank lines between)."""
    text, out, end = page.read_text(), [], 0
    for found in FENCE.finditer(text):
        out.append((found[1], found[2], not text[end : found.start()].strip()))
        end = found.end()
    return out


def _pages_with(language: str) -> list[Path]:
    return [p for p in PAGES if any(b[0] == language for b in _blocks(p))]


@pytest.mark.parametrize("seed", [0, 1])  # a reader's is another: what a page shows must not hang on it
@pytest.mark.parametrize("page", _pages_with("python"), ids=lambda p: str(p.relative_to(ROOT)))
def test_python_blocks(page: Path, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One namespace a page; the sample checkpoints are where the repository has them."""
    shutil.copytree(SAMPLES, tmp_path / "tests" / "data" / "checkpoints")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(seed)
    space: dict[str, object] = {"__name__": "__docs__"}
    printed: str | None = None
    compared = 0
    for language, text, adjacent in _blocks(page):
        if language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(text, f"<{page.name}>", "exec"), space)  # not the page: inspect would read its prose as source
            printed = out.getvalue()
        elif language == "text" and adjacent and printed is not None:
            assert printed.rstrip() == text.rstrip(), f"{page.name}: the block prints something else than the page shows"
            compared += 1
            printed = None
    if page.name == "README.md":
        assert compared, "the first example of the README shows its output"


@pytest.mark.parametrize("page", _pages_with("console"), ids=lambda p: str(p.relative_to(ROOT)))
def test_console_blocks(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines ``$ fp4 ...`` run and succeed; other commands are for the reader."""
    shutil.copytree(SAMPLES, tmp_path / "tests" / "data" / "checkpoints")
    monkeypatch.chdir(tmp_path)
    for language, text, _ in _blocks(page):
        if language != "console":
            continue
        for line in text.splitlines():
            if line.startswith("$ fp4 "):
                assert main(shlex.split(line)[2:]) == 0, (line, capsys.readouterr().err)


def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (extra 'docs')")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "index.html").is_file()


def test_readme_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text


def test_links_between_pages_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: link to {target}"


def test_names_of_the_pages_resolve() -> None:
    """Every ``fp4.a.b`` that a page for users writes is there after ``import fp4``, in a process that imported nothing else."""
    inside = {"backends.md", "flashinfer.md", "kernels.md"}  # they speak of modules, not of what a user calls
    dotted = re.compile(r"(?<![\w./-])(?<!from )fp4(?:\.[A-Za-z]\w*)+(?!\w*/)")
    names = {n for page in PAGES if page.name not in inside for n in dotted.findall(page.read_text())}
    assert len(names) > 30
    code = """
import os, sys, torch, fp4
for name in sys.argv[1:]:
    child = os.fork()  # what one name imports must not help the next
    if child == 0:
        try:
            eval(name)
        except BaseException as error:
            os.write(1, f"{name}: {error}\\n".encode())
        os._exit(0)
    os.waitpid(child, 0)
"""
    done = subprocess.run([sys.executable, "-c", code, *sorted(names)], capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_modules_that_the_inner_pages_name_exist() -> None:
    """``fp4.gpu.registry.Ok`` and the like, by import; so does every file of ``fp4/`` that a page names."""
    dotted = re.compile(r"(?<![\w./-])fp4(?:\.[A-Za-z_]\w*)+(?!\w*/)")
    for page in PAGES:
        text = page.read_text()
        for name in {*dotted.findall(text)} - {"fp4.backends"}:  # that is the entry-point group
            value: object = importlib.import_module("fp4")
            for i, part in enumerate(name.split(".")[1:], 2):
                if not hasattr(value, part):
                    value = importlib.import_module(".".join(name.split(".")[:i]))
                else:
                    value = getattr(value, part)
        for path in re.findall(r"`((?:fp4|tests|docs|examples|benchmarks)/[\w./]+\.\w+)`", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_the_reference_lists_every_public_name_and_is_current() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_reference.py"))
    listed = [name for names in made["GROUPS"].values() for name in names]
    assert sorted(listed) == sorted({*fp4.__all__} - {"__version__"})
    text = made["page"]()
    assert (ROOT / "docs" / "reference.md").read_text() == text, "run: python docs/make_reference.py"
    for line in text.splitlines():
        if line.startswith("| `"):
            assert line.count("|") == 3, line
            assert re.search(r"\w", line.split("|")[2]), f"no docstring: {line}"
