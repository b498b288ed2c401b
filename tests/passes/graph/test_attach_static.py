"""Weights with a static activation scale: the graph rounds what they read, once for all who read it with one scale."""

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from optimc_passes.dialect.rules import verify_graph
from optimc_passes.fuse.apply_rules import apply_rules
from optimc_passes.fuse.merge_gate_up import MergeGateUp
from optimc_passes.fuse.merge_qkv import MergeQkv
from optimc_passes.fuse.pipeline import GRAPH_PASSES
from optimc_passes.fuse.recorder import Recorder
from optimc_passes.fuse.rule import FusionPass, recorder_of
from optimc_passes.graph.attach import attach_weights
from optimc_passes.verify.evaluate import evaluate
from optimc_passes.verify.probe import Probe

PROBE = Probe.of_vocabulary(48, 11)
ATTENTION = "model.layers.0.self_attn"
MLP = "model.layers.0.mlp"


def attached(tiny_decoder, quantized, scales, **options):
    """Layer 0 with int8 weights per row; `scales`: short name to static scale, or None for none."""
    decoder = tiny_decoder()
    changed = {}
    for short, scale in scales.items():
        name = f"{ATTENTION if short in 'qkvo' else MLP}.{short}_proj.weight"
        array = decoder.arrays[name]
        weight = quantized(array, bits=8, symmetric=True, group=array.shape[1], **options)
        changed[name] = replace(weight, activation_scale=scale)
    return attach_weights(decoder.model, decoder.store.replace(changed))


def rounded(model):
    return [node for node in model.graph if node.op_type == "QuantizeLinear"]


def matmuls_of(model, names):
    """The products of layer 0's linear layers, by the dequantized weight they read."""
    found = {}
    for node in model.graph:
        if node.op_type == "MatMul" and (node.inputs[1].name or "").endswith(".dequantized"):
            found[node.inputs[1].name.split(".")[4].removesuffix("_proj")] = node
    return [found[name] for name in names]


def test_siblings_share_one_rounding_and_stay_one_value(tiny_decoder, quantized):
    model = attached(tiny_decoder, quantized, {"q": 0.03, "k": 0.03, "v": 0.03})
    assert len(rounded(model)) == 1
    assert len({node.inputs[0] for node in matmuls_of(model, "qkv")}) == 1
    assert verify_graph(model) == []


def test_other_scales_and_other_values_are_rounded_apart(tiny_decoder, quantized):
    model = attached(tiny_decoder, quantized, {"q": 0.03, "k": 0.02, "v": None, "o": 0.03, "gate": 0.03})
    assert len(rounded(model)) == 4
    q, k, v = matmuls_of(model, "qkv")
    assert len({q.inputs[0], k.inputs[0], v.inputs[0]}) == 3
    assert verify_graph(model) == []


