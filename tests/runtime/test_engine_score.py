"""Teacher-forced logits through the scheduler."""

import threading

import numpy as np
import pytest

from optimc.errors import EngineError


@pytest.mark.parametrize("budget", [1, 3, 8, 64])
def test_scores_equal_one_shot_logits_however_chunked(make_engine, scripted, budget):
    engine = make_engine(max_step_tokens=budget)
    tokens = [(5 * i) % 64 for i in range(64)]
    assert (engine.score(tokens) == scripted.logits(tokens, 64)).all()


def test_scores_among_other_requests_in_a_preempting_pool(make_engine, scripted, drive):
    engine = make_engine(num_blocks=17, max_seqs=4)
    prompts = [[i] * 20 for i in range(8)]
    texts = [[(seed + 3 * i) % 64 for i in range(40)] for seed in range(4)]
    scores: dict[int, np.ndarray] = {}
    threads = [
        threading.Thread(target=lambda i=i, text=text: scores.update({i: engine.score(text)}))
        for i, text in enumerate(texts)
    ]
    for thread in threads:
        thread.start()
    generations = engine.generate(prompts, drive.greedy(30))
    for thread in threads:
        thread.join(10)
    for i, text in enumerate(texts):
        assert (scores[i] == scripted.logits(text, 64)).all()
    for prompt, generation in zip(prompts, generations, strict=True):
        assert list(generation.token_ids) == scripted.greedy(prompt, 30)
    engine.close()
    drive.assert_idle(engine)


def test_streamed_scores_come_in_order_each_position_once(make_engine, scripted):
    engine = make_engine(max_step_tokens=7)
    pieces = []
    engine.score_stream(list(range(40)), lambda start, logits: pieces.append((start, logits.copy())))
    assert [start for start, _ in pieces] == [0, 7, 14, 21, 28, 35]
    assert (np.concatenate([rows for _, rows in pieces]) == scripted.logits(range(40), 64)).all()


def test_scoring_neither_asks_nor_tells_the_prefix_cache(make_engine, drive):
    engine = make_engine()
    engine.generate([[1] * 9], drive.greedy(1))
    before = engine.stats()
    engine.score([1] * 20)
    after = engine.stats()
    assert after.prefix_queried_tokens == before.prefix_queried_tokens
    assert after.blocks_cached == before.blocks_cached


def test_a_failure_while_scoring_reaches_the_caller(make_engine):
    engine = make_engine()

    def failing(start, logits):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine.score_stream([1, 2, 3], failing)
    engine.executor.before_step = lambda plan: 1 / 0
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        engine.score([1, 2, 3])
