import onnx_ir as ir

from optimc_passes.fuse.surroundings import MAX_LINES, surroundings


def _nodes(body: str) -> dict[str, ir.Node]:
    text = f'<ir_version: 10, opset_import: ["" : 23]>\nm (float[1,T,4] x) => (float[1,T,4] y) {{ {body} }}'
    return {node.outputs[0].name: node for node in ir.from_onnx_text(text).graph}


def test_producers_stand_before_the_node_and_consumers_after_it():
    nodes = _nodes("a = Neg (x) b = Abs (a) c = Softmax <axis = -1> (b) d = Neg (c) y = Abs (d)")
    assert surroundings(nodes["c"], radius=1) == (
        "   b = Abs(a) : ?",
        "-> c = Softmax(b; axis=-1) : ?",
        "   d = Neg(c) : ?",
    )
    assert len(surroundings(nodes["c"])) == 5


def test_siblings_are_left_out():
    nodes = _nodes("a = Neg (x) b = Abs (a) c = Sqrt (a) y = Add (b, c)")
    assert [line[3] for line in surroundings(nodes["b"])] == ["a", "b", "y"]


def test_a_shape_shows_its_symbols():
    assert surroundings(_nodes("y = Abs (x)")["y"]) == ("-> y = Abs(x) : [1,T,4]",)


def test_only_the_nearest_are_shown():
    readers = " ".join(f"r{index} = Neg (a)" for index in range(20))
    lines = surroundings(_nodes(f"a = Abs (x) {readers} y = Sqrt (a)")["a"])
    assert len(lines) == MAX_LINES
    assert lines[0].startswith("-> a")
