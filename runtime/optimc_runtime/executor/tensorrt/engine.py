"""TensorRT's engines and execution contexts, for both flavors: their Python API is the same but for the module's name.

A context is given all its memory by us: what it computes in (`scratch`, shared by all contexts, since all run on one
stream) and the address of every port. It then may be captured in a CUDA graph. TensorRT's advice is one context per
captured graph, because a captured graph holds what the context knew of its shapes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimc.errors import EngineError, PlanTargetError
from optimc_runtime.executor.tensorrt.cuda import CudaDevice, Pointer

KERNELS_VARIABLE = "OPTIMC_RTX_KERNELS"
"""Environment variable: `eager` has TensorRT-RTX compile kernels for each shape of decode calls when it is met."""

_DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT8": "int8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
}


@dataclass(frozen=True, slots=True)
class EnginePort:
    """An input or output of an engine."""

    dtype: str
    """As NumPy has it, or "bfloat16"."""
    is_input: bool
    shape: tuple[int, ...]
    """-1 where it varies."""
    is_on_device: bool
    """Whether TensorRT reads it from device memory; it reads from the host's what shapes are computed from."""


class TensorRtRuntime:
    """Deserializes engines. `trt` is the module tensorrt or tensorrt_rtx."""

    def __init__(self, trt: Any, device: CudaDevice) -> None:
        self._trt, self._device = trt, device
        self._log = _new_log(trt)
        self._runtime = trt.Runtime(self._log)
        if self._runtime is None:
            raise EngineError(f"{trt.__name__} could not start: {self._log.last}")

    def load(self, blob: NDArray[np.uint8], what: str) -> TensorRtEngine:
        """Return the engine of the serialized `blob` uint8 [bytes]. `what` says in errors where it comes from.

        Raises PlanTargetError if it does not run here, with TensorRT's reasons.
        """
        self._log.last = ""
        if hasattr(self._runtime, "get_engine_validity"):  # RTX only
            validity, faults = self._runtime.get_engine_validity(blob)
            if validity == self._trt.EngineValidity.INVALID:
                raise PlanTargetError(
                    f"{what}: {self._trt.__name__} {self._trt.__version__} says it does not run on {self._device.name} "
                    f"({self._device.architecture}): {self._reasons(int(faults))}; rebuild the plan for this GPU"
                )
        engine = self._runtime.deserialize_cuda_engine(blob)
        if engine is None:
            raise PlanTargetError(
                f"{what}: {self._trt.__name__} {self._trt.__version__} cannot load it on {self._device.name}: "
                f"{self._log.last or 'no reason given'}; it has {blob.nbytes:,} bytes and {self._device.memory()[0]:,} "
                "are free; if that is room enough, rebuild the plan with this version"
            )
        return TensorRtEngine(self._trt, self._device, self._log, engine)

    def close(self) -> None:
        """Let go of it, after all engines."""
        self._runtime = None

    def _reasons(self, faults: int) -> str:
        named = getattr(self._trt, "EngineInvalidityDiagnostics", None)
        members = {} if named is None else named.__members__
        names = [name for name, bit in members.items() if int(bit) & faults]
        return ", ".join(names) or self._log.last or "no reason given"


