"""x / sqrt(mean(x^2) + epsilon) * scale (https://arxiv.org/abs/1910.07467) as one RMSNormalization (ONNX opset 23)."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult, OrValue

from optimc_passes.fuse.constants import constant_ints, constant_number, constant_scalar, static_dim
from optimc_passes.fuse.rule import ACCEPTED, FusionPass, NoOptions, Rule, declined


class OpenNorm(Rule):
    """The norm as exporters write it down.

    The square is a power or a product; the root is divided by, inverted or a power of -1/2; the axes are an input or,
    before opset 18, an attribute; the scale may be the first factor.
    """

    def pattern(self, op: Any, x: Any, scale: Any, exponent: Any, inverse: Any, one: Any, epsilon: Any) -> Any:
        """Match the arithmetic; constants are checked below."""
        square = OrValue([op.Pow(x, exponent), op.Mul(x, x)])
        mean = op.ReduceMean(square, _allow_other_inputs=True, _outputs=["mean"])
        variance = OrValue([op.Add(mean, epsilon), op.Add(epsilon, mean)])
        root = op.Sqrt(variance)
        factor = OrValue([op.Reciprocal(root), op.Pow(variance, inverse), op.Div(one, root)])
        normalized = OrValue([op.Mul(x, factor), op.Mul(factor, x), op.Div(x, root)])
        return self.scaled(op, normalized, scale)

    def scaled(self, op: Any, normalized: Any, scale: Any) -> Any:
        """Match the product with the scale."""
        return op.Mul(normalized, scale)

    def check(
        self, _context: Any, x: ir.Value, scale: ir.Value, mean: ir.Value, epsilon: ir.Value, **given: ir.Value | None
    ) -> MatchResult:
        """Decline anything but a float32 norm over the last axis with a vector as scale."""
        for name, number in (("exponent", 2.0), ("inverse", -0.5), ("one", 1.0)):
            value = given[name]
            if value is not None and constant_number(value) != number:
                return declined(f"the {name} is not the constant {number:g}", value)
        rank = None if x.shape is None else len(x.shape)
        if _axes(mean) not in ([-1], [rank and rank - 1]):
            return declined("the mean is not over the last axis", mean)
        node = mean.producer()
        assert node is not None
        if node.attributes.get_int("keepdims", 1) != 1:
            return declined("the mean does not keep its axis", mean)
        if constant_scalar(epsilon) is None:
            return declined("epsilon is not constant", epsilon)
        if x.dtype != ir.DataType.FLOAT or scale.dtype != ir.DataType.FLOAT:
            return declined("input and scale are not both float32", x)
        if scale.shape is None or len(scale.shape) != 1:
            return declined("the scale is not a vector over the last axis", scale)
        if static_dim(scale, 0) != static_dim(x, -1):
            return declined(f"the scale has {scale.shape[0]} elements, the last axis {static_dim(x, -1)}", scale)
        return ACCEPTED

    def rewrite(self, op: Any, x: ir.Value, scale: ir.Value, epsilon: ir.Value, **_: Any) -> Any:
        """Emit the operator; its stash type is float32 by default."""
        return op.RMSNormalization(x, scale, axis=-1, epsilon=constant_scalar(epsilon))


class OpenNormScaleFirst(OpenNorm):
    """The same with the scale as first factor."""

    def scaled(self, op: Any, normalized: Any, scale: Any) -> Any:
        """Match the product with the scale."""
        return op.Mul(scale, normalized)


class RmsNorm(FusionPass[NoOptions]):
    """Norms that an exporter left as arithmetic become RMSNormalization."""

    name = "rms_norm"
    version = 1
    config_type = NoOptions
    rules = (OpenNorm, OpenNormScaleFirst)


def _axes(mean: ir.Value) -> list[int] | None:
    node = mean.producer()
    assert node is not None
    if len(node.inputs) > 1:
        return constant_ints(node.inputs[1])
    return list(node.attributes.get_ints("axes", ()) or ())
