"""Folding scales without rounding is no change at all: every family, every way heads share values, biases, norms."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from optimc_passes.frontend import TESTED
from optimc_passes.quantize.folding import FoldPair, NormProducer, RowsProducer, apply_folds, fold, fold_pairs

ARCHITECTURES = Path(__file__).parents[2] / "e2e/test_architectures.py"


def _architectures() -> Any:
    """tests/e2e/test_architectures.py as a module: pytest imports test files apart from each other."""
    name = "folding_tests_architectures"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ARCHITECTURES)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


FAMILIES = _architectures().FAMILIES
WITHOUT_PRE_NORMS = {"olmo2"}


def make_model(name: str, kv_heads: int = 2, **changed: Any) -> Any:
    family = FAMILIES[name]
    options = {**_architectures().SIZES, **family.options, "num_key_value_heads": kv_heads, **changed}
    config = getattr(transformers, family.config_class)(**options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    _architectures()._randomize(model.eval(), family)
    return model


def logits_of(model: Any) -> np.ndarray:
    tokens = torch.tensor(np.random.default_rng(3).integers(0, 384, 80))[None]
    with torch.no_grad():
        return model(tokens, use_cache=False).logits[0].numpy()


def random_scales(pair: FoldPair, seed: int, spread: float = 8.0) -> np.ndarray:
    """One scale per channel of the producer, from 1 / spread to spread."""
    logs = np.random.default_rng(seed).uniform(-np.log(spread), np.log(spread), pair.channels.max() + 1)
    return np.exp(logs).astype(np.float32)[pair.channels]


def parameters_of(model: Any) -> dict[str, np.ndarray]:
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def set_parameters(model: Any, changed: dict[str, np.ndarray]) -> None:
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in changed.items():
            own[name].copy_(torch.from_numpy(value))


def layers_of(model: Any) -> list[tuple[Any, str]]:
    return [(layer, f"model.layers.{index}.") for index, layer in enumerate(model.model.layers)]


def test_every_supported_family_is_folded_here():
    assert {family.config().model_type for family in FAMILIES.values()} == set(TESTED)


@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=["4/4", "4/2", "4/1"])
@pytest.mark.parametrize("family", FAMILIES)
def test_folding_alone_changes_no_logit(family: str, kv_heads: int):
    model = make_model(family, kv_heads)
    before = logits_of(model)
    weights = parameters_of(model)
    original = {name: array.copy() for name, array in weights.items()}
    for index, (layer, prefix) in enumerate(layers_of(model)):
        pairs = fold_pairs(layer, prefix)
        wanted = {"attention_out", "mlp_out"} | (set() if family in WITHOUT_PRE_NORMS else {"attention_in", "mlp_in"})
        assert {pair.stage for pair in pairs} == wanted
        for place, pair in enumerate(pairs):
            set_parameters(model, fold(pair, random_scales(pair, 10 * index + place), weights.__getitem__))
    after = logits_of(model)
    assert np.abs(after - before).max() < 1e-4 * np.abs(before).max()
    # The claim is not empty: every linear layer has other weights now, but for those nothing stands before.
    kept = {name for name, array in parameters_of(model).items() if np.array_equal(array, original[name])}
    linears = [name for name in kept if name.endswith("_proj.weight")]
    allowed = ("q_proj", "k_proj", "gate_proj") if family in WITHOUT_PRE_NORMS else ()
    assert all(any(short in name for short in allowed) for name in linears), linears


def test_a_biased_model_has_the_biases_of_producers_scaled():
    model = make_model("llama-rope-linear")
    layer, prefix = layers_of(model)[0]
    producers = {pair.stage: pair.producer for pair in fold_pairs(layer, prefix)}
    assert producers["attention_out"].bias == f"{prefix}self_attn.v_proj.bias"
    assert producers["mlp_out"].bias == f"{prefix}mlp.up_proj.bias"
    assert isinstance(producers["attention_in"], NormProducer)


def test_packed_projections_are_folded_in_their_last_rows():
    model = make_model("phi3")
    layer, prefix = layers_of(model)[0]
    producers = {pair.stage: pair.producer for pair in fold_pairs(layer, prefix)}
    assert producers["attention_out"] == RowsProducer(f"{prefix}self_attn.qkv_proj.weight", None, 64 + 32, 32)
    assert producers["mlp_out"] == RowsProducer(f"{prefix}mlp.gate_up_proj.weight", None, 96, 96)


@pytest.mark.parametrize(("family", "offset"), [("llama", 0.0), ("gemma2", 1.0), ("gemma3", 1.0), ("granite", 0.0)])
def test_norms_that_count_from_one_are_told_by_what_they_compute(family: str, offset: float):
    layer, prefix = layers_of(make_model(family))[0]
    pairs = fold_pairs(layer, prefix)
    assert {pair.producer.offset for pair in pairs if isinstance(pair.producer, NormProducer)} == {offset}


def test_features_of_one_channel_cannot_have_two_scales():
    model = make_model("llama")
    layer, prefix = layers_of(model)[0]
    pair = next(pair for pair in fold_pairs(layer, prefix) if pair.stage == "attention_out")
    scales = random_scales(pair, 1)
    scales[0] *= 2
    with pytest.raises(AssertionError, match="different scales"):
        fold(pair, scales, parameters_of(model).__getitem__)


class OneLayer:
    """What the walk hands a pass, over a linear stand-in for a layer: v -> o and a norm that is something else."""

    index = 0

    def __init__(self, norm_is_linear: bool) -> None:
        self.module = torch.nn.Module()
        self.module.self_attn = torch.nn.Module()
        self.module.self_attn.o_proj = torch.nn.Linear(8, 8)
        rng = np.random.default_rng(0)
        self.values = {"norm": rng.uniform(1, 2, 8), "q": rng.standard_normal((8, 8))}
        self.values |= {"v": rng.standard_normal((8, 8)), "o": rng.standard_normal((8, 8))}
        self.values = {name: value.astype(np.float32) for name, value in self.values.items()}
        self._linear = norm_is_linear

    def weight(self, name: str) -> np.ndarray:
        return self.values[name]

    def set_weight(self, name: str, value: np.ndarray) -> None:
        self.values[name] = value

    def run(self, x: np.ndarray) -> np.ndarray:
        normed = x * (self.values["norm"] if self._linear else np.exp(self.values["norm"]))
        return normed @ self.values["q"].T + x @ self.values["v"].T @ self.values["o"].T


@pytest.mark.parametrize("norm_is_linear", [True, False])
def test_a_fold_that_changes_the_layer_is_undone_and_told(norm_is_linear: bool):
    layer = OneLayer(norm_is_linear)
    original = {name: value.copy() for name, value in layer.values.items()}
    through_norm = FoldPair("attention_in", NormProducer("norm", None, 0.0), ("q",), np.arange(8))
    through_rows = FoldPair("attention_out", RowsProducer("v", None, 0, 8), ("o",), np.arange(8))
    folds = [(pair, random_scales(pair, 5)) for pair in (through_norm, through_rows)]
    changed, undone = apply_folds(layer, folds, 16)
    assert undone == (() if norm_is_linear else (through_norm,))
    assert set(changed) == ({"norm", "q", "v", "o"} if norm_is_linear else {"v", "o"})
    for name in set(original) - set(changed):
        np.testing.assert_array_equal(layer.values[name], original[name])
    for name in changed:
        assert not np.array_equal(layer.values[name], original[name])
