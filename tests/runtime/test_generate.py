"""Whole answers and streams."""

import threading

import pytest

from optimc.errors import RequestError
from optimc_runtime.config import EngineConfig


def test_generate_takes_more_prompts_than_the_queue(make_engine, scripted, drive):
    engine = make_engine(EngineConfig(max_seqs=2, max_queued_requests=3))
    prompts = [[i % 64] for i in range(40)]
    generations = engine.generate(prompts, [drive.greedy(1 + i % 3) for i in range(40)])
    for i, generation in enumerate(generations):
        assert list(generation.token_ids) == scripted.greedy(prompts[i], 1 + i % 3)
        assert generation.usage.output_tokens == 1 + i % 3
        assert generation.finish_reason == "length"


def test_generate_encodes_text_and_joins_increments(make_talker, drive):
    engine = make_talker("_hello")
    (generation,) = engine.generate(["ab"], drive.greedy(5, logprobs=0))
    assert (generation.text, len(generation.logprobs)) == ("hello", 5)
    assert generation.usage.prompt_tokens == 2


def test_generate_refuses_the_whole_lot_for_one_bad_prompt(make_engine, drive):
    engine = make_engine()
    with pytest.raises(RequestError):
        engine.generate([[1], [99]], drive.greedy(None))
    engine.close()
    drive.assert_idle(engine)


def test_stream_yields_every_token_and_aborts_when_left(make_engine, scripted, drive):
    engine = make_engine()
    outputs = list(engine.stream([1], drive.greedy(5)))
    assert [token for output in outputs for token in output.token_ids] == scripted.greedy([1], 5)
    left = threading.Event()
    engine.executor.before_step = lambda plan: plan.positions[-1] < 5 or left.wait(10)
    stream = engine.stream([1], drive.greedy(50))
    next(stream)
    stream.close()
    left.set()
    engine.close(drain=True)
    assert engine.stats().finished["abort"] == 1
    drive.assert_idle(engine)
