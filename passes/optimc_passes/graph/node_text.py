"""A node, and a shape, in a line of text: as listings, reasons and reports show them."""

from __future__ import annotations

import onnx_ir as ir

from optimc_passes.graph.shapes import is_unknown


def describe_node(node: ir.Node) -> str:
    """Return one line: outputs = operator(inputs; attributes) : shape of the first output."""
    outputs = ", ".join(value.name or "?" for value in node.outputs)
    inputs = ", ".join("-" if value is None else value.name or "?" for value in node.inputs)
    attributes = "".join(f"; {name}={_attribute(attribute)}" for name, attribute in sorted(node.attributes.items()))
    shape = node.outputs[0].shape if node.outputs else None
    return f"{outputs} = {node.op_type}({inputs}{attributes}) : {describe_shape(shape)}"


def describe_shape(shape: ir.Shape | None) -> str:
    """Return a shape as [1,T,64]; unknown extents are question marks."""
    if shape is None:
        return "?"
    return f"[{','.join('?' if is_unknown(dim) else str(dim) for dim in shape)}]"


def _attribute(attribute: ir.Attr) -> str:
    return f"{attribute.value:g}" if attribute.type == ir.AttributeType.FLOAT else str(attribute.value)
