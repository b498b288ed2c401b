"""Runs a step's calls: from a laid-out call to logits on their way back and K/V rows on their way to the pool."""

from __future__ import annotations

from contextlib import ExitStack
from math import prod

import numpy as np
from numpy.typing import NDArray

from optimc.errors import EngineError
from optimc.plan.tensorrt_program import TensorRtProgram
from optimc_runtime.executor.base import StepPlan
from optimc_runtime.executor.tensorrt.call_inputs import SLOTS, arrays_in, fill_inputs, lay_out_call, place_inputs
from optimc_runtime.executor.tensorrt.calls import Call
from optimc_runtime.executor.tensorrt.contexts import ContextMaker, RepeatedShapes, bind
from optimc_runtime.executor.tensorrt.cuda import CudaDevice, Pointer
from optimc_runtime.executor.tensorrt.engine import TensorRtEngine
from optimc_runtime.executor.tensorrt.host_rows import HostRows
from optimc_runtime.executor.tensorrt.model_memory import ModelMemory
from optimc_runtime.executor.tensorrt.row_kernels import RowKernels

_SLOT_BYTES = 8


class CallRunner:
    """The model's engine at work on its memory."""

    def __init__(
        self,
        device: CudaDevice,
        engine: TensorRtEngine,
        program: TensorRtProgram,
        memory: ModelMemory,
        kernels: RowKernels,
        *,
        block_size: int,
        scratch: Pointer,
        graphs: bool,
    ) -> None:
        """Make the contexts. Everything that is passed stays the caller's."""
        self._attention, self._profiles = program.attention, program.model.profiles
        self._inputs = frozenset(name for name, port in engine.ports.items() if port.is_input)
        self._memory, self._kernels, self._block_size = memory, kernels, block_size
        self._answered = device.event()
        with ExitStack() as resources:
            resources.callback(self._answered.close)
            names = [profile.name for profile in self._profiles]
            makers = {
                name: ContextMaker(engine, index, scratch, memory.inputs, memory.outputs)
                for index, name in enumerate(names)
            }
            self._chunks = makers["prefill"].make(fixed_shapes=False)
            resources.callback(self._chunks.close)
            self._decodes = RepeatedShapes(device, makers["decode"], graphs=graphs)
            resources.callback(self._decodes.close)
            self._resources = resources.pop_all()

    @property
    def num_graphs(self) -> int:
        """CUDA graphs held now."""
        return self._decodes.num_graphs

    def enqueue(self, plan: StepPlan, call: Call, logits: HostRows, hidden: HostRows | None) -> None:
        """Enqueue a call. Its rows of logits and hidden states are there once `wait` returns; its K/V rows once the
        stream has come so far."""
        group, attention, memory = call.group, self._attention, self._memory
        laid_out = lay_out_call(plan, group, attention, self._block_size, memory.null_row)
        shapes = laid_out.shapes
        if call.is_decode:
            shapes = shapes.rounded_up(self._profiles[call.profile].largest)
        places, nbytes = place_inputs(shapes, attention)
        fill_inputs(arrays_in(memory.staging.take(), places), plan, group, laid_out, attention, memory.null_row)
        memory.staging.send(nbytes)
        base = memory.staging.address
        inputs = {
            name: (Pointer(base + place.offset), place.shape) for name, place in places.items() if name in self._inputs
        }
        if call.is_decode:
            self._decodes.run(inputs)
        else:
            bind(self._chunks, inputs)
            self._chunks.enqueue()
        logits.download(group.rows, memory.logits)
        if hidden is not None and memory.hidden is not None:
            hidden.download(group.rows, memory.hidden)
        # The host waits for what is in front of this, so the last call's rows are committed while it samples.
        self._answered.record()
        self._kernels.commit(Pointer(base + places[SLOTS].offset), prod(places[SLOTS].shape))

    def wait(self) -> None:
        """Capture what ran for the first time, then wait for the logits of all calls."""
        self._decodes.capture_new()
        self._answered.wait()

    def move(self, src_slots: NDArray[np.int64], dst_slots: NDArray[np.int64]) -> None:
        """Enqueue copying pool rows [N], as if all were read before any is written.

        Raises EngineError for more than a call has tokens: they pass through where a call's rows lie.
        """
        count, memory = len(src_slots), self._memory
        if count > memory.most_tokens:
            raise EngineError(f"more rows than the {memory.most_tokens} there is room for on the way")
        buffer = memory.staging.take()
        slots = buffer[: 2 * count * _SLOT_BYTES].view(np.int64).reshape(2, count)
        slots[0], slots[1] = src_slots, dst_slots
        memory.staging.send(slots.nbytes)
        base = memory.staging.address
        self._kernels.move(base, Pointer(base + count * _SLOT_BYTES), count)

    def close(self) -> None:
        """Let go of contexts and graphs; nothing may be running."""
        self._resources.close()
