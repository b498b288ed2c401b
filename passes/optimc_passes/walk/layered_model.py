"""A transformers model of which one decoder layer at a time has its weights.

Letters: T tokens of a window, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from optimc_passes.frontend.skeleton import freeze_longrope, parameters_on_meta
from optimc_passes.quantize.linears import LinearWeight
from optimc_passes.walk.activations import Activations
from optimc_passes.walk.attention_function import WALK_ATTENTION, AttentionHook, walk_attention
from optimc_passes.walk.loaded_layer import LoadedLayer
from optimc_passes.walk.stand_in import Stop, all_replaced, put_parameter, replaced, stop_at_first, stopped
from optimc_passes.walk.structure import ATTENTION, ATTENTION_OUT, MLP, MLP_OUT
from optimc_passes.weights import Dense, Weight

STAGES = ("attention_in", "attention_out", "mlp_in", "mlp_out")
"""Places of a decoder layer that linear layers read, in the order they are computed."""


@dataclass(frozen=True)
class Stage:
    """Linear layers of one decoder layer that read the same value: they share second moments and column order."""

    name: str
    """One of `STAGES`."""
    linears: tuple[LinearWeight, ...]


class Head:
    """The end of a model with its weights in memory: final norm, head, and what comes after it."""

    def __init__(self, model: LayeredModel, weights: Mapping[str, Weight]) -> None:
        self._model = model
        self._tensors = model.head_tensors(weights)

    def logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return logits [n, V] of the last layer's output [n, hidden]."""
        logits: NDArray[np.float32] = self._model.run_end(self._tensors, torch.from_numpy(hidden)).logits[0].numpy()
        return logits


