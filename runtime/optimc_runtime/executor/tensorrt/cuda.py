"""One GPU through the CUDA driver API: memory, one stream, events, kernels, graphs.

Everything is enqueued on one stream and runs in that order, so buffers may be used again as soon as the next work on
them is enqueued; only what the host writes or reads needs an event. `cuda-bindings` is the driver API itself: no
runtime library, no allocator of its own, 31 MB.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import Any, NewType

import numpy as np
from numpy.typing import NDArray

from optimc.errors import EngineError

Pointer = NewType("Pointer", int)
"""An address in device memory."""

_POINTER = ctypes.c_uint64
_SCALARS: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


class CudaDevice:
    """The first GPU that CUDA_VISIBLE_DEVICES leaves, and the stream everything runs on.

    `driver` is the module `cuda.bindings.driver`. Every method raises EngineError that names the call and CUDA's code.
    Not thread-safe, but any thread may use it after `activate`.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", 0)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        try:
            self.activate()
            self._stream = self._call("cuStreamCreate", int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        except EngineError:
            self._call("cuDevicePrimaryCtxRelease", self._device)
            raise

    @property
    def name(self) -> str:
        """What the driver calls it."""
        raw: bytes = self._call("cuDeviceGetName", 128, self._device)
        return raw.split(b"\0")[0].decode()

    @property
    def architecture(self) -> str:
        """`sm_89` and so on."""
        attribute = self._driver.CUdevice_attribute
        major = self._call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, self._device)
        minor = self._call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, self._device)
        return f"sm_{major}{minor}"

    @property
    def stream(self) -> int:
        """The stream's handle, for TensorRT."""
        return int(self._stream)

    def activate(self) -> None:
        """Make this the calling thread's GPU."""
        self._call("cuCtxSetCurrent", self._context)

    def memory(self) -> tuple[int, int]:
        """Return (free, total) bytes."""
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def allocate(self, nbytes: int) -> Pointer:
        """Return device memory of arbitrary contents, aligned to 256 bytes."""
        try:
            return Pointer(int(self._call("cuMemAlloc", max(1, nbytes))))
        except EngineError as error:
            raise EngineError(f"{nbytes:,} bytes of device memory: {error}") from error

    def free(self, pointer: Pointer) -> None:
        """Give back what `allocate` returned. Waits for what runs."""
        self._call("cuMemFree", pointer)

    def host_buffer(self, nbytes: int) -> NDArray[np.uint8]:
        """Return page-locked memory of zeros, uint8 [nbytes]: copies from and to it run beside the host.

        The memory is the process's own and lives as long as an array refers to it, also after `release_host`. Raises
        EngineError if there is not so much.
        """
        try:
            buffer = np.frombuffer(mmap.mmap(-1, max(1, nbytes)), np.uint8)
        except (OSError, OverflowError) as error:
            raise EngineError(f"{nbytes:,} bytes of page-locked memory: {error}") from error
        self._call("cuMemHostRegister", buffer.ctypes.data, buffer.nbytes, 0)
        return buffer

    def release_host(self, buffer: NDArray[np.uint8]) -> None:
        """Unlock the pages of what `host_buffer` returned."""
        self._call("cuMemHostUnregister", buffer.ctypes.data)

    def clear(self, pointer: Pointer, nbytes: int) -> None:
        """Enqueue writing zeros."""
        self._call("cuMemsetD8Async", pointer, 0, nbytes, self._stream)

    def upload(self, target: Pointer, source: NDArray[Any]) -> None:
        """Enqueue a copy of a contiguous array, whose memory must stay as it is until that has run."""
        assert source.flags.c_contiguous, "a copy is of one piece"
        self._call("cuMemcpyHtoDAsync", target, source.ctypes.data, source.nbytes, self._stream)

    def download(self, target: NDArray[Any], source: Pointer) -> None:
        """Enqueue a copy into a contiguous array, which may be read once that has run."""
        assert target.flags.c_contiguous, "a copy is of one piece"
        self._call("cuMemcpyDtoHAsync", target.ctypes.data, source, target.nbytes, self._stream)

    def synchronize(self) -> None:
        """Wait until all that was enqueued has run."""
        self._call("cuStreamSynchronize", self._stream)

    def event(self, *, timed: bool = False) -> CudaEvent:
        """Return an event that has happened already."""
        flags = self._driver.CUevent_flags
        flag = flags.CU_EVENT_DEFAULT if timed else flags.CU_EVENT_DISABLE_TIMING
        return CudaEvent(self._call, self._stream, self._call("cuEventCreate", int(flag)))

    def kernel(self, image: bytes, function: str, arguments: Sequence[str], num_warps: int, shared: int) -> CudaKernel:
        """Load a kernel: `image` a cubin, or PTX that ends in a zero byte; `arguments` the types of all it takes."""
        held = np.frombuffer(image, np.uint8)
        module = self._call("cuModuleLoadData", held.ctypes.data)
        try:
            handle = self._call("cuModuleGetFunction", module, function.encode())
            if shared:
                attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._call("cuFuncSetAttribute", handle, attribute, shared)
        except EngineError:
            self._call("cuModuleUnload", module)
            raise
        return CudaKernel(self._call, self._stream, module, handle, tuple(arguments), 32 * num_warps, shared)

    def capture(self, enqueue: Callable[[], None]) -> CudaGraph:
        """Return a graph of what `enqueue` enqueues, none of which runs now."""
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", self._stream, mode)
        try:
            enqueue()
        except BaseException:
            # The stream must leave capture mode. What it holds is half of something: dropped, whatever CUDA says of it.
            _, half = self._driver.cuStreamEndCapture(self._stream)
            if half is not None and int(half):
                self._driver.cuGraphDestroy(half)
            raise
        graph = self._call("cuStreamEndCapture", self._stream)
        try:
            return CudaGraph(self._call, self._stream, self._call("cuGraphInstantiate", graph, 0))
        finally:
            self._call("cuGraphDestroy", graph)

    def close(self) -> None:
        """Let go of the stream and the GPU. What else was made here must be closed before."""
        try:
            self._call("cuStreamDestroy", self._stream)
        finally:
            self._call("cuDevicePrimaryCtxRelease", self._device)

    def _call(self, function: str, *arguments: Any) -> Any:
        return checked_call(self._driver, function, *arguments)


