"""Layouts against bytes that real libraries wrote: small checked-in files, the complete ones, and installed vendor libraries."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

import fp4
from fp4.layouts import get
from fp4.testing import assert_same_bytes

#: key prefix in other_backends.npz -> layout
OTHER = {
    "marlin_w": "marlin_w",
    "marlin_w_a8": "marlin_w_a8",
    "cpu_amx_w": "cpu_amx_w",
    "aiter_w": "aiter_w",
    "aiter_w_a16w4_gu": "aiter_w_gu",
    "aiter_w_a16w4": "aiter_w_a16w4",
    "marlin_sf_mx": "marlin_mx_sf",
    "marlin_sf_nv": "marlin_mx_sf",
    "deepgemm_sf": "deepgemm_sf",
    "aiter_sf": "aiter_sf",
    "aiter_sf_gu": "aiter_sf_gu",
    "cpu_amx_sf": "cpu_amx_sf",
    "sf_128x4": "sf_128x4",
    "deepgemm_gate_up8": "deepgemm_gate_up",
}
SM90 = {"fp4_A": "sm90_mixed_fp4_a", "fp4_B": "sm90_mixed_fp4", "fp4fp8": "sm90_mixed_fp4_fp8", "int4": "sm90_mixed_int4"}
#: what each triton_kernels generation pads (N, K bytes) of HOPPER_VALUE to
HOPPER_PAD = {"A": (16, 32), "B": (64, 64), "M": (64, 64), "C": (64, 64), "D": (256, 64)}


def check(layout: fp4.Layout, x: np.ndarray, want: np.ndarray) -> None:
    """apply gives the vendor's bytes, and invert reads the input back from the vendor's bytes."""
    want = np.ascontiguousarray(want).reshape(-1).view(np.uint8)
    assert_same_bytes(layout.apply(x), want, layout=layout, shape=x.shape)
    assert_same_bytes(layout.invert(want, x.shape), x)


def flashinfer_cases(z: dict[str, np.ndarray]) -> list[tuple[str, fp4.Layout, np.ndarray, np.ndarray]]:
    out = [(k, get("sf_128x4"), z[k], z["out_" + k[3:]]) for k in z if k.startswith("in_")]
    for k in z:
        if k.startswith("sm90_in__"):
            out += [(f"{kind}_{k[9:]}", get(name), z[k], z[f"sm90_{kind}_{k[9:]}"]) for kind, name in SM90.items()]
    return out


def other_cases(z: dict[str, np.ndarray]) -> list[tuple[str, fp4.Layout, np.ndarray, np.ndarray]]:
    out = []
    for k in z:
        prefix, shape = k.rsplit("_", 1)
        if prefix in OTHER:
            single = "marlin_sf" in prefix and shape.endswith("x1")  # one group: the other permutation
            name = "marlin_mx_sf_single" if single else OTHER[prefix]
            out.append((k, get(name), z[("codes_" if "_w" in prefix else "scale_") + shape], z[k]))
    return out


def triton_layout(kind: str, generation: str, columns: int) -> fp4.Layout:
    if kind.startswith("hopper_value_mma"):
        pad_n, pad_k = HOPPER_PAD[generation]
        return get(f"hopper_value_v{kind[-1]}", pad_n=pad_n, pad_k=pad_k)
    if kind.startswith("hopper_scale_nw"):
        return get("hopper_sf", num_warps=int(kind[-1]))
    if kind == "gfx1250_scale":
        return get("triton_gfx1250_sf", columns=columns)
    return get({"blackwell_scale": "blackwell_sf", "cdna4_scale": "cdna4_sf"}.get(kind, "blackwell_value_shuffled"))


def triton_cases(z: dict[str, np.ndarray]) -> list[tuple[str, fp4.Layout, np.ndarray, np.ndarray]]:
    out = []
    for k in z:
        if not k.startswith("in_"):
            kind, shape, generations = k.split("__")
            x = z[f"in_{'value' if 'value' in kind else 'scale'}_{shape}"]
            out += [(f"{k}:{g}", triton_layout(kind, g, x.shape[-1]), x, z[k]) for g in generations]
    return out


def load(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as z:
        return {k: z[k] for k in z.files}


_DATA = Path(__file__).parent / "data" / "layouts"
CASES = [
    *flashinfer_cases(load(_DATA / "flashinfer.npz")),
    *other_cases(load(_DATA / "other_backends.npz")),
    *triton_cases(load(_DATA / "triton_kernels.npz")),
]


@pytest.mark.parametrize(("layout", "x", "want"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_golden_bytes(layout: fp4.Layout, x: np.ndarray, want: np.ndarray) -> None:
    check(layout, x, want)


def test_golden_files_are_complete() -> None:
    """No array of the files goes unused: 11 + 16 + 44 + 44 comparisons at least, five generations, every cut included."""
    used = {c[0].split(":")[0] for c in CASES}
    assert {"in_3x130x6", "fp4_A_64x256", "marlin_w_a8_192x64", "hopper_value_mma3__1x96x48__D"} <= used
    assert len(CASES) >= 11 + 16 + 40 + 44


def test_golden_bias_and_scale_byte() -> None:
    z = load(_DATA / "other_backends.npz")
    assert_same_bytes(get("marlin_bias").apply_rows(torch.from_numpy(z["bias_192"])), torch.from_numpy(z["marlin_bias_192"]))


def test_complete_files(oracles: Path) -> None:
    """Every array of the complete oracle files (``--oracles``), uncut."""
    pick = runpy.run_path(str(_DATA / "pick.py"))
    z = load(oracles / "flashinfer" / "block_scale_interleave_h200.npz")
    z.update({f"sm90_{k}": v for k, v in load(oracles / "flashinfer" / "sm90_interleave_golden.npz").items()})
    cases = [*flashinfer_cases(z), *other_cases(load(oracles / "other_backends" / "layouts.npz"))]
    d = load(oracles / "flashinfer" / "dequant_h200.npz")
    cases += [(k, get("sf_128x4"), d[k], d[k[:-5] + "swizzled"]) for k in d if k.endswith("_scale")]
    for g in "ABMCD":
        t = load(oracles / "triton_kernels" / f"layouts_{g}.npz")
        for k in t:
            kind, shape = k.rsplit("_", 1)
            if k.endswith("__stride") or "_in_" in k:
                continue
            x = t[f"{'value' if 'value' in kind else 'scale'}_in_{shape}"].swapaxes(-1, -2)
            want = pick["memory_order"](t[k], t[f"{k}__stride"])
            if kind == "blackwell_value":  # generations M, C, D leave the padding uninitialised: compare what is defined
                got = get("blackwell_value").apply(x).reshape(want.shape)
                assert_same_bytes(np.ascontiguousarray(got[..., : x.shape[-1]]), np.ascontiguousarray(want[..., : x.shape[-1]]))
            else:
                cases.append((f"{g}:{k}", triton_layout(kind, g, x.shape[-1]), x, want))
    assert len(cases) > 200
    for _, layout, x, want in cases:
        check(layout, x, want)
