"""Fused graphs equal unfused ones at 1e-5: the same float32 products, summed by another kernel."""

import numpy as np
import pytest

from optimc_passes.fuse.merge_gate_up import MergeGateUp
from optimc_passes.fuse.rule import NoOptions

TOLERANCE = 1e-5
MERGE = MergeGateUp(NoOptions())
GATE0, UP0 = (f"model.layers.0.mlp.{role}_proj.weight" for role in ("gate", "up"))


@pytest.mark.parametrize("biased", [(), ("gate_proj", "up_proj"), ("up_proj",)])
def test_fires_once_per_layer_and_equals_the_original(tiny_decoder, fused, biased):
    result = fused(MERGE, tiny_decoder(biased=frozenset(biased)))
    assert result.metrics == {"matched": 2, "declined": 0}
    assert result.count("MatMul") == 15 - 2
    assert result.count("Split") == 2
    assert "model.layers.1.mlp.gate_proj+up_proj.weight" in result.graph.initializers
    assert result.error < TOLERANCE


def test_an_eightfold_range_gap_between_the_two_is_kept(tiny_decoder, quantized, fused):
    decoder = tiny_decoder()
    decoder.arrays[GATE0] *= 8
    changed = {name: quantized(decoder.arrays[name], bits=4) for name in (GATE0, UP0)}
    result = fused(MERGE, decoder, changed)
    assert result.metrics == {"matched": 2, "declined": 0}
    assert result.error < TOLERANCE


def test_one_left_dense_declines_with_the_reason(tiny_decoder, quantized, fused):
    decoder = tiny_decoder()
    result = fused(MERGE, decoder, {GATE0: quantized(decoder.arrays[GATE0])})
    assert result.metrics == {"matched": 1, "declined": 1}
    assert "up_proj is dense" in result.decisions[0]
    assert result.error < TOLERANCE


def test_different_permutations_decline(tiny_decoder, quantized, fused):
    decoder = tiny_decoder()
    rng = np.random.default_rng(5)
    changed = {
        name: quantized(decoder.arrays[name], permutation=rng.permutation(32).astype(np.int32)) for name in (GATE0, UP0)
    }
    result = fused(MERGE, decoder, changed)
    assert result.metrics == {"matched": 1, "declined": 1}
    assert "permuted differently" in result.decisions[0]
    assert result.error < TOLERANCE


def test_an_mlp_without_a_gate_has_nothing_to_merge(tiny_decoder, fused):
    decoder = tiny_decoder(layers=1)
    graph = decoder.model.graph
    product = [node for node in graph if node.op_type == "Mul"][-1]
    product.outputs[0].replace_all_uses_with(product.inputs[0])
    graph.remove(product, safe=True)
    result = fused(MERGE, decoder)
    assert result.metrics == {"matched": 0, "declined": 0}
    assert result.decisions == ("nothing to do: the pattern does not occur",)


def test_a_second_time_there_is_nothing_to_merge(tiny_decoder, fused):
    once = fused(MERGE, tiny_decoder())
    again = MERGE(once.outcome.artifact)
    assert again.report.metrics == {"matched": 0, "declined": 0}
    assert "nothing to do" in again.report.decisions[0]
