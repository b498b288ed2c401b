"""SmoothQuant: loudness moves from activations into weights by the formula, and static scales are what was seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from optimc.errors import PassError
from optimc_passes.artifact import Artifact
from optimc_passes.quantize.rtn import Rtn, RtnConfig
from optimc_passes.quantize.smoothquant import SmoothQuant, SmoothQuantConfig
from optimc_passes.quantize.smoothquant_walk import activation_scale, smoothing
from optimc_passes.weights import Dense, Quantized

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
LOUD = [3, 17, 40]


def make_model(kind: Any = LlamaForCausalLM, config: Any = LlamaConfig, **facts: Any) -> Any:
    torch.manual_seed(0)
    model = kind(config(**{**SHAPE, **facts})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 1.0 / parameter.shape[1] ** 0.5)
            elif "layernorm" in name:
                parameter.uniform_(0.5, 1.5)
                parameter[LOUD] *= 40
    return model


def smoothquant(artifact: Artifact, **options: Any) -> Any:
    return SmoothQuant(SmoothQuantConfig(**options))(artifact)


def put(model: Any, artifact: Artifact) -> Any:
    """Transformers' model with the artifact's weights."""
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in artifact.weights.items():
            own[name].copy_(torch.tensor(weight.read() if isinstance(weight, Dense) else weight.dequantize()))
    return model


def inputs_of(model: Any, artifact: Artifact) -> dict[str, np.ndarray]:
    """What each linear layer reads on the calibration rows, [tokens, C]."""
    seen: dict[str, np.ndarray] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _m, args, name=name: seen.update({name: args[0].flatten(0, -2).numpy()})
        )
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    rows = torch.from_numpy(np.stack(artifact.calibration.tokens).astype(np.int64))
    with torch.no_grad():
        seen["logits"] = model(rows, use_cache=False).logits.numpy()
    for hook in hooks:
        hook.remove()
    return seen


def rounded_per_token(x: np.ndarray) -> np.ndarray:
    scales = np.abs(x).max(axis=1, keepdims=True) / 127
    return np.rint(x / scales) * scales


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
def test_the_scales_are_the_papers_but_for_a_common_factor(alpha: float):
    rng = np.random.default_rng(1)
    largest = rng.uniform(0.1, 50, 64).astype(np.float32)
    weights = [rng.standard_normal((rows, 64)).astype(np.float32) for rows in (32, 16)]
    columns = np.maximum(np.abs(weights[0]).max(axis=0), np.abs(weights[1]).max(axis=0))
    paper = largest**alpha / columns ** (1 - alpha)
    found = smoothing(largest, weights, alpha, np.arange(64))
    np.testing.assert_allclose(found / found[0], paper / paper[0], rtol=1e-4)


def test_dead_channels_and_dead_weights_have_finite_positive_scales():
    largest = np.ones(64, np.float32)
    largest[:3] = 0, 1e5, 1e-30
    weight = np.ones((8, 64), np.float32)
    weight[:, 5] = 0
    for alpha in (0.0, 0.5, 1.0):
        found = smoothing(largest, [weight], alpha, np.arange(64))
        assert np.isfinite(found).all()
        assert (found > 0).all()


def test_a_static_scale_reaches_the_largest_and_is_never_zero():
    assert activation_scale(254.0) == 2.0
    assert activation_scale(0.0) == 1.0
    assert activation_scale(1e-42) == 1.0


def test_smoothing_alone_changes_no_logit_and_evens_out_what_layers_read(artifact_of: Any):
    artifact = artifact_of(make_model())
    after = smoothquant(artifact, rounding="later").artifact
    before, smooth = inputs_of(put(make_model(), artifact), artifact), inputs_of(put(make_model(), after), artifact)
    np.testing.assert_allclose(smooth["logits"], before["logits"], rtol=1e-4, atol=1e-4)
    assert all(isinstance(weight, Dense) for weight in after.weights.values())
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"):
        peak = [np.abs(x[name]).max(axis=0) for x in (before, smooth)]
        assert peak[1].max() / np.median(peak[1]) < 0.4 * peak[0].max() / np.median(peak[0])


def test_products_of_smoothed_integers_lose_less(artifact_of: Any):
    """Each layer's product with activations of 8 bits per token, against the same without smoothing."""
    artifact = artifact_of(make_model())
    plain = Rtn(RtnConfig(bits=8, symmetric=True, group_size=-1))(artifact).artifact
    smooth = smoothquant(artifact)
    original = inputs_of(put(make_model(), artifact), artifact)
    scaled = inputs_of(put(make_model(), smoothquant(artifact, rounding="later").artifact), artifact)
    lost = np.zeros(2)
    for row in smooth.report.layers:
        name = f"{row.layer}.weight"
        exact = original[row.layer] @ artifact.weights[name].read().T
        for place, (store, x) in enumerate(((plain, original), (smooth.artifact, scaled))):
            product = rounded_per_token(x[row.layer]) @ store.weights[name].dequantize().T
            if row.layer.endswith(("v_proj", "up_proj")):
                continue  # their outputs are scaled as well
            lost[place] += np.linalg.norm(product - exact) / np.linalg.norm(exact)
    assert lost[1] < 0.6 * lost[0]


