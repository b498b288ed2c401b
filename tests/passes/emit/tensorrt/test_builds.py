"""TensorRT-RTX parses and builds every graph we give it, and its plans prove that weights stay packed.

No plan has been executed: that takes a GPU.
"""

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from optimc_passes.emit.kv_layout import kv_layout
from optimc_passes.emit.tensorrt.heads_graph import heads_graph
from optimc_passes.emit.tensorrt.network_graph import network_graph
from optimc_passes.graph.attach import attach_weights

pytest.importorskip("tensorrt_rtx")


def graph_of(model, precision="float16", kv=None, hidden=False):
    layout = kv_layout(model, 4, kv or precision)
    return network_graph(model, precision=precision, kv=layout, hidden=hidden).model


def test_every_architecture_builds(case, build):
    assert build(graph_of(case.fused))


@pytest.mark.parametrize(("precision", "kv"), [("float16", "int8"), ("bfloat16", "bfloat16"), ("bfloat16", "int8")])
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # fused attention, and primitives with a soft cap
def test_every_pool_builds(make_case, build, family, precision, kv):
    assert build(graph_of(make_case(family).fused, precision, kv, hidden=True), profiles=("decode",))


@pytest.mark.parametrize("unfused", ["qwen3", "granite"])
def test_a_graph_no_pass_has_touched_builds(make_case, build, unfused):
    assert build(graph_of(make_case(unfused).attached))


SCHEMES = {
    "dense": (None, 2.0),
    "4-bit": ({"bits": 4, "group": 64, "symmetric": True}, 0.5 + 2 / 64),
    "4-bit-asymmetric": ({"bits": 4, "group": 64}, 0.5 + 4 / 64),
    "3-bit-permuted": ({"bits": 3, "group": 64, "symmetric": True, "permuted": True}, 0.5 + 2 / 64),
    "4-bit-long-groups": ({"bits": 4, "group": 512, "symmetric": True}, 0.5 + 2 / 128),
    "8-bit-asymmetric": ({"bits": 8, "group": 64}, 1.0 + 4 / 64),
    "8-bit": ({"bits": 8, "group": 9999, "symmetric": True}, 1.0),
    "w8a8": ({"bits": 8, "group": 9999, "symmetric": True, "activation_scale": 0.03}, 1.0),
}
"""Scheme, and bytes a weight: codes, a scale a group, and a mean's weight a block where there are zero points."""


@pytest.fixture(scope="module")
def sized(tiny_decoder, quantized, fuse_all, build):
    """Bytes of the plan of one layer whose gate, up and down are quantized, and how many weights that are."""

    def make(scheme, intermediate):
        decoder = tiny_decoder(layers=1, hidden=512, head_dim=64, heads=2, kv_heads=1, intermediate=intermediate)
        changed = {}
        for name, array in decoder.arrays.items():
            if scheme is not None and ".mlp." in name:
                options = dict(scheme)
                permuted, scale = options.pop("permuted", False), options.pop("activation_scale", None)
                order = np.random.default_rng(0).permutation(array.shape[1]).astype(np.int32) if permuted else None
                options["group"] = min(options["group"], array.shape[1])
                weight = quantized(array, **options, permutation=order)
                changed[name] = replace(weight, activation_scale=scale)
        model = fuse_all(attach_weights(decoder.model, decoder.store.replace(changed)))
        weights = sum(array.size for name, array in decoder.arrays.items() if ".mlp." in name)
        return len(build(graph_of(model), profiles=("decode",))), weights

    return make


@pytest.mark.parametrize("name", list(SCHEMES))
def test_plans_hold_weights_packed(sized, name):
    """Two sizes of a layer: what their plans differ by is weights, and not the kernels both hold."""
    scheme, bytes_each = SCHEMES[name]
    (small, few), (large, many) = (sized(scheme, intermediate) for intermediate in (1024, 4096))
    # Kernels for other shapes differ by some 10 kB.
    assert (large - small) / (many - few) == pytest.approx(bytes_each, rel=0.03)


def test_a_tied_table_lies_in_the_plan_once(tiny_decoder, fuse_all, build):
    sizes = {}
    for tied in (True, False):
        decoder = tiny_decoder(layers=1, hidden=64, head_dim=16, vocab=16384, tied=tied)
        sizes[tied] = len(build(graph_of(fuse_all(attach_weights(decoder.model, decoder.store)))))
    assert sizes[False] - sizes[True] == pytest.approx(2 * 64 * 16384, rel=0.05)


@pytest.mark.parametrize("tied", [True, False])
def test_a_quantized_table_and_head_build(tiny_decoder, quantized, fuse_all, build, tied):
    decoder = tiny_decoder(layers=1, hidden=64, head_dim=16, tied=tied)
    names = [name for name in decoder.arrays if "embed" in name or "lm_head" in name]
    rounded = {name: quantized(decoder.arrays[name], bits=4, group=32) for name in names}
    assert build(graph_of(fuse_all(attach_weights(decoder.model, decoder.store.replace(rounded)))))


@pytest.mark.parametrize("variant", ["conditioned-shared-whole", "plain-own-part", "plain-shared-part-deep"])
@pytest.mark.parametrize("bits", [None, 4])
def test_heads_build(tiny_decoder, quantized, heads_tests, build, variant, bits):
    decoder = tiny_decoder(vocab=heads_tests.VOCAB, hidden=heads_tests.HIDDEN, tied=True)
    model = attach_weights(decoder.model, decoder.store)
    rounded = None if bits is None else lambda array: quantized(array, bits=bits, group=16)
    table = decoder.store["model.embed_tokens.weight"]
    heads = heads_tests.make_heads(rounded, output_head=table, **heads_tests.VARIANTS[variant])
    assert build(heads_graph(heads, model, precision="float16"), profiles=("draft",))


def test_what_does_not_build_is_seen(make_case, build):
    model = graph_of(make_case("qwen3").fused)
    attention = next(node for node in model.graph if node.op_type == "Attention")
    attention.attributes["softcap"] = ir.AttrFloat32("softcap", 2.0)
    with pytest.raises(AssertionError, match="softcap"):
        build(model)
