"""Our own kernels on rows of the cache: a call's new rows to their slots, and rows from slots to other slots.

Which image runs: a cubin for the very architecture, else one for an earlier minor version of it, else PTX, which the
driver compiles when it is loaded. From compute capability 9.0 on, cubins use what later minor versions lack.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from optimc.errors import PlanTargetError
from optimc.plan import Plan
from optimc.plan.tensorrt_program import TensorRtKernel
from optimc_runtime.executor.tensorrt.cuda import CudaDevice, CudaKernel, Pointer
from optimc_runtime.executor.tensorrt.pool import CacheRows, CacheTensor

KERNELS = ("commit_rows", "gather_rows", "scatter_rows")
ARGUMENTS = ("*i64", "*i64", "*i32", "*i64", "i32")
"""What each of them is given: addresses of pools, addresses of rows, bytes of a row, slots, their number."""

_MOST_BLOCKS = 1024
"""Rows of a grid; blocks stride over the rest."""
_LAST_PORTABLE = 90
"""First compute capability whose cubins run on no other."""


def choose_kernel(plan: Plan, kernels: Sequence[TensorRtKernel], name: str, architecture: str) -> TensorRtKernel:
    """Return the kernel's best entry for the GPU. Raises PlanTargetError if the plan has none for it."""
    wanted = _capability(architecture)
    best: tuple[int, TensorRtKernel] | None = None
    for kernel in kernels:
        if kernel.name == name:
            rank = _rank(kernel.architecture, wanted)
            if rank is not None and (best is None or rank > best[0]):
                best = rank, kernel
    if best is None:
        has = ", ".join(kernel.architecture for kernel in kernels if kernel.name == name) or "none"
        raise PlanTargetError(
            f"{plan.path}: no image of kernel '{name}' for this machine's {architecture}, the plan has {has}; "
            f"rebuild it for {architecture}"
        )
    return best[1]


def _rank(architecture: str, wanted: int) -> int | None:
    """How well an image fits; None if it does not run."""
    if architecture == "ptx":
        return 0
    has = _capability(architecture)
    if has == wanted or (has < _LAST_PORTABLE and has // 10 == wanted // 10 and has < wanted):
        return has
    return None


def _capability(architecture: str) -> int:
    return int(architecture.removeprefix("sm_"))


class RowKernels:
    """Commits and moves rows of all tensors of the cache, in one launch and in two."""

    def __init__(
        self,
        device: CudaDevice,
        kernels: Sequence[TensorRtKernel],
        images: Sequence[bytes],
        tensors: Sequence[CacheTensor],
        pool: CacheRows,
        step: CacheRows,
    ) -> None:
        """Load `kernels`, one for each of KERNELS, from their images. `step` holds what the engine writes, and rows on
        the move: between steps it holds nothing."""
        self._count = len(tensors)
        with ExitStack() as resources:
            self._commit, self._gather, self._scatter = (
                _loaded(resources, device, kernel, image) for kernel, image in zip(kernels, images, strict=True)
            )
            tables = (
                np.array(pool.addresses, np.int64),
                np.array(step.addresses, np.int64),
                np.array([tensor.row_bytes for tensor in tensors], np.int32),
            )
            self._pools, self._rows, self._sizes = (_table(resources, device, table) for table in tables)
            device.synchronize()  # the arrays end here
            self._resources = resources.pop_all()

    def commit(self, slots: Pointer, count: int) -> None:
        """Enqueue copying row r of the step to pool row slots[r], int64 [count] on the device; -1 copies nothing."""
        self._launch(self._commit, slots, count)

    def move(self, src_slots: Pointer, dst_slots: Pointer, count: int) -> None:
        """Enqueue copying pool rows, int64 [count] each: all are read before any is written."""
        self._launch(self._gather, src_slots, count)
        self._launch(self._scatter, dst_slots, count)

    def close(self) -> None:
        """Unload the kernels."""
        self._resources.close()

    def _launch(self, kernel: CudaKernel, slots: Pointer, count: int) -> None:
        grid = (self._count, min(count, _MOST_BLOCKS), 1)
        kernel.launch(grid, self._pools, self._rows, self._sizes, slots, count)


def _loaded(resources: ExitStack, device: CudaDevice, kernel: TensorRtKernel, image: bytes) -> CudaKernel:
    loaded = device.kernel(image, kernel.function, kernel.arguments, kernel.num_warps, kernel.shared_bytes)
    resources.callback(loaded.close)
    return loaded


def _table(resources: ExitStack, device: CudaDevice, values: NDArray[np.generic]) -> Pointer:
    pointer = device.allocate(values.nbytes)
    resources.callback(device.free, pointer)
    device.upload(pointer, values)
    return pointer
