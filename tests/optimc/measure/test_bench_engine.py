"""The load generator against a scripted engine on virtual time."""

import pytest
from rich.console import Console

from optimc.errors import MeasureError, OverloadedError
from optimc.measure.bench import bench_driver
from optimc.measure.engine_driver import EngineDriver
from optimc.measure.workload import Workload


@pytest.fixture
def bench(virtual_time):
    def run(engine, run_id="run", **options):
        driver = EngineDriver(engine, virtual_time.clock)
        return virtual_time.run(bench_driver(driver, Workload(**options), virtual_time.clock, run_id))

    return run


def rendered(result) -> str:
    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(result.table())
    return capture.get()


def test_figures_of_a_steady_engine_by_hand(bench, scripted_engine, steady_script):
    engine = scripted_engine(steady_script(0.300, 0.010))
    result = bench(engine, prompt_tokens=64, output_tokens=11, requests=5)
    assert result.ttft_ms.p50 == pytest.approx(300)
    assert result.tpot_ms.p50 == pytest.approx(10)
    assert result.e2e_ms.p50 == pytest.approx(400)
    assert result.queue_ms.p50 == pytest.approx(2)
    assert (result.ttft_ms.n, result.itl_ms.n) == (5, 50)
    assert result.output_tokens_per_s == pytest.approx(11 / 0.4)
    assert result.output_tokens_per_s_whole_run == pytest.approx(11 / 0.4)
    assert result.prefill_tokens_per_s == pytest.approx(64 / 0.3)
    assert result.requests_per_s == pytest.approx(2.5)
    assert result.prefix_hit_rate == 0
    assert (str(result.prompt_tokens), str(result.output_tokens)) == ("64", "11")
    assert result.warnings == ()
    assert result.ok


def test_requests_are_greedy_of_exact_length_and_counted_apart_from_warmup(bench, scripted_engine, steady_script):
    engine = scripted_engine(steady_script(0.1, 0.01))
    result = bench(engine, prompt_tokens=32, output_tokens=4, requests=6, warmup_requests=2)
    assert len(engine.prompts) == 8
    assert result.requests == 6
    assert {len(p) for p in engine.prompts} == {32}
    assert {(p.max_tokens, p.temperature, p.ignore_eos) for p in engine.params} == {(4, 0.0, True)}


def test_tokens_are_counted_by_id_and_chunks_are_not_tokens(bench, scripted_engine):
    engine = scripted_engine(lambda *_: [(0.1, 1, None), (0.2, 5, None), (0.3, 4, None), (0.1, 2, "length")])
    result = bench(engine, prompt_tokens=16, output_tokens=12, requests=1, warmup_requests=0)
    assert result.output_tokens.median == 12
    assert result.tpot_ms.p50 == pytest.approx(600 / 11)
    assert result.itl_ms.n == 3
    assert result.cold_ttft_ms is None


def test_a_finish_without_token_ends_e2e(bench, scripted_engine):
    engine = scripted_engine(lambda *_: [(0.1, 3, None), (0.2, 0, "stop")])
    result = bench(engine, prompt_tokens=16, output_tokens=3, requests=1, warmup_requests=0)
    assert result.e2e_ms.p50 == pytest.approx(300)
    assert result.itl_ms.n == 0


def test_one_token_outputs_have_no_tpot(bench, scripted_engine, steady_script):
    result = bench(scripted_engine(steady_script(0.1, 0.01)), prompt_tokens=16, output_tokens=1, requests=4)
    assert (result.tpot_ms.n, result.ttft_ms.n) == (0, 4)


def test_slow_start_is_outside_the_figures_and_reported(bench, scripted_engine):
    def script(number, prompt_ids, max_tokens):
        return [(5.0 if number < 3 else 0.050, max_tokens, "length")]

    result = bench(scripted_engine(script), prompt_tokens=16, output_tokens=2, requests=300)
    assert result.ttft_ms.p99 < 60
    assert result.cold_ttft_ms == pytest.approx(5000)


def test_throughput_of_straddling_requests_is_the_analytic_rate(bench, scripted_engine, steady_script):
    engine = scripted_engine(steady_script(1.0, 0.1))
    result = bench(engine, prompt_tokens=16, output_tokens=10, concurrency=4, requests=40)
    assert result.output_tokens_per_s == pytest.approx(4 * 10 / 1.9, rel=0.02)
    assert result.prefill_tokens_per_s is None  # TTFT holds other clients' work


