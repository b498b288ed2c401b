"""Intervals and ratios, by hand and by coverage."""

import math

import numpy as np
import pytest

from optimc.measure.load.interval import (
    bootstrap_interval,
    order_interval,
    paired_ratio,
    percentile_interval,
    sum_of_logs,
    t_interval,
)


def test_t_interval_by_hand():
    # mean 2, standard deviation 1, t(2 degrees) 4.303: half width 4.303 / sqrt(3) = 2.484
    interval = t_interval([1, 2, 3])
    assert (interval.low, interval.high) == (pytest.approx(2 - 2.4843, abs=1e-4), pytest.approx(2 + 2.4843, abs=1e-4))
    assert (interval.n, interval.method, interval.level) == (3, "t", 0.95)


def test_t_interval_of_five_by_hand():
    # 2 4 4 4 6: mean 4, sum of squares 8, s = sqrt(2), t(4) = 2.776: half = 2.776 * sqrt(2 / 5) = 1.7557
    interval = t_interval([2, 4, 4, 4, 6])
    assert interval.high - 4 == pytest.approx(1.7557, abs=1e-4)


def test_two_values_have_no_interval():
    assert t_interval([1, 2]) is None


def test_many_values_go_by_the_normal_distribution():
    values = [0.0, 2.0] * 50  # mean 1, s = sqrt(100 / 99)
    assert t_interval(values).high - 1 == pytest.approx(1.960 * math.sqrt(100 / 99) / 10)


def test_a_bootstrap_needs_twenty_values_and_repeats_itself():
    values = list(range(19))
    assert bootstrap_interval(values, 50) is None
    assert bootstrap_interval([*values, 19], 50) == bootstrap_interval([*values, 19], 50)


def test_bootstrap_intervals_hold_the_true_median_about_as_often_as_they_say():
    # 400 draws of 60 exponential values, whose median is ln 2. At 95% +- 3 sigma (1.1% each) and the bootstrap's own
    # shortness at n = 60, 90 .. 98% is what to expect.
    generator = np.random.default_rng(5)
    hits = 0
    for seed in range(400):
        interval = bootstrap_interval(generator.exponential(1.0, 60).tolist(), 50, seed)
        hits += interval.low <= math.log(2) <= interval.high
    assert 0.90 <= hits / 400 <= 0.98


def test_blocks_make_the_interval_of_values_that_hang_together_wider():
    # Each value stands four times in a row: 100 independent ones, not 400. Shuffled, a block no longer shows that.
    # Blocks of ceil(400^(1/3)) = 8 give back most of the factor sqrt(4) by which the width comes out too small.
    ratios = []
    for seed in range(10):
        generator = np.random.default_rng(seed)
        together = np.repeat(generator.exponential(1.0, 100), 4)
        shuffled = generator.permutation(together)
        wide, narrow = bootstrap_interval(together.tolist(), 50), bootstrap_interval(shuffled.tolist(), 50)
        ratios.append((wide.high - wide.low) / (narrow.high - narrow.low))
    assert 1.3 < np.median(ratios) < 2.2


def test_order_interval_of_the_median_of_ten_is_the_textbook_one():
    # Of 10 values the 2nd and the 9th enclose the median with 97.9%; the 3rd and 8th with 89.1% only.
    interval = order_interval(list(range(1, 11)), 50)
    assert (interval.low, interval.high, interval.method) == (2, 9, "order")


def test_p99_has_no_interval_below_300_values_nor_where_none_reaches_above_it():
    assert order_interval(list(range(299)), 99) is None
    # P(all 300 below p99) = 0.99^300 = 4.9% > 2.5%: even the largest is no upper end
    assert order_interval(list(range(300)), 99) is None
    # 0.99^400 = 1.8%: it is
    assert order_interval(list(range(400)), 99).high == 399


def test_the_tail_goes_by_order_the_middle_by_bootstrap():
    values = np.random.default_rng(0).exponential(1.0, 500).tolist()
    assert percentile_interval(values, 50).method == "bootstrap"
    assert percentile_interval(values, 99).method == "order"


def test_a_ratio_of_pairs_by_hand():
    # logs of 2, 2, 2: no spread
    ratio = paired_ratio([2, 4, 8], [1, 2, 4])
    assert (ratio.value, ratio.interval.low, ratio.interval.high) == pytest.approx((2, 2, 2))
    assert ratio.excludes_one
    # logs +-a and 0: mean 0, so the factor is 1 and the interval holds it
    undecided = paired_ratio([2, 1, 1], [1, 1, 2])
    assert undecided.value == pytest.approx(1)
    assert not undecided.excludes_one
    # s = ln 2, half = 4.303 * ln 2 / sqrt(3)
    assert undecided.interval.high == pytest.approx(math.exp(4.303 * math.log(2) / math.sqrt(3)))
    assert "no difference seen" in str(undecided)


def test_what_moves_both_of_a_pair_alike_cancels():
    # The second pair was measured while the machine was ten times slower.
    assert paired_ratio([3, 30, 3], [2, 20, 2]).interval.high == pytest.approx(1.5)


def test_two_pairs_give_a_ratio_without_verdict():
    ratio = paired_ratio([2, 2], [1, 1])
    assert (ratio.interval, ratio.excludes_one, ratio.pairs) == (None, False, 2)
    assert "too few" in str(ratio)


def test_factors_are_added_pair_by_pair():
    # Together 6x in every pair, though each factor varies: 2 * 3, 3 * 2, 1 * 6.
    product = sum_of_logs([[2, 3, 1], [3, 2, 6]])
    assert (product.value, product.interval.low, product.interval.high) == pytest.approx((6, 6, 6))


def test_pairs_must_be_pairs():
    with pytest.raises(ValueError, match="must be as many"):
        sum_of_logs([[1, 2], [1]])
