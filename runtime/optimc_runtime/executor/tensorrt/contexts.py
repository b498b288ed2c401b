"""Execution contexts bound to our memory, and the CUDA graphs captured from them.

Decode-like calls come in few shapes. Each has a context of its own, whose shapes and addresses are set once; it runs as
it is the first time, and is then captured, while the device is busy with it anyway. From the second time on a call is
one launch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import ExitStack, suppress

from optimc.errors import EngineError
from optimc_runtime.executor.tensorrt.cuda import CudaDevice, CudaGraph, Pointer
from optimc_runtime.executor.tensorrt.engine import TensorRtContext, TensorRtEngine

MOST_SHAPES = 48
"""Contexts and graphs kept of an engine; the one that rested longest makes room."""

GRAPHS_VARIABLE = "OPTIMC_CUDA_GRAPHS"
"""Environment variable: 0 runs every call without a CUDA graph."""

Inputs = Mapping[str, tuple[Pointer, tuple[int, ...]]]
"""Address and shape of inputs by name."""


class ContextMaker:
    """Makes contexts of one profile of an engine, which all compute in the same `scratch`."""

    def __init__(
        self,
        engine: TensorRtEngine,
        profile: int,
        scratch: Pointer,
        inputs: Inputs,
        outputs: Mapping[str, Pointer],
    ) -> None:
        """`inputs` are those that are the same in every call, `outputs` all there are: their shapes follow."""
        self._engine, self._profile, self._scratch = engine, profile, scratch
        self._inputs, self._outputs = inputs, outputs

    def make(self, *, fixed_shapes: bool) -> TensorRtContext:
        """Return a context, to be closed by the caller."""
        context = self._engine.context(self._profile, self._scratch, fixed_shapes=fixed_shapes)
        try:
            bind(context, self._inputs)
            for name, address in self._outputs.items():
                context.set_address(name, address)
        except EngineError:
            context.close()
            raise
        return context


def bind(context: TensorRtContext, inputs: Inputs) -> None:
    """Tell a context where its inputs lie and what shapes they have."""
    for name, (address, shape) in inputs.items():
        context.set_shape(name, shape)
        context.set_address(name, address)


class RepeatedShapes:
    """Runs calls whose shapes come back."""

    def __init__(self, device: CudaDevice, maker: ContextMaker, *, graphs: bool, most: int = MOST_SHAPES) -> None:
        """Without `graphs`, contexts are kept and every call is enqueued anew."""
        self._device, self._maker, self._graphs, self._most = device, maker, graphs, most
        self._contexts: OrderedDict[tuple[tuple[int, ...], ...], TensorRtContext] = OrderedDict()
        self._captured: dict[tuple[tuple[int, ...], ...], CudaGraph] = {}
        self._uncaptured: list[tuple[tuple[int, ...], ...]] = []

    @property
    def num_graphs(self) -> int:
        """Shapes that are captured now."""
        return len(self._captured)

    def run(self, inputs: Inputs) -> None:
        """Enqueue the engine on inputs, whose addresses must follow from their shapes."""
        key = tuple(shape for _, shape in inputs.values())
        if key in self._captured:
            self._contexts.move_to_end(key)
            self._captured[key].launch()
            return
        if key in self._contexts:
            self._contexts.move_to_end(key)
            self._contexts[key].enqueue()
            return
        self._make_room()
        context = self._maker.make(fixed_shapes=True)
        try:
            bind(context, inputs)
            context.enqueue()
        except EngineError:
            with suppress(EngineError):  # the first error says more
                self._device.synchronize()  # part of what was refused may be running
            context.close()
            raise
        self._contexts[key] = context
        if self._graphs and context.is_capturable:
            self._uncaptured.append(key)

    def capture_new(self) -> None:
        """Capture what has run once. The host's work alone: call it while the device is busy.

        Raises EngineError if CUDA or TensorRT refuses.
        """
        while self._uncaptured:
            key = self._uncaptured.pop()
            try:
                self._captured[key] = self._device.capture(self._contexts[key].enqueue)
            except EngineError as error:
                raise EngineError(f"{error}; set {GRAPHS_VARIABLE}=0 to run without CUDA graphs") from error

    def close(self) -> None:
        """Let go of all graphs and contexts; none may be running."""
        with ExitStack() as closing:
            for context in self._contexts.values():
                closing.callback(context.close)
            for graph in self._captured.values():
                closing.callback(graph.close)
        self._contexts.clear()
        self._captured.clear()
        self._uncaptured.clear()

    def _make_room(self) -> None:
        if len(self._contexts) < self._most:
            return
        self._device.synchronize()  # it may be running
        key, context = self._contexts.popitem(last=False)
        graph = self._captured.pop(key, None)
        if graph is not None:
            graph.close()
        elif key in self._uncaptured:
            self._uncaptured.remove(key)
        context.close()
