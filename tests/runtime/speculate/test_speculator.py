"""The speculator alone, driven by hand: what it offers, what it learns, when it keeps quiet."""

import pytest

from optimc_runtime.config import SpeculationOptions
from optimc_runtime.sequence import Sequence, Status
from optimc_runtime.speculate.asked_proposer import AskedProposer
from optimc_runtime.speculate.cost_model import CostModel
from optimc_runtime.speculate.proposal import Proposal
from optimc_runtime.speculate.speculator import ProposingSpeculator
from optimc_runtime.speculate.tree import DraftTree, Verified, chain, tree_shape

FLAT = CostModel([(1, 2e-3), (64, 2.1e-3)])


class Scripted:
    """Proposes the same for everybody, and counts how often it is asked."""

    times_itself = True

    def __init__(self, proposal, name="draft", cost_s=1e-5):
        self.name = name
        self.cost_s = cost_s
        self.proposal = proposal
        self.asked = 0
        self.forgotten = []
        self.closed = False
        self.fails = False

    def propose(self, sequences, most_depth):
        self.asked += 1
        if self.fails:
            raise RuntimeError("no idea")
        return [self.proposal] * len(sequences)

    def forget(self, sequence):
        self.forgotten.append(sequence.order)

    def close(self):
        self.closed = True


def guess(*confidences, parents=None):
    return Proposal(parents or chain(len(confidences)), list(range(10, 10 + len(confidences))), list(confidences))


def make(*proposers, cost=FLAT, mode="auto", **options):
    return ProposingSpeculator(SpeculationOptions(mode, **options), proposers, cost)


def some(count, **attributes):
    sequences = [Sequence(f"r{order}", order, [1, 2, 3], 1000) for order in range(count)]
    for sequence in sequences:
        for name, value in attributes.items():
            setattr(sequence, name, value)
    return sequences


def verify(speculator, sequences, trees, accepted, execute_s=2e-3):
    """Report a step in which the first `accepted` nodes of every tree were right."""
    results = []
    for sequence, tree in zip(sequences, trees, strict=True):
        if tree is not None:
            path = list(range(min(accepted, len(tree.tokens))))
            results.append(Verified(sequence, tree, path, len(path) + 1))
    rows = len(sequences) + sum(len(tree.tokens) for tree in trees if tree is not None)
    speculator.observe(results, len(sequences), rows, execute_s)


def test_what_is_likely_is_offered_in_order():
    speculator = make(Scripted(guess(0.9, 0.8, 0.7)))
    [tree] = speculator.draft(some(1), 0, 100, False)
    assert tree.tokens == [10, 11, 12]
    assert tree.shape is tree_shape((-1, 0, 1))
    assert tree.proposer == "draft"
    assert tree.estimates == pytest.approx([0.9, 0.72, 0.504])


def test_the_best_nodes_of_a_tree_are_a_tree():
    proposal = guess(0.5, 0.2, 0.9, 0.9, parents=(-1, -1, 0, 2))
    speculator = make(Scripted(proposal), cost=CostModel([(1, 2e-3), (4, 2.01e-3), (5, 9e-3)]))
    [tree] = speculator.draft(some(1), 0, 100, False)
    assert tree.tokens == [10, 12, 13]
    assert tree.shape.parents == (-1, 0, 1)


def test_no_more_than_allowed_is_offered_and_the_best_of_all_first():
    speculator = make(Scripted(guess(0.9, 0.9, 0.9)))
    trees = speculator.draft(some(4), 0, 6, False)
    assert [len(tree.tokens) for tree in trees] == [2, 2, 1, 1] or sum(len(tree.tokens) for tree in trees) == 6
    assert all(tree.estimates[0] == pytest.approx(0.9) for tree in trees)
    assert speculator.draft(some(4), 0, 0, False) is None


def test_a_step_without_a_mask_gets_chains():
    speculator = make(Scripted(guess(0.6, 0.3, 0.9, parents=(-1, -1, 0))))
    [tree] = speculator.draft(some(1), 40, 100, True)
    assert tree.shape.is_chain
    assert tree.tokens == [10, 12]


