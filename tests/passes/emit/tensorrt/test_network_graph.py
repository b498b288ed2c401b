"""The graph TensorRT is given computes what the dialect graph does, on every supported architecture."""

from collections import Counter
from itertools import pairwise

import numpy as np
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from optimc.errors import LoweringError
from optimc_passes.emit.kv_layout import kv_layout
from optimc_passes.emit.onnx_hidden import HIDDEN
from optimc_passes.emit.tensorrt.network_graph import network_graph
from optimc_passes.graph.attach import attach_weights

EXACT = 1e-5
"""Of the largest logit: float32 sums in another order. What a wrong window or cap leaves is above 1e-2."""
HALF = 1e-2
"""Root mean square, relative: float16 rounds by at most 5e-4, and each of the two to three layers rounds ten values one
after the other, some before a softmax; 1e-3 to 5e-3 were seen."""

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def largest_error(actual, expected):
    return np.abs(actual - expected).max() / np.abs(expected).max()


def mean_error(actual, expected):
    return np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))


@pytest.mark.usefixtures("in_float32")
def test_in_float32_it_computes_the_dialect_graph_in_chunks_and_decode(case, serve, reference):
    """The prompt in pieces, then token by token through the pool: as in one go without it."""
    tokens, cuts = case.tokens[:60], [0, 23, 40, 57, 58, 59, 60]
    expected = reference(case.attached, tokens)
    served = serve(case.fused)
    for start, stop in pairwise(cuts):
        got = served.call({"a": tokens[start:stop]})
        assert largest_error(got, expected[start:stop]) < EXACT, (start, stop)


def test_in_half_only_rounding_is_lost(case, serve, reference):
    expected = reference(case.attached, case.tokens[:60])
    for pool in ("float16", "int8"):
        served = serve(case.fused, kv=pool)
        got = np.concatenate([served.call({"a": case.tokens[start : start + 20]}) for start in (0, 20, 40)])
        # Keys and values of 8 bits lose up to 1/254 of the largest of a head; scores of these models spread over units.
        assert mean_error(got, expected) < (HALF if pool == "float16" else 0.06), pool


@pytest.mark.parametrize("pool", ["bfloat16", "int8"])
def test_in_bfloat16_only_rounding_is_lost(tiny_decoder, serve, reference, pool):
    """ONNX Runtime has no bfloat16 products: ONNX's own evaluator runs the graph, as the float16 one is fed."""
    decoder = tiny_decoder(head_dim=16)
    model, tokens = attach_weights(decoder.model, decoder.store), np.arange(9)
    feeds = serve(model, kv="int8" if pool == "int8" else "float16").feeds({"a": tokens})
    kv = kv_layout(model, 4, pool)
    graph = network_graph(model, precision="bfloat16", kv=kv, hidden=False).model
    for value in graph.graph.inputs:
        feeds[value.name] = feeds[value.name].astype(value.dtype.numpy())
    logits = ReferenceEvaluator(ir.to_proto(graph)).run(["logits"], feeds)[0]
    # Eight times what float16 rounds by.
    assert mean_error(logits, reference(model, tokens)) < 4e-2


def test_every_input_is_read_every_cast_is_needed_and_every_node_says_where_it_is_from(case):
    for model in (case.attached, case.fused):
        names = [node.name for node in model.graph]
        graph = network_graph(model, precision="float16", kv=kv_layout(model, 4, "int8"), hidden=True).model.graph
        assert [value.name for value in graph.inputs if not value.uses()] == []
        assert casts_for_nothing(graph) == []
        assert {node.domain for node in graph} == {""}
        for node in graph:
            assert node.name, node
        products = [node.name for node in graph if node.op_type in ("MatMul", "Attention")]
        assert all(any(name.startswith(known) for known in names if known) for name in products)


def casts_for_nothing(graph):
    """Casts between floats that follow one another, that repeat another, or that change nothing.

    Those around products, which are a wish and no casts, have a test of their own.
    """
    casts = [node for node in graph if node.op_type == "Cast" and node.inputs[0].dtype in FLOATS]
    casts = [node for node in casts if node.outputs[0].dtype in FLOATS and "_sums" not in node.name]
    found = [node for node in casts if node.inputs[0].dtype == node.outputs[0].dtype]
    # int8 pools round scales to float16 and compute with what they became: that one is meant.
    found += [
        node
        for node in casts
        if (before := node.inputs[0].producer()) in casts and "PagedAttention" not in (before.name or "")
    ]
    repeated = Counter((node.inputs[0], node.outputs[0].dtype) for node in casts)
    return found + [key for key, count in repeated.items() if count > 1]


def precisions(graph, op_type):
    """What operators give; for products with casts around them, what those give."""
    results = [node.outputs[0] for node in graph if node.op_type == op_type]
    around = [next((reader.outputs[0] for reader, _ in value.uses()), value) for value in results]
    return {
        outer.dtype if (outer.name or "").endswith(".from_sums") else value.dtype
        for value, outer in zip(results, around, strict=True)
    }


