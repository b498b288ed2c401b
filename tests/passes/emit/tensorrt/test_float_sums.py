"""Products of float16 are added up in float32: TensorRT takes the casts around them for that, and its plans say so."""

import re
from dataclasses import replace

import onnx_ir as ir
import pytest

from optimc_passes.emit.kv_layout import kv_layout
from optimc_passes.emit.tensorrt.network_graph import network_graph
from optimc_passes.graph.attach import attach_weights

ANY, FLOAT32 = "0", "2"
"""What plans call the type of sums."""


@pytest.fixture(scope="session")
def graph_of(tiny_decoder, quantized, fuse_all):
    """The graph of a layer whose matrices are quantized by a scheme."""

    def make(scheme, precision="float16", fused=True):
        decoder = tiny_decoder(layers=1, hidden=256, head_dim=64, intermediate=512, tied=True)
        rounded = {}
        for name, array in decoder.arrays.items():
            if scheme is not None and array.ndim == 2 and "embed" not in name:
                options = dict(scheme)
                scale = options.pop("activation_scale", None)
                weight = quantized(array, **{**options, "group": min(options["group"], array.shape[1])})
                rounded[name] = replace(weight, activation_scale=scale)
        model = attach_weights(decoder.model, decoder.store.replace(rounded))
        model = fuse_all(model) if fused else model
        kv = kv_layout(model, 4, precision)
        return network_graph(model, precision=precision, kv=kv, hidden=False).model

    return make


def sums_of(plan):
    """The type of each product's sums in a plan, by the name of its node."""
    found = re.findall(rb'fully_connected=\{ name=.*?accumulation_type=(\d).*?layers="\[ONNX Layer: ([^\]]*)\]', plan)
    return {name.decode(): kind.decode() for kind, name in found}


def products(graph):
    return {node.name for node in graph if node.op_type == "MatMul"}


SCHEMES = {
    "dense": None,
    "4-bit": {"bits": 4, "group": 32, "symmetric": True},
    "4-bit-asymmetric": {"bits": 4, "group": 32},
    "8-bit": {"bits": 8, "group": 9999, "symmetric": True},
}


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_every_product_of_a_plan_adds_up_in_float32_and_bears_our_name(graph_of, build, scheme):
    model = graph_of(SCHEMES[scheme])
    assert sums_of(build(model, profiles=("decode",))) == dict.fromkeys(products(model.graph), FLOAT32)


@pytest.mark.parametrize("scheme", ["dense", "4-bit"])
def test_siblings_that_tensorrt_joins_do_too_and_stay_half(graph_of, build, scheme):
    model = graph_of(SCHEMES[scheme], fused=False)
    plan = build(model, profiles=("decode",))
    assert set(sums_of(plan).values()) == {FLOAT32}
    constants = [int(size) for size in re.findall(rb"const_payload_size=(\d+)", plan)]
    assert max(constants) == (2 if scheme == "dense" else 0.5) * 2 * 256 * 512, "gate and up beside each other"


def test_without_the_casts_it_would_not(graph_of, build):
    model = graph_of(None)
    for node in tuple(model.graph):
        if node.op_type == "Cast" and node.outputs[0].name.endswith("_sums"):
            ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
            model.graph.remove(node, safe=True)
    for node in model.graph:
        if node.op_type == "MatMul":
            node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT16)
    assert sums_of(build(model, profiles=("decode",))) == dict.fromkeys(products(model.graph), ANY)


def test_products_of_codes_have_integer_sums_and_those_of_bfloat16_no_choice(graph_of):
    both = {"bits": 8, "group": 9999, "symmetric": True, "activation_scale": 0.03}
    for model, count in ((graph_of(both), 1), (graph_of(None, "bfloat16"), 0), (graph_of(None), 5)):
        surrounded = [node for node in model.graph if (node.name or "").endswith(".from_sums/Cast")]
        assert len(surrounded) == count, "q+k+v, o, gate+up and down, and the head, which is dense in all of them"
