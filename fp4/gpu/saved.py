"""Files of prepared weights: safetensors with the arrays as stored and, in the metadata, all that explains them.

A kernel checks nothing: it reads as many bytes as the sizes say, in the order that it was built for. So a file is believed only when its
description is the one that was written (a digest over it and over every array's name, dtype and shape) and when that description fits:
every stored array has the bytes that its layout gives for the logical shape.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fp4 import check
from fp4.errors import BackendUnavailable, CheckpointError, FormatMismatch, Fp4Error
from fp4.gpu import storage
from fp4.gpu.device import Device
from fp4.gpu.problem import DTYPES, Problem
from fp4.gpu.storage import Stored
from fp4.tensor import check_second_level

__all__ = ["read", "write"]

_VERSION = 1


def _digest(about: dict[str, Any], arrays: dict[str, torch.Tensor]) -> str:
    shapes = {n: [str(t.dtype), list(t.shape)] for n, t in arrays.items()}
    return hashlib.sha256(json.dumps([about, shapes], sort_keys=True).encode()).hexdigest()


def write(p: Any, path: str | Path) -> None:
    """Write a Prepared or PreparedMoE, under its name only when it is whole. Raises Fp4Error when that cannot be done."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise BackendUnavailable(f"save: the package safetensors cannot be imported ({error}); pip install safetensors") from error

    path = check.path("save", path)
    if not os.path.isdir(path.parent):
        raise Fp4Error(f"save: {path}: the folder {path.parent} does not exist; make it first")
    if os.path.isdir(path):
        raise Fp4Error(f"save: {path} is a folder; give the name of a file")
    arrays = {n: t.contiguous() for n, t in p.arrays.items()}
    about = {
        "fp4_prepared": _VERSION,
        "class": type(p).__name__,
        "backend": p.backend,
        "problem": p.problem.to_json(),
        "layouts": {n: s.to_json() for n, s in p.layouts.items()},
        "logical": {n: s.to_json() for n, s in p.logical.items()},
        "versions": dict(p.versions),
        "meta": dict(p.meta),
        "act_dtypes": [str(d).removeprefix("torch.") for d in p.act_dtypes],
    }
    # as a reader gets it: tuples have become lists
    text = json.dumps(about)
    work = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        save_file(arrays, str(work), metadata={"fp4": text, "fp4_digest": _digest(json.loads(text), arrays)})
        work.replace(path)
    except (OSError, SafetensorError) as error:
        raise Fp4Error(f"save: cannot write {path}: {error}") from None
    finally:
        work.unlink(missing_ok=True)


def read(path: str | Path, device: torch.device | str | None) -> Any:
    """The object that ``write`` wrote, on ``device``; see ``fp4.load_prepared``."""
    from fp4.gpu import build

    try:
        from safetensors import safe_open
    except ImportError as error:
        raise BackendUnavailable(f"load: the package safetensors cannot be imported ({error}); pip install safetensors") from error

    path = check.path("load", path, CheckpointError)
    if not os.path.isfile(path):  # the methods of Path raise for a name that is too long
        what = "is a folder" if os.path.isdir(path) else "does not exist"
        raise CheckpointError(f"load: {path} {what}; give a file that w.save(path) wrote")
    target = None
    if device is not None:
        Device.of(device)  # a typed error for a device that is none
        target = torch.device(device)
        if target.type == "meta":
            raise FormatMismatch(f"load: device is meta, where the bytes of {path} would be lost; name the device that runs the weight")
    try:
        with safe_open(str(path), framework="pt") as f:
            metadata = f.metadata() or {}
            about = json.loads(metadata.get("fp4", "null"))
            arrays = {n: f.get_tensor(n) for n in f.keys()}  # noqa: SIM118
    except Exception as e:
        raise CheckpointError(f"load: {path} is no readable .safetensors file ({type(e).__name__}: {e})") from e
    if not isinstance(about, dict) or about.get("fp4_prepared") != _VERSION:
        raise CheckpointError(f"load: {path} holds no prepared weight of version {_VERSION}; use fp4.open_checkpoint for checkpoints")
    if metadata.get("fp4_digest") != _digest(about, arrays):
        raise CheckpointError(
            f"load: {path} was changed after it was written: its description, or a name, dtype or shape of an array, is not "
            "the one that its digest was made of; prepare the weight again from the checkpoint"
        )
    try:
        p = _object(about, arrays, target)
        _fits(p)
    except Fp4Error as e:
        raise CheckpointError(f"load: {path} contradicts itself: {e}") from e
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as e:
        raise CheckpointError(f"load: {path} contradicts itself ({type(e).__name__}: {e}); prepare the weight again") from e
    return build.adopt(p)


