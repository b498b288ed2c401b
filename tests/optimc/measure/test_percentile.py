import pytest

from optimc.measure.percentile import MIN_SAMPLES_P99, Distribution, percentile


def test_one_sample_is_every_percentile():
    assert [percentile([4.0], q) for q in (0, 50, 99, 100)] == [4.0] * 4


def test_two_samples_are_interpolated():
    assert percentile([20.0, 10.0], 50) == 15.0
    assert percentile([20.0, 10.0], 90) == pytest.approx(19.0)


def test_hundred_samples_by_hand():
    values = [float(v) for v in range(100, 0, -1)]
    # Rank 0.99 * 99 = 98.01 among 1..100 counted from 0: between 99 and 100.
    assert percentile(values, 99) == pytest.approx(99.01)
    assert percentile(values, 90) == pytest.approx(90.1)
    assert percentile(values, 50) == pytest.approx(50.5)


def test_p99_is_withheld_for_few_samples_and_says_how_many():
    few = Distribution.of([float(v) for v in range(20)])
    assert few.p99 is None
    assert few.to_json() == {"p50": 9.5, "p90": pytest.approx(17.1), "p99": None, "n": 20}
    assert few.cells()[2] == "n/a (n=20)"


def test_p99_is_given_from_the_bound_on():
    assert Distribution.of([1.0] * (MIN_SAMPLES_P99 - 1)).p99 is None
    assert Distribution.of([1.0] * MIN_SAMPLES_P99).p99 == 1.0


def test_no_samples_give_no_numbers():
    assert Distribution.of([]).to_json() == {"p50": None, "p90": None, "p99": None, "n": 0}
