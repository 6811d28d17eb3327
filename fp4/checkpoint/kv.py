"""Calibrated scales of the key/value cache, under every name that producers and engines use for them.

A dropped cache scale has a plausible default of 1.0, so nothing fails and accuracy does (vllm#54623). Here a scale is found
under any of the names, is an error when the config asks for static scales and it is missing, and never counts as a weight.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from fp4.checkpoint.index import Store
from fp4.errors import CheckpointError

if TYPE_CHECKING:
    from fp4.checkpoint.base import Plan

__all__ = ["KVConfig", "KVScale"]

_ROLES = {"k_scale": "k", "v_scale": "v", "kv_scale": "kv", "q_scale": "q", "prob_scale": "prob"}
_PROJ = {"k_proj": "k", "v_proj": "v", "qkv_proj": "kv", "kv_proj": "kv"}
_ATTENTION = re.compile(r"(^|\.)(k_proj|v_proj|qkv_proj)\.")
_ASIDE = re.compile(r"(^|\.)(mtp|nextn|visual|vision\w*|audio\w*)(\.|_|$)")
#: multi-head latent attention (DeepSeek, Kimi): one compressed cache, no key and value projection of its own
_LATENT = re.compile(r"\.(kv_a_proj_with_mqa|kv_b_proj|fused_qkv_a_proj_with_mqa|wkv_a|wkv_b)\.")
_LAYER = re.compile(r"(?:^|\.)layers?\.(\d+)(?:\.|$)")


@dataclass(frozen=True)
class KVConfig:
    """What the config says about the cache: ``dtype`` "fp8", "nvfp4" or another algorithm's name; ``static`` scales or not."""

    dtype: str
    static: bool
    origin: str


@dataclass(frozen=True)
class KVScale:
    """Multipliers of one attention module's cache (f32 [], or one a head), None where absent: value = code * scale.

    scale = amax / ``over``.

    ``over`` is 448 in all producers seen, NVFP4 caches included: a kernel with e4m3 block scales needs ``scale / 6``.
    A scale need not cover the data (calibration is partial), so kernels must saturate.
    """

    module: str
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    kv: torch.Tensor | None = None
    q: torch.Tensor | None = None
    prob: torch.Tensor | None = None
    k_bias: torch.Tensor | None = None
    v_bias: torch.Tensor | None = None
    dtype: str | None = None
    over: float = 448.0
    source: dict[str, str] = field(default_factory=dict)


def _split(name: str) -> tuple[str, str] | None:
    """(attention module, role) of a cache scale's name, else None."""
    head, _, leaf = name.rpartition(".")
    parent, _, last = head.rpartition(".")
    if leaf == "output_scale":
        return (parent, _PROJ[last]) if last in _PROJ else None
    if leaf in ("k_bias", "v_bias"):
        return (parent, leaf) if last == f"{leaf[0]}_proj" else None
    role = _ROLES.get(leaf)
    if role is None:
        return None
    if last in _PROJ or last == "q_proj" or (last in ("attn", "k_cache", "v_cache") and parent.endswith(("attn", "mixer", "attention"))):
        return (parent, role)
    return (head, role)


def collect_kv(plan: Plan, vectors: bool = False) -> None:
    """Take the cache scales out of the plan's free tensors: single values, and with ``vectors`` those of one value a head.

    A vector under these names may be a parameter of the model, so it counts only when the config quantises the cache.
    """
    for name, entry in plan.store.entries.items():
        if not name.endswith(("_scale", "k_bias", "v_bias")) or name in plan.used:
            continue
        found = _split(name)
        if found is None:
            continue
        module, role = found
        if not role.endswith("_bias") and (math.prod(entry.shape) == 1) is vectors:
            continue
        if not entry.dtype.startswith(("F", "BF")) or entry.dtype.startswith(("F4", "F6", "F8")):
            raise CheckpointError(f"{plan.file(name)}: tensor {name!r} has dtype {entry.dtype}; a cache scale is F32, BF16 or F16")
        roles = plan.kv.setdefault(module, {})
        if role in roles:
            raise CheckpointError(f"{plan.file(name)}: {name!r} and {roles[role]!r} are both the {role} cache scale of {module!r}")
        roles[role] = name
        plan.used.add(name)


def require_kv(plan: Plan) -> None:
    """Compare the scales found with the config. Raises CheckpointError when static ones are asked for and missing."""
    config, found = plan.kv_config, plan.kv
    if config is None:
        if found:
            count = sum(len(r) for r in found.values())
            plan.once("kv-unused", f"{count} key/value cache scales are in the file and the config does not ask for them; see kv_scales")
        return
    if not config.static:
        return
    modules: dict[str, set[str]] = {}
    for name in plan.store.entries:
        match = _ATTENTION.search(name) if "k_proj." in name or "v_proj." in name else None
        if match and not _ASIDE.search(name) and not _extra(plan, name):
            modules.setdefault(name[: match.start()], set()).update(("k", "v") if match[2] == "qkv_proj" else _PROJ[match[2]])
    missing = []
    for module, roles in modules.items():
        have = found.get(module, {})
        if "kv" not in have:
            missing += [f"{module} ({r})" for r in sorted(roles) if r not in have]
    if not modules and not found:
        if any(_LATENT.search(name) for name in plan.store.entries):
            # ModelOpt says FP8 of every DeepSeek cache and writes no scale for it: engines use 1.0 there
            plan.warn(
                f"{config.origin}, and the file has no cache scale; latent attention has no k_proj or v_proj that one would belong to"
            )
            return
        missing = ["all of them"]
    if missing:
        text = f"key/value cache scales not found though {config.origin}: {', '.join(missing[:10])}" + (
            f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        )
        plan.disagree(text)


def _extra(plan: Plan, name: str) -> bool:
    layer = _LAYER.search(name)
    return layer is not None and plan.layers is not None and int(layer[1]) >= plan.layers


def read_kv(store: Store, module: str, parts: dict[str, str], config: KVConfig | None) -> KVScale:
    """The scales of one module, checked."""
    values: dict[str, torch.Tensor] = {}
    for role, name in parts.items():
        value = store.tensor(name).to(torch.float32)
        if role in ("k_bias", "v_bias"):
            values[role] = value
            continue
        if not bool(torch.isfinite(value).all()) or not bool((value > 0).all()):
            shown = f"{float(value):g}" if value.numel() == 1 else "partly not so"
            raise CheckpointError(f"{store.file_of(name)}: tensor {name!r} is {shown}; a cache scale must be positive and finite")
        values[role] = value.reshape(()) if value.numel() == 1 else value
    k, v, kv, q, prob, k_bias, v_bias = (values.get(r) for r in ("k", "v", "kv", "q", "prob", "k_bias", "v_bias"))
    dtype = config.dtype if config else None
    return KVScale(module, k, v, kv, q, prob, k_bias, v_bias, dtype, source=dict(parts))
