"""From a dialect graph to the ONNX graph TensorRT is given.

The graph is standard ONNX without exception, so that ONNX Runtime runs it too and it can be held against the reference
on any machine.

Letters: T tokens in a call, R rows that need logits, V vocabulary, d hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveUnusedNodesPass

from optimc.plan import KvLayout
from optimc.plan.tensorrt_program import HalfType, TensorRtAttention
from optimc_passes.dialect.decompose_fused import decompose_fused
from optimc_passes.emit.onnx_hidden import HIDDEN, add_hidden_output, find_head
from optimc_passes.emit.tensorrt.float_sums import sum_in_float32
from optimc_passes.emit.tensorrt.gathered_attention import gather_attention
from optimc_passes.emit.tensorrt.half_islands import place_half_islands
from optimc_passes.emit.tensorrt.half_tables import dequantize_tables
from optimc_passes.emit.tensorrt.pack_weights import pack_weights
from optimc_passes.emit.tensorrt.row_rounding import round_rows
from optimc_passes.graph.shapes import annotate, inferred

HALF_TYPES: dict[HalfType, ir.DataType] = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}


@dataclass(frozen=True)
class NetworkGraph:
    """What TensorRT is given, and how to talk to it."""

    model: ir.Model
    """Standard ONNX. Weights are initializers that are computed when somebody reads them. Inputs that nothing reads are
    gone: a graph without rotations has no `position_ids`."""
    attention: TensorRtAttention
    hidden: str | None
    """The output [R, d] float32 with what the output head multiplies, if it was asked for."""


def network_graph(
    model: ir.Model,
    *,
    precision: HalfType,
    kv: KvLayout,
    hidden: bool,
    int8_rows: bool = False,
) -> NetworkGraph:
    """Return the graph of a dialect graph with attached weights, which is not changed.

    `kv` says what each layer's pool holds: half or int8. With `hidden` the graph also answers what its output head
    multiplies. With `int8_rows` products with 8-bit weights of one scale per output feature round their input to 8 bits
    too, with one scale per row.

    Raises LoweringError naming the node that TensorRT has no form for, and for hidden states where the output head
    cannot be found. Reading a weight raises LoweringError if it does not fit the half type.
    """
    half = HALF_TYPES[precision]
    model = decompose_fused(model)
    head = find_head(model.graph) if hidden else None
    attention = gather_attention(model, kv, half)
    if head is not None:
        add_hidden_output(model, head)
    if int8_rows:
        round_rows(model)
    finish(model, half)
    return NetworkGraph(model, attention, HIDDEN if hidden else None)


def finish(model: ir.Model, half: ir.DataType) -> None:
    """Make a graph of standard ONNX and float32, in place, what TensorRT is given."""
    annotate(model, inferred(model))
    dequantize_tables(model, half)
    pack_weights(model, half)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    place_half_islands(model, half)
    sum_in_float32(model)
    RemoveUnusedNodesPass()(model)
    for value in tuple(model.graph.inputs):
        if not value.uses():
            model.graph.inputs.remove(value)
