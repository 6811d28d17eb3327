"""Prepared weights: restore is bit-exact for every backend, files load back, and bytes never run where they were not made for."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_cases import random_weight
from safetensors import safe_open
from safetensors.torch import save_file

import fp4
from fp4 import prepared as prepared_module
from fp4.gpu import registry
from fp4.gpu.backends import reference, triton
from fp4.gpu.device import Device
from fp4.gpu.registry import Ok
from fp4.gpu.storage import Stored
from fp4.prepared import Packed, pack
from fp4.tensor import GATE_UP_ORDERS, QuantizedTensor

DEVICES = {"cpu": Device.of("cpu"), **{f"sm{c}": Device.of(f"sm{c}") for c in ("80", "89", "90", "100", "103", "120", "121")}}


def same(a: QuantizedTensor, b: QuantizedTensor) -> None:
    assert (a.format, a.shape, a.axis, a.gate_up, a.recipe) == (b.format, b.shape, b.axis, b.gate_up, b.recipe)
    for name in ("codes", "scale", "global_scale", "input_scale"):
        s, t = getattr(a, name), getattr(b, name)
        assert (s is None) == (t is None), name
        if s is not None:
            assert torch.equal(s, t), name
            assert s.dtype == t.dtype


def forced(make: Any, backend: str) -> Any:
    """``make(backend)``, or None when this backend says no (its reason is tested elsewhere)."""
    try:
        return make(backend)
    except (fp4.Unsupported, fp4.BackendUnavailable):
        return None


SHAPES = [(16, 64), (50, 96), (288, 352), (130, 1504)]


@pytest.mark.parametrize("backend", registry.backends())
def test_linear_weights_come_back_bit_for_bit(backend: str) -> None:
    ran = 0
    for (name, device), fmt, (n, k), act in itertools.product(DEVICES.items(), ("nvfp4", "mxfp4"), SHAPES, ("any", "keep", "nvfp4")):
        w = replace(random_weight(n, fmt, n, k), input_scale=torch.tensor(0.02), recipe=fp4.recipes["default"])
        p = forced(lambda b, w=w, d=device, a=act: fp4.prepare(w, b, device=d, act=a), backend)
        if p is None:
            continue
        ran += 1
        assert p.backend == backend, name
        assert p.shape == (n, k)
        same(p.restore(), w)
    if not ran:
        pytest.skip(f"{backend} serves no linear layer here: {registry.probe(backend)}")


@pytest.mark.parametrize("backend", registry.backends())
def test_experts_come_back_bit_for_bit(backend: str) -> None:
    ran = 0
    experts, hidden, inter = 3, 128, 96
    for device, fmt, order, pair in itertools.product(DEVICES.values(), ("nvfp4", "mxfp4"), GATE_UP_ORDERS, (False, True)):
        w2 = random_weight(2, fmt, experts, hidden, inter)
        if pair:
            w13: Any = (random_weight(3, fmt, experts, inter, hidden), random_weight(4, fmt, experts, inter, hidden))
        else:
            w13 = random_weight(1, fmt, experts, 2 * inter, hidden)
        b13, b2 = torch.randn(experts, 2 * inter).bfloat16(), torch.randn(experts, hidden)
        act = fp4.SwiGLU()

        def make(b: str, w13: Any = w13, w2: Any = w2, order: str = order, pair: bool = pair, device: Any = device) -> Any:
            order_ = None if pair else order
            return fp4.prepare_moe(w13, w2, gate_up=order_, bias13=b13, bias2=b2, activation=act, backend=b, device=device, topk=2)  # noqa: B023

        p = forced(make, backend)
        if p is None:
            continue
        ran += 1
        first, second = p.restore()
        for got, want in zip(first, w13, strict=True) if isinstance(first, tuple) else [(first, w13)]:
            if isinstance(want, tuple):  # equal global scales: stacked
                want = replace(got, codes=torch.cat([q.codes for q in want], 1), scale=torch.cat([q.scale for q in want], 1))
            same(got, want)
        same(second, w2)
        r13, r2 = p.restore_bias()
        assert torch.equal(r13, b13)
        assert torch.equal(r2, b2)
    if not ran:
        pytest.skip(f"{backend} serves no MoE layer here: {registry.probe(backend)}")


def test_what_ran_includes_our_own_paths() -> None:
    w = random_weight(0, "nvfp4", 48, 64)
    tuned = fp4.prepare(w, "triton", device=Device.of("sm90"))
    assert tuned.meta["path"] == "dense"
    assert tuned.layouts["codes"] != Stored()
    assert fp4.prepare(w, "triton", device=Device.of("sm120"), act="nvfp4").meta["path"] == "block_scaled"
    amd = random_weight(0, "amdfp4", 48, 64)
    assert fp4.prepare(amd, "triton", device=Device.of("sm90")).meta["path"] == "plain"


def test_tuned_experts_know_their_range_and_pad_within_their_window() -> None:
    """The kernels compare global ids with ``first``; padding the scales of 96 columns to 256 must not widen the exponent window."""
    from fp4.gpu.backends import _triton_moe

    w13, w2 = random_weight(1, "mxfp4", 4, 128, 96), random_weight(2, "mxfp4", 4, 96, 64)
    p = fp4.prepare_moe(
        w13, w2, gate_up="gate_up", activation=fp4.SwiGLU(), backend="triton", device=Device.of("sm90"), local_experts=(1, 3)
    )
    assert p.meta["path"] == "moe"
    assert torch.float16 in p.act_dtypes  # fp16 has the narrower window: 118..136 fits, and 0 in the padding would not
    g = _triton_moe._bind(p)
    assert (g.first, g.experts) == (1, 2)


@pytest.mark.parametrize(("binades", "dtypes"), [(24, (torch.bfloat16, torch.float16)), (25, (torch.bfloat16,))])
def test_tuned_experts_take_the_dtypes_whose_products_are_exact(binades: int, dtypes: tuple[torch.dtype, ...]) -> None:
    w13, w2 = random_weight(1, "mxfp4", 2, 64, 64), random_weight(2, "mxfp4", 2, 64, 32)
    w2.scale.fill_(127)
    w2.scale[1, 3, 0] = 127 + binades
    p = fp4.prepare_moe(w13, w2, gate_up="gate_up", backend="triton", device=Device.of("sm90"))
    assert p.meta["path"] == "moe"
    assert p.act_dtypes == dtypes


@pytest.mark.parametrize(("fmt", "act"), [("nvfp4", "any"), ("mxfp4", "any"), ("mxfp4", "fp8")])
def test_tuned_linear_kernels_get_the_global_scale(monkeypatch: pytest.MonkeyPatch, fmt: str, act: str) -> None:
    from fp4.gpu.backends import _triton_dense
    from fp4.gpu.kernels import dense, dense_fp8

    got: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dense, "Dense", lambda *args: got.append(args))
    monkeypatch.setattr(dense_fp8, "Dense8", lambda codes, scale, base, *args: got.append((codes, scale, *args)))
    w = random_weight(1, fmt, 48, 64)
    if act == "fp8":  # scales of a row within the binades that e4m3 weights can hold
        w = replace(w, scale=w.scale.clamp(max=124))
    p = fp4.prepare(w, "triton", device=Device.of("sm90"), act=act)
    _triton_dense._bind(p)
    codes, scale, second, n, k, *_ = got[0]
    assert codes is p.arrays["codes"]
    assert scale is p.arrays["scale"]
    assert (second is None) == (w.global_scale is None)
    assert second is None or torch.equal(second, w.global_scale)
    assert (n, k) == (48, 64)


def test_path_that_does_not_fit_the_values_falls_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(problem: Any, weights: Any) -> Any:
        raise fp4.Unsupported("scales span more than the window")

    monkeypatch.setattr(triton._paths()["dense"], "prepare", prepare)
    w = random_weight(0, "nvfp4", 48, 64)
    p = fp4.prepare(w, "triton", device=Device.of("sm90"))
    assert p.meta["path"] == "plain"
    assert "more than the window" in p.meta["why"]
    same(p.restore(), w)


# ---- files ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "sm90"])
def test_saved_and_loaded(tmp_path: Path, device: str) -> None:
    w = replace(random_weight(5, "nvfp4", 50, 96), input_scale=torch.tensor(0.5))
    p = fp4.prepare(w, "reference" if device == "cpu" else "triton", device=DEVICES[device])
    path = tmp_path / "w.safetensors"
    p.save(path)
    with safe_open(str(path), "pt") as f:
        about = json.loads(f.metadata()["fp4"])
    assert about["layouts"]["codes"]["layout"] == ("plain" if device == "cpu" else "frag_w")  # names, not numbers of a version
    q = prepared_module.load(path, "cpu")
    same(q.restore(), w)
    x = torch.randn(3, 96)
    if device == "cpu":
        assert torch.equal(fp4.matmul(x, q), fp4.matmul(x, p))
    else:
        with pytest.raises(fp4.LayoutMismatch, match=r"prepared for SM90 and are on CPU; prepare again"):
            fp4.matmul(x.bfloat16(), q)


@pytest.mark.sm90
def test_loaded_where_it_was_prepared_for(tmp_path: Path) -> None:
    """Bytes made for Hopper without one load onto the Hopper that is here, and run."""
    w = random_weight(5, "nvfp4", 50, 96)
    fp4.prepare(w, "triton", device=DEVICES["sm90"]).save(tmp_path / "w.safetensors")
    q = prepared_module.load(tmp_path / "w.safetensors")
    assert (q.device.type, q.meta["path"]) == ("cuda", "dense")
    same(q.restore(), w.to("cuda"))
    x = torch.randn(3, 96).bfloat16()
    y, z = fp4.matmul(x.cuda(), q, out_dtype=torch.float32).cpu().double(), x.double() @ fp4.dequantize(w).double().T
    assert float((y - z).norm() / z.norm()) < 3e-6


def test_saved_experts(tmp_path: Path) -> None:
    gate, up, w2 = random_weight(1, "nvfp4", 4, 32, 64), random_weight(2, "nvfp4", 4, 32, 64), random_weight(3, "nvfp4", 4, 64, 32)
    p = fp4.prepare_moe((gate, up), w2, activation=fp4.SiTU(beta=3.0), bias2=torch.randn(4, 64), local_experts=(1, 4))
    p.save(tmp_path / "e.safetensors")
    q = prepared_module.load(tmp_path / "e.safetensors")
    assert q.problem == p.problem
    x, ids, weights = torch.randn(5, 64), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    assert torch.equal(fp4.moe(x, q, ids, weights), fp4.moe(x, p, ids, weights))  # type: ignore[arg-type]


def test_file_of_another_layout_is_prepared_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer library stores differently: the bytes are restored by the names in the file, never taken for the new order."""
    w = random_weight(5, "mxfp4", 128, 128)
    fp4.prepare(w, "reference").save(tmp_path / "w.safetensors")
    module = registry.get("reference")
    monkeypatch.setattr(module, "layouts", lambda problem: {"codes": Stored(), "scale": Stored("sf_128x4")})
    q = prepared_module.load(tmp_path / "w.safetensors")
    assert q.layouts["scale"].layout == "sf_128x4"
    assert not torch.equal(q.arrays["scale"].flatten(), w.scale.flatten())
    same(q.restore(), w)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make a backend of given names and take only that one."""

    def use(**names: Any) -> None:
        common = {"name": "own", "probe": lambda: Ok(), "supports": lambda p: Ok(1), "layouts": reference.layouts, "run": reference.run}
        module = types.SimpleNamespace(**{**common, **names})
        monkeypatch.setattr(registry, "_discover", lambda: iter({"own": module}.items()))
        registry.reset()

    yield use
    monkeypatch.undo()
    registry.reset()


def test_encoded_scales_come_back_bit_for_bit(own: Any, tmp_path: Path) -> None:
    """A backend whose kernel reads other scale bytes names a value map: the stored bytes are the map's, restore undoes it."""
    from fp4 import encode

    name = "marlin_nvfp4_v1"
    own(layouts=lambda p: {"codes": Stored(), "scale": Stored("sf_128x4", encode=(name,))}, run=lambda p: lambda *_: None)
    w = random_weight(5, "nvfp4", 50, 96)
    w.scale[0, :] = torch.tensor([0, 1, 7, 8, 0x40, 0x7E], dtype=torch.uint8)
    p = fp4.prepare(w)
    assert p.encodes == {"scale": (name,)}
    assert f"{name}, sf_128x4" in p.explain()
    assert torch.equal(p.arrays["scale"].flatten(), fp4.layouts["sf_128x4"].apply(encode.get(name)(w.scale).data).flatten())
    same(p.restore(), w)
    assert f"bytes are encoded by {name}" in str(p.shards("n", 2)["scale"])
    p.save(tmp_path / "w.safetensors")
    same(prepared_module.load(tmp_path / "w.safetensors").restore(), w)
    w.scale[1, 1] = 0x90  # the map has no sign
    with pytest.raises(fp4.FormatMismatch, match="1 of 300 items are refused, first 0x90 at 7"):
        fp4.prepare(w)


