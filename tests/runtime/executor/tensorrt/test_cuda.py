"""How CUDA is called, held against the real module: on a machine without a GPU its functions cannot be, but they say
what they take."""

from __future__ import annotations

import inspect
import re
import threading
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as real

from optimc.errors import EngineError
from optimc_runtime.executor.tensorrt import cuda, requirements
from optimc_runtime.executor.tensorrt.cuda import CudaDevice

from .fake_gpu import FakeDriver


def called_functions() -> dict[str, int]:
    """Name of each driver function in our sources to its number of arguments there."""
    source = inspect.getsource(cuda) + inspect.getsource(requirements)
    calls = {}
    for match in re.finditer(r'(?:_call|checked_call)\((?:driver, )?\s*"(cu\w+)"((?:[^()]|\([^()]*\))*)\)', source):
        name, arguments = match.groups()
        calls[name] = len([part for part in re.split(r",(?![^(]*\))", arguments) if part.strip()])
    for match in re.finditer(r"driver\.(cu\w+)\(([^()]*)\)", source):
        calls[match[1]] = len([part for part in match[2].split(",") if part.strip()])
    return calls


def test_every_function_that_is_called_exists_and_takes_so_many_arguments() -> None:
    calls = called_functions()
    assert len(calls) > 30
    for name, count in calls.items():
        signature = str(getattr(real, name).__doc__).split("\n", 1)[0]
        takes = signature[signature.index("(") + 1 : signature.rindex(")")]
        parameters = [part for part in re.split(r",(?![^\[]*\])", takes) if part.strip()]
        wanted = 11 if name == "cuLaunchKernel" else count  # its grid is starred
        assert len(parameters) == wanted, f"{signature}: called with {count}"
        fake = inspect.signature(getattr(FakeDriver, name)).parameters
        assert len(fake) - 1 == len(parameters), f"the fake {name} takes others than {signature}"


def test_every_enumeration_that_is_named_exists() -> None:
    source = inspect.getsource(cuda)
    for kind, member in (
        ("CUstream_flags", "CU_STREAM_NON_BLOCKING"),
        ("CUevent_flags", "CU_EVENT_DISABLE_TIMING"),
        ("CUstreamCaptureMode", "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL"),
        ("CUfunction_attribute", "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"),
        ("CUdevice_attribute", "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR"),
    ):
        assert member in source
        assert hasattr(getattr(real, kind), member)


def test_an_error_names_the_call_and_the_code(machine: Any) -> None:
    device = CudaDevice(machine.driver)
    machine.gpu.fail["cuMemAlloc"] = real.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(
        EngineError,
        match="^1,099,511,627,776 bytes of device memory: CUDA's cuMemAlloc failed with CUDA_ERROR_OUT_OF_MEMORY: ",
    ):
        device.allocate(1 << 40)
    device.close()


@pytest.mark.parametrize("nbytes", [1 << 60, 1 << 70])
def test_more_than_the_host_has_is_an_error_of_ours(machine: Any, nbytes: int) -> None:
    device = CudaDevice(machine.driver)
    with pytest.raises(EngineError, match=f"^{nbytes:,} bytes of page-locked memory: "):
        device.host_buffer(nbytes)
    device.close()


def test_a_thread_that_has_not_activated_the_gpu_can_do_nothing_with_it(machine: Any) -> None:
    """What the driver does; `execute` and its like may come from any thread."""
    device, told = CudaDevice(machine.driver), []

    def work() -> None:
        try:
            device.synchronize()
        except EngineError as error:
            told.append(str(error))
        device.activate()
        device.synchronize()
        told.append("activated")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "CUDA_ERROR_INVALID_CONTEXT" in told[0]
    assert told[1:] == ["activated"]
    device.close()


def test_memory_goes_there_and_back(machine: Any) -> None:
    device = CudaDevice(machine.driver)
    assert (device.name, device.architecture) == ("Fake GPU", "sm_89")
    pointer, there = device.allocate(64), np.arange(16, dtype=np.float32)
    back = device.host_buffer(64)
    device.upload(pointer, there)
    device.clear(cuda.Pointer(pointer + 32), 32)
    device.download(back, pointer)
    assert not back.any(), "nothing has run yet"
    device.synchronize()
    np.testing.assert_array_equal(back.view(np.float32), np.where(there < 8, there, 0))
    device.release_host(back)
    device.free(pointer)
    device.close()
    assert machine.gpu.num_alive == 0


def test_a_failed_capture_ends_it(machine: Any) -> None:
    device = CudaDevice(machine.driver)
    pointer = device.allocate(64)

    def enqueue() -> None:
        device.clear(pointer, 64)
        raise EngineError("no")

    with pytest.raises(EngineError, match="no"):
        device.capture(enqueue)
    with pytest.raises(EngineError, match="cuStreamSynchronize failed with CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"):
        device.capture(device.synchronize)
    graph = device.capture(lambda: device.clear(pointer, 64))
    graph.launch()
    device.synchronize()
    assert not machine.gpu.array(pointer, 64).any()
    graph.close()
    device.free(pointer)
    device.close()
    assert machine.gpu.num_alive == 0


class TypeCheckedDriver:
    """The fake driver behind the real module's own conversions of arguments. Without a driver the real functions get as
    far as that, and then find no library."""

    def __init__(self, fake: FakeDriver) -> None:
        self._fake = fake
        self.checked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._fake, name)
        if not name.startswith("cu"):
            return found

        def call(*arguments: Any) -> Any:
            # The fake's functions are objects of Python; to the driver they are handles.
            real_arguments = [0 if callable(argument) else argument for argument in arguments]
            with pytest.raises(RuntimeError, match="NVIDIA driver library"):
                getattr(real, name)(*real_arguments)
            self.checked.add(name)
            return found(*arguments)

        return call


def test_the_real_module_takes_the_arguments_it_is_given(plan_kernels: Any, machine: Any) -> None:
    try:
        real.cuInit(0)
        pytest.skip("this machine has a driver")
    except RuntimeError:
        pass
    driver = TypeCheckedDriver(machine.driver)
    device = CudaDevice(driver)
    assert (device.name, device.architecture) == ("Fake GPU", "sm_89")
    assert device.memory()[0] > 0
    pointer, buffer = device.allocate(1 << 12), device.host_buffer(1 << 12)
    begin, end = device.event(timed=True), device.event()
    begin.record()
    device.upload(pointer, buffer)
    device.download(buffer, pointer)
    graph = device.capture(lambda: device.clear(pointer, 64))
    graph.launch()
    kernel = device.kernel(b"image", "commit_rows", plan_kernels, 4, 50_000)
    with pytest.raises(AssertionError, match="no more values than arguments"):
        kernel.launch((1, 1, 1), *range(8))
    kernel.launch((1, 1, 1), pointer, pointer, pointer, pointer, 1)
    machine.gpu.queue.clear()  # it would commit nonsense
    end.record()
    end.wait()
    device.synchronize()
    assert end.seconds_since(begin) == 1.5e-3
    machine.gpu.fail["cuMemAlloc"] = real.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(EngineError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        device.allocate(1)
    for part in (kernel, graph, begin, end):
        part.close()
    device.release_host(buffer)
    device.free(pointer)
    device.close()
    assert machine.gpu.num_alive == 0
    assert driver.checked >= set(called_functions()) - {"cuDeviceGetCount"}


@pytest.fixture
def plan_kernels() -> tuple[str, ...]:
    """Types of a row kernel's arguments."""
    return ("*i64", "*i64", "*i32", "*i64", "i32", "*i8", "*i8")
