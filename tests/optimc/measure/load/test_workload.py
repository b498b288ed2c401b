"""What a load may be, and how it is called."""

import json

import pytest

from optimc.errors import ConfigError
from optimc.measure.load.slo import Slo
from optimc.measure.workload import Workload


@pytest.mark.parametrize(
    "workload",
    [
        Workload(),
        Workload(concurrency=8, requests=40, warmup_requests=3, slo=Slo(ttft_ms=500)),
        Workload(arrival="poisson", rate_per_s=4.0, duration_s=30.0, prompt_spread=0.5),
        Workload(arrival="trace", dataset="trace", dataset_digest="a" * 64, rate_scale=2.0, prompts="t.jsonl"),
        Workload(dataset="turns", turns=4, turn_tokens=32),
    ],
)
def test_json_and_back_is_the_same_workload(workload):
    assert Workload.from_json(json.loads(json.dumps(workload.to_json()))) == workload


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"concurrency": 8}, "512+128 tokens, concurrency 8"),
        ({"arrival": "poisson", "rate_per_s": 4.0}, "512+128 tokens, 4.0/s poisson"),
        ({"arrival": "constant", "rate_per_s": 0.05}, "512+128 tokens, 0.05/s constant"),
        ({"dataset": "turns", "turns": 3}, "512+128 tokens, 3 turns, concurrency 1"),
        ({"prompt_spread": 0.5, "output_spread": 0.25}, "512±50%+128±25% tokens, concurrency 1"),
        ({"arrival": "trace", "dataset": "trace", "prompts": "t.jsonl"}, "t.jsonl+128 tokens, trace x1"),
    ],
)
def test_a_load_is_told_in_a_few_words(options, shape):
    assert Workload(**options).shape() == shape


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"arrival": "poisson"}, ["rate_per_s"]),
        ({"rate_per_s": 4.0}, ["rate_per_s"]),
        ({"arrival": "poisson", "rate_per_s": 4.0, "concurrency": 2}, ["concurrency"]),
        ({"duration_s": 3.0}, ["duration_s"]),
        ({"arrival": "poisson", "rate_per_s": 4.0, "duration_s": 3.0, "requests": 5}, ["duration_s"]),
        ({"arrival": "trace"}, ["arrival"]),
        ({"rate_scale": 2.0}, ["rate_scale"]),
        ({"turns": 2}, ["turns"]),
        ({"prompt_spread": 2.0, "turn_tokens": 0}, ["prompt_spread", "turn_tokens"]),
    ],
)
def test_what_does_not_go_together_is_refused(options, where):
    with pytest.raises(ConfigError) as caught:
        Workload(**options)
    assert [fault.where for fault in caught.value.faults] == where


def test_an_open_loop_lasts_twenty_seconds_or_sixty_requests():
    assert Workload(arrival="poisson", rate_per_s=1.0).num_requests == 60
    assert Workload(arrival="poisson", rate_per_s=10.0).num_requests == 200
    assert Workload(arrival="poisson", rate_per_s=1.5, duration_s=3.0).num_requests == 5  # 4.5, rounded up


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"arrival": "poisson", "rate_per_s": 1e308}, "rate_per_s"),
        ({"arrival": "poisson", "rate_per_s": 1e-300}, "rate_per_s"),
        ({"arrival": "poisson", "rate_per_s": float("nan")}, "rate_per_s"),
        ({"arrival": "poisson", "rate_per_s": 10.0, "duration_s": 1e300}, "duration_s"),
        ({"arrival": "poisson", "rate_per_s": 1.0, "requests": 10**12}, "requests"),
        ({"requests": 10**12}, "requests"),
        ({"warmup_requests": 10**12}, "warmup_requests"),
        ({"concurrency": 10**9}, "concurrency"),
        ({"prompt_tokens": 10**12}, "prompt_tokens"),
        ({"output_tokens": 10**12}, "output_tokens"),
        ({"dataset": "turns", "turns": 10**9}, "turns"),
        ({"arrival": "trace", "dataset": "trace", "rate_scale": 1e-300}, "rate_scale"),
    ],
)
def test_no_number_is_too_large_to_be_refused(options, where):
    with pytest.raises(ConfigError) as caught:
        Workload(**options)
    assert {fault.where for fault in caught.value.faults} == {where}
