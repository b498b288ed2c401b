"""A node and its neighbours as text: what somebody needs to see to understand why a rule did not fire."""

from __future__ import annotations

import onnx_ir as ir

from optimc_passes.graph.node_text import describe_node

MAX_LINES = 12


def surroundings(node: ir.Node, radius: int = 2) -> tuple[str, ...]:
    """Return the nodes at most `radius` values away, at most `MAX_LINES`, producers before consumers.

    The node itself is marked with an arrow; when there is no room for all, the nearest ones are kept.
    """
    depth = {node: 0}
    found = [node]
    for current in found:  # grows while it is walked: breadth first
        if abs(depth[current]) == radius:
            continue
        producers = [value.producer() for value in current.inputs if value is not None]
        consumers = [consumer for value in current.outputs for consumer, _ in value.uses()]
        # Outwards only: the siblings of a producer say little, and a table has hundreds of readers.
        steps = [(producer, -1) for producer in producers if depth[current] <= 0]
        steps += [(consumer, 1) for consumer in consumers if depth[current] >= 0]
        for neighbour, step in steps:
            if neighbour is not None and neighbour not in depth:
                depth[neighbour] = depth[current] + step
                found.append(neighbour)
    kept = sorted(found[:MAX_LINES], key=depth.__getitem__)
    return tuple(f"{'-> ' if member is node else '   '}{describe_node(member)}" for member in kept)