class LayeredModel:
    """transformers' float32 model of a configuration, with its buffers but without parameters.

    Windows are run one at a time and never padded, so results do not depend on how text is cut into batches.
    """

    def __init__(self, config: Any) -> None:
        config = copy.deepcopy(config)
        config.dtype = torch.float32
        config.pad_token_id = None  # padding only matters to training
        config.use_cache = False
        text = config.get_text_config(decoder=True)
        self.attention_hook: AttentionHook | None = None
        self._softcap = bool(getattr(text, "attn_logit_softcapping", None))
        with walk_attention(None, softcap=self._softcap), parameters_on_meta():
            self._model: Any = AutoModelForCausalLM.from_config(
                config, attn_implementation=WALK_ATTENTION, dtype=torch.float32
            )
        freeze_longrope(self._model)
        self._model.eval()
        self._base: nn.Module = self._model.base_model
        self._base_prefix = f"{self._model.base_model_prefix}."
        layers = self._base.layers
        assert isinstance(layers, nn.ModuleList)
        self._layers = layers
        self.num_layers = len(layers)
        self.hidden_size = int(text.hidden_size)
        self._head_name = self._name_of(self._model.get_output_embeddings())
        self._embedding = self._model.get_input_embeddings()
        self._embedding_name = self._name_of(self._embedding)
        self._arguments: dict[int, list[dict[str, Any]]] = {}

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Surround whatever runs modules of this model."""
        with torch.inference_mode(), walk_attention(self.attention_hook, softcap=self._softcap):
            yield

    @property
    def head_name(self) -> str:
        """Parameter name of the head's weight, "lm_head.weight"."""
        return f"{self._head_name}.weight"

    @property
    def embedding_name(self) -> str:
        """Parameter name of the input embedding."""
        return f"{self._embedding_name}.weight"

    def layer_module(self, layer: int) -> nn.Module:
        """Return transformers' module of a decoder layer."""
        return self._layers[layer]

    def layer_prefix(self, layer: int) -> str:
        """Return what the names of a layer's parameters begin with."""
        return f"{self._base_prefix}layers.{layer}."

    def layer_parameters(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Return the layer's parameters by full name, with their shapes."""
        prefix = self.layer_prefix(layer)
        return {prefix + name: tuple(tensor.shape) for name, tensor in self._layers[layer].named_parameters()}

    def stages(self, layer: int) -> tuple[Stage, ...]:
        """Return attention_in, attention_out, mlp_in and mlp_out with the layers that read there, in their order."""
        prefix = self.layer_prefix(layer)
        found: dict[str, list[LinearWeight]] = {name: [] for name in STAGES}
        for half, last, into, out in (
            (ATTENTION, ATTENTION_OUT, "attention_in", "attention_out"),
            (MLP, MLP_OUT, "mlp_in", "mlp_out"),
        ):
            for name, module in self._layers[layer].get_submodule(half).named_modules():
                if isinstance(module, nn.Linear):
                    linear = LinearWeight(f"{prefix}{half}.{name}.weight", (module.out_features, module.in_features))
                    found[out if name == last else into].append(linear)
        return tuple(Stage(name, tuple(linears)) for name, linears in found.items())

    @contextmanager
    def loaded(self, layer: int, weights: Mapping[str, Weight]) -> Iterator[LoadedLayer]:
        """Give a decoder layer its weights, dequantized where they are codes, and take them away on leaving."""
        tensors = {name: _tensor(weights[name]) for name in self.layer_parameters(layer)}
        loaded = LoadedLayer(self, layer, tensors)
        del tensors
        try:
            yield loaded
        finally:
            loaded.release()

    def embed(self, weights: Mapping[str, Weight], rows: Sequence[NDArray[np.int32]], out: Activations) -> None:
        """Put the input of layer 0 into `out`, [T, hidden] for each row of token ids [T].

        Only the embedding's rows that occur are read.
        """
        used, numbered = np.unique(np.concatenate([np.asarray(row, np.int64) for row in rows]), return_inverse=True)
        table = torch.tensor(_rows(weights[self.embedding_name], used), dtype=torch.float32)
        ends = np.cumsum([len(row) for row in rows])
        with self._placed({self.embedding_name: table}), self.forward(), replaced(self._layers[0], stop_at_first):
            for index, ids in enumerate(np.split(numbered, ends[:-1])):
                out.put(index, stopped(partial(self._base, input_ids=torch.from_numpy(ids)[None])).seen)

    def normed(self, weights: Mapping[str, Weight], x: Activations, out: Activations) -> None:
        """Put what the head reads into `out`, given the last layer's output."""
        tensors = {name: _tensor(weights[name]) for name in self._end_parameters()}
        for index in range(len(x.lengths)):
            out.put(index, self._run_base(tensors, x.tensor(index)).last_hidden_state[0])

    def head(self, weights: Mapping[str, Weight]) -> Head:
        """Load final norm and head."""
        return Head(self, weights)

    def head_weight(self, weights: Mapping[str, Weight]) -> Weight:
        """Return the head's weight [V, hidden]: its own, or the one it is tied to."""
        return weights[self.head_name] if self.head_name in weights else weights[self.embedding_name]

    def head_tensors(self, weights: Mapping[str, Weight]) -> dict[str, Tensor]:
        """Return the parameters of the model's end by name."""
        head = self._model.get_output_embeddings()
        extra = [f"{self._head_name}.{name}" for name, _ in head.named_parameters() if name != "weight"]
        tensors = {name: _tensor(weights[name]) for name in [*self._end_parameters(), *extra]}
        return {**tensors, self.head_name: _tensor(self.head_weight(weights))}

    def run_end(self, tensors: Mapping[str, Tensor], hidden: Tensor) -> Any:
        """Run everything after the layers on [n, hidden]; returns what the model returns."""
        with self._placed(tensors), self.forward(), self._layers_give(hidden):
            return self._model(inputs_embeds=hidden[None])

    def layer_arguments(self, layer: int, length: int) -> Mapping[str, Any]:
        """Return what the model hands to a layer beside the hidden state: masks, rotary factors. Once per length."""
        if length not in self._arguments:
            seen: list[dict[str, Any]] = []

            def record(hidden_states: Tensor, **arguments: Any) -> Tensor:
                seen.append(arguments)
                if len(seen) == self.num_layers:
                    raise Stop(hidden_states)
                return hidden_states

            with all_replaced(self._layers, record):
                stopped(partial(self._base, inputs_embeds=torch.zeros(1, length, self.hidden_size)))
            self._arguments[length] = seen
        return self._arguments[length][layer]

    def _run_base(self, tensors: Mapping[str, Tensor], hidden: Tensor) -> Any:
        with self._placed(tensors), self.forward(), self._layers_give(hidden):
            return self._base(inputs_embeds=hidden[None])

    @contextmanager
    def _layers_give(self, hidden: Tensor) -> Iterator[None]:
        """Let every layer return `hidden`, whatever it is given: embeddings may be scaled on their way to the first."""
        with all_replaced(self._layers, lambda *_, **__: hidden[None]):
            yield

    def _end_parameters(self) -> list[str]:
        """Return the names of what is neither in a layer nor the embedding nor the head: the final norm."""
        inside = f"{self._base_prefix}layers."
        names = [name for name, _ in self._model.named_parameters(remove_duplicate=False)]
        apart = (f"{self._embedding_name}.", f"{self._head_name}.", inside)
        return [name for name in names if not name.startswith(apart)]

    @contextmanager
    def _placed(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Give parameters outside the layers their values for a while."""
        before = {name: self._model.get_parameter(name) for name in tensors}
        for name, tensor in tensors.items():
            put_parameter(self._model, name, tensor)
        try:
            yield
        finally:
            for name, parameter in before.items():
                put_parameter(self._model, name, parameter)

    def _name_of(self, module: nn.Module) -> str:
        names: list[str] = [name for name, candidate in self._model.named_modules() if candidate is module]
        return names[0]


def _tensor(weight: Weight) -> Tensor:
    """Return a weight as float32 in memory of torch's own."""
    values = weight.read().astype(np.float32) if isinstance(weight, Dense) else weight.dequantize()
    return torch.tensor(values)


def _rows(weight: Weight, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return some rows of a weight as float32."""
    if isinstance(weight, Dense):
        picked: NDArray[np.float32] = weight.read()[rows].astype(np.float32)
        return picked
    return weight.rows(rows).dequantize()
