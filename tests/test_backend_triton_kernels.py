"""The triton_kernels backend: telling its five generations and a stranger apart, and running the copies that are installed.

``TRITON_KERNELS_COPIES``: folders, separated like PATH, each holding a ``triton_kernels`` package, to test beside the installed one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fp4.gpu.backends import _triton_kernels_find as finder
from fp4.gpu.backends import _triton_kernels_replay as replay
from fp4.gpu.backends._triton_kernels_find import Found, Missing
from fp4.gpu.backends._triton_kernels_route import combine, route

HERE = Path(__file__).parent
PRECISION = {
    "A": "weight_scale act_scale out_scale",
    "B": "weight_scale act_scale out_scale",
    "M": "a_mx_scale b_mx_scale",
    "C": "a_mx_scale b_mx_scale b_microblock_size",
    "D": "a_mx_scale b_mx_scale b_microblock_size b_mx_tensor_scale",
}


@pytest.fixture
def clean() -> Iterator[pytest.MonkeyPatch]:
    """No triton_kernels in sys.modules or on sys.path, and afterwards everything as before."""
    kept = {n: m for n, m in sys.modules.items() if n.split(".")[0] in ("triton_kernels", "vllm")}
    for n in kept:
        del sys.modules[n]
    importlib.import_module("triton.language.target_info")  # its folder may be hidden with theirs
    path = sys.path[:]
    sys.path[:] = [p for p in path if not (Path(p or ".") / "triton_kernels").exists() and not (Path(p or ".") / "vllm").exists()]
    with pytest.MonkeyPatch.context() as patch:
        yield patch
    sys.path[:] = path  # after the undo: that of syspath_prepend puts back the path as it was when it was called
    for n in [n for n in sys.modules if n.split(".")[0] in ("triton_kernels", "vllm")]:
        del sys.modules[n]
    sys.modules.update(kept)


def skeleton(folder: Path, generation: str, tensor: str = "") -> Path:
    """A package with the files and fields of a generation, and nothing behind them."""
    root = folder / "triton_kernels"
    (root / "tensor_details").mkdir(parents=True)
    api = "matmul_ogs" if generation in "AB" else "matmul"
    fields = "\n".join(f"    {f}: object = None" for f in PRECISION[generation].split())
    code = f"from dataclasses import dataclass\n\n@dataclass\nclass PrecisionConfig:\n{fields}\n\ndef {api}():\n    pass\n"
    plain = "__init__.py target_info.py numerics.py swiglu.py tensor_details/__init__.py tensor_details/layout.py"
    files = dict.fromkeys(plain.split(), "")

    files |= {"tensor.py": tensor, f"{api}.py": code, **({"routing.py": ""} if generation == "A" else {})}
    for name, text in files.items():
        (root / name).write_text(text)
    return root


def stranger(folder: Path) -> Path:
    """What the unrelated PyPI package puts under the same import name."""
    root = folder / "triton_kernels"
    (root / "utils").mkdir(parents=True, exist_ok=True)
    for name in ("__init__.py", "add_vectors.py", "add_vectors2.py", "rotary_embedding.py", "utils/kernel_mapper.py"):
        (root / name).write_text("")
    return root


def missing() -> str:
    found = finder.find()
    assert isinstance(found, Missing), found
    return found.reason


@pytest.mark.parametrize("generation", list(PRECISION))
def test_generations_by_their_attributes(clean: pytest.MonkeyPatch, tmp_path: Path, generation: str) -> None:
    skeleton(tmp_path, generation)
    clean.syspath_prepend(str(tmp_path))
    found = finder.find()
    assert isinstance(found, Found), found
    assert found.generation == generation
    assert found.ogs == (generation in "AB")


def test_nothing_installed(clean: pytest.MonkeyPatch) -> None:
    assert "not installed" in missing()


def test_stranger_of_the_same_name(clean: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stranger(tmp_path)
    clean.syspath_prepend(str(tmp_path))
    assert "unrelated package" in missing()
    assert "pip uninstall triton-kernels" in missing()


def test_stranger_installed_over_the_real_one(clean: pytest.MonkeyPatch, tmp_path: Path) -> None:
    skeleton(tmp_path, "C")
    stranger(tmp_path)
    clean.syspath_prepend(str(tmp_path))
    assert "mix" in missing()


def test_package_newer_than_triton(clean: pytest.MonkeyPatch, tmp_path: Path) -> None:
    skeleton(tmp_path, "C", tensor="from triton.language.target_info import is_not_there_yet\n")
    clean.syspath_prepend(str(tmp_path))
    reason = missing()
    assert "does not work with triton" in reason
    assert "is_not_there_yet" in reason


def test_folder_that_is_neither(clean: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "triton_kernels").mkdir()
    (tmp_path / "triton_kernels" / "__init__.py").write_text("")
    clean.syspath_prepend(str(tmp_path))
    assert "no triton_kernels that this library knows" in missing()


@pytest.mark.parametrize("with_stranger", [False, True])
def test_copy_inside_vllm(clean: pytest.MonkeyPatch, tmp_path: Path, with_stranger: bool) -> None:
    third_party = tmp_path / "vllm" / "third_party"
    third_party.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('vllm must not be imported for this')\n")
    skeleton(third_party, "A")
    if with_stranger:
        stranger(tmp_path)
    clean.syspath_prepend(str(tmp_path))
    found = finder.find()
    assert isinstance(found, Found), found
    assert found.root == third_party / "triton_kernels"
    assert "vllm" not in sys.modules


def test_alias_in_sys_modules_is_respected(clean: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vllm puts its copy under the short name; a second import would give two sets of classes."""
    skeleton(tmp_path / "first", "B")
    skeleton(tmp_path / "second", "D")
    clean.syspath_prepend(str(tmp_path / "first"))
    import triton_kernels

    assert triton_kernels.__path__
    clean.syspath_prepend(str(tmp_path / "second"))
    found = finder.find()
    assert isinstance(found, Found), found
    assert found.generation == "B"


