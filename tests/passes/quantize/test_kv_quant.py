"""Which format each layer's KV cache gets, and the scales that calibration gives it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from optimc.errors import PassError
from optimc_passes import kv_weights
from optimc_passes.artifact import Artifact
from optimc_passes.base import PassContext
from optimc_passes.calibrate import Calibration
from optimc_passes.choices import Choices, KvChoice
from optimc_passes.load import load_checkpoint
from optimc_passes.quantize.kv_quant import KvQuant, KvQuantConfig
from optimc_passes.weights import Dense

LAYERS, KV_HEADS, DIM = 3, 2, 16
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
}


def make_model(kind=LlamaForCausalLM, config=LlamaConfig, **facts):
    """Weights are large enough for attention to tell tokens apart."""
    torch.manual_seed(0)
    model = kind(config(**SHAPE, **facts)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 1.5 / parameter.shape[1] ** 0.5)
    return model


@pytest.fixture
def artifact_of(tmp_path):
    """A checkpoint with calibration text of 3 windows; `change` is applied to the model first."""

    def make(model, change=lambda _model: None, *, calibrated=True):
        with torch.no_grad():
            change(model)
        model.save_pretrained(tmp_path)
        rows = tuple(np.random.default_rng(5).integers(0, 96, (3, 24), np.int32))
        calibration = Calibration(rows, "digest", 72, "random tokens") if calibrated else None
        return Artifact.start(load_checkpoint(str(tmp_path), cache_dir=tmp_path), calibration)

    return make


def kv_quant(artifact, **options):
    return KvQuant(KvQuantConfig(**options))(artifact)


def keys_of(model, rows):
    """Every layer's keys after RoPE on windows of tokens, [Hkv, tokens, D], from transformers' own cache."""
    # A cache that is not told of the configuration forgets nothing where attention has a window.
    tokens = [torch.from_numpy(row.astype(np.int64))[None] for row in rows]
    caches = [model(row, past_key_values=DynamicCache(), use_cache=True).past_key_values for row in tokens]
    return [
        np.concatenate([cache.layers[layer].keys[0].detach().numpy() for cache in caches], axis=1)
        for layer in range(LAYERS)
    ]


def test_calibrated_scales_follow_the_largest_keys(artifact_of):
    def louder(model):
        for layer, factor in enumerate((1, 20, 5)):
            model.model.layers[layer].self_attn.k_proj.weight *= factor

    model = make_model()
    artifact = artifact_of(model, louder)
    after = kv_quant(artifact, keys="channel", positions=24).artifact
    largest = [np.abs(keys).max(axis=1) for keys in keys_of(model, artifact.calibration.tokens)]
    for layer in range(LAYERS):
        scales = after.weights[kv_weights.key_scales(layer)].read()
        assert scales.shape == (KV_HEADS, DIM)
        np.testing.assert_allclose(scales, largest[layer] / 127, rtol=0.02)
        assert after.choices.kv[layer] == KvChoice("int8", "channel", "calibrated", 72)
    means = [after.weights[kv_weights.key_scales(layer)].read().mean() for layer in range(LAYERS)]
    assert means[1] > 5 * means[0]
    assert means[2] > 2 * means[0]
    assert means[1] != means[2]


def test_scales_hold_keys_of_positions_that_calibration_did_not_reach(artifact_of):
    """Windows of 24 tokens, and a bias that RoPE turns slowly: at position 120 its channels hold other numbers."""

    def bias(model):
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias[[5, 21]] = 50.0

    model = make_model(Qwen2ForCausalLM, Qwen2Config)
    artifact = artifact_of(model, bias)
    near, far = (kv_quant(artifact, keys="channel", positions=count).artifact for count in (24, 120))
    later = keys_of(model, [np.random.default_rng(8).integers(0, 96, 120)])
    for layer in range(LAYERS):
        largest = np.abs(later[layer]).max(axis=1)
        held = [127 * each.weights[kv_weights.key_scales(layer)].read() for each in (near, far)]
        slow = [5, 13]  # the biased channel of each head and the other of its pair
        assert (largest / held[0])[:, slow].max() > 2
        assert (largest / held[1])[:, slow].max() < 1.1
        assert (held[1] >= held[0]).all()
        # Pairs that turned around within a window were seen at every angle.
        np.testing.assert_array_equal(held[0][:, [0, 8]], held[1][:, [0, 8]])


def test_layers_without_positions_have_no_keys_to_turn(artifact_of):
    model = make_model(SmolLM3ForCausalLM, SmolLM3Config, no_rope_layers=[1, 0, 1], pad_token_id=0)
    artifact = artifact_of(model)
    near, far = (kv_quant(artifact, keys="channel", positions=count).artifact.weights for count in (24, 120))
    same = [np.array_equal(near[name].read(), far[name].read()) for name in map(kv_weights.key_scales, range(LAYERS))]
    assert same == [False, True, False]


@pytest.mark.parametrize(
    ("kind", "config", "facts"),
    [
        (MistralForCausalLM, MistralConfig, {}),
        (Gemma2ForCausalLM, Gemma2Config, {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}),
    ],
)
def test_keys_are_those_of_a_model_whose_attention_has_a_window(artifact_of, kind, config, facts):
    """A window of 3 tokens changes what later layers read, and so their keys."""
    model = make_model(kind, config, sliding_window=3, head_dim=DIM, attn_implementation="eager", **facts)
    artifact = artifact_of(model)
    after = kv_quant(artifact, keys="channel", positions=24).artifact
    for layer, keys in enumerate(keys_of(model, artifact.calibration.tokens)):
        scales = after.weights[kv_weights.key_scales(layer)].read()
        np.testing.assert_allclose(scales, np.abs(keys).max(axis=1) / 127, rtol=1e-4)


def test_int4_spans_what_was_seen(artifact_of):
    model = make_model()
    artifact = artifact_of(model)
    after = kv_quant(artifact, dtype="int4", keys="channel", positions=24).artifact
    for layer, keys in enumerate(keys_of(model, artifact.calibration.tokens)):
        scales = after.weights[kv_weights.key_scales(layer)].read()
        minimums = after.weights[kv_weights.key_minimums(layer)].read()
        np.testing.assert_allclose(minimums, keys.min(axis=1), atol=1e-4)
        np.testing.assert_allclose(minimums + 15 * scales, keys.max(axis=1), atol=1e-4)


def test_keys_with_a_large_channel_get_scales_of_channels_and_even_ones_of_tokens(artifact_of):
    def bias_on_layer_1(model):
        model.model.layers[1].self_attn.k_proj.bias[[3, 20]] = 50.0

    artifact = artifact_of(make_model(Qwen2ForCausalLM, Qwen2Config), bias_on_layer_1)
    outcome = kv_quant(artifact, dtype="int4")
    assert [choice.keys for choice in outcome.artifact.choices.kv] == ["token", "channel", "token"]
    assert kv_weights.key_scales(1) in outcome.artifact.weights
    assert kv_weights.key_scales(0) not in outcome.artifact.weights
    row = outcome.report.layers[1]
    assert row.layer == "layers.1.kv"
    assert row.bits == 4
    assert row.error is not None
    assert row.error < 0.5
    assert "per token" in row.note
    assert "per channel" in row.note
    assert outcome.report.metrics["layers_with_keys_per_channel"] == 1
    assert outcome.report.calibration_tokens == 72


def test_a_better_format_has_a_smaller_error(artifact_of):
    artifact = artifact_of(make_model())
    errors = {dtype: [row.error for row in kv_quant(artifact, dtype=dtype).report.layers] for dtype in ("int8", "int4")}
    for int8, int4 in zip(errors["int8"], errors["int4"], strict=True):
        assert 0 < int8 < 0.02
        assert 5 * int8 < int4 < 0.5


def test_the_error_is_that_of_text_the_scales_have_not_seen(artifact_of):
    """Few tokens do not show how large keys may be: then scales of tokens are chosen, which cannot saturate."""
    outcome = kv_quant(artifact_of(make_model()))
    assert {choice.keys for choice in outcome.artifact.choices.kv} == {"token"}
    for row in outcome.report.layers:
        by_token, by_channel = (float(part.split()[-3]) for part in row.note.split(","))
        assert by_channel > 3 * by_token


def test_skipped_layers_stay_in_floating_point(artifact_of):
    outcome = kv_quant(artifact_of(make_model()), keys="channel", skip_layers=(0, 2), float_dtype="float32")
    assert [choice.dtype for choice in outcome.artifact.choices.kv] == ["float32", "int8", "float32"]
    assert [name for name in outcome.artifact.weights if name.startswith("kv_cache.")] == [kv_weights.key_scales(1)]
    assert [row.bits for row in outcome.report.layers] == [None, 8, None]
    assert outcome.report.decisions[:2] == (
        "layers.0: keys and values stay in float32",
        "layers.2: keys and values stay in float32",
    )
    assert outcome.report.decisions[2] == "scales of channels suit the first 128 positions of a sequence"


def test_scales_of_tokens_need_no_calibration(artifact_of):
    outcome = kv_quant(artifact_of(make_model(), calibrated=False), keys="token")
    assert outcome.artifact.choices.kv == (KvChoice("int8", "token", "dynamic", 0),) * LAYERS
    assert not any(name.startswith("kv_cache.") for name in outcome.artifact.weights)
    assert outcome.report.calibration_tokens is None


@pytest.mark.parametrize("keys", ["auto", "channel"])
def test_without_calibration_it_is_refused_or_says_uncalibrated(artifact_of, keys):
    artifact = artifact_of(make_model(), calibrated=False)
    with pytest.raises(PassError, match="needs calibration text"):
        kv_quant(artifact, keys=keys)
    outcome = kv_quant(artifact, keys=keys, allow_uncalibrated=True)
    provenance = {choice.provenance for choice in outcome.artifact.choices.kv}
    if keys == "channel":
        assert provenance == {"default"}
        assert "uncalibrated" in outcome.report.decisions[0]
        np.testing.assert_allclose(127 * outcome.artifact.weights[kv_weights.key_scales(0)].read(), 16)
    else:
        assert provenance == {"dynamic"}
        assert outcome.report.decisions == ("keys have scales of tokens: nothing was measured",)


def test_auto_takes_each_layer_as_it_was_chosen(artifact_of):
    chosen = tuple(KvChoice(dtype, "token", "dynamic", 0) for dtype in ("int4", "bfloat16", "int8"))
    artifact = artifact_of(make_model()).evolve(choices=Choices(kv=chosen))
    outcome = kv_quant(artifact, dtype="auto", keys="channel")
    assert [choice.dtype for choice in outcome.artifact.choices.kv] == ["int4", "bfloat16", "int8"]
    assert kv_weights.key_minimums(0) in outcome.artifact.weights
    assert kv_weights.key_minimums(2) not in outcome.artifact.weights
    with pytest.raises(PassError, match="chosen by a pass before"):
        kv_quant(artifact, dtype="int8")


def test_what_cannot_be_is_refused_in_words(artifact_of):
    artifact = artifact_of(make_model())
    with pytest.raises(PassError, match=r"skip_layers names 3, 7; the model has layers 0 to 2"):
        kv_quant(artifact, skip_layers=(1, 3, 7))
    with pytest.raises(PassError, match="put auto_bits"):
        kv_quant(artifact, dtype="auto")
    with pytest.raises(PassError, match="fp8 has scales of tokens only"):
        kv_quant(artifact, dtype="fp8", keys="channel")
    twice = kv_quant(artifact, keys="channel").artifact
    with pytest.raises(PassError, match="keys have scales already"):
        kv_quant(twice, dtype="auto")


def test_keys_that_are_not_finite_name_their_layer(artifact_of):
    def spoil(model):
        model.model.layers[1].self_attn.k_proj.weight *= 1e38

    with pytest.raises(PassError, match="layer 1: a key is not finite on the calibration tokens"):
        kv_quant(artifact_of(make_model(), spoil), keys="channel")


@pytest.mark.parametrize("keys", ["auto", "channel"])
def test_attention_that_is_not_finite_names_its_layer(artifact_of, keys):
    def spoil(model):
        model.model.layers[1].self_attn.o_proj.weight *= 1e38

    with pytest.raises(PassError, match="layer 1: what attention adds is not finite on the calibration tokens"):
        kv_quant(artifact_of(make_model(), spoil), keys=keys)


def test_keys_that_make_no_difference_keep_scales_of_tokens(artifact_of):
    def mute(model):
        model.model.layers[1].self_attn.v_proj.weight *= 0

    choices = kv_quant(artifact_of(make_model(), mute)).artifact.choices.kv
    assert choices[1].keys == "token"


def test_a_walk_that_was_cut_short_goes_on_and_ends_with_the_same(artifact_of, tmp_path):
    artifact = artifact_of(make_model())
    whole = kv_quant(artifact, keys="channel")

    def die(done, _total, _label):
        if done == 2:
            raise KeyboardInterrupt

    context = PassContext(progress=die, partial=tmp_path / "partial")
    with pytest.raises(KeyboardInterrupt):
        KvQuant(KvQuantConfig(keys="channel"))(artifact, context)
    again = KvQuant(KvQuantConfig(keys="channel"))(artifact, PassContext(partial=tmp_path / "partial"))
    assert again.report.resumed_at == 2
    assert again.artifact.choices == whole.artifact.choices
    for name in whole.artifact.weights:
        if name.startswith("kv_cache."):
            np.testing.assert_array_equal(again.artifact.weights[name].read(), whole.artifact.weights[name].read())
    assert [row.error for row in again.report.layers] == [row.error for row in whole.report.layers]


def test_nothing_but_the_keys_scales_is_added_and_memory_may_be_short(artifact_of):
    artifact = artifact_of(make_model())
    roomy = kv_quant(artifact, keys="channel").artifact
    short = KvQuant(KvQuantConfig(keys="channel"))(artifact, PassContext(max_host_bytes=1)).artifact
    for name in roomy.weights:
        weight = roomy.weights[name]
        if name.startswith("kv_cache."):
            assert isinstance(weight, Dense)
            np.testing.assert_array_equal(weight.read(), short.weights[name].read())
        else:
            assert weight is artifact.weights[name]
