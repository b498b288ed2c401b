"""Quantized linears, whichever kernel ONNX Runtime picks, equal their dequantized weights in float32."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from optimc.plan import Plan
from optimc_passes.dialect import PagedAttention
from optimc_passes.emit.onnxruntime import lower
from optimc_runtime.executor.load import load_executor

INNER = 90
"""Input features of the layer under test; no multiple of any block."""


class Scheme:
    """Codes for one weight [C, N] and what they stand for."""

    def __init__(self, dtype: ir.DataType, group: int, symmetric: bool, features: int, outputs: int) -> None:
        rng = np.random.default_rng(3)
        bits = dtype.bitwidth
        low, high = (
            (-(1 << bits - 1), 1 << bits - 1) if dtype in (ir.DataType.INT4, ir.DataType.INT8) else (0, 1 << bits)
        )
        self.dtype, self.group = dtype, group
        self.codes = rng.integers(low, high, (features, outputs))
        groups = -(-features // group)
        self.scales = (rng.uniform(0.5, 1.5, (groups, outputs)) / high).astype(np.float32)
        # Without zero points ONNX takes 0, which is symmetric for signed codes only.
        self.zeros = None if symmetric else rng.integers(low, high, (groups, outputs))
        index = np.arange(features) // group
        self.dense = (self.codes - (0 if symmetric else self.zeros[index])).astype(np.float32) * self.scales[index]

    def initializers(self, name: str) -> Iterator[ir.Value]:
        for part, array in (("codes", self.codes), ("scales", self.scales), ("zeros", self.zeros)):
            if array is None:
                continue
            dtype = ir.DataType.FLOAT if part == "scales" else self.dtype
            tensor = ir.Tensor(array.astype(dtype.numpy()), dtype=dtype, name=f"{name}.{part}")
            yield ir.Value(name=tensor.name, shape=tensor.shape, type=ir.TensorType(dtype), const_value=tensor)


def quantize(model: ir.Model, weight: str, scheme: Scheme) -> None:
    """Replace the weight [C, N] of a MatMul by DequantizeLinear."""
    graph = model.graph
    old = graph.initializers[weight]
    parts = list(scheme.initializers(weight))
    for part in parts:
        graph.register_initializer(part)
    node = ir.node("DequantizeLinear", parts, {"axis": 0, "block_size": scheme.group})
    graph.insert_before(graph[0], node)
    old.replace_all_uses_with(node.outputs[0])
    del graph.initializers[weight]


@pytest.mark.parametrize(
    ("dtype", "group", "symmetric"),
    [
        (ir.DataType.INT4, 32, True),
        (ir.DataType.INT4, 64, True),
        (ir.DataType.INT4, 128, True),
        (ir.DataType.UINT4, 32, False),
        (ir.DataType.UINT4, 64, False),
        (ir.DataType.UINT4, 128, False),
        (ir.DataType.INT8, 32, True),
        (ir.DataType.UINT8, 64, False),
        # No fused kernel takes these: blocks that are no power of two, or below 16.
        (ir.DataType.UINT4, 48, False),
        (ir.DataType.UINT4, 8, False),
        (ir.DataType.INT8, 90, True),
    ],
    ids=lambda value: str(value),
)
def test_quantized_equals_dequantized(
    tiny_decoder: Any,
    write_lowered: Callable[..., Plan],
    cache_type: Any,
    tmp_path: Path,
    dtype: ir.DataType,
    group: int,
    symmetric: bool,
) -> None:
    # A group is never larger than the row: whoever attaches weights clips it.
    spec = PagedAttention(0, 10, 5, 15, 0.3) if group == 128 else PagedAttention(0, 6, 3, 15, 0.3)
    decoder = tiny_decoder(spec)
    assert spec.q_width % group or group == INNER
    scheme = Scheme(dtype, group, symmetric, spec.q_width, 32)
    decoder.weights["0.o"] = scheme.dense / np.float32(4)
    scheme.scales /= np.float32(4)
    model = decoder.graph()
    quantize(model, "0.o", scheme)
    executor = load_executor(write_lowered(tmp_path / "engine.plan", lower(model, block_size=4)), threads=1)
    tokens = np.arange(9)
    expected = decoder.forward(tokens)
    cache = cache_type(32, 4)
    found = [
        executor.execute(cache.step([("a", tokens[:8])])).logits,  # Many rows and one row use different kernels.
        executor.execute(cache.step([("a", tokens[8:])])).logits,
        executor.execute(cache_type(32, 4).step([("b", tokens)], rows=[])).logits,
    ]
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-4)


def test_quantized_embedding_rows_share_their_codes_with_a_head(
    tiny_decoder: Any, write_lowered: Callable[..., Plan], cache_type: Any, tmp_path: Path
) -> None:
    decoder = tiny_decoder(PagedAttention(0, 4, 2, 8, 0.35))
    scheme = Scheme(ir.DataType.UINT4, 16, False, 32, 50)
    decoder.weights["embed"] = np.ascontiguousarray(scheme.dense.T)
    model = decoder.graph()
    old = model.graph.initializers["embed"]
    parts = list(scheme.initializers("embed"))
    for part in parts:
        model.graph.register_initializer(part)
    dense = ir.node("DequantizeLinear", parts, {"axis": 0, "block_size": 16})
    rows = ir.node("Transpose", [dense.outputs[0]], {"perm": [1, 0]})
    model.graph.insert_before(model.graph[0], [dense, rows])
    old.replace_all_uses_with(rows.outputs[0])
    del model.graph.initializers["embed"]
    executor = load_executor(write_lowered(tmp_path / "engine.plan", lower(model, block_size=4)), threads=1)
    tokens = np.arange(9)
    found = executor.execute(cache_type(32, 4).step([("a", tokens)])).logits
    expected = decoder.forward(tokens)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_activations_are_rounded_only_when_asked(
    tiny_decoder: Any, write_lowered: Callable[..., Plan], cache_type: Any, tmp_path: Path
) -> None:
    decoder = tiny_decoder(PagedAttention(0, 4, 2, 16, 0.35))
    scheme = Scheme(ir.DataType.INT4, 32, True, 64, 32)
    decoder.weights["0.o"] = scheme.dense
    model = decoder.graph()
    quantize(model, "0.o", scheme)
    tokens = np.arange(9)
    expected = decoder.forward(tokens)
    errors = {}
    for int8 in (False, True):
        lowered = lower(model, block_size=4, int8_activations=int8)
        executor = load_executor(write_lowered(tmp_path / f"{int8}.plan", lowered), threads=1)
        found = executor.execute(cache_type(32, 4).step([("a", tokens)])).logits
        errors[int8] = np.abs(found - expected).max()
    assert errors[False] < 1e-4
    assert errors[False] < errors[True] < 1.0


def test_onnxruntime_fuses_the_blocks_we_ship(tmp_path: Path) -> None:
    """The claim in the lowering's description, asked of ONNX Runtime itself."""
    import onnxruntime

    for dtype, group, symmetric in (
        (ir.DataType.UINT4, 64, False),
        (ir.DataType.INT4, 32, True),
        (ir.DataType.INT8, 64, True),
    ):
        scheme = Scheme(dtype, group, symmetric, INNER, 32)
        parts = list(scheme.initializers("w"))
        x = ir.Value(name="x", shape=ir.Shape(["T", INNER]), type=ir.TensorType(ir.DataType.FLOAT))
        dense = ir.node("DequantizeLinear", parts, {"axis": 0, "block_size": group})
        product = ir.node("MatMul", [x, dense.outputs[0]])
        product.outputs[0].type = x.type
        graph = ir.Graph(
            [x], product.outputs, nodes=[dense, product], initializers=parts, opset_imports={"": 23}, name="g"
        )
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        options.log_severity_level = 3
        proto = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
        onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
        optimized = onnx.load(tmp_path / "optimized.onnx")
        assert [node.op_type for node in optimized.graph.node] == ["MatMulNBits"]
