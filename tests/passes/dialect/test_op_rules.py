"""Each rule of an operator has a node that obeys it and nodes that break it, one sentence each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from optimc_passes.dialect import ADD_RMS_NORM, DOMAIN, GATED_ACTIVATION, OP_TYPE, ROTARY_QKV
from optimc_passes.dialect import __all__ as public
from optimc_passes.dialect.decompose_fused import DECOMPOSITIONS
from optimc_passes.dialect.node_faults import node_faults
from optimc_passes.dialect.op_rules import RULES

Dims = tuple[int | str | None, ...]


class Node:
    """A node as a test describes it: operands and results are shapes, None for absent; float32 unless said."""

    def __init__(
        self, op_type: str, operands: dict[str, Dims | None], outputs: dict[str, Dims], **attributes: Any
    ) -> None:
        self.op_type, self.operands, self.outputs, self.attributes = op_type, operands, outputs, attributes
        self.domain = DOMAIN if op_type in (ROTARY_QKV, ADD_RMS_NORM, GATED_ACTIVATION) else ""
        self.dtypes: dict[str, ir.DataType] = {}
        self.constants: dict[str, list[int]] = {}

    def faults(self) -> list[str]:
        inputs = [None if dims is None else self._value(name, dims) for name, dims in self.operands.items()]
        outputs = [self._value(name, dims) for name, dims in self.outputs.items()]
        node = ir.node(self.op_type, inputs, self.attributes, domain=self.domain, outputs=outputs)
        return list(node_faults(node, 23))

    def _value(self, name: str, dims: Dims) -> ir.Value:
        tensor = ir.tensor(np.array(self.constants[name], np.int64)) if name in self.constants else None
        dtype = self.dtypes.get(name, ir.DataType.FLOAT)
        return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(dims), const_value=tensor)


def rotary_qkv() -> Node:
    operands: dict[str, Dims | None] = {
        "qkv": ("T", 64),
        "cos": ("T", 4),
        "sin": ("T", 4),
        "q_norm": (8,),
        "k_norm": (8,),
    }
    attributes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rotary_dim": 8, "interleaved": 0, "epsilon": 1e-6}
    return Node(ROTARY_QKV, operands, {"q": ("T", 32), "k": ("T", 16), "v": ("T", 16)}, **attributes)


def add_rms_norm() -> Node:
    row: Dims = (1, "T", 32)
    operands: dict[str, Dims | None] = {"x": row, "residual": row, "scale": (32,)}
    return Node(ADD_RMS_NORM, operands, {"sum": row, "normed": row}, epsilon=1e-6)


def gated_activation() -> Node:
    return Node(GATED_ACTIVATION, {"gate": ("T", 64)}, {"out": ("T", 32)}, activation="silu")


def norm() -> Node:
    return Node("RMSNormalization", {"x": ("T", 4, 8), "scale": (8,)}, {"out": ("T", 4, 8)}, axis=-1, epsilon=1e-6)


def rotation() -> Node:
    operands: dict[str, Dims | None] = {"x": (1, "T", 32), "cos": (1, "T", 4), "sin": (1, "T", 4)}
    return Node("RotaryEmbedding", operands, {"out": (1, "T", 32)}, num_heads=4)


def lookup() -> Node:
    node = Node("Gather", {"table": (50, 32), "rows": (1, "T")}, {"out": (1, "T", 32)}, axis=0)
    node.dtypes["rows"] = ir.DataType.INT64
    return node


def pick() -> Node:
    node = Node("Gather", {"x": (1, "T", 32), "rows": ("R",)}, {"out": (1, "R", 32)}, axis=1)
    node.dtypes["rows"] = ir.DataType.INT64
    return node


def split() -> Node:
    node = Node("Split", {"x": ("T", 64), "sizes": (2,)}, {"a": ("T", 48), "b": ("T", 16)}, axis=-1)
    node.dtypes["sizes"], node.constants["sizes"] = ir.DataType.INT64, [48, 16]
    return node


def linear() -> Node:
    return Node("MatMul", {"x": (1, "T", 32), "w": (32, 64)}, {"out": (1, "T", 64)})


SOUND = [rotary_qkv, add_rms_norm, gated_activation, norm, rotation, lookup, pick, split, linear]


@pytest.mark.parametrize("make", SOUND)
def test_a_sound_node_has_no_faults(make: Callable[[], Node]) -> None:
    assert make().faults() == []


@pytest.mark.parametrize("make", SOUND)
def test_what_is_not_known_is_no_fault(make: Callable[[], Node]) -> None:
    node = make()
    node.outputs = {name: (None,) * len(dims) for name, dims in node.outputs.items()}
    assert node.faults() == []


def operand(name: str, *dims: int | str | None) -> Callable[[Node], None]:
    return lambda node: node.operands.__setitem__(name, dims)


def absent(*names: str) -> Callable[[Node], None]:
    return lambda node: node.operands.update(dict.fromkeys(names))


def output(name: str, *dims: int | str | None) -> Callable[[Node], None]:
    return lambda node: node.outputs.__setitem__(name, dims)


def attribute(**changes: Any) -> Callable[[Node], None]:
    return lambda node: node.attributes.update(changes)


def dtype(name: str, changed: ir.DataType = ir.DataType.FLOAT16) -> Callable[[Node], None]:
    return lambda node: node.dtypes.__setitem__(name, changed)


@pytest.mark.parametrize(
    ("make", "break_it", "sentence"),
    [
        # RotaryQkv: operands, in order.
        (rotary_qkv, operand("qkv", "T", 48), "qkv (T, 48), want (T, 64)"),
        (rotary_qkv, operand("qkv", 1, "T", 64), "qkv (1, T, 64), want (T, 64)"),
        (rotary_qkv, operand("cos", "T", 8), "cos (T, 8), want (T, 4)"),
        (rotary_qkv, operand("sin", "R", 4), "sin (R, 4), want (T, 4)"),
        (rotary_qkv, operand("q_norm", 16), "q_norm (16), want (8) for each head or one for all 4 heads"),
        (rotary_qkv, operand("k_norm", 32), "k_norm (32), want (8) for each head or one for all 2 heads"),
        (rotary_qkv, dtype("qkv"), "qkv: FLOAT16, want FLOAT"),
        (rotary_qkv, absent("qkv"), "input 0 (qkv) is absent"),
        (rotary_qkv, absent("sin"), "cos and sin come together or not at all"),
        (rotary_qkv, absent("q_norm"), "q_norm and k_norm come together or not at all"),
        (rotary_qkv, absent("cos", "sin"), "rotary_dim 8, want 0 without angles and positive with them"),
        (rotary_qkv, attribute(rotary_dim=0), "rotary_dim 0, want 0 without angles and positive with them"),
        (rotary_qkv, operand("w", 1), "6 inputs, want qkv, cos, sin, q_norm, k_norm"),
        # Its attributes.
        (rotary_qkv, lambda node: node.attributes.pop("interleaved"), "attribute interleaved is absent"),
        (rotary_qkv, attribute(interleaved=2), "attribute interleaved: 2, want 0 or 1"),
        (rotary_qkv, attribute(num_kv_heads=3), "num_heads 4 is no multiple of num_kv_heads 3"),
        (rotary_qkv, attribute(rotary_dim=9), "rotary_dim 9 is odd"),
        (rotary_qkv, attribute(rotary_dim=10), "rotary_dim 10 above head_dim 8"),
        (rotary_qkv, attribute(epsilon=-1.0), "attribute epsilon: -1.0, want at least 0 and finite"),
        (rotary_qkv, attribute(base=1e4), "attribute base is unknown"),
        # Its results.
        (rotary_qkv, output("q", "T", 64), "q (T, 64), want (T, 32)"),
        (rotary_qkv, output("v", "R", 16), "v (R, 16), want (T, 16)"),
        (rotary_qkv, lambda node: node.outputs.pop("v"), "2 outputs, want 3: q, k, v"),
        # AddRmsNorm.
        (add_rms_norm, operand("residual", 1, "R", 32), "residual (1, R, 32), want (1, T, 32)"),
        (add_rms_norm, operand("residual", "T", 32), "residual (T, 32), want (1, T, 32)"),
        (add_rms_norm, operand("scale", 16), "scale (16), want (32)"),
        (add_rms_norm, dtype("scale"), "scale: FLOAT16, want FLOAT"),
        (add_rms_norm, attribute(epsilon=float("nan")), "attribute epsilon: nan, want at least 0 and finite"),
        (add_rms_norm, lambda node: node.attributes.clear(), "attribute epsilon is absent"),
        (add_rms_norm, lambda node: node.outputs.pop("normed"), "1 outputs, want 2: sum, normed"),
        (add_rms_norm, output("normed", 1, "T", 16), "normed (1, T, 16), want (1, T, 32)"),
        # GatedActivation, packed and apart.
        (gated_activation, operand("gate", "T", 63), "63 features have no two halves"),
        (gated_activation, output("out", "T", 64), "out (T, 64), want (T, 32)"),
        (gated_activation, operand("up", "T", 32), "up (T, 32), want (T, 64)"),
        (gated_activation, operand("up", "T", 64), "out (T, 32), want (T, 64)"),
        (
            gated_activation,
            attribute(activation="swish"),
            "attribute activation: swish, want one of silu, gelu, gelu_tanh, relu, sigmoid",
        ),
        (gated_activation, attribute(activation=1), "attribute activation: INT, want STRING"),
        # Standard operators whose schemas say less.
        (norm, operand("scale", 4), "scale (4), want (8)"),
        (norm, output("out", "T", 32), "out (T, 32), want (T, 4, 8)"),
        (rotation, attribute(num_heads=5), "rows of 32 are no 5 heads"),
        (rotation, operand("cos", 1, "R", 4), "cos (1, R, 4), want (1, T, F)"),
        (rotation, operand("sin", 1, "T", 2), "sin (1, T, 2), want (1, T, 4)"),
        (rotation, attribute(num_heads=2), "cos has 4 frequencies for 2 heads in rows of 32"),
        (rotation, attribute(rotary_embedding_dim=4), "cos has 4 frequencies for rotary_embedding_dim 4"),
        (lookup, output("out", 1, "T", 50), "out (1, T, 50), want (1, T, 32)"),
        (pick, output("out", 1, "T", 32), "out (1, T, 32), want (1, R, 32)"),
        (pick, dtype("rows", ir.DataType.FLOAT), "rows: FLOAT, want INT32, INT64"),
        (split, lambda node: node.constants.update(sizes=[48, 8]), "sizes [48, 8] do not add up to C 64"),
        (split, lambda node: node.outputs.pop("b"), "sizes [48, 16] for 1 outputs"),
        (linear, output("out", 1, "R", 64), "out (1, R, 64), want (1, T, 64)"),
        (linear, output("out", 1, "T", 32), "out (1, T, 32), want (1, T, 64)"),
    ],
)
def test_each_fault_is_a_sentence(make: Callable[[], Node], break_it: Callable[[Node], Any], sentence: str) -> None:
    node = make()
    break_it(node)
    faults = node.faults()
    assert any(sentence in fault for fault in faults), faults


def test_a_norm_for_the_whole_row_is_as_good_as_one_for_each_head() -> None:
    node = rotary_qkv()
    node.operands |= {"q_norm": (32,), "k_norm": (16,)}
    assert node.faults() == []


def test_norms_and_angles_may_be_absent() -> None:
    node = rotary_qkv()
    node.operands = {"qkv": ("T", 64)}
    node.attributes |= {"rotary_dim": 0, "epsilon": 0.0}
    assert node.faults() == []


def test_every_operator_of_the_dialect_has_a_rule_a_meaning_and_a_decomposition() -> None:
    operators = {op_type for domain, op_type in RULES if domain == DOMAIN}
    assert operators == {*DECOMPOSITIONS, OP_TYPE}
    for meaning in ("paged_attention", "rotary_qkv", "add_rms_norm", "gated_activation"):
        assert meaning in public
