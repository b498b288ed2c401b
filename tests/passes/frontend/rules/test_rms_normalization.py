import numpy as np
import pytest

from optimc_passes.frontend.rules import RmsNormalization

SCALE_LAST = RmsNormalization.rule("last", scale_first=False)
SCALE_FIRST = RmsNormalization.rule("first", scale_first=True)


def _graph(
    exponent: str = "2.0", axis: int = -1, scale: str = "float[8]", product: str = "Mul (normalized, scale)"
) -> str:
    return f"""norm (float[1,T,8] x, {scale} scale) => (float[1,T,8] y)
    <float exponent = {{{exponent}}}, int64[1] axes = {{{axis}}}, float epsilon = {{0.01}}> {{
        square = Pow (x, exponent)
        mean = ReduceMean <keepdims = 1> (square, axes)
        shifted = Add (mean, epsilon)
        root = Sqrt (shifted)
        inverse = Reciprocal (root)
        normalized = Mul (x, inverse)
        y = {product}
    }}"""


@pytest.mark.parametrize(
    ("rule", "product"), [(SCALE_LAST, "Mul (normalized, scale)"), (SCALE_FIRST, "Mul (scale, normalized)")]
)
def test_fires_once_with_the_scale_on_either_side(apply_rule, rule, product):
    applied = apply_rule(rule, _graph(product=product))
    assert applied.times == 1
    assert applied.operators == {"RMSNormalization": 1}
    assert applied.node("RMSNormalization").attributes["epsilon"].value == pytest.approx(0.01)


def test_computes_the_same(apply_rule):
    rng = np.random.default_rng(0)
    x, scale = rng.standard_normal((1, 5, 8)), rng.uniform(0.2, 3, 8)
    # The mean square is of the size of epsilon in the first row, so that epsilon matters.
    x[0, 0] *= 0.1
    apply_rule(SCALE_LAST, _graph()).assert_equal(x=x.astype(np.float32), scale=scale.astype(np.float32))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"exponent": "3.0"}, "the exponent is not the constant 2"),
        ({"axis": 1}, "the mean is not over the last axis"),
        ({"scale": "float[T,8]"}, "the scale is not a vector over the last axis"),
    ],
)
def test_declines_with_its_reason(apply_rule, change, reason):
    applied = apply_rule(SCALE_LAST, _graph(**change))
    assert applied.times == 0
    assert applied.reason == reason
