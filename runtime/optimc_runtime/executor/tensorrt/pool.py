"""The KV pool in device memory, and the place where a call's new rows lie until they are committed to it.

Letters: P blocks, S slots per block, Hkv key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optimc.errors import EngineError, PlanTargetError
from optimc.plan import KvLayout
from optimc.plan.tensorrt_program import TensorRtAttention
from optimc_runtime.executor.tensorrt.cuda import CudaDevice, Pointer
from optimc_runtime.executor.tensorrt.engine import TensorRtEngine

RESERVED_BYTES = 256 << 20
"""Kept free beside the pool: execution contexts and CUDA graphs are made as shapes are met."""

_HALF_BYTES = 2
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """Keys, values, or the scales of either, of one layer."""

    window: int
    """Its layer's."""
    pool: str
    """The engine's input [rows, columns]."""
    step: str
    """The engine's output: what a call adds to it."""
    dtype: str
    columns: int

    @property
    def row_bytes(self) -> int:
        """Of one slot."""
        return self.columns * (1 if self.dtype == "int8" else _HALF_BYTES)


def cache_tensors(kv: KvLayout, attention: TensorRtAttention) -> tuple[CacheTensor, ...]:
    """Return all tensors of the cache: those of a layer beside each other."""
    tensors = []
    for index, (layer, ports) in enumerate(zip(kv.layers, attention.layers, strict=True)):
        dtype, width = kv.dtype_of(index), layer.num_kv_heads * layer.head_dim
        for cache in (ports.keys, ports.values):
            tensors.append(CacheTensor(ports.window, cache.pool, cache.step, dtype, width))
            if cache.pool_scales is not None and cache.step_scales is not None:
                scales = CacheTensor(ports.window, cache.pool_scales, cache.step_scales, "float16", layer.num_kv_heads)
                tensors.append(scales)
    return tuple(tensors)


def context_bytes(tensors: Sequence[CacheTensor]) -> tuple[tuple[int, int], ...]:
    """Return (window, bytes of a token in all layers of that window) for each window."""
    sums: dict[int, int] = {}
    for tensor in tensors:
        sums[tensor.window] = sums.get(tensor.window, 0) + tensor.row_bytes
    return tuple(sorted(sums.items()))


def count_blocks(path: Path, memory_bytes: int, bytes_per_block: int, block_size: int) -> int:
    """Return the number of blocks P that so much memory holds. Raises PlanTargetError if it is 0."""
    if memory_bytes < bytes_per_block:
        raise PlanTargetError(
            f"{path}: a KV pool of {memory_bytes:,} bytes holds no block; "
            f"one block of {block_size} tokens takes {bytes_per_block:,} bytes, raise kv_memory"
        )
    return memory_bytes // bytes_per_block


def check_pool_rows(path: Path, num_rows: int, engine: TensorRtEngine, tensors: Sequence[CacheTensor]) -> None:
    """Raise PlanTargetError if the engine was built for smaller pools."""
    most = min(engine.most(tensor.pool, profile)[0] for tensor in tensors for profile in range(engine.num_profiles))
    if num_rows > most:
        raise PlanTargetError(
            f"{path}: a KV pool of {num_rows:,} rows, the engine was built for {most:,} at most; lower kv_memory"
        )


def check_scratch(path: Path, device: CudaDevice, nbytes: int) -> None:
    """Raise PlanTargetError unless the device has the memory that engines compute in."""
    free, total = device.memory()
    if nbytes > free:
        raise PlanTargetError(
            f"{path}: its engines compute in {nbytes:,} bytes, and beside their weights {device.name} has {free:,} of "
            f"its {total:,} bytes free; rebuild it with a lower max_seqs, max_seq_len or max_step_tokens"
        )


def check_free_memory(path: Path, device: CudaDevice, pool_bytes: int) -> None:
    """Raise PlanTargetError unless the device has that much free, and RESERVED_BYTES more."""
    free, total = device.memory()
    if pool_bytes + RESERVED_BYTES > free:
        raise PlanTargetError(
            f"{path}: a KV pool of {pool_bytes:,} bytes, but beside the engine {device.name} has {free:,} of its "
            f"{total:,} bytes free and {RESERVED_BYTES:,} stay free for contexts and graphs; lower kv_memory to "
            f"{max(0, free - RESERVED_BYTES):,}"
        )


class CacheRows:
    """Device memory with a region of so many rows for each tensor of the cache."""

    def __init__(self, device: CudaDevice, tensors: Sequence[CacheTensor], num_rows: int) -> None:
        """Allocate it, all zeros. int8 codes of 0 with a scale of 0 are 0, so even rows that were never written are
        finite numbers."""
        self._device = device
        self._memory = device.allocate(rows_bytes(tensors, num_rows))
        offset = 0
        self.addresses: list[Pointer] = []
        """One per tensor."""
        for tensor in tensors:
            self.addresses.append(Pointer(self._memory + offset))
            offset += _aligned(tensor.row_bytes * num_rows)
        try:
            device.clear(self._memory, offset)
        except EngineError:
            self.close()
            raise

    def close(self) -> None:
        """Free the memory."""
        self._device.free(self._memory)


def rows_bytes(tensors: Sequence[CacheTensor], num_rows: int) -> int:
    """Return the bytes of `CacheRows`."""
    return sum(_aligned(tensor.row_bytes * num_rows) for tensor in tensors)


def _aligned(nbytes: int) -> int:
    """Kernels want 16 bytes, TensorRT 256."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
