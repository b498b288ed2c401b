"""The first node that differs is found and named, in a graph of two layers."""

import math

import numpy as np
import onnx_ir as ir
import pytest

from optimc_passes.graph.attach import attach_weights
from optimc_passes.verify.bisect import comparable_names, find_cuts, first_divergence
from optimc_passes.verify.numeric import TOLERANCE
from optimc_passes.verify.probe import Probe
from optimc_passes.verify.session import WeightPool, run_probe

PROBE = Probe.of_vocabulary(48, 8).with_scattered_rows()


@pytest.fixture
def model(tiny_decoder):
    decoder = tiny_decoder()
    return attach_weights(decoder.model, decoder.store)


@pytest.fixture
def runs():
    """The values each run was asked for."""
    return []


@pytest.fixture
def find(runs):
    pool = WeightPool()

    def run(model, names):
        runs.append(tuple(names))
        return run_probe(model, PROBE, names, pool)

    return lambda before, after: first_divergence(before, after, run, TOLERANCE)


def product_of(model, weight):
    return model.graph.initializers[f"{weight}.weight"].uses()[0][0]


def exchange_weights(model, first, second):
    left, right = product_of(model, first), product_of(model, second)
    weights = left.inputs[1], right.inputs[1]
    left.replace_input_with(1, weights[1])
    right.replace_input_with(1, weights[0])


def test_the_first_of_two_exchanged_products_is_named_with_what_is_still_equal(model, find):
    wrong = model.clone()
    exchange_weights(wrong, "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj")
    gate = product_of(model, "model.layers.1.mlp.gate_proj")
    found = find(model, wrong)
    assert (found.node, found.op, found.value) == (gate.name, "MatMul", gate.outputs[0].name)
    assert found.error > 0.1
    assert found.equal == (gate.inputs[0].name,)
    assert found.through == ()
    assert f"first at node '{gate.name}' MatMul" in str(found)


def test_a_branch_beside_the_fault_is_not_blamed(model, find):
    wrong = model.clone()
    up = product_of(wrong, "model.layers.0.mlp.up_proj")
    up.replace_input_with(1, wrong.graph.initializers["model.layers.1.mlp.up_proj.weight"])
    assert find(model, wrong).node == up.name


@pytest.mark.parametrize("layer", [0, 1])
def test_the_fault_is_found_in_any_layer_and_only_a_few_values_are_looked_at(model, find, runs, layer):
    wrong = model.clone()
    exchange_weights(wrong, f"model.layers.{layer}.self_attn.k_proj", f"model.layers.{layer}.self_attn.v_proj")
    assert find(model, wrong).node == product_of(model, f"model.layers.{layer}.self_attn.k_proj").name
    num_nodes = len(list(model.graph))
    assert len(runs) <= 2 * (math.log2(num_nodes) + 2)
    assert max(map(len, runs)) < num_nodes / 4


def test_a_fault_in_a_table_that_all_layers_read_is_found_there(model, find):
    """A scale computed from the positions crosses every cut of the stream: the cuts have it too."""
    graph = model.graph
    position_ids = graph.inputs[1]
    table = ir.node("Cast", [position_ids], {"to": ir.DataType.FLOAT})
    column = ir.node("Reshape", [table.outputs[0], constant(graph, "column", [1, -1, 1])])
    offset = ir.node("Add", [column.outputs[0], constant(graph, "offset", 1.0)], name="offset")
    graph.insert_before(graph[0], [table, column, offset])
    for layer in range(2):
        gate = product_of(model, f"model.layers.{layer}.mlp.gate_proj").outputs[0]
        users = gate.uses()
        scaled = ir.node("Mul", [gate, offset.outputs[0]])
        graph.insert_after(gate.producer(), scaled)
        for node, index in users:
            node.replace_input_with(index, scaled.outputs[0])
    wrong = model.clone()
    wrong.graph.initializers["offset"].const_value = ir.tensor(np.float32(1.5), name="offset")
    stream = [node.outputs[0].name for node in graph if node.op_type == "Add" and node is not offset]
    assert {cut.names for cut in find_cuts(graph, every_name(graph))} >= {
        (offset.outputs[0].name, name) for name in stream[:3]
    }
    assert find(model, wrong).node == "offset"


