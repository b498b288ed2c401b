"""The exporter's three-node form of x[:, rows, :] as one Gather."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult

from optimc_passes.fuse.constants import constant_ints
from optimc_passes.fuse.rule import ACCEPTED, Rule, declined


class GatherRows(Rule):
    """Fuses Transpose, GatherND, Transpose into Gather(x, rows, axis=1) for x [1, T, C] and rows [R]."""

    def pattern(self, op: Any, x: Any, rows: Any, axes: Any) -> Any:
        """Match the three nodes."""
        picked = op.GatherND(op.Transpose(x, perm=[1, 0, 2]), op.Unsqueeze(rows, axes))
        return op.Transpose(picked, perm=[1, 0, 2])

    def check(self, _context: Any, rows: ir.Value, axes: ir.Value, **_: Any) -> MatchResult:
        """Decline unless the rows are a plain list of indices."""
        if rows.shape is None or len(rows.shape) != 1 or constant_ints(axes) not in ([-1], [1]):
            return declined("the rows are not a plain vector of indices", rows)
        return ACCEPTED

    def rewrite(self, op: Any, x: ir.Value, rows: ir.Value, **_: Any) -> Any:
        """Emit the operator."""
        return op.Gather(x, rows, axis=1)
