"""The dialect's fused operators become the operations their parts would become, and compute what they mean."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.tape import Tape

from optimc.errors import LoweringError
from optimc_passes.dialect import (
    ADD_RMS_NORM,
    DOMAIN,
    GATED_ACTIVATION,
    OP_TYPE,
    ROTARY_QKV,
    PagedAttention,
    RotaryQkv,
    decompose_fused,
    verify_graph,
)

VOCAB, HIDDEN, INTER = 40, 32, 48


@dataclass(frozen=True)
class Decoder:
    """A decoder of fused operators alone, as the graph passes leave one."""

    qkv: RotaryQkv = field(default_factory=lambda: RotaryQkv(4, 2, 8, 8))
    norms: str = "none"
    """Of query and key: none, heads or row."""
    activation: str = "silu"
    packed: bool = True
    """Whether gate and up come from one product."""
    biased: bool = False
    quantized: bool = False
    layers: int = 2

    def build(self) -> ir.Model:
        return _Builder(self).model


class _Builder:
    def __init__(self, spec: Decoder) -> None:
        self.spec, self.tape = spec, Tape()
        self._rng = np.random.default_rng(11)
        self._initializers: list[ir.Value] = []
        ids, positions, rows = (
            ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([dim]))
            for name, dim in (("input_ids", "T"), ("position_ids", "T"), ("logits_rows", "R"))
        )
        x = self.op("Gather", self.weight("table", VOCAB, HIDDEN), ids, axis=0)
        angles = self._angles(positions) if spec.qkv.rotary_dim else []
        normed = self.op("RMSNormalization", x, self.weight("input_norm", HIDDEN), axis=-1, epsilon=1e-6)
        for layer in range(spec.layers):
            x, normed = self._layer(f"layers.{layer}", layer, x, normed, angles, rows)
        logits = self.linear("head", normed, VOCAB)
        logits.name, logits.dtype, logits.shape = "logits", ir.DataType.FLOAT, ir.Shape(["R", VOCAB])
        graph = ir.Graph(
            [ids, positions, rows],
            [logits],
            nodes=self.tape.nodes,
            initializers=self._initializers,
            opset_imports={"": 23, DOMAIN: 1},
            name="fused",
        )
        self.model = ir.Model(graph, ir_version=10)

    def _layer(
        self, name: str, layer: int, x: ir.Value, normed: ir.Value, angles: list[ir.Value], rows: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        spec, qkv = self.spec, self.spec.qkv
        inputs: list[ir.Value | None] = [self.linear(f"{name}.qkv", normed, sum(qkv.widths)), *(angles or (None, None))]
        if spec.norms != "none":
            widths = (qkv.head_dim,) * 2 if spec.norms == "heads" else qkv.widths[:2]
            inputs += [self.weight(f"{name}.{letter}_norm", width) for letter, width in zip("qk", widths, strict=True)]
        attributes = {**asdict(qkv), "interleaved": int(qkv.interleaved), "epsilon": 1e-6 if len(inputs) > 3 else 0.0}
        heads = self.ops(ROTARY_QKV, inputs, attributes, 3, f"{name}.attn/{ROTARY_QKV}")
        attention = PagedAttention(layer, qkv.num_heads, qkv.num_kv_heads, qkv.head_dim, 0.35)
        (mixed,) = self.ops(OP_TYPE, heads, asdict(attention), 1, f"{name}.attn/{OP_TYPE}")
        x, normed = self._add_norm(f"{name}.post", self.linear(f"{name}.o", mixed, HIDDEN), x)
        if spec.packed:
            halves = [self.linear(f"{name}.gate_up", normed, 2 * INTER)]
        else:
            halves = [self.linear(f"{name}.{half}", normed, INTER) for half in ("gate", "up")]
        (gated,) = self.ops(GATED_ACTIVATION, halves, {"activation": spec.activation}, 1, f"{name}/{GATED_ACTIVATION}")
        down = self.linear(f"{name}.down", gated, HIDDEN)
        if layer == spec.layers - 1:
            down, x = (self.op("Gather", value, rows, axis=0) for value in (down, x))
        return self._add_norm(f"{name}.next", down, x)

    def _add_norm(self, name: str, x: ir.Value, residual: ir.Value) -> tuple[ir.Value, ir.Value]:
        operands = [x, residual, self.weight(f"{name}_norm", HIDDEN)]
        total, normed = self.ops(ADD_RMS_NORM, operands, {"epsilon": 1e-6}, 2, f"{name}/{ADD_RMS_NORM}")
        return total, normed

    def _angles(self, positions: ir.Value) -> list[ir.Value]:
        frequencies = self.constant("frequencies", np.logspace(0, -2, self.spec.qkv.rotary_dim // 2, dtype=np.float32))
        column = self.op("Unsqueeze", positions, self.constant("one", np.array([1], np.int64)))
        turns = self.op("Mul", self.op("Cast", column, to=ir.DataType.FLOAT), frequencies)
        return [self.op("Cos", turns), self.op("Sin", turns)]

    def linear(self, name: str, x: ir.Value, outputs: int) -> ir.Value:
        features = HIDDEN if not name.endswith((".o", ".down")) else 0
        features = features or (INTER if name.endswith(".down") else self.spec.qkv.q_width)
        if self.spec.quantized:
            codes = self._rng.integers(0, 16, (features, outputs)).astype(np.uint8)
            step = np.full((features // 16, outputs), 2**-4 / np.sqrt(features), np.float32).astype(np.float16)
            parts = [
                self.constant(f"{name}.codes", codes),
                self.constant(f"{name}.scales", step.astype(np.float32)),
                self.constant(f"{name}.zeros", np.full((features // 16, outputs), 8, np.uint8)),
            ]
            weight = self.op("DequantizeLinear", *parts, axis=0, block_size=16)
        else:
            weight = self.weight(name, features, outputs)
        product = self.op("MatMul", x, weight)
        return self.op("Add", product, self.weight(f"{name}.bias", outputs)) if self.spec.biased else product

    def op(self, op_type: str, *operands: ir.Value, **attributes: Any) -> ir.Value:
        return self.tape.op(op_type, operands, attributes)

    def ops(
        self, op_type: str, operands: list[Any], attributes: dict[str, Any], outputs: int, name: str
    ) -> list[ir.Value]:
        found = self.tape.op_multi_out(op_type, operands, attributes, domain=DOMAIN, num_outputs=outputs, name=name)
        return list(found)

    def weight(self, name: str, *shape: int) -> ir.Value:
        noise = self._rng.standard_normal(shape).astype(np.float32)
        return self.constant(name, noise / np.float32(np.sqrt(shape[0])) if len(shape) == 2 else 1 + noise / 4)

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        self._initializers.append(value)
        return value


DECODERS = [
    pytest.param(Decoder(), id="plain"),
    pytest.param(Decoder(qkv=RotaryQkv(4, 1, 16, 4)), id="partial"),
    pytest.param(Decoder(qkv=RotaryQkv(4, 4, 8, 8, interleaved=True)), id="interleaved"),
    pytest.param(Decoder(qkv=RotaryQkv(4, 2, 8)), id="no-rotation"),
    pytest.param(Decoder(norms="heads"), id="norm-of-heads"),
    pytest.param(Decoder(norms="row"), id="norm-of-rows"),
    pytest.param(Decoder(activation="gelu_tanh", biased=True), id="geglu-biased"),
    pytest.param(Decoder(activation="gelu", packed=False), id="gelu-apart"),
    pytest.param(Decoder(packed=False), id="silu-apart"),
    pytest.param(Decoder(activation="relu"), id="relu"),
    pytest.param(Decoder(activation="sigmoid", norms="heads"), id="sigmoid"),
    pytest.param(Decoder(quantized=True), id="quantized"),
    pytest.param(Decoder(quantized=True, biased=True, norms="heads"), id="quantized-biased"),
]


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_fused_operator_becomes_the_operations_of_its_parts(decoder, lowered, unnamed):
    model = decoder.build()
    assert verify_graph(model) == []
    fused, apart = lowered(model), lowered(decompose_fused(model))
    assert unnamed(fused) == unnamed(apart)
    for one, other in zip(fused.tensors, apart.tensors, strict=True):
        np.testing.assert_array_equal(one.load(), other.load())


@pytest.mark.parametrize("decoder", DECODERS)
def test_the_program_computes_what_the_graph_means(decoder, lowered, compare):
    model = decoder.build()
    # All is float32; two layers of sums in another order reach about 1e-6.
    assert compare(model, lowered(model, int8_activations=False)) < 1e-5


def test_a_fused_layer_is_seven_operations(lowered, interpret):
    program = interpret.Interpreter(lowered(Decoder(norms="none").build())).program
    layer = ["norm", "linear", "attention", "linear", "norm", "linear", "linear"]
    rest = [op for op in program.ops if op.op not in ("rotation", "gather_rows")]
    assert [op.op for op in rest] == ["embed", *layer * 2, "norm", "linear"]
    assert [op.gate for op in rest if op.op == "linear"] == ["none", "none", "silu", "none"] * 2 + ["none"]
    assert [op.residual is not None for op in rest if op.op == "linear"] == [False, True, False, True] * 2 + [False]


def test_names_are_those_of_the_fused_nodes(lowered, interpret):
    program = interpret.Interpreter(lowered(Decoder(norms="heads", layers=1).build())).program
    names = {op.name for op in program.ops}
    assert {"layers.0.attn.q_norm", "layers.0.attn.k_norm", "layers.0.post", "layers.0.next"} <= names


def test_a_table_that_is_no_wave_is_refused_by_the_name_of_the_node(lowered):
    model = Decoder().build()
    node = next(node for node in model.graph if node.op_type == ROTARY_QKV)
    node.replace_input_with(2, node.inputs[1])
    with pytest.raises(LoweringError, match=r"'layers.0.attn/RotaryQkv' optimc::RotaryQkv.*not of the same angles"):
        lowered(model)