def test_new_nodes_on_the_way_are_named_and_renamed_values_skipped(model, find):
    wrong = model.clone()
    gate = product_of(wrong, "model.layers.1.mlp.gate_proj")
    act = next(node for node, _ in gate.outputs[0].uses() if node.op_type == "Mul")
    gate.outputs[0].name, gate.name = "merged", "a new product"
    gate.replace_input_with(1, wrong.graph.initializers["model.layers.0.mlp.gate_proj.weight"])
    found = find(model, wrong)
    # Sigmoid is the first whose value has a namesake.
    assert found.op == "Sigmoid"
    assert found.through == ("a new product",)
    assert found.equal == (gate.inputs[0].name,)
    assert act.name != found.node


def test_a_value_of_another_shape_is_no_namesake(model):
    other = model.clone()
    stream = product_of(other, "model.layers.0.mlp.gate_proj").inputs[0]
    both = comparable_names(model.graph, other.graph)
    stream.shape = ir.Shape([1, "R", 32])
    assert both - comparable_names(model.graph, other.graph) == {stream.name}
    stream.shape = ir.Shape(["T", 32])
    assert comparable_names(model.graph, other.graph) == both


def test_if_nothing_can_be_compared_the_output_is_named(model, find):
    wrong = model.clone()
    exchange_weights(wrong, "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj")
    for node in wrong.graph:
        for value in node.outputs:
            if value.name != "logits":
                value.name = f"new {value.name}"
    found = find(model, wrong)
    assert (found.op, found.value, found.equal) == ("Squeeze", "logits", ())
    assert len(found.through) > 40


def every_name(graph):
    return comparable_names(graph, graph)


def test_the_cuts_are_the_residual_stream(model):
    graph = model.graph
    cuts = find_cuts(graph, every_name(graph))
    stream = [node.outputs[0].name for node in graph if node.op_type == "Add"]
    assert {(name,) for name in stream} < {cut.names for cut in cuts}
    inside = product_of(model, "model.layers.0.mlp.gate_proj").outputs[0].name
    assert all(inside not in cut.names for cut in cuts)
    assert [cut.position for cut in cuts] == sorted(cut.position for cut in cuts)


def test_no_cut_has_a_value_without_a_namesake(model):
    names = every_name(model.graph) - {node.outputs[0].name for node in model.graph if node.op_type == "Add"}
    cuts = find_cuts(model.graph, names)
    assert cuts
    assert not {name for cut in cuts for name in cut.names} - names


def constant(graph, name, numbers):
    array = np.asarray(numbers, np.int64 if isinstance(numbers, list) else np.float32)
    value = ir.Value(
        name=name,
        shape=ir.Shape(array.shape),
        type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
        const_value=ir.tensor(array, name=name),
    )
    graph.register_initializer(value)
    return value


def test_a_node_that_was_taken_out_and_still_reads_is_no_reader(model, find):
    wrong = model.clone()
    sigmoid = [node for node in wrong.graph if node.op_type == "Sigmoid"][1]
    read, written = sigmoid.inputs[0], sigmoid.outputs[0]
    tanh = ir.node("Tanh", [read], name="tanh")
    tanh.outputs[0].name, tanh.outputs[0].shape, tanh.outputs[0].dtype = "tanh", written.shape, written.dtype
    wrong.graph.insert_after(sigmoid, tanh)
    ir.convenience.replace_all_uses_with(written, tanh.outputs[0])
    wrong.graph.remove(sigmoid)
    assert sigmoid in [reader for reader, _ in read.uses()]
    found = find(model, wrong)
    assert (found.op, found.through) == ("Mul", ("tanh",))
