"""A prompt's own log-probabilities: what the model's rows say, once each, however the prompt was computed."""

from __future__ import annotations

import numpy as np
import pytest

from optimc.errors import EngineError, RequestError
from optimc_runtime.prompt_logprobs import MAX_SCORED_TOKENS, PromptLogprobs
from optimc_runtime.request import SamplingParams, TokenLogprob

PROMPT = [5, 9, 2, 2, 17, 40, 3, 8, 21, 6, 30]


def expected(scripted, prompt, count, vocab_size=64):
    """Log-softmax in float64, row by row."""
    logits = scripted.logits(prompt, vocab_size).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    tops = [sorted(range(vocab_size), key=lambda token: (-row[token], token))[:count] for row in logits]
    return logprobs, tops


def check(told, scripted, prompt, count):
    logprobs, tops = expected(scripted, prompt, count)
    assert told[0] is None
    assert [token.token_id for token in told[1:]] == prompt[1:]
    for position, token in enumerate(told[1:]):
        assert token.logprob == pytest.approx(logprobs[position, prompt[position + 1]], abs=1e-5)
        assert [token_id for token_id, _ in token.top] == tops[position]
        for token_id, logprob in token.top:
            assert logprob == pytest.approx(logprobs[position, token_id], abs=1e-5)


def told_by(inbox):
    told = [output.prompt_logprobs for output in inbox.outputs if output.prompt_logprobs is not None]
    assert len(told) == 1
    assert inbox.outputs[0].prompt_logprobs is not None, "not in the first output"
    return told[0]


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("count", [0, 3])
def test_the_prompt_is_scored_in_chunks_and_the_answer_is_the_same(make_engine, drive, scripted, max_tokens, count):
    engine = make_engine(max_step_tokens=4)
    params = drive.greedy(max_tokens, logprobs=count, prompt_logprobs=True)
    inbox = drive.submit(engine, PROMPT, params)
    drive.run(engine)
    check(told_by(inbox), scripted, PROMPT, count)
    assert inbox.token_ids == scripted.greedy(PROMPT, max_tokens)
    assert inbox.reason == "length"


def test_a_cached_prompt_is_scored_all_the_same_and_a_scored_one_is_not_cached(make_engine, drive, scripted):
    engine = make_engine()
    scoring = drive.greedy(2, logprobs=1, prompt_logprobs=True)
    for params in (scoring, drive.greedy(2), scoring):
        inbox = drive.submit(engine, PROMPT, params)
        drive.run(engine)
        assert inbox.outputs[-1].usage.cached_tokens == 0
        if params is scoring:
            check(told_by(inbox), scripted, PROMPT, 1)


def test_a_preempted_prompt_is_told_once(make_engine, drive, scripted):
    engine = make_engine(num_blocks=8, max_step_tokens=16)
    params = drive.greedy(12, logprobs=1, prompt_logprobs=True)
    inboxes = [drive.submit(engine, PROMPT, params) for _ in range(3)]
    drive.run(engine)
    assert engine.stats().preemptions > 0
    for inbox in inboxes:
        check(told_by(inbox), scripted, PROMPT, 1)
        assert inbox.token_ids == scripted.greedy(PROMPT, 12)


def test_rows_may_come_again_and_those_of_the_output_say_nothing(scripted):
    logits = scripted.logits([*PROMPT, 7], 64)
    whole = PromptLogprobs(np.array(PROMPT), 2)
    whole.take(0, logits[: len(PROMPT)])
    told = whole.finished()
    check(told, scripted, PROMPT, 2)
    assert whole.finished() is None, "told twice"
    cut = PromptLogprobs(np.array(PROMPT), 2)
    for start, end in ((0, 3), (0, 5), (5, 9)):
        cut.take(start, logits[start:end])
        assert cut.finished() is None
    for start, end in ((9, 10), (10, 11), (11, 12)):
        cut.take(start, logits[start:end])
    assert cut.finished() == told


def test_a_single_token_has_nothing_to_predict_it():
    assert PromptLogprobs(np.array([3]), 1).finished() == (None,)


def test_equal_logits_are_told_lowest_id_first():
    logprobs = PromptLogprobs(np.array([0, 6]), 3)
    logprobs.take(0, np.array([[1, 2, 2, 0, 2, 2, 1, 1]], np.float32))
    told = logprobs.finished()
    assert [token_id for token_id, _ in told[1].top] == [1, 2, 4]


def test_more_alternatives_than_tokens_are_all_of_them():
    logprobs = PromptLogprobs(np.array([0, 1]), 20)
    logprobs.take(0, np.zeros((1, 4), np.float32))
    assert logprobs.finished()[1].top == tuple((token_id, pytest.approx(-np.log(4))) for token_id in range(4))


def test_what_is_impossible_is_told_as_such():
    logprobs = PromptLogprobs(np.array([0, 1]), 1)
    logprobs.take(0, np.array([[3.0, -np.inf, 3.0]], np.float32))
    assert logprobs.finished()[1] == TokenLogprob(1, -np.inf, ((0, pytest.approx(-np.log(2))),))


def test_figures_are_the_samplers_own(make_engine, drive):
    engine = make_engine()
    answer = drive.submit(engine, PROMPT, drive.greedy(8, logprobs=4))
    drive.run(engine)
    scored = drive.submit(engine, [*PROMPT, *answer.token_ids], drive.greedy(0, logprobs=4, prompt_logprobs=True))
    drive.run(engine)
    assert told_by(scored)[len(PROMPT) :] == tuple(token for output in answer.outputs for token in output.logprobs)


def test_not_a_number_is_an_error_that_names_the_position():
    logprobs = PromptLogprobs(np.array([0, 1, 2]), 1)
    with pytest.raises(EngineError, match="position 1"):
        logprobs.take(0, np.array([[1, 2, 3], [1, np.nan, 3]], np.float32))


def test_what_cannot_be_scored_is_refused_by_name(make_engine, drive):
    with pytest.raises(RequestError, match="only with logprobs") as alone:
        SamplingParams(prompt_logprobs=True)
    assert alone.value.param == "echo"
    with pytest.raises(RequestError, match="at most 4,096") as long:
        PromptLogprobs(np.zeros(MAX_SCORED_TOKENS + 1, np.int64), 0)
    assert long.value.param == "echo"
