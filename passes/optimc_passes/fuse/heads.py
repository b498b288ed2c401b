"""Where an attention's query or key comes from: columns of one product, normed and rotated on the way.

What stands between is read backwards, as `drop_batch_axis` leaves it:

    columns -> [Reshape -> RMSNormalization -> Reshape | RMSNormalization] -> [Unsqueeze -> RotaryEmbedding -> Squeeze]
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from optimc_passes.dialect import DOMAIN, ROTARY_QKV, PagedAttention, RotaryQkv
from optimc_passes.fuse.constants import constant_ints, static_dim


class UnreadableError(Exception):
    """The value does not come about like that; says why."""

    def __init__(self, reason: str, node: ir.Node | None) -> None:
        super().__init__(reason)
        self.node = node


@dataclass(frozen=True)
class Norm:
    """An RMSNormalization of each head or of the whole row."""

    node: ir.Node
    scale: ir.Value
    """[D] or [H*D], an initializer."""
    epsilon: float


@dataclass(frozen=True)
class Rotation:
    """A RotaryEmbedding."""

    node: ir.Node
    cos: ir.Value
    """[T, F]."""
    sin: ir.Value
    rotary_dim: int
    interleaved: bool


@dataclass(frozen=True)
class Heads:
    """Query, key or value of an attention: columns `start` to `stop` of `source`, normed, then rotated."""

    source: ir.Value
    """[T, (H + 2 * Hkv) * D]."""
    start: int
    stop: int
    node: ir.Node
    """What takes the columns: a Split, Slice or RotaryQkv."""
    norm: Norm | None = None
    rotation: Rotation | None = None

    @classmethod
    def trace(cls, value: ir.Value, width: int, head_dim: int) -> Heads:
        """Read back from `value` [T, width]. Raises UnreadableError."""
        rotation = norm = None
        node = _producer(value)
        if node.op_type == "Squeeze" and not node.domain:
            rotation, value = _rotation(node, width, head_dim)
            node = _producer(value)
        if node.op_type in ("Reshape", "RMSNormalization") and not node.domain:
            norm, value = _norm(node, width, head_dim)
            node = _producer(value)
        if node.op_type == ROTARY_QKV and node.domain == DOMAIN:
            if norm is not None or RotaryQkv.from_node(node).rotary_dim:
                raise UnreadableError("RotaryQkv stands before another norm or rotation", node)
            return cls(*_normed_columns(node, value), rotation=rotation)
        return cls(*_columns(node, value), norm=norm, rotation=rotation)


def query_key_value(attention: ir.Node) -> tuple[Heads, Heads, Heads]:
    """Read the operands of a PagedAttention.

    Raises UnreadableError unless they are, in this order, all columns of one value, query and key treated alike.
    """
    spec = PagedAttention.from_node(attention)
    widths = (spec.q_width, spec.kv_width, spec.kv_width)
    heads: list[Heads] = []
    start = 0
    for role, value, width in zip(("query", "key", "value"), attention.inputs, widths, strict=True):
        assert value is not None
        part = Heads.trace(value, width, spec.head_dim)
        heads.append(part)
        if part.source is not heads[0].source:
            raise UnreadableError(f"query and {role} are no columns of one product", part.node)
        if (part.start, part.stop) != (start, start + width):
            raise UnreadableError(
                f"the {role} is columns {part.start} to {part.stop}, not {start} to {start + width}", part.node
            )
        start += width
    q, k, v = heads
    total = static_dim(q.source, -1)
    if total != start:
        raise UnreadableError(f"query, key and value are {start} of {total} columns", q.node)
    if v.norm or v.rotation:
        raise UnreadableError("the value is normed or rotated", attention)
    if _turning(q.rotation) != _turning(k.rotation):
        raise UnreadableError("query and key are not rotated alike", attention)
    if (q.norm is None) != (k.norm is None) or (q.norm and k.norm and q.norm.epsilon != k.norm.epsilon):
        raise UnreadableError("query and key are not normed alike", attention)
    return q, k, v


def _turning(rotation: Rotation | None) -> tuple[ir.Value, ir.Value, int, bool] | None:
    if rotation is None:
        return None
    return rotation.cos, rotation.sin, rotation.rotary_dim, rotation.interleaved


def _producer(value: ir.Value | None) -> ir.Node:
    """Return what computes a value that nothing else reads."""
    node = None if value is None else value.producer()
    if value is None or node is None:
        raise UnreadableError("it is no part of a product", None)
    if len(value.uses()) != 1 or value.is_graph_output():
        raise UnreadableError("a value on the way has another reader", node)
    return node


def _rotation(squeeze: ir.Node, width: int, head_dim: int) -> tuple[Rotation, ir.Value]:
    """Read Squeeze(RotaryEmbedding(Unsqueeze(x), Unsqueeze(cos), Unsqueeze(sin))); return it and x."""
    node = _producer(squeeze.inputs[0])
    if constant_ints(squeeze.inputs[1]) != [0] or node.op_type != "RotaryEmbedding" or len(node.inputs) != 3:
        raise UnreadableError("what is squeezed is no rotation", squeeze)
    x, cos, sin = (_unsqueezed(value, node) for value in node.inputs)
    frequencies = static_dim(cos, -1)
    partial = node.attributes.get_int("rotary_embedding_dim", 0)
    if frequencies is None or (partial or head_dim) != 2 * frequencies:
        raise UnreadableError(f"{frequencies} angles turn {partial or head_dim} dimensions", node)
    heads = node.attributes.get_int("num_heads", 0)
    if heads * head_dim != width:
        raise UnreadableError(f"it rotates {heads} heads, the attention has {width // head_dim}", node)
    interleaved = bool(node.attributes.get_int("interleaved", 0))
    return Rotation(node, cos, sin, 2 * frequencies, interleaved), x


def _unsqueezed(value: ir.Value | None, rotary: ir.Node) -> ir.Value:
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Unsqueeze" or constant_ints(node.inputs[1]) != [0]:
        raise UnreadableError("the rotation has a batch axis of its own", rotary)
    source = node.inputs[0]
    assert source is not None
    return source


def _norm(node: ir.Node, width: int, head_dim: int) -> tuple[Norm, ir.Value]:
    """Read RMSNormalization, of each head if it stands between two Reshape nodes; return it and its input."""
    per_head = node.op_type == "Reshape"
    if per_head:
        if constant_ints(node.inputs[1]) != [-1, width]:
            raise UnreadableError("heads are not packed into rows", node)
        node = _producer(node.inputs[0])
    scale = node.inputs[1] if len(node.inputs) > 1 else None
    x = node.inputs[0]
    if node.op_type != "RMSNormalization" or x is None or scale is None:
        raise UnreadableError(f"{node.op_type} is no norm", node)
    last = -1 if x.shape is None else len(x.shape) - 1
    if node.attributes.get_int("axis", -1) not in (-1, last):
        raise UnreadableError("the norm is not over the last axis only", node)
    if not scale.is_initializer():
        raise UnreadableError("the scale of the norm is computed", node)
    size = head_dim if per_head else width
    if static_dim(scale, 0) != size:
        raise UnreadableError(f"the norm is over {static_dim(scale, 0)} features, not {size}", node)
    if per_head:
        split = _producer(x)
        if split.op_type != "Reshape" or constant_ints(split.inputs[1]) != [-1, width // head_dim, head_dim]:
            raise UnreadableError("rows are not split into heads", split)
        x = split.inputs[0]
        assert x is not None
    return Norm(node, scale, node.attributes.get_float("epsilon", 1e-5)), x


def _normed_columns(node: ir.Node, value: ir.Value) -> tuple[ir.Value, int, int, ir.Node, Norm | None]:
    """Read an output of a RotaryQkv without angles."""
    spec = RotaryQkv.from_node(node)
    index = value.index()
    assert index is not None
    start = sum(spec.widths[:index])
    scale = node.inputs[3 + index] if index < 2 and len(node.inputs) > 3 else None
    norm = None if scale is None else Norm(node, scale, spec.epsilon)
    source = node.inputs[0]
    assert source is not None
    return source, start, start + spec.widths[index], node, norm


def _columns(node: ir.Node, value: ir.Value) -> tuple[ir.Value, int, int, ir.Node]:
    """Read an output of a Split or a Slice along the last of two axes."""
    source = node.inputs[0]
    if source is None or node.op_type not in ("Split", "Slice") or node.domain:
        raise UnreadableError(f"{node.op_type} gives it alone, it is no part of a product", node)
    total = static_dim(source, -1)
    if total is None or source.shape is None or len(source.shape) != 2:
        raise UnreadableError("the product is no matrix of known width", node)
    if node.op_type == "Split":
        if node.attributes.get_int("axis", 0) not in (-1, 1):
            raise UnreadableError("the split is not along the features", node)
        index = value.index()
        start = sum(static_dim(output, -1) or 0 for output in node.outputs[:index])
        return source, start, start + (static_dim(value, -1) or 0), node
    start, stop, axis, *steps = [_one_int(operand, node) for operand in node.inputs[1:]]
    if axis not in (-1, 1) or steps not in ([], [1]):
        raise UnreadableError("the slice is not of neighbouring features", node)
    first, last, _ = slice(start, stop).indices(total)
    if first >= last:
        raise UnreadableError("the slice is empty", node)
    return source, first, last, node


def _one_int(value: ir.Value | None, node: ir.Node) -> int:
    numbers = constant_ints(value)
    if numbers is None or len(numbers) != 1 or len(node.inputs) < 4:
        raise UnreadableError("the slice has no constant bounds along one axis", node)
    return numbers[0]