class CudaEvent:
    """A place in the stream that the host can wait for."""

    def __init__(self, call: Callable[..., Any], stream: Any, handle: Any) -> None:
        self._call, self._stream, self._handle = call, stream, handle

    def record(self) -> None:
        """Stand behind all that is enqueued now."""
        self._call("cuEventRecord", self._handle, self._stream)

    def wait(self) -> None:
        """Wait until the device has come here; at once if it was never recorded."""
        self._call("cuEventSynchronize", self._handle)

    def seconds_since(self, earlier: CudaEvent) -> float:
        """Return the device's time between two timed events that have happened."""
        return float(self._call("cuEventElapsedTime", earlier._handle, self._handle)) / 1000

    def close(self) -> None:
        """Let go of it."""
        self._call("cuEventDestroy", self._handle)


class CudaKernel:
    """A loaded kernel."""

    def __init__(
        self,
        call: Callable[..., Any],
        stream: Any,
        module: Any,
        handle: Any,
        arguments: tuple[str, ...],
        threads: int,
        shared: int,
    ) -> None:
        self._call, self._stream, self._module, self._handle = call, stream, module, handle
        self._types = tuple(_POINTER if kind.startswith("*") else _SCALARS[kind] for kind in arguments)
        self._threads, self._shared = threads, shared

    def launch(self, grid: tuple[int, int, int], *values: int) -> None:
        """Enqueue it on `grid` of blocks. Arguments that `values` leaves out are null: what Triton adds and our kernels
        have no use for."""
        assert len(values) <= len(self._types), "no more values than arguments"
        given = [*values, *([0] * (len(self._types) - len(values)))]
        held = [kind(value) for kind, value in zip(self._types, given, strict=True)]
        addresses = (ctypes.c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
        place = ctypes.addressof(addresses)
        self._call("cuLaunchKernel", self._handle, *grid, self._threads, 1, 1, self._shared, self._stream, place, 0)

    def close(self) -> None:
        """Unload it."""
        self._call("cuModuleUnload", self._module)


class CudaGraph:
    """Captured work, launched as one."""

    def __init__(self, call: Callable[..., Any], stream: Any, handle: Any) -> None:
        self._call, self._stream, self._handle = call, stream, handle

    def launch(self) -> None:
        """Enqueue it."""
        self._call("cuGraphLaunch", self._handle, self._stream)

    def close(self) -> None:
        """Let go of it; a launch under way still ends."""
        self._call("cuGraphExecDestroy", self._handle)


def checked_call(driver: Any, function: str, *arguments: Any) -> Any:
    """Call a function of the driver API and return what it gives beside its code: nothing, one value or several.

    Raises EngineError with the function's and the code's name.
    """
    code, *results = getattr(driver, function)(*arguments)
    if int(code):
        _, name = driver.cuGetErrorName(code)
        _, text = driver.cuGetErrorString(code)
        words = ": ".join(part.decode() for part in (name, text) if part)
        raise EngineError(f"CUDA's {function} failed with {words or int(code)}")
    return results[0] if len(results) == 1 else tuple(results) or None
