"""The CUDA driver API on NumPy: `FakeDriver` stands for the module `cuda.bindings.driver`.

Device memory is host memory of its own, filled with a pattern that reads as NaN; every access is checked against what
is allocated. The stream is lazy: nothing runs before somebody waits, and then in order. So whoever overwrites a buffer
before the device has read it, or reads one before the device has written it, gets wrong numbers. As with the driver, a
thread without a current context can call next to nothing, and what waits or allocates ends a capture. Enumerations are
the real module's.
"""

from __future__ import annotations

import bisect
import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda.bindings import driver as real

OK = real.CUresult.CUDA_SUCCESS
ILLEGAL = real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
INVALID = real.CUresult.CUDA_ERROR_INVALID_VALUE
NOT_FOUND = real.CUresult.CUDA_ERROR_NOT_FOUND
NO_CONTEXT = real.CUresult.CUDA_ERROR_INVALID_CONTEXT
NOT_WHILE_CAPTURING = real.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
WITHOUT_CONTEXT = ("cuInit", "cuDevice", "cuCtxSetCurrent")
CAPTURED = ("cuMemcpy", "cuMemset", "cuLaunch", "cuEventRecord", "cuStreamEndCapture")
"""What may be called while capturing; in truth some more."""
GARBAGE = 0xFF


class DeviceError(Exception):
    """What the device met while running; the driver answers it from then on."""

    def __init__(self, code: Any) -> None:
        self.code = code


class FakeGpu:
    """Memory, a stream and what is captured from it."""

    def __init__(self, architecture: tuple[int, int] = (8, 9), total_bytes: int = 8 << 30) -> None:
        self.architecture, self.total_bytes = architecture, total_bytes
        self.memory: dict[int, np.ndarray] = {}
        self.handles: dict[int, tuple[str, Any]] = {}
        """Streams, events, modules, graphs that are alive."""
        self.queue: list[Callable[[], None]] = []
        self.capturing: list[Callable[[], None]] | None = None
        self.lost: Any = None
        self.counts: dict[str, int] = {}
        """Calls of each driver function."""
        self.fail: dict[str, Any] = {}
        """Code that the next call of a function answers."""
        self.num_devices = 1
        self.retained = 0
        """Of the primary context."""
        self.threads: set[int] = set()
        """Whose current context is the GPU's."""
        self.num_calls = 0
        self.fail_call: int | None = None
        """Number of the call that fails, whichever it is."""
        self._next = 0

    @property
    def num_alive(self) -> int:
        """Allocations and handles that were not given back."""
        return len(self.memory) + len(self.handles) + self.retained

    def handle(self, kind: str, what: Any = None) -> int:
        self._next += 1
        self.handles[self._next] = (kind, what)
        return self._next

    def array(self, address: int, nbytes: int) -> np.ndarray:
        """The bytes at an address. Raises DeviceError outside of what is allocated."""
        bases = sorted(self.memory)
        place = bisect.bisect_right(bases, address) - 1
        if place < 0 or address + nbytes > bases[place] + self.memory[bases[place]].nbytes:
            raise DeviceError(ILLEGAL)
        start = address - bases[place]
        return self.memory[bases[place]][start : start + nbytes]

    def enqueue(self, work: Callable[[], None]) -> None:
        (self.queue if self.capturing is None else self.capturing).append(work)

    def run(self) -> None:
        """Do all that is enqueued."""
        queue, self.queue = self.queue, []
        for work in queue:
            if self.lost is None:
                try:
                    work()
                except DeviceError as error:
                    self.lost = error.code


def host(address: int, nbytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)) if nbytes else np.zeros(0, np.uint8)


