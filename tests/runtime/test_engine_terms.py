"""What a request may ask of the engine besides tokens: terms, a grammar, scores of its prompt, special stops."""

import numpy as np
import pytest

from optimc.errors import RequestError
from optimc_runtime.config import EngineConfig
from optimc_runtime.request import Terms
from optimc_runtime.structured.grammar_spec import GrammarSpec


def test_the_policy_looks_at_a_requests_priority(make_engine, drive):
    engine = make_engine(EngineConfig(max_seqs=1, policy="priority"))
    ended = []
    for name, priority in (("a", 3), ("b", 0), ("c", -3)):
        engine.submit(
            [1],
            drive.greedy(2),
            on_output=lambda output: ended.append(output.request_id) if output.finish_reason else None,
            request_id=name,
            terms=Terms(priority=priority),
        )
    drive.run(engine)
    assert ended == ["c", "b", "a"]


def test_the_policy_of_short_prompts_looks_at_prompts(make_engine, drive):
    engine = make_engine(EngineConfig(max_seqs=1, policy="shortest-prompt"))
    long = drive.submit(engine, [1] * 20, drive.greedy(1))
    short = drive.submit(engine, [2], drive.greedy(5))
    while short.reason is None:
        engine.step()
    assert long.reason is None
    drive.run(engine)


def test_the_budget_of_chunks_is_on_unless_switched_off(make_engine, drive):
    cut, uncut = make_engine(max_step_tokens=32, gap_factor=2.0), make_engine(max_step_tokens=32)
    for engine in (cut, uncut):
        drive.submit(engine, [1] * 3, drive.greedy(40))
        engine.step()
        drive.submit(engine, [2] * 30, drive.greedy(1))
        engine.step()  # with a budget, a plain one: it is to be measured
    assert (cut.stats().prompt_tokens, uncut.stats().prompt_tokens) == (3, 33)
    for engine in (cut, uncut):
        drive.run(engine)
    assert cut.stats().prompt_tokens == 33


def test_a_grammar_holds_an_answer(make_engine, byte_tokenizer, drive):
    engine = make_engine(vocab_size=257, tokenizer=byte_tokenizer, max_seq_len=120, eos=(256,))
    grammar = engine.compile_grammar(GrammarSpec("regex", "(yes|no), [0-9]{3}", "guided_regex"))
    plain = drive.submit(engine, [5, 6], drive.greedy(8))
    held = drive.submit(engine, [5, 6], drive.greedy(40), grammar=grammar)
    drive.run(engine)
    word, digits = held.text.split(", ")
    assert word in ("yes", "no")
    assert len(digits) == 3
    assert digits.isdigit()
    assert held.reason == "stop"
    assert plain.text != held.text


def test_what_contradicts_a_grammar_is_refused(make_engine, byte_tokenizer, drive):
    engine = make_engine(vocab_size=257, tokenizer=byte_tokenizer)
    grammar = engine.compile_grammar(GrammarSpec("json_object", "", "response_format"))
    with pytest.raises(RequestError) as refused:
        drive.submit(engine, [1], drive.greedy(5, ignore_eos=True), grammar=grammar)
    assert refused.value.param == "ignore_eos"
    with pytest.raises(RequestError, match="guided_regex needs a tokenizer, and the plan has none") as refused:
        make_engine().compile_grammar(GrammarSpec("regex", "a", "guided_regex"))
    assert refused.value.param == "guided_regex"


def test_a_stop_string_that_is_a_special_token_ends_the_answer(make_engine, byte_tokenizer, drive):
    engine = make_engine(vocab_size=257, tokenizer=byte_tokenizer, max_seq_len=60, script={0: 104, 1: 105, 2: 256})
    stopped = drive.submit(engine, [1], drive.greedy(5, stop=("<end>",)))
    goes_on = drive.submit(engine, [1], drive.greedy(5, stop=("<END>",)))
    drive.run(engine)
    assert (stopped.text, stopped.reason) == ("hi", "stop")
    assert goes_on.reason == "length"


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_scores_of_a_prompt_are_those_of_its_tokens_and_leave_the_cache_alone(make_engine, drive, scripted, max_tokens):
    engine = make_engine(max_step_tokens=8)
    prompt = [(3 * i) % 64 for i in range(20)]
    drive.submit(engine, prompt, drive.greedy(1))
    drive.run(engine)
    cached = engine.stats().prefix_cached_blocks
    scored = drive.submit(engine, prompt, drive.greedy(max_tokens, logprobs=2, prompt_logprobs=True))
    drive.run(engine)
    logits = scripted.logits(prompt, 64).astype(float)
    assert [output.prompt_logprobs is not None for output in scored.outputs] == [True] + [False] * (
        len(scored.outputs) - 1
    )
    first, *others = scored.outputs[0].prompt_logprobs
    assert first is None
    assert [each.token_id for each in others] == prompt[1:]
    for row, each in zip(logits, others, strict=False):
        total = np.log(np.exp(row).sum())
        assert each.logprob == pytest.approx(row[each.token_id] - total, abs=1e-4)
    assert scored.token_ids == scripted.greedy(prompt, max_tokens)
    assert scored.reason == "length"
    assert scored.outputs[-1].usage.cached_tokens == 0
    assert engine.stats().prefix_cached_blocks == cached
