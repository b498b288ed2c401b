"""The scheduler alone, driven greedily over the scripted executor."""

import random

import numpy as np
import pytest

from optimc_runtime.prefix_cache import chain_hash
from optimc_runtime.sequence import Status


def test_decodes_go_first_then_running_prefills_then_new_ones(rig):
    r = rig(num_blocks=32, max_step_tokens=8)
    r.add([1], 20)
    r.add(range(20), 1)
    r.add([5, 6], 1)
    assert r.work(r.step()) == {"0": 1, "1": 7}
    assert r.work(r.step()) == {"0": 1, "1": 7}
    assert r.work(r.step()) == {"0": 1, "1": 6, "2": 1}
    r.run()


def test_running_requests_never_wait_while_a_long_prompt_is_prefilled(rig):
    r = rig(num_blocks=150, max_seq_len=500, max_step_tokens=8, max_seqs=6)
    running = [r.add([i], 40) for i in range(3)]
    r.step()
    r.add([i % 64 for i in range(400)], 2)
    for i in range(20):
        r.add([i, i], 5)
    for _ in range(30):
        before = [sequence.num_output for sequence in running]
        r.step()
        assert [sequence.num_output for sequence in running] == [count + 1 for count in before]
    r.run()


def test_logits_are_asked_for_the_last_prompt_token_only(rig):
    r = rig(num_blocks=32)
    r.add(range(19), 2)
    assert [len(r.step().plan.logits_rows) for _ in range(4)] == [0, 0, 1, 1]


def test_an_admitted_prompt_holds_blocks_for_all_its_context(rig):
    r = rig(num_blocks=8)
    sequence = r.add(range(20), 4)
    r.step()
    assert sequence.num_computed == 8
    assert len(sequence.blocks) == 5


def test_a_prefill_waits_until_its_whole_context_fits(rig):
    r = rig(num_blocks=8)
    r.add(range(16), 4)
    large = r.add(range(17), 3)  # 5 blocks; 4 are left
    r.step()
    r.step()
    assert large.status is Status.WAITING
    r.run()
    assert large.status is Status.FINISHED


def test_a_prefill_waits_if_the_token_after_it_would_not_fit(rig):
    r = rig(num_blocks=4)
    r.add([1] * 7, 2)  # 2 blocks
    r.step()
    exact = r.add([2] * 8, 4)  # 2 blocks now, a third for its first output
    r.step()
    assert exact.status is Status.WAITING
    r.run()
    assert r.scheduler.num_preemptions == 0


def test_the_youngest_is_preempted_and_the_oldest_never(rig):
    r = rig(num_blocks=6, cache=False)
    old, middle, young = (r.add([i, i + 1, i + 2], 20) for i in range(3))
    while not r.scheduler.num_preemptions:
        r.step()
    assert young.num_preemptions == 1
    assert young.status is Status.WAITING
    assert not young.blocks
    r.run()
    assert (old.num_preemptions, young.num_preemptions >= middle.num_preemptions) == (0, True)


@pytest.mark.parametrize("count", [5, 6, 7, 8])
def test_preemption_at_any_offset_of_a_block_restores_the_answer(rig, scripted, count):
    r = rig(num_blocks=4, max_step_tokens=16, cache=False)
    r.add([9] * count, 16 - count)
    young = r.add([3, 4, 5], 10)
    r.run()
    assert young.num_preemptions > 0
    for sequence in r.sequences:
        prompt = sequence.tokens[: sequence.num_prompt].tolist()
        assert list(sequence.output_ids()) == scripted.greedy(prompt, sequence.num_output)


def test_a_prefill_preempted_between_chunks_starts_again(rig, scripted):
    r = rig(num_blocks=6, max_step_tokens=3, cache=False)
    old = r.add([1, 2, 3], 18)
    r.step()
    young = r.add([i % 7 for i in range(16)], 4)
    while not young.num_preemptions:
        assert young.num_output == 0
        r.step()
    r.run()
    for sequence in (old, young):
        prompt = sequence.tokens[: sequence.num_prompt].tolist()
        assert list(sequence.output_ids()) == scripted.greedy(prompt, sequence.num_output)


