"""torchao tensor subclasses: parts of each tensor side by side, their meaning as JSON in the file's metadata."""

from __future__ import annotations

import json
import math
from typing import Any

from fp4 import formats
from fp4.checkpoint.base import Plan
from fp4.checkpoint.config import Config, mapping
from fp4.checkpoint.index import Store
from fp4.checkpoint.record import Record
from fp4.errors import CheckpointDialect, CheckpointError

__all__ = ["TorchAO"]

_PARTS = {"qdata": "codes", "scale": "scale", "per_tensor_scale": "global", "act_per_tensor_scale": "input"}
_DATA_KEYS = frozenset(
    {"block_size", "orig_dtype", "is_swizzled_scales", "use_triton_kernel", "act_quant_kwargs", "elem_dtype", "kernel_preference"}
)


def described(store: Store) -> dict[str, dict[str, Any]]:
    """Logical tensor name -> its description, for subclasses that are not plain tensors."""
    found = {}
    for name, text in store.metadata.items():
        if "_type" not in text:
            continue
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise CheckpointError(f"{store.root}: metadata of tensor {name!r} is not JSON") from None
        if isinstance(value, dict) and isinstance(value.get("_type"), str) and value["_type"] != "Tensor":
            found[name] = value
    return found


class TorchAO:
    name = "torchao"

    def detect(self, store: Store, config: Config) -> str | None:
        for name, text in store.metadata.items():
            if '"NVFP4Tensor"' in text or '"MXTensor"' in text:
                kind = "NVFP4Tensor" if '"NVFP4Tensor"' in text else "MXTensor"
                return f"the file's metadata says {name!r} is a {kind}"
        if config.method == "torchao":
            raise CheckpointError(
                f"{store.root}: {config.quant_where}: quant_method is 'torchao', but no file's metadata holds an NVFP4Tensor or MXTensor"
            )
        return None

    def plan(self, plan: Plan) -> None:
        for name, value in described(plan.store).items():
            plan.add(self._record(plan, name, value))

    @staticmethod
    def _record(plan: Plan, name: str, value: dict[str, Any]) -> Record:
        entries, kind = plan.store.entries, value["_type"]
        where = f"{plan.place}: tensor {name!r} ({kind})"
        if kind not in ("NVFP4Tensor", "MXTensor"):
            raise CheckpointDialect(f"{where}: this subclass is not read; need NVFP4Tensor or MXTensor")
        data = mapping(value.get("_data"), f"{where} _data")
        unknown = sorted(set(data) - _DATA_KEYS)
        if unknown and not plan.trust_tensors:
            raise CheckpointError(f"{where}: unknown key {', '.join(unknown[:10])} in _data; use trust='tensors' to go on")
        names = value.get("_tensor_data_names")
        names = names if isinstance(names, list) and all(isinstance(n, str) and n in _PARTS for n in names) else []
        if not {"qdata", "scale"} <= set(names):
            raise CheckpointError(
                f"{where}: _tensor_data_names is {value.get('_tensor_data_names')!r}; need qdata, scale and optional tensor scales"
            )
        parent, _, leaf = name.rpartition(".")
        stem = f"{parent}._{leaf}" if parent else f"_{leaf}"
        missing = [f"{stem}_{n}" for n in names if f"{stem}_{n}" not in entries]
        if missing:
            raise CheckpointError(f"{where}: {', '.join(missing)} not found in the file")
        parts = {_PARTS[n]: f"{stem}_{n}" for n in names}
        codes, scale = entries[parts["codes"]], entries[parts["scale"]]
        if kind == "NVFP4Tensor":
            fmt = formats.NVFP4
        else:
            element = str(mapping(data.get("elem_dtype"), f"{where} elem_dtype").get("_data"))
            known = {"float4_e2m1fn_x2": formats.MXFP4, "float8_e4m3fn": formats.MXFP8}
            if element not in known:
                raise CheckpointDialect(f"{where}: elem_dtype {element!r} is not read; need {' or '.join(known)}")
            fmt = known[element]
        if data.get("block_size") != fmt.block:
            raise CheckpointError(f"{where}: block_size is {data.get('block_size')!r}; {fmt} has {fmt.block}")
        packed = codes.byte_shape
        allowed = ("U8", "I8", "F4") if fmt.codes_per_byte == 2 else ("F8_E4M3", "U8")
        if codes.dtype not in allowed or len(packed) < 2:
            raise CheckpointError(f"{where}: {codes.name} is {codes.dtype} {list(codes.shape)}; need {' or '.join(allowed)} [.., n, k]")
        logical = (*packed[:-1], packed[-1] * fmt.codes_per_byte)
        if logical[-1] % fmt.block:
            raise CheckpointError(f"{where}: {codes.name} holds k = {logical[-1]}, not a multiple of the {fmt} block {fmt.block}")
        if scale.dtype not in (("F8_E4M3",) if fmt.tensor_scale else ("F8_E8M0", "U8")):
            raise CheckpointError(f"{where}: {scale.name} has dtype {scale.dtype}; {fmt} needs {fmt.scale.name} bytes")
        groups = logical[-1] // fmt.block
        swizzled = data.get("is_swizzled_scales", False)
        if not isinstance(swizzled, bool):
            raise CheckpointError(f"{where}: is_swizzled_scales is {swizzled!r}; need true or false")
        need = math.prod(logical[:-1]) * groups
        if swizzled:
            need = math.prod(logical[:-2]) * (-(-logical[-2] // 128) * 128) * (-(-groups // 4) * 4)
        plain = (*logical[:-1], groups)
        if math.prod(scale.shape) != need or (not swizzled and len(scale.shape) > 1 and scale.shape != plain):
            order = "in 128x4 tiles" if swizzled else "row-major"
            raise CheckpointError(
                f"{where}: {scale.name} has shape {list(scale.shape)}; {list(logical)} {order} needs {need} bytes, "
                f"{list(plain)} if is_swizzled_scales is false"
            )
        for role in ("global", "input"):
            if role in parts and (entries[parts[role]].dtype not in ("F32", "BF16", "F16") or math.prod(entries[parts[role]].shape) != 1):
                entry = entries[parts[role]]
                raise CheckpointError(f"{where}: {entry.name} is {entry.dtype} {list(entry.shape)}; need one F32 value")
        return Record(
            name=name,
            kind="block",
            parts=parts,
            shape=logical,
            logical=logical,
            format=fmt,
            scale_order="sf_128x4" if swizzled else "n_k",
            origin="the file's metadata",
            activations="static" if "input" in parts else "dynamic" if data.get("act_quant_kwargs") else None,
        )
