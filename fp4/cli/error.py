"""``fp4 error``: what each format and recipe loses on given or random tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

import fp4
from fp4 import formats, recipe
from fp4.checkpoint.base import Checkpoint
from fp4.cli.table import number, table
from fp4.errors import CheckpointError, FormatMismatch, Fp4Error
from fp4.tensor import QuantizedTensor

__all__ = ["load", "measure", "random_tensors", "render"]


def random_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """f32 [512, 1024]: normal, Laplace, Student t (4 degrees of freedom), and normal with 1 % outliers of 20 times the size."""
    if not -(1 << 63) <= seed < 1 << 63:
        raise Fp4Error(f"error: --seed is {seed}; need a 64-bit number")
    g = torch.Generator().manual_seed(seed)
    shape = (512, 1024)
    normal = torch.randn(shape, generator=g)
    u = torch.rand(shape, generator=g) - 0.5
    chi2 = torch.randn((4, *shape), generator=g).square().mean(0)
    outliers = torch.where(torch.rand(shape, generator=g) < 0.01, 20.0, 1.0)
    return {
        "normal": normal,
        "laplace": -u.sign() * torch.log1p(-2 * u.abs().clamp(max=0.5 - 2**-26)),
        "student t4": torch.randn(shape, generator=g) / chi2.sqrt(),
        "outliers": torch.randn(shape, generator=g) * outliers,
    }


def load(
    path: Path, names: Sequence[str] | None, opening: Mapping[str, Any] = MappingProxyType({}), most: int = 4
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(named tensors of a checkpoint as float32, the format of those that the file holds quantised).

    Without names its ``most`` largest matrices. The last dimension is the one along which the file's blocks lie (stacked experts of
    GPT-OSS: not the last of the unquantised model). ``opening``: for open_checkpoint. Raises CheckpointError."""
    with fp4.open_checkpoint(path, **opening) as ck:
        if names is None or not names:
            matrices = [n for n in ck.names() if len(ck.shape(n)) >= 2 and _holds_values(ck, n)]
            if not matrices:
                raise CheckpointError(f"{path}: has no matrix of values; need a floating-point tensor of two or more dimensions")
            names = sorted(matrices, key=lambda n: -math.prod(ck.shape(n)))[:most]
        out, stored = {}, {}
        for name in dict.fromkeys(names):
            q = ck[name] if ck.record(name).kind == "block" else None
            if ck.record(name).kind != "plain":
                stored[name] = q.format.name if isinstance(q, QuantizedTensor) else "fp8"
            out[name] = fp4.dequantize(q).movedim(q.axis, -1) if isinstance(q, QuantizedTensor) else ck.dequantize(name)
            if not out[name].is_floating_point():
                raise CheckpointError(f"{path}: {name} is {out[name].dtype}; need a floating-point tensor to measure what quantising loses")
        return out, stored


def _holds_values(ck: Checkpoint, name: str) -> bool:
    record = ck.record(name)
    return record.kind != "plain" or ck.store.entries[record.parts["weight"]].dtype in ("F64", "F32", "BF16", "F16")


def measure(
    tensors: Mapping[str, torch.Tensor], format_names: Sequence[str] | None = None, recipe_names: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """One row a tensor, format and recipe: ``sqnr_db = 10 log10(sum x^2 / sum (x - x')^2)``, ``worst = max |x - x'| / max |x|``.

    A recipe that does not fit a format is left out unless it was named; then its reason is the row's ``note``. Recipes that give the same
    bytes share a row: ``recipes`` lists them.
    """
    rows: list[dict[str, Any]] = []
    for name in recipe_names or ():
        recipe.get(name)  # an unknown name is bad usage; a known one that does not fit a format is a note
    recipe_names = list(dict.fromkeys(recipe_names or ()))
    for f in dict.fromkeys(formats.get(n) for n in format_names or formats.names()):
        for label, x in tensors.items():
            if x.shape[-1] % f.block:
                note = f"last dimension {x.shape[-1]} is not a multiple of {f.block}"
                rows.append({"tensor": label, "format": f.name, "recipes": [], "sqnr_db": None, "worst": None, "note": note})
                continue
            seen: list[tuple[Any, dict[str, Any]]] = []
            for name in recipe_names or fp4.recipes.names():
                try:
                    q = fp4.quantize(x, f, recipe=name)
                except FormatMismatch:
                    raise
                except Fp4Error as error:
                    if recipe_names:
                        rows.append(
                            {"tensor": label, "format": f.name, "recipes": [name], "sqnr_db": None, "worst": None, "note": str(error)}
                        )
                    continue
                back = fp4.dequantize(q).double()
                twin = next((row for other, row in seen if torch.equal(other, back)), None)
                if twin is not None:
                    twin["recipes"].append(name)
                    continue
                lost = x.double() - back
                noise, signal = float(lost.square().sum()), float(x.double().square().sum())
                row = {
                    "tensor": label,
                    "format": f.name,
                    "bits": f.bits_per_element,
                    "recipes": [name],
                    "sqnr_db": 10 * math.log10(signal / noise) if noise and signal else math.inf,
                    "worst": float(lost.abs().max() / x.abs().max()) if signal else 0.0,
                    "note": "",
                }
                seen.append((back, row))
                rows.append(row)
    return rows


LEGEND = (
    "bits: stored bits an element. SQNR: 10 log10(sum x^2 / sum (x - x')^2). worst/max: max |x - x'| / max |x|.\n"
    "Recipes share a line where these figures are the same; --json keeps those apart whose bytes differ."
)


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table a tensor, recipes of equal figures on one line, and what the columns are."""
    lines, order = [], fp4.recipes.names()
    for label in dict.fromkeys(r["tensor"] for r in rows):
        mine = sorted((r for r in rows if r["tensor"] == label), key=lambda r: (r["format"], -(r["sqnr_db"] or 0)))
        groups: dict[tuple[Any, ...], list[str]] = {}
        for r in mine:
            figures = (None if r.get("bits") is None else float(r["bits"]), r["sqnr_db"], r["worst"])
            groups.setdefault((r["format"], *map(number, figures), r["note"]), []).extend(r["recipes"])
        cells = [
            (*key[:4], ": ".join(t for t in (", ".join(sorted(recipes, key=order.index)), key[4]) if t)) for key, recipes in groups.items()
        ]
        stored = next((r["stored_as"] for r in mine if r.get("stored_as")), None)
        lines += [f"{label}" + (f" (stored as {stored}: what is lost on top of that)" if stored else "")]
        lines += [table(("format", "bits", "SQNR dB", "worst/max", "recipes"), cells, "  ", right=(1, 2, 3)), ""]
    return "\n".join([*lines, LEGEND])
