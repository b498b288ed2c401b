"""The open loop against a scripted engine on virtual time: what is due is sent, and latency counts from there."""

import pytest

from optimc.errors import OverloadedError


def by_due(run):
    return sorted(run.measured, key=lambda exchange: exchange.scheduled_s)


def test_requests_are_sent_when_due_however_many_run(load_run, scripted_engine, steady_script):
    # 2/s, each takes 10 s: the 20th request starts 9.5 s after the first, while all before it run.
    run = load_run(scripted_engine(steady_script(9.99, 0.01)), arrival="constant", rate_per_s=2.0, requests=20)
    assert [e.sent_s - run.steady_start_s for e in by_due(run)] == pytest.approx([k / 2 for k in range(20)])
    assert all(e.lag_s == pytest.approx(0, abs=1e-9) for e in run.measured)
    assert run.in_flight(run.window_end_s - 0.01) == 20  # 10 s of arrivals at 2/s; load went on to the end


def test_a_stall_is_seen_by_every_request_that_was_due_in_it(load_run, scripted_engine, virtual_time):
    # The server does nothing from 10 s to 11 s, and 10 ms of work otherwise. At 10/s ten requests are due in the stall,
    # k tenths of a second after its start: they wait 1 - k/10 s and 10 ms. A closed loop would see one of them.
    def script(number, prompt_ids, max_tokens):
        now = virtual_time.clock()
        wait = 11 - now if 10 - 1e-9 <= now < 11 - 1e-9 else 0.0
        return [(wait + 0.010, max_tokens, "length")]

    virtual_time._loop.now = 6.99  # the cold request takes 10 ms, so that requests are due at 7, 7.1, ..
    run = load_run(scripted_engine(script), arrival="constant", rate_per_s=10.0, requests=60, warmup_requests=1)
    stalled = [e.ttft_s for e in by_due(run) if e.ttft_s > 0.0101]
    assert stalled == pytest.approx([1.010 - k / 10 for k in range(10)])


def test_a_late_generator_is_inside_the_latency_and_warned_about(load_run, bench, scripted_engine, virtual_time):
    # Submitting request 30 holds up the whole event loop for 1 s. The nine due meanwhile are sent late, k tenths of a
    # second less than 1 s, and their latency counts from when they were due all the same.
    def blocking():
        def script(number, prompt_ids, max_tokens):
            if number == 30:
                virtual_time._loop.now += 1.0
            return [(0.010, max_tokens, "length")]

        return scripted_engine(script)

    options = {"arrival": "constant", "rate_per_s": 10.0, "requests": 60, "warmup_requests": 1}
    run = load_run(blocking(), **options)
    late = [e.lag_s for e in by_due(run) if e.lag_s > 0.001]
    assert late == pytest.approx([1.0 - k / 10 for k in range(1, 10)], abs=1e-6)
    assert max(e.ttft_s for e in run.measured) == pytest.approx(1.010)
    virtual_time.__init__()
    result = bench(blocking(), **options)
    assert any(warning.startswith("the load generator itself was late") for warning in result.warnings)


def test_a_punctual_generator_is_not_warned_about(bench, scripted_engine, steady_script):
    result = bench(scripted_engine(steady_script(0.1, 0.01)), arrival="poisson", rate_per_s=10.0)
    assert result.warnings == ()
    assert result.lag_ms.p90 == pytest.approx(0, abs=1e-6)


def test_warm_up_is_sent_at_the_same_rate_and_not_counted(load_run, scripted_engine, steady_script):
    # max(10, 2 s of load) at 8/s are 16, besides the cold one
    run = load_run(scripted_engine(steady_script(0.1, 0.01)), arrival="constant", rate_per_s=8.0, requests=40)
    assert (run.cold is not None, len(run.warmup), len(run.measured)) == (True, 16, 40)
    assert run.steady_start_s - run.warmup[0].scheduled_s == pytest.approx(16 / 8)
    assert run.window_end_s - run.steady_start_s == pytest.approx(40 / 8)


