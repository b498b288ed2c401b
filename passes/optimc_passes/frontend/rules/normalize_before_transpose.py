"""A norm of each head, applied after heads moved in front of tokens, moves back before the transpose."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult, RewriteRuleClassBase


class NormalizeBeforeTranspose(RewriteRuleClassBase):
    """Swaps RMSNormalization over the last axis with a Transpose that keeps that axis last."""

    def pattern(self, op: Any, x: Any, scale: Any) -> Any:
        """Match a norm of transposed heads."""
        moved = op.Transpose(x, perm=[0, 2, 1, 3])
        return op.RMSNormalization(moved, scale, _allow_other_attributes=True, _outputs=["normalized"])

    def check(self, _context: Any, normalized: ir.Value, **_: Any) -> MatchResult:
        """Decline a norm over more than the last axis."""
        result = MatchResult()
        if normalized.producer().attributes.get_int("axis", -1) != -1:  # type: ignore[union-attr]
            return result.fail("the norm is not over the last axis only", normalized)
        return result

    def rewrite(self, op: Any, x: ir.Value, scale: ir.Value, normalized: ir.Value) -> Any:
        """Emit norm, then transpose."""
        node = normalized.producer()
        assert node is not None
        epsilon = node.attributes.get_float("epsilon", 1e-5)
        early = op.RMSNormalization(x, scale, axis=-1, epsilon=epsilon)
        early.shape, early.type = x.shape, x.type  # the next rule asks for the number of heads
        return op.Transpose(early, perm=[0, 2, 1, 3])
