"""swiglu and geglu: one rule each over halves of a row, and over two values."""

import numpy as np
import pytest

from optimc_passes.fuse.geglu import Geglu
from optimc_passes.fuse.rule import NoOptions
from optimc_passes.fuse.swiglu import Swiglu

RNG = np.random.default_rng(0)
ROWS = RNG.standard_normal((5, 8)).astype(np.float32)
ACTIVATIONS = {
    "silu": (Swiglu, "sigmoid = Sigmoid (gate)\n activated = Mul (gate, sigmoid)"),
    "gelu": (Geglu, "activated = Gelu (gate)"),
    "gelu_tanh": (Geglu, 'activated = Gelu <approximate = "tanh"> (gate)'),
}


def _halves(
    activated: str,
    split: str = "gate, up = Split <axis = -1> (x, widths)",
    widths: str = "4, 4",
    product: str = "Mul (activated, up)",
) -> str:
    return f"""gated (float[T,8] x) => (float[T,4] y) <int64[2] widths = {{{widths}}}>
    {{
        {split}
        {activated}
        y = {product}
    }}"""


def _pair(activated: str, up: str = "float[T,8]") -> str:
    return f"""gated (float[T,8] gate, {up} up) => (float[T,8] y) {{
        {activated}
        y = Mul (activated, up)
    }}"""


@pytest.fixture(params=list(ACTIVATIONS))
def activation(request):
    return (request.param, *ACTIVATIONS[request.param])


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"product": "Mul (up, activated)"},
        {"split": "gate, up = Split <axis = 1, num_outputs = 2> (x)"},
    ],
    ids=["a Split by widths", "the other factor first", "a Split into equal parts"],
)
def test_halves_of_a_row_fire_once_and_the_split_goes(apply_rule, activation, change):
    name, pass_type, text = activation
    applied = apply_rule(pass_type.rules, _halves(text, **change))
    assert applied.times == 1
    assert applied.operators == {"GatedActivation": 1}
    assert applied.node("GatedActivation").attributes["activation"].as_string() == name
    applied.assert_equal(x=ROWS)


def test_two_values_fire_once_and_compute_the_same(apply_rule, activation):
    name, pass_type, text = activation
    applied = apply_rule(pass_type.rules, _pair(text))
    assert applied.times == 1
    assert applied.operators == {"GatedActivation": 1}
    assert applied.node("GatedActivation").attributes["activation"].as_string() == name
    applied.assert_equal(gate=ROWS, up=ROWS[::-1].copy())


def test_the_second_half_activated_is_left_to_two_values(apply_rule, activation):
    _, pass_type, text = activation
    applied = apply_rule(pass_type.rules, _halves(text, split="up, gate = Split <axis = -1> (x, widths)"))
    assert applied.operators == {"Split": 1, "GatedActivation": 1}
    assert [value.name for value in applied.node("GatedActivation").inputs] == ["gate", "up"]
    applied.assert_equal(x=ROWS)


def test_a_product_that_is_broadcast_declines(apply_rule, activation):
    _, pass_type, text = activation
    applied = apply_rule(pass_type.rules, _pair(text, up="float[8]"))
    assert applied.times == 0
    assert applied.reason == "gate and up have shapes [T,8] and [8], not one"


def test_a_split_that_is_not_into_halves_of_a_row_declines(apply_rule, activation):
    _, pass_type, text = activation
    rows = _halves(text, split="gate, up = Split <axis = 0> (x, widths)").replace("float[T,4] y", "float[4,8] y")
    halves = pass_type.rules[:1]
    assert apply_rule(halves, rows).reason == "the split is not along the last axis"


def test_the_first_two_of_three_parts_are_left_to_two_values(apply_rule, activation):
    _, pass_type, text = activation
    split = "gate, up, rest = Split <axis = -1, num_outputs = 3> (x)"
    applied = apply_rule(pass_type.rules, _halves(text, split=split).replace("float[T,8] x", "float[T,12] x"))
    assert applied.operators == {"Split": 1, "GatedActivation": 1}
    applied.assert_equal(x=np.concatenate([ROWS, ROWS[:, :4]], axis=1))


def test_an_activation_read_elsewhere_declines(apply_rule, activation):
    _, pass_type, text = activation
    both = _pair(text).replace("(float[T,8] y)", "(float[T,8] y, float[T,8] activated)")
    applied = apply_rule(pass_type.rules, both)
    assert applied.times == 0
    assert applied.reason == "a value inside the pattern has a reader outside"


@pytest.mark.parametrize("pass_type", [Swiglu, Geglu])
def test_a_decoder_equals_the_original_and_a_second_time_there_is_nothing(tiny_decoder, fused, pass_type):
    result = fused(pass_type(NoOptions()), tiny_decoder())
    expected = 2 if pass_type is Swiglu else 0
    assert result.metrics == {"matched": expected, "declined": 0}
    assert result.count("GatedActivation") == expected
    assert result.error == 0
    again = pass_type(NoOptions())(result.outcome.artifact)
    assert again.report.metrics == {"matched": 0, "declined": 0}
