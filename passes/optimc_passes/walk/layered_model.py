"""A transformers model of which one decoder layer at a time has its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from optimc_passes.quantize.linears import LinearWeight
from optimc_passes.walk.activations import Activations
from optimc_passes.weights import Weight

AttentionHook = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None]
"""Layer, then q [1, H, T, D] and k, v [1, Hkv, T, D] after RoPE; what it returns replaces k and v."""


@dataclass(frozen=True)
class Stage:
    """Linear layers of one decoder layer that read the same value: they share second moments and column order."""

    name: str
    """attention_in, attention_out, mlp_in or mlp_out."""
    linears: tuple[LinearWeight, ...]


class LoadedLayer:
    """One decoder layer with its weights in memory, float32."""

    index: int
    prefix: str
    """Of its parameters' names: "model.layers.3."."""
    module: nn.Module

    def weight(self, name: str) -> NDArray[np.float32]:
        """Return a parameter by its full name; norms and biases, too."""
        raise NotImplementedError

    def set_weight(self, name: str, value: NDArray[np.float32]) -> None:
        """Replace a parameter; later runs of the layer use it."""
        raise NotImplementedError

    def run(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the layer's output [T, hidden] for the input of one window."""
        raise NotImplementedError


class LayeredModel:
    """transformers' float32 model of a configuration, with its buffers but without parameters."""

    attention_hook: AttentionHook | None = None
    num_layers: int
    hidden_size: int

    def __init__(self, config: Any) -> None:
        raise NotImplementedError

    def stages(self, layer: int) -> tuple[Stage, ...]:
        """Return attention_in, attention_out, mlp_in, mlp_out."""
        raise NotImplementedError

    @contextmanager
    def loaded(self, layer: int, weights: Mapping[str, Weight]) -> Iterator[LoadedLayer]:
        """Give a decoder layer its weights, dequantized where they are codes, and take them away on leaving."""
        raise NotImplementedError
        yield

    def embed(self, weights: Mapping[str, Weight], rows: Sequence[NDArray[np.int32]], out: Activations) -> None:
        """Put the input of layer 0 into `out`."""
        raise NotImplementedError

    def normed(self, weights: Mapping[str, Weight], x: Activations, out: Activations) -> None:
        """Put the head's input into `out`, from the last layer's output."""
        raise NotImplementedError

    def head_logits(self, weights: Mapping[str, Weight], hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return logits [n, V] from the last layer's output [n, hidden]: final norm, head, multipliers, softcap."""
        raise NotImplementedError
