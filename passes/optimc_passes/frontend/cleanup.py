"""From the exporter's literal translation to the dialect: constants folded, duplicates merged, operators fused."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

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

from optimc.plan import FusionReport
from optimc_passes.frontend.rules import GatherRows, MergeReshapes, NormalizeBeforeTranspose
from optimc_passes.fuse.apply_rules import apply_rules
from optimc_passes.fuse.rms_norm import RmsNorm
from optimc_passes.fuse.rope import ROTATIONS, PackedRotary, PartialRotary
from optimc_passes.fuse.rule import Rule, recorder_of

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

_STEPS: Mapping[str, tuple[type[Rule], ...]] = MappingProxyType(
    {
        "gather_rows": (GatherRows,),
        "rms_norm": RmsNorm.rules,
        "normalize_before_transpose": (NormalizeBeforeTranspose,),
        "rope": ROTATIONS,
        "rope_partial": (PartialRotary,),
        "rope_packed": (PackedRotary,),
        "merge_reshapes": (MergeReshapes,),
    }
)
"""Rewrites in order; each sees the work of those before it."""


def clean_up(model: ir.Model) -> dict[str, FusionReport]:
    """Simplify `model` in place; return what each rewrite did.

    Parameters must be graph inputs already, so that nothing folds their values.
    """
    common.InlinePass()(model)
    _simplify(model)
    reports = {}
    for name, rules in _STEPS.items():
        recorder = recorder_of(rules)
        apply_rules(model, [rule.compiled() for rule in rules], recorder)
        reports[name] = recorder.report()
    _simplify(model)
    return reports


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
