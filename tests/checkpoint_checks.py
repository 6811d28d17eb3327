"""What the tests of checkpoints share: open and compare every value, or be refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoint_builder as cb
import pytest
import torch

import fp4


def check(folder: Path, ex: cb.Example, dialect: str, **options: Any) -> fp4.checkpoint.Checkpoint:
    """Open, and require the exact values of every quantised tensor, both ways, and the untouched rest."""
    ck = fp4.open_checkpoint(folder, **options)
    assert ck.dialect == dialect
    for name, want in ex.want.items():
        got = ck.dequantize(name)
        assert got.shape == want.shape == ck.shape(name)
        assert torch.equal(got, want), name
        q = ck[name]
        if isinstance(q, fp4.QuantizedTensor):
            logical = fp4.dequantize(q)
            assert torch.equal(logical.transpose(-1, -2) if ck.record(name).transposed else logical, want), name
    for name in ck.names():
        if name not in ex.want:
            assert torch.equal(ck[name], ex.tensors[name]), name
    hidden = {n for n in ex.tensors if n.endswith(("_scale", "_scale_2", "_scales", "_blocks", ".scale", "_packed")) and "norm" not in n}
    assert not hidden & set(ck.names())
    return ck


def opened(ex: cb.Example, folder: Path, **options: Any) -> Any:
    return fp4.open_checkpoint(ex.write(folder), **options)


def refused(ex: cb.Example, folder: Path, match: str, **options: Any) -> None:
    with pytest.raises(fp4.CheckpointError, match=match):
        fp4.open_checkpoint(ex.write(folder), **options)


def refused_path(path: Path, match: str, **options: Any) -> None:
    with pytest.raises(fp4.CheckpointError, match=match) as caught:
        fp4.open_checkpoint(path, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 1500