def test_nothing_is_offered_where_rows_are_dear():
    proposer = Scripted(guess(0.9, 0.9))
    speculator = make(proposer, cost=CostModel([(1, 1e-3), (2, 2e-3)]))
    assert speculator.draft(some(1), 0, 100, False) is None
    always = make(proposer, cost=CostModel([(1, 1e-3), (2, 2e-3)]), always=True)
    assert len(always.draft(some(1), 0, 100, False)[0].tokens) == 2


def test_a_request_chooses_who_guesses():
    one, other = Scripted(guess(0.9), "ngram"), Scripted(guess(0.95, 0.95), "medusa")
    speculator = make(one, other)
    sequences = some(3)
    sequences[0].proposer, sequences[1].proposer, sequences[2].proposer = "ngram", "medusa", "auto"
    trees = speculator.draft(sequences, 0, 100, False)
    assert [tree.proposer for tree in trees] == ["ngram", "medusa", "medusa"]


def test_when_nothing_is_accepted_any_more_it_falls_silent_and_tries_again_ever_more_rarely():
    proposer = Scripted(guess(0.9, 0.9, 0.9), cost_s=2e-3)
    speculator = make(proposer, cost=CostModel([(1, 2e-3), (4, 2.4e-3), (16, 7e-3)]))
    sequences = some(1)
    for _ in range(20):
        verify(speculator, sequences, speculator.draft(sequences, 0, 100, False), accepted=3)
    assert not speculator.is_idle
    assert speculator.stats().is_active
    proposer.cost_s = 2e-4
    active: list[int] = []
    for step in range(6000):
        if speculator.is_idle:
            speculator.plain_step(1, 1, 2e-3)
            continue
        active.append(step)
        trees = speculator.draft(sequences, 0, 100, False)
        if trees is None:
            speculator.plain_step(1, 1, 2e-3)
        else:
            verify(speculator, sequences, trees, accepted=0)
    assert speculator.is_idle
    assert not speculator.stats().is_active
    assert active[0] == 0
    late = [step for step in active if step >= 1000]
    assert 0 < len(late) < 0.03 * 5000
    # It comes back as soon as guesses are right again.
    for _ in range(3000):
        if speculator.is_idle:
            speculator.plain_step(1, 1, 2e-3)
            continue
        trees = speculator.draft(sequences, 0, 100, False)
        if trees is None:
            speculator.plain_step(1, 1, 2e-3)
        else:
            verify(speculator, sequences, trees, accepted=3)
    assert not speculator.is_idle
    assert speculator.stats().is_active


def test_a_dear_proposer_that_cannot_pay_is_not_asked():
    proposer = Scripted(guess(0.3))
    speculator = make(proposer)
    sequences = some(1)
    speculator.draft(sequences, 0, 100, False)  # nothing is known of it yet
    proposer.cost_s = 5e-3
    before = proposer.asked
    for _ in range(4):
        assert speculator.draft(sequences, 0, 100, False) is None
        speculator.plain_step(1, 1, 2e-3)
    assert proposer.asked == before


def test_a_proposer_that_could_not_pay_if_it_were_always_right_is_not_even_tried_again():
    proposer = Scripted(guess(0.9))
    speculator = make(proposer)
    sequences = some(1)
    speculator.draft(sequences, 0, 100, False)
    proposer.cost_s = 5e-3
    for _ in range(5000):
        if speculator.is_idle or speculator.draft(sequences, 0, 100, False) is None:
            speculator.plain_step(1, 1, 2e-3)
    assert proposer.asked == 1
    assert speculator.is_idle


def test_a_proposer_that_fails_is_switched_off_and_nobody_else(caplog):
    good, bad = Scripted(guess(0.9), "ngram"), Scripted(guess(0.99, 0.99), "draft")
    bad.fails = True
    speculator = make(good, bad)
    [tree] = speculator.draft(some(1), 0, 100, False)
    assert tree.proposer == "ngram"
    assert "the draft proposer failed and is switched off" in caplog.text
    speculator.draft(some(1), 0, 100, False)
    assert bad.asked == 1
    good.fails = True
    assert speculator.draft(some(1), 0, 100, False) is None
    assert speculator.is_idle
    speculator.plain_step(1, 1, 2e-3)
    assert speculator.is_idle
    assert set(speculator.stats().proposers) == {"ngram", "draft"}  # what they did is not forgotten


