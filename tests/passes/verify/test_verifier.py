import re

import numpy as np
import onnx_ir as ir
import pytest

from optimc.errors import VerifyError
from optimc_passes.graph.attach import attach_weights
from optimc_passes.verify import GraphVerifier, verifier
from optimc_passes.verify.numeric import TOLERANCE
from optimc_passes.verify.probe import Probe

PROBE = Probe.of_vocabulary(48, 8)
Q0 = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def decoder(tiny_decoder):
    return tiny_decoder(layers=1)


@pytest.fixture
def model(decoder):
    return attach_weights(decoder.model, decoder.store)


@pytest.fixture
def broken(model):
    """The graph with gate and up exchanged: sound, but another function."""
    wrong = model.clone()
    gate, up = (
        node
        for node in wrong.graph
        if node.op_type == "MatMul" and node.outputs[0].shape[-1] == 48 and node.outputs[0].shape[1] == "T"
    )
    first, second = gate.inputs[1], up.inputs[1]
    gate.replace_input_with(1, second)
    up.replace_input_with(1, first)
    return wrong


def test_an_equal_graph_is_accepted_with_its_error(model):
    assert GraphVerifier("numeric", PROBE).check("merge", ["rtn"], model, model.clone()) == 0


def test_a_graph_that_computes_something_else_fails_naming_pass_error_and_tolerance(model, broken):
    message = (
        rf"^merge failed after \[rtn, awq\]: logits changed by .* relative, over the tolerance of {TOLERANCE:g}; "
        r"first at node 'node_MatMul_19' MatMul, whose 'val_19' is off by .*; 'val_17' is still equal$"
    )
    with pytest.raises(VerifyError, match=message) as caught:
        GraphVerifier("numeric", PROBE).check("merge", ["rtn", "awq"], model, broken)
    assert (caught.value.name, caught.value.node) == ("merge", "node_MatMul_19")


def test_a_broken_rule_fails_before_anything_is_computed(model, monkeypatch):
    monkeypatch.setattr(verifier, "evaluate", lambda *_: pytest.fail("it was run"))
    wrong = model.clone()
    attention = next(node for node in wrong.graph if node.op_type == "PagedAttention")
    attention.attributes["num_heads"] = ir.AttrInt64("num_heads", 3)
    for level in ("shapes", "numeric"):
        with pytest.raises(VerifyError, match="merge failed after .*: the graph breaks rules: node .* PagedAttention"):
            GraphVerifier(level, PROBE).check("merge", [], model, wrong)


def test_levels_below_numeric_run_nothing(model, broken, monkeypatch):
    monkeypatch.setattr(verifier, "evaluate", lambda *_: pytest.fail("it was run"))
    assert GraphVerifier("shapes", PROBE).check("merge", [], model, broken) is None
    broken.graph.inputs.clear()
    assert GraphVerifier("off", PROBE).check("merge", [], model, broken) is None


@pytest.fixture
def runs(monkeypatch):
    """The graphs that were run."""
    runs = []
    real = verifier.evaluate

    def evaluate(graph, *rest):
        runs.append(graph)
        return real(graph, *rest)

    monkeypatch.setattr(verifier, "evaluate", evaluate)
    return runs


def other_form(model, name):
    """The same function from other bytes."""
    other = model.clone()
    next(iter(other.graph)).name = name
    return other


def test_each_graph_is_run_once(model, runs):
    judge = GraphVerifier("numeric", PROBE)
    first, second = other_form(model, "a"), other_form(model, "b")
    judge.check("a", [], model, first)
    judge.check("b", ["a"], first, second)
    assert [id(graph) for graph in runs] == [id(model), id(first), id(second)]


def test_a_graph_that_did_not_change_is_not_run_again(model, runs):
    judge = GraphVerifier("numeric", PROBE)
    same, other = model.clone(), other_form(model, "c")
    assert judge.check("a", [], model, same) == 0
    assert judge.check("b", ["a"], same, other) == 0
    assert [id(graph) for graph in runs] == [id(model), id(other)]


def test_logits_that_are_not_finite_fail_the_graph_they_come_from(decoder, model):
    decoder.arrays["model.norm.weight"][0] = np.inf
    with pytest.raises(VerifyError, match=r"^rtn failed after \[\]: logits on probe tokens are not finite"):
        GraphVerifier("numeric", PROBE).check("merge", ["rtn"], model, model.clone())


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_rewrite_that_brings_in_what_is_not_finite_is_located(model, number):
    wrong = model.clone()
    scale = wrong.graph.initializers["model.layers.0.post_attention_layernorm.weight"]
    scale.const_value = ir.tensor(np.full(scale.shape.numpy(), number, np.float32), name=scale.name)
    ((norm, _),) = scale.uses()
    said = f"merge failed after [attach]: logits on probe tokens are not finite; first at node '{norm.name}'"
    with pytest.raises(VerifyError, match=re.escape(said)) as caught:
        GraphVerifier("numeric", PROBE).check("merge", ["attach"], model, wrong)
    assert caught.value.node == norm.name


def test_what_the_reference_runtime_cannot_run_is_said(model, monkeypatch):
    def fail(*_):
        raise RuntimeError("no kernel for Foo")

    monkeypatch.setattr(verifier, "evaluate", fail)
    with pytest.raises(VerifyError, match="onnxruntime cannot run the graph: no kernel for Foo"):
        GraphVerifier("numeric", PROBE).check("merge", [], model, model.clone())


def test_a_shape_that_is_not_so_is_named_with_both_shapes_and_its_node(model):
    wrong = model.clone()
    product = next(node for node in wrong.graph if node.op_type == "Mul")
    product.outputs[0].shape = ir.Shape([1, "R", 48])
    with pytest.raises(VerifyError, match=r"declares \[1,R,48\], computes \[1,T,48\]") as caught:
        GraphVerifier("shapes", PROBE).check("merge", [], model, wrong)
    assert caught.value.node == product.name
    assert "node 16 Mul 'node_Mul_21'" in str(caught.value)


def test_dimensions_that_nodes_leave_open_are_filled_in(model):
    for node in model.graph:
        node.outputs[0].shape = None
    GraphVerifier("shapes", PROBE).check_rules("attach", [], model)
    assert [str(node.outputs[0].shape) for node in model.graph][:4] == ["[T,32]", "[1,T,32]", "[1,T,32]", "[1,T,32]"]
    assert str(model.graph.outputs[0].shape) == "[R,48]"
