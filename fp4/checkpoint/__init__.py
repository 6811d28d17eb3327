"""Reading quantised checkpoints: one file a dialect, all of them giving QuantizedTensors in one convention."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fp4 import check
from fp4.checkpoint.base import Checkpoint, CheckpointWarning, Dialect, Options, make
from fp4.checkpoint.comfy import Comfy
from fp4.checkpoint.compressed_tensors import CompressedTensors
from fp4.checkpoint.deepseek import DeepSeek
from fp4.checkpoint.fouroversix import FourOverSix
from fp4.checkpoint.gptoss import GptOss
from fp4.checkpoint.mlx import MLX
from fp4.checkpoint.modelopt import ModelOpt
from fp4.checkpoint.plain import Plain, Refused
from fp4.checkpoint.quark import Quark
from fp4.checkpoint.torchao import TorchAO
from fp4.errors import CheckpointError, shown

__all__ = ["DIALECTS", "Checkpoint", "CheckpointWarning", "open_checkpoint"]


def __dir__() -> list[str]:
    return __all__


#: asked in this order; the first that recognises a checkpoint reads it
DIALECTS: tuple[Dialect, ...] = (
    Refused(),
    TorchAO(),
    Comfy(),
    MLX(),
    CompressedTensors(),
    ModelOpt(),
    GptOss(),
    Quark(),
    DeepSeek(),
    FourOverSix(),
    Plain(),
)


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    trust: str = "config",
    activations: str | None = None,
    rename: Mapping[str, str] | None = None,
    repair: bool = False,
) -> Checkpoint:
    """Open a checkpoint: a folder, a ``.safetensors.index.json`` or one ``.safetensors`` file. Reads headers only.

    ``trust``: "config" makes a disagreement between config and tensors an error; "tensors" believes the tensors and warns.
    ``activations``: None asks for the activation scales that the config promises; "weight_only" or "dynamic" go on without.
    ``repair``: a NaN scale byte over a block of zero codes is replaced by 1.0, with a warning (over other codes: an error).
    ``rename``: config's spelling -> file's spelling of module names, by dotted segments, when a runtime renamed modules.

    Raises CheckpointError for damaged files, missing companions, unknown algorithms, contradictions, and tensors left over.
    """
    if not isinstance(trust, str) or trust not in ("config", "tensors"):
        raise CheckpointError(f"open_checkpoint: trust is {shown(trust)}; need 'config' or 'tensors'")
    if activations is not None and (not isinstance(activations, str) or activations not in ("weight_only", "dynamic")):
        raise CheckpointError(f"open_checkpoint: activations is {shown(activations)}; need None, 'weight_only' or 'dynamic'")
    if rename is not None and not (isinstance(rename, Mapping) and all(isinstance(s, str) for pair in rename.items() for s in pair)):
        raise CheckpointError(f"open_checkpoint: rename is {shown(rename)}; need a dict of names, the config's to the file's")
    return make(check.path("open_checkpoint", path, CheckpointError), DIALECTS, Options(trust, activations, rename, repair))
