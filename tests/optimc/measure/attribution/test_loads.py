"""Under which load a factor can show itself."""

from optimc.measure.attribution.config import AttributeConfig
from optimc.measure.attribution.loads import load_name, loads_of
from optimc.recipe import LimitsSpec

LIMITS = LimitsSpec(max_step_tokens=512, block_size=16)
CONFIG = AttributeConfig(concurrencies=(1, 8), prompt_tokens=512, output_tokens=64)


def test_a_pass_is_measured_under_every_load():
    found = loads_of("rtn[0]", CONFIG, LIMITS)
    assert [workload.concurrency for workload in found.workloads] == [1, 8]


def test_inflight_batching_is_measured_with_uneven_answers_at_the_most_clients_only():
    (workload,) = loads_of("inflight_batching", CONFIG, LIMITS).workloads
    assert (workload.concurrency, workload.output_spread) == (8, 0.5)


def test_inflight_batching_declines_one_client():
    found = loads_of("inflight_batching", AttributeConfig(concurrencies=(1,)), LIMITS)
    assert found.workloads == ()
    assert "one client never waits" in found.na


def test_inflight_batching_declines_answers_that_would_be_too_long():
    # 64 and a half more are 96; 512 + 96 = 608.
    assert loads_of("inflight_batching", CONFIG, LimitsSpec(max_seq_len=608)).workloads
    assert "512 prompt + 96 output tokens exceed limits.max_seq_len 607" in (
        loads_of("inflight_batching", CONFIG, LimitsSpec(max_seq_len=607)).na
    )


def test_the_prefix_cache_is_measured_where_half_of_the_prompt_is_shared():
    found = loads_of("prefix_cache", CONFIG, LIMITS)
    assert [workload.shared_prefix_tokens for workload in found.workloads] == [256]
    assert load_name(found.workloads[0]) == "512+64 tokens, concurrency 1, 256 shared"
    assert "256 of 512 prompt tokens" in found.note


def test_the_prefix_cache_declines_prompts_whose_half_fills_no_block():
    assert "fills no block of 16" in loads_of("prefix_cache", AttributeConfig(prompt_tokens=30), LIMITS).na


def test_chunked_prefill_is_measured_where_several_prompts_exceed_a_step():
    # One prompt of 512 fits in a step of 512; eight do not.
    assert [w.concurrency for w in loads_of("chunked_prefill", CONFIG, LIMITS).workloads] == [8]


def test_chunked_prefill_declines_prompts_that_all_fit_in_one_step():
    found = loads_of("chunked_prefill", AttributeConfig(prompt_tokens=64, concurrencies=(1, 8)), LIMITS)
    assert found.na == "nothing is cut: 8 × 64 prompt tokens fit in one step of 512"


def test_chunked_prefill_declines_prompts_that_cannot_be_served_without_it():
    assert "the engine refuses" in loads_of("chunked_prefill", AttributeConfig(prompt_tokens=513), LIMITS).na
