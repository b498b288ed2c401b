import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from optimc_passes.fuse.fold_scale_into_weights import FoldScaleIntoWeights
from optimc_passes.fuse.rule import NoOptions
from optimc_passes.graph.weight_expression import Param, Scaled, Scales, TableScales, Transposed
from optimc_passes.weights import Dense

FOLD = FoldScaleIntoWeights(NoOptions())
TOLERANCE = 1e-6
"""A product scaled before its sum instead of after it rounds float32 once more, 6e-8; two layers carry that on."""


def scale_after(decoder, node, factor, op_type="Mul", *, first=False):
    """Put a factor behind a node."""
    graph = decoder.model.graph
    tensor = ir.tensor(np.float32(factor), name=f"factor_{len(graph)}")
    number = ir.Value(name=tensor.name, shape=ir.Shape([]), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(number)
    (value,) = node.outputs
    scaled = ir.Value(name=f"scaled_{len(graph)}", shape=value.shape, type=value.type)
    value.replace_all_uses_with(scaled)
    operands = [number, value] if first else [value, number]
    made = ir.node(op_type, operands, outputs=[scaled])
    graph.insert_after(node, made)
    return made


def product(decoder, weight):
    """Return the product with a parameter."""
    transpose = next(node for node in decoder.model.graph if node.inputs[0].name == weight and node.op_type != "Gather")
    ((node, _),) = transpose.outputs[0].uses()
    return node


def weight(result, name):
    return result.graph.initializers[name].const_value.expression


O_PROJ = "model.layers.0.self_attn.o_proj.weight"
NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("op_type", "factor", "first", "expected"),
    [("Mul", 0.22, False, 0.22), ("Mul", 0.22, True, 0.22), ("Div", 4.0, False, 0.25)],
)
def test_a_residual_factor_goes_into_the_layers_weight(tiny_decoder, fused, op_type, factor, first, expected):
    decoder = tiny_decoder()
    scale_after(decoder, product(decoder, O_PROJ), factor, op_type, first=first)
    result = fused(FOLD, decoder)
    assert result.metrics == {"matched": 1, "declined": 0}
    scaled = weight(result, O_PROJ.replace("o_proj", "o_proj.scaled"))
    assert scaled == Scaled(Transposed(Param(O_PROJ)), pytest.approx(expected))
    assert O_PROJ not in result.graph.initializers
    assert result.error < TOLERANCE
    assert FOLD(result.outcome.artifact).report.metrics == {"matched": 0, "declined": 0}


def test_a_bias_is_scaled_with_its_layer(tiny_decoder, fused):
    decoder = tiny_decoder(biased=frozenset({"o_proj"}))
    ((bias, _),) = product(decoder, O_PROJ).outputs[0].uses()
    scale_after(decoder, bias, 0.5)
    result = fused(FOLD, decoder)
    assert result.metrics == {"matched": 1, "declined": 0}
    name = "model.layers.0.self_attn.o_proj.scaled.bias"
    assert weight(result, name) == Scaled(Param(name.replace(".scaled", "")), 0.5)
    assert result.error < TOLERANCE


@pytest.mark.parametrize("symmetric", [True, False])
def test_of_a_quantized_weight_the_scales_take_a_power_of_two(tiny_decoder, quantized, fused, symmetric):
    decoder = tiny_decoder()
    scale_after(decoder, product(decoder, O_PROJ), 0.5)
    result = fused(FOLD, decoder, {O_PROJ: quantized(decoder.arrays[O_PROJ], symmetric=symmetric)})
    assert result.metrics == {"matched": 1, "declined": 0}
    assert weight(result, f"{O_PROJ}.scaled.scales") == Scaled(Scales(O_PROJ), 0.5)
    assert f"{O_PROJ}.codes" in result.graph.initializers
    assert result.error < TOLERANCE


@pytest.mark.parametrize("tied", [False, True])
def test_a_logit_factor_goes_into_the_norm_before_the_head(tiny_decoder, fused, tied):
    decoder = tiny_decoder(tied=tied)
    scale_after(decoder, product(decoder, EMBEDDING if tied else "lm_head.weight"), 0.125)
    result = fused(FOLD, decoder)
    assert result.metrics == {"matched": 1, "declined": 0}
    assert weight(result, "model.norm.scaled.weight") == Scaled(Param(NORM), 0.125)
    head = EMBEDDING if tied else "lm_head.weight"
    assert head in result.graph.initializers, "the head's own weight stays"
    assert result.error < TOLERANCE


def test_an_embedding_factor_goes_into_the_table(tiny_decoder, fused):
    decoder = tiny_decoder()
    scale_after(decoder, next(node for node in decoder.model.graph if node.op_type == "Gather"), 3.0)
    result = fused(FOLD, decoder)
    assert result.metrics == {"matched": 1, "declined": 0}
    assert weight(result, "model.embed_tokens.scaled.weight") == Scaled(Param(EMBEDDING), 3.0)
    assert result.error < TOLERANCE


@pytest.mark.parametrize("symmetric", [True, False])
def test_of_a_table_in_codes_the_scales_take_a_power_of_two(tiny_decoder, quantized, fused, symmetric):
    decoder = tiny_decoder()
    scale_after(decoder, next(node for node in decoder.model.graph if node.op_type == "Gather"), 8.0)
    result = fused(FOLD, decoder, {EMBEDDING: quantized(decoder.arrays[EMBEDDING], symmetric=symmetric)})
    assert result.metrics == {"matched": 1, "declined": 0}
    assert weight(result, f"{EMBEDDING}.scaled.scales") == Scaled(TableScales(EMBEDDING), 8.0)
    assert f"{EMBEDDING}.codes" in result.graph.initializers
    assert result.error < TOLERANCE