def test_the_graph_computes_the_rounding_it_says(tiny_decoder, quantized):
    """Against the same graph with the two nodes written out as arithmetic."""
    scale = 0.03
    model = attached(tiny_decoder, quantized, {"q": scale, "k": scale, "v": scale, "down": 0.01})
    written_out = model.clone()
    for node in [node for node in written_out.graph if node.op_type == "QuantizeLinear"]:
        unround = next(iter(node.outputs[0].uses()))[0]
        number = node.inputs[1]
        limits = []
        for name, value in (("low", -127.0), ("high", 127.0)):
            tensor = ir.tensor(np.array(value, np.float32), name=f"{node.name}.{name}")
            limit = ir.Value(name=tensor.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
            written_out.graph.register_initializer(limit)
            limits.append(limit)
        steps = [ir.node("Div", [node.inputs[0], number])]
        steps.append(ir.node("Round", [steps[-1].outputs[0]]))
        steps.append(ir.node("Clip", [steps[-1].outputs[0], *limits]))
        steps.append(ir.node("Mul", [steps[-1].outputs[0], number]))
        written_out.graph.insert_before(unround, steps)
        unround.outputs[0].replace_all_uses_with(steps[-1].outputs[0])
        written_out.graph.remove([unround, node], safe=True)
    exact = attached(tiny_decoder, quantized, {"q": None, "k": None, "v": None, "down": None})
    logits = evaluate(model, PROBE)
    # A quotient on the edge between two codes may fall either way: one step of one activation.
    np.testing.assert_allclose(logits, evaluate(written_out, PROBE), rtol=1e-3, atol=1e-3)
    assert np.abs(logits - evaluate(exact, PROBE)).max() > 1e-3


def test_the_rounding_stands_before_the_permutation_and_is_shared_across_permutations(tiny_decoder, quantized):
    order = np.random.default_rng(5).permutation(32).astype(np.int32)
    model = attached(tiny_decoder, quantized, {"q": 0.03, "k": 0.03}, permutation=order)
    assert len(rounded(model)) == 1
    for product in matmuls_of(model, "qk"):
        gather = product.inputs[0].producer()
        assert gather.op_type == "Gather"
        assert gather.inputs[0].producer().op_type == "DequantizeLinear"
    plain = attached(tiny_decoder, quantized, {"q": 0.03, "k": 0.03})
    # One scale per row: the same codes in another order.
    np.testing.assert_allclose(evaluate(model, PROBE), evaluate(plain, PROBE), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("scales", "merges"), [((0.03, 0.03, 0.03), 1), ((0.03, 0.03, 0.02), 0)])
def test_projections_merge_if_they_read_one_rounded_value(tiny_decoder, quantized, scales, merges):
    q, k, v = scales
    model = attached(tiny_decoder, quantized, {"q": q, "k": k, "v": v})
    before = evaluate(model, PROBE)
    recorder = recorder_of(MergeQkv.rules)
    apply_rules(model, [rule.compiled() for rule in MergeQkv.rules], recorder)
    report = recorder.report()
    assert report.matched == 1 + merges  # the other layer is dense and merges always
    reasons = [entry.reason for entry in report.declined]
    assert bool(merges) or any("different inputs" in reason for reason in reasons), reasons
    np.testing.assert_allclose(evaluate(model, PROBE), before, rtol=1e-4, atol=1e-4)


def test_gate_and_up_merge_behind_one_rounding(tiny_decoder, quantized):
    model = attached(tiny_decoder, quantized, {"gate": 0.02, "up": 0.02, "down": 0.02})
    before = evaluate(model, PROBE)
    recorder = recorder_of(MergeGateUp.rules)
    apply_rules(model, [rule.compiled() for rule in MergeGateUp.rules], recorder)
    assert recorder.report().matched == 2
    np.testing.assert_allclose(evaluate(model, PROBE), before, rtol=1e-4, atol=1e-4)


def test_every_graph_pass_keeps_the_logits(tiny_decoder, quantized):
    scales = {"q": 0.03, "k": 0.03, "v": 0.03, "o": 0.01, "gate": 0.02, "up": 0.02, "down": 0.02}
    model = attached(tiny_decoder, quantized, scales)
    before = evaluate(model, PROBE)
    for pass_ in GRAPH_PASSES:
        if issubclass(pass_, FusionPass):
            apply_rules(model, [rule.compiled() for rule in pass_.rules], Recorder())
            assert verify_graph(model) == [], pass_.name
    assert len(rounded(model)) == 4
    # A sum in another order may push one activation over the edge between two codes.
    np.testing.assert_allclose(evaluate(model, PROBE), before, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("op_type", ["QuantizeLinear", "DequantizeLinear"])
def test_a_scale_per_feature_is_no_part_of_the_dialect(tiny_decoder, quantized, op_type):
    model = attached(tiny_decoder, quantized, {"q": 0.03})
    node = next(
        node for node in model.graph if node.op_type == op_type and not node.attributes.get_int("block_size", 0)
    )
    tensor = ir.tensor(np.full(32, 0.03, np.float32), name="scales")
    scales = ir.Value(name="scales", shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    model.graph.register_initializer(scales)
    node.replace_input_with(1, scales)
    (fault,) = verify_graph(model)
    assert "scale (32), want ()" in fault
