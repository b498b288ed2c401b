"""Run a dialect graph as written, on a few tokens, with onnxruntime: PagedAttention decomposed, nothing optimized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from optimc_passes.dialect.decompose import decompose_causal
from optimc_passes.graph.weight_tensor import WeightTensor


@dataclass(frozen=True)
class Probe:
    """Tokens at positions 0 .. T-1 of one sequence."""

    tokens: NDArray[np.int64]
    """[T]."""

    @classmethod
    def of_vocabulary(cls, vocab_size: int, length: int = 32, seed: int = 0) -> Probe:
        """Draw tokens evenly from the vocabulary."""
        return cls(np.random.default_rng(seed).integers(0, vocab_size, length, dtype=np.int64))


def evaluate(model: ir.Model, probe: Probe) -> NDArray[np.float32]:
    """Return the logits of every probe token, [T, V].

    Each weight is computed once and handed to the session, so memory peaks at about twice the weights.
    """
    import onnxruntime

    model = decompose_causal(model)
    data = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if isinstance(tensor, WeightTensor):
            # Declared to lie outside the model file, then given to the session from memory under the same name.
            data[name] = tensor.tobytes()
            value.const_value = ir.ExternalTensor(name, 0, len(data[name]), tensor.dtype, shape=tensor.shape, name=name)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_external_initializers_from_files_in_memory(
        list(data), list(data.values()), [len(b) for b in data.values()]
    )
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    del data
    positions = np.arange(len(probe.tokens), dtype=np.int64)
    offered: dict[str, Any] = {"input_ids": probe.tokens, "position_ids": positions, "logits_rows": positions}
    wanted = {node.name for node in session.get_inputs()}
    logits = session.run(["logits"], {name: array for name, array in offered.items() if name in wanted})[0]
    return np.asarray(logits, np.float32)
