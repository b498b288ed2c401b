import numpy as np
import onnx_ir as ir
import pytest

from optimc_passes.fuse.fold_constants import FoldConstants
from optimc_passes.fuse.rule import NoOptions
from optimc_passes.graph.weight_expression import Param, Scaled, Shifted

FOLD = FoldConstants(NoOptions())


def _constants(body: str, result: str = "float[T,2] y") -> str:
    return f"""constants (float[T,2] x) => ({result})
    <float[2] a = {{1, 2}}, float[2] b = {{3, 5}}, int64[2] wide = {{40, 40}}, float one = {{1}}> {{
        {body}
    }}"""


def test_nodes_over_constants_become_constants_that_keep_their_names(apply_rule):
    applied = apply_rule(
        FoldConstants.rules, _constants("sum = Add (a, b)\n square = Mul (sum, sum)\n y = Mul (x, square)")
    )
    assert applied.times == 2
    assert applied.operators == {"Mul": 1}
    assert applied.after.graph.initializers["square"].const_value.numpy().tolist() == [16, 49]
    applied.assert_equal(x=np.ones((3, 2), np.float32))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("big = Expand (one, wide)\n z = ReduceSum <keepdims = 0> (big)\n y = Mul (x, z)",
         "the result has 6400 bytes, over 4096"),
        ("noise = RandomNormalLike (a)\n y = Mul (x, noise)", "RandomNormalLike may give something else each time"),
        ("y = Identity (a)\n z = Neg (x)", "it has several outputs or gives one of the graph's"),
    ],
)  # fmt: skip
def test_declines_with_its_reason(apply_rule, body, reason):
    outputs = "float[2] y, float[T,2] z" if "z = Neg" in body else "float[T,2] y"
    applied = apply_rule(FoldConstants.rules, _constants(body, outputs))
    assert applied.times == 0
    assert applied.reason == reason


def test_a_node_over_an_activation_is_no_place_for_it(apply_rule):
    applied = apply_rule(FoldConstants.rules, _constants("y = Mul (x, a)"))
    assert (applied.times, applied.reason) == (0, "")


def _number(decoder, op_type, number):
    """Let the first norm read its weight with a number, as a centred norm does."""
    graph = decoder.model.graph
    norm = next(node for node in graph if node.op_type == "RMSNormalization")
    weight = norm.inputs[1]
    tensor = ir.tensor(np.array(number), name="number")
    value = ir.Value(name="number", shape=ir.Shape(number.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    output = ir.Value(name="with_number", shape=weight.shape, type=weight.type)
    graph.insert_before(norm, ir.node(op_type, [weight, value], outputs=[output]))
    norm.replace_input_with(1, output)
    return weight.name


@pytest.mark.parametrize(
    ("op_type", "expected"),
    [
        ("Add", lambda param: Shifted(param, 2.0)),
        ("Sub", lambda param: Shifted(param, -2.0)),
        ("Mul", lambda param: Scaled(param, 2.0)),
        ("Div", lambda param: Scaled(param, 0.5)),
    ],
)
def test_a_number_becomes_part_of_how_a_weight_is_read(tiny_decoder, fused, op_type, expected):
    decoder = tiny_decoder(layers=1)
    name = _number(decoder, op_type, np.float32(2))
    result = fused(FOLD, decoder)
    assert result.metrics == {"matched": 1, "declined": 0}
    assert result.graph.initializers["with_number"].const_value.expression == expected(Param(name))
    assert name not in result.graph.initializers
    assert result.error < 1e-6
    assert FOLD(result.outcome.artifact).report.metrics == {"matched": 0, "declined": 0}


def test_adding_zero_declines(tiny_decoder, fused):
    decoder = tiny_decoder(layers=1)
    _number(decoder, "Add", np.float32(0))
    result = fused(FOLD, decoder)
    assert result.metrics == {"matched": 0, "declined": 1}
    assert result.decisions[0].endswith(": the number is 0")
