"""Activations with a static scale are rounded to codes before the product, and codes are multiplied."""

import re
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from optimc.errors import LoweringError
from optimc_passes.emit.kv_layout import kv_layout
from optimc_passes.emit.tensorrt.network_graph import network_graph
from optimc_passes.graph.attach import attach_weights

TOKENS = np.random.default_rng(1).integers(0, 48, 30)
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"


@pytest.fixture(scope="session")
def w8a8(tiny_decoder, quantized, fuse_all):
    """Layer 0 with int8 weights per output feature and static scales; layer 1 stays dense."""

    def make(scale=0.03, permuted=False, **options):
        decoder = tiny_decoder(hidden=64, head_dim=16, intermediate=96)
        changed = {}
        for short in ("q", "k", "v", "o", "gate", "up", "down"):
            name = f"{ATTENTION if short in 'qkvo' else MLP}.{short}_proj.weight"
            array = decoder.arrays[name]
            order = np.random.default_rng(2).permutation(array.shape[1]).astype(np.int32) if permuted else None
            scheme = {"symmetric": True, "group": array.shape[1], **options}
            weight = quantized(array, bits=8, permutation=order, **scheme)
            changed[name] = replace(weight, activation_scale=scale)
        return fuse_all(attach_weights(decoder.model, decoder.store.replace(changed)))

    return make


@pytest.mark.parametrize("options", [{}, {"symmetric": False}, {"permuted": True}, {"group": 32}])
@pytest.mark.usefixtures("in_float32")
def test_products_of_codes_are_the_dialects(w8a8, serve, reference, options):
    model = w8a8(**options)
    expected = reference(model, TOKENS)
    error = np.abs(serve(model).call({"a": TOKENS}) - expected) / np.abs(expected).max()
    # A sum in another order may fall on the other side of a tie: one code of 127, of one feature.
    assert error.max() < 5e-3
    assert np.median(error) < 1e-6


def test_codes_are_of_what_the_product_reads_and_their_sums_are_never_half(w8a8):
    """float16 ends at 65504, which is four products of the largest codes."""
    model = w8a8()
    graph = network_graph(model, precision="float16", kv=kv_layout(model, 4, "float16"), hidden=False).model.graph
    rounding = [node for node in graph if node.op_type == "QuantizeLinear"]
    assert len(rounding) == 4, "what q, k, v read; what o reads; what gate, up read; what down reads"
    for node in rounding:
        assert node.inputs[1].dtype == node.inputs[0].dtype == ir.DataType.FLOAT
        ((back, _),) = node.outputs[0].uses()
        assert (back.op_type, back.outputs[0].dtype) == ("DequantizeLinear", ir.DataType.FLOAT)
        ((product, _),) = back.outputs[0].uses()
        weight = product.inputs[1].producer()
        assert (weight.op_type, weight.inputs[0].dtype) == ("DequantizeLinear", ir.DataType.INT8)
        assert weight.attributes["axis"].as_int() == 1
        assert weight.inputs[1].shape.rank() == 1, "one scale per output feature: integer products exist for that"
        assert product.outputs[0].dtype == weight.outputs[0].dtype == ir.DataType.FLOAT


def test_tensorrt_multiplies_the_codes(w8a8, build):
    """What its products read are the codes themselves, of layer 0's four weights, and not what they stand for."""
    model = w8a8()
    kv = kv_layout(model, 4, "float16")
    plan = build(network_graph(model, precision="float16", kv=kv, hidden=False).model, profiles=("decode",))
    operands = re.findall(rb'fully_connected=\{ name="[^"]*" output=\{[^}]*\} input=\{([^}]*)\}', plan)
    assert sum(b".codes_constantInt8" in names for names in operands) == 4


def test_with_weights_in_groups_products_are_half(w8a8):
    model = w8a8(group=32)
    graph = network_graph(model, precision="float16", kv=kv_layout(model, 4, "float16"), hidden=False).model.graph
    back = [node for node in graph if node.op_type == "DequantizeLinear"]
    assert {node.outputs[0].dtype for node in back} == {ir.DataType.FLOAT16}
    products = [node for node in graph if (node.name or "").endswith(".from_sums/Cast")]
    assert len(products) == 2 * 4 + 1, "as all products of float16"


def test_a_scale_float16_has_no_number_for_is_refused(w8a8):
    model = w8a8(scale=1e-7, group=32)
    kv = kv_layout(model, 4, "float16")
    with pytest.raises(LoweringError, match=r"scale.float16: FLOAT16 cannot hold 1e-07; use precision bfloat16"):
        network_graph(model, precision="float16", kv=kv, hidden=False)
    network_graph(model, precision="bfloat16", kv=kv, hidden=False)
    network_graph(w8a8(scale=1e-7), precision="float16", kv=kv, hidden=False)
