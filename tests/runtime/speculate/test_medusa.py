"""Heads as a proposer, on an executor that answers what the test says."""

import numpy as np
import pytest

from optimc.plan import DraftTreeInfo, HeadInfo, HeadsInfo
from optimc_runtime.executor.base import DraftCandidates
from optimc_runtime.sequence import Sequence
from optimc_runtime.speculate.medusa import MedusaProposer


def heads(nodes, confidence=((-2.0, 0.2), (0.0, 0.8)), num_heads=2):
    return HeadsInfo(
        num_heads=num_heads,
        hidden_size=4,
        num_blocks=1,
        conditioned=True,
        projection="shared",
        draft_vocab_size=100,
        draft_vocab=None,
        bits=None,
        base_hash="",
        heads=tuple(HeadInfo(confidence=confidence) for _ in range(num_heads)),
        tree=DraftTreeInfo(nodes=nodes, source="given", expected_tokens=None, costs=(), machine=""),
    )


class Answering:
    """Head k's candidate of rank r for a row is 100 * (first number of its hidden state) + 10 * k + r."""

    def __init__(self):
        self.calls = []

    def draft(self, hidden, tokens, top):
        self.calls.append((hidden.copy(), tokens.tolist(), top))
        base = (100 * hidden[:, 0]).astype(np.int32)[:, None, None]
        ids = base + 10 * np.arange(2, dtype=np.int32)[None, :, None] + np.arange(top, dtype=np.int32)
        return DraftCandidates(ids, np.full(ids.shape, -1.0, np.float32) - np.arange(top, dtype=np.float32))


def sequence(order, *tokens):
    return Sequence(f"r{order}", order, tokens, 100)


def hidden_of(*values):
    return np.array([[value, 0, 0, 0] for value in values], np.float32)


def test_the_plans_tree_is_filled_with_each_heads_candidates():
    executor = Answering()
    proposer = MedusaProposer(executor, heads(((0,), (0, 0), (1,), (0, 2))), max_nodes=32)
    one = sequence(0, 5, 6)
    proposer.keep((one,), hidden_of(7))
    [proposal] = proposer.propose([one], 4)
    assert proposal.tokens == [700, 710, 701, 712]
    assert proposal.parents == (-1, 0, -1, 0)
    [(hidden, tokens, top)] = executor.calls
    assert hidden.tolist() == [[7, 0, 0, 0]]
    assert (tokens, top) == ([6], 3)
    # -1, -2 and -3 on the line from (-2, 0.2) to (0, 0.8), flat below
    assert proposal.confidences == pytest.approx([0.5, 0.5, 0.2, 0.2])


def test_only_the_newest_tokens_state_counts():
    executor = Answering()
    proposer = MedusaProposer(executor, heads(((0,),)), max_nodes=32)
    fresh, stale, unknown = sequence(0, 5), sequence(1, 5), sequence(2, 5)
    proposer.keep((fresh, stale), hidden_of(1, 2))
    stale.append(9)
    first, second, third = proposer.propose([stale, fresh, unknown], 4)
    assert (first, third) == (None, None)
    assert second.tokens == [100]
    proposer.forget(fresh)
    assert proposer.propose([fresh], 4) == [None]
    assert len(executor.calls) == 1


def test_rows_of_several_sequences_are_one_call():
    executor = Answering()
    proposer = MedusaProposer(executor, heads(((0,), (0, 0))), max_nodes=32)
    one, other = sequence(0, 5), sequence(1, 6)
    proposer.keep((one, other), hidden_of(1, 2))
    proposals = proposer.propose([one, other], 1)
    assert [proposal.tokens for proposal in proposals] == [[100], [200]]
    assert len(executor.calls) == 1


def test_a_tree_is_cut_to_the_most_nodes():
    proposer = MedusaProposer(Answering(), heads(((0,), (0, 0), (1,))), max_nodes=2)
    one = sequence(0, 5)
    proposer.keep((one,), hidden_of(1))
    assert proposer.propose([one], 4)[0].parents == (-1, 0)
