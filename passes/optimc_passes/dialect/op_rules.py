"""What each operator of a dialect graph must look like, as data: operands, results, attributes, and how they relate.

Operators of the optimc domain are described in full. Of standard ONNX, those are described whose schema says less than
the dialect wants: linear layers, blocked weights and rows of blocked tables, activations rounded with a static scale,
norms, rotations, lookups, splits.

Letters: T tokens, C input features, N output features, G group along C, F frequencies, V rows of a table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_ir as ir

from optimc_passes.dialect.add_rms_norm import ADD_RMS_NORM
from optimc_passes.dialect.gated_activation import ACTIVATIONS, GATED_ACTIVATION
from optimc_passes.dialect.op_rule import ANY, Attribute, Dim, Facts, Operand, OpRule, Output
from optimc_passes.dialect.paged_attention import DOMAIN, OP_TYPE
from optimc_passes.dialect.rotary_qkv import ROTARY_QKV

FLOATS = frozenset({ir.DataType.FLOAT})
CODES = frozenset({ir.DataType.UINT4, ir.DataType.INT4, ir.DataType.UINT8, ir.DataType.INT8})
BYTES = frozenset({ir.DataType.UINT8, ir.DataType.INT8})
"""Codes whose rows are looked up: Gather takes no 4-bit types."""
SIGNED_BYTES = frozenset({ir.DataType.INT8})
"""Activations rounded with a static scale."""
INDICES = frozenset({ir.DataType.INT32, ir.DataType.INT64})


def rule_of(node: ir.Node) -> OpRule | None:
    """Return the rule of the node's operator in the form it has, or None if there is none."""
    forms = RULES.get((node.domain, node.op_type), ())
    return next((rule for rule in forms if rule.applies(node)), None)


def _size(facts: Facts, letter: str) -> int | None:
    """Return the size a letter stands for; None for a symbol or what is unknown."""
    size = facts.get(letter)
    return size if isinstance(size, int) else None


def _is_positive(value: float) -> bool:
    return value > 0


def _at_least_0(value: float) -> bool:
    return 0 <= value < math.inf


def _count(name: str) -> Attribute:
    return Attribute(name, ir.AttributeType.INT, _is_positive, "positive")


def _at_least_zero(name: str, default: int | None = None) -> Attribute:
    return Attribute(name, ir.AttributeType.INT, _at_least_0, "at least 0", default)


def _flag(name: str, default: int | None = None) -> Attribute:
    return Attribute(name, ir.AttributeType.INT, lambda value: value in (0, 1), "0 or 1", default)


def _small(name: str) -> Attribute:
    return Attribute(name, ir.AttributeType.FLOAT, _at_least_0, "at least 0 and finite")


_HEADS = (_count("num_heads"), _count("num_kv_heads"), _count("head_dim"))
_GROUPED_HEADS = (
    lambda f: f["num_heads"] % f["num_kv_heads"] == 0,
    "num_heads {num_heads} is no multiple of num_kv_heads {num_kv_heads}",
)


def _q(f: Facts) -> tuple[Dim, ...]:
    return ("T", f["num_heads"] * f["head_dim"])


def _kv(f: Facts) -> tuple[Dim, ...]:
    return ("T", f["num_kv_heads"] * f["head_dim"])


_PAGED_ATTENTION = OpRule(
    operands=(Operand("q", FLOATS, _q), Operand("k", FLOATS, _kv), Operand("v", FLOATS, _kv)),
    attributes=(
        _at_least_zero("layer"),
        *_HEADS,
        Attribute("scale", ir.AttributeType.FLOAT, lambda v: 0 < v < math.inf, "positive and finite"),
        _at_least_zero("window"),
        _small("softcap"),
    ),
    outputs=(Output("out", FLOATS, _q),),
    relations=(_GROUPED_HEADS,),
)

