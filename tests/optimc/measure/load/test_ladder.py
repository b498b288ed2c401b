"""The ladder on queueing stubs in virtual time, and on made-up results: where the knee is, and what is said of it."""

import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from optimc.errors import ConfigError
from optimc.measure.bench import bench_driver
from optimc.measure.bench_result import BenchResult
from optimc.measure.engine_driver import EngineDriver
from optimc.measure.load.goodput import Goodput
from optimc.measure.load.ladder import run_ladder
from optimc.measure.load.ladder_result import LadderResult
from optimc.measure.load.slo import Slo
from optimc.measure.machine import read_machine
from optimc.measure.percentile import Distribution
from optimc.measure.workload import Workload

FEW = {"prompt_tokens": 16, "output_tokens": 4, "requests": 80}


@pytest.fixture
def ladder(scripted_engine):
    """Run a ladder on an engine whose script is made anew, on time of its own, for every step."""
    from tests.optimc.measure.conftest import VirtualTime

    def run(make_script, slo, *, engine=None, workload=FEW, **options):
        resets = []

        def bench(load):
            time = VirtualTime()
            engine = scripted_engine(make_script(time.clock))
            result = time.run(bench_driver(EngineDriver(engine, time.clock), load, time.clock, "run"))
            resets.append(engine.resets)
            return result

        result = run_ladder(bench, Workload(**workload, slo=slo), **options)
        assert set(resets) == {1}  # the prefix cache is emptied before every step
        return result

    return run


def one_at_a_time(service_s, tpot_s=0.001):
    """First come, first served, `service_s` each until its first token: a D/1 queue."""

    def make(clock):
        free_at = 0.0

        def script(number, prompt_ids, max_tokens):
            nonlocal free_at
            now = clock()
            free_at = max(now, free_at) + service_s
            return [(free_at - now, 1, None), *[(tpot_s, 1, None)] * (max_tokens - 2), (tpot_s, 1, "length")]

        return script

    return make


def shared_by_all(ttft_s, tpot_s):
    """Every token takes `tpot_s` for each request that runs when this one comes: bandwidth that all of them share."""

    def make(clock):
        ends = []

        def script(number, prompt_ids, max_tokens):
            now = clock()
            ends[:] = [end for end in ends if end > now]
            each = tpot_s * (len(ends) + 1)
            ends.append(now + ttft_s + each * (max_tokens - 1))
            return [(ttft_s, 1, None), *[(each, 1, None)] * (max_tokens - 2), (each, 1, "length")]

        return script

    return make


def md1_waits_at_most(t, rate, service):
    """P(wait <= t) in an M/D/1 queue, by Erlang's formula."""
    total = 0.0
    for k in range(math.floor(t / service + 1e-9) + 1):
        x = rate * (k * service - t)
        total += math.exp(-x) * x**k / math.factorial(k)
    return (1 - rate * service) * total


@pytest.mark.slow
def test_the_knee_of_an_md1_queue_is_where_theory_has_it(ladder):
    # Service 100 ms, TTFT at most 300 ms: the wait must be at most 200 ms for 95%. Erlang's formula gives the rate.
    low, high = 0.1, 9.99
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if md1_waits_at_most(0.2, middle, 0.1) >= 0.95 else (low, middle)
    result = ladder(one_at_a_time(0.1), Slo(ttft_ms=300), workload={**FEW, "requests": 600})
    # The bracket is 10% wide; 600 requests of one seed may shift it by one bracket.
    assert result.knee.rate_per_s / 1.1 <= low <= result.knee.fails_at_per_s * 1.1
    assert result.knee.fails_at_per_s / result.knee.rate_per_s <= 1.10 + 1e-9
    # 64 requests of 0.1 s; 15 others stand before the first
    assert result.closed.requests_per_s == pytest.approx(64 / (6.4 + 1.5), rel=0.01)
    assert result.ok


