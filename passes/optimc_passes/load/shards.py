"""Which file of a checkpoint folder holds which tensor. The index, where there is one, is the authority."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from optimc.errors import CheckpointError
from optimc.wording import listed
from optimc_passes.load.safetensors_file import TensorEntry, read_header

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf")


@dataclass(frozen=True)
class TensorTable:
    """Every tensor a checkpoint assigns, and what was found on the way."""

    entries: dict[str, TensorEntry]
    strays: dict[str, TensorEntry]
    """Tensors that lie in a shard but that the index assigns to no file at all."""
    files: tuple[Path, ...]
    """The files that hold the weights, and the index."""
    notes: tuple[str, ...] = ()


def list_tensors(folder: Path) -> TensorTable:
    """Read the headers of the folder's weight files; no tensor is read.

    With `model.safetensors.index.json`, exactly the files it names count, and each tensor is taken from the shard it
    is assigned to. Without it, `model.safetensors` counts, or else the only safetensors file there is.

    Raises CheckpointError naming the file (and tensors) if something is missing, damaged or ambiguous.
    """
    index = folder / INDEX_NAME
    return _from_index(folder, index) if index.is_file() else _from_single_file(folder)


def read_index(index: Path) -> dict[str, str]:
    """Return the index's mapping from tensor name to file name. Raises CheckpointError if it is damaged."""
    try:
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        names = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except OSError as error:
        raise CheckpointError(f"{index}: {error.strerror or error}") from error
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: damaged, it holds no weight_map") from error
    for tensor, name in names.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name:
            raise CheckpointError(f"{index}: {tensor} is said to be in '{name}', which is outside the checkpoint")
    return names


def _from_index(folder: Path, index: Path) -> TensorTable:
    weight_map = read_index(index)
    notes: list[str] = []
    tensors_of: dict[str, list[str]] = defaultdict(list)
    for tensor, name in weight_map.items():
        tensors_of[name].append(tensor)
    entries: dict[str, TensorEntry] = {}
    strays: dict[str, TensorEntry] = {}
    files: list[Path] = [index]
    for name, tensors in sorted(tensors_of.items()):
        path = _find_shard(folder, name, len(tensors), notes)
        header = read_header(path)
        absent = [tensor for tensor in tensors if tensor not in header]
        if absent:
            raise CheckpointError(f"{path}: {listed(absent)} should be in it, says {INDEX_NAME}, but is not")
        entries.update((tensor, header[tensor]) for tensor in tensors)
        # A copy of a tensor that the index assigns elsewhere is old; one it assigns nowhere is for the caller to judge.
        strays.update((tensor, entry) for tensor, entry in header.items() if tensor not in weight_map)
        files.append(path)
    return TensorTable(entries, strays, tuple(files), tuple(notes))


def _find_shard(folder: Path, name: str, tensor_count: int, notes: list[str]) -> Path:
    path = folder / name
    if path.is_file():
        return path
    parent = path.parent
    twins = [p for p in parent.iterdir() if p.name.lower() == path.name.lower()] if parent.is_dir() else []
    if len(twins) != 1:
        raise CheckpointError(f"{path}: missing; {INDEX_NAME} says it holds {tensor_count} tensors; fetch it again")
    notes.append(f"{INDEX_NAME} names {name}; {twins[0].name}, which differs in case only, was read")
    return twins[0]


def _from_single_file(folder: Path) -> TensorTable:
    path = folder / SINGLE_NAME
    if not path.is_file():
        found = sorted(folder.glob("*.safetensors"))
        if len(found) > 1:
            names = listed([p.name for p in found])
            raise CheckpointError(
                f"{folder}: {names} and no {INDEX_NAME} to say which tensor is where; fetch the index"
            )
        if not found:
            others = sorted(p.name for pattern in _OTHER_FORMATS for p in folder.glob(pattern))
            hint = f"; {listed(others)} is not read, convert it to safetensors first" if others else ""
            raise CheckpointError(f"{folder}: no weights, neither {SINGLE_NAME} nor {INDEX_NAME}{hint}")
        path = found[0]
    return TensorTable(read_header(path), {}, (path,))
