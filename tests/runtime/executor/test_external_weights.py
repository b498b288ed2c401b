"""The appended bytes, read back by ONNX's own parser."""

import onnx
from onnx import TensorProto, helper

from optimc_runtime.executor.external_weights import ExternalWeight, declare_weights


def test_declared_weights_join_the_graph_they_are_appended_to() -> None:
    small = helper.make_tensor("small", TensorProto.FLOAT, (1,), [2.0])
    node = helper.make_node("Add", ["a", "b"], ["c"])
    model = helper.make_model(helper.make_graph([node], "g", [], [], [small]))
    weights = [
        ExternalWeight("a", TensorProto.UINT4, (300, 7), "engine.plan", 64, 1050),
        ExternalWeight("weights with ünïcode", TensorProto.FLOAT, (0, 2**40), "engine.plan", 2**35, 0),
    ]
    parsed = onnx.ModelProto.FromString(declare_weights(model.SerializeToString(), weights))
    assert parsed.ir_version == model.ir_version
    assert parsed.graph.name == "g"
    assert [n.op_type for n in parsed.graph.node] == ["Add"]
    found = parsed.graph.initializer
    assert [tensor.name for tensor in found] == ["small", "a", "weights with ünïcode"]
    for tensor, weight in zip(found[1:], weights, strict=True):
        assert tensor.data_type == weight.onnx_dtype
        assert tuple(tensor.dims) == weight.shape
        assert tensor.data_location == TensorProto.EXTERNAL
        assert {entry.key: entry.value for entry in tensor.external_data} == {
            "location": "engine.plan",
            "offset": str(weight.offset),
            "length": str(weight.nbytes),
        }


def test_no_weights_leave_the_model_as_it_is() -> None:
    model = helper.make_model(helper.make_graph([], "g", [], []))
    assert onnx.ModelProto.FromString(declare_weights(model.SerializeToString(), [])) == model
