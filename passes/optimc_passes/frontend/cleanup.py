"""From the exporter's literal translation to the dialect: constants folded, duplicates merged, operators fused."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript import optimizer
from onnxscript.rewriter import RewritePass
from onnxscript.rewriter.rules.common import (
    add_0_rule,
    cast_cast_rule,
    collapse_slice2_rule,
    collapse_slice_rule,
    div_by_1_rule,
    dropout_inference_rule,
    dropout_zero_rule,
    materialize_reshape_shape_rule,
    mul_by_1_rule,
    no_op_cast_rule,
    no_op_expand_rule,
    no_op_transpose_rule,
    reshape_reshape_rule,
    squeeze_reshape_1d_rule,
    sub_0_rule,
    transpose_transpose_rule,
    unsqueeze_unsqueeze_rule,
)

from optimc_passes.frontend.rules import (
    GatherRows,
    MergeReshapes,
    NormalizeBeforeTranspose,
    PackedRotary,
    PartialRotary,
    RmsNormalization,
    Rotary,
)

_NO_OPS = (
    add_0_rule,
    sub_0_rule,
    mul_by_1_rule,
    div_by_1_rule,
    dropout_zero_rule,
    dropout_inference_rule,
    cast_cast_rule,
    no_op_cast_rule,
    no_op_expand_rule,
    no_op_transpose_rule,
    collapse_slice_rule,
    collapse_slice2_rule,
    materialize_reshape_shape_rule,
    reshape_reshape_rule,
    squeeze_reshape_1d_rule,
    transpose_transpose_rule,
    unsqueeze_unsqueeze_rule,
)
"""What of onnxscript's rules a decoder can need. Its default set also looks for convolutions, and one of its rules
walks the whole graph at every node, which made the clean-up take longer than the export."""

_RULES = (
    (GatherRows.rule("gather_rows"),),
    (
        RmsNormalization.rule("rms_normalization", scale_first=False),
        RmsNormalization.rule("rms_normalization_scale_first", scale_first=True),
    ),
    (NormalizeBeforeTranspose.rule("normalize_before_transpose"),),
    (Rotary.rule("rotary"),),
    (PartialRotary.rule("partial_rotary"),),
    (PackedRotary.rule("packed_rotary"),),
    (MergeReshapes.rule("merge_reshapes"),),
)
"""Groups of rules in order; each group sees the work of those before it."""


def clean_up(model: ir.Model) -> None:
    """Simplify `model` in place. Parameters must be graph inputs already, so that nothing folds their values."""
    common.InlinePass()(model)
    _simplify(model)
    for rules in _RULES:
        RewritePass(rules)(model)
    _simplify(model)


def _simplify(model: ir.Model) -> None:
    """Fold constants, drop what does nothing and what nobody uses, merge what is computed twice."""
    for _ in range(2):  # folding uncovers no-ops, and their removal more to fold
        optimizer.fold_constants(model, onnx_shape_inference=True)
        RewritePass(_NO_OPS)(model)
        common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedOpsetsPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.DeduplicateInitializersPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.OutputFixPass()(model)
    common.NameFixPass()(model)
