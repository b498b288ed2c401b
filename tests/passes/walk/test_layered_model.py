"""A model walked layer by layer computes what the whole model computes; float32 rounding is all that differs."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from optimc_passes.walk.activations import Activations, second_moment
from optimc_passes.walk.budget import Budget
from optimc_passes.walk.layered_model import LayeredModel
from optimc_passes.walk.loaded_layer import LoadedLayer
from optimc_passes.weights import Dense, WeightStore

ROWS = tuple(np.random.default_rng(3).integers(0, 96, length).astype(np.int32) for length in (21, 5, 21))
TOLERANCE = 1e-5
FREE = MappingProxyType({"budget": Budget(None, 0), "folder": None})


def hidden_states(family: Any, ids: NDArray[np.int32]) -> tuple[list[NDArray[np.float32]], NDArray[np.float32]]:
    """Return inputs of every layer, the output of the last, and the logits, as transformers computes them."""
    seen: list[NDArray[np.float32]] = []
    base = family.model.base_model
    hooks = [layer.register_forward_pre_hook(lambda _m, args: seen.append(args[0][0].numpy())) for layer in base.layers]
    hooks.append(base.layers[-1].register_forward_hook(lambda _m, _args, out: seen.append(out[0].numpy())))
    with torch.no_grad():
        logits = family.model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0].numpy()
    for hook in hooks:
        hook.remove()
    return seen, logits


def close(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> bool:
    return bool(np.abs(actual - expected).max() <= TOLERANCE * np.abs(expected).max())


def embedded(model: LayeredModel, family: Any) -> Activations:
    x = Activations([len(row) for row in ROWS], model.hidden_size, **FREE)
    model.embed(family.checkpoint.weights, ROWS, x)
    return x


def test_embedding_layers_and_head_equal_the_whole_model(family: Any):
    model, weights = LayeredModel(family.config), family.checkpoint.weights
    x = embedded(model, family)
    for index, ids in enumerate(ROWS):
        expected, logits = hidden_states(family, ids)
        assert close(x.window(index), expected[0])
        hidden = x.window(index)
        for layer in range(model.num_layers):
            with model.loaded(layer, weights) as loaded:
                hidden = loaded.run(hidden)
            assert close(hidden, expected[layer + 1]), f"after layer {layer}"
        assert close(model.head(weights).logits(hidden), logits)


def watch(module: torch.nn.Module, name: str, seen: dict[str, NDArray[np.float32]]) -> Any:
    """Put what a linear layer reads into `seen`, [T, C]."""
    return module.register_forward_pre_hook(lambda _m, args: seen.update({name: args[0].flatten(0, -2).numpy()}))


def steps(layer: LoadedLayer, x: NDArray[np.float32]) -> dict[str, torch.Tensor]:
    """Take a window through a layer in the five steps."""
    hidden = torch.from_numpy(x)
    attention_in = layer.attention_input(hidden)
    context = layer.attention_context(attention_in)
    attention = layer.attention_output(context)
    mlp_in = layer.mlp_input(hidden, attention)
    product = layer.mlp_context(mlp_in)
    output = layer.output(hidden, attention, layer.mlp_output(product))
    return {"attention_in": attention_in, "attention_out": context, "mlp_in": mlp_in, "mlp_out": product, "": output}


def test_five_steps_equal_the_layer_and_see_what_its_linears_read(family: Any):
    model, weights = LayeredModel(family.config), family.checkpoint.weights
    x = embedded(model, family).window(0)
    for layer in range(model.num_layers):
        seen: dict[str, NDArray[np.float32]] = {}
        with model.loaded(layer, weights) as loaded:
            stages = model.stages(layer)
            hooks = [
                watch(loaded.module.get_submodule(linear.layer.removeprefix(loaded.prefix)), linear.name, seen)
                for stage in stages
                for linear in stage.linears
            ]
            output = loaded.run(x)
            for hook in hooks:
                hook.remove()
            values = steps(loaded, x)
        assert [stage.name for stage in stages] == ["attention_in", "attention_out", "mlp_in", "mlp_out"]
        assert close(values[""].numpy(), output)
        for stage in stages:
            assert stage.linears
            for linear in stage.linears:
                assert linear.shape == family.checkpoint.weights[linear.name].shape
                assert close(values[stage.name].numpy(), seen[linear.name]), linear.name
        x = output


def test_a_layer_runs_with_the_weight_it_was_given(make_family: Callable[..., Any]):
    family = make_family("llama")
    model, name = LayeredModel(family.config), "model.layers.1.mlp.down_proj.weight"
    x = embedded(model, family).window(0)
    doubled = WeightStore({**family.checkpoint.weights, name: Dense.of(family.checkpoint.weights[name].read() * 2)})
    with model.loaded(1, doubled) as loaded:
        expected = loaded.run(x)
    with model.loaded(1, family.checkpoint.weights) as loaded:
        before = loaded.run(x)
        loaded.set_weight(name, loaded.weight(name) * 2)
        assert np.array_equal(loaded.run(x), expected)
        with loaded.original_weights():
            assert np.array_equal(loaded.run(x), before)
        assert np.array_equal(loaded.run(x), expected)


def test_codes_are_dequantized(make_family: Callable[..., Any], quantized: Callable[..., Any]):
    family = make_family("llama")
    model, weights = LayeredModel(family.config), family.checkpoint.weights
    linears = [linear.name for stage in model.stages(0) for linear in stage.linears]
    codes = {name: quantized(weights[name].read(), group=16) for name in [*linears, "model.embed_tokens.weight"]}
    dense = {name: Dense.of(weight.dequantize()) for name, weight in codes.items()}
    results = []
    for changed in (codes, dense):
        store = weights.replace(changed)
        x = Activations([len(row) for row in ROWS], model.hidden_size, **FREE)
        model.embed(store, ROWS, x)
        with model.loaded(0, store) as loaded:
            results.append(model.head(store).logits(loaded.run(x.window(0))))
    assert np.array_equal(*results)


def test_parameters_have_no_memory_outside_their_layer(make_family: Callable[..., Any]):
    family = make_family("qwen2")
    model = LayeredModel(family.config)
    with model.loaded(0, family.checkpoint.weights) as loaded:
        assert not any(parameter.is_meta for parameter in loaded.module.parameters())
    model.head(family.checkpoint.weights).logits(np.zeros((3, 64), np.float32))
    embedded(model, family)
    assert all(parameter.is_meta for parameter in model._model.parameters())


def test_a_head_of_its_own_is_used_where_there_is_one(make_family: Callable[..., Any]):
    family = make_family("llama")
    model, weights = LayeredModel(family.config), family.checkpoint.weights
    hidden = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    tied = model.head(weights).logits(hidden)
    own = WeightStore({**weights, "lm_head.weight": Dense.of(weights["model.embed_tokens.weight"].read() * 2)})
    assert np.allclose(model.head(own).logits(hidden), 2 * tied, rtol=1e-5, atol=1e-5)
    assert np.array_equal(model.head(weights).logits(hidden), tied)


def test_normed_is_what_the_head_reads(family: Any):
    model, weights = LayeredModel(family.config), family.checkpoint.weights
    x = Activations([6, 3], model.hidden_size, **FREE)
    for index, length in enumerate(x.lengths):
        x.put(index, np.random.default_rng(index).standard_normal((length, 64)).astype(np.float32))
    out = Activations(x.lengths, model.hidden_size, **FREE)
    model.normed(weights, x, out)
    with torch.no_grad():
        for index in range(2):
            expected = family.model.base_model.norm(torch.from_numpy(x.window(index))).numpy()
            assert close(out.window(index), expected)


def test_the_hook_sees_keys_after_rope_and_what_it_returns_is_used(make_family: Callable[..., Any]):
    family = make_family("llama")
    model, weights = LayeredModel(family.config), family.checkpoint.weights
    x = embedded(model, family).window(0)
    seen: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []

    def silent(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append((layer, tuple(q.shape), tuple(k.shape)))
        return k, torch.zeros_like(v)

    with model.loaded(1, weights) as loaded:
        plain = loaded.attention_context(loaded.attention_input(torch.from_numpy(x)))
        model.attention_hook = silent
        muted = loaded.attention_context(loaded.attention_input(torch.from_numpy(x)))
    assert seen == [(1, (1, 4, 21, 16), (1, 2, 21, 16))]
    assert plain.abs().max() > 0
    assert not muted.any()


@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_windows_run(family: Any, length: int):
    model, weights = LayeredModel(family.config), family.checkpoint.weights
    x = np.random.default_rng(0).standard_normal((length, 64)).astype(np.float32)
    with model.loaded(0, weights) as loaded:
        assert np.isfinite(loaded.run(x)).all()


@pytest.mark.parametrize("left", [False, True], ids=["padded behind", "padded in front"])
def test_second_moments_are_those_of_a_padded_batch_without_its_padding(make_family: Callable[..., Any], left: bool):
    """Other tools run batches and mask what fills them up; here the id that does is one the text is full of."""
    family = make_family("llama")
    longest = max(map(len, ROWS))
    ids = torch.full((len(ROWS), longest), int(ROWS[0][0]))
    mask = torch.zeros_like(ids)
    for index, row in enumerate(ROWS):
        place = slice(longest - len(row), None) if left else slice(0, len(row))
        ids[index, place], mask[index, place] = torch.from_numpy(row.astype(np.int64)), 1
    seen: list[torch.Tensor] = []
    down_proj = family.model.base_model.layers[0].mlp.down_proj
    hook = down_proj.register_forward_pre_hook(lambda _m, args: seen.append(args[0][mask.bool()]))
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        family.model(ids, attention_mask=mask, position_ids=positions, use_cache=False)
    hook.remove()

    model = LayeredModel(family.config)
    x = embedded(model, family)
    read: Activations | None = None
    with model.loaded(0, family.checkpoint.weights) as layer:
        for index in range(len(ROWS)):
            window = x.tensor(index)
            attention = layer.attention_output(layer.attention_context(layer.attention_input(window)))
            rows = layer.mlp_context(layer.mlp_input(window, attention))
            read = read or Activations([len(row) for row in ROWS], rows.shape[1], **FREE)
            read.put(index, rows)
    assert read is not None
    assert close(second_moment(read), (seen[0].T @ seen[0]).numpy())
