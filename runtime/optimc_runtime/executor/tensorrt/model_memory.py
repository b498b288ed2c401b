"""Everything in device memory that the model's engine reads and writes, beside its weights.

Letters: P blocks, S slots per block, T tokens and R logits rows of a call, V vocabulary, d hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from optimc.plan import Plan
from optimc.plan.tensorrt_program import ShapeLetter, TensorRtAttention, TensorRtProgram
from optimc_runtime.executor.tensorrt.call_inputs import place_inputs
from optimc_runtime.executor.tensorrt.call_shapes import CallShapes
from optimc_runtime.executor.tensorrt.contexts import Inputs
from optimc_runtime.executor.tensorrt.cuda import CudaDevice, Pointer
from optimc_runtime.executor.tensorrt.pool import CacheRows, CacheTensor, check_free_memory, rows_bytes
from optimc_runtime.executor.tensorrt.staging import Staging

_FLOAT_BYTES = 4


class ModelMemory:
    """Inputs on their way, the pool, a call's new rows, logits and hidden states."""

    def __init__(
        self,
        plan: Plan,
        program: TensorRtProgram,
        device: CudaDevice,
        tensors: Sequence[CacheTensor],
        num_blocks: int,
    ) -> None:
        """Allocate it for the largest calls and so many blocks, the pool last.

        Raises PlanTargetError if the device has too little memory free.
        """
        model, largest = plan.manifest.model, [profile.largest for profile in program.model.profiles]
        self.null_row = num_blocks * plan.manifest.kv.block_size
        """The pool's row behind all blocks; it stays zero."""
        self.most_tokens = max(sizes["T"] for sizes in largest)
        most_rows = max(sizes["R"] for sizes in largest)
        num_rows = self.null_row + 1
        with ExitStack() as resources:
            self.staging = Staging(device, max(_input_bytes(program.attention, sizes) for sizes in largest))
            resources.callback(self.staging.close)
            self.step = CacheRows(device, tensors, self.most_tokens)
            """What the engine writes, [T, columns] each; between steps it is nobody's."""
            resources.callback(self.step.close)
            self.logits = _allocate(device, resources, most_rows * model.vocab_size)
            """float32 [R, V]"""
            self.hidden = (
                None if program.hidden is None else _allocate(device, resources, most_rows * model.hidden_size)
            )
            """float32 [R, d]"""
            check_free_memory(plan.path, device, rows_bytes(tensors, num_rows))
            self.pool = CacheRows(device, tensors, num_rows)
            resources.callback(self.pool.close)
            device.synchronize()
            self._resources = resources.pop_all()
        self.inputs: Inputs = {
            tensor.pool: (address, (num_rows, tensor.columns))
            for tensor, address in zip(tensors, self.pool.addresses, strict=True)
        }
        """The engine's inputs that are the same in every call."""
        self.outputs: dict[str, Pointer] = {"logits": self.logits}
        """All of the engine's outputs."""
        if program.hidden is not None and self.hidden is not None:
            self.outputs[program.hidden] = self.hidden
        self.outputs |= {tensor.step: address for tensor, address in zip(tensors, self.step.addresses, strict=True)}

    def close(self) -> None:
        """Free everything."""
        self._resources.close()


def _allocate(device: CudaDevice, resources: ExitStack, floats: int) -> Pointer:
    pointer = device.allocate(floats * _FLOAT_BYTES)
    resources.callback(device.free, pointer)
    return pointer


def _input_bytes(attention: TensorRtAttention, largest: Mapping[ShapeLetter, int]) -> int:
    """Return what the inputs of a profile's largest call take."""
    contexts = (largest["C"],) * len(attention.windows)
    shapes = CallShapes(largest["T"], largest["B"], largest["Q"], largest["R"], contexts)
    return place_inputs(shapes, attention)[1]
