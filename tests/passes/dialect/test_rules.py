"""A sound graph has no violations; each rule has a graph that breaks it, and says so in its words."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.tape import Tape

from optimc_passes.dialect import DOMAIN, OP_TYPE, verify_graph

ATTENTION = {
    "layer": 0,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "scale": 0.35,
    "window": 0,
    "softcap": 0.0,
}


def value(name: str, dtype: ir.DataType, *shape: int | str) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def typed(found: ir.Value, *shape: int | str, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    found.dtype, found.shape = dtype, ir.Shape(shape)
    return found


class Graph:
    """Embedding, quantized q projection, attention, dense head. Tests break one thing before `build`."""

    def __init__(self) -> None:
        self.inputs = [
            value("input_ids", ir.DataType.INT64, "T"),
            value("position_ids", ir.DataType.INT64, "T"),
            value("logits_rows", ir.DataType.INT64, "R"),
        ]
        self.attention: dict[str, Any] = dict(ATTENTION)
        self.quantized: dict[str, Any] = {"axis": 0, "block_size": 16}
        self.shapes: dict[str, tuple[int, ...]] = {
            "codes": (40, 32),
            "scales": (3, 32),
            "zeros": (3, 32),
            "k": (40, 16),
            "v": (40, 16),
            "head": (32, 50),
        }
        self.dtypes = dict.fromkeys(self.shapes, ir.DataType.FLOAT)
        self.dtypes |= {"codes": ir.DataType.UINT8, "zeros": ir.DataType.UINT8}
        self.layers = [0]
        self.opsets = {"": 23, DOMAIN: 1}
        self.tape = Tape()

    def build(self, edit: Callable[["Graph", dict[str, ir.Value]], None] = lambda graph, values: None) -> ir.Model:
        tape, v = self.tape, {}
        for name, shape in {"embed": (50, 40), **self.shapes}.items():
            v[name] = value(name, self.dtypes.get(name, ir.DataType.FLOAT), *shape)
        v["x"] = typed(tape.op("Gather", [v["embed"], self.inputs[0]]), "T", 40)
        v["wq"] = typed(
            tape.op("DequantizeLinear", [v["codes"], v["scales"], v["zeros"]], self.quantized), *self.shapes["codes"]
        )
        v["q_out"] = typed(tape.op("MatMul", [v["x"], v["wq"]]), "T", self.shapes["codes"][1])
        for name in "kv":
            v[f"{name}_out"] = typed(tape.op("MatMul", [v["x"], v[name]]), "T", self.shapes[name][1])
        mixed = v["q_out"]
        for layer in self.layers:
            operands = [mixed, v["k_out"], v["v_out"]]
            node_attributes = {**self.attention, "layer": layer} if "layer" in self.attention else self.attention
            mixed = typed(tape.op(OP_TYPE, operands, node_attributes, domain=DOMAIN, name="attend"), "T", 32)
        v["mixed"] = mixed
        v["rows"] = typed(tape.op("Gather", [mixed, self.inputs[2]]), "R", 32)
        v["logits"] = typed(tape.op("MatMul", [v["rows"], v["head"]]), "R", self.shapes["head"][1])
        v["logits"].name = "logits"
        self.outputs = [v["logits"]]
        self.parameters = [v[name] for name in ("embed", *self.shapes)]
        edit(self, v)
        graph = ir.Graph(
            [*self.inputs, *self.parameters], self.outputs, nodes=tape.nodes, opset_imports=self.opsets, name="g"
        )
        return ir.Model(graph, ir_version=10)


def test_a_sound_graph_has_no_violations() -> None:
    assert verify_graph(Graph().build()) == []


def test_attached_weights_are_not_read() -> None:
    model = Graph().build()

    def refuse() -> ir.Tensor:
        raise AssertionError("a weight was read")

    for parameter in tuple(model.graph.inputs[3:]):
        model.graph.inputs.remove(parameter)
        assert parameter.dtype is not None
        assert parameter.shape is not None
        large = ir.LazyTensor(refuse, dtype=parameter.dtype, shape=parameter.shape, name=parameter.name)
        small = ir.tensor(np.zeros(parameter.shape.numpy(), parameter.dtype.numpy()), name=parameter.name)
        parameter.const_value = large if large.nbytes >= 1024 else small
        model.graph.register_initializer(parameter)
    assert verify_graph(model) == []


def shape(name: str, *dims: int) -> Callable[[Graph], None]:
    return lambda graph: graph.shapes.__setitem__(name, dims)


def dtype(name: str, changed: ir.DataType) -> Callable[[Graph], None]:
    return lambda graph: graph.dtypes.__setitem__(name, changed)


def attention(**changes: Any) -> Callable[[Graph], None]:
    return lambda graph: graph.attention.update(changes)


def quantized(**changes: Any) -> Callable[[Graph], None]:
    return lambda graph: graph.quantized.update(changes)


def without(table: str, name: str) -> Callable[[Graph], None]:
    return lambda graph: getattr(graph, table).pop(name)


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        # Shapes of the dialect's operators.
        (shape("scales", 2, 32), "node 1 DequantizeLinear: scales (2, 32), want (3, 32)"),
        (shape("scales", 3, 30), "node 1 DequantizeLinear: scales (3, 30), want (3, 32)"),
        (shape("zeros", 2, 32), "node 1 DequantizeLinear: zeros (2, 32), want (3, 32)"),
        (shape("codes", 48, 32), "node 2 MatMul: w (48, 32), want (40, N)"),
        (shape("codes", 40, 24), "node 5 PagedAttention 'attend': q (T, 24), want (T, 32)"),
        (shape("k", 40, 8), "node 5 PagedAttention 'attend': k (T, 8), want (T, 16)"),
        (shape("v", 40, 8), "node 5 PagedAttention 'attend': v (T, 8), want (T, 16)"),
        (shape("head", 30, 50), "node 7 MatMul: w (30, 50), want (32, N)"),
        # Dtypes.
        (dtype("codes", ir.DataType.INT32), "codes: INT32, want INT4, INT8, UINT4, UINT8"),
        (dtype("zeros", ir.DataType.INT8), "zeros: INT8, want UINT8"),
        (dtype("scales", ir.DataType.FLOAT16), "scales: FLOAT16, want FLOAT"),
        (dtype("head", ir.DataType.FLOAT16), "node 7 MatMul: w: FLOAT16, want FLOAT"),
        # Attributes: presence, type, range, relations.
        (without("attention", "window"), "attribute window is absent"),
        (without("quantized", "axis"), "attribute axis is absent"),
        (attention(scale=1), "attribute scale: INT, want FLOAT"),
        (lambda g: setattr(g, "layers", ["x"]), "attribute layer: STRING, want INT"),
        (quantized(axis="x"), "node 1 DequantizeLinear: attribute axis: STRING, want INT"),
        (quantized(block_size=16.0), "node 1 DequantizeLinear: attribute block_size: FLOAT, want INT"),
        (lambda g: setattr(g, "layers", [-1]), "attribute layer: -1, want at least 0"),
        (attention(num_heads=0), "attribute num_heads: 0, want positive"),
        (attention(num_kv_heads=0), "attribute num_kv_heads: 0, want positive"),
        (attention(head_dim=-8), "attribute head_dim: -8, want positive"),
        (attention(scale=float("inf")), "attribute scale: inf, want positive and finite"),
        (attention(window=-1), "attribute window: -1, want at least 0"),
        (attention(softcap=-1.0), "attribute softcap: -1.0, want at least 0 and finite"),
        (attention(num_kv_heads=3), "num_heads 4 is no multiple of num_kv_heads 3"),
        (attention(shape_of_things=1), "attribute shape_of_things is unknown"),
        (quantized(axis=1), "attribute axis: 1, want 0"),
        (quantized(block_size=-4), "attribute block_size: -4, want positive"),
        (quantized(block_size=64), "block_size 64 above C 40"),
        # Layers.
        (lambda g: setattr(g, "layers", [0, 0]), "PagedAttention: layers [0, 0], want each of 0..1 once"),
        (lambda g: setattr(g, "layers", [1]), "PagedAttention: layers [1], want each of 0..0 once"),
        # Opsets.
        (lambda g: g.opsets.update({"": 22}), "opset: ONNX 22, want at least 23"),
        (lambda g: g.opsets.update({DOMAIN: 2}), "opset: optimc 2, want 1"),
        (lambda g: g.opsets.pop(DOMAIN), "opset: domain 'optimc' is used but not imported"),
        # Graph inputs.
        (lambda g: g.inputs.reverse(), "input 0: 'logits_rows', want input_ids"),
        (
            lambda g: g.inputs.__setitem__(1, value("position_ids", ir.DataType.INT32, "T")),
            "input position_ids: INT32, want INT64",
        ),
        (
            lambda g: g.inputs.__setitem__(1, value("position_ids", ir.DataType.INT64, 1, "T")),
            "input position_ids: shape (1, T), want (T)",
        ),
    ],
)
def test_a_broken_rule_is_reported(break_it: Callable[[Graph], None], sentence: str) -> None:
    graph = Graph()
    break_it(graph)
    violations = verify_graph(graph.build())
    assert any(sentence in violation for violation in _unnamed(violations)), violations


def foreign_domain(g: Graph, v: dict[str, ir.Value]) -> None:
    g.tape.op("Magic", [v["x"]], domain="somewhere")
    g.opsets["somewhere"] = 1


def float16_logits(g: Graph, v: dict[str, ir.Value]) -> None:
    v["logits"].dtype = ir.DataType.FLOAT16


def extra_output(g: Graph, v: dict[str, ir.Value]) -> None:
    second = typed(g.tape.op("Identity", [v["x"]]), "T", 40)
    second.name = "surprise"
    g.outputs.append(second)


def renamed_output(g: Graph, v: dict[str, ir.Value]) -> None:
    v["logits"].name = "scores"


def untyped_parameter(g: Graph, v: dict[str, ir.Value]) -> None:
    v["head"].shape = ir.Shape([32, "V"])


def twice_named(g: Graph, v: dict[str, ir.Value]) -> None:
    v["x"].name = v["q_out"].name = "same"


def undefined(g: Graph, v: dict[str, ir.Value]) -> None:
    g.parameters.remove(v["head"])


def out_of_order(g: Graph, v: dict[str, ir.Value]) -> None:
    late = typed(g.tape.op("Identity", [v["x"]]), "T", 40)
    producer = v["q_out"].producer()
    assert producer is not None
    producer.replace_input_with(0, late)


def never_computed(g: Graph, v: dict[str, ir.Value]) -> None:
    g.outputs[0] = value("logits", ir.DataType.FLOAT, "R", 50)


def missing_operand(g: Graph, v: dict[str, ir.Value]) -> None:
    g.tape.op(OP_TYPE, [v["q_out"], v["k_out"]], {**ATTENTION, "layer": 1}, domain=DOMAIN)


def surplus_operand(g: Graph, v: dict[str, ir.Value]) -> None:
    g.tape.op(OP_TYPE, [v["q_out"], *([v["k_out"]] * 3)], {**ATTENTION, "layer": 1}, domain=DOMAIN)


def surplus_result(g: Graph, v: dict[str, ir.Value]) -> None:
    operands = [v["q_out"], v["k_out"], v["v_out"]]
    g.tape.op_multi_out(OP_TYPE, operands, {**ATTENTION, "layer": 1}, domain=DOMAIN, num_outputs=2)


def unknown_dialect_operator(g: Graph, v: dict[str, ir.Value]) -> None:
    g.tape.op("Teleport", [v["x"]], domain=DOMAIN)


def unknown_operator(g: Graph, v: dict[str, ir.Value]) -> None:
    g.tape.op("Teleport", [v["x"]])


def onnx_arity(g: Graph, v: dict[str, ir.Value]) -> None:
    g.tape.op("Tanh", [v["x"], v["x"]])


def onnx_attribute_absent(g: Graph, v: dict[str, ir.Value]) -> None:
    g.tape.op("Cast", [v["x"]])


def onnx_attribute_unknown(g: Graph, v: dict[str, ir.Value]) -> None:
    g.tape.op("Tanh", [v["x"]], {"temperature": 2})


def contradicting_shapes(g: Graph, v: dict[str, ir.Value]) -> None:
    g.tape.op("Add", [v["k_out"], v["x"]])


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (foreign_domain, "opset: domain 'somewhere' is no part of the dialect"),
        (float16_logits, "output logits: FLOAT16, want FLOAT"),
        (extra_output, "output 'surprise': no part of the dialect"),
        (renamed_output, "output 0: 'scores', want logits"),
        (untyped_parameter, "parameter 'head': dtype and shape must be known, got FLOAT (32, V)"),
        (twice_named, "value 'same': 2 values have this name"),
        (undefined, "node 7 MatMul: input 1 'head' is not defined before it"),
        (out_of_order, "node 2 MatMul: input 0"),
        (never_computed, "output 'logits': nothing computes it"),
        (missing_operand, "node 8 PagedAttention: input 2 (v) is absent"),
        (surplus_operand, "node 8 PagedAttention: 4 inputs, want q, k, v"),
        (surplus_result, "node 8 PagedAttention: 2 outputs, want 1"),
        (unknown_dialect_operator, "node 8 Teleport: optimc has no operator of this name"),
        (unknown_operator, "node 8 Teleport: ONNX 23 has no operator of this name"),
        (onnx_arity, "node 8 Tanh: 2 inputs, want 1 to 1"),
        (onnx_attribute_absent, "node 8 Cast: attribute to is absent"),
        (onnx_attribute_unknown, "node 8 Tanh: attribute temperature is unknown to ONNX 23"),
        (contradicting_shapes, "node 8 Add: shape inference: "),
    ],
)
def test_a_broken_graph_is_reported(edit: Callable[[Graph, dict[str, ir.Value]], None], sentence: str) -> None:
    violations = verify_graph(Graph().build(edit))
    assert any(sentence in violation for violation in _unnamed(violations)), violations


def _unnamed(violations: list[str]) -> list[str]:
    """Drop the node names that the library made up."""
    return [re.sub(r" 'node_[^']*'", "", violation) for violation in violations]


def test_missing_inputs_and_outputs_are_named() -> None:
    graph = Graph()
    model = graph.build()
    for index in (2, 1):
        del model.graph.inputs[index]
    model.graph.inputs[1:] = []
    model.graph.outputs.clear()
    violations = verify_graph(model)
    assert "input 1: absent, want position_ids" in violations
    assert "output 0: absent, want logits" in violations


def test_functions_must_be_inlined() -> None:
    model = Graph().build()
    body = ir.Graph([], [], nodes=[], name="f", opset_imports={"": 23})
    model.functions[("local", "F", "")] = ir.Function("local", "F", graph=body, attributes=[])
    assert "functions: 1 are not inlined, e.g. F" in verify_graph(model)


def test_all_violations_are_reported_together() -> None:
    graph = Graph()
    graph.attention["window"] = -1
    graph.shapes["scales"] = (2, 32)
    graph.opsets[""] = 22
    assert len(verify_graph(graph.build())) == 3


def test_products_of_activations_follow_onnx() -> None:
    graph = Graph()

    def batched(g: Graph, v: dict[str, ir.Value]) -> None:
        left, right = value("left", ir.DataType.FLOAT, 2, 3, 4), value("right", ir.DataType.FLOAT, 2, 4, 5)
        g.parameters += [left, right]
        g.tape.op("MatMul", [left, right])

    assert verify_graph(graph.build(batched)) == []


def test_a_scalar_dequantization_follows_onnx() -> None:
    graph = Graph()

    def scalar(g: Graph, v: dict[str, ir.Value]) -> None:
        step = ir.tensor(np.array(0.5, np.float32), name="step")
        g.tape.op("DequantizeLinear", [v["codes"], g.tape.op("Constant", (), {"value": step})])

    assert verify_graph(graph.build(scalar)) == []
