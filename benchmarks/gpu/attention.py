"""The paged attention kernel by itself: against NumPy on a ragged step, and against the memory's bandwidth.

It is compiled here, for the shapes of Llama-3.1-8B: plans carry it only where full TensorRT has it as a plugin.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.check import Outcome, at_least, at_most
from optimc_passes.dialect.paged_attention import PagedAttention
from optimc_passes.emit.tensorrt_kernels.attention_tiles import Purpose
from optimc_passes.emit.tensorrt_kernels.attention_variant import AttentionVariant, PoolType
from optimc_passes.emit.tensorrt_kernels.compile_attention import compile_attention, compile_merge
from optimc_passes.emit.tensorrt_kernels.compile_source import CompiledKernel
from optimc_passes.emit.tensorrt_kernels.paged_attention_reference import CacheRows, RaggedStep, paged_attention
from optimc_passes.emit.tensorrt_kernels.plugin_design import attention_launch, merge_launch
from optimc_runtime.executor.tensorrt.cuda import CudaDevice, CudaKernel, Pointer

SPEC = PagedAttention(layer=0, num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)
BLOCK = 16
TOLERANCE = 4e-3
"""Of the largest value: softmax weights are rounded to half numbers, 11 bits, before they meet values."""
LEAST_BANDWIDTH = 0.4
DECODE = (16, 2048)
"""Sequences and context that are timed: 128 MiB of half keys and values."""


@dataclass(frozen=True)
class AttentionCase:
    """One step's arrays in the kernel's layout."""

    queries: NDArray[np.float16]
    """[T, H*D]"""
    step: RaggedStep
    step_keys: CacheRows
    step_values: CacheRows
    key_pool: CacheRows
    value_pool: CacheRows

    @property
    def context_bytes(self) -> int:
        """Keys and values that must be read from the pool."""
        rows = int(self.step.context_len.sum())
        per_row = [
            array.nbytes // len(array)
            for cache in (self.key_pool, self.value_pool)
            for array in (cache.codes, cache.scales)
            if array is not None
        ]
        return rows * sum(per_row)

    def expected(self) -> NDArray[np.float32]:
        """What NumPy answers, float32 [T, H*D]."""
        return paged_attention(
            SPEC,
            self.queries.astype(np.float32),
            self.step,
            step_keys=self.step_keys,
            step_values=self.step_values,
            key_pool=self.key_pool,
            value_pool=self.value_pool,
        )


def check_attention(device: CudaDevice, bytes_per_s: float | None) -> Iterator[Outcome]:
    """Check both forms of the kernel with both pools, and time decoding."""
    pools: tuple[PoolType, ...] = ("float16", "int8")
    for pool in pools:
        variant = AttentionVariant(32, 8, 128, BLOCK, "float16", pool, SPEC.scale, 0.0, 0, has_tree=False)
        case = make_case([(0, 37), (70, 1), (300, 5)], pool)
        expected = case.expected()
        for split in (False, True):
            found, _ = run_attention(device, variant, case, split=split)
            error = float(np.abs(found - expected).max() / np.abs(expected).max())
            form = "split" if split else "whole"
            yield at_most(f"paged attention, {pool} pool, {form}", error, TOLERANCE, " of the peak")
        case = make_case([(DECODE[1], 1)] * DECODE[0], pool)
        _, seconds = run_attention(device, variant, case, split=True, repeats=50)
        rate = case.context_bytes / seconds
        name = f"paged attention, {pool} pool, {DECODE[0]} x {DECODE[1]}"
        figures = {"seconds": seconds, "bytes": case.context_bytes, "bytes_per_s": rate}
        if bytes_per_s is None:
            yield Outcome(name, None, f"{seconds * 1e6:.1f} us, {rate / 1e9:.0f} GB/s", figures=figures)
        else:
            yield at_least(name, rate / bytes_per_s, LEAST_BANDWIDTH, " of the bandwidth", **figures)


def make_case(phases: list[tuple[int, int]], pool: str, seed: int = 0) -> AttentionCase:
    """Return random arrays for sequences of (context, queries), blocks shuffled."""
    rng = np.random.default_rng(seed)
    counts = [count for _, count in phases]
    blocks = [-(-(context + count) // BLOCK) for context, count in phases]
    order = rng.permutation(sum(blocks))
    table = np.zeros((len(phases), max(blocks)), np.int32)
    for row, first in enumerate(np.cumsum(blocks) - blocks):
        table[row, : blocks[row]] = order[first : first + blocks[row]]

    def cache(rows: int) -> CacheRows:
        numbers = rng.standard_normal((rows, SPEC.kv_width)).astype(np.float16)
        if pool != "int8":
            return CacheRows(numbers)
        scales = rng.uniform(0.005, 0.02, (rows, SPEC.num_kv_heads)).astype(np.float16)
        return CacheRows(rng.integers(-127, 128, numbers.shape, np.int8), scales)

    step = RaggedStep(
        query_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        context_len=np.array([context for context, _ in phases], np.int32),
        block_table=table,
        positions=np.concatenate([np.arange(c, c + n) for c, n in phases]),
        block_size=BLOCK,
    )
    queries = rng.standard_normal((sum(counts), SPEC.q_width)).astype(np.float16)
    slots = sum(blocks) * BLOCK
    return AttentionCase(queries, step, cache(sum(counts)), cache(sum(counts)), cache(slots), cache(slots))


def run_attention(
    device: CudaDevice, variant: AttentionVariant, case: AttentionCase, *, split: bool, repeats: int = 1
) -> tuple[NDArray[np.float16], float]:
    """Return the answer half [T, H*D] and the seconds a run took: the mean of several, after some that load code."""
    with ExitStack() as resources:
        attention = AttentionRun(device, variant, case, split, resources)
        begin, end = device.event(timed=True), device.event(timed=True)
        resources.callback(begin.close)
        resources.callback(end.close)
        for _ in range(3 if repeats > 1 else 0):
            attention.enqueue()
        begin.record()
        for _ in range(repeats):
            attention.enqueue()
        end.record()
        found = np.empty(case.queries.shape, np.float16)
        device.download(found, attention.out)
        device.synchronize()
        return found, end.seconds_since(begin) / repeats


class AttentionRun:
    """A case on the device, and the kernels that answer it."""

    def __init__(
        self, device: CudaDevice, variant: AttentionVariant, case: AttentionCase, split: bool, resources: ExitStack
    ) -> None:
        self._device, self._resources = device, resources
        architecture = device.architecture
        purpose: Purpose = "decode" if split else "prefill"
        tiled = compile_attention("attention", variant, purpose, architecture, split=split)
        self._attend = self._loaded(tiled.kernel)
        tokens, step = len(case.queries), case.step
        sizes = {"q": (tokens,), "context_len": step.context_len.shape, "block_table": step.block_table.shape}
        launch = attention_launch(variant, tiled.tile, sizes)
        splits = launch.grid[2] if split else 1
        self.out = self._room(case.queries.nbytes)
        parts = self._room(splits * tokens * SPEC.q_width * 4) if split else self.out
        sums = [self._room(splits * tokens * SPEC.num_heads * 4)] if split else []
        self._values = [*self._inputs(case), *launch.extra, parts, *sums]
        self._grid = (*launch.grid[:2], splits)
        self._merge: CudaKernel | None = None
        if split:
            self._merge = self._loaded(compile_merge("merge", variant, architecture))
            merge = merge_launch(variant, {"log_sums": (splits, tokens, SPEC.num_heads)})
            self._merge_grid, self._merge_values = merge.grid, [parts, *sums, *merge.extra, self.out]
        device.synchronize()  # the host's arrays are the case's own

    def enqueue(self) -> None:
        """Enqueue one answer."""
        self._attend.launch(self._grid, *self._values)
        if self._merge is not None:
            self._merge.launch(self._merge_grid, *self._merge_values)

    def _inputs(self, case: AttentionCase) -> list[Pointer]:
        """Copy the case's arrays; return where they lie, in the kernel's order."""
        caches = (case.step_keys, case.step_values, case.key_pool, case.value_pool)
        scales = (case.key_pool.scales, case.value_pool.scales, case.step_keys.scales, case.step_values.scales)
        step = case.step
        arrays = [case.queries, *(cache.codes for cache in caches), *(each for each in scales if each is not None)]
        return [self._copied(array) for array in (*arrays, step.query_start, step.context_len, step.block_table)]

    def _copied(self, array: NDArray[Any]) -> Pointer:
        pointer = self._room(array.nbytes)
        self._device.upload(pointer, array)
        return pointer

    def _room(self, nbytes: int) -> Pointer:
        pointer = self._device.allocate(nbytes)
        self._resources.callback(self._device.free, pointer)
        return pointer

    def _loaded(self, kernel: CompiledKernel) -> CudaKernel:
        loaded = self._device.kernel(
            kernel.image, kernel.function, kernel.arguments, kernel.num_warps, kernel.shared_bytes
        )
        self._resources.callback(loaded.close)
        return loaded
