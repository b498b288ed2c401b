"""The plan's row kernels by themselves: against NumPy on random tables, and against the memory's bandwidth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from gpu.check import Outcome, at_least
from optimc.plan import Plan
from optimc.plan.tensorrt_program import TensorRtProgram
from optimc_runtime.executor.tensorrt.cuda import CudaDevice, Pointer
from optimc_runtime.executor.tensorrt.pool import CacheRows, CacheTensor
from optimc_runtime.executor.tensorrt.row_kernels import KERNELS, RowKernels, choose_kernel

POOL_ROWS = 1000
LEAST_BANDWIDTH = 0.4
"""Of the datasheet's, on rows of 1 KiB: what a plain copy of small pieces reaches on any GPU since 2020."""

TIMED = ((8, 200), (2048, 10))
"""Rows of a commit, and how often it runs."""

TENSORS = tuple(
    CacheTensor(0, f"pool {index}", f"step {index}", dtype, columns)
    for index, (dtype, columns) in enumerate(
        (("float16", 192), ("int8", 192), ("float16", 3), ("int8", 1024), ("float16", 1), ("float16", 1024))
    )
)
"""Rows of 2 bytes to 2 KiB, in pieces of 16 bytes and not."""


def check_rows(plan: Plan, program: TensorRtProgram, device: CudaDevice) -> Iterator[Outcome]:
    """Commit and move random rows, dropped ones and overlapping ones among them."""
    rng = np.random.default_rng(0)
    with ExitStack() as resources:
        pool, step, kernels = _loaded(plan, program, device, TENSORS, POOL_ROWS, 64, resources)
        contents = []
        for tensor, address in zip(TENSORS, pool.addresses, strict=True):
            contents.append(rng.integers(0, 256, (POOL_ROWS, tensor.row_bytes), np.uint8))
            device.upload(address, contents[-1])
        wrong = 0
        for count in (1, 2, 63, 64):
            slots = rng.permutation(POOL_ROWS)[:count].astype(np.int64)
            slots[rng.random(count) < 0.3] = -1
            rows = [rng.integers(0, 256, (count, tensor.row_bytes), np.uint8) for tensor in TENSORS]
            for address, each in zip(step.addresses, rows, strict=True):
                device.upload(address, each)
            held = _uploaded(device, slots, resources)
            kernels.commit(held, count)
            device.synchronize()
            for array, each in zip(contents, rows, strict=True):
                array[slots[slots >= 0]] = each[slots >= 0]
            wrong += _differing(device, pool, contents)
        yield Outcome("commit_rows beside NumPy", wrong == 0, f"{wrong} wrong bytes", "0 wrong bytes")
        wrong = 0
        for count in (1, 5, 64):
            src = rng.integers(0, 80, count)
            dst = rng.permutation(80)[:count].astype(np.int64)  # some rows are read and written
            kernels.move(_uploaded(device, src, resources), _uploaded(device, dst, resources), count)
            device.synchronize()
            for array in contents:
                array[dst] = array[src]
            wrong += _differing(device, pool, contents)
        yield Outcome("gather and scatter beside NumPy", wrong == 0, f"{wrong} wrong bytes", "0 wrong bytes")


def check_row_bandwidth(
    plan: Plan, program: TensorRtProgram, device: CudaDevice, bytes_per_s: float | None
) -> Iterator[Outcome]:
    """Time commits: of a decode step, where the launch is all there is to see, and of rows for 128 MiB."""
    tensors = tuple(CacheTensor(0, f"p{index}", f"s{index}", "float16", 512) for index in range(64))
    for count, repeats in TIMED:
        with ExitStack() as resources:
            _, _, kernels = _loaded(plan, program, device, tensors, 4 * count, count, resources)
            slots = np.random.default_rng(1).permutation(4 * count)[:count].astype(np.int64)
            held = _uploaded(device, slots, resources)
            begin, end = device.event(timed=True), device.event(timed=True)
            resources.callback(begin.close)
            resources.callback(end.close)
            for _ in range(3):
                kernels.commit(held, count)
            begin.record()
            for _ in range(repeats):
                kernels.commit(held, count)
            end.record()
            device.synchronize()
            seconds = end.seconds_since(begin) / repeats
            moved = 2 * count * sum(tensor.row_bytes for tensor in tensors)
            rate = moved / seconds
            name = f"commit of {count} rows in 64 tensors"
            figures = {"seconds": seconds, "bytes": moved, "bytes_per_s": rate}
            if count < 100 or bytes_per_s is None:
                yield Outcome(name, None, f"{seconds * 1e6:.1f} us, {rate / 1e9:.0f} GB/s", figures=figures)
            else:
                yield at_least(name, rate / bytes_per_s, LEAST_BANDWIDTH, " of the bandwidth", **figures)


def _loaded(
    plan: Plan,
    program: TensorRtProgram,
    device: CudaDevice,
    tensors: tuple[CacheTensor, ...],
    pool_rows: int,
    step_rows: int,
    resources: ExitStack,
) -> tuple[CacheRows, CacheRows, RowKernels]:
    pool = CacheRows(device, tensors, pool_rows)
    resources.callback(pool.close)
    step = CacheRows(device, tensors, step_rows)
    resources.callback(step.close)
    chosen = [choose_kernel(plan, program.kernels, name, device.architecture) for name in KERNELS]
    images = [plan.blob(kernel.tensor) for kernel in chosen]
    kernels = RowKernels(device, chosen, images, tensors, pool, step)
    resources.callback(kernels.close)
    return pool, step, kernels


def _uploaded(device: CudaDevice, slots: NDArray[np.int64], resources: ExitStack) -> Pointer:
    pointer = device.allocate(slots.nbytes)
    resources.callback(device.free, pointer)
    device.upload(pointer, np.ascontiguousarray(slots))
    device.synchronize()
    return pointer


def _differing(device: CudaDevice, pool: CacheRows, contents: list[NDArray[np.uint8]]) -> int:
    wrong = 0
    for address, array in zip(pool.addresses, contents, strict=True):
        found = np.empty_like(array)
        device.download(found, address)
        device.synchronize()
        wrong += int((found != array).sum())
    return wrong
