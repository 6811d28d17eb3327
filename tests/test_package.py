"""The package as a whole: import cost, optional libraries, house rules."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_cheap() -> None:
    # best of three: another process on the machine may steal time from one
    code = "import time, torch; t = time.perf_counter(); import fp4; print(time.perf_counter() - t)"
    best = min(float(_python(code)) for _ in range(3))
    assert best < 0.3, f"import fp4 took {best:.3f} s beyond torch; need less than 0.3 s"


def test_import_leaves_triton_and_vendors_alone() -> None:
    code = (
        "import sys, json, torch; before = set(sys.modules); import fp4, fp4.tensor\n"
        "fp4.NVFP4, fp4.SwiGLU, fp4.QuantizedTensor\n"
        "print(json.dumps(sorted({m.split('.')[0] for m in set(sys.modules) - before})), torch.cuda.is_initialized())"
    )
    out = _python(code)
    modules = set(json.loads(out[: out.rindex("]") + 1]))
    assert not modules & {"triton", "flashinfer", "triton_kernels", "vllm", "rich", "typer", "matplotlib"}, modules
    assert out.strip().endswith("False")


def test_every_public_name_resolves() -> None:
    import fp4

    missing = []
    for name in fp4.__all__:
        try:
            getattr(fp4, name)
        except (ImportError, AttributeError) as error:
            missing.append(f"{name}: {error}")
    assert not missing, missing


def test_unknown_name_is_an_attribute_error() -> None:
    import fp4

    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        fp4.quantise  # noqa: B018


def test_every_data_file_is_packaged() -> None:
    """A wheel holds what an editable install reads."""
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["fp4"]
    packaged = {p for pattern in patterns for p in (ROOT / "fp4").glob(pattern)}
    data = {p for p in (ROOT / "fp4").rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    assert not data - packaged, sorted(str(p.relative_to(ROOT)) for p in data - packaged)


def test_ref_never_imports_gpu() -> None:
    for path in sorted((ROOT / "fp4" / "ref").glob("*.py")):
        assert not re.search(r"^\s*(?:from|import) fp4\.gpu", path.read_text(), re.M), path


def test_one_module_reads_the_environment() -> None:
    """``fp4/env.py`` alone, so that no call changes its numbers by a variable. ``tune`` hands the whole of it to its workers."""
    readers = {str(p.relative_to(ROOT)) for p in (ROOT / "fp4").rglob("*.py") if re.search(r"\b(environ|getenv)\b", p.read_text())}
    assert readers == {"fp4/env.py", "fp4/gpu/kernels/tune.py"}


def test_dir_lists_the_public_names_only() -> None:
    names = json.loads(_python("import json, fp4; fp4.layouts, fp4.quantize; print(json.dumps([dir(fp4), fp4.__all__]))"))
    assert {n for n in names[0] if not n.startswith("_")} == {n for n in names[1] if not n.startswith("_")}


@pytest.mark.parametrize("name", ["checkpoint", "encode", "errors", "formats", "fuse", "layouts", "ref", "testing"])
def test_a_public_module_lists_its_own_names_only(name: str) -> None:
    """Tab completion after ``fp4.fuse.`` offers no ``torch`` and no helper. In a process of its own, where nothing else was imported."""
    listed, declared = json.loads(_python(f"import json, fp4; m = fp4.{name}; print(json.dumps([dir(m), m.__all__]))"))
    assert {n for n in listed if not n.startswith("_")} == {*declared}
    assert _python(f"import fp4; m = fp4.{name}; print([getattr(m, n) for n in m.__all__ if n != 'strategies'] and 'good')") == "good\n"


def test_catalogues_complete_their_keys() -> None:
    import fp4

    assert fp4.layouts._ipython_key_completions_() == fp4.layouts.names()
    assert fp4.recipes._ipython_key_completions_() == fp4.recipes.names()
