from itertools import combinations

import pytest

from optimc.errors import ConfigError, MeasureError
from optimc.measure.prompts import HASH_TOKENS, UNIQUE_TOKENS, IdPrompts, LengthOnly, TextPrompts, usable_ids
from optimc.measure.workload import Workload


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def prompts(run_id="run", **options):
    source = IdPrompts(Workload(**options), run_id, usable_ids(384, {1, 2}))
    return [source(i) for i in range(20)]


def test_prompts_have_the_asked_length_and_no_special_token():
    for ids in prompts(prompt_tokens=100):
        assert len(ids) == 100
        assert not {1, 2} & set(ids)
        assert max(ids) < 384


def test_no_two_prompts_share_a_block():
    both_runs = prompts("first") + prompts("second")
    assert max(common(a, b) for a, b in combinations(both_runs, 2)) < UNIQUE_TOKENS


def test_two_runs_do_the_same_work_after_the_first_block():
    assert [p[UNIQUE_TOKENS:] for p in prompts("first")] == [p[UNIQUE_TOKENS:] for p in prompts("second")]
    assert prompts(seed=1)[0][UNIQUE_TOKENS:] != prompts(seed=2)[0][UNIQUE_TOKENS:]


def test_shared_prefix_is_exactly_as_long_as_asked():
    assert {common(a, b) for a, b in combinations(prompts(shared_prefix_tokens=48), 2)} == {48}


def test_same_prompts_are_the_same_within_a_run_only():
    assert len({tuple(p) for p in prompts(same_prompts=True)}) == 1
    assert prompts("first", same_prompts=True)[0] != prompts("second", same_prompts=True)[0]


def test_one_usable_id_cannot_make_unique_prompts():
    with pytest.raises(MeasureError, match="1 usable token ids"):
        IdPrompts(Workload(), "run", usable_ids(2, {0}))


def test_texts_differ_from_their_first_word_on():
    source = TextPrompts(Workload(prompt_tokens=50), "run", lambda tokens: tokens)
    texts = [source(i) for i in range(10)]
    assert len({text.split()[0] for text in texts}) == 10
    assert all(len(text.split()) == 51 for text in texts)


def test_a_trace_in_words_is_as_long_as_it_says_and_alike_where_its_hashes_are():
    source = TextPrompts(Workload(), "run", lambda tokens: tokens)
    # the second hash stands for 88 tokens of its 512
    one = source.of_length(0, LengthOnly(HASH_TOKENS + 88, (7, 8))).split()
    other = source.of_length(1, LengthOnly(HASH_TOKENS + 88, (7, 9))).split()
    assert [len(one), len(other)] == [HASH_TOKENS + 88] * 2
    assert common(one, other) == pytest.approx(HASH_TOKENS, abs=2)  # words of the next block may agree by chance
    longer = source.of_length(2, LengthOnly(HASH_TOKENS + 88, (7,))).split()
    assert common(one, longer[: len(one)]) == pytest.approx(HASH_TOKENS, abs=2)
    assert len(longer) == HASH_TOKENS + 88 + 1  # and the word nobody else has


def test_words_of_equal_hashes_are_as_many_in_prompts_of_any_length():
    # 7 tokens are a template's, and a word is 1.3 tokens: a block of 512 is the 394 words between 1,024 and 512 tokens
    source = TextPrompts(Workload(), "run", lambda tokens: max(1, round((tokens - 7) / 1.3)))
    one = source.of_length(0, LengthOnly(2 * HASH_TOKENS + 90, (7, 8))).split()
    other = source.of_length(1, LengthOnly(2 * HASH_TOKENS + 700, (7, 8))).split()
    assert common(one, other[: len(one)]) == 2 * 394


def test_what_a_trace_in_words_makes_up_goes_by_the_seed_too():
    def own_words(seed):
        return TextPrompts(Workload(seed=seed), "run", lambda tokens: tokens).of_length(0, LengthOnly(50)).split()[1:]

    assert own_words(1) == own_words(1)
    assert own_words(1) != own_words(2)


def test_all_bad_options_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        Workload(prompt_tokens=0, output_tokens=0, concurrency=4, requests=2, timeout_s=0)
    assert [fault.where for fault in caught.value.faults] == ["prompt_tokens", "output_tokens", "requests", "timeout_s"]