def test_queueing_breaks_the_first_token(ladder):
    result = ladder(one_at_a_time(0.1, 0.001), Slo(ttft_ms=300, tpot_ms=50))
    assert result.knee.broke_first == "ttft"
    assert "queueing or scheduling" in result.knee.why


def test_shared_bandwidth_breaks_the_later_tokens(ladder):
    result = ladder(shared_by_all(0.01, 0.02), Slo(ttft_ms=300, tpot_ms=50))
    assert result.knee.broke_first == "tpot"
    assert "bandwidth" in result.knee.why


def test_rates_that_all_pass_leave_nothing_broken(ladder):
    result = ladder(one_at_a_time(0.1), Slo(ttft_ms=10_000), rates=[2, 1])
    assert [step.rate_per_s for step in result.steps] == [1, 2]
    assert (result.knee.rate_per_s, result.knee.fails_at_per_s, result.knee.broke_first) == (2, None, "nothing")
    assert result.closed is None
    assert str(result.knee) == "at least 2/s"


def test_a_limit_below_all_service_has_no_passing_rate_down_to_next_to_nothing_and_that_is_said(ladder):
    result = ladder(one_at_a_time(0.1), Slo(ttft_ms=50))
    assert (result.ok, result.knee.rate_per_s) == (False, None)
    shares = [step.rate_per_s / result.closed.requests_per_s for step in result.steps]
    assert shares == pytest.approx([1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8])
    (warning,) = result.warnings
    lowest = result.steps[0].rate_per_s
    assert warning.startswith(f"no rate passes, and none below {lowest:.3g}/s was tried: that is next to nothing")


def made_up(rate, *, share=1.0, broken=None, thirds=(1.0, 1.0, 1.0), ttft=100.0, tpot=10.0, failures=None, of=100):
    """A step's result without any load."""
    met = round(share * of)
    counts = {"ttft": 0, "tpot": 0, "failure": 0, **(broken or {})}
    latencies = {name: Distribution(value, value, None, of) for name, value in (("ttft_ms", ttft), ("tpot_ms", tpot))}
    rest = {name: Distribution.of([]) for name in ("itl_ms", "e2e_ms", "queue_ms")}
    return BenchResult(
        description="made up", config=Workload(arrival="poisson", rate_per_s=rate), machine=read_machine(), requests=of,
        failures=failures or {}, **latencies, **rest, cold_ttft_ms=None, output_tokens_per_s=None,
        output_tokens_per_s_whole_run=None, requests_per_s=rate, prefill_tokens_per_s=None, prefix_hit_rate=None,
        prompt_tokens=None, output_tokens=None, token_source="ids", wall_s=1.0, warnings=(),
        goodput=Goodput(met, of, rate * share, counts), in_flight_thirds=thirds,
    )  # fmt: skip


SLO = Slo(ttft_ms=500, tpot_ms=40)


def made_up_ladder(by_rate, rates=None, **options):
    """A ladder whose results are made up per rate; a list gives one per measurement of that rate."""
    asked = []

    def bench(load):
        if not load.is_open:
            return replace(made_up(4.0), in_flight_thirds=None, config=load)
        asked.append(load.rate_per_s)
        found = by_rate(load.rate_per_s) if callable(by_rate) else by_rate[load.rate_per_s]
        if isinstance(found, list):
            found = found.pop(0)
        return made_up(load.rate_per_s, **found)

    return run_ladder(bench, Workload(slo=SLO), rates=rates, **options), asked


def test_rates_climb_by_half_and_close_in_by_halves():
    # capacity 4/s: 1, 1.5, 2.25, 3.375 pass, 5.06 and 7.59 do not; then sqrt(3.375 * 5.06) = 4.13 fails,
    # sqrt(3.375 * 4.13) = 3.74 passes, sqrt(3.74 * 4.13) = 3.93 passes, and 4.13 / 3.93 = 1.05 is close enough
    result, asked = made_up_ladder(lambda rate: {} if rate < 4 else {"share": 0.5, "broken": {"ttft": 50}})
    assert asked == pytest.approx([1, 1.5, 2.25, 3.375, 5.0625, 7.59375, 4.1335, 3.7350, 3.9292], abs=1e-3)
    assert (result.knee.rate_per_s, result.knee.fails_at_per_s) == pytest.approx((3.929, 4.1335), abs=1e-3)


