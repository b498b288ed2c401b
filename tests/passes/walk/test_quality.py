"""The probe's figures are those of the evaluation, and of the whole model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from optimc.measure.divergence import WindowScore, score_window
from optimc_passes.walk.activations import Activations
from optimc_passes.walk.budget import Budget
from optimc_passes.walk.quality import QualityProbe
from optimc_passes.weights import Dense, WeightStore

WINDOWS = np.random.default_rng(3).integers(0, 96, (2, 70)).astype(np.int32)
"""Longer than the rows of logits that are made at a time."""


def noisy(weights: WeightStore, *, only: str = "") -> WeightStore:
    rng = np.random.default_rng(0)
    return WeightStore(
        {
            name: Dense.of(weight.read() + 0.02 * rng.standard_normal(weight.shape).astype(np.float32))
            if only in name
            else weight
            for name, weight in weights.items()
        }
    )


def whole_model_score(family: Any, weights: WeightStore) -> WindowScore:
    import copy

    changed = copy.deepcopy(family.model)
    total = WindowScore()
    with torch.no_grad():
        for name, weight in weights.items():
            changed.get_parameter(name).copy_(torch.from_numpy(weight.read()))
        for tokens in WINDOWS:
            ids = torch.from_numpy(tokens.astype(np.int64))[None]
            logits, reference = (model(ids, use_cache=False).logits[0].numpy() for model in (changed, family.model))
            total += score_window(tokens, logits, reference)
    return total


def probe(family: Any) -> QualityProbe:
    return QualityProbe(family.checkpoint, WINDOWS, scratch=None, budget=Budget(None, 0))


def test_figures_equal_those_of_the_evaluation(family: Any):
    weights = noisy(family.checkpoint.weights)
    perplexity, kl = probe(family).measure(weights)
    expected = whole_model_score(family, weights)
    assert probe(family).predictions == expected.predictions
    assert perplexity == pytest.approx(expected.perplexity, rel=1e-4)
    assert kl == pytest.approx(expected.kl / expected.predictions, rel=1e-3)
    assert kl > 1e-4


def test_the_original_is_no_distance_from_itself(family: Any):
    perplexity, kl = probe(family).measure(family.checkpoint.weights)
    assert kl == 0
    assert perplexity == pytest.approx(whole_model_score(family, family.checkpoint.weights).perplexity, rel=1e-4)


def test_starting_at_a_layer_equals_going_through_all(make_family: Any):
    family = make_family("llama")
    weights, measuring = noisy(family.checkpoint.weights, only="layers.1."), probe(family)
    entering = Activations([70, 70], 64, budget=Budget(None, 0), folder=None)
    with measuring.model.loaded(0, family.checkpoint.weights) as layer:
        for index in range(2):
            entering.put(index, layer.run(measuring.inputs.window(index)))
    kept = [entering.window(index).copy() for index in range(2)]
    assert measuring.measure(weights, start_layer=1, start=entering) == measuring.measure(weights)
    assert all(np.array_equal(entering.window(index), kept[index]) for index in range(2))


def test_a_hook_acts_for_one_measurement(make_family: Any):
    family = make_family("llama")
    measuring = probe(family)
    _, kl = measuring.measure(family.checkpoint.weights, hook=lambda _layer, _q, k, v: (k, v * 1.1))
    assert kl > 1e-4
    assert measuring.measure(family.checkpoint.weights)[1] == 0


def test_broken_weights_show_as_nan(make_family: Any):
    family = make_family("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    broken = family.checkpoint.weights.replace({name: Dense.of(np.full((96, 64), np.nan, np.float32))})
    assert all(np.isnan(figure) for figure in probe(family).measure(broken))
