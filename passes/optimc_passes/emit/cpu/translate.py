"""A dialect graph as a draft of a program, node by node; nothing is fused here.

Reshapes, splits and slices of rows cost nothing: they name other columns of a buffer. What depends on constants alone
is a constant, what depends on positions becomes rotations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from optimc.errors import LoweringError
from optimc.plan.cpu_program import View
from optimc_passes.dialect.paged_attention import DOMAIN, is_paged_attention
from optimc_passes.emit.cpu import matrices, row_shapes
from optimc_passes.emit.cpu.axes import Axes
from optimc_passes.emit.cpu.constants import Constant, fold, initializer
from optimc_passes.emit.cpu.draft import Draft
from optimc_passes.emit.cpu.emitter import Emitter, label
from optimc_passes.emit.cpu.expression import Expression
from optimc_passes.emit.cpu.no_kernel import NoKernelError
from optimc_passes.emit.cpu.node_expressions import is_elementwise
from optimc_passes.emit.cpu.rotations import depends_on_positions, from_positions
from optimc_passes.emit.cpu.translate_attention import attention, rotary_embedding
from optimc_passes.emit.cpu.translate_fused import FUSED
from optimc_passes.emit.cpu.translate_products import dequantized_rows, gather, matmul
from optimc_passes.emit.cpu.translate_rowwise import elementwise, norm
from optimc_passes.emit.cpu.translate_static import clips_like_kernels, round_rows, scale_codes
from optimc_passes.emit.cpu.values import LogitsRows, Positions, QuantizedMatrix, Rows, TableRows, TokenIds, Value, show

Given = Sequence[Value | None]

_ROW_SHAPES: dict[str, Callable[[ir.Node, Rows, Given], Rows | list[Rows]]] = {
    "Identity": row_shapes.identity,
    "Cast": row_shapes.cast,
    "Reshape": row_shapes.reshape,
    "Squeeze": row_shapes.squeeze,
    "Unsqueeze": row_shapes.unsqueeze,
    "Split": row_shapes.split,
    "Slice": row_shapes.slice_,
}
_KERNELS: dict[str, Callable[[Emitter, ir.Node, Given], Value]] = {
    "Gather": gather,
    "MatMul": matmul,
    "RMSNormalization": norm,
    "LayerNormalization": norm,
    "RotaryEmbedding": rotary_embedding,
}


def translate(model: ir.Model) -> Draft:
    """Return the graph as a draft, each value in a buffer of its own. `model` is not changed.

    Raises LoweringError naming the first node that has no kernel.
    """
    emitter = Emitter()
    values = _inputs(model.graph)
    opset = model.opset_imports.get("", 0)
    for node in model.graph:
        given = [None if value is None else values[value] for value in node.inputs]
        try:
            results = _translate_node(emitter, node, given, opset)
        except NoKernelError as reason:
            operator = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
            raise LoweringError(
                f"node '{node.name or label(node)}' {operator}({', '.join(map(show, given))}): the cpu target has no "
                f"kernel for it ({reason}); use target onnxruntime"
            ) from None
        values.update(zip(node.outputs, results if isinstance(results, list) else [results], strict=True))
    emitter.draft.logits = _answer(emitter, model.graph, values)
    return emitter.draft


def _inputs(graph: ir.Graph) -> dict[ir.Value, Value]:
    inputs: list[Value] = [Rows(TokenIds(), Axes(0, ())), Rows(Positions(), Axes(0, ())), LogitsRows()]
    if len(graph.inputs) != len(inputs):
        raise LoweringError(f"the graph has a parameter without a weight: {graph.inputs[-1].name}")
    constants: dict[ir.Value, Value] = {value: initializer(value) for value in graph.initializers.values()}
    return {**constants, **dict(zip(graph.inputs, inputs, strict=True))}


def _translate_node(emitter: Emitter, node: ir.Node, given: Given, opset: int) -> Value | list[Rows]:
    """Return the value of a node's output, or of each of its outputs."""
    if is_paged_attention(node):
        return attention(emitter, node, given)
    if node.domain == DOMAIN and node.op_type in FUSED:
        return FUSED[node.op_type](emitter, node, given)
    if node.domain:
        raise NoKernelError("it is no operator of the dialect")
    if node.op_type == "Clip" and clips_like_kernels(node, given):
        assert isinstance(given[0], Rows)
        return given[0]
    if node.op_type == "QuantizeLinear":
        return round_rows(given)
    if node.op_type == "DequantizeLinear" and isinstance(given[0], Rows) and isinstance(given[0].content, TableRows):
        return dequantized_rows(emitter, node, given)
    if node.op_type == "DequantizeLinear" and isinstance(given[0], Rows):
        return scale_codes(given)
    if node.op_type == "DequantizeLinear":
        return matrices.dequantize(node, given)
    if node.op_type == "Transpose" and isinstance(given[0], Constant | QuantizedMatrix) and len(given[0].shape) == 2:
        return matrices.transpose(node, given[0])
    constants = [value for value in given if isinstance(value, Constant | None)]
    if len(constants) == len(given) and (given or node.op_type == "Constant"):
        return fold(node, constants, opset)
    if node.op_type in _ROW_SHAPES and isinstance(given[0], Rows):
        return _ROW_SHAPES[node.op_type](node, given[0], given)
    if is_elementwise(node.op_type) and any(isinstance(value, Rows) for value in given):
        return from_positions(node, given) if depends_on_positions(given) else elementwise(emitter, node, given)
    if node.op_type in _KERNELS:
        return _KERNELS[node.op_type](emitter, node, given)
    raise NoKernelError("there is none of this kind")


def _answer(emitter: Emitter, graph: ir.Graph, values: dict[ir.Value, Value]) -> View:
    """Return the logits [R, V] as all of a buffer."""
    output, *others = graph.outputs
    if others:
        raise LoweringError(f"output '{others[0].name}': the cpu target answers logits alone; use target onnxruntime")
    value = values[output]
    if not (isinstance(value, Rows) and isinstance(value.content, View) and value.rows == "logits"):
        raise LoweringError(f"output '{output.name}' {show(value)}: the cpu target wants rows picked by logits_rows")
    if emitter.draft.is_whole(value.content):
        return value.content
    copy = Expression()
    return emitter.expression("logits", copy, copy.rows(value.content), "logits", value.content.width)
