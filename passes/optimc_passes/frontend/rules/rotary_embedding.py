"""Rotary position embedding (https://arxiv.org/abs/2104.09864) as one RotaryEmbedding (ONNX opset 23).

transformers repeats the angles, rotates halves and adds: x * cos + concat(-x2, x1) * sin, on heads moved in front of
tokens. Three steps lead to the operator on packed heads [1, T, H*D]: `Rotary` recognises the arithmetic,
`PartialRotary` the channels left alone, `PackedRotary` undoes the transposes around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult, RewriteRuleClassBase

from optimc_passes.frontend.rules.constants import constant_ints, constant_scalar, static_dim


@dataclass(frozen=True)
class _Table:
    """A cos or sin table [1, 1, T, D] whose halves are equal: `function(angles) * factor`, with angles [1, T, D/2]."""

    function: str
    angles: ir.Value
    factor: float

    @classmethod
    def trace(cls, table: ir.Value) -> _Table | str:
        """Walk up from the table to its angles; return why not, if it is not of that form."""
        unsqueeze = table.producer()
        if unsqueeze is None or unsqueeze.op_type != "Unsqueeze" or constant_ints(unsqueeze.inputs[1]) != [1]:
            return "the table is not broadcast over heads"
        node = _producer(unsqueeze.inputs[0])
        factor = 1.0
        if node is not None and node.op_type == "Mul":
            scale = constant_scalar(node.inputs[1])
            if scale is None:
                return "the table is scaled by something that is not constant"
            factor, node = scale, _producer(node.inputs[0])
        if node is None or node.op_type not in ("Cos", "Sin"):
            return "the table is not a cosine or sine"
        repeat = _producer(node.inputs[0])
        if repeat is None or repeat.op_type != "Concat" or len(repeat.inputs) != 2:
            return "the angles are not repeated"
        angles = repeat.inputs[0]
        if angles is None or angles is not repeat.inputs[1] or angles.shape is None:
            return "the two halves of the angles differ"
        if repeat.attributes.get_int("axis", 0) not in (-1, len(angles.shape) - 1):
            return "the angles are not repeated along the last axis"
        return cls(node.op_type, angles, factor)

    def build(self, op: Any) -> Any:
        """Emit the half table [1, T, D/2]."""
        table = getattr(op, self.function)(self.angles)
        if self.factor == 1.0:
            return table
        return op.Mul(table, op.Constant(value=ir.tensor(np.float32(self.factor))))


class Rotary(RewriteRuleClassBase):
    """Fuses x * cos + rotate_half(x) * sin for x [1, H, T, D] into RotaryEmbedding over half tables."""

    def __init__(self, name: str) -> None:
        # The tables stay for the other layers; those nobody reads any more are removed afterwards.
        super().__init__(name, remove_nodes=False)

    def pattern(self, op: Any, x: Any, cos: Any, sin: Any, low: Any, middle: Any, high: Any, axes: Any) -> Any:
        """Match the sum; the slices' bounds are checked below."""
        first = op.Slice(x, low, middle, axes, _allow_other_inputs=True, _outputs=["first"])
        second = op.Slice(x, middle, high, axes, _allow_other_inputs=True, _outputs=["second"])
        rotated = op.Concat(op.Neg(second), first, axis=-1)
        return op.Add(op.Mul(x, cos), op.Mul(rotated, sin))

    def check(self, _context: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, **slices: ir.Value) -> MatchResult:
        """Decline unless x is split in its middle and both tables have equal halves."""
        result = MatchResult()
        width = static_dim(x, 3)
        if width is None or static_dim(x, 1) is None:
            return result.fail("the input is not [1, H, T, D] with known H and D", x)
        reason = _not_two_parts(slices, width)
        if reason:
            return result.fail(reason, x)
        if constant_ints(slices["middle"]) != [width // 2]:
            return result.fail("the slices are not the two halves", x)
        for table, function in ((cos, "Cos"), (sin, "Sin")):
            traced = _Table.trace(table)
            if isinstance(traced, str):
                return result.fail(traced, table)
            if traced.function != function or static_dim(traced.angles, -1) != width // 2:
                return result.fail(f"not a {function} table of {width // 2} angles", table)
        return result

    def rewrite(self, op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, **_: Any) -> Any:
        """Emit the operator over half tables; equal tables of other layers are merged later."""
        tables = [_Table.trace(table) for table in (cos, sin)]
        half_cos, half_sin = (table.build(op) for table in tables if isinstance(table, _Table))
        return op.RotaryEmbedding(x, half_cos, half_sin)


class PartialRotary(RewriteRuleClassBase):
    """Folds "rotate the first channels of x, keep the rest" into the operator's rotary_embedding_dim."""

    def pattern(self, op: Any, x: Any, cos: Any, sin: Any, low: Any, middle: Any, high: Any, axes: Any) -> Any:
        """Match the concatenation; the slices' bounds are checked below."""
        head = op.Slice(x, low, middle, axes, _allow_other_inputs=True, _outputs=["first"])
        rest = op.Slice(x, middle, high, axes, _allow_other_inputs=True, _outputs=["second"])
        return op.Concat(op.RotaryEmbedding(head, cos, sin), rest, axis=-1)

    def check(self, _context: Any, x: ir.Value, **slices: ir.Value) -> MatchResult:
        """Decline unless the two slices are all of x."""
        result = MatchResult()
        width = static_dim(x, 3)
        if width is None:
            return result.fail("the input is not [1, H, T, D] with known D", x)
        reason = _not_two_parts(slices, width)
        return result.fail(reason, x) if reason else result

    def rewrite(self, op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, middle: ir.Value, **_: Any) -> Any:
        """Emit the operator on all channels."""
        rotated_channels = constant_ints(middle)
        assert rotated_channels is not None, "check found it constant"
        return op.RotaryEmbedding(x, cos, sin, rotary_embedding_dim=rotated_channels[0])


class PackedRotary(RewriteRuleClassBase):
    """Moves RotaryEmbedding from [1, H, T, D] to packed heads [1, T, H*D], where no transpose is needed."""

    def pattern(self, op: Any, x: Any, cos: Any, sin: Any, shape: Any) -> Any:
        """Match the operator between two transposes and a reshape that packs the heads."""
        heads_first = op.Transpose(x, perm=[0, 2, 1, 3])
        rotated = op.RotaryEmbedding(heads_first, cos, sin, _allow_other_attributes=True, _outputs=["rotated"])
        return op.Reshape(op.Transpose(rotated, perm=[0, 2, 1, 3]), shape, _allow_other_attributes=True)

    def check(self, _context: Any, x: ir.Value, shape: ir.Value, **_: Any) -> MatchResult:
        """Decline unless the heads are packed again as they were."""
        result = MatchResult()
        heads, width = static_dim(x, 2), static_dim(x, 3)
        if heads is None or width is None:
            return result.fail("the number of heads or their width is not static", x)
        if constant_ints(shape) not in ([-1, heads * width], [1, -1, heads * width]):
            return result.fail("the rotated heads are not packed again", shape)
        return result

    def rewrite(
        self, op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, shape: ir.Value, rotated: ir.Value, **_: Any
    ) -> Any:
        """Emit reshape, operator, reshape; reshapes that meet others are merged later."""
        heads, width, node = static_dim(x, 2), static_dim(x, 3), rotated.producer()
        assert heads is not None, "check found it"
        assert width is not None, "check found it"
        assert node is not None, "the pattern matched a node"
        partial = node.attributes.get_int("rotary_embedding_dim", 0)
        attributes = {"rotary_embedding_dim": partial} if partial else {}
        packed_shape = op.Constant(value=ir.tensor(np.array([1, -1, heads * width], np.int64)))
        packed = op.RotaryEmbedding(op.Reshape(x, packed_shape), cos, sin, num_heads=heads, **attributes)
        return op.Reshape(packed, shape)


def _producer(value: ir.Value | None) -> ir.Node | None:
    return None if value is None else value.producer()


def _not_two_parts(slices: dict[str, ir.Value], width: int) -> str | None:
    """Return why the slices [low:middle] and [middle:high] of the last of four axes are not all of `width`, or None."""
    if constant_ints(slices["axes"]) != [3]:
        return "the slices are not along the last axis"
    for part in ("first", "second"):
        node = slices[part].producer()
        assert node is not None, "the pattern matched a Slice"
        if len(node.inputs) > 4 and constant_ints(node.inputs[4]) != [1]:
            return "the slices are not contiguous"
    low, middle, high = (constant_ints(slices[name]) for name in ("low", "middle", "high"))
    if low != [0] or middle is None or high is None or not 0 < middle[0] < width <= high[0]:
        return "the slices do not cover the last axis"
    return None
