"""Multipliers of whole activations become part of the weights before them: of embeddings, residuals and logits.

A factor behind a linear layer scales its weight (of a quantized one the scales, never the codes) and its bias. Behind a
layer that alone reads a norm, as the head does, it scales the norm instead: that is one row, and a tied table stays as
it is. Behind the embedding it scales the table, and if a head is tied to that, its inverse the norm before the head.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult

from optimc_passes.fuse.constants import constant_scalar
from optimc_passes.fuse.rule import ACCEPTED, FusionPass, NoOptions, Rule, declined
from optimc_passes.fuse.scale_site import NoLayerError, UnfoldableError, locate

NO_FACTOR = "it multiplies a layer by no constant number"


class ProductWithNumber(Rule):
    """layer * number."""

    commute = True
    unrelated = frozenset({NO_FACTOR})

    def pattern(self, op: Any, y: Any, number: Any) -> Any:
        """Match a product."""
        return op.Mul(y, number, _outputs=["scaled"])

    def factor(self, number: ir.Value) -> float | None:
        """Return the factor, None if it is not a constant number."""
        return constant_scalar(number)

    def check(self, _context: Any, y: ir.Value, number: ir.Value, scaled: ir.Value) -> MatchResult:
        """Decline a factor that no weight can take, or only in a wider type."""
        factor = self.factor(number)
        root = scaled.producer()
        if factor is None or number.shape is None or y.shape is None or len(number.shape) > len(y.shape):
            return declined(NO_FACTOR, root)
        if not factor:
            return declined("the factor is 0", root)
        try:
            locate(y, factor)
        except NoLayerError:
            return declined(NO_FACTOR, root)
        except UnfoldableError as error:
            return declined(str(error), error.node or root)
        return ACCEPTED

    def rewrite(self, op: Any, y: ir.Value, number: ir.Value, **_: Any) -> Any:
        """Emit the layer with scaled weights."""
        factor = self.factor(number)
        assert factor is not None, "check found it"
        return locate(y, factor).emit(op, factor)


class QuotientByNumber(ProductWithNumber):
    """layer / number."""

    commute = False

    def pattern(self, op: Any, y: Any, number: Any) -> Any:
        """Match a quotient."""
        return op.Div(y, number, _outputs=["scaled"])

    def factor(self, number: ir.Value) -> float | None:
        """Return the factor, None if it is not a constant number."""
        divisor = constant_scalar(number)
        return 1 / divisor if divisor else None


class FoldScaleIntoWeights(FusionPass[NoOptions]):
    """Factors behind embedding, linear layers and head go into weights, where they cost nothing at run time.

    Declined where the weight would need a wider type than the checkpoint stores it in: bfloat16 and quantized weights
    take powers of two only.
    """

    name = "fold_scale_into_weights"
    version = 1
    config_type = NoOptions
    rules = (ProductWithNumber, QuotientByNumber)
