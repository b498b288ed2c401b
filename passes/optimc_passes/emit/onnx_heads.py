"""Medusa heads as an ONNX graph of their own, over weights of the plan that they share with the model where they can.

Letters: N rows, K heads, d hidden size, V' draft vocabulary.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.tape import Tape

from optimc.errors import LoweringError
from optimc_passes.emit.onnx_hidden import OnnxHead
from optimc_passes.graph.weight_expression import (
    Codes,
    Expression,
    Param,
    Permutation,
    Scales,
    Transposed,
    Zeros,
)
from optimc_passes.graph.weight_tensor import WeightTensor
from optimc_passes.heads.heads import SHARED_PROJECTION, Heads, block_bias, block_weight, own_projection
from optimc_passes.weights import Quantized

PREFIX = "heads/"
"""Of the names of initializers that are the heads' own."""


def heads_model(heads: Heads, model: ir.Model, head: OnnxHead) -> ir.Model:
    """Return the graph: "hidden" [N, d] and, for conditioned heads, "tokens" [N] in, "logits" [N, K, V'] out.

    `model` is the decomposed graph of the model, `head` its output head. What is read of it is copied.

    Raises LoweringError for heads that do not fit it.
    """
    width = None if head.weight.shape is None else head.weight.shape[0]
    if heads.info.hidden_size != width:
        raise LoweringError(
            f"the heads read hidden states of {heads.info.hidden_size}, the model's output head reads {width}"
        )
    return _HeadsGraph(heads, model, head).model


class _HeadsGraph:
    def __init__(self, heads: Heads, model: ir.Model, head: OnnxHead) -> None:
        self._heads = heads
        self._tape = Tape()
        self._initializers: dict[str, ir.Value] = {}
        self._copies: dict[ir.Value, ir.Value] = {}
        info = heads.info
        hidden = ir.Value(name="hidden", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["N", info.hidden_size]))
        inputs, first = [hidden], hidden
        if info.conditioned:
            tokens = ir.Value(name="tokens", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["N"]))
            inputs.append(tokens)
            self._copies[model.graph.inputs[0]] = tokens
            first = self._op("Concat", hidden, self._copied(_embedded(model.graph)), axis=1)
        states = [self._blocks(k, hidden, first) for k in range(info.num_heads)]
        logits = self._logits(states, head)
        logits.name = "logits"
        logits.type = ir.TensorType(ir.DataType.FLOAT)
        logits.shape = ir.Shape(["N", info.num_heads, info.draft_vocab_size])
        graph = ir.Graph(
            inputs,
            [logits],
            nodes=self._tape.nodes,
            initializers=list(self._initializers.values()),
            opset_imports=dict(model.graph.opset_imports),
            name="heads",
        )
        self.model = ir.Model(graph, ir_version=model.ir_version)

    def _blocks(self, k: int, hidden: ir.Value, first: ir.Value) -> ir.Value:
        """Return what head k's projection multiplies, [N, d]."""
        x, rows = hidden, first
        for block in range(self._heads.info.num_blocks):
            bias = self._initializer(block_bias(k, block), Param(block_bias(k, block)))
            y = self._op("Add", self._product(rows, block_weight(k, block)), bias)
            x = rows = self._op("Add", x, self._op("Mul", y, self._op("Sigmoid", y)))
        return x

    def _logits(self, states: list[ir.Value], head: OnnxHead) -> ir.Value:
        axis = self._op("Constant", value_ints=[1])

        def stacked(values: list[ir.Value]) -> ir.Value:
            return self._op("Concat", *(self._op("Unsqueeze", value, axis) for value in values), axis=1)

        if self._heads.info.projection == "own":
            return stacked([self._product(x, own_projection(k)) for k, x in enumerate(states)])
        x = stacked(states)
        if SHARED_PROJECTION in self._heads.weights:
            return self._product(x, SHARED_PROJECTION)
        if head.order is not None:
            x = self._op("Gather", x, self._copied(head.order), axis=-1)
        return self._op("MatMul", x, self._copied(head.weight))

    def _product(self, x: ir.Value, name: str) -> ir.Value:
        """Multiply by a weight of the heads."""
        weight = self._heads.weights[name]
        if not isinstance(weight, Quantized):
            return self._op("MatMul", x, self._initializer(name, Transposed(Param(name))))
        parts: dict[str, Expression] = {"codes": Codes(name), "scales": Scales(name)}
        if not weight.symmetric:
            parts["zeros"] = Zeros(name)
        inputs = [self._initializer(f"{name}.{part}", expression) for part, expression in parts.items()]
        outputs, features = weight.shape
        dense = self._op("DequantizeLinear", *inputs, axis=0, block_size=min(weight.group, features))
        dense.type, dense.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([features, outputs])
        if weight.permutation is not None:
            x = self._op("Gather", x, self._initializer(f"{name}.permutation", Permutation(name)), axis=-1)
        return self._op("MatMul", x, dense)

    def _initializer(self, name: str, expression: Expression) -> ir.Value:
        tensor = WeightTensor(expression, self._heads.weights, name=PREFIX + name)
        return self._register(
            ir.Value(name=tensor.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        )

    def _register(self, value: ir.Value) -> ir.Value:
        assert value.name is not None
        self._initializers[value.name] = value
        return value

    def _copied(self, value: ir.Value) -> ir.Value:
        """Return the copy of a value of the model's graph, with all it is computed from."""
        if value not in self._copies:
            node = value.producer()
            if node is None:
                assert value.const_value is not None, f"{value.name}: it depends on the tokens alone"
                self._copies[value] = self._register(
                    ir.Value(name=value.name, shape=value.shape, type=value.type, const_value=value.const_value)
                )
            else:
                inputs = [None if operand is None else self._copied(operand) for operand in node.inputs]
                copy = self._tape.op(node.op_type, inputs, dict(node.attributes))
                copy.type, copy.shape = value.type, value.shape
                self._copies[value] = copy
        return self._copies[value]

    def _op(self, op_type: str, *inputs: ir.Value, **attributes: int | list[int]) -> ir.Value:
        return self._tape.op(op_type, inputs, attributes)


def _embedded(graph: ir.Graph) -> ir.Value:
    """Return the rows [T, d] of the table that tokens are looked up in."""
    lookups = [node for node, _ in graph.inputs[0].uses() if node.op_type == "Gather"]
    if not lookups:
        raise LoweringError("the graph looks tokens up in no table: heads cannot be conditioned on them")
    looked_up = lookups[0].outputs[0]
    readers = [node for node, _ in looked_up.uses()]
    # Codes, scales and zero points are looked up apart, and dequantized then.
    if len(readers) == 1 and readers[0].op_type == "DequantizeLinear":
        return readers[0].outputs[0]
    return looked_up
