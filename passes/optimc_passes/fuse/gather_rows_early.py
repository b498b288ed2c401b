"""Only asked rows go through the end of the model: the Gather before the head moves back to the last attention."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult

from optimc_passes.fuse.rebuild import emit_again
from optimc_passes.fuse.row_wise import is_row_wise
from optimc_passes.fuse.rule import ACCEPTED, FusionPass, NoOptions, Rule, declined, typed

NO_ROWS = "it looks up a table"
EARLY = "the rows are gathered where they are made"


class GatherBeforeRowWise(Rule):
    """Gather(f(x), rows) where f works on each row alone becomes f(Gather(x, rows)).

    f is everything that only the Gather reads, back to values that others read too (the residual stream) or that mix
    rows (attention).
    """

    already = frozenset({EARLY})
    unrelated = frozenset({NO_ROWS})

    def pattern(self, op: Any, x: Any, rows: Any) -> Any:
        """Match a Gather."""
        return op.Gather(x, rows, _outputs=["picked"])

    def check(self, _context: Any, x: ir.Value, rows: ir.Value, picked: ir.Value) -> MatchResult:
        """Decline a Gather of anything but rows of activations, and one that stands early enough."""
        node = picked.producer()
        assert node is not None
        is_list = rows.is_graph_input() and rows.shape is not None and len(rows.shape) == 1
        if x.is_initializer() or x.is_graph_input() or x.shape is None or not is_list:
            return declined(NO_ROWS, node)
        axis = _axis(node, x)
        if axis == len(x.shape) - 1:
            return declined("it gathers features, not rows", node)
        if not _only_for(node, axis):
            return declined(EARLY, node)
        return ACCEPTED

    def rewrite(self, op: Any, x: ir.Value, rows: ir.Value, picked: ir.Value) -> Any:
        """Emit a Gather of each value that f starts from, and f on the rows."""
        root = picked.producer()
        assert root is not None
        assert x.shape is not None
        axis = _axis(root, x)
        back = axis - len(x.shape)
        count = "R" if rows.shape is None else rows.shape[0]
        gathered: dict[ir.Value, ir.Value] = {}

        def of_rows(value: ir.Value | None) -> ir.Value | None:
            if value is None or value in gathered or not _has_rows(value, back):
                return None if value is None else gathered.get(value, value)
            assert value.shape is not None
            position = len(value.shape) + back
            name = f"{value.name}.rows"
            gathered[value] = typed(
                op.Gather(value, rows, axis=position, _outputs=[name]), _with(value.shape, position, count)
            )
            return gathered[value]

        for node in _only_for(root, axis):
            outputs = emit_again(op, node, [of_rows(value) for value in node.inputs])
            for old, new in zip(node.outputs, outputs, strict=True):
                gathered[old] = new
                if old.shape is not None:
                    new.shape = _with(old.shape, len(old.shape) + back, count)
        return gathered[x]


class GatherRowsEarly(FusionPass[NoOptions]):
    """Norms, products and sums behind the last attention work on the rows whose logits are wanted, not on all."""

    name = "gather_rows_early"
    version = 1
    config_type = NoOptions
    rules = (GatherBeforeRowWise,)


def _axis(gather: ir.Node, x: ir.Value) -> int:
    assert x.shape is not None
    return gather.attributes.get_int("axis", 0) % len(x.shape)


def _only_for(root: ir.Node, axis: int) -> list[ir.Node]:
    """Return the row-wise nodes whose results only `root` needs, in graph order."""
    x = root.inputs[0]
    assert x is not None
    assert x.shape is not None
    back = axis - len(x.shape)
    found: list[ir.Node] = []
    members = {root}
    graph = root.graph
    assert graph is not None
    # Consumers come before producers here, so one sweep decides.
    for node in reversed(tuple(graph)):
        needed = [value for value in node.outputs if value.uses()]
        if node is root or not needed or not any(_has_rows(value, back) for value in needed):
            continue
        alone = all(consumer in members for value in needed for consumer, _ in value.uses())
        if alone and not any(value.is_graph_output() for value in needed) and is_row_wise(node):
            members.add(node)
            found.append(node)
    return found[::-1]


def _has_rows(value: ir.Value, back: int) -> bool:
    """Whether the axis `back` (counted from the end) of the value runs over tokens."""
    return value.shape is not None and len(value.shape) >= -back and not isinstance(value.shape[back], int)


def _with(shape: ir.Shape, axis: int, extent: Any) -> ir.Shape:
    return ir.Shape([extent if index == axis else dim for index, dim in enumerate(shape)])
