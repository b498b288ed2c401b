"""A result's JSON gives the result back, and its table keeps its order."""

import json

import pytest
from rich.console import Console

from optimc.errors import OverloadedError
from optimc.measure.bench_result import BenchResult
from optimc.measure.load.resources import Resources
from optimc.measure.load.slo import Slo


@pytest.mark.parametrize(
    "load", [{"concurrency": 2, "requests": 30}, {"arrival": "poisson", "rate_per_s": 5.0, "slo": Slo(ttft_ms=200)}]
)
def test_json_and_back_is_the_same_result(bench, scripted_engine, steady_script, load):
    result = bench(scripted_engine(steady_script(0.1, 0.01)), **load)
    data = json.loads(json.dumps(result.to_json()))
    assert BenchResult.from_json(data) == result
    assert data["format"] == 1
    assert data["config"]["requests"] == result.requests


def test_the_table_begins_with_failures_then_goodput_then_latencies(bench, scripted_engine, steady_script):
    from dataclasses import replace

    steady = steady_script(0.1, 0.01)

    def script(number, prompt_ids, max_tokens):
        if number == 40:
            raise OverloadedError("queue full")
        return steady(number, prompt_ids, max_tokens)

    result = bench(scripted_engine(script), arrival="poisson", rate_per_s=5.0, slo=Slo(ttft_ms=200))
    result = replace(result, resources=Resources(0.5, 1 << 30, "this process"))
    console = Console(width=200)
    with console.capture() as capture:
        console.print(result.table())
    text = capture.get()
    marks = ["1 of 100 requests failed", "goodput: 99 of 100", "TTFT", "output tokens/s", "50% of the cores"]
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)
    assert "1 broke failure" in text


def test_intervals_come_with_their_number_and_method(bench, scripted_engine, steady_script):
    result = bench(scripted_engine(steady_script(0.1, 0.01)), arrival="constant", rate_per_s=20.0, requests=400)
    assert {(interval.method, interval.n) for interval in result.intervals.values()} == {
        ("bootstrap", 400),
        ("order", 400),
    }
    assert result.intervals["ttft_ms.p99"].method == "order"
    few = result.to_json()["intervals"]["tpot_ms.p50"]
    assert set(few) == {"low", "high", "level", "method", "n"}


def test_fewer_than_twenty_requests_have_no_interval(bench, scripted_engine, steady_script):
    assert bench(scripted_engine(steady_script(0.1, 0.01)), requests=19).intervals == {}
