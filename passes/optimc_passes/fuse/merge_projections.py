"""Linear layers of one input joined into one: whether they can be, and the product with a Split that does it.

Letters: C input features, N output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult

from optimc_passes.fuse.constants import make_ints
from optimc_passes.fuse.feeding import Feeding
from optimc_passes.fuse.projection import Projection, weight_of
from optimc_passes.fuse.rule import ACCEPTED, declined, typed
from optimc_passes.graph.weight_expression import Concat
from optimc_passes.graph.weight_tensor import WeightTensor


def check_merge(feedings: Sequence[Feeding], root: ir.Node) -> MatchResult:
    """Decide whether layers, each alone in feeding an operand of `root`, can be one product."""
    projections = [feeding.projections[0] for feeding in feedings]
    first = projections[0]
    for other in projections[1:]:
        if other.x is not first.x:
            return declined(f"{_last(first)} and {_last(other)} have different inputs", other.node)
        if other.scheme != first.scheme:
            return declined(
                f"weights are stored differently: {_last(first)} is {first.scheme}, {_last(other)} is {other.scheme}",
                other.node,
            )
        if not _same_order(first, other):
            return declined(f"{_last(first)} and {_last(other)} are permuted differently", other.node)
    for projection, feeding in zip(projections, feedings, strict=True):
        weight = (
            projection.parts if projection.dequantize is None else (*projection.parts, projection.dequantize.outputs[0])
        )
        if any(len(part.uses()) != 1 for part in weight):
            return declined(f"the weight of {_last(projection)} has another consumer", projection.node)
        if feeding.is_read_elsewhere(root):
            return declined(f"{_last(projection)} is read outside of what joins the layers", projection.node)
    return ACCEPTED


def merge(op: Any, projections: Sequence[Projection]) -> dict[ir.Value, ir.Value]:
    """Emit one product with the weights side by side, and a Split; return what each layer's output becomes.

    If each has a bias, the biases are joined and added once, before the Split, and the keys are the biased outputs;
    otherwise biases stay where they are.
    """
    first = projections[0]
    widths = [projection.width for projection in projections]
    label = merged_name([projection.label.removesuffix(".weight") for projection in projections])

    def joined(values: Sequence[ir.Value], axis: int) -> ir.Value:
        expression = Concat(tuple(weight_of(value).expression for value in values), axis)
        name = merged_name([value.name or "" for value in values])
        initializer: ir.Value = op.initializer(WeightTensor(expression, weight_of(values[0]).store, name=name))
        return initializer

    def emit(op_type: str, inputs: Sequence[ir.Value], shape: ir.Shape | None, **attributes: int) -> ir.Value:
        return typed(op.op(op_type, *inputs, _outputs=[f"{label}/{op_type}"], **attributes), shape)

    parts = [joined(values, axis=1) for values in zip(*(projection.parts for projection in projections), strict=True)]
    weight = parts[0]
    if first.dequantize is not None:
        attributes = {name: first.dequantize.attributes.get_int(name, 0) for name in ("axis", "block_size")}
        weight = emit("DequantizeLinear", parts, parts[0].shape, **attributes)
    # The first product's own input has the features in the order all of them want.
    x = first.node.inputs[0]
    assert x is not None
    merged = emit("MatMul", [x, weight], _with_last(first.node.outputs[0].shape, sum(widths)))
    results = [projection.node.outputs[0] for projection in projections]
    biases = [projection.bias for projection in projections]
    adds = [found for found in biases if found is not None]
    if len(adds) == len(projections):
        merged = emit("Add", [merged, joined([bias for _, bias in adds], axis=0)], merged.shape)
        results = [add.outputs[0] for add, _ in adds]
    outputs = [ir.Value(name=value.name, shape=value.shape, type=value.type) for value in results]
    op.Split(merged, make_ints(op, *widths), axis=-1, _outputs=outputs, _name=f"{label}/Split")
    return dict(zip(results, outputs, strict=True))


def merged_name(names: Sequence[str]) -> str:
    """Join dotted names that differ in one place: a.q.weight, a.k.weight give a.q+k.weight; else all with "+"."""
    split = [name.split(".") for name in names]
    if len({len(parts) for parts in split}) == 1:
        columns = list(zip(*split, strict=True))
        differing = [column for column in columns if len(set(column)) > 1]
        if len(differing) == 1:
            return ".".join("+".join(column) if len(set(column)) > 1 else column[0] for column in columns)
    return "+".join(names)


def _same_order(first: Projection, other: Projection) -> bool:
    if first.gather is None or other.gather is None:
        return first.gather is other.gather
    order, other_order = first.gather.inputs[1], other.gather.inputs[1]
    assert order is not None
    assert other_order is not None
    return np.array_equal(weight_of(order).numpy(), weight_of(other_order).numpy())


def _with_last(shape: ir.Shape | None, size: int) -> ir.Shape | None:
    return None if shape is None else ir.Shape([*shape[:-1], size])


def _last(projection: Projection) -> str:
    """The layer's short name: the last part of its module path."""
    return projection.label.removesuffix(".weight").rpartition(".")[2]
