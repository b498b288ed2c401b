import numpy as np
import pytest

from optimc_passes.fuse.rms_norm import RmsNorm

RULES = RmsNorm.rules


def _graph(
    exponent: str = "float exponent = {2.0}",
    axis: int = -1,
    scale: str = "float[8]",
    square: str = "Pow (x, exponent)",
    mean: str = "ReduceMean <keepdims = 1> (square, axes)",
    variance: str = "Add (mean, epsilon)",
    factor: str = "Reciprocal (root)",
    normalized: str = "Mul (x, factor)",
    product: str = "Mul (normalized, scale)",
) -> str:
    # Nothing dead: a value with a reader outside the pattern keeps the rule away.
    root = "root = Sqrt (variance)" if "root" in factor + normalized else ""
    inverse = f"factor = {factor}" if "factor" in normalized else ""
    return f"""norm (float[1,T,8] x, {scale} scale) => (float[1,T,8] y)
    <{exponent}, int64[1] axes = {{{axis}}}, float epsilon = {{0.01}}, float minus_half = {{-0.5}},
     float one = {{1.0}}, float two = {{2.0}}> {{
        square = {square}
        mean = {mean}
        variance = {variance}
        {root}
        {inverse}
        normalized = {normalized}
        y = {product}
    }}"""


def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x, scale = rng.standard_normal((1, 5, 8)), rng.uniform(0.2, 3, 8)
    # The mean square is of the size of epsilon in the first row, so that epsilon matters.
    x[0, 0] *= 0.1
    return {"x": x.astype(np.float32), "scale": scale.astype(np.float32)}


FORMS = {
    "x times one over the root": {},
    "the scale first": {"product": "Mul (scale, normalized)"},
    "the factor first": {"normalized": "Mul (factor, x)"},
    "epsilon first": {"variance": "Add (epsilon, mean)"},
    "x times x": {"square": "Mul (x, x)"},
    "x over the root": {"normalized": "Div (x, root)"},
    "a power of minus one half": {"factor": "Pow (variance, minus_half)"},
    "one divided by the root": {"factor": "Div (one, root)"},
    "a whole number as exponent": {"exponent": "int64 exponent = {2}"},
    "an axis that is kept by default": {"mean": "ReduceMean (square, axes)"},
    "the last axis counted from the front": {"axis": 2},
}


@pytest.mark.parametrize("change", FORMS.values(), ids=list(FORMS))
def test_fires_once_on_each_form_and_computes_the_same(apply_rule, change):
    applied = apply_rule(RULES, _graph(**change))
    assert applied.times == 1
    assert applied.node("RMSNormalization").attributes["epsilon"].value == pytest.approx(0.01)
    assert applied.operators == {"RMSNormalization": 1}
    applied.assert_equal(**inputs())


def test_axes_are_an_attribute_before_opset_18(apply_rule):
    applied = apply_rule(RULES, _graph(mean="ReduceMean <axes = [-1], keepdims = 1> (square)"), opset=17)
    assert applied.times == 1
    assert applied.operators == {"RMSNormalization": 1}
    applied.assert_equal(**inputs())


def test_a_second_time_there_is_nothing(apply_rule):
    text = """norm (float[1,T,8] x, float[8] scale) => (float[1,T,8] y) {
        y = RMSNormalization <axis = -1, epsilon = 0.01> (x, scale)
    }"""
    assert apply_rule(RULES, text).times == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"exponent": "float exponent = {3.0}"}, "the exponent is not the constant 2"),
        ({"factor": "Pow (variance, two)"}, "the inverse is not the constant -0.5"),
        ({"factor": "Div (two, root)"}, "the one is not the constant 1"),
        ({"variance": "Add (mean, mean)"}, "epsilon is not constant"),
        ({"axis": 1}, "the mean is not over the last axis"),
        ({"scale": "float[1]"}, "the scale has 1 elements, the last axis 8"),
        ({"scale": "float[T,8]"}, "the scale is not a vector over the last axis"),
    ],
)
def test_declines_with_its_reason(apply_rule, change, reason):
    applied = apply_rule(RULES, _graph(**change))
    assert applied.times == 0
    assert applied.reason == reason
