"""Reshapes of reshapes, and reshapes to the shape the value has already."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult

from optimc_passes.fuse.constants import constant_ints
from optimc_passes.fuse.rule import ACCEPTED, Rule, declined


class MergeReshapes(Rule):
    """Drops the inner of two reshapes, and both if the outer restores the first one's input.

    A -1 in the outer shape means the same before and after, because the number of elements does not change.
    """

    keeps_inner = True  # the inner one may have other readers

    def pattern(self, op: Any, x: Any, inner: Any, shape: Any) -> Any:
        """Match two reshapes in a row."""
        return op.Reshape(op.Reshape(x, inner), shape)

    def check(self, _context: Any, shape: ir.Value, **_: Any) -> MatchResult:
        """Decline a shape that is not constant or refers to its input's dimensions."""
        target = constant_ints(shape)
        if target is None or 0 in target:
            return declined("the shape is not constant, or copies a dimension", shape)
        return ACCEPTED

    def rewrite(self, op: Any, x: ir.Value, shape: ir.Value, **_: Any) -> Any:
        """Keep the outer reshape, or none."""
        target = constant_ints(shape)
        assert target is not None
        if x.shape is not None and len(x.shape) == len(target):
            same = [isinstance(have, int) and have == want for have, want in zip(x.shape, target, strict=True)]
            # All dimensions but the inferred one agree, so the inferred one does too.
            if all(known or want == -1 for known, want in zip(same, target, strict=True)):
                return op.Identity(x)
        return op.Reshape(x, shape)
