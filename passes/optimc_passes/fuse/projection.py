"""A linear layer as it stands in the graph, and several of one input joined into one.

A projection is MatMul(x, W) with W an initializer [C, N] or DequantizeLinear(codes [C, N], ...) of initializers, and x
possibly gathered into the order of the codes first. A bias is an Add of an initializer [N] to its output.

Letters: C input features, N output features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from optimc_passes.fuse.rule import Miss
from optimc_passes.graph.attach import add_initializer
from optimc_passes.graph.weight_tensor import Concat, WeightTensor


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


def projections_feeding(value: ir.Value, follows: Callable[[ir.Node], bool]) -> list[Projection]:
    """Return the first linear layers met walking back from `value` through nodes that `follows` lets pass."""
    found: dict[int, Projection] = {}
    seen: set[int] = set()
    stack = [value]
    while stack:
        node = stack.pop().producer()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        projection = as_projection(node)
        if projection is not None:
            found[id(node)] = projection
        elif follows(node):
            stack.extend(operand for operand in node.inputs if operand is not None)
    return list(found.values())


def why_not_merge(projections: Sequence[Projection]) -> Miss | None:
    """Return what keeps these layers from being one product, or None."""
    first = projections[0]
    for other in projections[1:]:
        if other.x is not first.x:
            return Miss(f"{_last(first)} and {_last(other)} have different inputs", other.node)
        if other.scheme != first.scheme:
            return Miss(
                f"weights are stored differently: {_last(first)} is {first.scheme}, {_last(other)} is {other.scheme}",
                other.node,
            )
        if not _same_order(first, other):
            return Miss(f"{_last(first)} and {_last(other)} are permuted differently", other.node)
    for projection in projections:
        for part in projection.parts:
            if len(part.uses()) != 1:
                return Miss(f"the weight of {_last(projection)} has another consumer", projection.node)
        if projection.dequantize is not None and len(projection.dequantize.outputs[0].uses()) != 1:
            return Miss(f"the weight of {_last(projection)} has another consumer", projection.node)
        if projection.node.outputs[0].is_graph_output():
            return Miss(f"{_last(projection)} is an output of the graph", projection.node)
    return None


def merge(graph: ir.Graph, projections: Sequence[Projection]) -> None:
    """Replace the layers by one product with the weights side by side, and a Split.

    If each has a bias, the biases are joined and added once, before the Split; otherwise they stay where they are.
    """
    first = projections[0]
    members = {id(projection.node) for projection in projections}
    anchor = next(node for node in graph if id(node) in members)
    store = _tensor(first.parts[0]).store
    parts = [
        add_initializer(
            graph,
            merged_name([projection.parts[i].name or "" for projection in projections]),
            Concat(tuple(_tensor(projection.parts[i]).expression for projection in projections), axis=1),
            store,
        )
        for i in range(len(first.parts))
    ]
    # The first product's own input comes before it, and has the features in the order all of them want.
    x = anchor.inputs[0]
    assert x is not None
    widths = [projection.width for projection in projections]
    label = merged_name([projection.label.removesuffix(".weight") for projection in projections])
    nodes: list[ir.Node] = []

    def emit(op_type: str, inputs: list[ir.Value], attributes: dict[str, int], shape: ir.Shape | None) -> ir.Value:
        output = ir.Value(shape=shape, type=ir.TensorType(ir.DataType.FLOAT))
        output.name = f"{label}/{op_type}"
        nodes.append(ir.node(op_type, inputs, attributes, outputs=[output], name=output.name))
        return output

    weight = parts[0]
    if first.dequantize is not None:
        attributes = {name: first.dequantize.attributes.get_int(name, 0) for name in ("axis", "block_size")}
        weight = emit("DequantizeLinear", parts, attributes, parts[0].shape)
    merged = emit("MatMul", [x, weight], {}, _with_last(first.node.outputs[0].shape, sum(widths)))
    results = [projection.node.outputs[0] for projection in projections]
    biases = [_bias(projection) for projection in projections]
    adds = [found for found in biases if found is not None]
    if len(adds) == len(projections):
        bias = add_initializer(
            graph,
            merged_name([value.name or "" for _, value in adds]),
            Concat(tuple(_tensor(value).expression for _, value in adds), axis=0),
            store,
        )
        merged = emit("Add", [merged, bias], {}, merged.shape)
        results = [add.outputs[0] for add, _ in adds]
    split_sizes = ir.Value(
        name=f"{label}.widths",
        shape=ir.Shape([len(widths)]),
        type=ir.TensorType(ir.DataType.INT64),
        const_value=ir.tensor(np.array(widths, np.int64), name=f"{label}.widths"),
    )
    graph.register_initializer(split_sizes)
    outputs = [ir.Value(name=value.name, shape=value.shape, type=value.type) for value in results]
    nodes.append(ir.node("Split", [merged, split_sizes], {"axis": -1}, outputs=outputs, name=f"{label}/Split"))
    graph.insert_before(anchor, nodes)
    for old, new in zip(results, outputs, strict=True):
        old.name = None
        old.replace_all_uses_with(new, replace_graph_outputs=True)


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
