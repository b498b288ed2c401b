import onnx_ir as ir
import pytest

from optimc_passes.graph.attach import attach_weights
from optimc_passes.graph.shapes import inferred
from optimc_passes.verify.shape_faults import shape_faults


@pytest.fixture
def model(tiny_decoder):
    decoder = tiny_decoder(layers=1)
    return attach_weights(decoder.model, decoder.store)


def declare(model, op_type, *shape):
    node = next(node for node in model.graph if node.op_type == op_type)
    node.outputs[0].shape = ir.Shape(shape)
    return node


def test_a_sound_graph_has_no_faults(model):
    assert list(shape_faults(model, inferred(model))) == []


@pytest.mark.parametrize(
    ("shape", "shown"),
    [
        ((1, "T", 33), "[1,T,33]"),  # a width
        ((1, "R", 32), "[1,R,32]"),  # rows for tokens
        (("T", 32), "[T,32]"),  # a rank
        ((1, 7, 32), "[1,7,32]"),  # a length that is free
    ],
)
def test_a_planted_shape_is_found_at_its_node_with_both_shapes(model, shape, shown):
    node = declare(model, "MatMul", *shape)
    (fault,) = shape_faults(model, inferred(model))
    assert fault.node == node.name
    assert fault.sentence == (
        f"node 3 MatMul '{node.name}': '{node.outputs[0].name}' declares {shown}, computes [1,T,32]"
    )


def test_what_nobody_knows_is_no_fault(model):
    declare(model, "MatMul", 1, None, 32)
    node = declare(model, "Add", 1, "T", 32)
    node.outputs[0].shape = None
    assert list(shape_faults(model, inferred(model))) == []
    assert list(shape_faults(model, {})) == []
