"""Quantized weights stay codes, whatever their groups and zero points, and multiply as they did."""

import functools
from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest

from optimc.errors import LoweringError
from optimc_passes.emit.kv_layout import kv_layout
from optimc_passes.emit.tensorrt.block_codes import (
    block_of,
    dequantized,
    mean_weights,
    of_blocks,
    signed_codes,
)
from optimc_passes.emit.tensorrt.network_graph import network_graph
from optimc_passes.graph.attach import attach_weights
from optimc_passes.quantize.affine import quantize_affine

EXACT = 1e-5
"""Of the largest logit: float32 sums in another order."""

SCHEMES = {
    "4-bit": {"bits": 4, "group": 16, "symmetric": True},
    "4-bit-asymmetric": {"bits": 4, "group": 32},
    "3-bit-asymmetric": {"bits": 3, "group": 32},
    "2-bit": {"bits": 2, "group": 16, "symmetric": True},
    "2-bit-asymmetric": {"bits": 2, "group": 16},
    "8-bit-rows": {"bits": 8, "group": 1024, "symmetric": True},
    "8-bit-rows-asymmetric": {"bits": 8, "group": 1024},
    "8-bit-groups-asymmetric": {"bits": 8, "group": 32},
    "6-bit-asymmetric": {"bits": 6, "group": 32},
    "ragged-groups": {"bits": 4, "group": 48},
    "one-group": {"bits": 4, "group": 512},
    "permuted": {"bits": 4, "group": 32, "symmetric": True, "permuted": True},
    "permuted-asymmetric": {"bits": 4, "group": 32, "permuted": True},
}
TOKENS = np.random.default_rng(1).integers(0, 48, 30)


@pytest.fixture(scope="session")
def rounded_decoder(tiny_decoder, quantized, fuse_all):
    """A decoder all of whose matrices are quantized by a scheme: `rounded_decoder(scheme, tied=False, fused=True)`."""

    @functools.cache
    def make(scheme, *, tied=False, fused=True):
        decoder = tiny_decoder(hidden=64, head_dim=16, intermediate=96, tied=tied)
        options = dict(SCHEMES[scheme])
        permuted = options.pop("permuted", False)

        def rounded(array):
            order = np.random.default_rng(0).permutation(array.shape[1]).astype(np.int32)
            return quantized(array, **options, permutation=order if permuted else None)

        matrices = {name: rounded(array) for name, array in decoder.arrays.items() if array.ndim == 2}
        model = attach_weights(decoder.model, decoder.store.replace(matrices))
        return fuse_all(model) if fused else model

    return make


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("scheme", list(SCHEMES))
@pytest.mark.parametrize("tied", [False, True])
def test_packed_products_are_the_dialects(rounded_decoder, serve, reference, scheme, tied):
    for fused in (False, True):
        model = rounded_decoder(scheme, tied=tied, fused=fused)
        expected = reference(model, TOKENS)
        got = serve(model).call({"a": TOKENS})
        assert np.abs(got - expected).max() < EXACT * np.abs(expected).max()


@pytest.mark.parametrize("scheme", ["4-bit", "4-bit-asymmetric", "8-bit-rows", "permuted-asymmetric"])
def test_in_half_packed_products_lose_what_dense_ones_do(rounded_decoder, serve, reference, scheme):
    model = rounded_decoder(scheme)
    expected = reference(model, TOKENS)
    got = serve(model).call({"a": TOKENS})
    # float16 rounds by at most 5e-4; two layers of ten such roundings in a row, most of which cancel.
    assert np.abs(got - expected).max() < 4e-3 * np.abs(expected).max()


@pytest.mark.parametrize("scheme", list(SCHEMES))
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_codes_are_stored_as_codes_without_zero_points(rounded_decoder, scheme, precision):
    model = rounded_decoder(scheme)
    graph = network_graph(model, precision=precision, kv=kv_layout(model, 4, precision), hidden=False).model.graph
    codes = ir.DataType.INT4 if SCHEMES[scheme]["bits"] <= 4 else ir.DataType.INT8
    dequantized_weights = [node for node in graph if node.op_type == "DequantizeLinear"]
    assert len(dequantized_weights) == 2 * 4 + 1, "each layer's q+k+v, o, gate+up and down, and the head"
    for node in dequantized_weights:
        assert [value.dtype.name.lower() for value in node.inputs[1:]] == [precision]
        assert node.inputs[0].dtype == node.inputs[0].const_value.dtype == codes
    matrices = {name: value for name, value in graph.initializers.items() if value.shape.rank() == 2}
    floating = {name: value.dtype.name.lower() for name, value in matrices.items() if value.dtype != codes}
    assert set(floating.values()) == {precision}, "no matrix is float32"
    parts = {name.split(".")[-2] for name in floating if "embed" not in name}
    assert parts <= {"scales", "mean_weights"}
    assert ("mean_weights" in parts) == ("symmetric" not in SCHEMES[scheme])


