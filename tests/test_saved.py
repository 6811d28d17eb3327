"""Files of prepared weights that were changed: by accident (the digest sees it) and consistently (the sizes must still fit)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_cases import random_weight
from safetensors import safe_open
from safetensors.torch import save_file

import fp4
from fp4.gpu import saved

Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]


def make(backend: str) -> Any:
    if backend == "experts":
        w13, w2 = random_weight(1, "nvfp4", 4, 64, 64), random_weight(2, "nvfp4", 4, 64, 32)
        return fp4.prepare_moe(w13, w2, gate_up="interleaved", activation=fp4.SwiGLU(), bias2=torch.ones(4, 64), local_experts=(1, 3))
    # n and k such that sf_128x4 has as many bytes as frag_sf16: the sizes cannot tell them apart
    w = random_weight(5, "nvfp4", 128, 256)
    return fp4.prepare(w, backend, device="sm90" if backend == "triton" else "cpu")


def change(path: Path, edit: Edit, digest: bool) -> Path:
    with safe_open(str(path), "pt") as f:
        metadata = f.metadata()
        about, arrays = json.loads(metadata["fp4"]), {n: f.get_tensor(n) for n in f.keys()}  # noqa: SIM118
    edit(about, arrays)
    arrays = {n: t.contiguous().clone() for n, t in arrays.items()}
    if digest:
        metadata["fp4_digest"] = saved._digest(about, arrays)
    out = path.with_name("changed.safetensors")
    save_file(arrays, str(out), metadata={**metadata, "fp4": json.dumps(about)})
    return out


ANY: dict[str, Edit] = {
    "another layout of the same size": lambda a, t: a["layouts"]["scale"].update(layout="sf_128x4"),
    "class": lambda a, t: a.update({"class": "Foo"}),
    "no layouts": lambda a, t: a.pop("layouts"),
    "no problem": lambda a, t: a.pop("problem"),
    "a field that is none": lambda a, t: a["problem"].update(zzz=1),
    "another backend": lambda a, t: a.update(backend="reference" if a["backend"] == "triton" else "triton"),
    "codes short": lambda a, t: t.update(codes=t["codes"].flatten()[:100]),
    "scale missing": lambda a, t: t.pop("scale"),
    "global scale missing": lambda a, t: t.pop("global_scale"),
    "global scale bf16": lambda a, t: t.update(global_scale=t["global_scale"].bfloat16()),
    "more": lambda a, t: t.update(zzz=torch.ones(3)),
    "n": lambda a, t: a["problem"].update(n=5000),
    "meta": lambda a, t: a["meta"].update(path="plain"),
}


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("case", list(ANY))
def test_a_changed_file_is_refused(tmp_path: Path, backend: str, case: str) -> None:
    make(backend).save(tmp_path / "w.safetensors")
    with pytest.raises(fp4.CheckpointError, match="was changed after it was written"):
        fp4.load_prepared(change(tmp_path / "w.safetensors", ANY[case], digest=False))


#: changes that leave a file which a kernel would read out of bounds, or in the wrong order, were it believed
SIZES: dict[str, Edit] = {
    "n": lambda a, t: a["problem"].update(n=5000),
    "k": lambda a, t: a["problem"].update(k=960),
    "codes short": lambda a, t: t.update(codes=t["codes"].flatten()[:100]),
    "codes as floats": lambda a, t: t.update(codes=t["codes"].float()),
    "scale short": lambda a, t: t.update(scale=t["scale"].flatten()[:10]),
    "scale missing": lambda a, t: t.pop("scale"),
    "logical codes": lambda a, t: a["logical"][""].update(codes=[5000, 128]),
    "logical scale": lambda a, t: a["logical"][""].update(scale=[128, 8]),
    "format": lambda a, t: a["problem"].update(format="mxfp4"),
    "op": lambda a, t: a["problem"].update(op="moe"),
    "class": lambda a, t: a.update({"class": "PreparedMoE"}),
    "layout that is none": lambda a, t: a["layouts"]["codes"].update(layout="__import__('os')"),
    "activation that is none": lambda a, t: a["problem"].update(activation={"class": "torch"}),
    "dtype that is none": lambda a, t: a["problem"].update(act_dtype="load"),
    "dtype of x that is none": lambda a, t: a.update(act_dtypes=["int8"]),
    "device": lambda a, t: a["problem"].update(device={}),
    # bytes are not hashed, and these few are what NaN everywhere, or the other sign, comes from
    "global scale nan": lambda a, t: t.update(global_scale=torch.tensor(float("nan"))),
    "global scale negative": lambda a, t: t.update(global_scale=torch.tensor(-1.0)),
    "input scale zero": lambda a, t: t.update(input_scale=torch.tensor(0.0)),
}


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("case", list(SIZES))
def test_sizes_must_fit_whoever_wrote_the_file(tmp_path: Path, backend: str, case: str) -> None:
    make(backend).save(tmp_path / "w.safetensors")
    with pytest.raises(fp4.CheckpointError, match="contradicts itself"):
        fp4.load_prepared(change(tmp_path / "w.safetensors", SIZES[case], digest=True))


EXPERTS: dict[str, Edit] = {
    "an expert fewer": lambda a, t: t.update({"w2.codes": t["w2.codes"][:1]}),
    "another range": lambda a, t: a["problem"].update(local=[0, 4]),
    "hidden": lambda a, t: a["problem"].update(hidden=128),
    "intermediate": lambda a, t: a["problem"].update(intermediate=64),
    "bias short": lambda a, t: t.update(bias2=t["bias2"][:1]),
    "bias long": lambda a, t: t.update(bias2=t["bias2"].repeat(1, 2)),
    "global scale": lambda a, t: t.update({"w13.global_scale": torch.ones(3)}),
    "global scale a half": lambda a, t: t.update({"w2.global_scale": torch.ones(2, 2)}),
    "input scale a half": lambda a, t: t.update({"w13.input_scale": torch.ones(2, 2)}),
    "global scale bf16": lambda a, t: t.update({"w2.global_scale": torch.ones(2).bfloat16()}),
    "global scale infinite": lambda a, t: t.update({"w2.global_scale": torch.tensor([1.0, float("inf")])}),
    "no gate": lambda a, t: a["problem"].update(gate_up=None),
}


@pytest.mark.parametrize("case", list(EXPERTS))
def test_sizes_of_experts_must_fit(tmp_path: Path, case: str) -> None:
    make("experts").save(tmp_path / "w.safetensors")
    with pytest.raises(fp4.CheckpointError, match="contradicts itself"):
        fp4.load_prepared(change(tmp_path / "w.safetensors", EXPERTS[case], digest=True))


@pytest.mark.parametrize("backend", ["reference", "triton", "experts"])
def test_an_unchanged_file_loads(tmp_path: Path, backend: str) -> None:
    p = make(backend)
    p.save(tmp_path / "w.safetensors")
    q = fp4.load_prepared(change(tmp_path / "w.safetensors", lambda a, t: None, digest=False), "cpu")
    assert set(q.arrays) == set(p.arrays)
    assert all(torch.equal(t, p.arrays[n]) for n, t in q.arrays.items())
    with pytest.raises(fp4.Fp4Error, match="'gpu0' is no torch device"):
        fp4.load_prepared(tmp_path / "w.safetensors", "gpu0")


def test_bytes_of_another_device_are_kept_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded where they cannot run they are not made anew for another order of the same backend: they are what the file says."""
    from fp4.gpu.backends import triton

    p = make("triton")
    p.save(tmp_path / "w.safetensors")
    monkeypatch.setattr(triton, "layouts", triton._plain_layouts)
    q = fp4.load_prepared(tmp_path / "w.safetensors", "cpu")
    assert q.backend == "triton"
    assert all(torch.equal(t, p.arrays[n]) for n, t in q.arrays.items())
    assert torch.equal(q.restore().codes, p.restore().codes)
    with pytest.raises(fp4.LayoutMismatch, match="were prepared for SM90"):
        fp4.matmul(torch.randn(1, 256, dtype=torch.bfloat16), q)


def test_save_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that fails keeps the file that was there, leaves no other, and says so in one sentence; a folder is no file."""
    path = tmp_path / "w.safetensors"
    make("reference").save(path)
    before = path.read_bytes()
    with pytest.raises(fp4.Fp4Error, match="is a folder; give the name of a file"):
        make("reference").save(tmp_path)

    def full(arrays: Any, where: str, metadata: Any) -> None:
        Path(where).write_bytes(before[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(fp4.Fp4Error, match=r"save: cannot write .*w\.safetensors: .*No space left"):
        make("reference").save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]
