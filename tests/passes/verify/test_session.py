"""Graphs of one build share their weights: each is computed once, as far as the pool has room."""

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from optimc_passes.graph.attach import attach_weights
from optimc_passes.graph.weight_expression import Param
from optimc_passes.graph.weight_tensor import WeightTensor
from optimc_passes.verify.evaluate import evaluate
from optimc_passes.verify.probe import Probe
from optimc_passes.verify.session import WeightPool, run_probe
from optimc_passes.weights import Dense, WeightStore

PROBE = Probe.of_vocabulary(48, 9)


class Counted:
    """A store of vectors that counts how often each is read."""

    def __init__(self, **sizes):
        self.reads = []
        self.store = WeightStore({name: self._weight(name, size) for name, size in sizes.items()})

    def _weight(self, name, size):
        array = np.arange(size, dtype=np.float32)
        return Dense(array.shape, array.dtype, lambda: self.reads.append(name) or array)

    def tensor(self, name):
        return WeightTensor(Param(name), self.store)


def test_a_weight_is_read_once_for_all_graphs_that_have_it(tiny_decoder):
    decoder = tiny_decoder(layers=1)
    reads = []

    def counted(name, array):
        return Dense(array.shape, array.dtype, lambda: reads.append(name) or array)

    store = WeightStore({name: counted(name, array) for name, array in decoder.arrays.items()})
    model = attach_weights(decoder.model, store)
    pool = WeightPool()
    first, second = evaluate(model, PROBE, pool), evaluate(model.clone(), PROBE, pool)
    assert np.array_equal(first, second)
    assert sorted(reads) == sorted(decoder.arrays)


def test_other_stores_have_other_weights(tiny_decoder):
    pool = WeightPool()
    decoders = [tiny_decoder(layers=1), tiny_decoder(layers=1)]
    decoders[1].arrays["model.norm.weight"][:] = 0
    models = [attach_weights(decoder.model, decoder.store) for decoder in decoders]
    assert evaluate(models[0], PROBE, pool).any()
    assert not evaluate(models[1], PROBE, pool).any()


def test_what_the_graph_at_hand_does_not_use_makes_room():
    weights = Counted(a=4, b=4, c=4)
    pool = WeightPool(limit_bytes=32)  # two of the three
    for names in ("ab", "bc", "ab"):
        lent = pool.lend({name: weights.tensor(name) for name in names})
        assert [lent[name].numpy()[3] for name in names] == [3, 3]
    # c took the place of a, and a that of c; b stayed.
    assert weights.reads == ["a", "b", "c", "a"]


def test_a_graph_larger_than_the_pool_keeps_what_fits():
    weights = Counted(a=4, b=4, c=4)
    pool = WeightPool(limit_bytes=32)
    for _ in range(2):
        pool.lend({name: weights.tensor(name) for name in "abc"})
    assert weights.reads == ["a", "b", "c", "c"]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_quantized_weights_reach_onnxruntime_as_they_are(tiny_decoder, quantized, bits, symmetric):
    decoder = tiny_decoder(layers=1)
    name = "model.layers.0.mlp.up_proj.weight"
    rounded = quantized(decoder.arrays[name], bits=bits, symmetric=symmetric)
    by_codes = attach_weights(decoder.model, decoder.store.replace({name: rounded}))
    dense = attach_weights(decoder.model, decoder.store.replace({name: Dense.of(rounded.dequantize())}))
    # The same products of the same float32 numbers.
    np.testing.assert_allclose(evaluate(by_codes, PROBE), evaluate(dense, PROBE), rtol=1e-6, atol=1e-6)


def test_a_value_inside_the_graph_is_computed_without_what_comes_after_it(tiny_decoder):
    decoder = tiny_decoder(layers=1)
    decoder.arrays["lm_head.weight"] = None  # nobody may read it
    weights = {n: Dense.of(a) for n, a in decoder.arrays.items() if a is not None}
    head = Dense((48, 32), np.dtype(ml_dtypes.bfloat16), lambda: pytest.fail("the head was read"))
    model = attach_weights(decoder.model, WeightStore({**weights, "lm_head.weight": head}))
    embedded = next(node for node in model.graph if node.op_type == "Gather").outputs[0]
    normed = model.graph.initializers["model.norm.weight"].uses()[0][0].outputs[0]
    values = run_probe(model, PROBE, [normed.name, embedded.name], WeightPool())
    assert values[embedded.name].shape == (9, 32)
    assert np.array_equal(values[embedded.name], decoder.arrays["model.embed_tokens.weight"][PROBE.tokens])
    assert values[normed.name].shape == (1, 9, 32)
    assert [value.name for value in model.graph.outputs] == ["logits"], "the model itself is left alone"


def test_scattered_rows_are_fewer_than_tokens_and_in_another_order(tiny_decoder):
    probe = PROBE.with_scattered_rows()
    assert probe.rows.tolist() == [8, 6, 4, 2, 0]
    decoder = tiny_decoder(layers=1)
    model = attach_weights(decoder.model, decoder.store)
    np.testing.assert_allclose(evaluate(model, probe), evaluate(model, PROBE)[probe.rows], rtol=1e-6, atol=1e-6)


def test_what_onnxruntime_cannot_run_is_a_runtime_error(tiny_decoder):
    decoder = tiny_decoder(layers=1)
    model = attach_weights(decoder.model, decoder.store)
    gate = model.graph.initializers["model.layers.0.mlp.gate_proj.weight"].uses()[0][0]
    gate.replace_input_with(1, model.graph.initializers["model.norm.weight"])
    gate.outputs[0].shape = ir.Shape([1, "T"])
    with pytest.raises(RuntimeError, match="running Mul node"):
        evaluate(model, PROBE)
