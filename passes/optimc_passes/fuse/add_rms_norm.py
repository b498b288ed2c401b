"""A residual sum and the norm of it as one AddRmsNorm: the sum is read once while it is made."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult

from optimc_passes.dialect import ADD_RMS_NORM, DOMAIN, DOMAIN_VERSION
from optimc_passes.fuse.rule import ACCEPTED, FusionPass, NoOptions, Rule, declined


class SumAndNorm(Rule):
    """RMSNormalization(x + residual), the sum being read further on."""

    keeps_inner = True

    def pattern(self, op: Any, x: Any, residual: Any, scale: Any) -> Any:
        """Match the sum and its norm."""
        return op.RMSNormalization(op.Add(x, residual, _outputs=["total"]), scale, _outputs=["normed"])

    def check(
        self, _context: Any, x: ir.Value, residual: ir.Value, scale: ir.Value, total: ir.Value, normed: ir.Value
    ) -> MatchResult:
        """Decline a norm over other axes than the last, a sum that is broadcast, and a scale that is computed."""
        node = normed.producer()
        assert node is not None
        last = -1 if total.shape is None else len(total.shape) - 1
        if node.attributes.get_int("axis", -1) not in (-1, last):
            return declined("the norm is not over the last axis only", node)
        if x.shape is None or residual.shape is None or tuple(x.shape) != tuple(residual.shape):
            return declined(f"the summands have shapes {x.shape} and {residual.shape}, not one", total)
        if not scale.is_initializer():
            # It may be computed from the sum.
            return declined("the scale of the norm is computed", node)
        return ACCEPTED

    def rewrite(
        self, op: Any, x: ir.Value, residual: ir.Value, scale: ir.Value, total: ir.Value, normed: ir.Value
    ) -> Any:
        """Emit the operator; whoever read the sum reads its first output."""
        node = normed.producer()
        assert node is not None
        summed, normalized = op.op(
            ADD_RMS_NORM,
            x,
            residual,
            scale,
            epsilon=node.attributes.get_float("epsilon", 1e-5),
            _domain=DOMAIN,
            _version=DOMAIN_VERSION,
            _outputs=[ir.Value(name=total.name, shape=total.shape, type=total.type), ir.Value()],
        )
        # The root's readers are moved by apply_rules, those of a value inside the pattern are ours to move.
        total.replace_all_uses_with(summed, replace_graph_outputs=True)
        return normalized


class AddRmsNorm(FusionPass[NoOptions]):
    """RMSNormalization(x + residual) becomes one operator with two outputs: the sum and the norm."""

    name = "add_rms_norm"
    version = 1
    config_type = NoOptions
    rules = (SumAndNorm,)