def test_ttft_of_each_request_counts_from_its_own_send(bench, scripted_engine, steady_script):
    result = bench(scripted_engine(steady_script(1.0, 0.1)), prompt_tokens=16, output_tokens=4, concurrency=10)
    assert (result.ttft_ms.p50, result.ttft_ms.p90) == (pytest.approx(1000), pytest.approx(1000))


def test_clients_do_not_march_in_step(bench, scripted_engine, steady_script, virtual_time):
    sent = []
    steady = steady_script(1.0, 0.1)

    def script(number, prompt_ids, max_tokens):
        sent.append(virtual_time.clock())
        return steady(number, prompt_ids, max_tokens)

    bench(scripted_engine(script), prompt_tokens=16, output_tokens=8, concurrency=4, requests=16, warmup_requests=5)
    measured = sent[5:21]
    assert len({round(at, 6) for at in measured[:4]}) == 4


def test_load_is_held_until_the_last_measured_request_ends(bench, scripted_engine, steady_script):
    engine = scripted_engine(steady_script(1.0, 0.1))
    result = bench(engine, prompt_tokens=16, output_tokens=8, concurrency=4, requests=4, warmup_requests=5)
    assert result.requests == 4
    assert len(engine.prompts) > 5 + 4  # fillers ran
    assert len(engine.aborted) == 3  # and each client but the last was stopped in the middle of one


def test_prompts_share_nothing_with_an_earlier_run(bench, scripted_engine, steady_script, virtual_time):
    engine = scripted_engine(steady_script(0.1, 0.01))
    engine.reset_prefix_cache = lambda: None  # even without emptying the cache
    rates = []

    async def both():
        for run_id in ("first", "second"):
            driver = EngineDriver(engine, virtual_time.clock)
            config = Workload(prompt_tokens=64, output_tokens=2)
            rates.append((await bench_driver(driver, config, virtual_time.clock, run_id)).prefix_hit_rate)

    virtual_time.run(both())
    assert rates == [0.0, 0.0]


def test_same_prompts_are_warned_about_with_the_hit_rate(bench, scripted_engine, steady_script):
    result = bench(scripted_engine(steady_script(0.1, 0.01)), prompt_tokens=64, output_tokens=2, same_prompts=True)
    assert result.prefix_hit_rate == pytest.approx(48 / 64)
    assert result.warnings == (
        "75.0% of prompt tokens came from the prefix cache (as asked for): TTFT is not prefill time",
    )
    assert result.prefill_tokens_per_s == pytest.approx(16 / 0.1)
    assert "warning: 75.0%" in rendered(result)


def test_the_cache_is_emptied_before_a_run(bench, scripted_engine, steady_script):
    engine = scripted_engine(steady_script(0.1, 0.01))
    bench(engine, prompt_tokens=16, output_tokens=2, requests=1)
    assert engine.resets == 1


def test_failures_are_counted_by_reason_and_give_no_latency(bench, scripted_engine):
    def script(number, prompt_ids, max_tokens):
        kind = number % 20
        if kind in (0, 1):
            raise OverloadedError("queue full")
        if kind == 2:
            return [(0.001, 1, None), (0.001, 0, "error")]
        if kind == 3:
            return [(0.001, 0, "stop")]
        if kind == 4:
            return [(0.001, 1, None), (0.001, 0, "abort")]
        return [(0.1, max_tokens, "length")]

    result = bench(scripted_engine(script), prompt_tokens=16, output_tokens=4, requests=100, warmup_requests=0)
    assert result.failures == {
        "OverloadedError: queue full": 10,
        "error: step failed": 5,
        "empty output": 5,
        "aborted": 5,
    }
    assert result.num_failures == 25
    assert not result.ok
    assert (result.ttft_ms.n, result.ttft_ms.p50) == (75, pytest.approx(100))
    failing_s = 5 * 0.002 + 5 * 0.001 + 5 * 0.002  # refusals take no time
    assert result.output_tokens_per_s_whole_run == pytest.approx(75 * 4 / (75 * 0.1 + failing_s))
    text = rendered(result)
    assert "25 of 100 requests failed" in text.splitlines()[1]
    assert "10 × OverloadedError: queue full" in text
    assert "n/a (n=75)" in text


