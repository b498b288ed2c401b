import numpy as np
import pytest

from optimc_passes.fuse.drop_batch_axis import DropBatchAxis
from optimc_passes.fuse.rule import NoOptions

FUSE = DropBatchAxis(NoOptions())
RNG = np.random.default_rng(0)
X = RNG.standard_normal((5, 4)).astype(np.float32)


def _graph(body: str, result: str = "float[T,N] y") -> str:
    """Put an axis in front of x [T, 4], compute `inner` from `a`, and take the axis away."""
    return f"""model (float[T,4] x, float[T,2] angles) => ({result})
    <int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] three = {{3}}, int64[1] last = {{-1}},
     float[4] vector = {{1, 2, 3, 4}}, float[1,1,4] row = {{4, 3, 2, 1}}, int64[2] widths = {{1, 3}},
     float[4,2] weight = {{1, 2, 3, 4, 5, 6, 7, 8}}, int64[4] heads = {{1, -1, 2, 2}}, int64[3] packed = {{1, -1, 4}},
     int64[2] rows = {{-1, 4}}, int64[2] picked = {{3, 1}}> {{
        a = Unsqueeze (x, zero)
        {body}
        y = Squeeze (inner, zero)
    }}"""


FORMS = {
    "elementwise with a vector": ("inner = Add (a, vector)", {"Add": 1}),
    "elementwise with a constant of as many axes": ("inner = Mul (a, row)", {"Mul": 1}),
    "a product with a matrix": ("inner = MatMul (a, weight)", {"MatMul": 1}),
    "a norm": ("inner = RMSNormalization <axis = 2> (a, vector)", {"RMSNormalization": 1}),
    "a Softmax by default along the last axis": ("inner = Softmax (a)", {"Softmax": 1}),
    "a Gather of rows": ("inner = Gather <axis = 1> (a, picked)", {"Gather": 1}),
    "a Gather of features": ("inner = Gather <axis = -1> (a, picked)", {"Gather": 1}),
    "a Slice": ("inner = Slice (a, one, three, two)", {"Slice": 1}),
    "a Split and a Concat": (
        "left, right = Split <axis = 2> (a, widths)\n inner = Concat <axis = -1> (right, left)",
        {"Split": 1, "Concat": 1},
    ),
    "a Transpose": ("inner = Transpose <perm = [0, 2, 1]> (a)", {"Transpose": 1}),
    "another axis added and removed": (
        "b = Unsqueeze (a, two)\n c = Abs (b)\n inner = Squeeze (c, two)",
        {"Unsqueeze": 1, "Abs": 1, "Squeeze": 1},
    ),
    "reshapes into heads and back": (
        "b = Reshape (a, heads)\n c = Abs (b)\n d = Reshape (c, packed)\n inner = Abs (d)",
        {"Reshape": 2, "Abs": 2},
    ),
    "reshapes that only move the axis": (
        "b = Reshape (a, rows)\n c = Abs (b)\n d = Reshape (c, packed)\n inner = Neg (d)",
        {"Abs": 1, "Neg": 1},
    ),
}


@pytest.mark.parametrize(("body", "left"), FORMS.values(), ids=list(FORMS))
def test_each_operator_has_a_form_without_the_axis(apply_rule, body, left):
    applied = apply_rule(DropBatchAxis.rules, _graph(body))
    assert applied.times == 1
    assert applied.operators == left
    assert all(value.shape is None or len(value.shape) < 4 for node in applied.after.graph for value in node.outputs)
    applied.assert_equal(x=X, angles=X[:, :2])


def test_a_rotation_keeps_an_axis_of_its_own(apply_rule):
    applied = apply_rule(
        DropBatchAxis.rules,
        _graph("""cos = Unsqueeze (angles, zero)
        rotated = RotaryEmbedding <num_heads = 1> (a, cos, cos)
        inner = Neg (rotated)"""),
    )
    assert applied.times == 1
    assert [node.op_type for node in applied.after.graph] == [
        *["Unsqueeze"] * 2,  # cosines and sines are one table here
        "RotaryEmbedding",
        "Squeeze",
        "Neg",
    ]
    applied.assert_equal(x=X, angles=X[:, :2])


def test_where_only_a_rotation_has_the_axis_there_is_nothing_to_do(apply_rule):
    text = _graph("cos = Unsqueeze (angles, zero)\n inner = RotaryEmbedding <num_heads = 1> (a, cos, cos)")
    applied = apply_rule(DropBatchAxis.rules, text)
    assert (applied.times, applied.report.already) == (0, 1)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("inner = CumSum (a, one)", "CumSum: it has no form without the batch axis"),
        ("inner = Softmax <axis = 0> (a)", "Softmax: it works along the batch axis"),
        ("b = Transpose <perm = [1, 0, 2]> (a)\n inner = Transpose <perm = [1, 0, 2]> (b)",
         "Transpose: it moves the batch axis"),
        ("inner = Slice (a, zero, one, zero)", "Slice: it cuts along the batch axis"),
        ("inner = MatMul (a, a)", "MatMul: it multiplies values that both have a batch axis"),
    ],
)  # fmt: skip
def test_an_operator_without_such_a_form_declines(apply_rule, body, reason):
    applied = apply_rule(DropBatchAxis.rules, _graph(body))
    assert applied.times == 0
    assert applied.reason == reason


def test_a_value_with_the_axis_that_leads_elsewhere_declines(apply_rule):
    applied = apply_rule(DropBatchAxis.rules, _graph("inner = Abs (a)\n b = Neg (a)", "float[T,4] y, float[1,T,4] b"))
    assert applied.reason == "Neg reads a value with the axis beside what leads to the end"


def test_a_squeeze_of_another_axis_is_no_place_for_it(apply_rule):
    text = """other (float[T,1] x) => (float[T] y) <int64[1] one = {1}> { y = Squeeze (x, one) }"""
    applied = apply_rule(DropBatchAxis.rules, text)
    assert (applied.times, applied.report.already, applied.reason) == (0, 0, "")


def test_a_decoder_loses_the_axis_and_every_reshape(tiny_decoder, fused):
    result = fused(FUSE, tiny_decoder())
    assert result.metrics == {"matched": 1, "declined": 0}
    assert [result.count(op_type) for op_type in ("Reshape", "Unsqueeze", "Squeeze")] == [0, 0, 0]
    assert {len(value.shape) for node in result.graph for value in node.outputs} == {2}
    assert result.error == 0
    assert FUSE(result.outcome.artifact).report.metrics == {"matched": 0, "declined": 0}


def test_names_stay_with_what_means_the_same(tiny_decoder, fused):
    result = fused(FUSE, tiny_decoder())
    names = {value.name for node in result.graph for value in node.outputs}
    before = {value.name for node in result.before.graph for value in node.outputs}
    assert names <= before
    assert "logits" in names