# ---- routing -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [(0, 6), (2, 5), (3, 3)])
def test_routing_sorts_stably_and_drops_what_is_not_here(local: tuple[int, int]) -> None:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(-2, 9, (11, 3), generator=g)  # ids outside [0, 6) among them
    weights = torch.rand(11, 3, generator=g)
    r = route(ids, weights, *local)
    flat = ids.flatten().tolist()
    want = sorted((i for i, e in enumerate(flat) if local[0] <= e < local[1]), key=lambda i: (flat[i], i))
    assert r.hist.tolist() == [flat.count(e) for e in range(*local)]
    assert r.token.tolist()[: len(want)] == [i // 3 for i in want]
    assert r.weight.tolist()[: len(want)] == [weights.flatten()[i].item() for i in want]
    y = torch.full((33, 4), float("nan"))  # rows past the last local pair are never written by the kernel
    for row, i in enumerate(want):
        y[row] = float(i)
    got = combine(y, r, 3, torch.float32)
    for t in range(11):
        assert got[t].tolist() == [float(sum(i for i in want if i // 3 == t))] * 4


# ---- the installed copies, executed --------------------------------------------------------------------------------------------


def copies() -> list[str]:
    return ["installed", *filter(None, os.environ.get("TRITON_KERNELS_COPIES", "").split(os.pathsep))]


@pytest.mark.vendor
@pytest.mark.parametrize("capability", ["90", "89"])
@pytest.mark.parametrize("copy", copies())
def test_installed_copy_computes_what_the_reference_does(copy: str, capability: str) -> None:
    triton, numpy = pytest.importorskip("triton"), pytest.importorskip("numpy")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) and tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip(f"the interpreter of Triton {triton.__version__} does not run with numpy {numpy.__version__}; it needs numpy < 2.4")
    path = [str(HERE.parent), *([] if copy == "installed" else [copy])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(HERE / "tk_cases.py"), capability], env=env, capture_output=True, text=True, timeout=250)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-2000:]
    if not lines[0]["ok"]:
        pytest.skip(f"triton_kernels cannot be used here: {lines[0]['says']}")
    assert len(lines) >= 10, lines
    assert done.returncode == 0, "\n".join(map(str, lines)) + done.stderr[-3000:]


# ---- replays of small batches ----------------------------------------------------------------------------------------------------


def test_small_batches_are_replayed_by_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bookkeeping, with a stand-in for the captured graph: sizes, streams, captures, failures."""
    calls: list[tuple[int, list[int]]] = []

    def call(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.dtype) -> torch.Tensor:
        calls.append((x.shape[0], ids.flatten().tolist()))
        return (x * weights.sum(1, keepdim=True) * (ids >= 0).any(1, keepdim=True)).to(out)

    class Plan:
        made: ClassVar[list[int]] = []

        def __init__(self, call: Any, rows: int, like: Any, out: torch.dtype, stream: Any) -> None:
            Plan.made.append(rows)

        def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return call(x, ids, weights, x.dtype)

    state = {"capturing": False, "stream": 7}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: types.SimpleNamespace(cuda_stream=state["stream"]))
    replayed = replay.Replay(call, Plan)

    class OnGpu(torch.Tensor):
        device = torch.device("cuda", 0)  # type: ignore[assignment]

    def go(rows: int, ids: torch.dtype = torch.int64) -> torch.Tensor:
        x = torch.arange(rows * 2.0).view(rows, 2).as_subclass(OnGpu)
        return replayed(x, torch.zeros(rows, 1, dtype=ids), torch.ones(rows, 1), torch.float32).as_subclass(torch.Tensor)

    want = torch.arange(6.0).view(3, 2)
    assert torch.equal(go(3), want)
    assert calls[-1] == (3, [0, 0, 0])  # eagerly, in the size that the caller may capture next
    assert Plan.made == []
    assert torch.equal(go(3), want)
    assert Plan.made == [4]
    go(4)
    go(4)
    assert Plan.made == [4]  # three and four tokens share a plan
    state["stream"] = 8
    go(4), go(4)
    assert Plan.made == [4, 4]
    go(4, torch.int32)
    go(4, torch.int32)
    assert Plan.made == [4, 4, 4]  # a plan's copy would change the type of the ids, and 2^32 would become expert 0
    Plan.made.pop()
    state["capturing"] = True
    go(5), go(5), go(5)
    assert Plan.made == [4, 4]
    assert calls[-1][0] == 5  # straight through
    state["capturing"] = False
    go(replay.ROWS + 1), go(replay.ROWS + 1)
    assert Plan.made == [4, 4]
    assert calls[-1][0] == replay.ROWS + 1

    def broken(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    replayed = replay.Replay(call, broken)
    assert torch.equal(go(3), want)
    with pytest.warns(UserWarning, match="cannot be captured and replayed.*not permitted when stream"):
        assert torch.equal(go(3), want)
    assert torch.equal(go(3), want)
    assert "not permitted" in str(replayed.failed)


def test_a_smaller_batch_leaves_nothing_of_the_one_before() -> None:
    """A plan's inputs stay from call to call: rows beyond the batch must name no expert."""

    class Graph:
        def replay(self) -> None:
            plan.y.copy_(plan.x * (plan.ids >= 0).sum(1, keepdim=True))

    plan = replay._Plan.__new__(replay._Plan)
    plan.x, plan.ids, plan.weights = torch.zeros(4, 2), torch.full((4, 1), -1), torch.zeros(4, 1)
    plan.y, plan.used, plan.graph = torch.empty(4, 2), 0, Graph()
    for rows in (4, 2, 1, 3):
        x = torch.arange(1.0, 1 + rows * 2).view(rows, 2)
        y = plan(x, torch.zeros(rows, 1, dtype=torch.int64), torch.ones(rows, 1))
        assert torch.equal(y, x)
        assert y.data_ptr() != plan.y.data_ptr()  # the next replay overwrites that one
        assert plan.ids.flatten().tolist() == [0] * rows + [-1] * (4 - rows)


# ---- storage -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "says"), [(None, None), ("values", "HOPPER_VALUE of a 48 x 64 tile"), (4, "SCALE with 4 warps"), (8, "SCALE with 8 warps")]
)
def test_a_copy_that_stores_other_bytes_is_refused(monkeypatch: pytest.MonkeyPatch, wrong: Any, says: str | None) -> None:
    """The check of a process, with conversions that are ours but for one byte."""
    from fp4.gpu.backends import _triton_kernels_check as tile
    from fp4.layouts import get

    def convert(shim: Any, t: torch.Tensor, values: bool, num_warps: int = 8) -> torch.Tensor:
        name = "hopper_value_v3(pad_n=64,pad_k=64)" if values else f"hopper_sf(num_warps={num_warps},pad_k=4)"
        out = get(name).apply(t[0])
        if wrong == ("values" if values else num_warps):
            out[7] ^= 1
        return out

    monkeypatch.setattr(tile, "_padding", lambda shim: (64, 64))
    monkeypatch.setattr(tile, "_swizzle", convert)
    shim = types.SimpleNamespace()
    found = tile.check(shim)  # type: ignore[arg-type]
    assert found is None if says is None else found is not None and says in found
    assert (shim.pad_n, shim.pad_k) == (64, 64)


