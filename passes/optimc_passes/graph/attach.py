"""Weights meet the graph: parameters that are graph inputs become lazily computed initializers.

The frontend exports without weights: every parameter is a trailing graph input named as transformers names it, and a
linear layer is MatMul(x, Transpose(parameter)). After attaching

- a dense linear weight is an initializer [C, N], transposed when read; the Transpose node is gone. If the parameter has
  other consumers (a tied embedding) its bytes stay as they are and the Transpose stays in the graph;
- a quantized linear weight is DequantizeLinear(codes [C, N], scales [g, N], zeros [g, N]) -> MatMul, blocked along C;
  a permuted one gathers the activation's features into the codes' order first; one with a static activation scale
  reads its activations through Clip -> QuantizeLinear -> DequantizeLinear, once for all weights that read the same
  value with the same scale, so that these still have one input and can be joined;
- a quantized table that is only looked up (an embedding) is Gather(codes [V, C]), Gather(scales [V, g]),
  Gather(zeros [V, g]) -> DequantizeLinear, blocked along C: only the rows of a step's tokens are dequantized, whatever
  the backend. The other order reads better and costs a whole vocabulary a step, or a float32 copy of it for good;
- a quantized weight that is both multiplied and looked up is dequantized once, and lookups read its transpose: the
  codes of a table shared with the head lie in the plan once, and a head is read as a whole anyway.

Letters: C input features, N output features, V rows of a table, g groups along C.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from optimc.errors import CheckpointError
from optimc_passes.dialect.rules import INPUTS
from optimc_passes.graph.static_activations import StaticActivations
from optimc_passes.graph.weight_expression import (
    Codes,
    Expression,
    Param,
    Permutation,
    Scales,
    Store,
    TableCodes,
    TableScales,
    TableZeros,
    Transposed,
    Zeros,
)
from optimc_passes.graph.weight_tensor import WeightTensor
from optimc_passes.weights import Dense, Quantized

ACTIVATION_INPUTS = frozenset(name for name, _, _ in INPUTS)
"""Graph inputs that are not parameters."""


def attach_weights(model: ir.Model, store: Store, *, tied: Mapping[str, str] | None = None) -> ir.Model:
    """Return a copy of `model` whose parameters are initializers bound to `store`.

    `tied` maps the name of a tied head to its embedding. If the store has a weight of its own under the head's name
    (a quantized head), the head reads that one and the embedding lookup keeps the original rows.

    Raises CheckpointError listing every parameter the store lacks or has in another shape or kind, and every weight
    that the graph does not take.
    """
    model = model.clone()
    graph = model.graph
    for head, embedding in (tied or {}).items():
        if head in store:
            _separate_head(graph, head, embedding)
    parameters = {value.name or "": value for value in graph.inputs if value.name not in ACTIVATION_INPUTS}
    _check(parameters, store)
    order = {node: index for index, node in enumerate(graph)}
    activations = StaticActivations(graph)
    for name, value in parameters.items():
        graph.inputs.remove(value)
        if not value.uses():
            continue  # The model declares the parameter but computes nothing with it.
        if isinstance(store[name], Quantized):
            _bind_quantized(graph, value, store, order, activations)
        else:
            _bind_dense(graph, value, store)
    return model


def add_initializer(graph: ir.Graph, name: str, expression: Expression, store: Store) -> ir.Value:
    """Register a lazily computed initializer and return its value. `name` must be new to the graph."""
    if name in graph.initializers:
        raise ValueError(f"the graph has an initializer {name} already")
    tensor = WeightTensor(expression, store, name=name)
    value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def is_matrix_transpose(node: ir.Node) -> bool:
    """Whether the node exchanges the axes of a matrix."""
    perm = node.attributes.get_ints("perm", ())
    return node.op_type == "Transpose" and node.domain == "" and tuple(perm or ()) == (1, 0)


def _check(parameters: Mapping[str, ir.Value], store: Store) -> None:
    faults = [f"{name}: in the graph but not in the checkpoint" for name in parameters if name not in store]
    faults += [f"{name}: in the checkpoint but no part of the graph" for name in store if name not in parameters]
    for name in parameters.keys() & store.keys():
        weight, declared = store[name], parameters[name].shape
        if declared is None or tuple(declared) != tuple(weight.shape):
            faults.append(f"{name}: shape {list(weight.shape)}, the graph wants {declared}")
        if isinstance(weight, Dense) and not _is_floating(weight.dtype):
            faults.append(f"{name}: dtype {weight.dtype} is not a floating-point type")
    if faults:
        raise CheckpointError(
            "\n".join(["the weights do not fit the exported graph:", *(f"  {f}" for f in sorted(faults))])
        )


def _is_floating(dtype: np.dtype) -> bool:
    # ml_dtypes' types (bf16, fp8) are of kind "V"; structured and raw void types are not numbers and cast to no float.
    return dtype.kind == "f" or (dtype.kind == "V" and np.can_cast(dtype, np.float32))


def _separate_head(graph: ir.Graph, head: str, embedding: str) -> None:
    """Give the head's matrix product a parameter of its own."""
    shared = next((value for value in graph.inputs if value.name == embedding), None)
    if shared is None:
        return
    own = ir.Value(name=head, shape=shared.shape, type=shared.type)
    graph.inputs.append(own)
    for node, index in tuple(shared.uses()):
        if is_matrix_transpose(node):
            node.replace_input_with(index, own)


