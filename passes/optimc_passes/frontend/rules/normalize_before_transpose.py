"""A norm of each head, applied after heads moved in front of tokens, moves back before the transpose."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult

from optimc_passes.fuse.rule import ACCEPTED, Rule, declined, typed


class NormalizeBeforeTranspose(Rule):
    """Swaps RMSNormalization over the last axis with a Transpose that keeps that axis last."""

    def pattern(self, op: Any, x: Any, scale: Any) -> Any:
        """Match a norm of transposed heads."""
        moved = op.Transpose(x, perm=[0, 2, 1, 3])
        return op.RMSNormalization(moved, scale, _outputs=["normalized"])

    def check(self, _context: Any, normalized: ir.Value, **_: Any) -> MatchResult:
        """Decline a norm over more than the last axis."""
        node = normalized.producer()
        assert node is not None
        if node.attributes.get_int("axis", -1) not in (-1, 3):
            return declined("the norm is not over the last axis only", normalized)
        return ACCEPTED

    def rewrite(self, op: Any, x: ir.Value, scale: ir.Value, normalized: ir.Value) -> Any:
        """Emit norm, then transpose."""
        node = normalized.producer()
        assert node is not None
        epsilon = node.attributes.get_float("epsilon", 1e-5)
        # The next rule asks for the number of heads.
        early = typed(op.RMSNormalization(x, scale, axis=-1, epsilon=epsilon), x.shape)
        return op.Transpose(early, perm=[0, 2, 1, 3])
