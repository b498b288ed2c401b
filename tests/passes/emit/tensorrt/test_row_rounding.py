"""Inputs of products rounded to 8 bits, one scale per row, in operators whose scales are constants."""

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from optimc_passes.emit.kv_layout import kv_layout
from optimc_passes.emit.tensorrt.network_graph import network_graph
from optimc_passes.emit.tensorrt.row_rounding import round_rows
from optimc_passes.graph.attach import attach_weights

PRODUCT = """<ir_version: 10, opset_import: ["" : 23]>
g (float[T, 64] x) => (float[T, 8] y) <int8[64, 8] codes, float[1, 8] scales> {
    w = DequantizeLinear<axis: int = 0, block_size: int = 64>(codes, scales)
    [product] y = MatMul(x, w)
}"""


def test_codes_are_those_of_a_scale_per_row(run):
    rng = np.random.default_rng(0)
    model = ir.from_proto(onnx.parser.parse_model(PRODUCT))
    weight = rng.integers(-127, 128, (64, 8)).astype(np.int8)
    scales = rng.uniform(0.01, 0.02, (1, 8)).astype(np.float32)
    for name, array in (("codes", weight), ("scales", scales)):
        value = next(value for node in model.graph for value in node.inputs if value.name == name)
        value.const_value = ir.tensor(array, name=name)
        model.graph.initializers[name] = value
    round_rows(model)
    x = rng.standard_normal((6, 64)).astype(np.float32) * np.float32([[1e-6], [1], [1e4], [30000], [0], [1]])
    x[5, 7] = 100
    unit = np.abs(x).max(axis=1, keepdims=True).astype(np.float64) / 127
    codes = np.clip(np.round(x / np.where(unit > 0, unit, 1)), -127, 127)
    expected = (codes @ weight.astype(np.float64)) * unit * scales
    got = run(model, {"x": x})["y"]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max(axis=1).max())
    for row in range(6):
        assert np.abs(got[row] - expected[row]).max() <= 1e-5 * np.abs(expected[row]).max()


@pytest.fixture(scope="session")
def int8_decoder(tiny_decoder, quantized, fuse_all):
    """A decoder whose matrices have 8 bits, `group` features to a scale; 9999: all of them."""

    def make(group, **options):
        decoder = tiny_decoder(hidden=64, head_dim=16, intermediate=96)
        rounded = {
            name: quantized(array, bits=8, group=min(group, array.shape[1]), **{"symmetric": True, **options})
            for name, array in decoder.arrays.items()
            if array.ndim == 2
        }
        return fuse_all(attach_weights(decoder.model, decoder.store.replace(rounded)))

    return make


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_model_loses_what_8_bits_lose(int8_decoder, serve, reference, build, symmetric):
    model = int8_decoder(9999, symmetric=symmetric)
    tokens = np.random.default_rng(1).integers(0, 48, 30)
    expected = reference(model, tokens)
    served = serve(model, int8_rows=True)
    error = np.abs(served.call({"a": tokens}) - expected).max() / np.abs(expected).max()
    # Half a code of 127 is 0.4 % of a row's largest element, which is some three times the others.
    assert 2e-3 < error < 4e-2
    counts = Counter(node.op_type for node in served.graph.model.graph)
    assert counts["QuantizeLinear"] == 2 * 4 + 1
    assert build(served.graph.model, profiles=("decode",))


def test_weights_in_groups_multiply_unrounded_rows(int8_decoder):
    model = int8_decoder(32)
    kv = kv_layout(model, 4, "float16")
    graph = network_graph(model, precision="float16", kv=kv, hidden=False, int8_rows=True).model.graph
    assert not any(node.op_type == "QuantizeLinear" for node in graph)
