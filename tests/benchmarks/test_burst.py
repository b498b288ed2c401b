import pytest
from peer.burst import Burst, RequestTimes, Workload


def test_prompts_have_the_length_asked_for_and_differ_between_requests_and_seeds():
    workload = Workload("throughput", prompt_tokens=20, output_tokens=4, requests=3)
    prompts = [*workload.prompts(0), *workload.prompts(1)]
    assert [len(prompt) for prompt in prompts] == [20] * 6
    assert len({tuple(prompt) for prompt in prompts}) == 6
    assert workload.prompts(1) == workload.prompts(1)


def test_decode_counts_the_tokens_after_the_first():
    burst = Burst((RequestTimes(first_s=0.5, end_s=2.5, tokens=101),))
    assert burst.tokens_per_s(Workload("decode", 32, 101)) == 50


def test_prefill_counts_the_prompt_until_the_first_token():
    burst = Burst((RequestTimes(first_s=0.25, end_s=0.3, tokens=1),))
    assert burst.tokens_per_s(Workload("prefill", 512, 1)) == 2048


def test_throughput_counts_all_tokens_until_the_last_request_ended():
    burst = Burst((RequestTimes(None, 1.0, 30), RequestTimes(None, 2.0, 30)))
    assert burst.tokens_per_s(Workload("throughput", 8, 30, requests=2)) == 30


def test_an_engine_that_stops_early_is_found_out():
    burst = Burst((RequestTimes(0.1, 1.0, 30), RequestTimes(0.1, 0.5, 12)))
    with pytest.raises(ValueError, match=r"2 × 30 tokens, got \[30, 12\]"):
        burst.check(Workload("throughput", 8, 30, requests=2))
