"""Quantized weights: exact products equal the dequantized graph, rounded activations stay near it, and are shared."""

import numpy as np
import pytest

from optimc.errors import LoweringError
from optimc_passes.graph.attach import attach_weights

PERMUTATION = np.random.default_rng(9).permutation(32).astype(np.int32)
ATTENTION = [f"model.layers.{layer}.self_attn.{name}_proj.weight" for layer in (0, 1) for name in "qkvo"]
MLP = [f"model.layers.{layer}.mlp.{name}_proj.weight" for layer in (0, 1) for name in ("gate", "up", "down")]
SCHEMES = [
    pytest.param({"bits": 4, "group": 16}, id="4-bit"),
    pytest.param({"bits": 4, "group": 16, "symmetric": True}, id="4-bit-symmetric"),
    pytest.param({"bits": 3, "group": 8, "symmetric": True}, id="3-bit-symmetric"),
    pytest.param({"bits": 8, "group": 32}, id="8-bit"),
    pytest.param({"bits": 8, "group": 20, "symmetric": True}, id="8-bit-ragged-symmetric"),
    pytest.param({"bits": 4, "group": 12}, id="4-bit-ragged"),
]


def model_of(tiny_decoder, quantized, names=(*ATTENTION, *MLP), permuted=(), **scheme):
    decoder = tiny_decoder(intermediate=48)
    changed = {
        name: quantized(decoder.arrays[name], permutation=PERMUTATION if name in permuted else None, **scheme)
        for name in names
    }
    return attach_weights(decoder.model, decoder.store.replace(changed))


def ops_of(interpret, lowered):
    return interpret.Interpreter(lowered).program.ops


