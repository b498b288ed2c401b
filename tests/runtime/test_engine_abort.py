"""Requests that are given up."""

import random

import pytest

from optimc_runtime.config import EngineConfig


@pytest.mark.parametrize("steps", range(6), ids=lambda steps: f"after {steps} steps")
def test_abort_works_in_every_state_and_twice(make_engine, steps, drive):
    """0: queued, 1-2: between chunks, 3-5: decoding."""
    engine = make_engine(num_blocks=16)
    other = drive.submit(engine, [2], drive.greedy(12))
    inbox = drive.submit(engine, [1] * 20, drive.greedy(10))
    for _ in range(steps):
        engine.step()
    delivered = len(inbox.token_ids)
    engine.abort(inbox.request_id)
    engine.abort(inbox.request_id)
    engine.step()
    assert inbox.reason == "abort"
    assert len(inbox.token_ids) == delivered
    engine.scheduler.check_integrity()
    assert engine.stats().running == 1
    engine.abort(inbox.request_id)
    drive.run(engine)
    assert other.reason == "length"
    assert engine.stats().finished["abort"] == 1


def test_abort_of_a_preempted_request(make_engine, drive):
    engine = make_engine(num_blocks=8)
    drive.submit(engine, [1] * 8, drive.greedy(20))
    young = drive.submit(engine, [2] * 8, drive.greedy(20))
    while not engine.stats().preemptions:
        engine.step()
    engine.abort(young.request_id)
    engine.step()
    assert young.reason == "abort"
    drive.run(engine)


def test_abort_of_finished_and_unknown_requests_does_nothing(make_engine, drive):
    engine = make_engine()
    inbox = drive.submit(engine, [1], drive.greedy(1))
    drive.run(engine)
    engine.abort(inbox.request_id)
    engine.abort("nobody")
    drive.run(engine)
    assert inbox.reason == "length"
    assert engine.stats().finished["abort"] == 0


def test_an_abort_that_comes_too_late_does_not_hit_the_next_owner_of_the_id(make_engine, drive):
    engine = make_engine()
    first = drive.submit(engine, [1], drive.greedy(1), request_id="a")
    engine.executor.before_step = lambda plan: engine.abort("a")
    engine.step()
    engine.executor.before_step = None
    second = drive.submit(engine, [1], drive.greedy(1), request_id="a")
    drive.run(engine)
    assert (first.reason, second.reason) == ("length", "length")


def test_200_random_aborts_among_500_requests_leak_nothing(make_engine, scripted, drive):
    engine = make_engine(EngineConfig(max_queued_requests=1000), num_blocks=12, max_seqs=6)
    rng = random.Random(1)
    prompts = [[rng.randrange(2)] * rng.randint(1, 30) for _ in range(500)]
    inboxes = [drive.submit(engine, prompt, drive.greedy(rng.randint(1, 12))) for prompt in prompts]
    victims = set(rng.sample(range(500), 200))
    for victim in sorted(victims):
        for _ in range(rng.randrange(4)):
            engine.step()
        engine.abort(inboxes[victim].request_id)
        if victim % 10 == 0:
            engine.scheduler.check_integrity()
    drive.run(engine)
    for i, (prompt, inbox) in enumerate(zip(prompts, inboxes, strict=True)):
        assert inbox.token_ids == scripted.greedy(prompt, len(inbox.token_ids))
        assert inbox.reason == "length" or (i in victims and inbox.reason == "abort")
    assert sum(engine.stats().finished.values()) == 500
