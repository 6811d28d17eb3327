"""Test set-up: Triton's interpreter where there is no GPU, Hypothesis profiles, markers, the full vendor files."""

from __future__ import annotations

import functools
import os
import re
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

GPU = torch.cuda.is_available()
if not GPU:
    # Read when a kernel is decorated, so it has to be set before anything imports one.
    os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]}
settings.register_profile("dev", max_examples=20, **_COMMON)
settings.register_profile("ci", max_examples=40, derandomize=True, print_blob=True, **_COMMON)
settings.register_profile("nightly", max_examples=1000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--oracles", metavar="DIR", help="folder with the complete vendor-made files; the copies in tests/data are tested without it"
    )


def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability() if GPU else (0, 0)


#: a test file that imports one of these runs kernels
_KERNELS = re.compile(
    r"^\s*(?:import triton\b|from fp4\.(?:ref\.triton_|gpu\.kernels)|from fp4\.(?:ref|gpu) import .*(?:triton_|kernels))", re.M
)


@functools.cache
def _runs_kernels(path: Path) -> bool:
    return _KERNELS.search(path.read_text()) is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="no NVIDIA GPU on this machine")
    no_hopper = pytest.mark.skip(reason="needs a Hopper GPU (SM90)")
    for item in items:
        if _runs_kernels(item.path):
            item.add_marker(pytest.mark.kernel)
        if item.get_closest_marker("gpu") and not GPU:
            item.add_marker(no_gpu)
        if item.get_closest_marker("sm90") and _capability()[0] != 9:
            item.add_marker(no_hopper)


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Random tensors of a test are the same in every run: a bound that fails once in a thousand draws fails always or never. The CPU's
    generator alone: seeding a GPU's is an error while a graph is captured."""
    torch.default_generator.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="session")
def oracles(request: pytest.FixtureRequest) -> Path:
    """The folder given with ``--oracles``; without it the test is skipped."""
    given = request.config.getoption("--oracles")
    if not given:
        pytest.skip("needs --oracles DIR, the complete vendor-made files; the copies in tests/data are tested without it")
    path = Path(given)
    if not (path / "checkpoints").is_dir():
        raise pytest.UsageError(f"--oracles {path}: no folder 'checkpoints' in it")
    return path


@pytest.fixture(scope="session")
def data() -> Path:
    """The vendor-made files that the repository ships."""
    return Path(__file__).parent / "data"
