"""What of a guess fits a step: a part that is closed under parents."""

from __future__ import annotations

from optimc_runtime.speculate.tree import DraftTree, first_path, parents_among, tree_shape


def fit(tree: DraftTree, most_nodes: int, most_depth: int, *, chain_only: bool) -> DraftTree | None:
    """Return `tree` cut to at most so many nodes and levels, and to its first path if only a chain will do. None if
    nothing is left."""
    shape = tree.shape
    if chain_only and not shape.is_chain:
        tree = _part(tree, first_path(shape.parents))
        shape = tree.shape
    if shape.depth > most_depth:
        tree = _part(tree, [node for node in range(shape.num_nodes) if shape.depths[node + 1] <= most_depth])
        shape = tree.shape
    if shape.num_nodes > most_nodes:  # the first nodes: parents stand before their children
        count = max(0, most_nodes)
        shape = tree_shape(shape.parents[:count])
        tree = DraftTree(shape, tree.tokens[:count], tree.proposer, tree.estimates[:count])
    return tree if shape.num_nodes else None


def _part(tree: DraftTree, nodes: list[int]) -> DraftTree:
    """The tree of `nodes`, ascending, whose parents are among them."""
    return DraftTree(
        tree_shape(parents_among(tree.shape.parents, nodes)),
        [tree.tokens[node] for node in nodes],
        tree.proposer,
        [tree.estimates[node] for node in nodes],
    )
