"""The tree of guesses: grown by probability, as large as its costs allow, or as it was asked for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from optimc_passes.heads.tree import best_count, grow, make_tree, timed_rows

SHARES = [[0.5, 0.2, 0.1], [0.4, 0.1, 0.05]]
FLAT = dict.fromkeys(range(1, 33), 0.001)
STEEP = {rows: 1e-3 * rows for rows in range(1, 33)}


def made(asked, costs=FLAT, shares=SHARES, draft_s=0.0):
    return make_tree(asked, shares, num_heads=2, costs=costs, draft_s=draft_s, machine="here")


def probability(node):
    return float(np.prod([SHARES[head][rank] for head, rank in enumerate(node)]))


def test_a_tree_grows_by_the_largest_product_of_accuracies():
    every = [*itertools.product(range(3)), *itertools.product(range(3), repeat=2)]
    best = sorted(every, key=probability, reverse=True)
    for count in range(1, 12):
        grown = grow(SHARES, count)
        assert sum(map(probability, grown)) == pytest.approx(sum(map(probability, best[:count])))
        assert all(node[:-1] in [(), *grown[:index]] for index, node in enumerate(grown)), "parents before children"


def test_the_best_count_is_the_one_with_most_tokens_per_second():
    probabilities = [probability(node) for node in grow(SHARES, 12)]
    costs = {1: 1.0, 2: 1.1, 4: 1.25, 8: 2.4, 16: 4.0}
    rates = [
        (1 + sum(probabilities[:count]))
        / (np.interp(count + 1, list(costs), list(costs.values())) + 0.05 * (count > 0))
        for count in range(13)
    ]
    assert best_count(probabilities, costs, 0.05) == int(np.argmax(rates)) == 3


def test_nothing_is_verified_where_rows_cost_as_much_as_steps():
    assert best_count([0.5, 0.2], STEEP, 0.0) == 0
    assert best_count([0.5, 0.2], FLAT, 1e-3) == 0
    assert best_count([0.5, 0.2], FLAT, 1e-5) == 2


def test_auto_stores_twice_the_best_nodes_and_never_fewer_than_four():
    costs = {1: 1.0, 2: 1.1, 4: 1.25, 8: 2.4, 16: 4.0}
    tree = made("auto", costs)
    assert len(tree.nodes) == 6
    assert tree.nodes[:3] == ((0,), (0, 0), (1,))
    assert tree.expected_tokens == pytest.approx(1 + sum(map(probability, tree.nodes)))
    assert tree.costs == tuple(costs.items())
    assert tree.machine == "here"
    assert len(made("auto", STEEP).nodes) == 4


def test_a_tree_of_heads_nobody_measured_promises_nothing():
    tree = made("auto", {}, [])
    assert tree.nodes[0] == (0,)
    assert tree.expected_tokens is None
    assert tree.costs == ()
    assert tree.machine == ""


def test_a_chain_follows_first_guesses():
    assert made("chain:2").nodes == ((0,), (0, 0))
    assert made("chain:1").nodes == ((0,),)
    assert made("chain:2").source == "chain"


def test_a_list_is_put_in_an_order_in_which_parents_come_first():
    tree = made([[0, 1], [1], [0], [0, 0]])
    assert tree.nodes == ((0,), (1,), (0, 0), (0, 1))
    assert tree.source == "given"


def test_steps_are_timed_up_to_the_sizes_that_fit():
    assert timed_rows(8) == list(range(1, 9))
    assert timed_rows(1000)[-2:] == [24, 32]
