"""Static activation scales: one number where rows are rounded, from the graph to the program."""

from dataclasses import replace

import numpy as np
import pytest

from optimc.errors import LoweringError
from optimc_passes.graph.attach import attach_weights

SHORT = {"q": "self_attn", "k": "self_attn", "v": "self_attn", "o": "self_attn"}
SCALES = {"q": 0.04, "k": 0.04, "v": 0.04, "o": 0.03, "gate": 0.05, "up": 0.05, "down": 0.06}


def static_model(tiny_decoder, quantized, scales=SCALES, bits=8, group=None, permutation=None):
    decoder = tiny_decoder()
    changed = {}
    for layer in (0, 1):
        for short, scale in scales.items():
            name = f"model.layers.{layer}.{SHORT.get(short, 'mlp')}.{short}_proj.weight"
            array = decoder.arrays[name]
            order = permutation if array.shape[1] == 32 else None
            weight = quantized(array, bits=bits, symmetric=True, group=group or array.shape[1], permutation=order)
            changed[name] = replace(weight, activation_scale=scale)
    return attach_weights(decoder.model, decoder.store.replace(changed))


def ops_of(interpret, lowered):
    return interpret.Interpreter(lowered).program.ops


@pytest.mark.parametrize("merged", [False, True], ids=["apart", "merged"])
@pytest.mark.parametrize("scheme", [{}, {"group": 16}, {"group": 20}, {"bits": 4, "group": 8}], ids=str)
def test_the_program_computes_what_the_graph_says(tiny_decoder, quantized, lowered, compare, fuse, scheme, merged):
    model = static_model(tiny_decoder, quantized, **scheme)
    model = fuse(model) if merged else model
    # Both round the same numbers: a difference is a quotient that falls on the edge between two codes.
    assert compare(model, lowered(model)) < 2e-3


def test_all_graph_passes_before_it(tiny_decoder, quantized, lowered, compare, fuse_all):
    model = static_model(tiny_decoder, quantized)
    program = lowered(fuse_all(model))
    assert compare(static_model(tiny_decoder, quantized), program) < 2e-3


def test_features_are_reordered_and_rounded(tiny_decoder, quantized, lowered, compare):
    order = np.random.default_rng(3).permutation(32).astype(np.int32)
    model = static_model(tiny_decoder, quantized, permutation=order)
    assert compare(model, lowered(model)) < 2e-3


def test_each_rounding_has_the_scale_of_its_layers_and_whole_rows(tiny_decoder, quantized, lowered, interpret, fuse):
    program = interpret.Interpreter(lowered(fuse(static_model(tiny_decoder, quantized)))).program
    norms = [op.quantized_scale for op in program.ops if op.op == "norm" and op.quantized is not None]
    roundings = [op.scale for op in program.ops if op.op == "quantize"]
    assert norms == pytest.approx([0.04, 0.05] * 2)
    assert roundings == pytest.approx([0.03, 0.06] * 2)
    buffers = [buffer for buffer in program.buffers if buffer.kind == "quantized"]
    assert {(buffer.group, buffer.terms) for buffer in buffers} == {(32, 1), (48, 1)}
    assert [op for op in program.ops if op.op == "linear" and op.static_scale is not None] == []


def test_two_scales_of_one_value_are_two_roundings(tiny_decoder, quantized, lowered, interpret, compare):
    model = static_model(tiny_decoder, quantized, {"q": 0.04, "k": 0.05, "v": None})
    program = lowered(model)
    first = [op for op in ops_of(interpret, program) if op.op in ("norm", "quantize")][:3]
    assert first[0].quantized_scale == pytest.approx(0.04)
    assert first[1].scale == pytest.approx(0.05)
    assert first[2].scale is None
    assert compare(model, program) < 0.03  # v's activations are rounded here and exact in the graph


def test_activations_as_they_are_contradict_a_static_scale(tiny_decoder, quantized, lowered):
    model = static_model(tiny_decoder, quantized)
    with pytest.raises(LoweringError, match=r"q_proj.*static activation scale.*int8_activations: false"):
        lowered(model, int8_activations=False)
