"""Each fused operator's decomposition, run by ONNX Runtime, computes what the operator means in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx_ir.tape import Tape

from optimc_passes.dialect import (
    ACTIVATIONS,
    ADD_RMS_NORM,
    DOMAIN,
    DOMAIN_VERSION,
    GATED_ACTIVATION,
    OP_TYPE,
    ROTARY_QKV,
    Activation,
    AddRmsNorm,
    GatedActivation,
    PagedAttention,
    RotaryQkv,
    add_rms_norm,
    decompose_fused,
    gated_activation,
    rotary_qkv,
)

ATOL = 2e-6
"""A few float32 roundings of values near 1."""

Arrays = Mapping[str, NDArray[np.float32]]


def single(op_type: str, operands: Arrays, attributes: Mapping[str, Any], outputs: list[str]) -> ir.Model:
    """A graph of one node; `operands` of size 0 are absent."""
    tape = Tape()
    inputs = [
        ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(array.shape))
        for name, array in operands.items()
    ]
    given = [value if operands[value.name or ""].size else None for value in inputs]
    results = tape.op_multi_out(op_type, given, attributes, domain=DOMAIN, num_outputs=len(outputs))
    for result, name in zip(results, outputs, strict=True):
        result.name, result.type = name, ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        [value for value in inputs if value in given],
        results,
        nodes=tape.nodes,
        opset_imports={"": 23, DOMAIN: DOMAIN_VERSION},
        name="single",
    )
    return ir.Model(graph, ir_version=10)


def run(model: ir.Model, operands: Arrays) -> list[NDArray[np.float32]]:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    found: list[NDArray[np.float32]] = session.run(
        None, {value.name: operands[value.name] for value in session.get_inputs()}
    )
    return found


def draw(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


ABSENT = np.zeros(0, np.float32)


def angles(tokens: int, frequencies: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    turns = np.arange(tokens)[:, None] * np.logspace(0, -2, frequencies)
    return np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("norm", ["none", "heads", "row"])
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(RotaryQkv(4, 4, 8, 8), id="mha"),
        pytest.param(RotaryQkv(4, 2, 24, 24), id="gqa2-dim24"),
        pytest.param(RotaryQkv(4, 1, 8, 4), id="gqa4-partial"),
        pytest.param(RotaryQkv(2, 1, 8, 8, interleaved=True), id="interleaved"),
        pytest.param(RotaryQkv(2, 1, 16, 8, interleaved=True), id="interleaved-partial"),
        pytest.param(RotaryQkv(2, 1, 8), id="no-rotation"),
        pytest.param(RotaryQkv(1, 1, 8, 8), id="one-head"),
    ],
)
def test_rotary_qkv(spec: RotaryQkv, norm: str, tokens: int) -> None:
    cos, sin = angles(tokens, spec.rotary_dim // 2) if spec.rotary_dim else (ABSENT, ABSENT)
    widths = {"none": (0, 0), "heads": (spec.head_dim, spec.head_dim), "row": (spec.q_width, spec.kv_width)}[norm]
    operands = {
        "qkv": draw(tokens, sum(spec.widths)),
        "cos": cos,
        "sin": sin,
        "q_norm": draw(widths[0], seed=1),
        "k_norm": draw(widths[1], seed=2),
    }
    spec = RotaryQkv(**{**asdict(spec), "epsilon": 0.0 if norm == "none" else 1e-3})
    attributes = {**asdict(spec), "interleaved": int(spec.interleaved)}
    model = single(ROTARY_QKV, operands, attributes, ["q", "k", "v"])
    expected = rotary_qkv(spec, *(operand if operand.size else None for operand in operands.values()))
    for found, wanted in zip(run(decompose_fused(model), operands), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=ATOL)


@pytest.mark.parametrize("shape", [(5, 16), (1, 5, 16)])
def test_add_rms_norm(shape: tuple[int, ...]) -> None:
    operands = {"x": draw(*shape), "residual": draw(*shape, seed=1), "scale": draw(16)}
    model = single(ADD_RMS_NORM, operands, {"epsilon": 1e-3}, ["sum", "normed"])
    total, normed = run(decompose_fused(model), operands)
    wanted_total, wanted = add_rms_norm(AddRmsNorm(1e-3), **operands)
    np.testing.assert_array_equal(total, wanted_total)
    np.testing.assert_allclose(normed, wanted, atol=ATOL)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activation(activation: Activation, packed: bool) -> None:
    gate, up = 3 * draw(5, 16), draw(5, 16, seed=1)
    operands = {"gate_up": np.concatenate([gate, up], axis=-1)} if packed else {"gate": gate, "up": up}
    model = single(GATED_ACTIVATION, operands, {"activation": activation}, ["out"])
    (found,) = run(decompose_fused(model), operands)
    np.testing.assert_allclose(found, gated_activation(GatedActivation(activation), gate, up), atol=ATOL)
    np.testing.assert_array_equal(
        gated_activation(GatedActivation(activation), *operands.values()),
        gated_activation(GatedActivation(activation), gate, up),
    )


def test_values_keep_their_names_and_the_original_is_left_alone() -> None:
    operands = {"x": draw(2, 4), "residual": draw(2, 4), "scale": draw(4)}
    model = single(ADD_RMS_NORM, operands, {"epsilon": 1e-3}, ["sum", "normed"])
    before = ir.to_proto(model).SerializeToString()
    found = decompose_fused(model)
    assert [(node.op_type, node.outputs[0].name) for node in found.graph] == [
        ("Add", "sum"),
        ("RMSNormalization", "normed"),
    ]
    assert DOMAIN not in found.opset_imports
    assert ir.to_proto(model).SerializeToString() == before


def test_layers_share_what_is_computed_from_the_angles() -> None:
    spec = RotaryQkv(2, 1, 8, 8)
    cos, sin = angles(3, 4)
    operands = {"qkv": draw(3, 32), "cos": cos, "sin": sin}
    model = single(ROTARY_QKV, operands, {**asdict(spec), "interleaved": 0}, ["q", "k", "v"])
    first = next(iter(model.graph))
    again = ir.node(ROTARY_QKV, first.inputs, first.attributes, domain=DOMAIN, num_outputs=3)
    model.graph.append(again)
    model.graph.outputs.extend(again.outputs)
    ops = [node.op_type for node in decompose_fused(model).graph]
    assert ops.count("Unsqueeze") == 2 + 2 * 2, "the two tables, and q and k of each node"
    found = run(decompose_fused(model), operands)
    np.testing.assert_array_equal(found[0], found[3])


def test_nodes_are_called_after_the_one_they_stand_for() -> None:
    operands = {"gate_up": draw(2, 8)}
    model = single(GATED_ACTIVATION, operands, {"activation": "silu"}, ["out"])
    next(iter(model.graph)).name = "layers.0.mlp/GatedActivation"
    assert [node.name for node in decompose_fused(model).graph] == [
        f"layers.0.mlp/GatedActivation/{op}" for op in ("Split", "Sigmoid", "Mul", "Mul_2")
    ]


def test_attention_stays(attention_graph: Callable[..., ir.Model]) -> None:
    model = decompose_fused(attention_graph(PagedAttention(0, 4, 2, 8, 0.35)))
    assert [node.op_type for node in model.graph] == [OP_TYPE]
    assert DOMAIN in model.opset_imports
