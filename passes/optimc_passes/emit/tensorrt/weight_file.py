"""Weights of a graph where TensorRT's parser can read them: one after the other in a file of no name.

Memory holds one weight while they are written; afterwards the system keeps as much of the file in memory as it has room
for. The parser takes addresses and copies nothing, so the file must live until the engine is built.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx_ir as ir

from optimc.storage import storing

_ALIGNMENT = 64


@dataclass(frozen=True)
class StoredWeight:
    """Where a weight's bytes lie, in ONNX's own layout: two 4-bit codes per byte, the first in the low half."""

    address: int
    nbytes: int


@contextmanager
def stored_weights(weights: Mapping[str, ir.TensorProtocol], folder: Path) -> Iterator[dict[str, StoredWeight]]:
    """Write each weight below `folder`, which exists, and yield their places by name. The file is gone with the block.

    Raises StorageError where it cannot be written.
    """
    if not weights:
        yield {}  # an empty file cannot be mapped
        return
    with storing("weights for TensorRT", folder):
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed below
    with file:
        with storing("weights for TensorRT", folder):
            places = _write(weights, file)
        mapped = np.memmap(file, np.uint8, "r")
        base = mapped.ctypes.data
        yield {name: StoredWeight(base + start, nbytes) for name, (start, nbytes) in places.items()}
        del mapped


def _write(weights: Mapping[str, ir.TensorProtocol], file: BinaryIO) -> dict[str, tuple[int, int]]:
    """Return where in the file each weight begins and its bytes."""
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for name, tensor in weights.items():
        data = tensor.tobytes()
        file.write(bytes(-end % _ALIGNMENT))
        start = end + -end % _ALIGNMENT
        end = start + file.write(data)
        places[name] = start, len(data)
        del data  # before the next one is read
    file.flush()
    return places
