"""Products of float16 whose sums are float32, said the way TensorRT understands.

Left alone, TensorRT adds a product's terms up in whatever is fastest, which may be float16. It takes casts of both
operands to float32 and of the result back for a wish: the kernel reads and writes float16, and the casts are gone (seen
of RTX 1.7.1, whose plans then say accumulation_type=2 instead of 0, for dense weights and for codes). Without the cast
back it multiplies in float32 and stores weights so; a result that is read in float32 is therefore rounded to float16 on
the way. bfloat16 needs none of it: tensor cores have no sums of it.
"""

from __future__ import annotations

import onnx_ir as ir

from optimc_passes.dialect.replacement import operand

_HALF, _FLOAT = ir.DataType.FLOAT16, ir.DataType.FLOAT


def sum_in_float32(model: ir.Model) -> None:
    """Surround every float16 product with casts, in place.

    Each product has casts of its own: products that read one cast are joined before anybody sees the wish.
    """
    for node in tuple(model.graph):
        if node.op_type == "MatMul" and node.outputs[0].dtype == _HALF:
            _surround(model.graph, node)


def _surround(graph: ir.Graph, node: ir.Node) -> None:
    result = node.outputs[0]
    for index, side in enumerate(("left", "right")):
        cast = _cast(operand(node, index), f"{result.name}.{side}.for_sums", _FLOAT)
        graph.insert_before(node, cast)
        node.replace_input_with(index, cast.outputs[0])
    cast = _cast(result, f"{result.name}.from_sums", _HALF)
    result.replace_all_uses_with(cast.outputs[0])
    cast.replace_input_with(0, result)
    graph.insert_after(node, cast)
    result.type = ir.TensorType(_FLOAT)


def _cast(value: ir.Value, name: str, to: ir.DataType) -> ir.Node:
    result = ir.Value(name=name, shape=value.shape, type=ir.TensorType(to))
    return ir.node("Cast", [value], {"to": int(to)}, outputs=[result], name=f"{name}/Cast")