@pytest.mark.parametrize("said", [float("nan"), float("inf"), 7.0])
def test_a_proposer_that_says_what_cannot_be_is_switched_off(caplog, said):
    speculator = make(Scripted(guess(0.9), "ngram"), Scripted(guess(0.9, said), "draft"))
    [tree] = speculator.draft(some(1), 0, 100, False)
    assert tree.proposer == "ngram"
    assert "the draft proposer failed and is switched off" in caplog.text


def test_no_more_is_asked_for_than_one_sequence_may_get():
    proposer = Scripted(guess(0.9))
    depths = []
    proposer.propose = lambda sequences, depth: depths.append(depth) or [proposer.proposal]
    speculator = make(proposer, max_nodes=2)
    for _ in range(3):
        verify(speculator, some(1), speculator.draft(some(1), 0, 100, False), accepted=1)
    assert depths == [2, 2, 2]


def test_one_long_look_is_not_what_asking_costs():
    asked = AskedProposer(Scripted(guess(0.9), cost_s=5e-6), is_cheap=True)
    asked.proposer.times_itself = False
    asked.take_time(8e-3)
    assert asked.proposer.cost_s < 7e-6
    for _ in range(40):
        asked.take_time(1e-4)
    assert asked.proposer.cost_s == pytest.approx(1e-4, rel=0.1)


def test_figures_are_what_a_hand_counts():
    proposer = Scripted(guess(0.9, 0.9, 0.9))
    speculator = make(proposer, always=True)
    one, other = sequences = some(2)
    trees = speculator.draft(sequences, 0, 100, False)
    speculator.observe([Verified(one, trees[0], [0, 1], 3), Verified(other, trees[1], [], 1)], 2, 8, 2e-3)
    speculator.plain_step(2, 2, 2e-3)
    trees = speculator.draft(sequences, 0, 100, False)
    # The first ends after two of four tokens, so its second and third guesses did not come out.
    speculator.observe([Verified(one, trees[0], [0, 1, 2], 2), Verified(other, trees[1], [0], 2)], 2, 8, 2e-3)
    stats = speculator.stats()
    figures = stats.proposers["draft"]
    assert (figures.trees, figures.drafted, figures.accepted) == (4, 12, 2 + 0 + 2 + 1)
    assert stats.position_drafted == (4, 3, 2)
    assert stats.position_accepted == (3, 2, 0)
    assert (stats.sequence_steps, stats.emitted) == (6, 4 + 2 + 4)
    assert stats.tokens_per_step == pytest.approx(10 / 6)
    assert stats.draft_s > 0


def test_what_the_scheduler_cut_is_understood():
    speculator = make(Scripted(guess(0.9, 0.5, 0.8, parents=(-1, -1, 0))), always=True)
    sequences = some(1)
    speculator.draft(sequences, 0, 100, False)
    cut = DraftTree(tree_shape((-1, 0)), [10, 12], "draft", [0.9, 0.72])
    speculator.observe([Verified(sequences[0], cut, [0, 1], 3)], 1, 3, 2e-3)
    assert speculator.stats().proposers["draft"].accepted == 2


def test_nothing_is_kept_of_sequences_that_ended():
    speculator = make(Scripted(guess(0.9)), always=True)
    sequences = some(3)
    trees = speculator.draft(sequences, 0, 100, False)
    for sequence in sequences:  # as the step loop does: the end is told before what became of the guesses
        sequence.status = Status.FINISHED
        speculator.forget(sequence)
    verify(speculator, sequences, trees, accepted=1)
    assert not speculator._asked[0].calibration._sequences


def test_what_ended_is_forgotten_and_all_is_closed():
    proposer = Scripted(guess(0.9))
    speculator = make(proposer)
    [sequence] = some(1)
    speculator.forget(sequence)
    speculator.close()
    assert proposer.forgotten == [0]
    assert proposer.closed
