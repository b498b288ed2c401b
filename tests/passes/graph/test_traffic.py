"""Bytes a graph moves for one token: operands read, results written, views and weights free."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.tape import Tape

from optimc_passes.graph.traffic import activation_bytes_per_token

Build = Callable[["Graph", ir.Value], ir.Value]


class Graph:
    """Lookup of a row of 8 features, then what a test adds; results declare their shapes if `declared`."""

    def __init__(self, build: Build, *, declared: bool = True) -> None:
        self.tape, self._declared, self._initializers = Tape(), declared, list[ir.Value]()
        integers = ir.TensorType(ir.DataType.INT64)
        self.inputs = [
            ir.Value(name=name, type=integers, shape=ir.Shape([dim]))
            for name, dim in (("input_ids", "T"), ("position_ids", "T"), ("logits_rows", "R"))
        ]
        row = self.op("Gather", self.weight(5, 8), self.inputs[0], shape=["T", 8])
        out = build(self, row)
        graph = ir.Graph(
            self.inputs,
            [out],
            nodes=self.tape.nodes,
            initializers=self._initializers,
            opset_imports={"": 23, "optimc": 1},
            name="g",
        )
        self.model = ir.Model(graph, ir_version=10)

    def op(self, op_type: str, *operands: ir.Value, shape: list[int | str | None], **attributes: int) -> ir.Value:
        out = self.tape.op(op_type, operands, attributes)
        out.dtype, out.shape = ir.DataType.FLOAT, ir.Shape(shape) if self._declared else None
        return out

    def weight(self, *dims: int) -> ir.Value:
        return self._constant(np.zeros(dims, np.float32))

    def ints(self, *numbers: int) -> ir.Value:
        return self._constant(np.array(numbers, np.int64))

    def _constant(self, array: np.ndarray) -> ir.Value:
        tensor = ir.tensor(array, name=f"constant_{len(self._initializers)}")
        value = ir.Value(name=tensor.name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        self._initializers.append(value)
        return value


def added(build: Build, *, declared: bool = True) -> float:
    """Numbers moved by what is added to the lookup."""
    bare = Graph(lambda _graph, x: x)
    return (
        activation_bytes_per_token(Graph(build, declared=declared).model) - activation_bytes_per_token(bare.model)
    ) / 4


def test_a_lookup_writes_a_row() -> None:
    assert activation_bytes_per_token(Graph(lambda _graph, x: x).model) == 4 * 8


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "inferred"])
def test_a_product_reads_c_and_writes_n(declared: bool) -> None:
    def build(graph: Graph, x: ir.Value) -> ir.Value:
        return graph.op("MatMul", x, graph.weight(8, 12), shape=["T", 12])

    assert added(build, declared=declared) == 8 + 12


def test_a_view_moves_nothing() -> None:
    def build(graph: Graph, x: ir.Value) -> ir.Value:
        return graph.op("Reshape", x, graph.ints(1, -1, 8), shape=[1, "T", 8])

    assert added(build) == 0


@pytest.mark.parametrize(("rotated", "moved"), [(True, 2 * (4 + 2)), (False, 0)], ids=["rotated", "split only"])
def test_of_query_key_and_value_only_what_is_rotated_moves(rotated: bool, moved: int) -> None:
    """The row of 8 holds a query of 4, a key of 2 and a value of 2; tables do not depend on the token here."""

    def build(graph: Graph, x: ir.Value) -> ir.Value:
        tables = [graph.weight(1, 1), graph.weight(1, 1)] if rotated else []
        sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 2, "rotary_dim": 2 * rotated, "interleaved": 0}
        outputs = graph.tape.op_multi_out(
            "RotaryQkv", [x, *tables], {**sizes, "epsilon": 0.0}, num_outputs=3, domain="optimc"
        )
        for value, width in zip(outputs, (4, 2, 2), strict=True):
            value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape(["T", width])
        return outputs[0]

    assert added(build) == moved


def test_an_operand_read_twice_is_read_once() -> None:
    assert added(lambda graph, x: graph.op("Mul", x, x, shape=["T", 8])) == 8 + 8


def test_what_depends_on_weights_alone_moves_nothing() -> None:
    def build(graph: Graph, x: ir.Value) -> ir.Value:
        weight = graph.op("Transpose", graph.weight(12, 8), shape=[8, 12], perm=[1, 0])
        return graph.op("MatMul", x, weight, shape=["T", 12])

    assert added(build) == 8 + 12


def test_an_unknown_dimension_counts_tokens() -> None:
    assert added(lambda graph, x: graph.op("Tanh", x, shape=[None, 8])) == 8 + 8


def test_fewer_nodes_move_less() -> None:
    def apart(graph: Graph, x: ir.Value) -> ir.Value:
        silu = graph.op("Mul", x, graph.op("Sigmoid", x, shape=["T", 8]), shape=["T", 8])
        return graph.op("Mul", silu, x, shape=["T", 8])

    def fused(graph: Graph, x: ir.Value) -> ir.Value:
        out = graph.tape.op("GatedActivation", [x, x], {"activation": "silu"}, domain="optimc")
        out.dtype, out.shape = ir.DataType.FLOAT, ir.Shape(["T", 8])
        return out

    assert added(apart) == (8 + 8) + (8 + 8 + 8) + (8 + 8 + 8)
    assert added(fused) == 8 + 8
