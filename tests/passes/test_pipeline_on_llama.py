"""The whole compile time on a tiny Llama as transformers writes it: loading, export, quantization, fusion."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from optimc_passes.artifact import Artifact
from optimc_passes.frontend import export_graph
from optimc_passes.graph.exported import Exported
from optimc_passes.load import load_checkpoint
from optimc_passes.pipeline import GraphSource, run_pipeline
from optimc_passes.registry import make_pass
from optimc_passes.verify.evaluate import evaluate
from optimc_passes.verify.probe import Probe
from optimc_passes.weights import Quantized

PROBE = Probe.of_vocabulary(96, 40)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The model, its checkpoint as loaded, and its exported graph."""
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    checkpoint = load_checkpoint(str(folder), cache_dir=folder / "cache")
    return model, checkpoint, export_graph(checkpoint.config, max_seq_len=128).model


def run(llama, *specs):
    _, checkpoint, exported = llama
    passes = [make_pass(name, options) for name, options in specs]
    return run_pipeline(passes, Artifact.start(checkpoint), GraphSource("e" * 64, lambda: Exported.of(exported)))


def logits_of(model):
    with torch.no_grad():
        return model(torch.from_numpy(PROBE.tokens)[None]).logits[0].numpy()


def test_the_fused_graph_computes_what_transformers_computes(llama):
    result = run(llama, ("merge_qkv", {}), ("merge_gate_up", {}))
    assert [report.metrics["matched"] for report in result.reports] == [2, 2]
    # The parity we promise for float32; 2 layers reach about 1e-6.
    np.testing.assert_allclose(evaluate(result.artifact.graph, PROBE), logits_of(llama[0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ignore", [["lm_head"], []])
def test_the_quantized_graph_computes_what_transformers_computes_with_the_rounded_weights(llama, ignore):
    model, checkpoint, _ = llama
    options = {"bits": 4, "group_size": 32, "ignore": ignore}
    result = run(llama, ("rtn", options), ("merge_qkv", {}), ("merge_gate_up", {}))
    assert [report.metrics.get("matched") for report in result.reports] == [None, 2, 2]
    rounded = LlamaForCausalLM(type(checkpoint.config)(**{**checkpoint.config.to_dict(), "tie_word_embeddings": False}))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, weight in result.artifact.weights.items():
        if isinstance(weight, Quantized):
            state[name] = torch.from_numpy(weight.dequantize())
    rounded.load_state_dict(state)
    expected = logits_of(rounded.eval())
    np.testing.assert_allclose(evaluate(result.artifact.graph, PROBE), expected, rtol=1e-4, atol=1e-5)
    assert np.abs(expected - logits_of(model)).max() > 1e-3, "rounding to 4 bits must show"
