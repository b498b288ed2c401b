"""AWQ on whole models: scaling alone changes nothing, rounding after it costs less, and what cannot be done is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Olmo2Config, Olmo2ForCausalLM

from optimc.errors import PassError
from optimc_passes.artifact import Artifact
from optimc_passes.base import PassContext
from optimc_passes.quantize.awq import Awq, AwqConfig
from optimc_passes.quantize.rtn import Rtn, RtnConfig
from optimc_passes.weights import Dense, Quantized

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_model(kind: Any = LlamaForCausalLM, config: Any = LlamaConfig, **facts: Any) -> Any:
    """A model some of whose channels are much louder than the rest, as those of trained models are."""
    torch.manual_seed(0)
    model = kind(config(**{**SHAPE, **facts})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 1.0 / parameter.shape[1] ** 0.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
            elif "layernorm" in name:
                parameter.uniform_(0.5, 1.5)
                parameter[[3, 17, 40]] *= 20
    return model


def awq(artifact: Artifact, **options: Any) -> Any:
    return Awq(AwqConfig(**options))(artifact)


def logits_of(model: Any, artifact: Artifact) -> np.ndarray:
    """Log-probabilities of transformers' model with the artifact's weights on the calibration rows."""
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in artifact.weights.items():
            values = weight.read() if isinstance(weight, Dense) else weight.dequantize()
            if name not in own:  # a tied head's own codes
                model.lm_head.weight = torch.nn.Parameter(torch.tensor(values))
            else:
                own[name].copy_(torch.tensor(values.astype(np.float32)))
        rows = torch.from_numpy(np.stack(artifact.calibration.tokens).astype(np.int64))
        return torch.log_softmax(model(rows, use_cache=False).logits.double(), dim=-1).numpy()


def divergence(model: Any, before: Artifact, after: Artifact) -> float:
    reference, actual = logits_of(model, before), logits_of(model, after)
    return float((np.exp(reference) * (reference - actual)).sum(axis=-1).mean())


@pytest.mark.parametrize("biased", [False, True])
def test_scaling_alone_changes_no_logit_and_leaves_everything_dense(artifact_of: Any, biased: bool):
    model = make_model(attention_bias=biased, mlp_bias=biased)
    artifact = artifact_of(model)
    outcome = awq(artifact, group_size=32, rounding="later")
    before, after = logits_of(model, artifact), logits_of(model, outcome.artifact)
    np.testing.assert_allclose(after, before, atol=1e-4)
    assert all(isinstance(weight, Dense) for weight in outcome.artifact.weights.values())
    changed = {name for name, weight in outcome.artifact.weights.items() if weight is not artifact.weights[name]}
    assert {f"model.layers.{layer}.input_layernorm.weight" for layer in (0, 1)} <= changed
    assert outcome.report.metrics["scaled"] == 14
    assert [row.bits for row in outcome.report.layers] == [None] * 14
    assert outcome.report.calibration_tokens == 96


def test_rounding_loses_less_than_rounding_as_it_is(artifact_of: Any):
    model = make_model()
    artifact = artifact_of(model)
    rounded = Rtn(RtnConfig(bits=4, group_size=32))(artifact).artifact
    scaled = awq(artifact, group_size=32)
    plain, better = divergence(model, artifact, rounded), divergence(model, artifact, scaled.artifact)
    assert better < 0.5 * plain
    for row in scaled.report.layers:
        assert row.bits == 4
        assert row.group == 32
        assert 0 < row.error < 0.3
        assert row.bytes_after < row.bytes_before
    weight = scaled.artifact.weights["model.layers.1.mlp.down_proj.weight"]
    assert isinstance(weight, Quantized)
    assert weight.method == "awq"


def test_a_pass_behind_it_rounds_what_it_scaled(artifact_of: Any):
    model = make_model()
    artifact = artifact_of(model)
    later = awq(artifact, group_size=32, rounding="later").artifact
    both = Rtn(RtnConfig(bits=4, group_size=32))(later).artifact
    plain = Rtn(RtnConfig(bits=4, group_size=32))(artifact).artifact
    assert divergence(model, artifact, both) < 0.6 * divergence(model, artifact, plain)


def test_clipped_ranges_lower_the_error_of_the_layers(artifact_of: Any):
    artifact = artifact_of(make_model())
    errors = [
        {row.layer: row.error for row in awq(artifact, bits=3, group_size=32, clip=clip).report.layers}
        for clip in (False, True)
    ]
    assert sum(errors[1].values()) < 0.97 * sum(errors[0].values())


def test_the_wrong_order_is_refused_with_the_remedy(artifact_of: Any):
    rounded = awq(artifact_of(make_model()), group_size=32).artifact
    with pytest.raises(PassError, match="quantized already: 14 layers"):
        Rtn(RtnConfig(group_size=32))(rounded)
    with pytest.raises(PassError, match="quantized already"):
        awq(rounded, group_size=32)


def test_bits_that_nobody_chose_and_shapes_that_do_not_divide_are_refused_before_any_forward(
    artifact_of: Any, monkeypatch: pytest.MonkeyPatch
):
    from optimc_passes.walk import layered_model

    def forward(*_: Any) -> None:
        raise AssertionError("a model was made")

    artifact = artifact_of(make_model())
    monkeypatch.setattr(layered_model.LayeredModel, "__init__", forward)
    with pytest.raises(PassError, match="bits are auto, and no pass before has chosen"):
        awq(artifact, bits="auto")
    with pytest.raises(PassError, match="96 columns .*down_proj.*group_size 64"):
        awq(artifact, group_size=64)
    without = artifact.evolve(calibration=None)
    with pytest.raises(PassError, match="calibration"):
        awq(without, group_size=32)


def test_a_layer_left_out_is_scaled_with_its_siblings_and_stays_dense(artifact_of: Any):
    model = make_model()
    artifact = artifact_of(model)
    after = awq(artifact, bits=8, group_size=32, ignore=["*.k_proj", "lm_head"]).artifact
    name = "model.layers.0.self_attn.k_proj.weight"
    assert isinstance(after.weights[name], Dense)
    assert not np.array_equal(after.weights[name].read(), artifact.weights[name].read())
    assert divergence(model, artifact, after) < 1e-3  # eight bits; a scale forgotten in k would cost far more


def test_layers_without_a_norm_before_them_are_rounded_as_they_are_and_told(artifact_of: Any):
    model = make_model(Olmo2ForCausalLM, Olmo2Config)
    artifact = artifact_of(model)
    outcome = awq(artifact, bits=8, group_size=32)
    notes = {row.layer.rpartition(".")[2]: row.note for row in outcome.report.layers}
    assert "nothing before it can take the scales" in notes["q_proj"]
    assert "nothing before it can take the scales" in notes["gate_proj"]
    assert notes["down_proj"].startswith("scaled")
    assert any(line.startswith("10 layers, e.g. ") for line in outcome.report.decisions), outcome.report.decisions
    assert divergence(model, artifact, outcome.artifact) < 1e-3


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_is_rounded_apart_from_its_embedding(artifact_of: Any, tied: bool):
    model = make_model(tie_word_embeddings=tied)
    artifact = artifact_of(model)
    outcome = awq(artifact, bits=8, group_size=32, ignore=[])
    after = outcome.artifact
    assert isinstance(after.weights["lm_head.weight"], Quantized)
    embedding = after.weights["model.embed_tokens.weight"]
    np.testing.assert_array_equal(embedding.read(), artifact.weights["model.embed_tokens.weight"].read())
    assert outcome.report.layers[-1].layer == "lm_head"
    assert divergence(make_model(tie_word_embeddings=tied), artifact, after) < 2e-3


def test_inputs_that_are_not_finite_name_the_layer(artifact_of: Any):
    model = make_model()
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight.fill_(3e38)
    with pytest.raises(
        PassError, match=r"awq failed.*model\.layers\.1\.self_attn\.q_proj: what it reads is not finite"
    ):
        awq(artifact_of(model), group_size=32)


def test_a_weight_that_is_not_finite_names_its_layer(artifact_of: Any):
    model = make_model()
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight[3, 5] = np.nan
    artifact = artifact_of(model)
    with pytest.raises(PassError, match=r"model\.layers\.0\.mlp\.gate_proj.*not finite"):
        awq(artifact, group_size=32, only=["*.gate_proj"])


def test_the_same_twice_is_the_same_to_the_bit(artifact_of: Any):
    artifact = artifact_of(make_model())
    first, second = (awq(artifact, group_size=32).artifact.weights for _ in range(2))
    for name, weight in first.items():
        other = second[name]
        if isinstance(weight, Quantized):
            np.testing.assert_array_equal(weight.codes.read(), other.codes.read())
            np.testing.assert_array_equal(weight.scales.read(), other.scales.read())
        else:
            np.testing.assert_array_equal(weight.read(), other.read())


def test_a_walk_that_was_cut_short_goes_on_to_the_same_result(artifact_of: Any, tmp_path: Path):
    artifact = artifact_of(make_model())
    pass_ = Awq(AwqConfig(group_size=32))
    whole = pass_(artifact)

    def stop(done: int, _total: int, _label: str) -> None:
        if done == 1:
            raise KeyboardInterrupt

    partial = tmp_path / "partial"
    with pytest.raises(KeyboardInterrupt):
        pass_(artifact, PassContext(progress=stop, partial=partial))
    resumed = pass_(artifact, PassContext(partial=partial))
    assert resumed.report.resumed_at == 1
    assert [row.layer for row in resumed.report.layers] == [row.layer for row in whole.report.layers]
    assert resumed.report.decisions == whole.report.decisions
    assert dict(resumed.report.metrics) == dict(whole.report.metrics)
    for name, weight in whole.artifact.weights.items():
        values = weight.dequantize() if isinstance(weight, Quantized) else weight.read()
        other = resumed.artifact.weights[name]
        np.testing.assert_array_equal(other.dequantize() if isinstance(other, Quantized) else other.read(), values)