def test_products_and_gates_are_half_the_stream_norms_and_rotations_are_float32(make_case):
    case = make_case("llama")
    for precision, half in (("float16", ir.DataType.FLOAT16), ("bfloat16", ir.DataType.BFLOAT16)):
        kv = kv_layout(case.fused, 4, precision)
        graph = network_graph(case.fused, precision=precision, kv=kv, hidden=False).model.graph
        for op_type in ("MatMul", "Attention", "Sigmoid", "Mul"):
            found = precisions(graph, op_type)
            # Angles are a product of positions and frequencies.
            assert found == ({half, ir.DataType.FLOAT} if op_type == "Mul" else {half}), op_type
        for op_type in ("Add", "RMSNormalization", "RotaryEmbedding", "Cos", "Sin"):
            assert precisions(graph, op_type) == {ir.DataType.FLOAT}, op_type
        types = {value.name: value.dtype for value in (*graph.inputs, *graph.outputs)}
        assert types["logits"] == ir.DataType.FLOAT
        assert types["key_pool_0"] == types["step_values_1"] == half


def test_a_soft_cap_is_float32_between_half_products(make_case):
    case = make_case("gemma2")
    kv = kv_layout(case.fused, 4, "float16")
    graph = network_graph(case.fused, precision="float16", kv=kv, hidden=False).model.graph
    for op_type in ("Softmax", "Tanh", "Where"):
        assert precisions(graph, op_type) == {ir.DataType.FLOAT}, op_type
    assert precisions(graph, "MatMul") == {ir.DataType.FLOAT16}


def test_the_original_graph_is_left_alone_and_no_weight_is_read(tiny_decoder):
    decoder = tiny_decoder(head_dim=16)
    model = attach_weights(decoder.model, decoder.store)
    before = ir.to_proto(model).SerializeToString()
    for value in model.graph.initializers.values():
        if value.const_value.nbytes >= 1024:
            value.const_value = ir.LazyTensor(
                lambda: pytest.fail("read"), dtype=value.dtype, shape=value.shape, name=value.name
            )
    network_graph(model, precision="float16", kv=kv_layout(model, 4, "float16"), hidden=True)
    again = attach_weights(decoder.model, decoder.store)
    for value in model.graph.initializers.values():
        value.const_value = again.graph.initializers[value.name].const_value
    assert ir.to_proto(model).SerializeToString() == before


def test_hidden_states_are_what_the_head_multiplies(tiny_decoder, serve):
    decoder = tiny_decoder(head_dim=16)
    served = serve(attach_weights(decoder.model, decoder.store), hidden=True)
    logits = served.call({"a": np.arange(9)}, rows=[3, 8])
    assert served.graph.hidden == HIDDEN
    hidden = served.answers[HIDDEN]
    assert hidden.dtype == np.float32
    assert mean_error(hidden @ decoder.arrays["lm_head.weight"].T, logits) < HALF


def test_logits_are_those_of_the_rows_asked_for(tiny_decoder, serve):
    decoder = tiny_decoder(head_dim=16)
    served = serve(attach_weights(decoder.model, decoder.store))
    everything = served.call({"a": np.arange(9)}, keep=False)
    for rows in ([8], [4, 0, 4]):
        # ONNX Runtime's sums may depend on how many rows there are.
        np.testing.assert_allclose(served.call({"a": np.arange(9)}, rows=rows, keep=False), everything[rows], atol=4e-3)


@pytest.mark.parametrize("pool", ["float32", "int4", "fp8"])
def test_a_pool_there_is_no_form_of_is_refused_by_the_node(tiny_decoder, pool):
    decoder = tiny_decoder()
    model = attach_weights(decoder.model, decoder.store)
    with pytest.raises(LoweringError, match=rf"node '.*PagedAttention.*': .* no pool of {pool}; use one of float16"):
        network_graph(model, precision="float16", kv=kv_layout(model, 4, pool), hidden=False)


def test_a_weight_beyond_float16_is_named_when_it_is_read(tiny_decoder):
    decoder = tiny_decoder()
    decoder.arrays["lm_head.weight"][3, 5] = 1e5
    model = attach_weights(decoder.model, decoder.store)
    for precision in ("float16", "bfloat16"):
        kv = kv_layout(model, 4, precision)
        graph = network_graph(model, precision=precision, kv=kv, hidden=False).model.graph
        weight = graph.initializers[f"lm_head.weight.{precision}"].const_value
        if precision == "float16":
            with pytest.raises(LoweringError, match=r"lm_head.weight.float16: .* cannot hold 1e\+05; use precision bf"):
                weight.numpy()
        else:
            assert weight.numpy()[5, 3] == 99840


def test_names_of_ports_are_the_graphs(tiny_decoder):
    decoder = tiny_decoder()
    model = attach_weights(decoder.model, decoder.store)
    network = network_graph(model, precision="float16", kv=kv_layout(model, 4, "int8"), hidden=False)
    ports, graph = network.attention, network.model.graph
    assert "position_ids" not in {value.name for value in graph.inputs}, "nothing is rotated here"
    inputs, outputs = ({value.name: value for value in values} for values in (graph.inputs, graph.outputs))
    shapes = {name: [str(dim) for dim in value.shape] for name, value in {**inputs, **outputs}.items()}
    assert shapes[ports.query_index] == ["B", "Q"]
    assert shapes[ports.unpad_index] == ["T"]
    for window in ports.windows:
        assert (shapes[window.context_slots], shapes[window.mask]) == (["B", "C"], ["B", "Q", "K"])
    for layer in ports.layers:
        for port in (layer.keys, layer.values):
            assert (shapes[port.pool], shapes[port.step]) == (["rows", "16"], ["T", "16"])
            assert (shapes[port.pool_scales], shapes[port.step_scales]) == (["rows", "2"], ["T", "2"])
            assert inputs[port.pool_scales].dtype == outputs[port.step_scales].dtype == ir.DataType.FLOAT16