class FakeDriver:
    """The functions that `CudaDevice` calls. Everything else is the real module's."""

    __name__ = "cuda.bindings.driver"

    def __init__(self, gpu: FakeGpu, kernels: dict[str, Callable[..., None]]) -> None:
        """`kernels` by the name of their entry point: `read(parameters)` when they are launched, called with (gpu,
        grid, arguments) when they run."""
        self._gpu, self._kernels = gpu, kernels

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("cu") or name.startswith("cuGetError"):
            return object.__getattribute__(self, name)
        gpu: FakeGpu = object.__getattribute__(self, "_gpu")
        found = object.__getattribute__(self, name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            gpu.counts[name] = gpu.counts.get(name, 0) + 1
            gpu.num_calls += 1
            # What gives something back does not run out of anything.
            gives_back = name.endswith(("Destroy", "Free", "Unload", "Unregister", "Release"))
            if gpu.num_calls == gpu.fail_call and not gives_back:
                if name == "cuStreamEndCapture":  # ends it in any case
                    gpu.capturing = None
                return (real.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
            if name in gpu.fail:
                return (gpu.fail.pop(name), None)
            if gpu.lost is not None:
                return (gpu.lost, None)
            if not name.startswith(WITHOUT_CONTEXT) and threading.get_ident() not in gpu.threads:
                return (NO_CONTEXT, None)
            if gpu.capturing is not None and not name.startswith(CAPTURED):
                return (NOT_WHILE_CAPTURING, None)
            try:
                answer = found(*arguments)
            except DeviceError as error:
                gpu.lost = error.code
                return (error.code, None)
            if gpu.lost is not None:
                return (gpu.lost, None)
            return answer

        return call

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)

    def cuGetErrorName(self, code: Any) -> tuple[Any, bytes]:
        return OK, code.name.encode()

    def cuGetErrorString(self, code: Any) -> tuple[Any, bytes]:
        return OK, b"as the tests have it"

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return (OK,)

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return OK, self._gpu.num_devices

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return OK, index

    def cuDeviceGetName(self, length: int, device: int) -> tuple[Any, ...]:
        return OK, b"Fake GPU".ljust(length, b"\0")

    def cuDeviceGetAttribute(self, attribute: Any, device: int) -> tuple[Any, ...]:
        major, minor = self._gpu.architecture
        is_major = attribute == real.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        return OK, major if is_major else minor

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        self._gpu.retained += 1
        return OK, 1 << 20

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[Any, ...]:
        self._gpu.retained -= 1
        if not self._gpu.retained:
            self._gpu.threads.clear()
        return (OK,)

    def cuCtxSetCurrent(self, context: int) -> tuple[Any, ...]:
        assert context == 1 << 20
        assert self._gpu.retained > 0
        self._gpu.threads.add(threading.get_ident())
        return (OK,)

    def cuMemGetInfo(self) -> tuple[Any, ...]:
        used = sum(array.nbytes for array in self._gpu.memory.values())
        return OK, self._gpu.total_bytes - used, self._gpu.total_bytes

    def cuMemAlloc(self, nbytes: int) -> tuple[Any, ...]:
        room = np.full(nbytes + 256, GARBAGE, np.uint8)
        start = -room.ctypes.data % 256
        array = room[start : start + nbytes]
        self._gpu.memory[array.ctypes.data] = array
        return OK, array.ctypes.data

    def cuMemFree(self, pointer: int) -> tuple[Any, ...]:
        self._gpu.run()
        del self._gpu.memory[pointer]
        return (OK,)

    def cuMemHostRegister(self, pointer: int, nbytes: int, flags: int) -> tuple[Any, ...]:
        self._gpu.handles[-pointer] = ("host", nbytes)
        return (OK,)

    def cuMemHostUnregister(self, pointer: int) -> tuple[Any, ...]:
        del self._gpu.handles[-pointer]
        return (OK,)

    def cuMemsetD8Async(self, pointer: int, value: int, nbytes: int, stream: int) -> tuple[Any, ...]:
        def work() -> None:
            self._gpu.array(pointer, nbytes)[:] = value

        self._gpu.enqueue(work)
        return (OK,)

    def cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: int) -> tuple[Any, ...]:
        def work() -> None:
            self._gpu.array(target, nbytes)[:] = host(source, nbytes)

        self._gpu.enqueue(work)
        return (OK,)

    def cuMemcpyDtoHAsync(self, target: int, source: int, nbytes: int, stream: int) -> tuple[Any, ...]:
        def work() -> None:
            host(target, nbytes)[:] = self._gpu.array(source, nbytes)

        self._gpu.enqueue(work)
        return (OK,)

    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:
        return OK, self._gpu.handle("stream")

    def cuStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        del self._gpu.handles[stream]
        return (OK,)

    def cuStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        self._gpu.run()
        return (OK,)

    def cuStreamBeginCapture(self, stream: int, mode: Any) -> tuple[Any, ...]:
        assert self._gpu.capturing is None
        self._gpu.capturing = []
        return (OK,)

    def cuStreamEndCapture(self, stream: int) -> tuple[Any, ...]:
        captured, self._gpu.capturing = self._gpu.capturing, None
        return OK, self._gpu.handle("graph", captured)

    def cuGraphInstantiate(self, graph: int, flags: int) -> tuple[Any, ...]:
        return OK, self._gpu.handle("graph exec", self._gpu.handles[graph][1])

    def cuGraphDestroy(self, graph: int) -> tuple[Any, ...]:
        del self._gpu.handles[graph]
        return (OK,)

    def cuGraphExecDestroy(self, graph: int) -> tuple[Any, ...]:
        del self._gpu.handles[graph]
        return (OK,)

    def cuGraphLaunch(self, graph: int, stream: int) -> tuple[Any, ...]:
        for work in self._gpu.handles[graph][1]:
            self._gpu.enqueue(work)
        return (OK,)

    def cuEventCreate(self, flags: int) -> tuple[Any, ...]:
        return OK, self._gpu.handle("event", [])

    def cuEventDestroy(self, event: int) -> tuple[Any, ...]:
        del self._gpu.handles[event]
        return (OK,)

    def cuEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:
        mark = object()
        self._gpu.handles[event] = ("event", mark)

        def work() -> None:
            if self._gpu.handles.get(event, ("", None))[1] is mark:
                self._gpu.handles[event] = ("event", None)

        self._gpu.enqueue(work)
        return (OK,)

    def cuEventSynchronize(self, event: int) -> tuple[Any, ...]:
        """Run up to the event and no further."""
        while self._gpu.handles[event][1] and self._gpu.queue:
            rest, self._gpu.queue = self._gpu.queue[1:], self._gpu.queue[:1]
            self._gpu.run()
            self._gpu.queue = rest
            if self._gpu.lost is not None:
                break
        return (OK,)

    def cuEventElapsedTime(self, start: int, end: int) -> tuple[Any, ...]:
        return OK, 1.5

    def cuModuleLoadData(self, image: int) -> tuple[Any, ...]:
        return OK, self._gpu.handle("module", image)

    def cuModuleUnload(self, module: int) -> tuple[Any, ...]:
        del self._gpu.handles[module]
        return (OK,)

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[Any, ...]:
        if name.decode() not in self._kernels:
            return NOT_FOUND, None
        return OK, self._kernels[name.decode()]

    def cuFuncSetAttribute(self, function: Any, attribute: Any, value: int) -> tuple[Any, ...]:
        return (OK,)

    def cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra) -> tuple[Any, ...]:
        assert by == bz == 1
        assert extra == 0
        # As the driver: arguments are read now, through the array of their addresses.
        arguments = function.read(parameters)
        self._gpu.enqueue(lambda: function(self._gpu, (gx, gy, gz), arguments))
        return (OK,)