def test_where_the_first_two_rates_fail_the_search_goes_down_until_one_holds():
    # capacity 4/s: 1 and 1.5 fail, so do 0.5 and 0.25; 0.125 passes, and the gap to 0.25 is halved from there
    result, asked = made_up_ladder(lambda rate: {} if rate < 0.2 else {"share": 0.5, "broken": {"ttft": 50}})
    assert asked[:5] == [1, 1.5, 0.5, 0.25, 0.125]
    assert result.knee.rate_per_s < 0.2 <= result.knee.fails_at_per_s <= 1.1 * result.knee.rate_per_s
    assert result.warnings == ()


def test_on_the_way_down_there_are_no_more_steps_than_allowed_either():
    result, asked = made_up_ladder(lambda rate: {"share": 0.5, "broken": {"ttft": 50}}, max_steps=4)
    assert len(asked) == 4
    assert "none below 0.25/s was tried: 4 measurements are the most" in result.warnings[0]


def test_no_more_steps_than_allowed():
    _, asked = made_up_ladder(lambda rate: {}, max_steps=5)
    assert len(asked) == 5


def test_a_second_chance_counts_among_the_steps():
    bad = {"share": 0.5, "broken": {"ttft": 50}}
    result, asked = made_up_ladder(lambda rate: bad if rate == 1.5 else {}, max_steps=5)
    assert len(asked) == 5
    assert "1.5/s failed, though 5.06/s passes; 5 measurements are the most" in result.warnings[0]


def test_a_growing_backlog_fails_whatever_the_latencies():
    # 1.5 * 4 + 2 = 8 running in the last third still pass, 8.1 do not
    result, _ = made_up_ladder({1: {"thirds": (4, 6, 8)}, 2: {"thirds": (4, 6, 8.1)}}, rates=[1, 2])
    assert [step.passes for step in result.steps] == [True, False]
    assert result.knee.broke_first == "backlog"
    assert "arrivals exceed what is served" in result.knee.why


def test_a_latency_is_named_before_the_backlog_that_comes_with_it():
    steps = {
        1: {},
        2: {"thirds": (4, 8, 20)},
        4: {"share": 0.3, "broken": {"ttft": 70, "failure": 70}, "thirds": (9, 20, 40)},
    }
    assert made_up_ladder(steps, rates=[1, 2, 4])[0].knee.broke_first == "ttft"


def test_failures_are_named_where_no_latency_is_missed():
    failing = {"share": 0.8, "broken": {"failure": 20}, "failures": {"HTTP 429: busy": 20}, "thirds": (1, 5, 9)}
    knee = made_up_ladder({1: {}, 2: failing}, rates=[1, 2])[0].knee
    assert knee.broke_first == "failure"
    assert knee.why.startswith("20.0% of requests fail at 2/s, most with: HTTP 429: busy")


def test_of_two_broken_at_one_rate_the_one_further_above_its_limit_is_named():
    both = {"share": 0.5, "broken": {"ttft": 50, "tpot": 50}, "ttft": 600, "tpot": 80}  # 1.2 and 2 times
    assert made_up_ladder({1: {}, 2: both}, rates=[1, 2])[0].knee.broke_first == "tpot"


def test_the_one_that_breaks_at_the_lower_rate_is_named():
    steps = {
        1: {},
        2: {"share": 0.9, "broken": {"ttft": 10}, "ttft": 510},
        3: {"share": 0.1, "broken": {"ttft": 10, "tpot": 90}, "tpot": 400},
    }
    assert made_up_ladder(steps, rates=[1, 2, 3])[0].knee.broke_first == "ttft"


