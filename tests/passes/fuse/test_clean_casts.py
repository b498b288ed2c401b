import numpy as np
import pytest

from optimc_passes.fuse.clean_casts import CleanCasts

FLOAT, INT32, INT64, FLOAT16, DOUBLE, INT8 = 1, 6, 7, 10, 11, 3


def _chain(source: str, through: int, target: int, result: str, body: str = "y = Cast <to = {target}> (inner)") -> str:
    return f"""casts ({source}[T] x) => ({result}[T] y) {{
        before = Identity (x)
        inner = Cast <to = {through}> (before)
        {body.format(target=target)}
    }}"""


@pytest.mark.parametrize(
    ("source", "through", "target", "result"),
    [("float", DOUBLE, FLOAT, "float"), ("float16", FLOAT, DOUBLE, "double"), ("int8", INT32, FLOAT, "float")],
)
def test_a_cast_through_a_wider_type_goes(apply_rule, source, through, target, result):
    applied = apply_rule(CleanCasts.rules[:1], _chain(source, through, target, result))
    assert applied.times == 1
    assert applied.operators == {"Identity": 1, "Cast": 1}
    dtype = {"float": np.float32, "float16": np.float16, "int8": np.int8}[source]
    applied.assert_equal(x=np.array([1.5, -3, 100]).astype(dtype))


@pytest.mark.parametrize(
    ("source", "through", "target", "result", "reason"),
    [
        ("float", FLOAT16, FLOAT, "float", "FLOAT16 does not hold every FLOAT, so FLOAT would get other numbers"),
        ("float", INT32, FLOAT, "float", "INT32 does not hold every FLOAT, so FLOAT would get other numbers"),
        ("int64", INT32, INT64, "int64", "INT32 does not hold every INT64, so INT64 would get other numbers"),
        ("int32", FLOAT, INT32, "int32", "FLOAT does not hold every INT32, so INT32 would get other numbers"),
    ],
)
def test_a_cast_that_rounds_or_overflows_declines(apply_rule, source, through, target, result, reason):
    applied = apply_rule(CleanCasts.rules, _chain(source, through, target, result))
    assert applied.times == 0
    assert applied.reason == reason


def test_position_numbers_fit_into_int32(apply_rule):
    """Counts of tokens: an input of the graph, though its type could hold more."""
    text = f"""positions (int64[T] positions) => (float[T,1] y) <int64[1] one = {{1}}> {{
        column = Unsqueeze (positions, one)
        inner = Cast <to = {INT32}> (column)
        y = Cast <to = {FLOAT}> (inner)
    }}"""
    applied = apply_rule(CleanCasts.rules, text)
    assert applied.times == 1
    assert applied.operators == {"Unsqueeze": 1, "Cast": 1}
    applied.assert_equal(positions=np.array([0, 1, 70_000]))


def test_a_cast_to_the_same_type_goes(apply_rule):
    text = """same (float[T] x) => (float[T] y) { inner = Cast <to = 1> (x)
        y = Neg (inner)
    }"""
    applied = apply_rule(CleanCasts.rules, text)
    assert (applied.times, applied.operators) == (1, {"Neg": 1})
    applied.assert_equal(x=np.ones(3, np.float32))


def test_an_output_of_the_graph_keeps_its_name(apply_rule):
    text = "same (float[T] x) => (float[T] y) { y = Cast <to = 1> (x) }"
    applied = apply_rule(CleanCasts.rules, text)
    assert applied.operators == {"Identity": 1}
    applied.assert_equal(x=np.ones(3, np.float32))


def test_chains_become_one_and_a_second_time_there_is_nothing(apply_rule):
    text = _chain("float", DOUBLE, FLOAT, "float", "outer = Cast <to = {target}> (inner)\n y = Neg (outer)")
    applied = apply_rule(CleanCasts.rules, text)
    assert applied.operators == {"Identity": 1, "Neg": 1}
    applied.assert_equal(x=np.ones(3, np.float32))


def test_an_inner_cast_with_another_reader_stays_for_it(apply_rule):
    text = _chain("float", DOUBLE, FLOAT, "float").replace("float[T] y)", "float[T] y, double[T] inner)")
    applied = apply_rule(CleanCasts.rules[:1], text)
    assert applied.times == 1
    assert applied.operators == {"Identity": 1, "Cast": 2}
    applied.assert_equal(x=np.ones(3, np.float32))
