import onnx_ir as ir
import pytest

from optimc_passes.frontend.names import rename

HEADER = '<ir_version: 10, opset_import: ["" : 23]>\n'
SCOPES = "pkg.torch.onnx.name_scopes"
# The same graph, its independent nodes and constants in two orders.
FIRST = """g (float[4] x, float[4] w) => (float[4] y) <float[4] two = {2, 2, 2, 2}, float[4] one = {1, 1, 1, 1}> {
    a = Mul (x, one)
    b = Mul (x, two)
    c = Mul (b, w)
    y = Add (a, c)
}"""
SECOND = """g (float[4] x, float[4] w) => (float[4] y) <float[4] p = {1, 1, 1, 1}, float[4] q = {2, 2, 2, 2}> {
    v = Mul (x, q)
    t = Mul (v, w)
    u = Mul (x, p)
    y = Add (u, t)
}"""


def _renamed(text: str, scopes: dict[str, list[str]] | None = None) -> ir.Model:
    model = ir.from_onnx_text(HEADER + text)
    for node in model.graph:
        for output in node.outputs:
            if output.name in (scopes or {}):
                node.metadata_props[SCOPES] = str(scopes[output.name])
                node.metadata_props["pkg.torch.onnx.stack_trace"] = 'File "/home/me/model.py"'
    rename(model.graph, "wrapped")
    return model


def test_order_and_names_depend_on_the_graph_alone():
    first, second = (ir.to_proto(_renamed(text)).SerializeToString() for text in (FIRST, SECOND))
    assert first == second


def test_nodes_come_right_before_they_are_needed():
    assert [node.name for node in _renamed(SECOND).graph] == ["Mul", "Mul_2", "Mul_3", "Add"]


def test_constants_are_numbered_by_first_use():
    constants = _renamed(FIRST).graph.initializers
    assert {name: value.const_value.numpy()[0] for name, value in constants.items()} == {
        "constant_0": 1.0,
        "constant_1": 2.0,
    }


@pytest.mark.parametrize("wrapper_path", ["wrapped.model.norm", "model.norm"])
def test_nodes_and_values_carry_the_module_path_without_the_wrapper(wrapper_path):
    graph = _renamed(FIRST, {"a": ["", "wrapped", wrapper_path, "mul_17"]}).graph
    assert graph[0].name == "model.norm/Mul"
    assert graph[0].outputs[0].name == "model.norm/Mul"


def test_ports_keep_their_names():
    graph = _renamed(FIRST, {"y": ["", "wrapped", "add"]}).graph
    assert [value.name for value in (*graph.inputs, *graph.outputs)] == ["x", "w", "y"]


def test_traces_of_the_exporting_machine_are_removed():
    graph = _renamed(FIRST, {"a": ["", "wrapped", "mul"]}).graph
    assert not any(node.metadata_props for node in graph)
