"""One table of cosines and sines for all layers that turn by the same angles, not one per layer."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult

from optimc_passes.fuse.constants import constant_array
from optimc_passes.fuse.rebuild import emit_again
from optimc_passes.fuse.rule import ACCEPTED, FusionPass, NoOptions, Rule, declined

SHARED = "no rotation before it computes an equal table of its own"


class EqualTables(Rule):
    """RotaryEmbedding(x, cos, sin) where an earlier one reads tables of its own that are equal.

    Equal means: the same operators with the same attributes over the same inputs and equal constants.
    """

    already = frozenset({SHARED})

    def pattern(self, op: Any, x: Any, cos: Any, sin: Any) -> Any:
        """Match a rotation."""
        return op.RotaryEmbedding(x, cos, sin, _allow_other_inputs=True, _outputs=["rotated"])

    def check(self, _context: Any, cos: ir.Value, sin: ir.Value, rotated: ir.Value, **_: Any) -> MatchResult:
        """Decline where there is nothing to share."""
        root = rotated.producer()
        assert root is not None
        first = _first_equal(root)
        return declined(SHARED, root) if first == (cos, sin) else ACCEPTED

    def rewrite(self, op: Any, rotated: ir.Value, **_: Any) -> Any:
        """Emit the rotation over the first tables that are equal."""
        root = rotated.producer()
        assert root is not None
        inputs = list(root.inputs)
        inputs[1:3] = _first_equal(root)
        return emit_again(op, root, inputs)[0]


class ShareRotaryTables(FusionPass[NoOptions]):
    """Layers with equal angles read one table of cosines and one of sines."""

    name = "share_rotary_tables"
    version = 1
    config_type = NoOptions
    rules = (EqualTables,)


def _first_equal(root: ir.Node) -> tuple[ir.Value | None, ir.Value | None]:
    """Return the tables of the first rotation in the graph whose cosines, or sines, equal those of `root`."""
    graph = root.graph
    assert graph is not None
    rotations = [node for node in graph if node.op_type == root.op_type and not node.domain]
    tables: list[ir.Value | None] = []
    for index in (1, 2):
        wanted = root.inputs[index]
        equal = (node.inputs[index] for node in rotations if _equal(node.inputs[index], wanted))
        tables.append(next(equal, wanted))
    return tables[0], tables[1]


def _equal(table: ir.Value | None, wanted: ir.Value | None) -> bool:
    return table is wanted or _content(table) == _content(wanted)


def _content(value: ir.Value | None) -> Hashable:
    """Return something that is equal for values computed alike."""
    if value is None:
        return None
    array = constant_array(value)
    if array is not None:
        return array.dtype.str, array.shape, array.tobytes()
    node = value.producer()
    if node is None:
        return id(value)
    attributes = tuple(sorted((name, str(attribute.value)) for name, attribute in node.attributes.items()))
    inputs = tuple(_content(operand) for operand in node.inputs)
    return node.domain, node.op_type, value.index(), attributes, inputs
