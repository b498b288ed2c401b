"""The engine on the scripted executor: answers never depend on company, switches or the size of the pool."""

import random
import time

import pytest

from optimc_runtime.config import EngineConfig
from optimc_runtime.request import SamplingParams


@pytest.mark.parametrize("num_blocks", [400, 20], ids=["roomy pool", "preempting pool"])
@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "seeded"])
def test_64_concurrent_requests_of_mixed_lengths_equal_each_alone(make_engine, scripted, num_blocks, seeded, drive):
    engine = make_engine(num_blocks=num_blocks, max_seqs=64, max_step_tokens=96, max_seq_len=80)
    rng = random.Random(0)
    expected, inboxes = [], []
    for i in range(64):
        prompt = [rng.randrange(64) for _ in range(rng.randint(1, 40))]
        params = SamplingParams(
            max_tokens=rng.randint(1, 30),
            temperature=1.0 if seeded else 0.0,
            seed=i if seeded else None,
            repetition_penalty=1.1 if seeded and i % 2 else 1.0,
        )
        expected.append(drive.alone(prompt, params))
        inboxes.append(drive.submit(engine, prompt, params))
        if i % 3 == 0:
            engine.step()
    drive.run(engine)
    assert [inbox.token_ids for inbox in inboxes] == expected
    assert {inbox.reason for inbox in inboxes} == {"length"}
    assert (engine.stats().preemptions > 0) == (num_blocks == 20)


@pytest.mark.parametrize(
    "switches",
    [{"prefix_cache": False}, {"chunked_prefill": False}, {"inflight_batching": False}],
    ids=lambda switches: next(iter(switches)),
)
def test_each_switch_off_gives_the_same_answers(make_engine, scripted, switches, drive):
    engine = make_engine(EngineConfig(**switches), max_step_tokens=16)
    prompts = [[i % 5] * (1 + i % 16) for i in range(20)]
    inboxes = [drive.submit(engine, prompt, drive.greedy(6)) for prompt in prompts]
    drive.run(engine)
    assert [inbox.token_ids for inbox in inboxes] == [scripted.greedy(prompt, 6) for prompt in prompts]


def test_warm_up_runs_the_largest_shapes_and_leaves_no_trace(make_engine, drive):
    engine = make_engine(max_step_tokens=32, max_seqs=8)
    before = engine.stats()
    engine.warm_up()
    assert engine.executor.shapes == [(32, 1, 1), (8, 8, 8)]
    engine.warm_up(max_tokens=5)
    assert engine.executor.shapes[2:] == [(5, 1, 1), (5, 5, 5)]
    assert engine.stats() == before
    drive.submit(engine, [1] * 9, drive.greedy(1))
    drive.run(engine)
    cached = engine.stats().blocks_cached
    engine.start()
    engine.warm_up()
    assert engine.stats().blocks_cached == cached
    again = engine.generate([[1] * 9], drive.greedy(1))
    assert again[0].usage.cached_tokens == 8


def test_a_callback_may_submit_and_abort(make_engine, drive):
    engine = make_engine()
    second = drive.Inbox()

    def chain(output):
        if output.finish_reason is not None:
            engine.submit([2], drive.greedy(2), on_output=second)

    engine.submit([1], drive.greedy(1), on_output=chain)
    drive.run(engine)
    assert second.reason == "length"


def test_counters_tell_where_time_went(make_engine, drive):
    engine = make_engine()
    engine.executor.before_step = lambda plan: time.sleep(0.002)
    drive.submit(engine, [1] * 9, drive.greedy(4))
    drive.run(engine)
    stats = engine.stats()
    assert (stats.steps, stats.prompt_tokens, stats.output_tokens) == (5, 9, 4)
    assert stats.execute_s >= 5 * 0.002
    assert 0 < stats.overhead_share < 1
    assert stats.last_step_s >= 0.002
    assert stats.finished == {"stop": 0, "length": 1, "abort": 0, "error": 0}


def test_every_step_stays_inside_the_plans_limits(make_engine, drive):
    """300 arrivals at max_seq_len 64, max_seqs 3, max_step_tokens 16: the executor checks each step."""
    engine = make_engine(max_seq_len=64, max_seqs=3, max_step_tokens=16)
    rng = random.Random(5)
    inboxes = []
    for _ in range(300):
        length = rng.randint(1, 63)
        inboxes.append(
            drive.submit(engine, [rng.randrange(64)] * length, drive.greedy(rng.randint(1, min(6, 64 - length))))
        )
        for _ in range(rng.randrange(12)):
            engine.step()
    drive.run(engine)
    assert {inbox.reason for inbox in inboxes} == {"length"}
    assert max(tokens for tokens, _, _ in engine.executor.shapes) == 16
    assert max(seqs for _, seqs, _ in engine.executor.shapes) == 3