def test_a_full_hit_still_computes_the_last_token(rig):
    r = rig()
    r.add(range(8), 1)
    r.run()
    sequence = r.add(range(8), 1)
    step = r.step()
    assert sequence.num_cached == 4
    assert r.work(step) == {"1": 4}
    longer = r.add(range(9), 1)
    assert r.work(r.step()) == {"2": 1}
    assert longer.num_cached == 8
    r.assert_idle()


def test_recomputed_tokens_are_no_hits(rig):
    r = rig(num_blocks=6)
    for i in range(3):
        r.add([i] * 5, 12)
    r.run()
    assert r.scheduler.num_preemptions > 0
    assert r.scheduler.prefix_hit_tokens == 0
    assert r.scheduler.prefix_queried_tokens == 15


def test_identical_prompts_in_one_step_share_nothing(rig, scripted):
    r = rig(num_blocks=16, max_step_tokens=32)
    first, second = r.add(range(10), 3), r.add(range(10), 3)
    step = r.step()
    assert r.work(step) == {"0": 10, "1": 10}
    assert not set(first.blocks) & set(second.blocks)
    r.run()
    assert first.output_ids() == second.output_ids() == tuple(scripted.greedy(range(10), 3))
    assert r.pool.num_cached_idle == 3  # of the two copies one was published


def test_output_is_reused_as_a_prefix(rig):
    r = rig(num_blocks=16)
    first = r.add(range(6), 8)
    r.run()
    follow_up = r.add([*range(6), *first.output_ids(), 3], 2)
    r.run()
    assert follow_up.num_cached == 12  # 13 tokens were computed: the last sampled one never is


def test_blocks_of_a_step_that_failed_are_not_published(rig):
    r = rig()
    failed = r.add(range(8), 4)
    r.scheduler.schedule()
    r.scheduler.release(failed)
    again = r.add(range(8), 4)
    r.run()
    assert again.num_cached == 0


def test_a_step_commits_only_what_was_not_released(rig):
    r = rig(max_step_tokens=32, num_blocks=16)
    gone, stays = r.add(range(8), 4), r.add(range(20, 28), 4)
    step = r.scheduler.schedule()
    r.executor.execute(step.plan)
    r.scheduler.release(gone)
    r.scheduler.commit(step)
    assert (gone.num_published, gone.num_computed, stays.num_published) == (0, 0, 2)
    r.scheduler.check_integrity()


def test_a_blocked_large_request_lets_small_ones_pass_but_not_for_ever(rig):
    r = rig(num_blocks=8, max_overtakes=10)
    r.add([1] * 8, 16)
    r.step()
    large = r.add([2] * 26, 4)
    overtaken, started_after = 0, None
    for i in range(200):
        r.add([i % 64] * 3, 3)
        r.step()
        if large.status is not Status.WAITING:
            started_after = i
            break
        overtaken = large.num_overtaken
    assert started_after is not None
    assert overtaken == 10
    finished = sum(sequence.status is Status.FINISHED for sequence in r.sequences)
    assert finished >= 10
    r.run()


def test_small_requests_proceed_while_a_large_one_does_not_fit(rig):
    r = rig(num_blocks=8)
    r.add([1] * 8, 12)
    large = r.add([2] * 28, 4)
    small = [r.add([i], 2) for i in range(3)]
    for _ in range(4):
        r.step()
    assert large.status is Status.WAITING
    assert all(sequence.status is Status.FINISHED for sequence in small)
    r.run()


def test_without_chunking_a_prompt_runs_whole_or_waits(rig):
    r = rig(num_blocks=32, chunked_prefill=False)
    r.add([1] * 5, 3)
    second = r.add([2] * 4, 3)
    third = r.add([3] * 3, 2)
    assert r.work(r.step()) == {"0": 5, "2": 3}
    assert second.num_overtaken == 1
    assert r.work(r.step()) == {"0": 1, "2": 1, "1": 4}
    assert third.num_overtaken == 0
    r.run()


@pytest.mark.parametrize("inflight", [True, False])
def test_without_chunking_a_prompt_that_fits_beside_nothing_runs_before_what_decodes(rig, inflight):
    r = rig(num_blocks=32, chunked_prefill=False, inflight_batching=inflight)
    r.add([1] * 8, 20)
    r.add([2] * 8, 3)
    steps = [r.work(r.step()) for _ in range(3)]
    assert steps == [{"0": 8}, {"1": 8}, {"0": 1, "1": 1}]
    r.run()