def test_another_factor_on_a_table_in_codes_stays(tiny_decoder, quantized, fused):
    decoder = tiny_decoder()
    scale_after(decoder, next(node for node in decoder.model.graph if node.op_type == "Gather"), 12.0)
    result = fused(FOLD, decoder, {EMBEDDING: quantized(decoder.arrays[EMBEDDING])})
    assert result.metrics == {"matched": 0, "declined": 1}
    assert "12 times a weight stored as bfloat16 needs float32" in " ".join(result.decisions)


def test_a_head_tied_to_a_scaled_table_is_divided_by_the_factor(tiny_decoder, fused):
    decoder = tiny_decoder(tied=True)
    scale_after(decoder, next(node for node in decoder.model.graph if node.op_type == "Gather"), 5.0)
    result = fused(FOLD, decoder)
    assert result.metrics == {"matched": 1, "declined": 0}
    assert weight(result, "model.norm.scaled.weight") == Scaled(Param(NORM), 0.2)
    assert EMBEDDING not in result.graph.initializers, "one table for both"
    assert result.error < TOLERANCE


def test_factors_of_embedding_and_logits_meet_in_one_norm(tiny_decoder, fused):
    decoder = tiny_decoder(tied=True)
    scale_after(decoder, next(node for node in decoder.model.graph if node.op_type == "Gather"), 8.0)
    scale_after(decoder, product(decoder, EMBEDDING), 4.0, "Div")
    result = fused(FOLD, decoder)
    assert result.metrics == {"matched": 2, "declined": 0}
    assert weight(result, "model.norm.scaled.weight") == Scaled(Param(NORM), 1 / 32)
    assert result.error < TOLERANCE


def test_values_that_mean_something_else_have_new_names(tiny_decoder, fused):
    decoder = tiny_decoder(biased=frozenset({"o_proj"}))
    node = product(decoder, O_PROJ)
    ((bias, _),) = node.outputs[0].uses()
    scale_after(decoder, bias, 0.5)
    result = fused(FOLD, decoder)
    names = {value.name for made in result.graph for value in made.outputs}
    new = {name for name in names if name.endswith(".scaled")}
    assert len(new) == 1, "the product without its bias is half of what it was"
    assert names - new < {value.name for made in result.before.graph for value in made.outputs}


@pytest.mark.parametrize("factor", [0.22, 0.5])
def test_a_stored_bfloat16_weight_takes_powers_of_two_only(tiny_decoder, fused, factor):
    decoder = tiny_decoder()
    scale_after(decoder, product(decoder, O_PROJ), factor)
    stored = Dense.of(decoder.arrays[O_PROJ].astype(ml_dtypes.bfloat16))
    result = fused(FOLD, decoder, {O_PROJ: stored})
    if factor == 0.5:
        assert result.metrics == {"matched": 1, "declined": 0}
    else:
        assert result.metrics == {"matched": 0, "declined": 1}
        expected = "0.22 times a weight stored as bfloat16 needs float32: 4096 bytes instead of 2048"
        assert result.decisions[0].endswith(expected)
    assert result.error < TOLERANCE


def test_a_quantized_weight_declines_other_factors(tiny_decoder, quantized, fused):
    decoder = tiny_decoder()
    scale_after(decoder, product(decoder, O_PROJ), 0.22)
    result = fused(FOLD, decoder, {O_PROJ: quantized(decoder.arrays[O_PROJ])})
    assert result.metrics == {"matched": 0, "declined": 1}
    assert "needs float32" in result.decisions[0]


def _read_twice(decoder):
    node = product(decoder, O_PROJ)
    scale_after(decoder, node, 0.5)
    residual = next(made for made in decoder.model.graph if made.op_type == "Add")
    residual.replace_input_with(0, node.outputs[0])
    return "the layer is read without the factor too"


def _activated(decoder):
    node = product(decoder, O_PROJ)
    scaled = scale_after(decoder, node, 0.5)
    (value,) = node.outputs
    tanh = ir.node("Tanh", [value], outputs=[ir.Value(name="tanh", shape=value.shape, type=value.type)])
    decoder.model.graph.insert_after(node, tanh)
    scaled.replace_input_with(0, tanh.outputs[0])
    return "Tanh stands between the layer and the factor"


def _shared_weight(decoder):
    node = product(decoder, O_PROJ)
    other = product(decoder, O_PROJ.replace(".0.", ".1."))
    other.replace_input_with(1, node.inputs[1])
    gone = O_PROJ.replace(".0.", ".1.")
    graph = decoder.model.graph
    graph.remove(next(made for made in graph if made.inputs[0].name == gone), safe=True)
    graph.inputs.remove(next(value for value in graph.inputs if value.name == gone))
    del decoder.arrays[gone]
    scale_after(decoder, node, 0.5)
    return "the layer's weight has another reader"


def _nothing(decoder):
    scale_after(decoder, product(decoder, O_PROJ), 0.0)
    return "the factor is 0"


@pytest.mark.parametrize("prepare", [_read_twice, _activated, _shared_weight, _nothing])
def test_declines_with_its_reason(tiny_decoder, fused, prepare):
    decoder = tiny_decoder()
    reason = prepare(decoder)
    result = fused(FOLD, decoder)
    assert result.metrics == {"matched": 0, "declined": 1}
    assert result.decisions[0].endswith(reason)
    assert result.error == 0


def test_the_products_inside_an_activation_are_no_place_for_it(tiny_decoder, fused):
    result = fused(FOLD, tiny_decoder())
    assert result.metrics == {"matched": 0, "declined": 0}
    assert result.decisions == ("nothing to do: the pattern does not occur",)
