"""How much a graph moves through memory for one token, if every node reads its operands and writes its results there.

That is what a fusion saves: what lies between two nodes that become one is neither written nor read. Weights are read
as often before as after, and count nothing.
"""

from __future__ import annotations

from math import prod

import onnx_ir as ir

from optimc_passes.dialect import DOMAIN, ROTARY_QKV
from optimc_passes.dialect.rules import INPUTS
from optimc_passes.graph.shapes import inferred

_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Identity", "Split", "Slice", "Flatten"})
"""Operators that name other places of what they are given: a backend need not move anything."""


def activation_bytes_per_token(model: ir.Model) -> int:
    """Return the bytes of float32 activations that the nodes read and write for one token that needs logits.

    Of attention, its operands and result; what it reads from the cache depends on the context and is not counted.
    """
    sizes = _Sizes(model)
    return sum(sizes.bytes_of(value) for node in model.graph for value in _moved(node))


def _moved(node: ir.Node) -> list[ir.Value]:
    """Return what the node reads and writes, a value once for each."""
    if not node.domain and node.op_type in _VIEWS:
        return []
    read, written = list(dict.fromkeys(value for value in node.inputs if value is not None)), list(node.outputs)
    if node.domain == DOMAIN and node.op_type == ROTARY_QKV:
        # Values are columns of the product, as after a Split; so are query and key where nothing happens to them.
        written = written[:2] if len(read) > 1 else []
        read = [*written, *read[1:]]
    return [*read, *written]


class _Sizes:
    """Bytes of values for one token; nothing for what does not depend on the token."""

    def __init__(self, model: ir.Model) -> None:
        self._depends: set[ir.Value] = set(model.graph.inputs[: len(INPUTS)])
        for node in model.graph:
            if any(value in self._depends for value in node.inputs):
                self._depends.update(node.outputs)
        shapeless = any(value.shape is None for value in self._depends)
        self._inferred = inferred(model) if shapeless else {}

    def bytes_of(self, value: ir.Value) -> int:
        if value not in self._depends or value.dtype not in (None, ir.DataType.FLOAT):
            return 0
        shape = value.shape or self._inferred.get(value.name or "")
        # Every dimension that is not a number counts tokens or rows, and there is one of either.
        return 0 if shape is None else 4 * prod(dim for dim in shape if isinstance(dim, int))
