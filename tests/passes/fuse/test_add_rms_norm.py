import numpy as np
import pytest

from optimc_passes.fuse.add_rms_norm import AddRmsNorm
from optimc_passes.fuse.rule import NoOptions

FUSE = AddRmsNorm(NoOptions())
RNG = np.random.default_rng(0)
X, RESIDUAL = RNG.standard_normal((2, 5, 8)).astype(np.float32)


def _graph(
    outputs: str = "float[T,8] y, float[T,8] total",
    residual: str = "float[T,8]",
    norm: str = "RMSNormalization <axis = -1, epsilon = 0.01> (total, scale)",
    before: str = "",
) -> str:
    return f"""block (float[T,8] x, {residual} residual) => ({outputs})
    <float[8] scale = {{1, 2, 3, 4, 5, 6, 7, 8}}, float one = {{1}}> {{
        total = Add (x, residual)
        {before}
        y = {norm}
    }}"""


@pytest.mark.parametrize("axis", [-1, 1])
def test_fires_once_keeps_both_outputs_and_computes_the_same(apply_rule, axis):
    applied = apply_rule(
        AddRmsNorm.rules, _graph(norm=f"RMSNormalization <axis = {axis}, epsilon = 0.01> (total, scale)")
    )
    assert applied.times == 1
    assert applied.operators == {"AddRmsNorm": 1}
    node = applied.node("AddRmsNorm")
    assert [value.name for value in node.outputs] == ["total", "y"]
    assert node.attributes["epsilon"].value == pytest.approx(0.01)
    applied.assert_equal(x=X, residual=RESIDUAL)


def test_the_default_epsilon_is_that_of_onnx(apply_rule):
    applied = apply_rule(AddRmsNorm.rules, _graph(norm="RMSNormalization (total, scale)"))
    assert applied.node("AddRmsNorm").attributes["epsilon"].value == pytest.approx(1e-5)
    applied.assert_equal(x=X, residual=RESIDUAL)


def test_a_reader_of_the_sum_before_the_norm_comes_after_the_operator(apply_rule):
    applied = apply_rule(AddRmsNorm.rules, _graph("float[T,8] y, float[T,8] early", before="early = Mul (total, one)"))
    assert applied.times == 1
    assert [node.op_type for node in applied.after.graph] == ["AddRmsNorm", "Mul"]
    applied.assert_equal(x=X, residual=RESIDUAL)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"norm": "RMSNormalization <axis = 0> (total, square)", "before": "square = Mul (x, x)"},
            "the norm is not over the last axis only",
        ),
        ({"residual": "float[8]"}, "the summands have shapes [T,8] and [8], not one"),
        (
            {"norm": "RMSNormalization (total, factor)", "before": "factor = Mul (scale, one)"},
            "the scale of the norm is computed",
        ),
    ],
)
def test_declines_with_its_reason(apply_rule, change, reason):
    applied = apply_rule(AddRmsNorm.rules, _graph(**change))
    assert applied.times == 0
    assert applied.reason == reason


def test_a_decoder_has_two_in_each_layer_but_for_the_first_norm(tiny_decoder, fused):
    result = fused(FUSE, tiny_decoder(layers=3))
    # The Gather of rows stands between the last sum and the final norm only after it.
    assert result.metrics == {"matched": 6, "declined": 0}
    assert (result.count("AddRmsNorm"), result.count("RMSNormalization"), result.count("Add")) == (6, 1, 0)
    assert result.error == 0
    assert FUSE(result.outcome.artifact).report.metrics == {"matched": 0, "declined": 0}
