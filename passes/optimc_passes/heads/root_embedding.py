"""What conditioned heads read beside the hidden state: the root token's row of the table the graph looks it up in.

Factors that graph passes folded into the table are in it; a multiplication behind the lookup is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from optimc.errors import LoweringError
from optimc_passes.graph.weight_expression import Codes, Param, Scaled, Scales, TableCodes, TableScales
from optimc_passes.graph.weight_tensor import WeightTensor
from optimc_passes.weights import Quantized, Weight


def root_embedding(model: ir.Model, tokens: NDArray[np.integer]) -> NDArray[np.float32]:
    """Return the rows [n, d] of `tokens` [n] in the embedding of a dialect graph with attached weights.

    Raises LoweringError if the graph looks tokens up in no table of weights.
    """
    lookups = [node for node, _ in model.graph.inputs[0].uses() if node.op_type == "Gather"]
    parts = [part for node in lookups for part in _parts(node.inputs[0])]
    if not parts:
        raise LoweringError("the graph looks tokens up in no table of weights: heads cannot be conditioned on them")
    weight = parts[0].weight
    rows = weight.rows(tokens).dequantize() if isinstance(weight, Quantized) else weight.read()[tokens]
    # Of a table in codes the scales carry the factor; its codes and zero points have none.
    factor = np.prod([part.factor for part in parts])
    return rows.astype(np.float32) * np.float32(factor)


class _Part(NamedTuple):
    """A table, or the codes or the scales of one."""

    weight: Weight
    factor: float


def _parts(value: ir.Value | None) -> Iterator[_Part]:
    """Yield what a table is made of: an initializer, or one dequantized and transposed on the way."""
    if value is None:
        return
    node = value.producer()
    if node is not None:
        for operand in node.inputs:
            yield from _parts(operand)
        return
    if not isinstance(value.const_value, WeightTensor):
        return
    expression, factor = value.const_value.expression, 1.0
    while isinstance(expression, Scaled):
        factor *= expression.factor
        expression = expression.source
    if isinstance(expression, Param | Codes | Scales | TableCodes | TableScales):
        yield _Part(value.const_value.store[expression.name], factor)
