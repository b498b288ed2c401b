"""Lowering: what the plan holds, and that nothing is loaded before it is written."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx_ir.tape import Tape

from optimc.errors import LoweringError, MissingExtraError
from optimc_passes.artifact import Artifact
from optimc_passes.checkpoint import Checkpoint, TokenizerAssets
from optimc_passes.dialect import DOMAIN, OP_TYPE
from optimc_passes.emit import TARGETS, LoweringOptions
from optimc_passes.emit.onnxruntime import MODEL_TENSOR, check_options, lower
from optimc_passes.weights import WeightStore

VOCAB, HIDDEN = 96, 32


class Loads:
    """Lazy tensors that count how often they are loaded."""

    def __init__(self) -> None:
        self.count: dict[str, int] = {}
        self.arrays: dict[str, np.ndarray] = {}

    def tensor(self, name: str, shape: tuple[int, ...], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.LazyTensor:
        if dtype == ir.DataType.FLOAT:
            array = np.random.default_rng(len(self.count)).standard_normal(shape).astype(np.float32)
        else:
            array = np.random.default_rng(len(self.count)).integers(0, 16, shape).astype(dtype.numpy())
        self.count[name], self.arrays[name] = 0, array

        def load() -> ir.Tensor:
            self.count[name] += 1
            return ir.Tensor(array, dtype=dtype, name=name)

        return ir.LazyTensor(load, dtype=dtype, shape=ir.Shape(shape), name=name)


def build(
    loads: Loads,
    edit: Callable[[Tape, ir.Value, Callable[..., ir.Value]], ir.Value] | None = None,
    batched: bool = True,
) -> ir.Model:
    """Embedding, one attention layer, tied head. `edit(tape, x, weight)` adds to the residual stream [T, HIDDEN].

    `batched` gives the head an input of [1, R, C] instead of [R, C].
    """
    tape = Tape()
    inputs = [
        ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([axis]))
        for name, axis in (("input_ids", "T"), ("position_ids", "T"), ("logits_rows", "R"))
    ]

    def weight(name: str, *shape: int, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        return tape.initializer(loads.tensor(name, shape, dtype))

    embed = weight("embed", VOCAB, HIDDEN)
    x = tape.op("Gather", [embed, inputs[0]])
    if edit is not None:
        x = edit(tape, x, weight)
    attributes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "scale": 0.35, "window": 7, "softcap": 0.0}
    q, k, v = (tape.op("MatMul", [x, weight(name, HIDDEN, width)]) for name, width in (("q", 32), ("k", 16), ("v", 16)))
    x = tape.op(OP_TYPE, [q, k, v], {"layer": 0, **attributes}, domain=DOMAIN)
    rows = tape.op("Gather", [x, inputs[2]])
    rows.dtype, rows.shape = ir.DataType.FLOAT, ir.Shape(["R", HIDDEN])
    if batched:
        rows = tape.op("Unsqueeze", [rows, tape.op("Constant", (), {"value_ints": [0]})])
    logits = tape.op("MatMul", [rows, tape.op("Transpose", [embed], {"perm": [1, 0]})])
    if batched:
        logits = tape.op("Squeeze", [logits, tape.op("Constant", (), {"value_ints": [0]})])
    logits.name, logits.dtype, logits.shape = "logits", ir.DataType.FLOAT, ir.Shape(["R", VOCAB])
    graph = ir.Graph(
        inputs, [logits], nodes=tape.nodes, initializers=tape.initializers, opset_imports={"": 23, DOMAIN: 1}, name="g"
    )
    return ir.Model(graph, ir_version=10)


def program_of(lowered: Any) -> onnx.ModelProto:
    (tensor,) = (tensor for tensor in lowered.tensors if tensor.name == MODEL_TENSOR)
    return onnx.ModelProto.FromString(tensor.load().tobytes())


def test_weights_are_loaded_once_each_and_only_when_written() -> None:
    loads = Loads()
    lowered = lower(build(loads), block_size=4)
    assert set(loads.count.values()) == {0}
    for tensor in lowered.tensors:
        array = tensor.load()
        assert array.nbytes == tensor.nbytes
        assert math.prod(tensor.shape) * array.itemsize == tensor.nbytes
    assert set(loads.count.values()) == {1}


def test_the_program_names_every_weight_and_holds_none() -> None:
    loads = Loads()
    lowered = lower(build(loads), block_size=4)
    initializers = lowered.program["initializers"]
    assert set(initializers) == {"embed", "q", "k", "v"}
    assert initializers["q"] == {"tensor": "weights/q", "onnx_dtype": 1, "shape": [32, 32]}
    assert {tensor.name for tensor in lowered.tensors} == {MODEL_TENSOR, *(f"weights/{name}" for name in initializers)}
    proto = program_of(lowered)
    assert not {init.name for init in proto.graph.initializer} & set(initializers)
    assert [opset.domain for opset in proto.opset_import] == [""]
    assert proto.ByteSize() < 8192


@pytest.mark.parametrize("batched", [False, True])
def test_a_tied_head_is_stored_once_and_read_in_place(batched: bool) -> None:
    lowered = lower(build(Loads(), batched=batched), block_size=4)
    nodes = program_of(lowered).graph.node
    (gemm,) = (node for node in nodes if node.op_type == "Gemm")
    assert gemm.input[1] == "embed"
    assert {attribute.name: attribute.i for attribute in gemm.attribute} == {"transB": 1}
    assert not any("embed" in node.input for node in nodes if node.op_type == "Transpose")
    assert sum(tensor.nbytes == VOCAB * HIDDEN * 4 for tensor in lowered.tensors) == 1


def test_an_activation_times_a_transposed_activation_stays() -> None:
    def square(tape: Tape, x: ir.Value, weight: Callable[..., ir.Value]) -> ir.Value:
        gram = tape.op("MatMul", [x, tape.op("Transpose", [x], {"perm": [1, 0]})])
        return tape.op("MatMul", [gram, x])

    nodes = program_of(lower(build(Loads(), square), block_size=4)).graph.node
    assert sum(node.op_type == "Gemm" for node in nodes) == 1


def test_four_bit_codes_lie_two_per_byte() -> None:
    loads = Loads()

    def quantized(tape: Tape, x: ir.Value, weight: Callable[..., ir.Value]) -> ir.Value:
        codes = weight("p.codes", HIDDEN, 75, dtype=ir.DataType.UINT4)
        dense = tape.op("DequantizeLinear", [codes, weight("p.scales", 2, 75)], {"axis": 0, "block_size": 16})
        return tape.op("MatMul", [tape.op("MatMul", [x, dense]), weight("back", 75, HIDDEN)])

    lowered = lower(build(loads, quantized), block_size=4)
    (tensor,) = (tensor for tensor in lowered.tensors if tensor.name == "weights/p.codes")
    assert (tensor.dtype, tensor.shape) == ("U8", (HIDDEN * 75 // 2,))
    packed, codes = tensor.load(), loads.arrays["p.codes"].astype(np.uint8).ravel()
    np.testing.assert_array_equal(packed & 15, codes[0::2])
    np.testing.assert_array_equal(packed >> 4, codes[1::2])
    assert lowered.program["initializers"]["p.codes"] == {
        "tensor": "weights/p.codes",
        "onnx_dtype": int(ir.DataType.UINT4),
        "shape": [HIDDEN, 75],
    }
    # 150 scales of 4 bytes are below the limit for inlining.
    assert "p.scales" in {init.name for init in program_of(lowered).graph.initializer}


def test_large_constants_become_weights_and_unused_ones_vanish() -> None:
    table = np.arange(HIDDEN * HIDDEN, dtype=np.float32).reshape(HIDDEN, HIDDEN)

    def constant(tape: Tape, x: ir.Value, weight: Callable[..., ir.Value]) -> ir.Value:
        weight("unused", 64, 64)
        value = tape.op("Constant", (), {"value": ir.tensor(table)})
        value.name = "table"
        return tape.op("MatMul", [x, value])

    lowered = lower(build(Loads(), constant), block_size=4)
    (tensor,) = (tensor for tensor in lowered.tensors if tensor.name == "weights/table")
    np.testing.assert_array_equal(tensor.load(), table)
    assert "weights/unused" not in {tensor.name for tensor in lowered.tensors}


def test_the_cache_layout_comes_from_the_attention_nodes() -> None:
    kv = lower(build(Loads()), block_size=8).kv
    assert (kv.block_size, kv.dtype) == (8, "float32")
    assert [(layer.num_kv_heads, layer.head_dim, layer.window) for layer in kv.layers] == [(2, 8, 7)]


def test_requirements_name_the_oldest_version() -> None:
    assert lower(build(Loads()), block_size=4).requirements == {"onnxruntime": ">=1.23"}


def test_a_node_without_a_kernel_fails_by_name_before_weights_are_read() -> None:
    loads = Loads()

    def exotic(tape: Tape, x: ir.Value, weight: Callable[..., ir.Value]) -> ir.Value:
        # ONNX knows bfloat16 products; ONNX Runtime has no CPU kernel for them.
        half = tape.op("Cast", [x], {"to": int(ir.DataType.BFLOAT16)})
        product = tape.op("Tanh", [half], name="culprit")
        return tape.op("Cast", [product], {"to": int(ir.DataType.FLOAT)})

    with pytest.raises(LoweringError, match=r"node 'culprit' onnx::Tanh: onnxruntime .* cannot run the graph"):
        lower(build(loads, exotic), block_size=4)
    assert set(loads.count.values()) == {0}


@pytest.mark.parametrize(
    ("domain", "sentence"),
    [
        ("elsewhere", "node 'culprit' elsewhere::Teleport: the onnxruntime target runs standard ONNX only"),
        ("", "node 'culprit' onnx::Teleport: onnxruntime .* cannot run the graph"),
    ],
)
def test_an_unknown_operator_fails_by_name(domain: str, sentence: str) -> None:
    def foreign(tape: Tape, x: ir.Value, weight: Callable[..., ir.Value]) -> ir.Value:
        return tape.op("Teleport", [x], domain=domain, name="culprit")

    model = build(Loads(), foreign)
    model.opset_imports["elsewhere"] = 1
    with pytest.raises(LoweringError, match=sentence):
        lower(model, block_size=4)


def test_lowering_without_onnxruntime_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"optimc\[build\]"):
        lower(build(Loads()), block_size=4)


def test_the_input_model_is_left_alone() -> None:
    model = build(Loads())
    before = str(model)
    lower(model, block_size=4)
    assert str(model) == before


def test_lowering_twice_gives_equal_bytes() -> None:
    first, second = (lower(build(Loads()), block_size=4) for _ in range(2))
    assert first.program == second.program
    for left, right in zip(first.tensors, second.tensors, strict=True):
        assert left.load().tobytes() == right.load().tobytes()


def lowering_options(**changes: Any) -> LoweringOptions:
    """Return options of a default recipe, with `changes`."""
    defaults = LoweringOptions(
        block_size=4,
        int8_activations=None,
        activation_scales="group",
        kv_dtype="float32",
        max_step_tokens=64,
        max_seqs=8,
    )
    return replace(defaults, **changes)


@pytest.mark.parametrize(("asked", "given"), [(None, False), (False, False), (True, True)])
def test_the_target_lowers_an_artifacts_graph_and_rounds_activations_only_when_asked(asked, given) -> None:
    checkpoint = Checkpoint("tiny", "0", None, WeightStore({}), TokenizerAssets(None, None), None, (), None)
    artifact = Artifact.start(checkpoint).evolve(graph=build(Loads()))
    lowered = TARGETS["onnxruntime"](artifact, lowering_options(int8_activations=asked))
    assert lowered.kv.block_size == 4
    assert lowered.program["int8_activations"] is given


@pytest.mark.parametrize(
    ("option", "value"), [("kv_dtype", "int8"), ("kv_dtype", "bfloat16"), ("activation_scales", "row")]
)
def test_what_the_target_has_not_is_refused_by_name_before_the_graph_is_looked_at(option, value) -> None:
    checkpoint = Checkpoint("tiny", "0", None, WeightStore({}), TokenizerAssets(None, None), None, (), None)
    options = lowering_options(**{option: value})
    assert list(check_options(options)) == [option]
    with pytest.raises(LoweringError, match=f"^{option}: the onnxruntime target .*{value}"):
        TARGETS["onnxruntime"](Artifact.start(checkpoint), options)
