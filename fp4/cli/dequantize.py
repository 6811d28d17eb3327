"""``fp4 dequantize IN OUT``: the progress bar and the last line around ``fp4.checkpoint.dequantize``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fp4.cli.table import count, progress
from fp4.errors import Fp4Error

__all__ = ["run"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def run(source: Path, target: Path, dtype: str, opening: Mapping[str, Any], fold: bool, quiet: bool) -> str:
    """Write, and return the sentence that says what was written. Nothing is left at ``target`` when it fails."""
    import fp4
    from fp4.checkpoint.dequantize import dequantize_checkpoint

    if dtype not in DTYPES:
        raise Fp4Error(f"dequantize: --dtype is {dtype!r}; need one of {', '.join(DTYPES)}")
    with fp4.open_checkpoint(source, **opening) as ck, progress("dequantize", len(ck), quiet) as step:
        report = dequantize_checkpoint(ck, target, DTYPES[dtype], lambda done, total, name: step(done, name), fold=fold)
    lines = [
        f"{report.path}: {count(report.tensors, 'tensor')}, {report.dequantized} dequantised to {dtype}, "
        f"{report.bytes_in:,} bytes read, {report.bytes_out:,} written in {count(len(report.files), 'file')}",
        *(f"note: {text}" for text in report.notes),
    ]
    return "\n".join(lines)
