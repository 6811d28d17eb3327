"""Which files make up a checkpoint: a folder, an index file, or one .safetensors file."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fp4.checkpoint.safetensors_file import Entry, SafetensorsFile
from fp4.errors import CheckpointError

__all__ = ["Store", "read_json"]

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
#: what a quantiser puts beside a weight; some rewrite the shards and leave the index as it was (ModelOpt's script for DeepSeek)
_COMPANION = re.compile(r"\.(weight_scale(_2|_inv)?|input_scale(_2)?|(weight|input)_global_scale|scale)$")
_SHARD = re.compile(r"(?P<stem>.*)-(?P<i>\d{5})-of-(?P<n>\d{5})\.safetensors")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError naming the file."""
    if not path.is_file() and path.exists():  # a pipe would block for ever
        raise CheckpointError(f"{path}: is not a regular file")
    try:
        value = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not UTF-8 JSON ({type(error).__name__})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds {type(value).__name__}; need a JSON object")
    return value


def _within(base: Path, target: Path) -> bool:
    """Whether target stays inside base, or inside the blob store of the hub cache that base is a snapshot of."""
    resolved, root = target.resolve(), base.resolve()
    roots = [root]
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    return any(resolved.is_relative_to(r) for r in roots)


@dataclass
class Store:
    """All tensors of a checkpoint by name, and the files that hold them. Opens each file once, at ``open``."""

    root: Path
    entries: dict[str, Entry] = field(default_factory=dict)
    files: dict[str, SafetensorsFile] = field(default_factory=dict)
    #: tensor name -> its file
    where: dict[str, SafetensorsFile] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    #: whether the config files in ``root`` describe these tensors
    with_config: bool = True
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Store:
        """Find and open the files of ``path``. Raises CheckpointError when files are missing, ambiguous or contradict the index."""
        try:
            given = Path(path)
            if given.is_dir():
                return cls._folder(given)
            if not given.exists():
                raise CheckpointError(f"{given}: does not exist; give a folder, a .safetensors.index.json or a .safetensors file")
        except (OSError, ValueError) as error:  # a name with a NUL byte, one that is too long, a folder that may not be read
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{str(path)[:200]!r}: is not a usable path ({getattr(error, 'strerror', None) or error})") from None
        if given.name.endswith(".index.json"):
            return cls._indexed(given)
        if given.suffix == ".safetensors":
            return cls._single(given)
        if given.suffix in _PICKLES:
            raise CheckpointError(f"{given}: is a pickle, which can run code when loaded; convert it to safetensors first")
        raise CheckpointError(f"{given}: is not a checkpoint; give a folder, a .safetensors.index.json or a .safetensors file")

    @classmethod
    def _single(cls, path: Path) -> Store:
        store = cls(path.parent)
        store._add(SafetensorsFile(path))
        siblings = sorted(p.name for p in path.parent.glob("*.safetensors") if p.name != path.name)
        main = "model.safetensors"
        if path.name != main and main in siblings and (path.parent / "config.json").exists():
            store.with_config = False
            store.warnings.append(f"{path.name}: config.json in this folder belongs to {main} and is not applied to this file")
        return store

    @classmethod
    def _folder(cls, folder: Path) -> Store:
        indices = sorted(folder.glob("*.safetensors.index.json"))
        chosen = [p for p in indices if p.name == "model.safetensors.index.json"] or indices
        if len(chosen) > 1:
            raise CheckpointError(f"{folder}: has {len(chosen)} index files ({', '.join(p.name for p in chosen[:10])}); give one of them")
        if chosen:
            return cls._indexed(chosen[0])
        names = sorted(p.name for p in folder.iterdir() if p.suffix == ".safetensors")
        if not names:
            pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
            if pickles:
                raise CheckpointError(
                    f"{folder}: holds only pickles ({', '.join(pickles[:5])}), which can run code; convert them to safetensors first"
                )
            raise CheckpointError(f"{folder}: holds no .safetensors file")
        if "model.safetensors" in names:
            return cls._listed(folder, ["model.safetensors"], [n for n in names if n != "model.safetensors" and n.startswith("model")])
        shards = [m for n in names if (m := _SHARD.fullmatch(n))]
        if shards:
            return cls._shards(folder, shards)
        if len(names) == 1:
            return cls._listed(folder, names, [])
        return cls._ambiguous(folder, names)

    @classmethod
    def _listed(cls, folder: Path, names: list[str], unused: list[str]) -> Store:
        store = cls(folder)
        for name in names:
            store._add(SafetensorsFile(folder / name))
        if unused:
            store.warnings.append(f"{folder}: {len(unused)} other .safetensors files are not read: {', '.join(unused[:10])}")
        return store

    @classmethod
    def _shards(cls, folder: Path, shards: list[re.Match[str]]) -> Store:
        series = {(m["stem"], m["n"]) for m in shards}
        if len(series) > 1:
            raise CheckpointError(
                f"{folder}: holds several series of shards and no index: {sorted(s for s, _ in series)}; give an index file"
            )
        (stem, total) = series.pop()
        have = {int(m["i"]) for m in shards}
        missing = [i for i in range(1, int(total) + 1) if i not in have]
        if missing:
            raise CheckpointError(
                f"{folder}: shard {stem}-{missing[0]:05d}-of-{total}.safetensors is missing ({len(missing)} of {int(total)})"
            )
        return cls._listed(folder, sorted(m.string for m in shards), [])

    @classmethod
    def _ambiguous(cls, folder: Path, names: list[str]) -> Store:
        """Several files, no index: usable when exactly one of them holds FP4 tensors, else the reader would be guessing."""
        opened = {name: SafetensorsFile(folder / name) for name in names}
        quantised = [n for n, f in opened.items() if any(k.endswith((".scale_factors", "_scale", "_scales", ".scale")) for k in f.entries)]
        if len(quantised) != 1:
            raise CheckpointError(
                f"{folder}: holds {len(names)} .safetensors files and no index ({', '.join(names[:10])}); give the file itself"
            )
        store = cls(folder)
        store._add(opened[quantised[0]])
        others = [n for n in names if n != quantised[0]]
        store.warnings.append(f"{folder}: no index; {quantised[0]} is read, {len(others)} others are not: {', '.join(others[:10])}")
        return store

    @classmethod
    def _indexed(cls, index: Path) -> Store:
        folder = index.parent
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
        if not weight_map:
            raise CheckpointError(f"{index}: weight_map is empty")
        store = cls(folder)
        twice: list[tuple[str, SafetensorsFile]] = []
        for name in dict.fromkeys(weight_map.values()):
            file = SafetensorsFile(store._shard_path(index, name))
            others = [t for t in file.entries if weight_map.get(t, name) != name]
            twice += [(t, file) for t in others]
            store._add(file, key=name, leave=frozenset(others))
        for tensor, name in weight_map.items():
            if tensor not in store.files[name].entries:
                raise CheckpointError(f"{index}: tensor {tensor[:200]!r} is not in {name}, which the index says holds it")
        store._compare_copies(index, twice)
        modules = {t.rpartition(".")[0] for t in weight_map}
        unlisted = [t for t in store.entries if t not in weight_map]
        scales = [t for t in unlisted if _COMPANION.search(t) and t.rpartition(".")[0] in modules]
        if len(scales) < len(unlisted):
            shown = ", ".join(f"{t} ({store.where[t].path.name})" for t in unlisted[:10])
            raise CheckpointError(f"{index}: {len(unlisted)} tensors of the shards are not listed: {shown}; fix the index")
        if scales:
            shown = ", ".join(scales[:3]) + (" ..." if len(scales) > 3 else "")
            store.warnings.append(f"{index}: {len(scales)} scales of listed weights are in the shards and not in the index; read ({shown})")
        used = {f.path.name for f in store.files.values()}
        extra = sorted(p.name for p in folder.glob("*.safetensors") if p.name not in used)
        if extra:
            store.warnings.append(f"{index}: {len(extra)} .safetensors files of the folder are not listed: {', '.join(extra[:10])}")
        return store

    @staticmethod
    def _shard_path(index: Path, name: str) -> Path:
        parts = Path(name).parts
        if not name or "\x00" in name or "\\" in name or Path(name).is_absolute() or ".." in parts:
            raise CheckpointError(f"{index}: names file {name[:200]!r}; need a relative path inside the folder, without '..'")
        if not name.endswith(".safetensors"):
            raise CheckpointError(f"{index}: names file {name[:200]!r}; need a .safetensors file")
        path = index.parent / name
        try:
            exists = path.is_file()
        except OSError as error:
            raise CheckpointError(f"{index}: names file {name[:200]!r}, which is unusable ({error.strerror})") from None
        if not exists:
            raise CheckpointError(f"{index}: names shard {name}, which is missing; download it, or fix the index")
        if not _within(index.parent, path):
            raise CheckpointError(f"{index}: {name} is a link to {path.resolve()}, outside the folder; copy the file into the folder")
        return path

    def _compare_copies(self, index: Path, twice: list[tuple[str, SafetensorsFile]]) -> None:
        """Tensors that a shard holds though the index names another: equal copies are passed over, others are an error."""
        for name, file in twice:
            kept = self.where[name]
            a, b = self.entries[name], file.entries[name]
            if (a.dtype, a.shape) != (b.dtype, b.shape) or not torch.equal(kept.bytes(name), file.bytes(name)):
                raise CheckpointError(
                    f"{index}: tensor {name[:200]!r} is in {kept.path.name}, says the index, and with other contents in {file.path.name}; "
                    "remove one of them"
                )
            self.release()
        if twice:
            names = ", ".join(n for n, _ in twice[:10]) + (f" and {len(twice) - 10} more" if len(twice) > 10 else "")
            self.warnings.append(f"{index}: in two shards with equal contents, read from the one that the index names: {names}")

    def _add(self, file: SafetensorsFile, key: str | None = None, leave: frozenset[str] = frozenset()) -> None:
        """Take over the tensors of a file, without ``leave``."""
        entries = {n: e for n, e in file.entries.items() if n not in leave} if leave else file.entries
        for name in entries:
            if name in self.entries:
                raise CheckpointError(f"{file.path}: tensor {name[:200]!r} is also in {self.where[name].path.name}; remove one of them")
        self.files[key or file.path.name] = file
        self.entries.update(entries)
        self.where.update(dict.fromkeys(entries, file))
        for k, v in file.metadata.items():
            if k == "tensor_names" and k in self.metadata:
                v = self._join_names(self.metadata[k], v)
            self.metadata[k] = v

    @staticmethod
    def _join_names(a: str, b: str) -> str:
        try:
            return json.dumps([*json.loads(a), *json.loads(b)])
        except (ValueError, TypeError, RecursionError):
            return a

    def file_of(self, name: str) -> str:
        """File name that holds a tensor, for messages."""
        return self.where[name].path.name

    def raw(self, name: str) -> torch.Tensor:
        return self.where[name].raw(name)

    def bytes(self, name: str) -> torch.Tensor:
        return self.where[name].bytes(name)

    def tensor(self, name: str) -> torch.Tensor:
        return self.where[name].tensor(name)

    def release(self) -> None:
        for file in self.files.values():
            file.release()

    def close(self) -> None:
        for file in self.files.values():
            file.close()