def test_value_maps_are_undone_in_the_other_order(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4 import encode

    turn = encode.Encode("turn", lambda x: encode.Encoded(255 - x, 1.0), lambda e: 255 - e.data, True)
    step = encode.Encode("step", lambda x: encode.Encoded(x + 3, 1.0), lambda e: e.data - 3, True)
    monkeypatch.setattr(encode, "_TABLE", {**encode._TABLE, "turn": turn, "step": step})
    own(layouts=lambda p: {"codes": Stored(), "scale": Stored("sf_128x4", encode=("turn", "step"))}, run=lambda p: lambda *_: None)
    w = random_weight(5, "mxfp4", 50, 128)
    p = fp4.prepare(w)
    assert torch.equal(p.arrays["scale"].flatten(), fp4.layouts["sf_128x4"].apply(255 - w.scale + 3).flatten())
    same(p.restore(), w)


@pytest.mark.parametrize(
    ("fmt", "name", "error", "words"),
    [
        (
            "nvfp4",
            "marlin_nvfp4_v3",
            fp4.Unsupported,
            "marlin_nvfp4_v3 does not keep every scale byte",
        ),
        ("mxfp4", "marlin_mxfp4_a8", fp4.LayoutError, "multiplies the scales by 64; the backend must fold it into its global scale"),
    ],
)
def test_a_value_map_that_restore_could_not_undo_is_refused(own: Any, fmt: str, name: str, error: Any, words: str) -> None:
    own(layouts=lambda p: {"codes": Stored(), "scale": Stored(encode=(name,))})
    with pytest.raises(error, match=words):
        fp4.prepare(random_weight(5, fmt, 32, 64))


def test_a_file_keeps_the_dtypes_that_its_values_allow(own: Any, tmp_path: Path) -> None:
    """``prepare`` may find that the scales fit products in one type only; after loading, the other one is refused as before."""

    def prepare(problem: Any, weights: Any) -> Packed:
        return Packed(pack(problem, weights, reference.layouts(problem)), act_dtypes=(torch.bfloat16,))

    own(prepare=prepare)
    w = fp4.prepare(random_weight(5, "nvfp4", 32, 64))
    assert w.act_dtypes == (torch.bfloat16,)
    w.save(tmp_path / "w.safetensors")
    loaded = prepared_module.load(tmp_path / "w.safetensors")
    assert loaded.act_dtypes == (torch.bfloat16,)
    with pytest.raises(fp4.FormatMismatch, match=r"x is torch\.float16, backend 'own' prepared this weight for bfloat16"):
        fp4.matmul(torch.ones(2, 64, dtype=torch.float16), loaded)  # type: ignore[arg-type]


def test_files_that_are_not_ours(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"not a file of tensors")
    save_file({"x": torch.zeros(1)}, str(tmp_path / "b.safetensors"))
    with pytest.raises(fp4.CheckpointError, match="no readable"):
        prepared_module.load(tmp_path / "a.safetensors")
    with pytest.raises(fp4.CheckpointError, match="holds no prepared weight"):
        prepared_module.load(tmp_path / "b.safetensors")


def test_copies_run() -> None:
    w = fp4.prepare(random_weight(5, "nvfp4", 32, 64))
    x = torch.randn(2, 64)
    for other in (copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        assert other.handle != w.handle
        assert torch.equal(fp4.matmul(x, other), fp4.matmul(x, w))
        same(other.restore(), w.restore())


# ---- wrong place ---------------------------------------------------------------------------------------------------------------


def test_bytes_do_not_run_on_another_device() -> None:
    w = fp4.prepare(random_weight(5, "nvfp4", 32, 64))
    with pytest.raises(fp4.LayoutMismatch, match=r"x is on meta, the weight was prepared on cpu; move x, or prepare again"):
        fp4.matmul(torch.randn(2, 64, device="meta"), w)
    moved = replace(w, arrays={n: t.to("meta") for n, t in w.arrays.items()})
    with pytest.raises(fp4.LayoutMismatch):
        fp4.matmul(torch.randn(2, 64), moved)
    other_gpu = replace(w, problem=replace(w.problem, device=replace(Device.of("sm90"), index=-1)))
    with pytest.raises(fp4.LayoutMismatch, match="prepared for SM90 and are on CPU"):
        fp4.matmul(torch.randn(2, 64), other_gpu)


def test_arrays_cannot_be_exchanged_under_a_prepared_weight() -> None:
    w = fp4.prepare(random_weight(5, "nvfp4", 32, 64))
    with pytest.raises(TypeError):
        w.arrays["codes"] = torch.zeros(1)  # type: ignore[index]
    with pytest.raises(AttributeError):
        w.backend = "triton"  # type: ignore[misc]


def test_prepared_carries_what_it_is() -> None:
    w = random_weight(5, "nvfp4", 32, 64)
    p = fp4.prepare(w)
    assert p.nbytes == w.nbytes
    assert "ranking" in p.explain()
    assert "plain" in p.explain()
    assert p.backend in repr(p)
    tuned = fp4.prepare(random_weight(5, "mxfp4", 4096, 4096), "triton", device=Device.of("sm90"))
    assert tuned.nbytes <= 1.02 * 4096 * 4096 * (1 / 2 + 1 / 32)  # no second copy of anything


def test_saving_into_a_missing_folder_says_so(tmp_path: Path) -> None:
    w = fp4.prepare(fp4.quantize(torch.randn(16, 32), "mxfp4"), device="cpu")
    with pytest.raises(fp4.Fp4Error, match=r"save: .*does not exist"):
        w.save(tmp_path / "missing" / "w.safetensors")


def test_a_prepared_weight_is_itself_alone() -> None:
    """It is equal to no other, equal bytes or not, and can be a key: engines keep them in dicts and sets."""
    q = fp4.quantize(torch.randn(32, 64), "mxfp4")
    w, other = fp4.prepare(q, "reference"), fp4.prepare(q, "reference")
    assert w == w
    assert w != other
    assert {w: 1, other: 2}[w] == 1


def test_docstring_lists_the_methods() -> None:
    for cls in (prepared_module.Prepared, prepared_module.PreparedMoE):
        for name in ("restore", "save", "shards", "explain", "warmup"):
            assert name in (cls.__doc__ or ""), f"{cls.__name__}: {name}"


def test_local_experts_do_not_keep_the_others() -> None:
    """A rank's arrays were views of all experts: the memory stayed, and a pickle carried everything (sglang#38073, of that kind)."""
    w13, w2 = (random_weight(1, "nvfp4", 8, *shape) for shape in ((64, 64), (64, 32)))
    bias = torch.randn(8, 64)
    ex = fp4.prepare_moe(w13, w2, gate_up="gate_up", bias13=bias, bias2=bias, local_experts=(2, 3), backend="reference")
    for name, t in ex.arrays.items():
        assert t.untyped_storage().nbytes() == t.numel() * t.element_size(), name
    everything = sum(q.nbytes for q in (w13, w2))
    assert len(pickle.dumps(ex)) < everything / 2
    whole = fp4.prepare_moe(w13, w2, gate_up="gate_up", backend="reference")
    assert whole.arrays["w2.codes"].data_ptr() == w2.codes.data_ptr()  # nothing to change: no second copy
