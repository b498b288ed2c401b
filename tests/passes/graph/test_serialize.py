import numpy as np
import onnx
import pytest

from optimc_passes.graph.attach import attach_weights
from optimc_passes.graph.serialize import from_bytes, to_bytes
from optimc_passes.verify.evaluate import evaluate
from optimc_passes.verify.probe import Probe
from optimc_passes.weights import Dense

Q0 = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def attached(tiny_decoder, quantized):
    decoder = tiny_decoder()
    store = decoder.store.replace({Q0: quantized(decoder.arrays[Q0])})
    return attach_weights(decoder.model, store), store


def test_a_graph_comes_back_equal_and_bound_to_the_store(attached):
    model, store = attached
    again = from_bytes(to_bytes(model), store)
    probe = Probe.of_vocabulary(48, 9)
    assert np.array_equal(evaluate(again, probe), evaluate(model, probe))
    assert to_bytes(again) == to_bytes(model)


def test_no_weight_is_in_the_file_or_read_to_write_it(attached, tiny_decoder):
    def read():
        raise AssertionError("data was read")

    decoder = tiny_decoder()
    lazy = decoder.store.replace({n: Dense(w.shape, w.dtype, read) for n, w in decoder.store.items()})
    data = to_bytes(attach_weights(decoder.model, lazy))
    total = sum(array.nbytes for array in decoder.arrays.values())
    assert len(data) < total / 2
    proto = onnx.ModelProto.FromString(data)
    assert {initializer.data_type for initializer in proto.graph.initializer} == {onnx.TensorProto.INT64}


def test_writing_leaves_the_model_attached(attached):
    model, _ = attached
    before = set(model.graph.initializers)
    to_bytes(model)
    assert set(model.graph.initializers) == before


def test_a_store_of_another_kind_is_refused(attached, tiny_decoder, quantized):
    model, store = attached
    data = to_bytes(model)
    with pytest.raises(ValueError, match="is dense; a quantized weight is needed"):
        from_bytes(data, tiny_decoder().store)
    other = store.replace({Q0: quantized(tiny_decoder().arrays[Q0], bits=8)})
    with pytest.raises(ValueError, match="the graph wants UINT4"):
        from_bytes(data, other)


def test_other_bytes_are_refused():
    for data in (b"", b"\x00\x01garbage"):
        with pytest.raises(ValueError, match="not a graph without weights"):
            from_bytes(data, {})
