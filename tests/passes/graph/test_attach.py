import numpy as np
import onnx_ir as ir
import pytest

from optimc.errors import CheckpointError
from optimc_passes.dialect.rules import verify_graph
from optimc_passes.graph.attach import attach_weights
from optimc_passes.graph.weight_expression import Param, Transposed
from optimc_passes.graph.weight_tensor import WeightTensor
from optimc_passes.verify.evaluate import evaluate
from optimc_passes.verify.probe import Probe
from optimc_passes.weights import Dense, WeightStore

PROBE = Probe.of_vocabulary(48, 11)
Q0 = "model.layers.0.self_attn.q_proj.weight"
DOWN1 = "model.layers.1.mlp.down_proj.weight"
EMBED = "model.embed_tokens.weight"


def count(model, op_type):
    return sum(node.op_type == op_type for node in model.graph)


def dense_copy(decoder, changed):
    """The store with quantized weights replaced by what they dequantize to."""
    return decoder.store.replace({name: Dense.of(weight.dequantize()) for name, weight in changed.items()})


def test_every_parameter_becomes_an_initializer_and_linear_weights_are_transposed_when_read(tiny_decoder):
    decoder = tiny_decoder()
    model = attach_weights(decoder.model, decoder.store)
    assert [value.name for value in model.graph.inputs] == ["input_ids", "position_ids", "logits_rows"]
    bound = {
        name: value.const_value.expression
        for name, value in model.graph.initializers.items()
        if isinstance(value.const_value, WeightTensor)
    }
    assert set(bound) == set(decoder.arrays)
    assert bound[Q0] == Transposed(Param(Q0))
    assert bound[EMBED] == Param(EMBED)
    assert count(model, "Transpose") == 0


def test_the_exported_graph_is_left_as_it_was(tiny_decoder):
    decoder = tiny_decoder()
    inputs = [value.name for value in decoder.model.graph.inputs]
    attach_weights(decoder.model, decoder.store)
    assert [value.name for value in decoder.model.graph.inputs] == inputs
    assert count(decoder.model, "Transpose") == 15


def test_a_tied_embedding_is_stored_once_and_its_transpose_stays(tiny_decoder):
    decoder = tiny_decoder(tied=True)
    model = attach_weights(decoder.model, decoder.store)
    assert count(model, "Transpose") == 1
    assert model.graph.initializers[EMBED].const_value.expression == Param(EMBED)
    untied = tiny_decoder(tied=False)
    untied.arrays.update(decoder.arrays)
    untied.arrays["lm_head.weight"] = decoder.arrays[EMBED]
    same = attach_weights(untied.model, untied.store)
    assert np.array_equal(evaluate(model, PROBE), evaluate(same, PROBE))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [16, 12, 48])
def test_a_quantized_weight_computes_what_its_dequantized_copy_computes(
    tiny_decoder, quantized, bits, symmetric, group
):
    decoder = tiny_decoder()
    weight = quantized(decoder.arrays[DOWN1], bits=bits, symmetric=symmetric, group=group)
    model = attach_weights(decoder.model, decoder.store.replace({DOWN1: weight}))
    assert count(model, "DequantizeLinear") == 1
    expected = evaluate(attach_weights(decoder.model, dense_copy(decoder, {DOWN1: weight})), PROBE)
    np.testing.assert_allclose(evaluate(model, PROBE), expected, rtol=1e-5, atol=1e-5)


def test_a_ragged_last_group_is_dequantized_with_its_own_scale(tiny_decoder, quantized):
    decoder = tiny_decoder()
    weight = quantized(decoder.arrays[DOWN1], group=20)
    assert weight.scales.shape == (32, 3)
    model = attach_weights(decoder.model, decoder.store.replace({DOWN1: weight}))
    expected = evaluate(attach_weights(decoder.model, dense_copy(decoder, {DOWN1: weight})), PROBE)
    np.testing.assert_allclose(evaluate(model, PROBE), expected, rtol=1e-5, atol=1e-5)


def test_a_permuted_weight_gathers_the_activations_features_first(tiny_decoder, quantized):
    decoder = tiny_decoder()
    order = np.random.default_rng(3).permutation(32).astype(np.int32)
    weight = quantized(decoder.arrays[Q0], permutation=order)
    model = attach_weights(decoder.model, decoder.store.replace({Q0: weight}))
    product = next(
        node for node in model.graph if node.op_type == "MatMul" and node.inputs[1].name == f"{Q0}.dequantized"
    )
    assert product.inputs[0].producer().op_type == "Gather"
    assert f"{Q0}.inverse_permutation" not in model.graph.initializers
    expected = evaluate(attach_weights(decoder.model, dense_copy(decoder, {Q0: weight})), PROBE)
    np.testing.assert_allclose(evaluate(model, PROBE), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("permuted", [False, True])
def test_a_quantized_embedding_is_looked_up_in_dequantized_rows(tiny_decoder, quantized, permuted):
    decoder = tiny_decoder(tied=True)
    order = np.random.default_rng(3).permutation(32).astype(np.int32) if permuted else None
    weight = quantized(decoder.arrays[EMBED], bits=8, permutation=order)
    model = attach_weights(decoder.model, decoder.store.replace({EMBED: weight}))
    expected = evaluate(attach_weights(decoder.model, dense_copy(decoder, {EMBED: weight})), PROBE)
    np.testing.assert_allclose(evaluate(model, PROBE), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(2, 16), (3, 12), (4, 20), (8, 32)])
