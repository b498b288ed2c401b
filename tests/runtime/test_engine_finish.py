"""How a request ends, and what it reports."""

import numpy as np
import pytest


@pytest.mark.parametrize("eos", [7, 8, 9])
def test_any_eos_ends_with_stop_and_stays_out_of_the_text(make_engine, byte_tokenizer, eos, drive):
    engine = make_engine(vocab_size=257, eos=(7, 8, 9), tokenizer=byte_tokenizer)
    engine.executor.script = {0: ord("h"), 1: ord("i"), 2: eos}
    inbox = drive.submit(engine, [1], drive.greedy(10))
    drive.run(engine)
    assert (inbox.text, inbox.token_ids, inbox.reason) == ("hi", [104, 105, eos], "stop")
    assert inbox.outputs[-1].usage.output_tokens == 3


def test_min_tokens_holds_back_every_stop_token(make_engine, drive):
    engine = make_engine(eos=(7, 8))
    engine.executor.script = {0: 7, 1: 8, 2: 9, 3: 7}
    inbox = drive.submit(engine, [1], drive.greedy(10, min_tokens=3, stop_token_ids=(9,)))
    drive.run(engine)
    assert not {7, 8, 9} & set(inbox.token_ids[:3])
    assert (inbox.token_ids[3:], inbox.reason) == ([7], "stop")


def test_ignore_eos_runs_to_the_end(make_engine, drive):
    engine = make_engine(eos=(7,))
    engine.executor.script = {0: 7}
    inbox = drive.submit(engine, [1], drive.greedy(4, ignore_eos=True))
    drive.run(engine)
    assert (inbox.token_ids[0], len(inbox.token_ids), inbox.reason) == (7, 4, "length")


def test_stop_token_ids_end_a_request_even_with_ignore_eos(make_engine, drive):
    engine = make_engine(eos=(7,))
    engine.executor.script = {0: 7, 1: 12}
    inbox = drive.submit(engine, [1], drive.greedy(4, ignore_eos=True, stop_token_ids=(12,)))
    drive.run(engine)
    assert (inbox.token_ids, inbox.reason) == ([7, 12], "stop")


def test_a_stop_string_is_cut_with_all_that_follows(make_talker, drive):
    engine = make_talker("one two three")
    inbox = drive.submit(engine, [1], drive.greedy(20, stop=("two",)))
    drive.run(engine)
    assert (inbox.text, inbox.reason) == ("one ", "stop")
    assert len(inbox.token_ids) == len("one two")


def test_text_held_back_for_a_stop_string_is_delivered_in_the_end(make_talker, drive):
    engine = make_talker("one twO")
    inbox = drive.submit(engine, [1], drive.greedy(6, stop=("two",)))
    drive.run(engine)
    assert (inbox.text, inbox.reason) == ("one tw", "length")


def test_no_stop_string_before_min_tokens(make_talker, drive):
    engine = make_talker("ab ab ab")
    inbox = drive.submit(engine, [1], drive.greedy(8, stop=("ab",), min_tokens=3))
    drive.run(engine)
    assert (inbox.text, inbox.reason) == ("ab ", "stop")


def test_a_cut_in_mid_character_flushes_it_as_invalid(make_talker, byte_tokenizer, drive):
    engine = make_talker("a😀")
    inbox = drive.submit(engine, [1], drive.greedy(3))
    drive.run(engine)
    assert inbox.text == byte_tokenizer.decode(inbox.token_ids) == "a\ufffd"
    assert all("\ufffd" not in output.text for output in inbox.outputs[:-1])


def test_zero_tokens_compute_the_prompt_only(make_engine, drive):
    engine = make_engine()
    inbox = drive.submit(engine, [1] * 20, drive.greedy(0))
    drive.run(engine)
    assert (inbox.token_ids, inbox.reason, len(inbox.outputs)) == ([], "length", 1)
    assert engine.stats().prompt_tokens == 20


def test_without_max_tokens_a_request_fills_what_the_limits_leave(make_engine, drive):
    engine = make_engine(num_blocks=8, max_seq_len=64)
    inbox = drive.submit(engine, [1] * 10, drive.greedy(None))
    drive.run(engine)
    assert (len(inbox.token_ids), inbox.reason) == (22, "length")


def test_usage_timings_and_logprobs_are_reported(make_engine, scripted, drive):
    engine = make_engine()
    drive.submit(engine, [1] * 9, drive.greedy(2))
    drive.run(engine)
    inbox = drive.submit(engine, [1] * 9, drive.greedy(3, logprobs=2))
    drive.run(engine)
    last = inbox.outputs[-1]
    assert (last.usage.prompt_tokens, last.usage.output_tokens, last.usage.cached_tokens) == (9, 3, 8)
    times = last.timings
    assert times.arrival_s <= times.scheduled_s <= times.first_token_s <= times.finished_s
    assert [len(output.logprobs) for output in inbox.outputs] == [1, 1, 1]
    logits = scripted.logits([1] * 9, 64)[-1].astype(np.float64)
    best = inbox.outputs[0].logprobs[0]
    assert best.token_id == best.top[0][0] == logits.argmax()
    assert best.logprob == pytest.approx(logits.max() - np.log(np.exp(logits).sum()), abs=1e-4)