def test_narrow_weights_of_the_first_generation_take_four_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tiles of 128 columns do not hold 32 x 8 warps, and the warps are part of the stored order of the scales."""
    from fp4.gpu.backends import triton_kernels as tk
    from fp4.gpu.device import Device
    from fp4.gpu.problem import Problem

    for generation, n, warps in (("A", 128, 4), ("A", 160, 8), ("B", 128, 8), ("D", 128, 8)):
        shim = types.SimpleNamespace(found=types.SimpleNamespace(generation=generation), pad_n=64, pad_k=64)
        monkeypatch.setattr(tk, "_bound", lambda shim=shim: shim)
        problem = Problem("matmul", "mxfp4", Device.fake((9, 0)), n=n, k=256)  # type: ignore[arg-type]
        assert tk.layouts(problem)["scale"].layout == f"hopper_sf(num_warps={warps},pad_k=4)"


def test_settings_of_the_first_generation_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split K is off during its calls only: the dict belongs to the process, and to the engine in it."""
    from fp4.gpu.backends._triton_kernels_shim import Shim

    flags = types.SimpleNamespace(_opt_flags_constraints={"block_m": 64})
    monkeypatch.setitem(sys.modules, "triton_kernels.matmul_ogs_details.opt_flags", flags)
    during: list[Any] = []

    def matmul_ogs(*_: Any, **__: Any) -> torch.Tensor:
        during.append(flags._opt_flags_constraints)
        if len(during) > 1:
            raise RuntimeError("out of resources")
        return torch.zeros(1, 2, 3)

    shim = Shim.__new__(Shim)
    shim.found, shim._entry, shim.ogs = types.SimpleNamespace(generation="A"), matmul_ogs, True  # type: ignore[assignment]
    x = torch.zeros(2, 4)
    assert shim.call(x, None, None, None).shape == (2, 3)
    with pytest.raises(RuntimeError, match="out of resources"):
        shim.call(x, None, None, None)
    assert during == [{"block_m": 64, "split_k": 1}] * 2
    assert flags._opt_flags_constraints == {"block_m": 64}


def test_the_path_is_whole_again() -> None:
    """The last test here: what ``clean`` hid is back, or a package first imported by a later file of this worker would be missing."""
    assert importlib.util.find_spec("hypothesis") is not None
    assert importlib.util.find_spec("typer") is not None