@pytest.mark.parametrize("merged", [False, True], ids=["apart", "merged"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_exact_products_equal_the_dequantized_graph(tiny_decoder, quantized, lowered, compare, fuse, scheme, merged):
    model = model_of(tiny_decoder, quantized, **scheme)
    model = fuse(model) if merged else model
    assert compare(model, lowered(model, int8_activations=False)) < 1e-5


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rounded_activations_stay_near(tiny_decoder, quantized, lowered, compare, fuse, scheme):
    model = fuse(model_of(tiny_decoder, quantized, **scheme))
    assert 1e-6 < compare(model, lowered(model)) < 0.03


@pytest.mark.parametrize("merged", [False, True], ids=["apart", "merged"])
def test_permuted_codes_meet_permuted_features(tiny_decoder, quantized, lowered, compare, fuse, merged):
    permuted = [name for name in (*ATTENTION, *MLP) if "down" not in name]
    model = model_of(tiny_decoder, quantized, permuted=permuted)
    model = fuse(model) if merged else model
    assert compare(model, lowered(model, int8_activations=False)) < 1e-5
    assert compare(model, lowered(model)) < 0.03


def test_a_permutation_is_applied_once_for_all_who_share_it(tiny_decoder, quantized, lowered, interpret):
    model = model_of(tiny_decoder, quantized, permuted=ATTENTION[:3])
    exact = ops_of(interpret, lowered(model, int8_activations=False))
    assert [op.op for op in exact].count("permute") == 1
    rounded = ops_of(interpret, lowered(model))
    assert "permute" not in {op.op for op in rounded}
    (ordered,) = {op.permutation for op in rounded if op.op == "norm" and op.permutation is not None}
    assert ordered == "model.layers.0.self_attn.q_proj.weight.permutation"


def test_norms_round_what_only_products_read_and_all_products_share_it(tiny_decoder, quantized, lowered, interpret):
    ops = ops_of(interpret, lowered(model_of(tiny_decoder, quantized)))
    norms = [op for op in ops if op.op == "norm"]
    assert [(op.out is None, op.quantized is None) for op in norms] == [(True, False)] * 4 + [(False, True)]
    by_source = [op.quantized for op in ops if op.op == "linear" and op.quantized is not None]
    assert len(by_source) == 14
    assert sum(op.op == "quantize" for op in ops) == 4  # before o_proj and down_proj


def test_a_value_read_exactly_and_rounded_has_both_forms(tiny_decoder, quantized, lowered, interpret, compare):
    model = model_of(tiny_decoder, quantized, names=ATTENTION[:2])
    program = lowered(model)
    first = next(op for op in ops_of(interpret, program) if op.op == "norm")
    assert first.out is not None
    assert first.quantized is not None
    assert compare(model, program) < 0.03


def test_a_product_does_not_write_over_what_threads_still_round(small_graph, quantized, lowered, compare):
    def edit(g, x):
        array = quantized(np.random.default_rng(1).standard_normal((32, 32)).astype(np.float32) / 6, symmetric=True)
        codes = g.constant("w.codes", (array.codes.read().T.astype(np.int8) - 8))
        scales = g.constant("w.scales", np.ascontiguousarray(array.scales.read().T))
        weight = g.op("DequantizeLinear", codes, scales, axis=0, block_size=16)
        return g.op("Add", x, g.op("MatMul", x, weight))

    model = small_graph(before=edit).model
    assert compare(model, lowered(model)) < 0.03  # checks the program for such faults


def test_groups_of_different_size_are_rounded_apart(tiny_decoder, quantized, lowered, interpret, compare):
    decoder = tiny_decoder()
    q, k = ATTENTION[:2]
    changed = {q: quantized(decoder.arrays[q], group=16), k: quantized(decoder.arrays[k], group=8)}
    model = attach_weights(decoder.model, decoder.store.replace(changed))
    program = lowered(model)
    run = interpret.Interpreter(program)
    rounded = [buffer for buffer in run.program.buffers if buffer.kind == "quantized"]
    assert sorted(buffer.group for buffer in rounded) == [8, 16]
    assert compare(model, program) < 0.03


@pytest.mark.parametrize(
    ("group", "features", "stored"), [(256, 256, 128), (192, 576, 96), (130, 260, 130), (-1, 576, 96)]
)
def test_large_groups_are_split_for_rounded_activations(
    small_graph, quantized, lowered, interpret, compare, group, features, stored
):
    def wide(graph, x):
        rng = np.random.default_rng(1)
        up = graph.op("MatMul", x, graph.weight("up", 32, features))
        array = quantized(rng.standard_normal((32, features)).astype(np.float32) / 20, group=group % (features + 1))
        codes = graph.constant("down.codes", np.ascontiguousarray(array.codes.read().T))
        scales = graph.constant("down.scales", np.ascontiguousarray(array.scales.read().T))
        zeros = graph.constant("down.zeros", np.ascontiguousarray(array.zeros.read().T))
        down = graph.op("DequantizeLinear", codes, scales, zeros, axis=0, block_size=group % (features + 1))
        return graph.op("MatMul", up, down)

    model = small_graph(before=wide).model
    rounded, exact = lowered(model), lowered(model, int8_activations=False)
    weights = [interpret.Interpreter(program).program.weights["down"] for program in (rounded, exact)]
    assert [weight.group for weight in weights] == [stored, group % (features + 1)]
    assert compare(model, exact) < 1e-5
    assert compare(model, rounded) < 0.03


def test_a_scale_per_row_needs_a_group_per_row(tiny_decoder, quantized, lowered, interpret, compare):
    linears = [*ATTENTION, *[name for name in MLP if "down" not in name]]
    model = model_of(tiny_decoder, quantized, names=linears, bits=8, group=32)
    program = lowered(model, activation_scales="row")
    rounded = [b for b in interpret.Interpreter(program).program.buffers if b.kind == "quantized"]
    assert {buffer.group for buffer in rounded} == {32}
    assert compare(model, program) < 0.03
    with pytest.raises(
        LoweringError, match=r"q_proj.weight: its 32 input features are in groups of 16; .*group_size: -1"
    ):
        lowered(model_of(tiny_decoder, quantized, group=16), activation_scales="row")


def test_a_quantized_table_serves_lookup_and_head_at_once(tiny_decoder, quantized, lowered, interpret, compare):
    decoder = tiny_decoder(tied=True)
    name = "model.embed_tokens.weight"
    changed = {name: quantized(decoder.arrays[name], group=16, bits=8)}
    model = attach_weights(decoder.model, decoder.store.replace(changed))
    program = lowered(model, int8_activations=False)
    ops = ops_of(interpret, program)
    assert ops[0].table == ops[-1].weight == name
    assert sum(name in tensor.name for tensor in program.tensors) == 1
    assert compare(model, program) < 1e-5


def test_a_permuted_table_is_put_back_in_order(tiny_decoder, quantized, lowered, interpret, compare):
    decoder = tiny_decoder(tied=True)
    name = "model.embed_tokens.weight"
    changed = {name: quantized(decoder.arrays[name], permutation=PERMUTATION)}
    model = attach_weights(decoder.model, decoder.store.replace(changed))
    program = lowered(model, int8_activations=False)
    assert [op.op for op in ops_of(interpret, program)][:2] == ["embed", "permute"]
    assert compare(model, program) < 1e-5


@pytest.mark.parametrize("scheme", [*SCHEMES, pytest.param({"bits": 2, "group": 16}, id="2-bit")])
def test_a_looked_up_table_stays_in_codes(tiny_decoder, quantized, lowered, compare, fuse_all, interpret, scheme):
    table = "model.embed_tokens.weight"
    decoder = tiny_decoder()
    weight = quantized(decoder.arrays[table], **scheme)
    model = fuse_all(attach_weights(decoder.model, decoder.store.replace({table: weight})))
    program = lowered(model)
    assert compare(model, program) < 1e-5
    (embed,) = (op for op in ops_of(interpret, program) if op.op == "embed")
    entry = program.program["weights"][embed.table]
    assert (entry["bits"], entry["zeros"]) == (4 if weight.bits <= 4 else 8, not weight.symmetric)
    assert not any(entry["kind"] == "table" for entry in program.program["weights"].values())
