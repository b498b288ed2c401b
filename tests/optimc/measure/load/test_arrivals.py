"""Moments of arrival: repeatable, and spread as they should be."""

import numpy as np
import pytest

from optimc.measure.load.arrivals import arrival_times
from optimc.measure.workload import Workload


def poisson(seed=0, rate=4.0):
    return Workload(arrival="poisson", rate_per_s=rate, seed=seed)


def test_equal_seeds_give_equal_moments_and_more_begin_with_the_same():
    assert arrival_times(poisson(), 50).tolist() == arrival_times(poisson(), 100)[:50].tolist()
    assert arrival_times(poisson(1), 50).tolist() != arrival_times(poisson(2), 50).tolist()


def test_the_prompts_do_not_change_the_moments():
    other = Workload(arrival="poisson", rate_per_s=4.0, prompt_tokens=7, output_tokens=9)
    assert arrival_times(poisson(), 20).tolist() == arrival_times(other, 20).tolist()


def test_poisson_gaps_have_the_mean_and_the_spread_of_exponential_ones():
    gaps = np.diff(arrival_times(poisson(), 10_001))
    # Mean and standard deviation of exponential gaps are both 1/4 s. The mean of 10,000 lies within 3 sigma =
    # 3 * 0.25 / 100 of it; their standard deviation within 3 * 0.25 * sqrt(2 / 10,000), the fourth moment being
    # 9 sigma^4.
    assert gaps.mean() == pytest.approx(0.25, abs=0.0075)
    assert gaps.std() == pytest.approx(0.25, abs=0.0107)


def test_constant_arrivals_are_even():
    times = arrival_times(Workload(arrival="constant", rate_per_s=4.0), 4)
    assert times.tolist() == [0, 0.25, 0.5, 0.75]


def test_a_trace_is_replayed_from_its_first_request_and_as_fast_as_asked():
    trace = Workload(arrival="trace", dataset="trace", rate_scale=2.0)
    assert arrival_times(trace, 3, [10.0, 11.0, 14.0, 99.0]).tolist() == [0, 0.5, 2.0]
