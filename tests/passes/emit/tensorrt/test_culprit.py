"""Our node in TensorRT's words."""

import onnx
import onnx_ir as ir
import pytest

from optimc_passes.emit.tensorrt.culprit import build_problem, find_culprit

TEXT = """<ir_version: 10, opset_import: ["" : 23]>
g (float[T, 8] x, float[8, 8] w) => (float[T, 8] y) {
    [first] a = MatMul(x, w)
    [second] b = Relu(a)
    [third] y = MatMul(b, w)
}"""


@pytest.fixture(scope="module")
def graph():
    model = ir.from_proto(onnx.parser.parse_model(TEXT))
    for node, name in zip(
        model.graph, ("model.layers.0/mlp/MatMul", "model.layers.0/mlp/Relu", "model.layers.1"), strict=True
    ):
        node.name = name
    return model.graph


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("API Usage Error (model.layers.0/mlp/Relu: ElementWise must. In validate", "model.layers.0/mlp/Relu"),
        ("IShuffleLayer model.layers.1: reshaping failed", "model.layers.1"),
        ("see {model.layers.0/mlp/MatMul, model.layers.1}", "model.layers.0/mlp/MatMul"),
        ("Tensor b has datatype Int4", "model.layers.0/mlp/Relu"),
        ("Relu operation was not supported by a dedicated kernel", "model.layers.0/mlp/Relu"),
    ],
)
def test_a_node_is_found_by_its_name_its_value_or_its_kind(graph, text, name):
    node = find_culprit(graph, ["something else", text])
    assert node is not None
    assert node.name == name


@pytest.mark.parametrize("text", ["out of memory", "about model.layers.0/mlp/MatMulX", "w is read by two"])
def test_what_names_no_node_finds_none(graph, text):
    assert find_culprit(graph, [text]) is None
    assert build_problem(graph, "TensorRT", [text]).startswith("TensorRT cannot build the graph: ")


def test_a_problem_is_one_line_without_what_is_no_reason(graph):
    said = [
        "ModelImporter.cpp:140: While parsing node number 0",
        "model.layers.1: [checkMacros.cpp::catchCudaError::250] bad shape (In validate at /_src/api.cpp:192)\n"
        "Error Code 1: Cuda Runtime (cudaError 35: CUDA driver version is insufficient for CUDA runtime version)",
        "x" * 1000,
    ]
    problem = build_problem(graph, "TensorRT", [*said, said[1]])
    assert problem.startswith(
        "node 'model.layers.1' onnx::MatMul: TensorRT cannot build the graph: model.layers.1: bad shape (); xxx"
    )
    assert len(problem) < 500
    assert build_problem(graph, "TensorRT", []) == "TensorRT cannot build the graph: it gave no reason"


@pytest.mark.parametrize(
    "text", ["Error Code 2: OutOfMemory (Requested size was 9 bytes.)", "mask: [1,Q,K] Volume exceeds limit"]
)
def test_shapes_that_are_too_large_are_the_limits(graph, text):
    advice = "; lower limits max_seqs, max_step_tokens or max_seq_len"
    assert build_problem(graph, "TensorRT", [text]).endswith(text + advice)
    assert advice not in build_problem(graph, "TensorRT", ["something else"])
