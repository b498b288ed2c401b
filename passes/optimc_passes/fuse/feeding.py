"""What feeds a value: the linear layers met walking back from it, and the nodes between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from optimc_passes.fuse.projection import Projection, as_projection


@dataclass(frozen=True)
class Feeding:
    """What leads to a value: the first linear layers met walking back, and the nodes passed on the way."""

    projections: tuple[Projection, ...]
    between: frozenset[ir.Node]

    @classmethod
    def trace(cls, value: ir.Value, follows: Callable[[ir.Node], bool]) -> Feeding:
        """Walk back from `value` through nodes that `follows` lets pass."""
        projections: list[Projection] = []
        between: set[ir.Node] = set()
        seen: set[ir.Node] = set()
        stack = [value]
        while stack:
            node = stack.pop().producer()
            if node is None or node in seen:
                continue
            seen.add(node)
            projection = as_projection(node)
            if projection is not None:
                projections.append(projection)
            elif follows(node):
                between.add(node)
                stack.extend(operand for operand in node.inputs if operand is not None)
        return cls(tuple(projections), frozenset(between))

    def is_read_elsewhere(self, root: ir.Node) -> bool:
        """Whether something but `root` reads a linear layer's output, or what becomes of it on the way."""
        stack = [projection.node for projection in self.projections]
        seen: set[ir.Node] = set()
        while stack:
            node = stack.pop()
            for value in node.outputs:
                if value.is_graph_output():
                    return True
                for consumer, _ in value.uses():
                    if consumer is root or consumer in seen:
                        continue
                    if consumer not in self.between:
                        return True
                    seen.add(consumer)
                    stack.append(consumer)
        return False