def test_without_chunking_what_decodes_waits_for_one_step_of_prompts_at_a_time(rig):
    r = rig(num_blocks=32, chunked_prefill=False)
    r.add([1] * 4, 20)
    r.step()
    for token in range(2, 5):
        r.add([token] * 8, 1)
    steps = [r.work(r.step()) for _ in range(6)]
    assert steps == [{"1": 8}, {"0": 1}, {"2": 8}, {"0": 1}, {"3": 8}, {"0": 1}]
    r.run()


def test_without_chunking_a_context_longer_than_a_step_is_still_recomputed(rig, scripted):
    r = rig(num_blocks=8, chunked_prefill=False, cache=False)
    old, young = r.add([1] * 4, 24), r.add([2] * 6, 18)
    r.run()
    assert young.num_preemptions > 0
    for sequence, prompt in ((old, [1] * 4), (young, [2] * 6)):
        assert list(sequence.output_ids()) == scripted.greedy(prompt, sequence.num_output)


def test_static_batches_do_not_mix(rig):
    r = rig(num_blocks=32, inflight_batching=False, max_seqs=2)
    r.add([1] * 6, 2)
    r.add([2] * 6, 6)
    r.add([3], 1)
    batches = []
    while (step := r.step()) is not None:
        batches.append(set(r.work(step)))
    assert all(batch <= {"0", "1"} for batch in batches[:-1])
    assert batches[-1] == {"2"}


def test_scoring_asks_for_every_position_once_and_leaves_the_cache_alone(rig):
    r = rig(num_blocks=8)
    r.add(range(12), 1)
    r.run()
    cached = len(r.scheduler.cache)
    scored = r.add(range(20), 0, extras=None, all_logits=True)
    rows = 0
    while scored.status is not Status.FINISHED:
        step = r.scheduler.schedule()
        rows += len(step.plan.logits_rows)
        r.executor.execute(step.plan)
        r.scheduler.commit(step)
        if scored.num_computed == scored.num_tokens:
            r.scheduler.release(scored)
    assert rows == 20
    assert scored.num_cached == 0
    assert len(r.scheduler.cache) == cached


def test_a_preempted_score_does_not_repeat_rows(rig):
    r = rig(num_blocks=6, max_step_tokens=3, cache=False)
    r.add([1, 2, 3], 18)
    r.step()
    scored = r.add(range(16), 0, extras=None, all_logits=True)
    positions = []
    while (step := r.scheduler.schedule()) is not None:
        logits = r.executor.execute(step.plan).logits
        r.scheduler.commit(step)
        row = 0
        for item in step.work:
            sequence, row = item.sequence, row + item.num_logits
            if sequence is scored:
                positions += range(sequence.num_computed - item.num_logits, sequence.num_computed)
            elif item.num_logits:
                sequence.append(int(logits[row - 1].argmax()))
            if sequence.num_computed == sequence.num_tokens == sequence.max_tokens or (
                sequence is not scored and not sequence.wants_token
            ):
                r.scheduler.release(sequence)
    assert scored.num_preemptions > 0
    assert positions == list(range(16))
    r.assert_idle()


def test_reset_forgets_prefixes_and_running_sequences_publish_no_more(rig):
    r = rig(num_blocks=16)
    r.add(range(12), 1)
    r.run()
    running = r.add(range(12), 8)
    r.step()
    r.scheduler.reset_prefix_cache()
    r.scheduler.check_integrity()
    r.run()
    assert running.num_cached == 8
    assert len(r.scheduler.cache) == 0
    assert r.pool.num_free == 16


