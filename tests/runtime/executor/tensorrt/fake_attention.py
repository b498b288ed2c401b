"""The attention kernels on a FakeGpu, as `benchmarks/gpu/attention.py` launches them, computed by their reference."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from optimc_passes.emit.tensorrt_kernels.attention_tiles import attention_tile
from optimc_passes.emit.tensorrt_kernels.compile_attention import TiledKernel, attention_specialization
from optimc_passes.emit.tensorrt_kernels.compile_source import HIDDEN_ARGUMENTS, CompiledKernel
from optimc_passes.emit.tensorrt_kernels.paged_attention_reference import CacheRows, RaggedStep, paged_attention

from .fake_gpu import FakeGpu

MERGE = ("*fp32", "*fp32", "i32", "i32", "*fp16")


def read_arguments(parameters: int, kinds: Sequence[str]) -> list[int]:
    """What a launch passes, by the kernel's own types; the last two must be null."""
    places = (ctypes.c_void_p * len(kinds)).from_address(parameters)
    types = [ctypes.c_uint64 if kind.startswith("*") else ctypes.c_int32 for kind in kinds]
    values = [kind.from_address(place).value for kind, place in zip(types, places, strict=True)]
    assert values[-2:] == [0, 0]
    return values[:-2]


class FakeAttention:
    """`paged_attention` for one variant. What it splits is all in the first part."""

    def __init__(self, spec: Any, variant: Any, kinds: Sequence[str], *, split: bool) -> None:
        self._spec, self._variant, self._kinds, self._split = spec, variant, kinds, split

    def read(self, parameters: int) -> list[int]:
        return read_arguments(parameters, self._kinds)

    def __call__(self, gpu: FakeGpu, grid: tuple[int, int, int], values: list[int]) -> None:
        spec, scaled = self._spec, self._variant.is_scaled
        queries, *caches = values[:5]
        scales = values[5:9] if scaled else [0] * 4
        starts, contexts, table, tokens, sequences, width, _, out, *sums = values[5 + 4 * scaled :]
        assert grid[1] == spec.num_kv_heads

        def array(address: int, dtype: Any, *shape: int) -> np.ndarray:
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            return gpu.array(address, nbytes).view(dtype).reshape(shape)

        blocks = array(table, np.int32, sequences, width)
        step = RaggedStep(
            array(starts, np.int32, sequences + 1),
            array(contexts, np.int32, sequences),
            blocks,
            np.zeros(tokens, np.int64),
            self._variant.block_size,
        )
        slots = (int(blocks.max()) + 1) * self._variant.block_size
        dtype = np.int8 if scaled else np.float16

        def cache(address: int, scales_at: int, rows: int) -> CacheRows:
            codes = array(address, dtype, rows, spec.kv_width)
            return CacheRows(codes, array(scales_at, np.float16, rows, spec.num_kv_heads) if scaled else None)

        answer = paged_attention(
            spec,
            array(queries, np.float16, tokens, spec.q_width).astype(np.float32),
            step,
            step_keys=cache(caches[0], scales[2], tokens),
            step_values=cache(caches[1], scales[3], tokens),
            key_pool=cache(caches[2], scales[0], slots),
            value_pool=cache(caches[3], scales[1], slots),
        )
        if self._split:
            array(out, np.float32, grid[2], tokens, spec.q_width)[0] = answer
            log_sums = array(sums[0], np.float32, grid[2], tokens, spec.num_heads)
            log_sums[:] = -np.inf
            log_sums[0] = 0
        else:
            array(out, np.float16, tokens, spec.q_width)[:] = answer


class FakeMerge:
    """`merge_splits`, of parts that are all but one empty."""

    def read(self, parameters: int) -> list[int]:
        return read_arguments(parameters, (*MERGE, *HIDDEN_ARGUMENTS))

    def __call__(self, gpu: FakeGpu, grid: tuple[int, int, int], values: list[int]) -> None:
        parts, sums, rows, splits, out = values
        assert grid == (rows, 1, 1)
        assert not np.isfinite(gpu.array(sums, 4 * rows * splits).view(np.float32)[rows:]).any()
        width = 128 * rows
        gpu.array(out, 2 * width).view(np.float16)[:] = gpu.array(parts, 4 * width).view(np.float32)


class FakeCompiler:
    """Stands for Triton: what it compiles is found on the machine by its name."""

    def __init__(self, kernels: dict[str, Any], spec: Any) -> None:
        self._kernels, self._spec = kernels, spec
        kernels["merge"] = FakeMerge()

    def attention(self, name: str, variant: Any, purpose: Any, architecture: str, *, split: bool) -> TiledKernel:
        tile = attention_tile(variant, purpose, 89)
        kinds = (*attention_specialization(variant, tile, split=split).signature.values(), *HIDDEN_ARGUMENTS)
        function = f"{name} {variant.pool} {split}"
        self._kernels[function] = FakeAttention(self._spec, variant, kinds, split=split)
        return TiledKernel(CompiledKernel(name, architecture, b"image", function, 4, 50_000, kinds), tile)

    def merge(self, name: str, variant: Any, architecture: str) -> CompiledKernel:
        return CompiledKernel(name, architecture, b"image", "merge", 2, 0, (*MERGE, *HIDDEN_ARGUMENTS))