_ROTARY_QKV = OpRule(
    operands=(
        Operand("qkv", FLOATS, lambda f: ("T", (f["num_heads"] + 2 * f["num_kv_heads"]) * f["head_dim"])),
        Operand("cos", FLOATS, lambda f: ("T", f["rotary_dim"] // 2), optional=True),
        Operand("sin", FLOATS, lambda f: ("T", f["rotary_dim"] // 2), optional=True),
        Operand("q_norm", FLOATS, lambda _: ("Nq",), optional=True),
        Operand("k_norm", FLOATS, lambda _: ("Nk",), optional=True),
    ),
    attributes=(*_HEADS, _at_least_zero("rotary_dim"), _flag("interleaved"), _small("epsilon")),
    outputs=(Output("q", FLOATS, _q), Output("k", FLOATS, _kv), Output("v", FLOATS, _kv)),
    relations=(
        _GROUPED_HEADS,
        (lambda f: f["has_cos"] == f["has_sin"], "cos and sin come together or not at all"),
        (lambda f: f["has_q_norm"] == f["has_k_norm"], "q_norm and k_norm come together or not at all"),
        (
            lambda f: (f["rotary_dim"] > 0) == f["has_cos"],
            "rotary_dim {rotary_dim}, want 0 without angles and positive with them",
        ),
        (lambda f: f["rotary_dim"] % 2 == 0, "rotary_dim {rotary_dim} is odd"),
        (lambda f: f["rotary_dim"] <= f["head_dim"], "rotary_dim {rotary_dim} above head_dim {head_dim}"),
        (
            lambda f: _size(f, "Nq") in (None, f["head_dim"], f["num_heads"] * f["head_dim"]),
            "q_norm ({Nq}), want ({head_dim}) for each head or one for all {num_heads} heads",
        ),
        (
            lambda f: _size(f, "Nk") in (None, f["head_dim"], f["num_kv_heads"] * f["head_dim"]),
            "k_norm ({Nk}), want ({head_dim}) for each head or one for all {num_kv_heads} heads",
        ),
    ),
)

_ADD_RMS_NORM = OpRule(
    operands=(
        Operand("x", FLOATS, lambda _: (ANY, "C")),
        Operand("residual", FLOATS, lambda _: (ANY, "C")),
        Operand("scale", FLOATS, lambda _: ("C",)),
    ),
    attributes=(_small("epsilon"),),
    outputs=(Output("sum", FLOATS, lambda _: (ANY, "C")), Output("normed", FLOATS, lambda _: (ANY, "C"))),
)


def _gated(f: Facts) -> tuple[Dim, ...]:
    if f["has_up"]:
        return (ANY, "G")
    packed = _size(f, "G")
    return (ANY, "I" if packed is None else packed // 2)


_GATED_ACTIVATION = OpRule(
    operands=(
        Operand("gate", FLOATS, lambda _: (ANY, "G")),
        Operand("up", FLOATS, lambda _: (ANY, "G"), optional=True),
    ),
    attributes=(
        Attribute(
            "activation",
            ir.AttributeType.STRING,
            lambda value: value in ACTIVATIONS,
            f"one of {', '.join(ACTIVATIONS)}",
        ),
    ),
    outputs=(Output("out", FLOATS, _gated),),
    relations=(
        (
            lambda f: f["has_up"] or (_size(f, "G") or 0) % 2 == 0,
            "{G} features have no two halves",
        ),
    ),
)


def _groups(f: Facts) -> tuple[Dim, ...]:
    features = _size(f, "C")
    return ("groups" if features is None else -int(-features // f["block_size"]), "N")


_DEQUANTIZE = OpRule(
    operands=(
        Operand("codes", CODES, lambda _: ("C", "N")),
        Operand("scales", FLOATS, _groups),
        Operand("zeros", CODES, _groups, optional=True, same_dtype_as=0),
    ),
    attributes=(
        Attribute("axis", ir.AttributeType.INT, lambda v: v == 0, "0"),
        _count("block_size"),
    ),
    outputs=(Output("out", FLOATS, lambda _: ("C", "N")),),
    relations=(
        (lambda f: f["block_size"] <= (_size(f, "C") or f["block_size"]), "block_size {block_size} above C {C}"),
    ),
    applies=lambda node: node.attributes.get_int("block_size", 0) != 0,
)


def _groups_of_row(f: Facts) -> tuple[Dim, ...]:
    return (ANY, _groups(f)[0])


def _of_rows(node: ir.Node) -> bool:
    codes = node.inputs[0]
    producer = None if codes is None else codes.producer()
    return producer is not None and producer.op_type == "Gather" and node.attributes.get_int("block_size", 0) != 0


_DEQUANTIZE_ROWS = OpRule(
    operands=(
        Operand("codes", BYTES, lambda _: (ANY, "C")),
        Operand("scales", FLOATS, _groups_of_row),
        Operand("zeros", BYTES, _groups_of_row, optional=True, same_dtype_as=0),
    ),
    attributes=(
        Attribute("axis", ir.AttributeType.INT, lambda v: v == -1, "-1"),
        _count("block_size"),
    ),
    outputs=(Output("out", FLOATS, lambda _: (ANY, "C")),),
    relations=_DEQUANTIZE.relations,
    applies=_of_rows,
)

_ROUND = OpRule(
    operands=(
        Operand("x", FLOATS, lambda _: (ANY, "C")),
        Operand("scale", FLOATS, lambda _: ()),
        Operand("zero", SIGNED_BYTES, lambda _: ()),
    ),
    attributes=(),
    outputs=(Output("codes", SIGNED_BYTES, lambda _: (ANY, "C")),),
)


def _after_rounding(node: ir.Node) -> bool:
    codes = node.inputs[0]
    producer = None if codes is None else codes.producer()
    return producer is not None and producer.op_type == "QuantizeLinear"


_UNROUND = OpRule(
    operands=(
        Operand("codes", SIGNED_BYTES, lambda _: (ANY, "C")),
        Operand("scale", FLOATS, lambda _: ()),
        Operand("zero", SIGNED_BYTES, lambda _: ()),
    ),
    attributes=(),
    outputs=(Output("out", FLOATS, lambda _: (ANY, "C")),),
    applies=_after_rounding,
)

_LINEAR = OpRule(
    operands=(Operand("x", FLOATS, lambda _: (ANY, "C")), Operand("w", FLOATS, lambda _: ("C", "N"))),
    attributes=(),
    outputs=(Output("out", FLOATS, lambda _: (ANY, "N")),),
    # A product of two activations follows ONNX's own broadcasting, which shape inference checks.
    applies=lambda node: _rank(node, 1) == 2,
)

_NORM = OpRule(
    operands=(Operand("x", FLOATS, lambda _: (ANY, "C")), Operand("scale", FLOATS, lambda _: ("C",))),
    attributes=(Attribute("epsilon", ir.AttributeType.FLOAT, _at_least_0, "at least 0 and finite", 1e-5),),
    outputs=(Output("out", FLOATS, lambda _: (ANY, "C")),),
    applies=lambda node: _rank(node, 1) == 1 and _axis(node, -1) in (-1, (_rank(node, 0) or 0) - 1),
)


def _half_heads(f: Facts) -> bool:
    frequencies, width = _size(f, "F"), _size(f, "W")
    return frequencies is None or width is None or 2 * frequencies * f["num_heads"] == width


_ROTATION = OpRule(
    operands=(
        Operand("x", FLOATS, lambda _: ("B", "T", "W")),
        Operand("cos", FLOATS, lambda _: ("B", "T", "F")),
        Operand("sin", FLOATS, lambda _: ("B", "T", "F")),
    ),
    attributes=(
        _count("num_heads"),
        _at_least_zero("rotary_embedding_dim", default=0),
        _flag("interleaved", default=0),
    ),
    outputs=(Output("out", FLOATS, lambda _: ("B", "T", "W")),),
    relations=(
        (
            lambda f: (_size(f, "W") or 0) % f["num_heads"] == 0,
            "rows of {W} are no {num_heads} heads",
        ),
        (
            lambda f: f["rotary_embedding_dim"] in (0, 2 * (_size(f, "F") or f["rotary_embedding_dim"] / 2)),
            "cos has {F} frequencies for rotary_embedding_dim {rotary_embedding_dim}, want half as many",
        ),
        (
            lambda f: f["rotary_embedding_dim"] > 0 or _half_heads(f),
            "cos has {F} frequencies for {num_heads} heads in rows of {W}, want half a head's dimensions",
        ),
    ),
    # Heads apart from each other, or tables looked up by position, are ONNX's business.
    applies=lambda node: len(node.inputs) == 3 and _rank(node, 0) == 3,
)

_LOOKUP = OpRule(
    operands=(
        Operand("table", FLOATS, lambda _: ("V", "C")),
        Operand("rows", INDICES, lambda _: (ANY,)),
    ),
    attributes=(),
    outputs=(Output("out", FLOATS, lambda _: (ANY, "C")),),
    applies=lambda node: _axis(node, 0) == 0 and _rank(node, 0) == 2 and _is_float(node),
)

_PICK = OpRule(
    operands=(
        Operand("x", FLOATS, lambda _: ("B", "T", "C")),
        Operand("rows", INDICES, lambda _: ("R",)),
    ),
    attributes=(),
    outputs=(Output("out", FLOATS, lambda _: ("B", "R", "C")),),
    applies=lambda node: _axis(node, 0) == 1 and _rank(node, 0) == 3 and _rank(node, 1) == 1 and _is_float(node),
)


def _parts(node: ir.Node) -> Facts:
    sizes = node.inputs[1].const_value if len(node.inputs) > 1 and node.inputs[1] is not None else None
    found: Facts = {"outputs": len(node.outputs)}
    return found if sizes is None else {**found, "sizes": [int(size) for size in sizes.numpy().reshape(-1)]}


_SPLIT = OpRule(
    operands=(
        Operand("x", FLOATS, lambda _: (ANY, "C")),
        Operand("sizes", frozenset({ir.DataType.INT64}), lambda _: ("parts",), optional=True),
    ),
    attributes=(),
    outputs=None,
    relations=(
        (
            lambda f: "sizes" not in f or len(f["sizes"]) == f["outputs"],
            "sizes {sizes} for {outputs} outputs",
        ),
        (
            lambda f: "sizes" not in f or _size(f, "C") in (None, sum(f["sizes"])),
            "sizes {sizes} do not add up to C {C}",
        ),
    ),
    applies=lambda node: _axis(node, 0) in (-1, (_rank(node, 0) or 0) - 1) and _is_float(node),
    more_facts=_parts,
)

RULES: Mapping[tuple[str, str], tuple[OpRule, ...]] = {
    (DOMAIN, OP_TYPE): (_PAGED_ATTENTION,),
    (DOMAIN, ROTARY_QKV): (_ROTARY_QKV,),
    (DOMAIN, ADD_RMS_NORM): (_ADD_RMS_NORM,),
    (DOMAIN, GATED_ACTIVATION): (_GATED_ACTIVATION,),
    ("", "QuantizeLinear"): (_ROUND,),
    ("", "DequantizeLinear"): (_DEQUANTIZE_ROWS, _DEQUANTIZE, _UNROUND),
    ("", "MatMul"): (_LINEAR,),
    ("", "RMSNormalization"): (_NORM,),
    ("", "RotaryEmbedding"): (_ROTATION,),
    ("", "Gather"): (_LOOKUP, _PICK),
    ("", "Split"): (_SPLIT,),
}
"""Domain and operator to its forms; the first that applies to a node is the node's."""


def _rank(node: ir.Node, index: int) -> int | None:
    value = node.inputs[index] if index < len(node.inputs) else None
    return None if value is None or value.shape is None else len(value.shape)


def _axis(node: ir.Node, default: int) -> int:
    return node.attributes.get_int("axis", default)


def _is_float(node: ir.Node) -> bool:
    """Whether the first operand is an activation or a table, rather than sizes a graph computes with."""
    return node.inputs[0] is not None and node.inputs[0].dtype in (None, *FLOATS)
