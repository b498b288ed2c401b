import numpy as np
import onnx_ir as ir
import pytest

from optimc_passes.graph.attach import attach_weights
from optimc_passes.graph.same_graph import same_graph
from optimc_passes.graph.weight_expression import Param
from optimc_passes.graph.weight_tensor import WeightTensor


@pytest.fixture
def decoder(tiny_decoder):
    return tiny_decoder(layers=1)


@pytest.fixture
def model(decoder):
    return attach_weights(decoder.model, decoder.store)


def test_a_copy_is_the_same(model):
    assert same_graph(model, model.clone())


def rename_a_node(graph):
    graph[5].name = "other"


def rename_a_value(graph):
    graph[5].outputs[0].name = "other"


def change_an_operator(graph):
    next(node for node in graph if node.op_type == "Sigmoid").op_type = "Tanh"


def change_an_attribute(graph):
    node = next(node for node in graph if node.op_type == "RMSNormalization")
    node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 1e-5)


def change_a_shape(graph):
    graph[5].outputs[0].shape = ir.Shape(["R", 1])


def change_an_input(graph):
    graph[5].replace_input_with(0, graph[3].outputs[0])


def exchange_weights(graph):
    norm = graph.initializers["model.norm.weight"]
    norm.const_value = WeightTensor(Param("model.layers.0.input_layernorm.weight"), norm.const_value.store)


def change_a_constant(graph):
    value = graph.initializers["constant_1"]
    value.const_value = ir.tensor(np.array([1, 32], np.int64), name="constant_1")


def add_a_node(graph):
    graph.append(ir.node("Identity", [graph.outputs[0]]))


def drop_an_initializer(graph):
    graph[0].replace_input_with(0, graph.initializers["lm_head.weight"])
    del graph.initializers["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    "change",
    [
        rename_a_node,
        rename_a_value,
        change_an_operator,
        change_an_attribute,
        change_a_shape,
        change_an_input,
        exchange_weights,
        change_a_constant,
        add_a_node,
        drop_an_initializer,
    ],
)
def test_any_change_is_seen(model, change):
    other = model.clone()
    change(other.graph)
    assert not same_graph(model, other)
    assert not same_graph(other, model)


def test_the_same_graph_over_another_store_is_another(decoder, model):
    assert not same_graph(model, attach_weights(decoder.model, decoder.store.replace({})))


def test_no_weight_is_read(model, monkeypatch):
    monkeypatch.setattr(WeightTensor, "_compute", lambda _: pytest.fail("read"))
    assert same_graph(model, model.clone())
