"""Medusa heads as the second graph TensorRT is given: the same heads as on ONNX Runtime, with half islands.

Letters: N rows, K heads, d hidden size, V' draft vocabulary.
"""

from __future__ import annotations

import onnx_ir as ir

from optimc.plan.tensorrt_program import HalfType
from optimc_passes.dialect.decompose_fused import decompose_fused
from optimc_passes.emit.onnx_heads import heads_model
from optimc_passes.emit.onnx_hidden import find_head
from optimc_passes.emit.tensorrt.network_graph import HALF_TYPES, finish
from optimc_passes.heads.heads import Heads


def heads_graph(heads: Heads, model: ir.Model, *, precision: HalfType) -> ir.Model:
    """Return the graph: "hidden" [N, d] float32 and, for conditioned heads, "tokens" [N] int64 in, "logits" out.

    `model` is the dialect graph the heads belong to; what they share with it is read from there and stands in their
    engine once more. Logits are float32 [N, K, V'].

    Raises LoweringError for heads that do not fit it, and what `network_graph` does.
    """
    model = decompose_fused(model)
    drafting = heads_model(heads, model, find_head(model.graph))
    finish(drafting, HALF_TYPES[precision])
    return drafting
