"""From the exporter's literal translation to the dialect: constants folded, duplicates merged, operators fused."""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import optimizer
from onnxscript.rewriter import RewritePass

from optimc_passes.frontend.rules import (
    GatherRows,
    MergeReshapes,
    NormalizeBeforeTranspose,
    PackedRotary,
    PartialRotary,
    RmsNormalization,
    Rotary,
)

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
    optimizer.optimize_ir(model)
    for rules in _RULES:
        RewritePass(rules)(model)
    optimizer.optimize_ir(model)
