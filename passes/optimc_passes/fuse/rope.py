"""Rotary position embedding (https://arxiv.org/abs/2104.09864) as one RotaryEmbedding (ONNX opset 23).

Exporters repeat the angles, rotate halves or neighbours and add: x * cos + rotated(x) * sin, on heads moved in front of
tokens. Three steps lead to the operator on packed heads [1, T, H*D]: the rotation itself (halves cut by Slice or by
Split, or neighbours), the channels left alone, and the transposes around it.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult

from optimc_passes.fuse.constants import constant_ints, make_ints, static_dim
from optimc_passes.fuse.rotary_table import NoTableError, trace_table
from optimc_passes.fuse.rule import ACCEPTED, FusionPass, NoOptions, Rule, declined, typed


class Rotation(Rule):
    """Base of rules for x * cos + rotated * sin with x [1, H, T, D]."""

    # The tables stay for the other layers; those nobody reads any more go with their last reader.
    keeps_inner = True
    commute = True
    interleaved = False

    def rotated(self, op: Any, x: Any) -> Any:
        """Match the rotation of x."""
        raise NotImplementedError

    def why_not(self, width: int, parts: dict[str, ir.Value]) -> str | None:
        """Return what keeps the matched rotation from being one of `width` channels."""
        raise NotImplementedError

    def pattern(self, op: Any, x: Any, cos: Any, sin: Any) -> Any:
        """Match the sum; what cuts x is checked below."""
        return op.Add(op.Mul(x, cos), op.Mul(self.rotated(op, x), sin))

    def check(self, _context: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, **parts: ir.Value) -> MatchResult:
        """Decline unless x is cut as it must be and each angle stands twice in both tables."""
        width = static_dim(x, 3)
        if width is None or static_dim(x, 1) is None:
            return declined("the input is not [1, H, T, D] with known H and D", x)
        reason = self.why_not(width, parts)
        if reason:
            return declined(reason, x)
        for table, function in ((cos, "Cos"), (sin, "Sin")):
            try:
                traced = trace_table(table, interleaved=self.interleaved)
            except NoTableError as error:
                return declined(str(error), table)
            if not traced.is_of(function) or traced.num_angles != width // 2:
                return declined(f"not a {function} table of {width // 2} angles", table)
        return ACCEPTED

    def rewrite(self, op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, **_: Any) -> Any:
        """Emit the operator over half tables; equal tables of other layers are shared later."""
        tables = [trace_table(table, interleaved=self.interleaved).build(op) for table in (cos, sin)]
        return op.RotaryEmbedding(x, *tables, **({"interleaved": 1} if self.interleaved else {}))


class SlicedHalves(Rotation):
    """concat(-x2, x1), the halves cut by two slices."""

    def rotated(self, op: Any, x: Any) -> Any:
        """Match the slices."""
        first = op.Slice(x, _allow_other_inputs=True, _outputs=["first"])
        second = op.Slice(x, _allow_other_inputs=True, _outputs=["second"])
        return op.Concat(op.Neg(second), first, axis=-1)

    def why_not(self, width: int, parts: dict[str, ir.Value]) -> str | None:
        """Say whether the slices are the two halves."""
        return _not_two_parts(parts, width, middle=width // 2)


class SplitHalves(Rotation):
    """concat(-x2, x1), the halves cut by one Split."""

    def rotated(self, op: Any, x: Any) -> Any:
        """Match the Split."""
        first, second = op.Split(x, _allow_other_inputs=True, _outputs=["first", "second"])
        return op.Concat(op.Neg(second), first, axis=-1)

    def why_not(self, width: int, parts: dict[str, ir.Value]) -> str | None:
        """Say whether the Split is into two halves."""
        node = parts["first"].producer()
        assert node is not None, "the pattern matched a Split"
        if node.attributes.get_int("axis", 0) not in (-1, 3):
            return "the split is not along the last axis"
        # Without widths it is into equal parts.
        widths = constant_ints(node.inputs[1]) if len(node.inputs) > 1 else [width // 2] * 2
        return None if widths == [width // 2] * len(node.outputs) else "the split is not into two halves"


class Neighbours(Rotation):
    """Neighbours rotated against each other: (-x1, x0, -x3, x2, ..)."""

    interleaved = True

    def rotated(self, op: Any, x: Any) -> Any:
        """Match the slices of every other channel, and how they are laid side by side again."""
        even = op.Slice(x, _allow_other_inputs=True, _outputs=["even"])
        odd = op.Slice(x, _allow_other_inputs=True, _outputs=["odd"])
        first = op.Unsqueeze(op.Neg(odd), _allow_other_inputs=True, _outputs=["first"])
        second = op.Unsqueeze(even, _allow_other_inputs=True, _outputs=["second"])
        return op.Reshape(op.Concat(first, second, axis=-1), _allow_other_inputs=True, _outputs=["flat"])

    def why_not(self, width: int, parts: dict[str, ir.Value]) -> str | None:
        """Say whether the slices take every other channel, and the pairs stand side by side."""
        for part, start in (("even", 0), ("odd", 1)):
            low, high, axes, steps = _slice_bounds(parts[part])
            if low != [start] or steps != [2] or axes not in ([3], [-1]) or high is None or high[0] < width:
                return "the slices do not take every other channel"
        for part in ("first", "second"):
            node = parts[part].producer()
            assert node is not None, "the pattern matched an Unsqueeze"
            if constant_ints(node.inputs[1]) not in ([-1], [4]):
                return "the pairs are not laid side by side"
        node = parts["flat"].producer()
        assert node is not None, "the pattern matched a Reshape"
        shape = constant_ints(node.inputs[1])
        return None if shape and len(shape) == 4 and shape[-1] == width else "the pairs are not laid side by side"


ROTATIONS: tuple[type[Rule], ...] = (SlicedHalves, SplitHalves, Neighbours)


class PartialRotary(Rule):
    """Folds "rotate the first channels of x, keep the rest" into the operator's rotary_embedding_dim."""

    def pattern(self, op: Any, x: Any, cos: Any, sin: Any) -> Any:
        """Match the concatenation; the slices' bounds are checked below."""
        head = op.Slice(x, _allow_other_inputs=True, _outputs=["first"])
        rest = op.Slice(x, _allow_other_inputs=True, _outputs=["second"])
        return op.Concat(op.RotaryEmbedding(head, cos, sin, _outputs=["rotated"]), rest, axis=-1)

    def check(self, _context: Any, x: ir.Value, rotated: ir.Value, **parts: Any) -> MatchResult:
        """Decline unless the two slices are all of x."""
        width = static_dim(x, 3)
        if width is None:
            return declined("the input is not [1, H, T, D] with known D", x)
        if _attributes(rotated).get("rotary_embedding_dim"):
            return declined("only some of the first channels are rotated", rotated)
        reason = _not_two_parts(parts, width)
        return declined(reason, x) if reason else ACCEPTED

    def rewrite(
        self, op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, first: ir.Value, rotated: ir.Value, **_: Any
    ) -> Any:
        """Emit the operator on all channels."""
        rotated_channels = _slice_bounds(first)[1]
        assert rotated_channels is not None, "check found it constant"
        attributes = {**_attributes(rotated), "rotary_embedding_dim": rotated_channels[0]}
        return op.RotaryEmbedding(x, cos, sin, **attributes)


