"""Shapes of trees, and what is cut off them."""

import numpy as np
import pytest

from optimc_runtime.speculate.fit import fit
from optimc_runtime.speculate.tree import DraftTree, tree_shape


def random_parents(rng, count):
    return tuple(int(rng.integers(-1, node)) for node in range(count))


def test_a_node_sees_the_root_its_ancestors_and_itself():
    rng = np.random.default_rng(0)
    for _ in range(50):
        parents = random_parents(rng, int(rng.integers(0, 20)))
        shape = tree_shape(parents)
        assert shape.num_nodes == len(parents)
        assert shape.query_parents.tolist() == [-1, *(parent + 1 for parent in parents)]
        for query in range(len(parents) + 1):
            visible, ancestor = set(), query
            while ancestor >= 0:
                visible.add(ancestor)
                ancestor = shape.query_parents[ancestor]
            assert set(np.flatnonzero(shape.mask[query])) == visible
            assert shape.depths[query] == len(visible) - 1
        assert shape.depth == shape.depths.max()


def test_a_chain_is_causal():
    for count in range(5):
        shape = tree_shape(tuple(range(-1, count - 1)))
        assert shape.is_chain
        assert (shape.mask == np.tril(np.ones((count + 1, count + 1), bool))).all()
    assert not tree_shape((-1, -1)).is_chain
    assert not tree_shape((-1, 0, 0)).is_chain


def test_equal_parents_share_a_shape_that_cannot_be_changed():
    shape = tree_shape((-1, 0, 0))
    assert tree_shape((-1, 0, 0)) is shape
    assert tree_shape((-1, 0, 1)) is not shape
    with pytest.raises(ValueError):
        shape.mask[0, 0] = False


@pytest.mark.parametrize("parents", [(0,), (-2,), (-1, 1), (-1, 0, 5)])
def test_a_parent_behind_its_child_is_a_bug(parents):
    with pytest.raises(AssertionError, match="behind its child"):
        tree_shape(parents)


def tree_of(parents):
    count = len(parents)
    return DraftTree(
        tree_shape(parents), list(range(100, 100 + count)), "ngram", [1 - node / 100 for node in range(count)]
    )


def test_a_tree_that_fits_is_left_alone():
    tree = tree_of((-1, -1, 0))
    assert fit(tree, 3, 2, chain_only=False) is tree
    chain = tree_of((-1, 0))
    assert fit(chain, 2, 2, chain_only=True) is chain


@pytest.mark.parametrize(
    ("options", "nodes"),
    [
        ({"most_nodes": 4}, [0, 1, 2, 3]),
        ({"most_nodes": 1}, [0]),
        ({"most_depth": 1}, [0, 1]),
        ({"most_depth": 2}, [0, 1, 2, 3, 5]),
        ({"most_depth": 2, "most_nodes": 4}, [0, 1, 2, 3]),
        ({"chain_only": True}, [0, 2, 4]),
        ({"chain_only": True, "most_depth": 2}, [0, 2]),
        ({"chain_only": True, "most_nodes": 1}, [0]),
    ],
)
def test_what_is_left_is_closed_under_parents(options, nodes):
    parents = (-1, -1, 0, 0, 2, 1)
    tree = tree_of(parents)
    given = {"most_nodes": 10, "most_depth": 10, "chain_only": False, **options}
    cut = fit(tree, given["most_nodes"], given["most_depth"], chain_only=given["chain_only"])
    assert cut.tokens == [100 + node for node in nodes]
    assert cut.estimates == [tree.estimates[node] for node in nodes]
    kept = [-1 if parents[node] == -1 else nodes.index(parents[node]) for node in nodes]
    assert cut.shape is tree_shape(tuple(kept))


@pytest.mark.parametrize(("most_nodes", "most_depth"), [(0, 5), (-3, 5), (5, 0)])
def test_nothing_left_is_none(most_nodes, most_depth):
    assert fit(tree_of((-1, 0)), most_nodes, most_depth, chain_only=False) is None
    assert fit(tree_of(()), 5, 5, chain_only=False) is None


def test_random_cuts_are_trees_within_their_limits():
    rng = np.random.default_rng(1)
    for _ in range(200):
        tree = tree_of(random_parents(rng, int(rng.integers(1, 20))))
        most_nodes, most_depth, chain_only = int(rng.integers(1, 20)), int(rng.integers(1, 5)), bool(rng.integers(2))
        cut = fit(tree, most_nodes, most_depth, chain_only=chain_only)
        assert 1 <= cut.shape.num_nodes <= most_nodes
        assert cut.shape.depth <= most_depth
        assert cut.shape.is_chain or not chain_only
        place = {token: node for node, token in enumerate(tree.tokens)}
        for node, parent in enumerate(cut.shape.parents):
            original = tree.shape.parents[place[cut.tokens[node]]]
            assert original == (-1 if parent == -1 else place[cut.tokens[parent]])