@pytest.mark.parametrize(
    ("scheme", "bits"), [("3-bit-asymmetric", 3), ("2-bit-asymmetric", 2), ("6-bit-asymmetric", 6)]
)
def test_codes_of_few_bits_lie_around_zero(rounded_decoder, scheme, bits):
    """Else both products would be large and cancel each other."""
    model = rounded_decoder(scheme)
    graph = network_graph(model, precision="float16", kv=kv_layout(model, 4, "float16"), hidden=False).model.graph
    for node in graph:
        if node.op_type == "DequantizeLinear":
            codes = node.inputs[0].const_value.numpy().astype(int)
            assert (codes.min(), codes.max()) == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [16, 32, 48, 96])
def test_the_rewrite_of_zero_points_is_exact(bits, group):
    """In float64, where no product and no sum of these rounds."""
    rng = np.random.default_rng(bits * group)
    features, outputs = 96, 8
    weight = rng.standard_normal((outputs, features)).astype(np.float32) + rng.standard_normal((outputs, 1)) * 2
    codes, scales, zeros = (part.T for part in quantize_affine(weight.astype(np.float32), bits, group, symmetric=False))
    zeros = rng.integers(0, 2**bits, zeros.shape).astype(np.uint8)  # as far off the middle as they come
    block = block_of(group, features, 4 if bits < 8 else 8)
    of_block = [of_blocks(part, group, block, features) for part in (scales, zeros)]
    signed = signed_codes(codes, bits)
    assert signed.min() >= -(2 ** (bits - 1))
    assert signed.max() < 2 ** (bits - 1)
    x = rng.integers(-1000, 1000, (5, features)).astype(np.float64)
    first = x @ dequantized(signed, of_block[0], None, block).astype(np.float64)
    means = x.reshape(5, features // block, block).sum(axis=-1) / block
    second = means @ mean_weights(*of_block, block, bits).astype(np.float64)
    expected = x @ dequantized(codes, scales, zeros, group).astype(np.float64)
    np.testing.assert_allclose(first + second, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("group", "features", "bits", "block"),
    [
        (128, 4096, 4, 128),
        (64, 4096, 4, 64),
        (256, 4096, 4, 128),
        (4096, 4096, 4, 128),
        (32, 4096, 4, 32),
        (96, 4128, 4, 32),
        (128, 4128, 4, 32),  # the last group has 32 features
        (48, 96, 4, 16),
        (8, 4096, 4, None),
        (40, 100, 4, None),
        (128, 4096, 8, 128),
        (512, 4096, 8, 128),
        (4096, 4096, 8, 4096),
        (9999, 100, 8, 100),
    ],
)
def test_blocks_hold_groups_exactly(group, features, bits, block):
    assert block_of(group, features, bits) == block
    if block is not None:
        of_block = of_blocks(np.arange(-(-features // group))[:, None], group, block, features)[:, 0]
        np.testing.assert_array_equal(np.repeat(of_block, block), np.arange(features) // min(group, features))


def test_groups_that_fit_no_block_are_refused_by_the_products_name(tiny_decoder, quantized):
    decoder = tiny_decoder(hidden=64, head_dim=16, intermediate=96)
    name = "model.layers.1.mlp.down_proj.weight"
    store = decoder.store.replace({name: quantized(decoder.arrays[name], bits=4, group=40)})
    model = attach_weights(decoder.model, store)
    ((product, _),) = next(n for n in model.graph if n.outputs[0].name == f"{name}.dequantized").outputs[0].uses()
    with pytest.raises(LoweringError) as error:
        network_graph(model, precision="float16", kv=kv_layout(model, 4, "float16"), hidden=False)
    assert str(error.value) == (
        f"node '{product.name}': groups of 40 over 96 features have no blocks of 16 or more features in common; use a "
        "group_size that has, or add it to ignore"
    )


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("bits", [(3, 4), (4, 3), (2, 4), (4, 2)])
def test_joined_weights_of_unequal_bits_have_the_middle_of_the_widest(
    tiny_decoder, quantized, fuse_all, serve, reference, bits
):
    """One type holds 2 to 4 bits, so q, k and v are joined whatever each has of them."""
    decoder = tiny_decoder(hidden=64, head_dim=16, intermediate=96)
    first, others = bits
    rounded = {
        name: quantized(array, bits=first if "q_proj" in name or "gate_proj" in name else others, group=32)
        for name, array in decoder.arrays.items()
        if "proj" in name
    }
    model = fuse_all(attach_weights(decoder.model, decoder.store.replace(rounded)))
    expected = reference(model, TOKENS)
    got = serve(model).call({"a": TOKENS})
    assert np.abs(got - expected).max() < EXACT * np.abs(expected).max()


def test_means_are_computed_once_for_all_who_read_a_value(rounded_decoder):
    model = rounded_decoder("4-bit-asymmetric", fused=False)
    graph = network_graph(model, precision="float16", kv=kv_layout(model, 4, "float16"), hidden=False).model.graph
    counts = Counter(node.op_type for node in graph)
    # Of q, k, v; of o; of gate, up; of down, in each layer, and of the head.
    assert counts["ReduceMean"] == 2 * 4 + 1
    assert counts["DequantizeLinear"] == 2 * 7 + 1
    assert counts["MatMul"] == 2 * counts["DequantizeLinear"]


def test_a_permuted_weight_permutes_its_activations_once_and_in_half(rounded_decoder):
    model = rounded_decoder("permuted")
    graph = network_graph(model, precision="float16", kv=kv_layout(model, 4, "float16"), hidden=False).model.graph
    gathers = [node for node in graph if node.op_type == "Gather" and node.attributes.get_int("axis", 0) == -1]
    assert len(gathers) == 2 * 4 + 1
    assert {node.outputs[0].dtype for node in gathers} == {ir.DataType.FLOAT16}


def test_a_quantized_table_is_dequantized_once_and_a_tied_head_keeps_its_codes(rounded_decoder):
    for tied in (False, True):
        model = rounded_decoder("4-bit", tied=tied)
        graph = network_graph(model, precision="float16", kv=kv_layout(model, 4, "float16"), hidden=False).model.graph
        (lookup,) = (node for node in graph if node.op_type == "Gather" and node.inputs[1].name == "input_ids")
        source = lookup.inputs[0].producer() or lookup
        assert source.inputs[0].dtype == ir.DataType.FLOAT16
        assert sorted(source.inputs[0].const_value.shape) == [48, 64]
        head = next(node for node in reversed(graph) if node.op_type == "MatMul")
        wide = head.inputs[1].producer()  # for its sums
        assert wide.inputs[0].producer().op_type == "DequantizeLinear"


def test_a_dense_tied_table_is_stored_once(tiny_decoder, fuse_all):
    decoder = tiny_decoder(tied=True)
    model = fuse_all(attach_weights(decoder.model, decoder.store))
    graph = network_graph(model, precision="float16", kv=kv_layout(model, 4, "float16"), hidden=False).model.graph
    tables = [name for name, value in graph.initializers.items() if sorted(value.const_value.shape) == [32, 48]]
    tables = [name for name in tables if "embed" in name]
    assert tables == ["model.embed_tokens.weight.float16"]
    readers = Counter(node.op_type for node, _ in graph.initializers[tables[0]].uses())
    assert readers == {"Gather": 1, "Transpose": 1}


def test_a_scale_float16_has_no_number_for_is_named_when_it_is_read(tiny_decoder, quantized):
    decoder = tiny_decoder(hidden=64, head_dim=16)
    name = "lm_head.weight"
    weight = quantized(decoder.arrays[name] * np.float32(1e-6), bits=4, group=32, symmetric=True)
    model = attach_weights(decoder.model, decoder.store.replace({name: weight}))
    graph = network_graph(model, precision="float16", kv=kv_layout(model, 4, "float16"), hidden=False).model.graph
    with pytest.raises(LoweringError, match=r"lm_head.weight.scales.float16: .* cannot hold .*; use precision bf"):
        graph.initializers["lm_head.weight.scales.float16"].const_value.numpy()
