"""Shapes are computed from inputs, symbols and all; what nodes declare is not believed, contradictions are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.tape import Tape

from optimc_passes.dialect import (
    ADD_RMS_NORM,
    DOMAIN,
    GATED_ACTIVATION,
    OP_TYPE,
    ROTARY_QKV,
    PagedAttention,
    RotaryQkv,
)
from optimc_passes.dialect.inference import Inference, infer

FLOAT = ir.TensorType(ir.DataType.FLOAT)


class Graph:
    """Inputs x [1,T,64], flat [T,64] and r [1,R,64]; a test adds nodes, whose results are of unknown shape."""

    def __init__(self) -> None:
        self.tape = Tape()
        self.inputs = {
            name: ir.Value(name=name, type=FLOAT, shape=ir.Shape(dims))
            for name, dims in {"x": (1, "T", 64), "flat": ("T", 64), "r": (1, "R", 64), "cos": ("T", 4)}.items()
        }
        self.initializers: list[ir.Value] = []

    def op(self, op_type: str, *operands: str | ir.Value, outputs: int = 1, **attributes: Any) -> list[ir.Value]:
        given = [self.inputs[each] if isinstance(each, str) else each for each in operands]
        domain = DOMAIN if op_type in (OP_TYPE, ROTARY_QKV, ADD_RMS_NORM, GATED_ACTIVATION) else ""
        found = self.tape.op_multi_out(op_type, given, attributes, domain=domain, num_outputs=outputs)
        for value in found:
            value.type = FLOAT
        return list(found)

    def constant(self, *dims: int, ints: list[int] | None = None) -> ir.Value:
        array = np.zeros(dims, np.float32) if ints is None else np.array(ints, np.int64)
        tensor = ir.tensor(array, name=f"constant_{len(self.initializers)}")
        value = ir.Value(name=tensor.name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        self.initializers.append(value)
        return value

    def model(self) -> ir.Model:
        graph = ir.Graph(
            list(self.inputs.values()),
            [],
            nodes=self.tape.nodes,
            initializers=self.initializers,
            opset_imports={"": 23, DOMAIN: 1},
            name="g",
        )
        return ir.Model(graph, ir_version=10)

    def infer(self) -> Inference:
        return infer(self.model())


def shape(inference: Inference, value: ir.Value) -> list[int | str | None]:
    found = inference.shapes()[value.name or ""]
    return [dim if isinstance(dim, int) else dim.value for dim in found]


@pytest.mark.parametrize(
    ("before", "target", "after"),
    [
        ("x", [-1, 64], ["T", 64]),
        ("flat", [1, -1, 4, 16], [1, "T", 4, 16]),
        ("x", [0, 0, 4, 16], [1, "T", 4, 16]),
        ("x", [1, -1, 32], [1, None, 32]),
    ],
)
def test_a_reshape_keeps_the_symbol_that_its_sizes_leave(
    before: str, target: list[int], after: list[int | str | None]
) -> None:
    graph = Graph()
    (out,) = graph.op("Reshape", before, graph.constant(ints=target))
    assert shape(graph.infer(), out) == after


def test_symbols_pass_through_linear_layers_and_norms() -> None:
    graph = Graph()
    (wide,) = graph.op("MatMul", "r", graph.constant(64, 96))
    (normed,) = graph.op("RMSNormalization", wide, graph.constant(96), axis=-1)
    assert shape(graph.infer(), normed) == [1, "R", 96]


def test_results_of_fused_operators_follow_from_their_rules() -> None:
    graph = Graph()
    spec = RotaryQkv(4, 2, 8, 8)
    q, k, v = graph.op(ROTARY_QKV, "flat", "cos", "cos", outputs=3, **{**asdict(spec), "interleaved": 0})
    (mixed,) = graph.op(OP_TYPE, q, k, v, **asdict(PagedAttention(0, 4, 2, 8, 0.35)))
    total, normed = graph.op(ADD_RMS_NORM, "r", "r", graph.constant(64), outputs=2, epsilon=1e-6)
    (packed,) = graph.op(GATED_ACTIVATION, total, activation="silu")
    (apart,) = graph.op(GATED_ACTIVATION, total, normed, activation="silu")
    found = graph.infer()
    assert [shape(found, value) for value in (q, k, v, mixed)] == [["T", 32], ["T", 16], ["T", 16], ["T", 32]]
    assert [shape(found, value) for value in (total, normed, packed, apart)] == [
        [1, "R", 64],
        [1, "R", 64],
        [1, "R", 32],
        [1, "R", 64],
    ]


def test_a_declared_shape_is_not_believed() -> None:
    graph = Graph()
    (out,) = graph.op("Tanh", "x")
    out.shape = ir.Shape([1, "R", 96])
    assert shape(graph.infer(), out) == [1, "T", 64]


def add(graph: Graph, other: str | ir.Value) -> None:
    graph.op("Add", "x", other)


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda g: add(g, "r"), "different symbols meet: FLOAT (1, T, 64), FLOAT (1, R, 64)"),
        (lambda g: add(g, g.constant(32)), "Incompatible dimensions: FLOAT (1, T, 64), FLOAT (32)"),
        (lambda g: add(g, g.constant(ints=[1])), "inconsistent type tensor(int64): FLOAT (1, T, 64), INT64 (1)"),
        (lambda g: g.op("MatMul", "x", g.constant(60, 8)), "FLOAT (1, T, 64), FLOAT (60, 8)"),
    ],
)
def test_operands_that_do_not_fit_are_shown(edit: Callable[[Graph], None], sentence: str) -> None:
    graph = Graph()
    graph.op("Tanh", "x")
    edit(graph)
    ((node, fault),) = graph.infer().faults
    assert node is graph.tape.nodes[1]
    assert sentence in fault


def test_inference_goes_on_behind_a_fault() -> None:
    graph = Graph()
    add(graph, graph.constant(32))
    (out,) = graph.op("MatMul", "x", graph.constant(64, 96))
    found = graph.infer()
    assert len(found.faults) == 1
    assert shape(found, out) == [1, "T", 96]


def test_weights_are_not_read() -> None:
    def refuse() -> ir.Tensor:
        raise AssertionError("a weight was read")

    graph = Graph()
    weight = graph.constant(64, 96)
    weight.const_value = ir.LazyTensor(refuse, dtype=ir.DataType.FLOAT, shape=weight.shape, name=weight.name)
    (out,) = graph.op("MatMul", "x", weight)
    assert shape(graph.infer(), out) == [1, "T", 96]
