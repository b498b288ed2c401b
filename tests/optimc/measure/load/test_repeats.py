"""Several runs of one load: medians and what differs between them."""

from dataclasses import replace

import pytest

from optimc.measure.load.goodput import Goodput
from optimc.measure.load.repeats import across_runs, repeat_bench
from optimc.measure.load.resources import Resources
from optimc.measure.percentile import Distribution
from optimc.measure.roofline.row_bound import RowBound
from optimc.measure.workload import Workload


@pytest.fixture
def runs(bench, scripted_engine, steady_script):
    first = bench(scripted_engine(steady_script(0.1, 0.01)), requests=8)
    return [replace(first, ttft_ms=Distribution(p50, p50 + 1, None, 8)) for p50 in (100.0, 104.0, 102.0)]


def test_the_value_is_the_median_of_the_runs_and_the_interval_theirs(runs):
    # 100, 104, 102: median 102, mean 102, s = 2, t(2) = 4.303: half = 4.303 * 2 / sqrt(3) = 4.968
    result = across_runs(runs)
    assert (result.ttft_ms.p50, result.ttft_ms.p90, result.ttft_ms.p99, result.ttft_ms.n) == (102, 103, None, 24)
    interval = result.intervals["ttft_ms.p50"]
    assert (interval.low, interval.high) == pytest.approx((102 - 4.9686, 102 + 4.9686), abs=1e-3)
    assert (interval.method, interval.n, result.runs) == ("t", 3, 3)
    assert (result.requests, result.num_failures) == (24, 0)


def test_two_runs_have_no_interval(runs):
    assert across_runs(runs[:2]).intervals == {}


def test_goodput_counts_are_added(runs):
    goodputs = [Goodput(8, 8, 2.0, {"ttft": 0, "failure": 0}), Goodput(6, 8, 1.0, {"ttft": 2, "failure": 0})]
    result = across_runs([replace(run, goodput=goodput) for run, goodput in zip(runs, goodputs, strict=False)])
    assert (result.goodput.met, result.goodput.of, result.goodput.broken["ttft"]) == (14, 16, 2)


def test_a_load_is_run_as_often_as_asked(runs):
    asked = []

    def bench(workload):
        asked.append(workload)
        return runs[len(asked) - 1]

    assert repeat_bench(bench, Workload(), 3).runs == 3
    assert asked == [Workload()] * 3


def test_what_is_said_of_the_process_is_that_of_all_runs(runs):
    used = [
        Resources(0.2, 100, "server pid 7"),
        Resources(0.6, 300, "server pid 7"),
        Resources(0.4, 200, "server pid 7"),
    ]
    result = across_runs([replace(run, resources=each) for run, each in zip(runs, used, strict=True)])
    assert result.resources == Resources(0.4, 300, "server pid 7")
    gone = across_runs(
        [
            replace(run, resources=each)
            for run, each in zip(runs, (used[0], Resources(None, None, "server pid 7")), strict=False)
        ]
    )
    assert gone.resources == Resources(None, None, "server pid 7")


def test_the_weakest_source_of_any_run_is_named(runs):
    assert across_runs([runs[0], replace(runs[1], token_source="estimate"), runs[2]]).token_source == "estimate"


def test_the_first_runs_share_of_the_bound_is_not_the_medians(runs):
    bound = RowBound(0.5, 0.5, None, None, "memory", 0.8, "")
    assert across_runs([replace(run, bound=bound) for run in runs]).bound is None