def _bind_dense(graph: ir.Graph, value: ir.Value, store: Store) -> None:
    assert value.name is not None
    expression: Expression = Param(value.name)
    consumers = [node for node, _ in value.uses()]
    if all(is_matrix_transpose(node) for node in consumers):
        expression = Transposed(expression)
        for node in consumers:
            node.outputs[0].replace_all_uses_with(value)
            graph.remove(node, safe=True)
    tensor = WeightTensor(expression, store, name=value.name)
    value.shape, value.type, value.const_value = tensor.shape, ir.TensorType(tensor.dtype), tensor
    graph.register_initializer(value)


def _bind_quantized(
    graph: ir.Graph,
    value: ir.Value,
    store: Store,
    order: Mapping[ir.Node, int],
    activations: StaticActivations,
) -> None:
    assert value.name is not None
    name, weight = value.name, store[value.name]
    assert isinstance(weight, Quantized)
    uses = tuple(value.uses())
    if weight.permutation is None and all(_looks_up_rows(node, index) for node, index in uses):
        _bind_table(graph, name, [node for node, _ in uses], store)
        return
    first = min((node for node, _ in uses), key=order.__getitem__)
    dequantized = _dequantize(graph, first, name, weight, store)
    forward: ir.Value | None = None
    inverse: ir.Value | None = None
    if weight.permutation is not None:
        forward = add_initializer(graph, f"{name}.permutation", Permutation(name), store)

    def in_source_order() -> ir.Value:
        """The weight [C, N] with its rows put back, for consumers that do not follow the permutation."""
        nonlocal inverse
        if weight.permutation is None:
            return dequantized
        if inverse is None:
            order_back = add_initializer(graph, f"{name}.inverse_permutation", Permutation(name, inverse=True), store)
            inverse = _insert(graph, first, "Gather", [dequantized, order_back], {"axis": 0}, dequantized.shape)
        return inverse

    for node, index in uses:
        if not is_matrix_transpose(node):
            source = in_source_order()
            rows = _insert(graph, node, "Transpose", [source], {"perm": [1, 0]}, value.shape)
            node.replace_input_with(index, rows)
            continue
        for consumer, position in tuple(node.outputs[0].uses()):
            if consumer.op_type != "MatMul" or position != 1:
                consumer.replace_input_with(position, in_source_order())
                continue
            x = consumer.inputs[0]
            assert x is not None
            if weight.activation_scale is not None:
                x = activations.rounded(x, weight.activation_scale)
                consumer.replace_input_with(0, x)
            if forward is not None:
                gathered = _insert(graph, consumer, "Gather", [x, forward], {"axis": -1}, x.shape)
                consumer.replace_input_with(0, gathered)
            consumer.replace_input_with(1, dequantized)
        graph.remove(node, safe=True)
    if forward is not None and not forward.uses():
        del graph.initializers[f"{name}.permutation"]


def _looks_up_rows(node: ir.Node, index: int) -> bool:
    is_gather = node.op_type == "Gather" and node.domain == ""
    return is_gather and index == 0 and node.attributes.get_int("axis", 0) == 0


def _bind_table(graph: ir.Graph, name: str, lookups: Sequence[ir.Node], store: Store) -> None:
    """Look the rows of codes, scales and zero points up, and dequantize those."""
    weight = store[name]
    assert isinstance(weight, Quantized)
    parts: dict[str, Expression] = {"codes": TableCodes(name), "scales": TableScales(name)}
    if not weight.symmetric:
        parts["zeros"] = TableZeros(name)
    tables = [add_initializer(graph, f"{name}.{part}", expression, store) for part, expression in parts.items()]
    attributes = {"axis": -1, "block_size": min(weight.group, weight.shape[1])}
    for lookup in lookups:
        ids, rows = lookup.inputs[1], lookup.outputs[0]
        assert ids is not None
        gathered = []
        for table in tables:
            shape = None if rows.shape is None or table.shape is None else ir.Shape([*rows.shape[:-1], table.shape[1]])
            gathered.append(_insert(graph, lookup, "Gather", [table, ids], {"axis": 0}, shape))
            gathered[-1].type = table.type
        dequantized = _insert(graph, lookup, "DequantizeLinear", gathered, attributes, rows.shape)
        rows.replace_all_uses_with(dequantized)
        graph.remove(lookup, safe=True)
        dequantized.name = rows.name


def _dequantize(graph: ir.Graph, before: ir.Node, name: str, weight: Quantized, store: Store) -> ir.Value:
    """Insert the DequantizeLinear node of a weight; return its output, float32 [C, N]."""
    features, outputs = weight.shape[1], weight.shape[0]
    inputs = [
        add_initializer(graph, f"{name}.codes", Codes(name), store),
        add_initializer(graph, f"{name}.scales", Scales(name), store),
    ]
    if not weight.symmetric:
        inputs.append(add_initializer(graph, f"{name}.zeros", Zeros(name), store))
    attributes = {"axis": 0, "block_size": min(weight.group, features)}
    value = _insert(graph, before, "DequantizeLinear", inputs, attributes, ir.Shape([features, outputs]))
    value.name = f"{name}.dequantized"
    return value


def _insert(
    graph: ir.Graph,
    before: ir.Node,
    op_type: str,
    inputs: list[ir.Value],
    attributes: Mapping[str, int | Sequence[int]],
    shape: ir.Shape | None,
) -> ir.Value:
    """Insert a float32 node and return its output."""
    output = ir.Value(shape=shape, type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.node(op_type, inputs, attributes, outputs=[output])
    graph.insert_before(before, node)
    return output