class RowKernel:
    """`commit_rows` or `gather_rows` on a FakeGpu, with the parameters that Triton's have."""

    def __init__(self, reference: Callable[..., None]) -> None:
        self._reference = reference

    def read(self, parameters: int) -> tuple[int, ...]:
        places = (ctypes.c_void_p * 7).from_address(parameters)
        pointers = [ctypes.c_uint64.from_address(place).value for place in places[:4]]
        assert [ctypes.c_uint64.from_address(place).value for place in places[5:]] == [0, 0], "Triton's own are null"
        return (*pointers, ctypes.c_int32.from_address(places[4]).value)

    def __call__(self, gpu: FakeGpu, grid: tuple[int, int, int], arguments: tuple[int, ...]) -> None:
        pools_at, rows_at, sizes_at, slots_at, count = arguments
        number = grid[0]
        assert 1 <= grid[1] <= count
        assert grid[2] == 1
        pools = gpu.array(pools_at, 8 * number).view(np.int64)
        rows = gpu.array(rows_at, 8 * number).view(np.int64)
        sizes = gpu.array(sizes_at, 4 * number).view(np.int32)
        slots = gpu.array(slots_at, 8 * count).view(np.int64)
        for pool, row, size in zip(pools.tolist(), rows.tolist(), sizes.tolist(), strict=True):
            assert pool % 16 == row % 16 == size % 2 == 0
            room = (int(slots.max()) + 1) * size
            held = gpu.array(pool, max(room, 0)).reshape(-1, size)
            moved = gpu.array(row, count * size).reshape(count, size)
            self._reference([held], [moved], slots)