def test_slow_start_is_outside_the_figures_and_reported(bench, scripted_engine):
    def script(number, prompt_ids, max_tokens):
        return [(5.0 if number < 3 else 0.050, max_tokens, "length")]

    result = bench(scripted_engine(script), arrival="constant", rate_per_s=20.0, requests=300)
    assert result.ttft_ms.p99 < 60
    assert result.cold_ttft_ms == pytest.approx(5000)


def test_throughput_of_straddling_requests_is_the_offered_rate(bench, scripted_engine, steady_script):
    # 4/s of 10 tokens each; a request takes 1.9 s, so that about 8 straddle either edge of the window.
    engine = scripted_engine(steady_script(1.0, 0.1))
    result = bench(engine, output_tokens=10, arrival="constant", rate_per_s=4.0, requests=80)
    assert result.output_tokens_per_s == pytest.approx(40, rel=0.02)


def test_load_goes_on_until_the_last_measured_request_has_ended(load_run, scripted_engine, steady_script):
    engine = scripted_engine(steady_script(3.0, 0.1))
    run = load_run(engine, arrival="constant", rate_per_s=5.0, requests=10)
    assert len(run.fillers) == pytest.approx(3.1 * 5, abs=1)  # those due in the 3.1 s of the last one
    assert len(engine.aborted) == len([filler for filler in run.fillers if filler.end_s is None])


def test_refused_requests_are_failures_and_are_not_sent_again(bench, scripted_engine):
    def script(number, prompt_ids, max_tokens):
        if number % 4 == 0:
            raise OverloadedError("queue full")
        return [(0.1, max_tokens, "length")]

    engine = scripted_engine(script)
    result = bench(engine, arrival="constant", rate_per_s=10.0, requests=40, warmup_requests=1)
    assert result.failures == {"OverloadedError: queue full": 10}
    assert not result.ok
    assert result.ttft_ms.n == 30


def test_a_rate_at_which_everything_fails_is_a_result(bench, scripted_engine):
    def refuse(*_):
        raise OverloadedError("queue full")

    result = bench(scripted_engine(refuse), arrival="constant", rate_per_s=10.0, requests=20)
    assert result.failures == {"OverloadedError: queue full": 20}
    assert result.ttft_ms.p50 is None


def test_a_request_that_hangs_fails_after_its_time(bench, scripted_engine):
    def script(number, prompt_ids, max_tokens):
        return [(0.1, 1, None)] if number == 40 else [(0.1, max_tokens, "length")]

    result = bench(scripted_engine(script), arrival="constant", rate_per_s=10.0, requests=30, timeout_s=7.0)
    assert result.failures == {"timed out after 7 s": 1}


def test_requests_running_at_once_are_rate_times_duration(bench, scripted_engine, steady_script):
    # Little's law: 5/s of 2 s each are 10 at once, from the first third of the window on.
    result = bench(scripted_engine(steady_script(1.99, 0.01)), arrival="constant", rate_per_s=5.0, requests=90)
    assert result.in_flight_thirds == pytest.approx((10, 10, 10), abs=0.1)
    assert result.in_flight_end == pytest.approx(10, abs=1)


def test_two_runs_share_nothing_in_the_prefix_cache(bench, scripted_engine, steady_script):
    engine = scripted_engine(steady_script(0.1, 0.01))
    engine.reset_prefix_cache = lambda: None
    options = {"prompt_tokens": 64, "arrival": "poisson", "rate_per_s": 10.0}
    assert bench(engine, run_id="first", **options).prefix_hit_rate == 0


def test_the_table_says_what_was_offered_and_what_piled_up(bench, scripted_engine, steady_script):
    from rich.console import Console

    result = bench(scripted_engine(steady_script(0.1, 0.01)), arrival="poisson", rate_per_s=10.0)
    console = Console(width=160)
    with console.capture() as capture:
        console.print(result.table())
    text = capture.get()
    assert "16 prompt + 2 output tokens, 10.0/s poisson" in text
    assert "requests running" in text
    assert "says nothing about the next one" in text
