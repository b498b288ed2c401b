"""A linear layer as it stands in the graph, and several of one input joined into one.

A projection is MatMul(x, W) with W an initializer [C, N] or DequantizeLinear(codes [C, N], ...) of initializers, and x
possibly gathered into the order of the codes first. A bias is an Add of an initializer [N] to its output.

Letters: C input features, N output features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult

from optimc_passes.fuse.constants import make_ints
from optimc_passes.fuse.rule import ACCEPTED, declined, typed
from optimc_passes.graph.weight_expression import Concat
from optimc_passes.graph.weight_tensor import WeightTensor


@dataclass(frozen=True)
class Projection:
    """One linear layer."""

    node: ir.Node
    """The MatMul."""
    x: ir.Value
    """Its input [..., C] before any gathering of features."""
    gather: ir.Node | None
    """The node that orders x's features for permuted codes."""
    dequantize: ir.Node | None
    """The DequantizeLinear of a quantized weight."""
    parts: tuple[ir.Value, ...]
    """Initializers: (weight,) or (codes, scales) or (codes, scales, zeros), outputs N along the last axis."""

    @property
    def width(self) -> int:
        """N."""
        return _tensor(self.parts[0]).shape.numpy()[-1]

    @property
    def label(self) -> str:
        """Name of the weight."""
        name = self.parts[0].name or "?"
        return name.removesuffix(".codes") if self.dequantize else name

    @property
    def results(self) -> tuple[ir.Value, ...]:
        """The layer's output, and with its bias if it has one."""
        bias = _bias(self)
        return (self.node.outputs[0],) if bias is None else (self.node.outputs[0], bias[0].outputs[0])

    @property
    def scheme(self) -> str:
        """How the weight is stored, for comparison and for reading."""
        if self.dequantize is None:
            return "dense"
        kind = "symmetric" if len(self.parts) == 2 else "asymmetric"
        group = self.dequantize.attributes.get_int("block_size", 0)
        return f"{self.parts[0].dtype} {kind} in groups of {group}"


def as_projection(node: ir.Node) -> Projection | None:
    """Read a node as a linear layer, or return None if it is none."""
    if node.op_type != "MatMul" or node.domain:
        return None
    x, weight = node.inputs
    if x is None or weight is None:
        return None
    gather = x.producer()
    if gather is not None and _orders_features(gather):
        source = gather.inputs[0]
        assert source is not None
        x = source
    else:
        gather = None
    if _is_weight(weight, 2):
        return Projection(node, x, gather, None, (weight,))
    dequantize = weight.producer()
    if dequantize is None or dequantize.op_type != "DequantizeLinear":
        return None
    parts = tuple(value for value in dequantize.inputs if value is not None)
    if not all(_is_weight(part, 2) for part in parts):
        return None
    return Projection(node, x, gather, dequantize, parts)


@dataclass(frozen=True)
class Feeding:
    """What leads to a value: the first linear layers met walking back, and the nodes passed on the way."""

    projections: tuple[Projection, ...]
    between: frozenset[ir.Node]

    @classmethod
    def trace(cls, value: ir.Value, follows: Callable[[ir.Node], bool]) -> Feeding:
        """Walk back from `value` through nodes that `follows` lets pass."""
        projections: list[Projection] = []
        between: set[ir.Node] = set()
        seen: set[ir.Node] = set()
        stack = [value]
        while stack:
            node = stack.pop().producer()
            if node is None or node in seen:
                continue
            seen.add(node)
            projection = as_projection(node)
            if projection is not None:
                projections.append(projection)
            elif follows(node):
                between.add(node)
                stack.extend(operand for operand in node.inputs if operand is not None)
        return cls(tuple(projections), frozenset(between))

    def is_read_elsewhere(self, root: ir.Node) -> bool:
        """Whether something but `root` reads a linear layer's output, or what becomes of it on the way."""
        stack = [projection.node for projection in self.projections]
        seen: set[ir.Node] = set()
        while stack:
            node = stack.pop()
            for value in node.outputs:
                if value.is_graph_output():
                    return True
                for consumer, _ in value.uses():
                    if consumer is root or consumer in seen:
                        continue
                    if consumer not in self.between:
                        return True
                    seen.add(consumer)
                    stack.append(consumer)
        return False


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
        expression = Concat(tuple(_tensor(value).expression for value in values), axis)
        name = merged_name([value.name or "" for value in values])
        initializer: ir.Value = op.initializer(WeightTensor(expression, _tensor(values[0]).store, name=name))
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
    biases = [_bias(projection) for projection in projections]
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


def _is_weight(value: ir.Value, rank: int) -> bool:
    tensor = value.const_value
    return value.is_initializer() and isinstance(tensor, WeightTensor) and len(tensor.shape) == rank


def _tensor(value: ir.Value) -> WeightTensor:
    tensor = value.const_value
    assert isinstance(tensor, WeightTensor), value
    return tensor


def _orders_features(node: ir.Node) -> bool:
    """Whether the node gathers along the last axis by a weight's permutation."""
    if node.op_type != "Gather" or node.domain or node.attributes.get_int("axis", 0) != -1:
        return False
    order = node.inputs[1]
    return order is not None and _is_weight(order, 1)


def _same_order(first: Projection, other: Projection) -> bool:
    if first.gather is None or other.gather is None:
        return first.gather is other.gather
    order, other_order = first.gather.inputs[1], other.gather.inputs[1]
    assert order is not None
    assert other_order is not None
    return np.array_equal(_tensor(order).numpy(), _tensor(other_order).numpy())


def _bias(projection: Projection) -> tuple[ir.Node, ir.Value] | None:
    """Return the Add of a bias [N] that is the only consumer of the layer's output, and the bias."""
    uses = projection.node.outputs[0].uses()
    if len(uses) != 1:
        return None
    add, index = next(iter(uses))
    if add.op_type != "Add" or add.domain or add.outputs[0].is_graph_output():
        return None
    bias = add.inputs[1 - index]
    if bias is None or not _is_weight(bias, 1) or len(bias.uses()) != 1:
        return None
    return (add, bias) if _tensor(bias).shape.numpy() == (projection.width,) else None


def _with_last(shape: ir.Shape | None, size: int) -> ir.Shape | None:
    return None if shape is None else ir.Shape([*shape[:-1], size])


def _last(projection: Projection) -> str:
    """The layer's short name: the last part of its module path."""
    return projection.label.removesuffix(".weight").rpartition(".")[2]