class PackedRotary(Rule):
    """Moves RotaryEmbedding from [1, H, T, D] to packed heads [1, T, H*D], where no transpose is needed."""

    def pattern(self, op: Any, x: Any, cos: Any, sin: Any, shape: Any) -> Any:
        """Match the operator between two transposes and a reshape that packs the heads."""
        heads_first = op.Transpose(x, perm=[0, 2, 1, 3])
        rotated = op.RotaryEmbedding(heads_first, cos, sin, _outputs=["rotated"])
        return op.Reshape(op.Transpose(rotated, perm=[0, 2, 1, 3]), shape)

    def check(self, _context: Any, x: ir.Value, shape: ir.Value, **_: Any) -> MatchResult:
        """Decline unless the heads are packed again as they were."""
        heads, width = static_dim(x, 2), static_dim(x, 3)
        if heads is None or width is None:
            return declined("the number of heads or their width is not static", x)
        if constant_ints(shape) not in ([-1, heads * width], [1, -1, heads * width]):
            return declined("the rotated heads are not packed again", shape)
        return ACCEPTED

    def rewrite(
        self, op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, shape: ir.Value, rotated: ir.Value, **_: Any
    ) -> Any:
        """Emit the operator on packed heads: as they were before they were split, or packed by a reshape."""
        heads, width = static_dim(x, 2), static_dim(x, 3)
        assert heads is not None, "check found it"
        assert width is not None, "check found it"
        assert x.shape is not None, "check found it"
        packed = _before_splitting(x, heads * width)
        if packed is None:
            packed = typed(op.Reshape(x, make_ints(op, 1, -1, heads * width)), [*x.shape[:2], heads * width])
        turned = op.RotaryEmbedding(packed, cos, sin, num_heads=heads, **_attributes(rotated))
        return op.Reshape(typed(turned, packed.shape), shape)


class Rope(FusionPass[NoOptions]):
    """Rotations that an exporter left as arithmetic become RotaryEmbedding."""

    name = "rope"
    version = 1
    config_type = NoOptions
    rules = (*ROTATIONS, PartialRotary, PackedRotary)


def _before_splitting(x: ir.Value, width: int) -> ir.Value | None:
    """Return the rows [1, T, width] of which a Reshape has made heads, if that is where `x` comes from."""
    node = x.producer()
    rows = node.inputs[0] if node is not None and node.op_type == "Reshape" else None
    if rows is None or rows.shape is None or len(rows.shape) != 3:
        return None
    return rows if rows.shape[0] == 1 and rows.shape[2] == width else None


def _attributes(rotated: ir.Value) -> dict[str, int]:
    """Return what a RotaryEmbedding says about channels."""
    node = rotated.producer()
    assert node is not None, "the pattern matched a node"
    names = ("interleaved", "rotary_embedding_dim")
    return {name: node.attributes.get_int(name, 0) for name in names if node.attributes.get_int(name, 0)}


def _slice_bounds(part: ir.Value) -> tuple[list[int] | None, ...]:
    """Return start, stop, axes and steps of a Slice."""
    node = part.producer()
    assert node is not None, "the pattern matched a Slice"
    bounds = [constant_ints(value) for value in node.inputs[1:]]
    bounds += [None] * (3 - len(bounds))
    return bounds[0], bounds[1], bounds[2], bounds[3] if len(bounds) > 3 else [1]


def _not_two_parts(parts: dict[str, ir.Value], width: int, middle: int | None = None) -> str | None:
    """Return why two slices are not all of the last of four axes, the first up to `middle`; None if they are."""
    (low, end, *first), (start, high, *second) = (_slice_bounds(parts[part]) for part in ("first", "second"))
    for axes, steps in (first, second):
        if axes not in ([3], [-1]):
            return "the slices are not along the last axis"
        if steps != [1]:
            return "the slices are not contiguous"
    if low != [0] or end is None or end != start or high is None or not 0 < end[0] < width <= high[0]:
        return "the slices do not cover the last axis"
    return "the slices are not the two halves" if middle is not None and end != [middle] else None
