"""What editors and type checkers see: every public name with its type, and the pages' examples under ``mypy --strict``."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fp4

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
#: a user's file: each line with a comment must be an error, or reveal that type; no other may be one
USER = """\
import numpy as np, torch
import fp4
from fp4.testing import mutants, strategies

q = fp4.quantize(torch.ones(2, 64), "nvfp4")
reveal_type(q)  # "fp4.tensor.QuantizedTensor"
reveal_type(fp4.quantize(torch.ones(2, 64), scale_layout="sf_128x4"))  # "fp4.stored.StoredQuantized"
reveal_type(fp4.layouts["sf_128x4"])  # "fp4.layout.Layout"
reveal_type(fp4.layouts["sf_128x4"].apply(q.scale))  # "torch._tensor.Tensor"
reveal_type(fp4.layouts["sf_128x4"].invert(np.ones(512, np.uint8), (2, 4)))  # "numpy.ndarray
reveal_type(fp4.recipes["te"].replace(tie="away"))  # "fp4.recipe.Recipe"
reveal_type(fp4.prepare(q))  # "fp4.prepared.Prepared"
reveal_type(fp4.open_checkpoint("x").quantized("y"))  # "fp4.tensor.QuantizedTensor"
reveal_type(fp4.encode.get("marlin_mxfp4")(q.scale).data)  # "torch._tensor.Tensor"
reveal_type(fp4.ref.matmul.matmul(torch.ones(1, 64), q))  # "torch._tensor.Tensor"
fp4.load_prepared("x").explain()
fp4.quantise(q)  # error: Module has no attribute "quantise"
fp4.matmul(torch.ones(1, 64), q)  # error: Argument 2 to "matmul" has incompatible type
fp4.ref.mat  # error: Module has no attribute "mat"
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pages_and_a_users_file_under_strict_mypy(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed (extra 'test')")
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        if blocks := FENCE.findall(page.read_text()):
            (tmp_path / f"page_{page.stem.lower()}.py").write_text("\n".join(blocks))
    (tmp_path / "user.py").write_text(USER)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *map(str, sorted(tmp_path.glob("*.py")))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590, check=False)
    said = [line for line in done.stdout.splitlines() if not line.startswith("Found ")]
    assert said, done.stderr
    for number, line in enumerate(USER.splitlines(), 1):
        mine = [s for s in said if f"user.py:{number}:" in s]
        said = [s for s in said if s not in mine]
        code, _, wanted = line.partition("  # ")
        assert (len(mine) == 1 and wanted in mine[0]) if wanted else not mine, (code, mine)
    assert not said, "\n".join(said)


def test_checkers_see_every_public_name() -> None:
    """The imports under TYPE_CHECKING are the names that resolve at run time, no fewer and no more."""
    for module, exports in (
        (fp4, {*fp4.__all__} - {"__version__"}),
        (fp4.ref, {*fp4.ref.__all__}),
        (fp4.testing, {"goldens", "strategies"}),
    ):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        (block,) = [n for n in tree.body if isinstance(n, ast.If) and isinstance(n.test, ast.Name) and n.test.id == "TYPE_CHECKING"]
        imported = {a.asname for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
        assigned = {t.id for n in block.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
        assert {str(n) for n in imported | assigned if not str(n).startswith("_")} == exports, module.__name__


def test_an_editable_install_is_a_path() -> None:
    """With ``package-dir`` stated setuptools writes the folder's path; without it an import hook, which no type checker follows."""
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"] == {"": "."}
