"""Shared prefixes, seen from outside."""

import random


def test_salts_and_no_salt_share_nothing(make_engine, drive):
    engine = make_engine()
    for salt in ("", "x", "y"):
        inbox = drive.submit(engine, [1] * 9, drive.greedy(1), cache_salt=salt)
        drive.run(engine)
        assert inbox.outputs[-1].usage.cached_tokens == 0
    again = drive.submit(engine, [1] * 9, drive.greedy(1), cache_salt="x")
    drive.run(engine)
    assert again.outputs[-1].usage.cached_tokens == 8


def test_with_a_hash_that_always_collides_answers_stay_right(make_engine, scripted, drive):
    engine = make_engine(block_hash=lambda *_: 7, num_blocks=16)
    rng = random.Random(3)
    prompts = [[rng.randrange(2) for _ in range(rng.randint(4, 20))] for _ in range(60)]
    inboxes = [drive.submit(engine, prompt, drive.greedy(4)) for prompt in prompts]
    drive.run(engine)
    for prompt, inbox in zip(prompts, inboxes, strict=True):
        assert inbox.token_ids == scripted.greedy(prompt, 4)


def test_aborts_and_failures_between_schedule_and_commit_leave_no_visible_block(make_engine, scripted, drive):
    """Fresh blocks are poisoned: a block published before it was written would be read and give another answer."""
    for seed in range(60):
        engine = make_engine(num_blocks=12, max_seqs=4)
        rng = random.Random(seed)
        inboxes = [drive.submit(engine, [0] * rng.randint(4, 20), drive.greedy(4)) for _ in range(6)]

        def strike(plan, rng=rng, engine=engine, inboxes=inboxes):
            engine.abort(rng.choice(inboxes).request_id)
            if rng.random() < 0.3:
                raise RuntimeError("struck")

        engine.executor.before_step = strike
        for _ in range(rng.randint(1, 6)):
            engine.step()
        engine.executor.before_step = None
        late = drive.submit(engine, [0] * 20, drive.greedy(4))
        drive.run(engine)
        for inbox in (*inboxes, late):
            assert inbox.token_ids == scripted.greedy([0] * inbox.outputs[-1].usage.prompt_tokens, len(inbox.token_ids))
        assert late.reason == "length"


def test_reset_prefix_cache_forgets(make_engine, drive):
    engine = make_engine()
    drive.submit(engine, [1] * 9, drive.greedy(1))
    drive.run(engine)
    assert engine.stats().blocks_cached == 2
    engine.reset_prefix_cache()
    assert engine.stats().blocks_cached == 0
    again = drive.submit(engine, [1] * 9, drive.greedy(1))
    drive.run(engine)
    assert again.outputs[-1].usage.cached_tokens == 0
    engine.start()
    engine.reset_prefix_cache()
    assert engine.stats().blocks_cached == 0