def test_weights_are_int8_per_row_and_token_scales_leave_no_trace(artifact_of: Any):
    outcome = smoothquant(artifact_of(make_model()))
    weight = outcome.artifact.weights["model.layers.0.mlp.down_proj.weight"]
    assert isinstance(weight, Quantized)
    assert (weight.bits, weight.group, weight.zeros, weight.activation_scale) == (8, 96, None, None)
    assert weight.scales.shape == (64, 1)
    assert isinstance(outcome.artifact.weights["lm_head.weight"], Dense)
    assert [(row.bits, row.group) for row in outcome.report.layers if "down" in row.layer] == [(8, 96)] * 2


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_static_scales_are_the_largest_that_was_read_one_for_siblings(artifact_of: Any, family: str):
    kind = {"llama": (LlamaForCausalLM, LlamaConfig), "phi3": (Phi3ForCausalLM, Phi3Config)}[family]
    artifact = artifact_of(make_model(*kind))
    after = smoothquant(artifact, activations="static").artifact
    # What the folded model reads, before anything is rounded.
    smooth = inputs_of(put(make_model(*kind), smoothquant(artifact, rounding="later").artifact), artifact)
    static = {
        name.removesuffix(".weight"): weight.activation_scale
        for name, weight in after.weights.items()
        if isinstance(weight, Quantized)
    }
    assert len(static) == (14 if family == "llama" else 8)
    for layer, scale in static.items():
        assert scale == pytest.approx(np.abs(smooth[layer]).max() / 127, rel=1e-4)
    if family == "llama":
        assert len({static[f"model.layers.0.self_attn.{name}_proj"] for name in "qkv"}) == 1
        assert static["model.layers.0.mlp.gate_proj"] == static["model.layers.0.mlp.up_proj"]


def test_static_scales_of_weights_that_stay_dense_make_no_sense():
    with pytest.raises(ValidationError, match="static activation scales belong to rounded weights"):
        SmoothQuantConfig(activations="static", rounding="later")


def test_a_pass_behind_it_rounds_and_the_wrong_order_is_refused(artifact_of: Any):
    artifact = artifact_of(make_model())
    later = smoothquant(artifact, rounding="later").artifact
    Rtn(RtnConfig(bits=8, symmetric=True, group_size=-1))(later)
    with pytest.raises(PassError, match="quantized already"):
        Rtn(RtnConfig(bits=8, symmetric=True, group_size=-1))(smoothquant(artifact).artifact)


def test_inputs_that_are_not_finite_name_the_layer(artifact_of: Any):
    model = make_model()
    with torch.no_grad():
        model.model.layers[1].post_attention_layernorm.weight.fill_(3e38)
    with pytest.raises(PassError, match=r"model\.layers\.1\.mlp\.gate_proj: what it reads is not finite"):
        smoothquant(artifact_of(model))
