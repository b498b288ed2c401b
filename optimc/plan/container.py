"""The safetensors container, read and written without copying.

Format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header naming each
tensor's dtype, shape and byte range, then the data without holes. We write it ourselves because a plan is streamed
tensor by tensor, and read it ourselves because tensors are used straight from the mapped file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

ALIGNMENT = 64
"""Every tensor starts at a multiple of this many bytes: one cache line, one AVX-512 register."""

MAX_HEADER_BYTES = 100_000_000
"""The safetensors format's own limit; anything larger is not a header."""

PAD_PREFIX = "_pad/"

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "BF16": np.dtype(np.uint16),
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E5M2": np.dtype(np.uint8),
}
"""Container dtype to the NumPy dtype its bytes are viewed as (bf16 and fp8 have none of their own)."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor's entry in the header. `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize
