"""x / sqrt(mean(x^2) + epsilon) * scale (https://arxiv.org/abs/1910.07467) as one RMSNormalization (ONNX opset 23)."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult, RewriteRuleClassBase

from optimc_passes.frontend.rules.constants import constant_ints, constant_scalar


class RmsNormalization(RewriteRuleClassBase):
    """Fuses the float32 form every transformers RMSNorm exports to, the scale on either side of the product."""

    def __init__(self, name: str, *, scale_first: bool) -> None:
        super().__init__(name)
        self._scale_first = scale_first

    def pattern(self, op: Any, x: Any, scale: Any, exponent: Any, axes: Any, epsilon: Any) -> Any:
        """Match the arithmetic; constants are checked below."""
        mean_square = op.ReduceMean(op.Pow(x, exponent), axes, keepdims=1, _allow_other_attributes=True)
        normalized = op.Mul(x, op.Reciprocal(op.Sqrt(op.Add(mean_square, epsilon))))
        return op.Mul(scale, normalized) if self._scale_first else op.Mul(normalized, scale)

    def check(
        self, _context: Any, x: ir.Value, scale: ir.Value, exponent: ir.Value, axes: ir.Value, epsilon: ir.Value
    ) -> MatchResult:
        """Decline anything but a float32 norm over the last axis with a vector as scale."""
        result = MatchResult()
        if constant_scalar(exponent) != 2.0:
            return result.fail("the exponent is not the constant 2", exponent)
        if constant_ints(axes) != [-1]:
            return result.fail("the mean is not over the last axis", axes)
        if constant_scalar(epsilon) is None:
            return result.fail("epsilon is not constant", epsilon)
        if x.dtype != ir.DataType.FLOAT or scale.dtype != ir.DataType.FLOAT:
            return result.fail("input and scale are not both float32", x)
        if scale.shape is None or len(scale.shape) != 1:
            return result.fail("the scale is not a vector over the last axis", scale)
        return result

    def rewrite(self, op: Any, x: ir.Value, scale: ir.Value, epsilon: ir.Value, **_: Any) -> Any:
        """Emit the operator; its stash type is float32 by default."""
        return op.RMSNormalization(x, scale, axis=-1, epsilon=constant_scalar(epsilon))
