"""Biases through quantization and fusion: kept exactly, added once, and not there where the model has none."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from optimc.plan import Plan
from optimc_passes.artifact import Artifact
from optimc_passes.calibrate import Calibration
from optimc_passes.frontend import export_graph
from optimc_passes.fuse.apply_rules import apply_rules
from optimc_passes.fuse.pipeline import GRAPH_PASSES
from optimc_passes.fuse.recorder import Recorder
from optimc_passes.fuse.rule import FusionPass
from optimc_passes.graph.attach import attach_weights
from optimc_passes.load import load_checkpoint
from optimc_passes.registry import make_pass
from optimc_passes.verify.evaluate import evaluate
from optimc_passes.verify.probe import Probe
from optimc_passes.weights import Dense, Quantized

pytestmark = pytest.mark.slow

LAYERS, VOCAB = 2, 96
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PASSES = {
    "rtn": [("rtn", {"group_size": 32})],
    "gptq": [("gptq", {"group_size": 32})],
    "awq": [("awq", {"group_size": 32})],
    "awq-gptq": [("awq", {"group_size": 32, "rounding": "later"}), ("gptq", {"group_size": 32})],
}
CALIBRATION = {"samples": 8, "seq_len": 64}


def make_model(*, biased: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        attention_bias=biased,
        mlp_bias=biased,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 1.0 / parameter.shape[1] ** 0.5)
            elif name.endswith("bias"):
                parameter.normal_()
                parameter *= 10 / parameter.norm()
    return model


@pytest.fixture(scope="module", params=[True, False], ids=["biased", "bias-free"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model, its checkpoint with calibration tokens, and its exported graph."""
    model = make_model(biased=request.param)
    folder = tmp_path_factory.mktemp("biased" if request.param else "plain")
    model.save_pretrained(folder)
    rows = tuple(np.random.default_rng(5).integers(0, VOCAB, (4, 24), np.int32))
    checkpoint = load_checkpoint(str(folder), cache_dir=folder)
    artifact = Artifact.start(checkpoint, Calibration(rows, "digest", 96, "random tokens"))
    return request.param, model, artifact, export_graph(checkpoint.config, max_seq_len=64).model


def fused(exported: Any, artifact: Artifact) -> Any:
    model = attach_weights(exported, artifact.weights)
    for pass_ in GRAPH_PASSES:
        if issubclass(pass_, FusionPass):
            apply_rules(model, [rule.compiled() for rule in pass_.rules], Recorder())
    return model


@pytest.mark.parametrize("passes", PASSES)
def test_fused_logits_are_those_of_dequantized_weights_plus_biases(case: Any, passes: str):
    biased, model, artifact, exported = case
    for name, options in PASSES[passes]:
        artifact = make_pass(name, options)(artifact).artifact
    graph = fused(exported, artifact)
    probe = Probe.of_vocabulary(VOCAB, 20)
    logits = evaluate(graph, probe)
    reference = LlamaForCausalLM(model.config).eval()
    own = dict(reference.named_parameters())
    assert any(name.endswith("bias") for name in own) == biased
    with torch.no_grad():
        for name, weight in artifact.weights.items():
            own[name].copy_(torch.tensor(weight.read() if isinstance(weight, Dense) else weight.dequantize()))
        tokens = torch.from_numpy(probe.tokens)[None]
        expected = reference(tokens, use_cache=False).logits[0].numpy()
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()
    assert sum(isinstance(weight, Quantized) for weight in artifact.weights.values()) == 7 * LAYERS


@pytest.mark.parametrize("passes", ["rtn", "awq"])
def test_each_bias_has_one_owner_in_the_fused_graph(case: Any, passes: str):
    biased, _, artifact, exported = case
    for name, options in PASSES[passes]:
        artifact = make_pass(name, options)(artifact).artifact
    graph = fused(exported, artifact).graph
    biases = [value for name, value in graph.initializers.items() if name.endswith("bias")]
    # q, k and v as one; o; gate and up as one; down.
    assert len(biases) == (4 * LAYERS if biased else 0)
    owners = Counter(node.op_type for value in biases for node, _ in value.uses())
    assert owners == ({"Add": 4 * LAYERS} if biased else {})
    assert sum(node.op_type == "Add" for node in graph if not node.domain) <= len(biases) + 1


@pytest.mark.parametrize("biased", [True, False])
def test_a_plan_has_the_biases_of_its_model_and_no_others(build: Any, tmp_path: Path, tiny_folder: Path, biased: bool):
    model = make_model(biased=biased)
    model.resize_token_embeddings(384)
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_folder / name).read_bytes())
    limits = {"max_seq_len": 64, "max_step_tokens": 32, "max_seqs": 4, "kv_memory": "1MiB"}
    passes = [{name: options} for name, options in PASSES["awq-gptq"]]
    result = build(
        f"bias-{biased}", model=str(tmp_path), passes=[*passes, "fuse"], calibration=CALIBRATION, limits=limits
    )
    with Plan.open(result.path) as plan:
        held = [tensor.name for tensor in plan if "bias" in tensor.name]
        linears = [op for op in plan.manifest.program["ops"] if op["op"] == "linear"]
    assert len(held) == (4 * LAYERS if biased else 0)
    assert sum("bias" in op for op in linears) == len(held)
