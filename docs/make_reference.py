"""Write ``docs/reference.md`` from the docstrings: ``python docs/make_reference.py``. A test checks that it is current."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import fp4

PAGE = Path(__file__).with_name("reference.md")
#: heading -> names of ``fp4``; a test holds it to ``fp4.__all__``
GROUPS = {
    "Tensors and formats": ["QuantizedTensor", "Format", "NVFP4", "MXFP4", "MXFP8", "NVFP4_B32", "AMDFP4", "formats"],
    "Quantising": ["quantize", "dequantize", "fake_quantize", "Recipe", "recipes"],
    "Layouts": ["layouts", "Layout", "Segmented", "to_layout", "encode"],
    "Checkpoints": ["open_checkpoint", "checkpoint"],
    "Layers": ["prepare", "matmul", "prepare_moe", "moe", "SwiGLU", "SiLU", "SiTU", "ReLU2", "Prepared", "PreparedMoE"],
    "Around layers": ["explain", "warmup", "load_prepared", "fuse", "ref"],
    "Testing": ["testing"],
    "Errors": [
        "Fp4Error",
        "FormatMismatch",
        "LayoutError",
        "LayoutMismatch",
        "CheckpointError",
        "CheckpointDialect",
        "BackendUnavailable",
        "Unsupported",
        "errors",
    ],
}
#: what a call returns whose methods are the way on
RETURNED = {
    "fp4.open_checkpoint": ("fp4.checkpoint", "Checkpoint"),
    "fp4.to_layout": ("fp4.stored", "Stored"),
    "fp4.quantize(scale_layout=)": ("fp4.stored", "StoredQuantized"),
    "fp4.explain": ("fp4.gpu.registry", "Ranking"),
    "fp4.encode.get": ("fp4.encode", "Encode"),
}


def _line(thing: Any) -> str:
    """The first sentence of a docstring."""
    text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    first = re.match(r"(.*?[.:])(?= [A-Z`(]|$)", text)
    return (first[1] if first else text).replace("``", "`").rstrip(":")


def _call(thing: Any) -> str:
    """Its arguments, with no types; help() has those."""
    try:
        parameters = [*inspect.signature(thing).parameters.values()]
    except (TypeError, ValueError):
        return ""
    words, star = [], False
    for p in parameters:
        if p.name in ("self", "cls"):
            continue
        if p.kind is p.KEYWORD_ONLY and not star:
            words, star = [*words, "*"], True
        words.append({p.VAR_KEYWORD: "**", p.VAR_POSITIONAL: "*"}.get(p.kind, "") + p.name + ("=" if p.default is not p.empty else ""))
    return f"({', '.join(words)})"


def _members(owner: Any) -> list[tuple[str, Any]]:
    """Public functions of a module, methods and properties of a class, with a docstring."""
    if inspect.ismodule(owner):
        return [(n, getattr(owner, n)) for n in owner.__all__ if inspect.isfunction(getattr(owner, n))]
    classes = [c for c in owner.__mro__ if c.__module__.startswith("fp4")]
    found = [(n, inspect.getattr_static(owner, n)) for n in dict.fromkeys(n for c in classes for n in vars(c)) if not n.startswith("_")]
    return [(n, v) for n, v in found if (inspect.isfunction(v) or isinstance(v, (property, staticmethod))) and inspect.getdoc(v)]


def _rows(prefix: str, owner: Any) -> list[str]:
    rows = []
    for name, value in _members(owner):
        call = "" if isinstance(value, property) else _call(value.__func__ if isinstance(value, staticmethod) else value)
        rows.append(f"| `{prefix}.{name}{call}` | {_line(value)} |")
    return rows


def page() -> str:
    lines = ["# Reference", "", "<!-- made by docs/make_reference.py from the docstrings; do not edit -->", ""]
    lines += ["Every public name. `help(fp4.quantize)` has shapes, dtypes, formulas and errors.", ""]
    for title, names in GROUPS.items():
        lines += [f"## {title}", "", "| name | what |", "|---|---|"]
        for name in names:
            thing = getattr(fp4, name)
            if isinstance(thing, fp4.Format):
                lines.append(f"| `fp4.{name}` | {thing.elem.name} in blocks of {thing.block}, scale {thing.scale.name} |")
                continue
            function = inspect.isfunction(thing)
            lines.append(f"| `fp4.{name}{_call(thing) if function else ''}` | {_line(thing)} |")
            if name == "testing":
                for part in ("assert_same_bytes", "mutants"):
                    value = getattr(thing, part)
                    lines.append(f"| `fp4.testing.{part}{_call(value)}` | {_line(value)} |")
                for part in ("goldens", "strategies"):
                    lines += _rows(f"fp4.testing.{part}", getattr(thing, part))
            elif name == "ref":
                for module, verb in (("matmul", "matmul"), ("moe", "moe")):
                    value = getattr(getattr(thing, module), verb)
                    lines.append(f"| `fp4.ref.{module}.{verb}{_call(value)}` | {_line(value)} |")
            elif name == "recipes":
                lines += _rows("fp4.recipes", type(thing))
            elif (
                not function
                and name not in ("Format", "checkpoint", "errors")
                and not (inspect.isclass(thing) and issubclass(thing, Exception))
            ):
                lines += _rows(f"fp4.{name}" if inspect.ismodule(thing) else name, thing)
        for source, (module, owner) in RETURNED.items():
            if source.split(".")[1].split("(")[0] in names:
                made = getattr(importlib.import_module(module), owner)
                lines += [f"| `{owner}` of `{source}` (`from {module} import {owner}`) | {_line(made)} |", *_rows(owner, made)]
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