def test_limits_kept_one_by_one_but_not_together_name_the_one_broken_most():
    together = {"share": 0.93, "broken": {"ttft": 3, "tpot": 4}}
    assert made_up_ladder({1: {}, 2: together}, rates=[1, 2])[0].knee.broke_first == "tpot"


def test_a_step_that_fails_below_a_passing_one_is_measured_again():
    bad = {"share": 0.5, "broken": {"ttft": 50}}
    result, asked = made_up_ladder({1: {}, 2: [bad, {}], 3: {}}, rates=[1, 2, 3])
    assert asked == [1, 2, 3, 2]
    assert (result.knee.rate_per_s, result.warnings) == (3, ())


def test_failing_twice_below_a_passing_rate_stands_and_is_said():
    bad = {"share": 0.5, "broken": {"ttft": 50}}
    result, _ = made_up_ladder({1: {}, 2: [bad, bad], 3: {}}, rates=[1, 2, 3])
    assert [step.passes for step in result.steps] == [True, False, True]
    assert result.warnings == ("not monotone: 2/s failed twice, though 3/s passes; take the knee with care",)


@pytest.mark.parametrize(
    ("workload", "options", "where"),
    [
        (Workload(), {}, "--ladder"),
        (Workload(slo=SLO), {"attain": 1.5}, "--attain"),
        (Workload(slo=SLO), {"rates": []}, "--rates"),
        (Workload(slo=SLO), {"rates": [1, -1]}, "--rates"),
        (Workload(slo=SLO, arrival="trace", dataset="trace"), {}, "--ladder"),
    ],
)
def test_what_no_ladder_can_be_made_of_is_refused_before_anything_runs(workload, options, where):
    with pytest.raises(ConfigError) as caught:
        run_ladder(lambda load: pytest.fail("ran"), workload, **options)
    assert [fault.where for fault in caught.value.faults] == [where]


def test_json_and_back_is_the_same_ladder(ladder):
    result = ladder(one_at_a_time(0.1), Slo(ttft_ms=300), rates=[2, 9], workload={**FEW, "requests": 40})
    data = json.loads(json.dumps(result.to_json()))
    assert LadderResult.from_json(data) == result
    assert (data["format"], data["percentile"]) == (1, "p90")


def test_the_table_tells_the_knee_and_draws_the_limit(ladder):
    result = ladder(one_at_a_time(0.1), Slo(ttft_ms=300), rates=[2, 9.5], workload={**FEW, "requests": 60})
    console = Console(width=80)
    with console.capture() as capture:
        console.print(result.table())
    text = capture.get()
    assert "knee: 2/s (passes; 9.5/s does not)" in text
    assert "TTFT p90 against rate, limit 300 ms" in text
    assert "9.5/s fails: " in text
    assert "p90 is shown: the smallest step has 60 samples, too few for p99" in text
    assert "│" in text


def test_a_climb_ends_where_no_load_can_be_sent(ladder):
    # A window of 200,000 s at 5/s is a million requests; the stub would pass any rate.
    steps = []

    def bench(load):
        steps.append(load.rate_per_s)
        return replace(template, config=load, requests_per_s=16.0)

    template = ladder(one_at_a_time(0.001), Slo(ttft_ms=1000), rates=[4.0]).steps[0].result
    workload = Workload(prompt_tokens=16, output_tokens=4, slo=Slo(ttft_ms=1000), duration_s=200_000.0, rate_per_s=1.0,
                        arrival="poisson")  # fmt: skip
    result = run_ladder(bench, workload)
    assert steps == [None, 4.0]
    assert "no rate above 4/s was tried: duration_s makes 1,200,000 requests" in result.warnings[0]


def test_a_rate_that_no_load_can_have_is_refused_before_anything_runs(ladder):
    with pytest.raises(ConfigError, match="--rates: 1e\\+06: rate_per_s must be"):
        ladder(one_at_a_time(0.001), Slo(ttft_ms=1000), rates=[1.0, 1e6])
