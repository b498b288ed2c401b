"""Which guesses a step verifies: the tree that promises most tokens per second.

A guess of rank r at head k is right with probability p[k][r], given that its parents are; a node's probability is the
product along its path. Letters: K heads, R ranks, n nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from optimc.plan import DraftTreeInfo
from optimc_passes.heads.config import MOST_NODES, chain_length

Node = tuple[int, ...]

_ROWS = (*range(1, 17), 24, 32)
"""Sizes of steps that are timed."""
_UNCOSTED = 16
"""Nodes of a tree made without knowing what rows cost."""
_FEWEST = 4
"""Nodes stored at least: the server prunes, and knows its own costs and texts."""


def timed_rows(most: int) -> list[int]:
    """Return the sizes of steps whose cost decides about a tree, up to `most` rows."""
    return [rows for rows in _ROWS if rows <= most]


def make_tree(
    asked: str | Sequence[Sequence[int]],
    shares: Sequence[Sequence[float]],
    *,
    num_heads: int,
    costs: Mapping[int, float],
    draft_s: float,
    machine: str,
) -> DraftTreeInfo:
    """Return the tree that was asked for. `shares` [K][R] is p; empty if nothing was measured.

    `auto` stores twice the nodes that are best for text like the measured one: the server verifies fewer where they do
    not pay, and more where the text is easier.
    """
    source: Literal["auto", "chain", "given"]
    if asked == "auto":
        source, nodes = "auto", _auto(shares, num_heads, costs, draft_s)
    elif isinstance(asked, str):
        length = chain_length(asked)
        assert length is not None, "the configuration refuses other trees"
        source, nodes = "chain", [(0,) * depth for depth in range(1, min(length, num_heads) + 1)]
    else:
        source, nodes = "given", sorted((tuple(node) for node in asked), key=lambda node: (len(node), node))
    expected = 1 + sum(_probability(shares, node) for node in nodes) if shares else None
    return DraftTreeInfo(
        nodes=tuple(nodes),
        source=source,
        expected_tokens=expected,
        costs=tuple(sorted(costs.items())),
        machine=machine if costs else "",
    )


def grow(shares: Sequence[Sequence[float]], count: int) -> list[Node]:
    """Return the `count` most probable nodes that make a tree, most probable first."""
    found: list[Node] = []
    waiting: list[tuple[float, Node]] = []

    def offer(node: Node) -> None:
        if len(node) <= len(shares) and node[-1] < len(shares[len(node) - 1]):
            heapq.heappush(waiting, (-_probability(shares, node), node))

    offer((0,))
    while waiting and len(found) < count:
        _, node = heapq.heappop(waiting)
        found.append(node)
        offer((*node, 0))
        offer((*node[:-1], node[-1] + 1))
    return found


def best_count(probabilities: Sequence[float], costs: Mapping[int, float], draft_s: float) -> int:
    """Return how many of the nodes give most tokens per second; 0: guessing does not pay.

    Costs between sizes that were timed lie on a line between theirs; beyond the largest nothing is known.
    """
    rows = sorted(costs)
    sizes = [count for count in range(1, len(probabilities) + 1) if count + 1 <= rows[-1]]
    tokens = np.cumsum([1.0, *probabilities])

    def rate(count: int) -> float:
        seconds = float(np.interp(1 + count, rows, [costs[size] for size in rows]))
        return float(tokens[count]) / (seconds + draft_s * (count > 0))

    return max([0, *sizes], key=rate)


def _auto(shares: Sequence[Sequence[float]], num_heads: int, costs: Mapping[int, float], draft_s: float) -> list[Node]:
    if not shares:
        # Nothing is known: three guesses for the next token, two for the one after, one each from there.
        guessed = [[0.4, 0.1, 0.06], [0.25, 0.08], *[[0.2]] * (num_heads - 2)][:num_heads]
        return grow(guessed, _FEWEST + num_heads)
    nodes = grow(shares, MOST_NODES)
    if not costs:
        return nodes[:_UNCOSTED]
    best = best_count([_probability(shares, node) for node in nodes], costs, draft_s)
    return nodes[: max(_FEWEST, 2 * best)]


def _probability(shares: Sequence[Sequence[float]], node: Node) -> float:
    product = 1.0
    for head, rank in enumerate(node):
        if head >= len(shares) or rank >= len(shares[head]):
            return 0.0
        product *= shares[head][rank]
    return product
