"""Steps with trees, array by array."""

import numpy as np

from optimc_runtime.request import RequestId
from optimc_runtime.sequence import Sequence
from optimc_runtime.speculate.tree import DraftTree, tree_shape
from optimc_runtime.speculate.verify import accepted_moves
from optimc_runtime.speculative_steps import SpeculativeSteps
from optimc_runtime.step import Work, build_step

S = 4


def world(*lengths):
    """Sequences of these many tokens, all but the last computed, on blocks that ascend nowhere."""
    rng = np.random.default_rng(0)
    table = np.zeros((len(lengths), 12), np.int32)
    blocks = rng.permutation(np.arange(1, 12 * len(lengths) + 1)).reshape(len(lengths), 12)
    sequences = []
    for index, length in enumerate(lengths):
        sequence = Sequence(RequestId(str(index)), index, rng.integers(0, 90, length), 20)
        sequence.num_computed = length - 1
        sequence.row = len(lengths) - 1 - index
        sequence.blocks = blocks[index].tolist()
        table[sequence.row] = blocks[index]
        sequences.append(sequence)
    return sequences, table


def tree_of(parents, first_token=200):
    count = len(parents)
    return DraftTree(tree_shape(parents), list(range(first_token, first_token + count)), "ngram", [0.5] * count)


def test_chains_are_laid_out_as_build_step_does():
    for lengths, sizes in (((3,), (2,)), ((5, 1, 9), (4, 0, 1)), ((4, 8), (0, 7)), ((1,), (9,))):
        sequences, table = world(*lengths)
        trees = [tree_of(tuple(range(-1, size - 1))) if size else None for size in sizes]
        step = SpeculativeSteps(table, S, 64).build(sequences, trees)
        work = tuple(
            Work(sequence, size + 1, size + 1, tree)
            for sequence, size, tree in zip(sequences, sizes, trees, strict=True)
        )
        expected = build_step(work, table, S, has_trees=True)
        assert step.work == expected.work
        assert step.has_trees
        assert step.plan.tree_mask is None
        for name in ("tokens", "positions", "slots", "query_start", "context_len", "block_table", "logits_rows"):
            ours, theirs = getattr(step.plan, name), getattr(expected.plan, name)
            assert ours.dtype == theirs.dtype, name
            np.testing.assert_array_equal(ours, theirs, name)


def test_nodes_stand_at_their_depths_in_slots_of_their_own():
    sequences, table = world(6, 4)
    trees = [tree_of((-1, -1, 0, 1)), tree_of((-1,), 300)]
    plan = SpeculativeSteps(table, S, 64).build(sequences, trees).plan
    assert plan.tokens.tolist() == [sequences[0].tokens[5], 200, 201, 202, 203, sequences[1].tokens[3], 300]
    assert plan.positions.tolist() == [5, 6, 6, 7, 7, 3, 4]
    places = [(0, place) for place in range(5, 10)] + [(1, 3), (1, 4)]
    assert plan.slots.tolist() == [sequences[owner].blocks[place // S] * S + place % S for owner, place in places]
    assert plan.query_start.tolist() == [0, 5, 7]
    assert plan.context_len.tolist() == [5, 3]
    assert plan.logits_rows.tolist() == list(range(7))
    assert plan.block_table.tolist() == [sequence.blocks[:3] for sequence in sequences]
    assert plan.tree_mask.astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 0, 1, 0, 1],
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
    ]


def test_a_sequence_alone_is_laid_out_as_it_is_among_others():
    for length in range(1, 2 * S + 1):
        sequences, table = world(length, 2)
        tree = tree_of((-1, -1, 0, 1))
        steps = SpeculativeSteps(table, S, 64)
        alone, among = steps.build(sequences[:1], [tree]), steps.build(sequences, [tree, None])
        assert alone.work == among.work[:1]
        assert alone.has_trees
        for name in ("tokens", "positions", "slots", "logits_rows"):
            ours, theirs = getattr(alone.plan, name), getattr(among.plan, name)[:5]
            assert ours.dtype == theirs.dtype, name
            np.testing.assert_array_equal(ours, theirs, name)
        assert alone.plan.query_start.tolist() == [0, 5]
        assert alone.plan.context_len.tolist() == [length - 1]
        assert alone.plan.block_table.tolist() == [sequences[0].blocks[: -(-(length + 4) // S)]]
        np.testing.assert_array_equal(alone.plan.tree_mask, among.plan.tree_mask[:5])


def test_accepted_nodes_move_behind_their_root_and_chains_stay():
    sequences, table = world(6, 4, 5)
    trees = [tree_of((-1, -1, 0, 1)), tree_of((-1, 0)), None]
    plan = SpeculativeSteps(table, S, 64).build(sequences, trees).plan
    assert accepted_moves(plan, [0, 1, 2], [[], [1, 2], []]) is None
    assert accepted_moves(plan, [0, 1, 2], [[1], [1], []]) is None
    source, target = accepted_moves(plan, [0, 1, 2], [[2, 4], [1, 2], []])
    assert source.tolist() == plan.slots[[2, 4]].tolist()
    assert target.tolist() == plan.slots[[1, 2]].tolist()
    source, target = accepted_moves(plan, [0], [[1, 3]])
    assert (source.tolist(), target.tolist()) == ([plan.slots[3]], [plan.slots[2]])
