"""Fused graphs equal unfused ones at 1e-5: the same float32 products, summed by another kernel."""

import numpy as np
import pytest

from optimc_passes.fuse.merge_qkv import MergeQkv
from optimc_passes.fuse.rule import NoOptions

TOLERANCE = 1e-5
MERGE = MergeQkv(NoOptions())
ROLES = ("q", "k", "v")


def names(layer):
    return [f"model.layers.{layer}.self_attn.{role}_proj.weight" for role in ROLES]


def quantize_all(decoder, quantized, layers=(0, 1), **scheme):
    return {name: quantized(decoder.arrays[name], **scheme) for layer in layers for name in names(layer)}


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_fires_once_per_layer_and_equals_the_original(tiny_decoder, fused, kv_heads, qk_norm):
    result = fused(MERGE, tiny_decoder(kv_heads=kv_heads, qk_norm=qk_norm))
    assert result.metrics == {"matched": 2, "declined": 0}
    assert result.count("Split") == 2
    assert result.count("MatMul") == 15 - 4
    assert result.error < TOLERANCE


def test_the_merged_weight_is_named_after_its_parts_and_replaces_them(tiny_decoder, fused):
    decoder = tiny_decoder()
    result = fused(MERGE, decoder)
    merged = result.graph.initializers["model.layers.0.self_attn.q_proj+k_proj+v_proj.weight"]
    expected = np.concatenate([decoder.arrays[name] for name in names(0)]).T
    assert np.array_equal(merged.const_value.numpy(), expected)
    assert not set(names(0)) & set(result.graph.initializers)


def test_biases_of_all_three_become_one(tiny_decoder, fused):
    decoder = tiny_decoder(biased=frozenset({"q_proj", "k_proj", "v_proj"}))
    result = fused(MERGE, decoder)
    assert "model.layers.1.self_attn.q_proj+k_proj+v_proj.bias" in result.graph.initializers
    # Two residual additions per layer, and now one bias per layer instead of three.
    assert result.count("Add") == 4 + 2
    assert result.error < TOLERANCE


def test_a_bias_of_one_alone_stays_its_own(tiny_decoder, fused):
    result = fused(MERGE, tiny_decoder(biased=frozenset({"q_proj"})))
    assert result.metrics["matched"] == 2
    assert result.count("Add") == 4 + 2
    assert result.error < TOLERANCE


@pytest.mark.parametrize("scheme", [{"bits": 4}, {"bits": 8}, {"symmetric": True}, {"group": 12}, {"group": 32}])
def test_weights_quantized_alike_are_joined_part_by_part(tiny_decoder, quantized, fused, scheme):
    decoder = tiny_decoder()
    result = fused(MERGE, decoder, quantize_all(decoder, quantized, **scheme))
    assert result.metrics == {"matched": 2, "declined": 0}
    assert result.count("DequantizeLinear") == 2
    assert result.error < TOLERANCE


def test_one_common_permutation_is_applied_once(tiny_decoder, quantized, fused):
    decoder = tiny_decoder()
    order = np.random.default_rng(1).permutation(32).astype(np.int32)
    before_gathers = 2
    result = fused(MERGE, decoder, quantize_all(decoder, quantized, permutation=order))
    assert result.metrics["matched"] == 2
    assert result.count("Gather") == before_gathers + 2
    assert result.error < TOLERANCE


def test_three_permutations_decline_with_the_reason(tiny_decoder, quantized, fused):
    decoder = tiny_decoder()
    rng = np.random.default_rng(1)
    changed = {
        name: quantized(decoder.arrays[name], permutation=rng.permutation(32).astype(np.int32))
        for layer in (0, 1)
        for name in names(layer)
    }
    result = fused(MERGE, decoder, changed)
    assert result.metrics == {"matched": 0, "declined": 2}
    assert "q_proj and k_proj are permuted differently" in result.decisions[0]
    assert result.error == 0


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ({"bits": 4}, {"bits": 8}, "q_proj is UINT4 asymmetric in groups of 16, v_proj is UINT8 asymmetric"),
        ({"group": 16}, {"group": 32}, "v_proj is UINT4 asymmetric in groups of 32"),
        ({"symmetric": True}, {"symmetric": False}, "q_proj is INT4 symmetric"),
    ],
)
def test_mixed_schemes_decline_with_both_of_them(tiny_decoder, quantized, fused, first, second, reason):
    decoder = tiny_decoder()
    q, k, v = names(0)
    changed = {name: quantized(decoder.arrays[name], **first) for name in (q, k)}
    changed[v] = quantized(decoder.arrays[v], **second)
    result = fused(MERGE, decoder, changed)
    assert result.metrics == {"matched": 1, "declined": 1}
    assert reason in result.decisions[0]
    assert result.error < TOLERANCE


def test_one_dense_among_quantized_declines(tiny_decoder, quantized, fused):
    decoder = tiny_decoder()
    changed = quantize_all(decoder, quantized, layers=(0,))
    del changed[names(0)[1]]
    result = fused(MERGE, decoder, changed)
    assert result.metrics == {"matched": 1, "declined": 1}
    assert "k_proj is dense" in result.decisions[0]
    assert result.error < TOLERANCE


def test_a_second_time_there_is_nothing_to_merge(tiny_decoder, fused):
    once = fused(MERGE, tiny_decoder())
    again = MERGE(once.outcome.artifact)
    assert again.report.metrics == {"matched": 0, "declined": 0}
    assert again.report.decisions[0].startswith("nothing to do at 2 sites")


def test_projections_of_different_inputs_decline(tiny_decoder, fused):
    decoder = tiny_decoder(layers=1)
    graph = decoder.model.graph
    normed = next(node for node in graph if node.op_type == "RMSNormalization")
    key = [node for node in graph if node.op_type == "MatMul"][1]
    key.replace_input_with(0, normed.inputs[0])
    result = fused(MERGE, decoder)
    assert result.metrics == {"matched": 0, "declined": 1}
    assert "q_proj and k_proj have different inputs" in result.decisions[0]


def test_a_weight_two_products_read_declines(tiny_decoder, fused):
    decoder = tiny_decoder(layers=1, kv_heads=4)
    products = [node for node in decoder.model.graph if node.op_type == "MatMul"]
    key, value = products[1], products[2]
    value.replace_input_with(1, key.inputs[1])
    decoder.arrays.pop(names(0)[2])
    decoder.model.graph.remove(
        next(node for node in decoder.model.graph if node.inputs[0].name == names(0)[2]), safe=True
    )
    decoder.model.graph.inputs.remove(next(v for v in decoder.model.graph.inputs if v.name == names(0)[2]))
    result = fused(MERGE, decoder)
    assert result.metrics == {"matched": 0, "declined": 1}
    assert "the weight of k_proj has another consumer" in result.decisions[0]


def test_names_are_not_looked_at(tiny_decoder, fused):
    decoder = tiny_decoder(layers=1)
    renamed = {name: f"p{index}" for index, name in enumerate(decoder.arrays)}
    for value in decoder.model.graph.inputs:
        value.name = renamed.get(value.name, value.name)
    decoder.arrays = {renamed[name]: array for name, array in decoder.arrays.items()}
    result = fused(MERGE, decoder)
    assert result.metrics == {"matched": 1, "declined": 0}
    assert result.error < TOLERANCE
