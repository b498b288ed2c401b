"""Does every value have the shape it claims? ONNX infers shapes from the inputs; what nodes declare is compared.

Passes write shapes down, and lowerings read them. A dimension says nothing if it is unknown on either side; symbols are
told apart: T tokens are not R rows, whatever their number on some day.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from optimc_passes.graph.node_text import describe_shape
from optimc_passes.graph.shapes import is_unknown


@dataclass(frozen=True)
class ShapeFault:
    """A value that is not of the shape it declares."""

    node: str
    """Name of the node that computes it; the value's name if it has none."""
    sentence: str


def shape_faults(model: ir.Model, inferred: Mapping[str, ir.Shape]) -> Iterator[ShapeFault]:
    """Yield the values that declare another shape than the one inferred, in graph order."""
    for index, node in enumerate(model.graph):
        for value in node.outputs:
            computed = inferred.get(value.name or "")
            if value.shape is None or computed is None or _agree(value.shape, computed):
                continue
            where = f"node {index} {node.op_type}" + (f" '{node.name}'" if node.name else "")
            shapes = f"declares {describe_shape(value.shape)}, computes {describe_shape(computed)}"
            yield ShapeFault(node.name or str(value.name), f"{where}: '{value.name}' {shapes}")


def _agree(declared: ir.Shape, computed: ir.Shape) -> bool:
    return len(declared) == len(computed) and all(
        is_unknown(left) or is_unknown(right) or left == right for left, right in zip(declared, computed, strict=True)
    )
