import random

import pytest

from optimc_runtime.sequence import Sequence
from optimc_runtime.speculate.ngram import NgramProposer


def a_sequence(tokens, order=0):
    return Sequence(f"r{order}", order, tokens, 10_000)


def guess(tokens, depth=4, shortest=2, longest=8):
    [proposal] = NgramProposer(shortest, longest).propose([a_sequence(tokens)], depth)
    return proposal


def test_what_followed_last_time_is_guessed():
    proposal = guess([1, 2, 3, 4, 5, 6, 9, 1, 2, 3])
    assert proposal.tokens == [4, 5, 6, 9]
    assert proposal.parents == (-1, 0, 1, 2)


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3, 4], [5, 1, 6, 1]])
def test_text_without_repetition_gets_no_guess(tokens):
    assert guess(tokens) is None


def test_the_longest_run_wins_over_the_latest():
    tokens = [7, 1, 2, 3, 50, 51, 9, 2, 3, 60, 61, 7, 1, 2, 3]
    assert guess(tokens, depth=2).tokens == [50, 51]


def test_the_latest_of_equal_runs_wins():
    assert guess([1, 2, 50, 8, 1, 2, 60, 9, 1, 2], depth=1).tokens == [60]


def test_a_loop_goes_on_beyond_the_end():
    assert guess([9, 1, 2, 1, 2, 1, 2], depth=5).tokens == [1, 2, 1, 2, 1]


def test_a_longer_run_is_trusted_more():
    short = guess([1, 2, 3, 9, 2], shortest=1)
    long = guess([*range(20), 30, *range(18)])
    assert short.confidences[0] < 0.5 < long.confidences[0]
    assert long.confidences == sorted(long.confidences)


def test_shorter_runs_than_asked_for_are_no_reason():
    tokens = [1, 2, 3, 9, 2, 3]
    assert guess(tokens, shortest=2) is not None
    assert guess(tokens, shortest=3) is None


def test_guesses_do_not_depend_on_how_the_text_arrived():
    random_ = random.Random(0)
    tokens = [random_.randrange(6) for _ in range(400)]
    grown = a_sequence(tokens[:10])
    proposer = NgramProposer(2, 8)
    at = 10
    while at < len(tokens):
        [proposal] = proposer.propose([grown], 6)
        whole = guess(tokens[:at], depth=6)
        assert proposal == whole
        for token in tokens[at : at + random_.randrange(1, 9)]:
            grown.append(token)
        at = grown.num_tokens


def test_a_long_text_is_indexed_over_several_calls_and_not_guessed_from_before():
    random_ = random.Random(0)
    tokens = [random_.randrange(6) for _ in range(1200)]
    proposer = NgramProposer(2, 8)
    sequences = [a_sequence(tokens, 0), a_sequence(tokens, 1)]
    known = []
    for _ in range(5):
        before = sum(known)
        proposals = proposer.propose(sequences, 6)
        known = [len(index.tokens) for index in proposer._indexes.values()]
        assert sum(known) - before <= 512
        assert [proposal is not None for proposal in proposals] == [count == 1200 for count in known]
    assert known == [1200, 1200]
    assert proposals[0] == proposals[1]
    assert any(tokens[place - 2 : place + 6] == [*tokens[-2:], *proposals[0].tokens] for place in range(2, 1195))


def test_sequences_are_kept_apart_and_forgotten():
    proposer = NgramProposer(2, 8)
    one, other = a_sequence([1, 2, 3, 1, 2], 0), a_sequence([4, 5, 6, 7, 8], 1)
    first, second = proposer.propose([one, other], 1)
    assert first.tokens == [3]
    assert second is None
    proposer.forget(one)
    again = a_sequence([9, 9, 9], 0)
    assert proposer.propose([again], 1)[0].tokens == [9]
