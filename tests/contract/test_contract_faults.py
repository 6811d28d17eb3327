"""Do the contract tests bite? Each classic fault is put into the back end, and the comparison that passes without it must fail.

A fault either changes how an array is stored (``Stored``), or one prepared scalar. The faults are those of public reports: swapped
halves (sglang#32430), plain scales where swizzled ones are read (modular#6600), a missing row shuffle (flashinfer#2952), an inverted or
shared global scale (vllm#54974), bias without the permutation (vllm-gaudi#1567), uninitialised padding (vllm#38148) ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pretend
import pytest
import torch
from cases import Layer, dense, error, poisoned
from emulate import Emulator
from test_contract_linear import inputs, seen, weight
from test_contract_moe import GPT_OSS, installed_sm90_layout

import fp4
from fp4.gpu import storage
from fp4.gpu.device import Device
from fp4.gpu.storage import Stored

#: below this a comparison would pass; the true implementations are below 2e-6, and 0.008 where bf16 rounding is between
SEEN = 0.02

Change = Callable[[Stored, torch.Tensor], Stored | torch.Tensor]


def is_scale(s: Stored) -> bool:
    return "sf" in s.layout


def is_bias(t: torch.Tensor) -> bool:
    """Biases are stored as rows of four bytes."""
    return t.shape[-1] == 4


def swapped_halves(s: Stored, t: torch.Tensor) -> Stored:
    return replace(s, order={"up_gate": "gate_up", "gate_up": "up_gate"}.get(s.order or "", s.order))


def bias_in_the_other_order(s: Stored, t: torch.Tensor) -> Stored:
    """Only where the bias goes to its final order (trtllm divides it in checkpoint halves first)."""
    return swapped_halves(s, t) if is_bias(t) and (s.layout, s.order) != ("plain", "gate_up") else s


def scales_in_the_other_order(s: Stored, t: torch.Tensor) -> Stored:
    return swapped_halves(s, t) if is_scale(s) else s


def without(name: str, scales: bool = True, codes: bool = True, biases: bool = True) -> Change:
    def change(s: Stored, t: torch.Tensor) -> Stored:
        if not (biases if is_bias(t) else scales if is_scale(s) else codes):
            return s
        return replace(s, layout=" >> ".join(p for p in s.layout.split(" >> ") if p != name) or "plain")

    return change


def padded_at_the_end(s: Stored, t: torch.Tensor) -> Stored | torch.Tensor:
    """Rows padded after both halves: the gate/up boundary moves (sglang's loader comment)."""
    if s.order is None or s.shape is None:
        return s
    n, k = s.shape
    moved = storage.reorder_gate_up(t, "interleaved", s.order)
    return torch.nn.functional.pad(moved, (0, k - t.shape[-1], 0, n - t.shape[-2]), value=s.fill)


def nan_in_the_padding(s: Stored, t: torch.Tensor) -> Stored:
    return replace(s, fill=0xFF) if is_scale(s) else s


def codes_in_the_padding(s: Stored, t: torch.Tensor) -> Stored:
    return replace(s, fill=0x77) if s.shape and not is_scale(s) and not is_bias(t) else s


def layout_of_the_other_release(kind: str) -> Change:
    def change(s: Stored, t: torch.Tensor) -> Stored:
        if f"sm90_mixed_{kind}" not in s.layout:
            return s
        return replace(s, layout=s.layout.removesuffix("_a") if s.layout.endswith("_a") else s.layout + "_a")

    return change


ORDER = {"swapped halves": swapped_halves, "scales in the other order": scales_in_the_other_order, "padded at the end": padded_at_the_end}
PADDING = {"NaN in the padding": nan_in_the_padding}
#: with a zero scale the NVFP4 routes do not care about padding codes; the neutral ue8m0 scale of MXFP4 does
CODES = {"codes in the padding": codes_in_the_padding}
SWIZZLE = {"plain scales": without("sf_128x4")}
ROWS = {
    "no row shuffle": without("trtllm_rows_32"),
    "no row shuffle of the codes": without("trtllm_rows_32", scales=False, biases=False),
    "no row shuffle of the scales": without("trtllm_rows_32", codes=False, biases=False),
    "no row shuffle of the bias": without("trtllm_rows_32", codes=False, scales=False),
    "halves instead of pairs": without("gate_up_pairs"),
}
SM90 = {f"the other release's {kind}": layout_of_the_other_release(kind) for kind in ("fp4", "sf")}
BIAS = {"bias in the other order": bias_in_the_other_order}

ROUTES: dict[str, tuple[str, str, tuple[int, int], str, dict[str, Change]]] = {
    "nvfp4_moe_cutlass": ("flashinfer_cutlass", "nvfp4", (10, 0), "any", {**ORDER, **SWIZZLE, **BIAS, **PADDING}),
    "nvfp4_moe_trtllm": ("flashinfer_trtllm", "nvfp4", (10, 0), "any", {**ORDER, **SWIZZLE, **ROWS, **BIAS, **PADDING}),
    "nvfp4_moe_masked": ("flashinfer_cutedsl", "nvfp4", (10, 0), "any", {**ORDER, **SWIZZLE}),
    "mxfp4_moe_trtllm": ("flashinfer_trtllm", "mxfp4", (10, 0), "keep", {**ORDER, **SWIZZLE, **ROWS, **BIAS, **PADDING, **CODES}),
    "mxfp4_moe_cutlass": ("flashinfer_cutlass", "mxfp4", (12, 0), "mxfp8", {**ORDER, **SWIZZLE, **BIAS, **PADDING, **CODES}),
    "mxfp4_moe_sm90": ("flashinfer_cutlass", "mxfp4", (9, 0), "keep", {**ORDER, **SM90, **BIAS, **PADDING, **CODES}),
}


def distance(route: str, change: Change | None = None, scalars: Callable[[dict[str, torch.Tensor]], None] | None = None) -> float:
    """Error of the layer with a fault; infinite where FlashInfer or its binding refuses the operands."""
    backend, format, cc, act, _ = ROUTES[route]
    masked = backend == "flashinfer_cutedsl"
    if masked:
        pytest.importorskip("cutlass", reason="the CuTe-DSL route needs nvidia-cutlass-dsl")
    experts = 3 if cc == (9, 0) else 4
    layer = Layer(format, "interleaved", experts=experts, activation=fp4.SiLU() if masked else GPT_OSS, bias=not masked)
    emulator = Emulator(cc, installed_sm90_layout() if cc == (9, 0) else "B")
    true_apply = storage.apply

    def apply(t: torch.Tensor, s: Stored, order: str | None = None, device: Any = None) -> torch.Tensor:
        faulty = s if change is None else change(s, t)
        if isinstance(faulty, torch.Tensor):
            return true_apply(faulty, replace(s, order=None, shape=None))
        if "sf_128x4" in s.layout and "sf_128x4" not in faulty.layout:  # plain rows in a buffer of the padded size
            plain = true_apply(t, faulty, order, device).reshape(-1, *(s.shape or t.shape[-2:]))
            pad = (0, -plain.shape[-1] % 4, 0, -plain.shape[-2] % 128)
            return torch.nn.functional.pad(plain, pad)
        return true_apply(t, faulty, order, device)

    patch = pytest.MonkeyPatch()
    patch.setattr(storage, "apply", apply)
    try:
        with pretend.gpu(cc, emulator.functions), poisoned():
            prepared = layer.prepare(backend, Device.fake(cc), act=act)
            if scalars is not None:
                arrays = dict(prepared.arrays)
                scalars(arrays)
                prepared = replace(prepared, arrays=arrays)
            y = fp4.moe(layer.x, prepared, layer.ids, layer.weights)
    except (RuntimeError, AssertionError):  # the binding or the emulator refuses the operands; an Fp4Error is a ValueError
        return float("inf")
    finally:
        patch.undo()
    sees = {"keep": layer.plain, "mxfp8": layer.mxfp8}.get(act) or (layer.nvfp4_shared if "trtllm" in backend else layer.nvfp4)
    return error(y, layer.reference(sees))


@pytest.mark.parametrize("route", ROUTES)
def test_without_a_fault_it_passes(route: str) -> None:
    pretend.flashinfer()
    assert distance(route) < 0.008


@pytest.mark.parametrize(("route", "fault"), [(r, f) for r, (*_, faults) in ROUTES.items() for f in faults])
def test_a_wrong_order_is_seen(route: str, fault: str) -> None:
    pretend.flashinfer()
    assert distance(route, ROUTES[route][4][fault]) > SEEN


def invert(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda a: a.__setitem__(name, 1.0 / a[name])


def largest(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    """One value for all experts: the max."""
    return lambda a: a.__setitem__(name, a[name].amax().expand_as(a[name]).contiguous())


def exchange(one: str, other: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(a: dict[str, torch.Tensor]) -> None:
        a[one], a[other] = a[other], a[one]

    return change


def times(name: str, factor: float) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda a: a.__setitem__(name, a[name] * factor)


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda a: a.pop(name) and None


F = "flashinfer."
SCALARS: dict[tuple[str, str], Callable[[dict[str, torch.Tensor]], None]] = {
    **{("nvfp4_moe_cutlass", f"inverted {n}"): invert(F + n) for n in ("alpha13", "alpha2", "quant13", "quant2")},
    **{("nvfp4_moe_cutlass", f"largest {n}"): largest(F + n) for n in ("alpha13", "alpha2")},
    ("nvfp4_moe_cutlass", "alphas exchanged"): exchange(F + "alpha13", F + "alpha2"),
    **{("nvfp4_moe_masked", f"inverted {n}"): invert(F + n) for n in ("alpha13", "alpha2", "quant2")},
    **{("nvfp4_moe_masked", f"largest {n}"): largest(F + n) for n in ("alpha13", "alpha2")},
    **{("nvfp4_moe_trtllm", f"largest {n}"): largest(F + n) for n in ("output1", "output1_gate", "output2")},
    ("nvfp4_moe_trtllm", "output scalars exchanged"): exchange(F + "output1", F + "output1_gate"),
    **{("nvfp4_moe_trtllm", f"{n} in real units"): times(F + n, 1e-4) for n in ("act_limit", "act_beta", "bias13", "bias2")},
    **{("mxfp4_moe_trtllm", f"no {n}"): drop(F + n) for n in ("act_limit", "act_alpha", "act_beta", "bias13", "bias2")},
    **{("mxfp4_moe_cutlass", f"no {n}"): drop(F + n) for n in ("act_limit", "act_alpha", "act_beta")},
    **{("mxfp4_moe_sm90", f"no {n}"): drop(F + n) for n in ("act_limit", "act_alpha", "act_beta")},
}


@pytest.mark.parametrize(("route", "fault"), SCALARS)
def test_a_wrong_scalar_is_seen(route: str, fault: str) -> None:
    pretend.flashinfer()
    assert distance(route, scalars=SCALARS[route, fault]) > SEEN


LINEAR: dict[tuple[str, str], Change] = {
    **{
        (b, "plain scales"): without("sf_128x4")
        for b in ("flashinfer_cutlass", "flashinfer_cudnn", "flashinfer_cutedsl", "flashinfer_trtllm")
    },
    ("flashinfer_trtllm", "no row shuffle"): without("trtllm_rows_32"),
    ("flashinfer_trtllm", "no row shuffle of the scales"): without("trtllm_rows_32", codes=False),
}


@pytest.mark.parametrize(
    ("backend", "fault"), [*LINEAR, ("flashinfer_cutlass", "inverted alpha"), ("flashinfer_trtllm", "inverted quant_scale")]
)
def test_a_linear_fault_is_seen(backend: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, x = weight(), inputs(33, 208)
    emulator, true_apply = Emulator((10, 0)), storage.apply

    def apply(t: torch.Tensor, s: Stored, order: str | None = None, device: Any = None) -> torch.Tensor:
        faulty = LINEAR[backend, fault](s, t)
        out = true_apply(t, faulty, order, device)
        if "sf_128x4" in s.layout and "sf_128x4" not in faulty.layout:
            out = out.reshape(s.shape)
            out = torch.nn.functional.pad(out, (0, -out.shape[-1] % 4, 0, -out.shape[-2] % 128))
        return out

    if (backend, fault) in LINEAR:
        monkeypatch.setattr(storage, "apply", apply)
    with pretend.gpu((10, 0), emulator.functions), poisoned():
        prepared = fp4.prepare(q, backend=backend, device=Device.fake((10, 0)))
        if fault.startswith("inverted "):
            arrays = dict(prepared.arrays)
            invert(F + fault.split()[1])(arrays)
            prepared = replace(prepared, arrays=arrays)
        y = fp4.matmul(x, prepared)
    assert error(y, seen(x, q.input_scale) @ dense(q).T) > SEEN
