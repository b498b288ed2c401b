"""One safetensors file of a checkpoint: its header, and its tensors read on demand.

Format: https://huggingface.co/docs/safetensors: 8 bytes little-endian header length, a JSON header, the data.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from optimc.errors import CheckpointError
from optimc.plan.container import DTYPES, MAX_HEADER_BYTES
from optimc_passes.weights import Dense

NUMPY_DTYPES: dict[str, np.dtype] = {
    **DTYPES,
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
"""Container dtype to the NumPy dtype that holds its values; bf16 and fp8 come from ml_dtypes."""


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies."""

    name: str
    path: Path
    dtype: str
    """Container dtype, for example "BF16"; not necessarily one we can read."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""

    def as_weight(self) -> Dense:
        """Return the tensor as a weight that is read when somebody looks at it."""
        return Dense(self.shape, NUMPY_DTYPES[self.dtype], self.read)

    def read(self) -> NDArray[Any]:
        """Return the tensor as a read-only view of the mapped file; nothing is copied and nothing is kept.

        Raises CheckpointError if its dtype is none that is read, or if the file has gone or shrunk since its header was
        read.
        """
        dtype = NUMPY_DTYPES.get(self.dtype)
        if dtype is None:
            raise CheckpointError(f"{self.path}: {self.name} is {self.dtype}, readable are {', '.join(NUMPY_DTYPES)}")
        if 0 in self.shape:
            return np.empty(self.shape, dtype)
        try:
            mapped = np.memmap(self.path, np.uint8, "r", self.offset, math.prod(self.shape) * dtype.itemsize)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}: {self.name} can no longer be read ({error})") from error
        return np.asarray(mapped).view(dtype).reshape(self.shape)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file by name, after checking that the file is as long as it claims.

    Raises CheckpointError if the file is missing, truncated or not safetensors.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(f"{path}: truncated or not a safetensors file ({size} bytes)")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged, the header is not JSON") from error
    data_start = 8 + length
    try:
        header.pop("__metadata__", None)
        entries = {name: _entry(name, path, facts, data_start) for name, facts in header.items()}
        end = max((facts["data_offsets"][1] for facts in header.values()), default=0)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(f"{path}: damaged, the header does not describe tensors") from error
    if data_start + end > size:
        raise CheckpointError(f"{path}: truncated, {size} bytes of {data_start + end}; fetch the file again")
    return entries


def _entry(name: str, path: Path, facts: dict[str, Any], data_start: int) -> TensorEntry:
    begin, end = facts["data_offsets"]
    entry = TensorEntry(name, path, facts["dtype"], tuple(facts["shape"]), data_start + begin)
    dtype = NUMPY_DTYPES.get(entry.dtype)
    if dtype is not None and math.prod(entry.shape) * dtype.itemsize != end - begin:
        raise ValueError(f"{name}: {end - begin} bytes do not hold {entry.shape} {entry.dtype}")
    if begin < 0 or end < begin or min(entry.shape, default=0) < 0:
        raise ValueError(f"{name}: impossible extent")
    return entry
