"""Merge the gate and up projections of a gated MLP: one product reads the activations once."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult

from optimc_passes.fuse.feeding import Feeding
from optimc_passes.fuse.merge_projections import check_merge, merge
from optimc_passes.fuse.rebuild import rebuild
from optimc_passes.fuse.row_wise import is_elementwise
from optimc_passes.fuse.rule import FusionPass, NoOptions, Rule, declined

NO_GATE = "the factors do not come from one linear layer each"
ONE_LAYER = "one linear layer gives both factors"


class JoinFactors(Rule):
    """Two linear layers of one input that meet in activation(gate) * up become one and a Split, the gate first.

    Either may have a bias, and any elementwise activation: the pattern is the product, and `check` walks back from its
    factors.
    """

    unrelated = frozenset({NO_GATE, ONE_LAYER})

    def pattern(self, op: Any, a: Any, b: Any) -> Any:
        """Match a product."""
        return op.Mul(a, b, _outputs=["product"])

    def check(self, _context: Any, a: ir.Value, b: ir.Value, product: ir.Value) -> MatchResult:
        """Decline where the two cannot share one weight."""
        root = product.producer()
        assert root is not None
        feedings = [Feeding.trace(value, is_elementwise) for value in (a, b)]
        if any(len(feeding.projections) != 1 for feeding in feedings):
            return declined(NO_GATE, root)
        # SiLU and GELU multiply within one branch.
        if feedings[0].projections[0].node is feedings[1].projections[0].node:
            return declined(ONE_LAYER, root)
        return check_merge(feedings, root)

    def rewrite(self, op: Any, a: ir.Value, b: ir.Value, product: ir.Value) -> Any:
        """Emit the joined layer, the activation and the product."""
        sides = [(value, Feeding.trace(value, is_elementwise)) for value in (a, b)]
        gate_first = sorted(sides, key=lambda side: side[0] in side[1].projections[0].results)
        replaced = merge(op, [feeding.projections[0] for _, feeding in gate_first])
        factors = [rebuild(op, value, replaced, feeding.between) for value, feeding in sides]
        return op.Mul(*factors, _outputs=[ir.Value(name=product.name, shape=product.shape, type=product.type)])


class MergeGateUp(FusionPass[NoOptions]):
    """MatMul(x, Wg), MatMul(x, Wu) that meet in activation(gate) * up become one MatMul and a Split.

    Either factor may have a bias, and any elementwise activation. Declined where the two cannot share one weight.
    """

    name = "merge_gate_up"
    version = 2
    config_type = NoOptions
    rules = (JoinFactors,)
