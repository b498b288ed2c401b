"""TensorRT's Python API over ONNX Runtime: `FakeTensorRt` stands for the module tensorrt_rtx.

An "engine" is the ONNX model itself. What TensorRT insists on, this does too: shapes inside the profile, every port
with an address, memory to compute in, one run before a capture. A captured graph keeps the shapes and addresses of its
capture, and refuses to run if the context's have changed since. Enumerations are the real module's.
"""

from __future__ import annotations

import threading
from math import prod
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import tensorrt_rtx as real

from optimc_passes.emit.tensorrt.profiles import input_shapes

from .fake_gpu import DeviceError, FakeGpu

VERSION = "9.9.9.1"

NUMPY = {
    onnx.TensorProto.FLOAT: (np.dtype(np.float32), "FLOAT"),
    onnx.TensorProto.FLOAT16: (np.dtype(np.float16), "HALF"),
    onnx.TensorProto.BFLOAT16: (np.dtype(ml_dtypes.bfloat16), "BF16"),
    onnx.TensorProto.INT8: (np.dtype(np.int8), "INT8"),
    onnx.TensorProto.INT64: (np.dtype(np.int64), "INT64"),
    onnx.TensorProto.BOOL: (np.dtype(np.bool_), "BOOL"),
}


class FakeTensorRt(SimpleNamespace):
    """The module. `profiles` are those of every engine, by its number of inputs' letters: with N, or without."""

    ILogger = real.ILogger
    TensorIOMode = real.TensorIOMode
    EngineValidity = real.EngineValidity
    EngineInvalidityDiagnostics = real.EngineInvalidityDiagnostics
    ExecutionContextAllocationStrategy = real.ExecutionContextAllocationStrategy
    DynamicShapesKernelSpecializationStrategy = real.DynamicShapesKernelSpecializationStrategy
    CudaGraphStrategy = real.CudaGraphStrategy
    TensorLocation = real.TensorLocation

    def __init__(self, gpu: FakeGpu, profiles: Any, draft_profiles: Any) -> None:
        super().__init__(__name__="tensorrt_rtx", __version__=VERSION)
        self.gpu, self.profiles, self.draft_profiles = gpu, profiles, draft_profiles
        self.validity = (real.EngineValidity.VALID, 0)
        self.enqueued: list[dict[str, tuple[int, ...]]] = []
        """Shapes of each input of each run that was enqueued by itself, without a graph."""
        self.fail_runs = 0
        """How many of the next runs TensorRT refuses."""
        self.num_contexts = 0
        self.alive: WeakSet[FakeContext] = WeakSet()
        """Contexts that somebody still refers to."""
        self.refuse_shapes = False
        self.configs: list[FakeConfig] = []
        self.on_host: tuple[str, ...] = ()
        """Ports that want the host's memory."""

    def Runtime(self, log: Any) -> FakeRuntime:
        return FakeRuntime(self, log)


class FakeRuntime:
    def __init__(self, trt: FakeTensorRt, log: Any) -> None:
        self._trt, self._log = trt, log

    def get_engine_validity(self, blob: Any) -> tuple[Any, int]:
        return self._trt.validity

    def deserialize_cuda_engine(self, blob: Any) -> FakeEngine | None:
        try:
            return FakeEngine(self._trt, self._log, onnx.load_model_from_string(bytes(blob)))
        except Exception:
            self._log.log(real.ILogger.Severity.ERROR, "the magic tag does not match\n")
            return None


class FakeEngine:
    def __init__(self, trt: FakeTensorRt, log: Any, model: onnx.ModelProto) -> None:
        self._trt, self._log = trt, log
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        providers = ["CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=providers)
        self.inputs = {value.name: _dims(value) for value in model.graph.input}
        self.outputs = {value.name: _dims(value) for value in model.graph.output}
        self.types = {
            value.name: NUMPY[value.type.tensor_type.elem_type] for value in (*model.graph.input, *model.graph.output)
        }
        is_draft = any("N" in dims for dims in self.inputs.values())
        self.profiles = trt.draft_profiles if is_draft else trt.profiles
        self.names = [*self.inputs, *self.outputs]
        self.num_io_tensors = len(self.names)
        self.num_optimization_profiles = len(self.profiles)
        self.device_memory_size_v2 = 1000 if is_draft else 4096

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=self.types[name][1])

    def get_tensor_mode(self, name: str) -> Any:
        return real.TensorIOMode.INPUT if name in self.inputs else real.TensorIOMode.OUTPUT

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        dims = self.inputs.get(name) or self.outputs[name]
        return tuple(dim if isinstance(dim, int) else -1 for dim in dims)

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        return list(input_shapes(self.inputs[name], self.profiles[profile]))

    def get_tensor_location(self, name: str) -> Any:
        return real.TensorLocation.HOST if name in self._trt.on_host else real.TensorLocation.DEVICE

    def create_runtime_config(self) -> Any:
        config = FakeConfig()
        self._trt.configs.append(config)
        return config

    def create_execution_context(self, config: FakeConfig) -> FakeContext:
        assert config.allocation == real.ExecutionContextAllocationStrategy.USER_MANAGED
        assert config.cuda_graph_strategy == real.CudaGraphStrategy.DISABLED
        self._trt.num_contexts += 1
        return FakeContext(self._trt, self._log, self)


