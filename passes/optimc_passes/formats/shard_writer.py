"""Weights into safetensors files with an index, one tensor in memory at a time.

Format: https://huggingface.co/docs/safetensors: 8 bytes little-endian header length, a JSON header, the data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from optimc.progress import Progress, no_progress
from optimc_passes.load.safetensors_file import NUMPY_DTYPES
from optimc_passes.load.shards import INDEX_NAME, SINGLE_NAME
from optimc_passes.weights import Dense

SHARD_BYTES = 2 << 30
"""Most bytes of tensors in one file, unless a single tensor has more."""

_NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}
_ALIGNMENT = 8


def write_shards(
    tensors: Mapping[str, Dense], folder: Path, *, shard_bytes: int = SHARD_BYTES, progress: Progress = no_progress
) -> int:
    """Write `tensors` into `folder`, in their order; return the bytes of all of them.

    One file `model.safetensors` if they fit, else numbered ones and the index. Same tensors, same bytes.
    """
    shards = list(_split(tensors, shard_bytes))
    total = sum(tensor.nbytes for tensor in tensors.values())
    weight_map: dict[str, str] = {}
    done = 0
    for number, names in enumerate(shards, 1):
        single = len(shards) == 1
        file = SINGLE_NAME if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map.update(dict.fromkeys(names, file))
        with (folder / file).open("wb") as stream:
            stream.write(_header({name: tensors[name] for name in names}))
            for name in names:
                array = np.ascontiguousarray(tensors[name].read())
                assert (array.shape, array.dtype) == (tensors[name].shape, tensors[name].dtype), name
                stream.write(array.reshape(-1).view(np.uint8).data)
                done += array.nbytes
                progress(done >> 20, total >> 20, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    return total


def _split(tensors: Mapping[str, Dense], shard_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield names


def _header(tensors: Mapping[str, Dense]) -> bytes:
    # Readers take the format tag as a promise that the tensors suit torch.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
