"""Merge the gate and up projections of a gated MLP: one product reads the activations once."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from optimc_passes.base import PassConfig
from optimc_passes.fuse.projection import Projection, merge, projections_feeding, why_not_merge
from optimc_passes.fuse.rule import FusionPass, Miss

ELEMENTWISE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Neg", "Abs", "Pow", "Exp", "Log", "Erf", "Tanh", "Sigmoid", "Softplus", "Relu"}
    | {"Gelu", "Swish", "Mish", "Elu", "Clip", "Min", "Max", "Cast", "Where", "Identity"}
)
"""Operators that an activation function or a bias is made of: each element of the result depends on its own place."""


class MergeGateUpConfig(PassConfig):
    """No options."""


class MergeGateUp(FusionPass[MergeGateUpConfig, tuple[Projection, Projection], tuple[Projection, Projection]]):
    """MatMul(x, Wg), MatMul(x, Wu) that meet in activation(gate) * up become one MatMul and a Split.

    Either factor may have a bias, and any elementwise activation. Declined where the two cannot share one weight.
    """

    name = "merge_gate_up"
    version = 1
    config_type = MergeGateUpConfig

    def find(self, graph: ir.Graph) -> Iterable[tuple[Projection, Projection]]:
        """Yield the two projections of each product whose factors come from one linear layer each."""
        taken: set[ir.Node] = set()
        for node in graph:
            if node.op_type != "Mul" or node.domain:
                continue
            sides = [projections_feeding(value, _elementwise) for value in node.inputs if value is not None]
            if any(len(side) != 1 for side in sides):
                continue
            first, second = sides[0][0], sides[1][0]
            pair = {first.node, second.node}
            # SiLU and GELU multiply within one branch; two products may share a branch.
            if len(pair) == 2 and not pair & taken:
                taken |= pair
                yield first, second

    def check(self, site: tuple[Projection, Projection]) -> tuple[Projection, Projection] | Miss:
        """Return the two projections, or why they stay apart."""
        return why_not_merge(site) or site

    def rewrite(self, graph: ir.Graph, match: tuple[Projection, Projection]) -> None:
        """Join them."""
        merge(graph, match)


def _elementwise(node: ir.Node) -> bool:
    return node.op_type in ELEMENTWISE and not node.domain
