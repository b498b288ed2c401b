"""Special tokens of an answer: they have no text, may still end it, and are shown to those who ask."""

import pytest

from optimc_runtime.output_text import special_stop_ids


@pytest.mark.parametrize("min_tokens", [0, 2])
def test_a_special_token_is_a_stop_string_like_any_other(make_engine, drive, byte_tokenizer, min_tokens):
    """It has no text, so the text alone would never show it."""
    end = byte_tokenizer.token_id("<end>")
    script = {0: ord("a"), 1: end, 2: ord("b"), 3: end, 4: ord("c")}
    engine = make_engine(vocab_size=257, tokenizer=byte_tokenizer, script=script)
    inbox = drive.submit(engine, [97], drive.greedy(5, stop=("zz", "<end>"), min_tokens=min_tokens))
    unstopped = drive.submit(engine, [97], drive.greedy(5, stop=("zz", "<end")))
    drive.run(engine)
    assert inbox.token_ids.index(end) == len(inbox.token_ids) - 1 == (1 if min_tokens == 0 else 3)
    assert inbox.reason == "stop"
    assert "<" not in inbox.text
    assert min_tokens or inbox.text == "a"
    assert (unstopped.text, unstopped.reason) == ("abc", "length")


def test_only_whole_spellings_of_special_tokens_stop(byte_tokenizer):
    end = byte_tokenizer.token_id("<end>")
    assert special_stop_ids(byte_tokenizer, ["<end>", "a", "<end", "<end> "]) == {end}
    assert special_stop_ids(None, ["<end>"]) == frozenset()


def test_special_tokens_are_shown_to_those_who_ask(make_engine, drive, byte_tokenizer):
    end = byte_tokenizer.token_id("<end>")
    engine = make_engine(vocab_size=257, tokenizer=byte_tokenizer, script={0: ord("a"), 1: end, 2: ord("b")})
    shown = drive.submit(engine, [97], drive.greedy(3, special_tokens_in_text=True))
    hidden = drive.submit(engine, [97], drive.greedy(3))
    drive.run(engine)
    assert (shown.text, hidden.text) == ("a<end>b", "ab")
