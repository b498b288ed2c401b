"""Writing a plan: streamed, hashed, and never half-written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from optimc.plan.container import ALIGNMENT, DTYPES, PAD_PREFIX, TensorSpec
from optimc.plan.manifest import FORMAT_VERSION, Manifest, TensorInfo
from optimc.storage import replacing, storing

_UNKNOWN_HASH = "0" * 64


@dataclass(frozen=True)
class PlanTensor:
    """A tensor to be written. `load` is called once, when its turn comes, so memory holds one tensor at a time.

    `dtype` is a container dtype ("F32", "U8", ...); `load()` returns an array whose bytes are the tensor's.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], NDArray[np.generic]]

    @classmethod
    def from_bytes(cls, name: str, data: bytes) -> PlanTensor:
        """Return a U8 tensor [len(data)] holding `data`."""
        return cls(name, "U8", (len(data),), lambda: np.frombuffer(data, np.uint8))

    @classmethod
    def from_array(cls, name: str, array: NDArray[np.generic]) -> PlanTensor:
        """Return a tensor holding `array`; its dtype must have a container dtype of the same name."""
        for dtype, numpy_dtype in DTYPES.items():
            if numpy_dtype == array.dtype:
                return cls(name, dtype, array.shape, lambda: array)
        raise ValueError(f"{name}: no container dtype for {array.dtype}")

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return TensorSpec(self.name, self.dtype, self.shape, 0).nbytes


def write_plan(
    path: Path,
    manifest: Manifest,
    tensors: Sequence[PlanTensor],
    *,
    progress: Callable[[int], None] | None = None,
) -> Manifest:
    """Write `tensors` and `manifest` to `path` in one atomic step; return the manifest with hashes filled in.

    An interrupted or failed write leaves nothing behind and an older plan intact, as `replacing` says. `progress` is
    called with the bytes of each tensor written.

    Raises StorageError if the system refuses to write, ValueError for tensors of one name or of another size than they
    declare.
    """
    if manifest.format_version != FORMAT_VERSION:
        raise ValueError(f"this writer writes format {FORMAT_VERSION}, not {manifest.format_version}")
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        raise ValueError(f"duplicate tensor names: {sorted({n for n in names if names.count(n) > 1})}")
    laid_out = _with_padding(tensors)
    hashes = dict.fromkeys(names, _UNKNOWN_HASH)
    with storing("the plan", path), replacing(path, durable=True) as file:
        header = _header(_with_hashes(manifest, hashes), laid_out)
        file.write(header)
        for tensor in laid_out:
            digest = _write_tensor(file, tensor)
            if tensor.name in hashes:
                hashes[tensor.name] = digest
            if progress is not None:
                progress(tensor.nbytes)
        finished = _with_hashes(manifest, hashes)
        final_header = _header(finished, laid_out)
        assert len(final_header) == len(header), "hashes have a fixed length"
        file.seek(0)
        file.write(final_header)
    return finished


def _with_hashes(manifest: Manifest, hashes: dict[str, str]) -> Manifest:
    return manifest.model_copy(update={"tensors": {n: TensorInfo(sha256=h) for n, h in hashes.items()}})


def _with_padding(tensors: Sequence[PlanTensor]) -> list[PlanTensor]:
    """Insert filler tensors so that every tensor starts aligned; the container itself allows no holes."""
    laid_out: list[PlanTensor] = []
    for index, tensor in enumerate(tensors):
        laid_out.append(tensor)
        remainder = -tensor.nbytes % ALIGNMENT
        if remainder:
            laid_out.append(PlanTensor.from_bytes(f"{PAD_PREFIX}{index}", bytes(remainder)))
    return laid_out


def _header(manifest: Manifest, tensors: Sequence[PlanTensor]) -> bytes:
    entries: dict[str, object] = {
        "__metadata__": {
            # Apart from the manifest, so that another format's manifest need not be parsed to be refused.
            "optimc.format_version": str(manifest.format_version),
            "optimc.manifest": manifest.model_dump_json(),
        }
    }
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = text + b" " * (-(len(text) + 8) % ALIGNMENT)
    return len(padded).to_bytes(8, "little") + padded


def _write_tensor(file: BinaryIO, tensor: PlanTensor) -> str:
    array = np.ascontiguousarray(tensor.load())
    if array.nbytes != tensor.nbytes:
        raise ValueError(f"{tensor.name}: declared {tensor.nbytes} bytes, loaded {array.nbytes}")
    data = array.reshape(-1).view(np.uint8).data if array.nbytes else memoryview(b"")
    file.write(data)
    return hashlib.sha256(data).hexdigest()
