"""Another plan as a proposer: the scripted executor trips over any K/V that is stale, missing or misplaced."""

import random
import time

import numpy as np
import pytest

from optimc.errors import EngineError
from optimc_runtime.config import EngineConfig
from optimc_runtime.executor.base import StepResult
from optimc_runtime.sequence import Sequence
from optimc_runtime.speculate.draft_engine import DraftEngine


@pytest.fixture
def make_draft(scripted):
    def make(num_blocks=64, **limits):
        manifest = scripted.manifest(**limits)
        executor = scripted.Executor(num_blocks, manifest.kv.block_size, 64, manifest.limits)
        draft = DraftEngine(executor, EngineConfig().resolve(manifest, executor.pool))
        scripted.poison_on_allocate(draft._pool, executor)
        return draft, executor

    return make


def a_sequence(order, tokens):
    return Sequence(f"r{order}", order, tokens, 1000)


def test_the_other_model_goes_on_greedily(make_draft, scripted):
    draft, executor = make_draft(max_step_tokens=8)
    one = a_sequence(0, list(range(20)))  # read in chunks of 8
    other = a_sequence(1, [3, 4])
    assert draft.propose([one], 4) == [None]
    first, second = draft.propose([one, other], 4)
    assert first.tokens == scripted.greedy(list(range(20)), 4)
    assert second.tokens == scripted.greedy([3, 4], 4)
    assert first.parents == (-1, 0, 1, 2)
    assert all(0 < confidence <= 1 for confidence in first.confidences)
    assert max(tokens for tokens, _, _ in executor.shapes) == 8


def test_a_long_text_is_read_a_step_at_a_time_while_others_get_their_guesses(make_draft, scripted):
    draft, executor = make_draft(max_seq_len=1000, max_step_tokens=200, num_blocks=200)
    long, short = a_sequence(0, [i % 64 for i in range(500)]), a_sequence(1, [3, 4])
    calls = 0
    while True:
        executor.shapes.clear()
        guess, other = draft.propose([long, short], 3)
        calls += 1
        assert other.tokens == scripted.greedy([3, 4], 3)
        assert sum(tokens for tokens, _, _ in executor.shapes) <= 64 + 2 * (8 + 3)  # beside what guesses take
        if guess is not None:
            break
    assert calls == 8
    assert guess.tokens == scripted.greedy([i % 64 for i in range(500)], 3)


def test_it_follows_whatever_was_accepted(make_draft, scripted):
    random_ = random.Random(0)
    draft, _ = make_draft()
    sequences = [a_sequence(order, [order + 1, 2]) for order in range(3)]
    for _ in range(12):
        proposals = draft.propose(sequences, 3)
        for sequence, proposal in zip(sequences, proposals, strict=True):
            known = sequence.tokens[: sequence.num_tokens].tolist()
            assert proposal.tokens == scripted.greedy(known, 3)
            for token in proposal.tokens[: random_.randrange(4)]:
                sequence.append(token)
            sequence.append(random_.randrange(64))
    draft._pool.check_integrity()


def test_without_room_there_is_no_guess(make_draft):
    draft, _ = make_draft(num_blocks=4)
    first, second = a_sequence(0, list(range(9))), a_sequence(1, list(range(9)))
    proposals = draft.propose([first, second], 2)
    assert proposals[0] is not None
    assert proposals[1] is None
    draft.forget(first)
    assert draft.propose([second], 2)[0] is not None
    assert draft.propose([a_sequence(2, list(range(60)))], 8) == [None]
    draft.forget(second)
    draft._pool.check_integrity()
    assert draft._pool.num_free == 4 - draft._pool.num_cached_idle


def test_reading_what_was_missed_is_no_part_of_what_a_guess_costs(make_draft):
    draft, executor = make_draft(max_step_tokens=8)
    run = executor.execute

    def slow(plan):
        time.sleep(0.05 if len(plan.tokens) > 1 else 0.002)
        return run(plan)

    executor.execute = slow
    sequence = a_sequence(0, list(range(30)))
    while draft.propose([sequence], 3) == [None]:
        pass
    assert 0.004 < draft.cost_s < 0.03


def test_logits_that_say_nothing_are_an_error(make_draft):
    draft, executor = make_draft()
    execute = executor.execute
    executor.execute = lambda plan: StepResult(np.full_like(execute(plan).logits, np.nan))
    with pytest.raises(EngineError, match="hold NaN"):
        draft.propose([a_sequence(0, [1, 2])], 2)


def test_closing_closes_the_other_executor(make_draft):
    draft, executor = make_draft()
    draft.close()
    assert executor.closed
