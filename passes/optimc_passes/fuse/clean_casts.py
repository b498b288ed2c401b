"""Casts that change nothing, and chains of which one would do."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult

from optimc_passes.fuse.rebuild import emit_again
from optimc_passes.fuse.rule import ACCEPTED, FusionPass, NoOptions, Rule, declined

_INTEGERS = (ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64)
_UNSIGNED = (ir.DataType.UINT8, ir.DataType.UINT16, ir.DataType.UINT32, ir.DataType.UINT64)
_FLOATS = (ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE)

CHANGES = "it changes the type"


class CastToItself(Rule):
    """A Cast to the type that the value has."""

    unrelated = frozenset({CHANGES})

    def pattern(self, op: Any, x: Any) -> Any:
        """Match a cast."""
        return op.Cast(x, _outputs=["cast"])

    def check(self, _context: Any, x: ir.Value, cast: ir.Value) -> MatchResult:
        """Decline a cast to another type, and one whose input has no known type."""
        if x.dtype is None:
            return declined("the type of its input is not known", cast)
        if x.dtype != _target(cast):
            return declined(CHANGES, cast)
        return ACCEPTED

    def rewrite(self, op: Any, x: ir.Value, cast: ir.Value) -> Any:
        """Leave the value; an output of the graph gets a node of its own."""
        return op.Identity(x) if cast.is_graph_output() else x


class CastOfCast(Rule):
    """Two casts in a row of which the first loses nothing that the second keeps."""

    keeps_inner = True

    def pattern(self, op: Any, x: Any) -> Any:
        """Match two casts."""
        return op.Cast(op.Cast(x, _outputs=["inner"]), _outputs=["outer"])

    def check(self, _context: Any, x: ir.Value, inner: ir.Value, outer: ir.Value) -> MatchResult:
        """Decline a first cast that may round or overflow: without it the result would be another.

        Position numbers are an exception: the graph's own int64 inputs are counts below 2**31, which int32 holds.
        """
        source, through, target = x.dtype, _target(inner), _target(outer)
        if source is None:
            return declined("the type of the first input is not known", inner)
        if not (_holds(through, source) or (_is_count(x) and through == ir.DataType.INT32)):
            return declined(f"{through} does not hold every {source}, so {target} would get other numbers", inner)
        return ACCEPTED

    def rewrite(self, op: Any, x: ir.Value, outer: ir.Value, **_: Any) -> Any:
        """Emit one cast."""
        node = outer.producer()
        assert node is not None
        return emit_again(op, node, [x])[0]


class CleanCasts(FusionPass[NoOptions]):
    """Casts to the same type go, casts of casts become one where no number changes."""

    name = "clean_casts"
    version = 1
    config_type = NoOptions
    rules = (CastOfCast, CastToItself)


def _target(cast: ir.Value) -> ir.DataType:
    node = cast.producer()
    assert node is not None
    return ir.DataType(node.attributes["to"].as_int())


def _holds(wide: ir.DataType, narrow: ir.DataType) -> bool:
    """Whether every number of `narrow` is one of `wide`."""
    if wide == narrow:
        return True
    if wide in _FLOATS and narrow == ir.DataType.BFLOAT16:
        return wide != ir.DataType.FLOAT16
    for family in (_INTEGERS, _UNSIGNED, _FLOATS):
        if wide in family and narrow in family:
            return family.index(narrow) < family.index(wide)
    return False


def _is_count(value: ir.Value) -> bool:
    """Whether the value is a graph input of whole numbers, or such an input with axes added."""
    node = value.producer()
    while node is not None and node.op_type in ("Unsqueeze", "Squeeze", "Reshape"):
        source = node.inputs[0]
        assert source is not None
        value, node = source, source.producer()
    return value.is_graph_input() and value.dtype == ir.DataType.INT64