def test_1000_seeds_of_crowded_pools_all_finish_with_bounded_preemption_and_equal_answers(rig, scripted):
    """Six requests, each needing 60% of the pool: steps and preemptions stay bounded, answers as if alone."""
    alone: dict[tuple[int, int], list[int]] = {}
    preempted = 0
    for seed in range(1000):
        rng = random.Random(seed)
        r = rig(num_blocks=5, max_seqs=6, cache=bool(seed % 2), check=seed % 20 == 0)
        for _ in range(6):
            length = rng.randint(1, 11)
            r.add([rng.randrange(3)] * length, 12 - length)
        r.run(max_steps=6 * 12 * 2)
        preempted += r.scheduler.num_preemptions
        # A preemption happens because another sequence takes a block it keeps: 3 blocks for each of 6 requests.
        assert r.scheduler.num_preemptions <= 6 * 3
        for sequence in r.sequences:
            key = (int(sequence.tokens[0]), sequence.num_prompt)
            if key not in alone:
                alone[key] = scripted.greedy([key[0]] * key[1], 12 - key[1])
            assert list(sequence.output_ids()) == alone[key]
    assert preempted > 1000


@pytest.mark.parametrize("constant_hash", [False, True])
def test_any_limits_any_arrivals_any_ends_keep_the_invariants(rig, constant_hash):
    """80 random set-ups: every step is inside its limits (the executor checks), nothing leaks, no wrong history."""
    for seed in range(80):
        rng = random.Random(seed)
        max_seqs = rng.randint(1, 6)
        r = rig(
            num_blocks=rng.randint(4, 16),
            block_size=rng.choice([1, 2, 4]),
            max_step_tokens=rng.randint(1, 12),
            max_seqs=max_seqs,
            max_seq_len=rng.randint(4, 64),
            block_hash=(lambda *_: 7) if constant_hash else chain_hash,
            inflight_batching=rng.random() < 0.8,
            max_overtakes=rng.randint(0, 4),
        )
        most = r.limits.max_request_tokens
        r.executor.limits = r.executor.limits.model_copy(update={"max_seq_len": r.limits.max_seq_len})
        for _ in range(60):
            if rng.random() < 0.5:
                length = rng.randint(1, most - 1)
                r.add([rng.randrange(2)] * length, rng.randint(1, most - length))
            r.step()
            live = [sequence for sequence in r.sequences if sequence.status is not Status.FINISHED]
            if live and rng.random() < 0.15:
                r.scheduler.release(rng.choice(live))
        r.run()


def test_any_chunking_beside_any_company_gives_the_same_answer(rig, scripted):
    prompt = [(7 * i) % 64 for i in range(37)]
    expected = scripted.greedy(prompt, 4)
    for block_size in (1, 4, 16):
        for budget in range(1, 38):
            r = rig(
                num_blocks=160 // block_size,
                block_size=block_size,
                max_step_tokens=budget,
                check=False,
                max_seqs=8,
            )
            for mate in range(budget % 8):
                r.add([mate] * (1 + 3 * mate % 11), 5 + mate)
                r.step()
            target = r.add(prompt, 4)
            r.run()
            repeated = r.add(prompt, 4)  # now with a prefix hit
            r.run()
            assert list(target.output_ids()) == list(repeated.output_ids()) == expected
            assert repeated.num_cached == 36 // block_size * block_size


def test_hits_under_eviction_equal_a_fresh_computation(rig, scripted):
    r = rig(num_blocks=10, max_seqs=4, max_step_tokens=16)
    rng = np.random.default_rng(0)
    for _ in range(150):
        length = int(rng.integers(5, 24))
        base = int(rng.integers(0, 3))
        r.add([base] * min(length, 9) + rng.integers(0, 2, max(0, length - 9)).tolist(), 2)
        r.step()
    r.run()
    assert r.scheduler.prefix_hit_tokens > 0
    for sequence in r.sequences:
        prompt = sequence.tokens[: sequence.num_prompt].tolist()
        assert list(sequence.output_ids()) == scripted.greedy(prompt, 2)


def test_scheduling_64_running_sequences_touches_only_what_changed(rig):
    """Decoding steps rewrite no table row: the rows of the preallocated table change only where blocks were added."""
    r = rig(num_blocks=256, block_size=16, max_seqs=64, max_step_tokens=64, max_seq_len=64, check=False)
    for i in range(64):
        r.add([i], 40)
    for _ in range(3):
        r.step()
    before = r.scheduler._table.copy()
    for _ in range(10):
        r.step()
    assert (r.scheduler._table == before).all()
    for _ in range(4):
        r.step()
    assert (r.scheduler._table != before).sum() == 64