def _object(about: dict[str, Any], arrays: dict[str, torch.Tensor], target: torch.device | None) -> Any:
    from fp4 import prepared

    problem = Problem.from_json(about["problem"])
    cls: Any = {"Prepared": prepared.Prepared, "PreparedMoE": prepared.PreparedMoE}[about["class"]]
    target = _default_device(problem.device) if target is None else target
    here = Device.of(target)
    # index -1: a device of another kind than this one, elsewhere; None would say "injected", which tests and explain use
    problem = replace(problem, device=here if here.same_target(problem.device) else replace(problem.device, index=-1))
    return cls(
        backend=about["backend"],
        problem=problem,
        arrays={n: t.to(target) for n, t in arrays.items()},
        layouts={n: Stored.from_json(s) for n, s in about["layouts"].items()},
        logical={n: prepared._Logical.from_json(s) for n, s in about["logical"].items()},
        versions=about["versions"],
        meta=about["meta"],
        reasons="",
        act_dtypes=tuple(_dtype(name) for name in about["act_dtypes"]),
    )


def _dtype(name: str) -> torch.dtype:
    return {str(d).removeprefix("torch."): d for d in DTYPES}[name]


def _fits(p: Any) -> None:
    """Sizes of the problem, of the logical tensors and of the stored bytes agree. Raises CheckpointError."""
    q = p.problem
    want = {"": (q.n, q.k)} if q.op == "matmul" else {"w13.": (None, q.hidden), "w2.": (q.hidden, q.intermediate)}
    if set(p.logical) != set(want) or (q.op == "matmul") != (type(p).__name__ == "Prepared"):
        raise CheckpointError(f"{q.op} of the arrays {sorted(p.logical)}; need {sorted(want)}")
    for prefix, (n, k) in want.items():
        about, fmt = p.logical[prefix], q.format
        lead, rows = about.codes[:-2], about.codes[-2]
        if prefix == "w13.":
            n = int(q.intermediate or 0) * (1 if q.gate_up is None else 2)
        same = about.format == fmt and (rows, about.codes[-1] * fmt.codes_per_byte) == (n, k)
        if not same or lead != (() if q.op == "matmul" else (q.local_experts,)) or about.scale != (*lead, rows, k // fmt.block):
            raise CheckpointError(f"{prefix}codes are {list(about.codes)} of {about.format}, {prefix}scale {list(about.scale)}; need {q}")
        for part in ("codes", "scale"):
            name = prefix + part
            t, nbytes = p.arrays[name], storage.nbytes(p.layouts[name], getattr(about, part))
            if t.element_size() != 1 or t.numel() != nbytes:
                raise CheckpointError(f"{name} is {t.dtype} {list(t.shape)}; need {nbytes} bytes as {p.layouts[name]}")
        for part in ("global_scale", "input_scale"):
            t = p.arrays.get(prefix + part)
            shapes = ((), lead, (*lead, 2)) if prefix + part == "w13.global_scale" else ((), lead)
            if t is not None and (t.dtype != torch.float32 or tuple(t.shape) not in shapes):
                raise CheckpointError(f"{prefix + part} is {t.dtype} {list(t.shape)}; need float32 [] or one value an expert")
            if t is not None:
                check_second_level(prefix.rstrip(".") or "the weight", part, t)
        bias = p.arrays.get({"w13.": "bias13", "w2.": "bias2"}.get(prefix, ""))
        if bias is not None and tuple(bias.shape) != (*lead, n):
            raise CheckpointError(f"a bias of {prefix}codes is {list(bias.shape)}; need {[*lead, n]}")


def _default_device(d: Device) -> torch.device:
    if d.kind == "cuda" and torch.cuda.is_available() and Device.of("cuda").same_target(d):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
