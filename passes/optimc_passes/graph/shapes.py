"""The shapes of a graph's values as they follow from its inputs, rather than as nodes declare them."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from optimc_passes.dialect.inference import infer


def inferred(model: ir.Model) -> dict[str, ir.Shape]:
    """Return the shape of every value whose rank can be told, by name; symbols are kept, None is what nobody can tell.

    The graph must obey the dialect's rules; what they find is not reported here.
    """
    return infer(model).shapes()


def annotate(model: ir.Model, shapes: Mapping[str, ir.Shape]) -> None:
    """Fill in, in place, the dimensions that nodes leave open; what they do declare stays."""
    for node in model.graph:
        for value in node.outputs:
            known = shapes.get(value.name or "")
            if known is None:
                continue
            if value.shape is None:
                value.shape = known.copy()
            elif len(value.shape) == len(known):
                value.shape = ir.Shape(
                    [there if is_unknown(dim) else dim for dim, there in zip(value.shape, known, strict=True)]
                )


def is_unknown(dim: int | ir.SymbolicDim) -> bool:
    """Whether a dimension is neither a number nor a symbol."""
    return isinstance(dim, ir.SymbolicDim) and dim.value is None
