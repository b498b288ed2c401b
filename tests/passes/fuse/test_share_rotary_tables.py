import numpy as np
import pytest

from optimc_passes.fuse.share_rotary_tables import ShareRotaryTables

RNG = np.random.default_rng(0)
X = RNG.standard_normal((1, 5, 8)).astype(np.float32)


def _table(layer: int, frequencies: str = "frequencies", factor: str = "factor") -> str:
    return f"""column{layer} = Unsqueeze (positions, axes)
        real{layer} = Cast <to = 1> (column{layer})
        angles{layer} = Mul (real{layer}, {frequencies})
        cosine{layer} = Cos (angles{layer})
        cos{layer} = Mul (cosine{layer}, {factor})
        sine{layer} = Sin (angles{layer})
        sin{layer} = Mul (sine{layer}, {factor})"""


def _graph(second: str, order: str = "cos1, sin1") -> str:
    """Two rotations one after the other, each over tables of its own."""
    return f"""layers (float[1,T,8] x, int64[T] positions) => (float[1,T,8] y)
    <int64[2] axes = {{0, 2}}, float[1,1,2] frequencies = {{1, 0.1}}, float[1,1,2] same = {{1, 0.1}},
     float[1,1,2] slower = {{1, 0.01}}, float factor = {{1.5}}, float other = {{2.5}}> {{
        {_table(0)}
        {second}
        first = RotaryEmbedding <num_heads = 2> (x, cos0, sin0)
        y = RotaryEmbedding <num_heads = 2> (first, {order})
    }}"""


@pytest.mark.parametrize("frequencies", ["frequencies", "same"])
def test_equal_tables_become_one(apply_rule, frequencies):
    applied = apply_rule(ShareRotaryTables.rules, _graph(_table(1, frequencies)))
    assert (applied.times, applied.report.already) == (1, 1)
    assert (applied.operators["Cos"], applied.operators["Sin"], applied.operators["Unsqueeze"]) == (1, 1, 1)
    applied.assert_equal(x=X, positions=np.arange(5))


@pytest.mark.parametrize("change", [{"frequencies": "slower"}, {"factor": "other"}])
def test_tables_that_differ_stay_apart(apply_rule, change):
    applied = apply_rule(ShareRotaryTables.rules, _graph(_table(1, **change)))
    assert (applied.times, applied.report.already) == (0, 2)
    assert applied.operators["Cos"] == 2


def test_tables_that_are_shared_already_are_reported(apply_rule):
    applied = apply_rule(ShareRotaryTables.rules, _graph("", order="cos0, sin0"))
    assert (applied.times, applied.report.already) == (0, 2)