class FakeConfig:
    """How contexts are to run; only what is set exists."""

    allocation: Any
    cuda_graph_strategy: Any
    dynamic_shapes_kernel_specialization_strategy: Any
    cache: Any

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.allocation = strategy

    def create_runtime_cache(self) -> object:
        return object()

    def set_runtime_cache(self, cache: object) -> bool:
        self.cache = cache
        return True


class FakeContext:
    def __init__(self, trt: FakeTensorRt, log: Any, engine: FakeEngine) -> None:
        assert threading.get_ident() in trt.gpu.threads, "TensorRT works in the current context"
        trt.alive.add(self)
        self._trt, self._log, self._engine = trt, log, engine
        self._profile: int | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._ran: Any = None
        self._memory = 0

    def set_device_memory(self, pointer: int, nbytes: int) -> None:
        self._trt.gpu.array(pointer, nbytes)
        self._memory = nbytes

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self._profile = index
        return index < len(self._engine.profiles)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self._profile is not None
        low, _, high = self._engine.get_tensor_profile_shape(name, self._profile)
        if (
            self._trt.refuse_shapes
            or len(shape) != len(high)
            or any(not a <= b <= c for a, b, c in zip(low, shape, high, strict=True))
        ):
            return self._refuse(f"'{name}' {shape} is outside {low} to {high}")
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, pointer: int) -> bool:
        assert name in self._engine.names
        self._addresses[name] = int(pointer)
        return True

    def is_stream_capturable(self, stream: int) -> bool:
        return True

    def execute_async_v3(self, stream: int) -> bool:
        assert threading.get_ident() in self._trt.gpu.threads, "TensorRT works in the current context"
        if self._trt.fail_runs:
            self._trt.fail_runs -= 1
            return self._refuse("out of luck")
        for name in self._engine.names:
            if name not in self._addresses or (name in self._engine.inputs and name not in self._shapes):
                return self._refuse(f"'{name}' has no address or no shape")
        assert self._memory >= self._engine.device_memory_size_v2
        shapes, addresses = dict(self._shapes), dict(self._addresses)
        if self._trt.gpu.capturing is None:
            self._ran = (shapes, addresses)
            self._trt.enqueued.append(shapes)
        elif self._ran != (shapes, addresses):
            return self._refuse("captured before it ran once with these shapes")
        captured = self._trt.gpu.capturing is not None

        def work() -> None:
            assert not captured or self._ran == (shapes, addresses), "the context has changed since it was captured"
            self._run(shapes, addresses)

        self._trt.gpu.enqueue(work)
        return True

    def _run(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        engine, gpu = self._engine, self._trt.gpu
        feeds = {}
        for name, shape in shapes.items():
            dtype = engine.types[name][0]
            feeds[name] = gpu.array(addresses[name], prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
        values = {name: _value(array) for name, array in feeds.items()}
        names = list(engine.outputs)
        try:
            outputs = engine.session.run_with_ort_values(names, values)
        except Exception as error:
            raise DeviceError(real_code("CUDA_ERROR_LAUNCH_FAILED")) from error
        for name, value in zip(names, outputs, strict=True):
            data = np.ascontiguousarray(value.numpy()).reshape(-1).view(np.uint8)
            gpu.array(addresses[name], data.nbytes)[:] = data

    def _refuse(self, reason: str) -> bool:
        self._log.log(real.ILogger.Severity.ERROR, reason)
        return False


def real_code(name: str) -> Any:
    from cuda.bindings import driver

    return driver.CUresult[name]


def _value(array: np.ndarray) -> onnxruntime.OrtValue:
    if array.dtype == ml_dtypes.bfloat16:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
            np.ascontiguousarray(array).view(np.uint16), onnx.TensorProto.BFLOAT16
        )
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))


def _dims(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    dims = value.type.tensor_type.shape.dim
    return tuple(dim.dim_param or dim.dim_value for dim in dims)
