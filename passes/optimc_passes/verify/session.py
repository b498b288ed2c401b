"""Run dialect graphs on a probe with onnxruntime, as written: our operators decomposed, nothing optimized.

Graphs of one build share their weights. A `WeightPool` computes each weight expression once and lends the array to
every session, so that a graph costs what its nodes cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from optimc.wording import one_line
from optimc_passes.dialect.decompose import decompose_causal
from optimc_passes.graph.weight_expression import Expression, Store
from optimc_passes.graph.weight_tensor import WeightTensor
from optimc_passes.verify.probe import Probe

POOL_BYTES = 2 << 30
"""Weights kept between runs. A 135M model in float32 is a quarter of it; of a larger one, what does not fit is computed
in each run."""

_Key = tuple[int, Expression]


@dataclass
class _Entry:
    value: Any
    """onnxruntime.OrtValue over an array of ours."""
    nbytes: int
    store: Store
    """Held so that the store's id, which is part of the key, stays its own."""
    last_run: int


class WeightPool:
    """Weights as onnxruntime takes them, by the expression they are computed from."""

    def __init__(self, limit_bytes: int = POOL_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._entries: dict[_Key, _Entry] = {}
        self._runs = 0

    def lend(self, weights: Mapping[str, WeightTensor]) -> dict[str, Any]:
        """Return the OrtValue of each weight of one graph, computed now or kept from before."""
        self._runs += 1
        for tensor in weights.values():
            entry = self._entries.get(_key(tensor))
            if entry is not None:
                entry.last_run = self._runs
        return {name: self._value(tensor) for name, tensor in weights.items()}

    def _value(self, tensor: WeightTensor) -> Any:
        key = _key(tensor)
        if key not in self._entries:
            value, nbytes = _ort_value(tensor)
            if not self._make_room(nbytes):
                return value
            self._entries[key] = _Entry(value, nbytes, tensor.store, self._runs)
        return self._entries[key].value

    def _make_room(self, nbytes: int) -> bool:
        """Drop what no graph of this run has used, the longest unused first, as far as needed."""
        free = self._limit_bytes - sum(entry.nbytes for entry in self._entries.values())
        idle = [(entry.last_run, key) for key, entry in self._entries.items() if entry.last_run < self._runs]
        for _, key in sorted(idle, key=lambda pair: pair[0]):
            if free >= nbytes:
                break
            free += self._entries.pop(key).nbytes
        return free >= nbytes


def _key(tensor: WeightTensor) -> _Key:
    return id(tensor.store), tensor.expression


def run_probe(model: ir.Model, probe: Probe, names: Sequence[str], pool: WeightPool) -> dict[str, NDArray[Any]]:
    """Return the values of `names`, which the graph's nodes compute, on the probe's tokens.

    Only what leads to them is run. Raises RuntimeError with onnxruntime's words if it cannot run it.
    """
    import onnxruntime

    model = decompose_causal(model)
    _keep_only(model, names)
    weights = {}
    for name, initializer in model.graph.initializers.items():
        tensor = initializer.const_value
        if isinstance(tensor, WeightTensor):
            # Declared to lie outside the model's file, then lent to the session under the same name.
            weights[name] = tensor
            outside = ir.ExternalTensor(name, 0, tensor.nbytes, tensor.dtype, shape=tensor.shape, name=name)
            initializer.const_value = outside
    lent = pool.lend(weights)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    # A weight is used once in a session's life: a copy in another layout does not pay.
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.add_external_initializers(list(lent), list(lent.values()))
    options.log_severity_level = 4  # what it has to say comes with the error
    try:
        session = onnxruntime.InferenceSession(
            ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        wanted = {node.name for node in session.get_inputs()}
        offered = {name: array for name, array in probe.inputs().items() if name in wanted}
        return dict(zip(names, session.run(list(names), offered), strict=True))
    except Exception as error:  # onnxruntime's errors have no base of their own
        raise RuntimeError(one_line(error)) from error


def _keep_only(model: ir.Model, names: Sequence[str]) -> None:
    """Make the values of these names the outputs, in place, and remove what does not lead to them."""
    outputs = model.graph.outputs
    computed = {value.name: value for node in model.graph for value in node.outputs}
    outputs.clear()
    outputs.extend(computed[name] for name in names)
    RemoveUnusedNodesPass()(model)


def _ort_value(tensor: WeightTensor) -> tuple[Any, int]:
    """Return a weight for onnxruntime and the bytes it takes; the value keeps its array alive."""
    from onnxruntime import OrtValue

    if tensor.dtype not in (ir.DataType.INT4, ir.DataType.UINT4):
        array = np.ascontiguousarray(tensor.numpy())
        return OrtValue.ortvalue_from_numpy(array), array.nbytes
    # Two codes a byte. NumPy has no such type, and onnxruntime takes the shape from the array it is given: an array of
    # a byte a code whose second half is never touched.
    packed = np.frombuffer(tensor.tobytes(), np.uint8)
    array = np.empty(tensor.shape.numpy(), np.uint8)
    array.reshape(-1)[: packed.size] = packed
    return OrtValue.ortvalue_from_numpy_with_onnx_type(array, int(tensor.dtype)), packed.nbytes
