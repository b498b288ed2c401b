"""What of a guess fits a step: a part that is closed under parents."""

from __future__ import annotations

from optimc_runtime.speculate.tree import DraftTree, tree_shape


def fit(tree: DraftTree, most_nodes: int, most_depth: int, *, chain_only: bool) -> DraftTree | None:
    """Return `tree` cut to at most so many nodes and levels, and to its first path if only a chain will do. None if
    nothing is left."""
    shape = tree.shape
    if chain_only and not shape.is_chain:
        tree = _part(tree, _first_path(shape.parents))
        shape = tree.shape
    if shape.depth > most_depth:
        tree = _part(tree, [node for node in range(shape.num_nodes) if shape.depths[node + 1] <= most_depth])
        shape = tree.shape
    if shape.num_nodes > most_nodes:  # the first nodes: parents stand before their children
        count = max(0, most_nodes)
        shape = tree_shape(shape.parents[:count])
        tree = DraftTree(shape, tree.tokens[:count], tree.proposer, tree.estimates[:count])
    return tree if shape.num_nodes else None


def _first_path(parents: tuple[int, ...]) -> list[int]:
    """Nodes of the path that takes the first child everywhere."""
    path: list[int] = []
    last = -1
    for node, parent in enumerate(parents):
        if parent == last:
            path.append(node)
            last = node
    return path


def _part(tree: DraftTree, nodes: list[int]) -> DraftTree:
    """The tree of `nodes`, ascending, whose parents are among them."""
    place = {node: index for index, node in enumerate(nodes)}
    place[-1] = -1
    return DraftTree(
        tree_shape(tuple([place[tree.shape.parents[node]] for node in nodes])),
        [tree.tokens[node] for node in nodes],
        tree.proposer,
        [tree.estimates[node] for node in nodes],
    )