def test_a_quantized_table_is_dequantized_row_by_row(tiny_decoder, quantized, bits, group, symmetric):
    decoder = tiny_decoder()
    weight = quantized(decoder.arrays[EMBED], bits=bits, group=group, symmetric=symmetric)
    model = attach_weights(decoder.model, decoder.store.replace({EMBED: weight}))
    assert verify_graph(model) == []
    rows = next(node for node in model.graph if node.op_type == "DequantizeLinear")
    assert {value.producer().op_type for value in rows.inputs} == {"Gather"}
    assert rows.outputs[0].shape == ["T", 32]
    assert EMBED not in model.graph.initializers
    codes = model.graph.initializers[f"{EMBED}.codes"].const_value
    assert codes.dtype == (ir.DataType.INT8 if symmetric else ir.DataType.UINT8)
    middle = 2 ** (bits - 1) if symmetric else 0
    assert np.array_equal(codes.numpy().astype(int) + middle, weight.codes.read())
    expected = evaluate(attach_weights(decoder.model, dense_copy(decoder, {EMBED: weight})), PROBE)
    np.testing.assert_allclose(evaluate(model, PROBE), expected, rtol=1e-5, atol=1e-5)


def test_a_table_that_is_multiplied_too_has_its_codes_once(tiny_decoder, quantized):
    decoder = tiny_decoder(tied=True)
    model = attach_weights(decoder.model, decoder.store.replace({EMBED: quantized(decoder.arrays[EMBED])}))
    assert count(model, "DequantizeLinear") == 1
    assert model.graph.initializers[f"{EMBED}.codes"].dtype == ir.DataType.UINT4


def test_a_tied_head_with_a_weight_of_its_own_leaves_the_embedding_rows_alone(tiny_decoder, quantized):
    decoder = tiny_decoder(tied=True)
    head = quantized(decoder.arrays[EMBED])
    store = WeightStore({**decoder.store, "lm_head.weight": head})
    model = attach_weights(decoder.model, store, tied={"lm_head.weight": EMBED})
    assert np.array_equal(model.graph.initializers[EMBED].const_value.numpy(), decoder.arrays[EMBED])
    untied = tiny_decoder(tied=False)
    untied.arrays.update(decoder.arrays)
    untied.arrays["lm_head.weight"] = head.dequantize()
    expected = evaluate(attach_weights(untied.model, untied.store), PROBE)
    np.testing.assert_allclose(evaluate(model, PROBE), expected, rtol=1e-5, atol=1e-5)


def test_all_misfits_are_named_together(tiny_decoder):
    decoder = tiny_decoder()
    arrays = dict(decoder.arrays)
    del arrays["model.norm.weight"]
    arrays["stray.weight"] = np.zeros(3, np.float32)
    arrays[Q0] = arrays[Q0][:-1]
    arrays[DOWN1] = arrays[DOWN1].astype(np.int32)
    store = WeightStore({name: Dense.of(array) for name, array in arrays.items()})
    with pytest.raises(CheckpointError) as caught:
        attach_weights(decoder.model, store)
    message = str(caught.value)
    assert "model.norm.weight: in the graph but not in the checkpoint" in message
    assert "stray.weight: in the checkpoint but no part of the graph" in message
    assert f"{Q0}: shape [31, 32], the graph wants [32,32]" in message
    assert f"{DOWN1}: dtype int32 is not a floating-point type" in message
    assert len(message.splitlines()) == 5


def test_a_parameter_nothing_reads_is_not_carried_along(tiny_decoder):
    decoder = tiny_decoder()
    exported = decoder.model.clone()
    idle = ir.Value(name="idle.weight", shape=ir.Shape([3]), type=ir.TensorType(ir.DataType.FLOAT))
    exported.graph.inputs.append(idle)
    store = WeightStore({**decoder.store, "idle.weight": Dense.of(np.zeros(3, np.float32))})
    model = attach_weights(exported, store)
    assert "idle.weight" not in model.graph.initializers
    assert len(model.graph.inputs) == 3