def test_failures_within_the_limit_are_ok(bench, scripted_engine, steady_script):
    steady = steady_script(0.1, 0.01)

    def script(number, prompt_ids, max_tokens):
        if number == 3:
            raise OverloadedError("queue full")
        return steady(number, prompt_ids, max_tokens)

    options = {"prompt_tokens": 16, "output_tokens": 2, "requests": 10, "warmup_requests": 0, "max_failure_rate": 0.1}
    assert bench(scripted_engine(script), **options).ok


def test_an_engine_that_refuses_everything_is_an_error(bench, scripted_engine):
    def refuse(*_):
        raise OverloadedError("queue full")

    with pytest.raises(MeasureError, match=r"all 8 requests failed; 8 with: OverloadedError: queue full"):
        bench(scripted_engine(refuse), prompt_tokens=16, output_tokens=2)


def test_claiming_more_tokens_than_delivered_is_a_failure(bench, scripted_engine, steady_script):
    engine = scripted_engine(steady_script(0.1, 0.01))
    engine.claim_more = 3
    with pytest.raises(MeasureError, match="claims 5 tokens, delivered 2"):
        bench(engine, prompt_tokens=16, output_tokens=2, requests=1)


def test_a_request_that_hangs_fails_and_is_aborted(bench, scripted_engine):
    def script(number, prompt_ids, max_tokens):
        return [(0.1, 1, None)] if number == 2 else [(0.1, max_tokens, "length")]

    engine = scripted_engine(script)
    result = bench(engine, prompt_tokens=16, output_tokens=4, requests=5, warmup_requests=0, timeout_s=7)
    assert result.failures == {"timed out after 7 s": 1}
    assert engine.aborted == ["r2"]


def test_too_long_for_the_plan_is_refused_before_anything_runs(bench, scripted_engine, steady_script):
    engine = scripted_engine(steady_script(0.1, 0.01), max_seq_len=100)
    with pytest.raises(MeasureError, match=r"90 prompt \+ 11 output tokens = 101, the plan takes 100"):
        bench(engine, prompt_tokens=90, output_tokens=11)
    assert engine.prompts == []


def test_more_clients_than_run_at_once_is_said(bench, scripted_engine, steady_script):
    engine = scripted_engine(steady_script(0.1, 0.01), max_seqs=8)
    engine.max_seqs = 2  # fewer than the plan allows, as --max-seqs asks
    result = bench(engine, prompt_tokens=16, output_tokens=2, concurrency=3, requests=3)
    assert result.warnings == ("concurrency 3 exceeds the 2 requests that run at once: TTFT includes queueing",)


def test_short_answers_are_shown_against_what_was_asked(bench, scripted_engine):
    engine = scripted_engine(lambda number, prompt, most: [(0.1, most if number % 2 else 3, "stop")])
    result = bench(engine, prompt_tokens=16, output_tokens=8, requests=4, warmup_requests=0, ignore_eos=False)
    assert result.warnings == ("asked for 8 output tokens, got 3 / 8 / 8",)
    assert not engine.params[0].ignore_eos


def test_json_has_the_documented_keys(bench, scripted_engine, steady_script):
    report = bench(scripted_engine(steady_script(0.1, 0.01)), prompt_tokens=16, output_tokens=2).to_json()
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        assert set(report[name]) == {"p50", "p90", "p99", "n"}
    assert report["requests"] == 8
    assert report["failures"] == 0
    assert report["output_tokens_per_s"] > 0
    assert report["prefill_tokens_per_s"] == pytest.approx(160)


def test_the_report_says_where_its_figures_are_defined(bench, scripted_engine, steady_script):
    result = bench(scripted_engine(steady_script(0.1, 0.01)), prompt_tokens=16, output_tokens=2)
    text = rendered(result)
    assert text.splitlines()[-1].strip() == "what each figure means: optimc bench --help"
    assert "(e2e - ttft) / (tokens - 1)" in result.to_json()["definitions"]["tpot_ms"]
    assert "cold start TTFT" in text
    assert "n/a (n=8)" in text