class TensorRtEngine:
    """A deserialized engine."""

    def __init__(self, trt: Any, device: CudaDevice, log: Any, engine: Any) -> None:
        self._trt, self._device, self._log, self._engine = trt, device, log, engine
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        self.ports = {name: self._port(name) for name in names}
        """By name."""
        self.scratch_bytes = int(engine.device_memory_size_v2)
        """What a context computes in, the largest profile's."""
        self.num_profiles = int(engine.num_optimization_profiles)
        self._is_eager = os.environ.get(KERNELS_VARIABLE) == "eager"
        self._configs: dict[bool, Any] = {}
        self._kernels: Any = None

    def most(self, name: str, profile: int) -> tuple[int, ...]:
        """Return the largest shape of an input in a profile."""
        return tuple(self._engine.get_tensor_profile_shape(name, profile)[2])

    def context(self, profile: int, scratch: Pointer, *, fixed_shapes: bool) -> TensorRtContext:
        """Return a context that computes in `scratch`. `fixed_shapes`: its shapes are set once.

        Raises EngineError if TensorRT makes none.
        """
        # Nothing but `made` refers to TensorRT's object, so that closing is its end even while an error is looked at.
        made = TensorRtContext(self._created(fixed_shapes), self._log, self._device.stream, self._trt.__name__)
        try:
            made.use_memory(scratch, self.scratch_bytes)
            made.use_profile(profile)
        except EngineError:
            made.close()
            raise
        return made

    def close(self) -> None:
        """Let go of the weights, after all contexts."""
        self._configs.clear()
        self._kernels = self._engine = None

    def _created(self, fixed_shapes: bool) -> Any:
        trt = self._trt
        self._log.last = ""
        if hasattr(trt, "DynamicShapesKernelSpecializationStrategy"):  # RTX, which compiles kernels while it serves
            context = self._engine.create_execution_context(self._config(fixed_shapes))
        else:
            strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
            context = self._engine.create_execution_context(strategy)
        if context is None:
            raise EngineError(f"{trt.__name__} made no execution context: {self._log.last or 'no reason given'}")
        return context

    def _config(self, fixed_shapes: bool) -> Any:
        """Return how RTX is to run contexts. They share the kernels it compiles: those of the first are there for all.

        Kernels made for one shape are faster and take a while to compile, in the midst of serving, so there are none
        unless KERNELS_VARIABLE asks; lengths of prompts rarely come back, so for those there never are.
        """
        if fixed_shapes not in self._configs:
            trt = self._trt
            config = self._configs[fixed_shapes] = self._engine.create_runtime_config()
            strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
            config.set_execution_context_allocation_strategy(strategy)
            config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED  # we capture ourselves, for both flavors
            kinds = trt.DynamicShapesKernelSpecializationStrategy
            is_eager = fixed_shapes and self._is_eager
            config.dynamic_shapes_kernel_specialization_strategy = kinds.EAGER if is_eager else kinds.NONE
            if self._kernels is None:
                self._kernels = config.create_runtime_cache()
            config.set_runtime_cache(self._kernels)
        return self._configs[fixed_shapes]

    def _port(self, name: str) -> EnginePort:
        dtype = self._engine.get_tensor_dtype(name).name
        is_input = self._engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT
        is_on_device = self._engine.get_tensor_location(name) == self._trt.TensorLocation.DEVICE
        shape = tuple(self._engine.get_tensor_shape(name))
        return EnginePort(_DTYPES.get(dtype, dtype.lower()), is_input, shape, is_on_device)


class TensorRtContext:
    """An engine with the shapes and addresses of one kind of call. Every method raises EngineError."""

    def __init__(self, context: Any, log: Any, stream: int, library: str) -> None:
        self._context, self._log, self._stream, self._library = context, log, stream, library

    def use_memory(self, scratch: Pointer, nbytes: int) -> None:
        """Say where to compute."""
        self._context.set_device_memory(scratch, nbytes)

    def use_profile(self, profile: int) -> None:
        """Choose the optimization profile; shapes must lie in it."""
        self._check(self._context.set_optimization_profile_async(profile, self._stream), f"profile {profile}")

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Set an input's shape."""
        self._check(self._context.set_input_shape(name, shape), f"shape {list(shape)} of '{name}'")

    def set_address(self, name: str, pointer: Pointer) -> None:
        """Set where a port lies."""
        self._check(self._context.set_tensor_address(name, pointer), f"address of '{name}'")

    def enqueue(self) -> None:
        """Enqueue the engine on the device's stream."""
        self._check(self._context.execute_async_v3(self._stream), "execution")

    @property
    def is_capturable(self) -> bool:
        """Whether TensorRT says that a CUDA graph may hold it; the full flavor does not say, and tries."""
        asked = getattr(self._context, "is_stream_capturable", None)
        return True if asked is None else bool(asked(self._stream))

    def close(self) -> None:
        """Let go of it; nothing of it may be running."""
        self._context = None

    def _check(self, accepted: bool, what: str) -> None:
        if not accepted:
            raise EngineError(f"{self._library} refused {what}: {self._log.last or 'no reason given'}")


def _new_log(trt: Any) -> Any:
    """Return a logger that keeps the last error's text for our own messages and prints nothing."""

    class Log(trt.ILogger):  # type: ignore[misc]  # a class of an untyped module
        def __init__(self) -> None:
            super().__init__()
            self.last = ""

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR):
                self.last = message.strip().replace("\n", " ")

    return Log()
