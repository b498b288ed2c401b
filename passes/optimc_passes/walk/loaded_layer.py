"""One decoder layer with its weights, run as a whole or in five steps.

In steps every linear layer is computed once per token although a pass may change weights in between: what attention
reads, what its output projection reads, what the feed-forward half reads, what its output projection reads, and the
layer's output. The layer's own code does the norms, multipliers and sums; where a step needs only part of it, the rest
is stood in for.

Letters: T tokens of a window, H attention heads, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from optimc_passes.walk.stand_in import put_parameter, replaced, stop_at_first, stop_at_hidden_states, stopped
from optimc_passes.walk.structure import ATTENTION, ATTENTION_OUT, MLP, MLP_OUT

if TYPE_CHECKING:
    from optimc_passes.walk.layered_model import LayeredModel


class LoadedLayer:
    """One decoder layer with its weights in memory, float32."""

    def __init__(self, model: LayeredModel, index: int, tensors: dict[str, Tensor]) -> None:
        self._model = model
        self.index = index
        self.module = model.layer_module(index)
        self.prefix = model.layer_prefix(index)
        """Of its parameters' names: "model.layers.3."."""
        self._original = dict(tensors)
        self._tensors = tensors
        self._attention_arguments: dict[int, dict[str, Any]] = {}
        self._place(tensors)

    def weight(self, name: str) -> NDArray[np.float32]:
        """Return a parameter by its full name, norms and biases too; not to be written to."""
        value: NDArray[np.float32] = self._tensors[name].numpy()
        return value

    def set_weight(self, name: str, value: NDArray[np.float32]) -> None:
        """Replace a parameter; from now on the layer runs with the new one."""
        assert value.shape == self._tensors[name].shape, (name, value.shape)
        # A copy in torch's memory: how an array happens to be aligned must not reach the results' last bits.
        self._tensors[name] = torch.tensor(value, dtype=torch.float32)
        self._place({name: self._tensors[name]})

    @contextmanager
    def original_weights(self) -> Iterator[None]:
        """Run with the weights the layer was loaded with."""
        self._place(self._original)
        try:
            yield
        finally:
            self._place(self._tensors)

    def run(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the layer's output [T, hidden] for its input [T, hidden], one window."""
        with self._model.forward():
            out: Tensor = self.module(_batch(x), **self._model.layer_arguments(self.index, len(x)))
        result: NDArray[np.float32] = out[0].numpy()
        return result

    def attention_input(self, x: Tensor) -> Tensor:
        """Return what attention reads, [T, hidden]."""
        with self._model.forward(), replaced(self._attention, stop_at_hidden_states):
            stop = stopped(lambda: self._forward(x))
        self._attention_arguments[len(x)] = stop.arguments
        return stop.seen

    def attention_context(self, attention_input: Tensor) -> Tensor:
        """Return what the output projection of attention reads, [T, H * D]. `attention_input` was called before."""
        arguments = self._attention_arguments[len(attention_input)]
        with self._model.forward(), replaced(self._attention_out, stop_at_first):
            return stopped(lambda: self._attention(hidden_states=attention_input[None], **arguments)).seen

    def attention_output(self, context: Tensor) -> Tensor:
        """Return what attention adds, [T, hidden]."""
        with self._model.forward():
            out: Tensor = self._attention_out(context)
            return out

    def mlp_input(self, x: Tensor, attention: Tensor) -> Tensor:
        """Return what the feed-forward half reads, [T, hidden], given what attention added."""
        with (
            self._model.forward(),
            replaced(self._attention, lambda *_, **__: (attention[None], None)),
            replaced(self._mlp, stop_at_first),
        ):
            return stopped(lambda: self._forward(x)).seen

    def mlp_context(self, mlp_input: Tensor) -> Tensor:
        """Return what the output projection of the feed-forward half reads, [T, intermediate]."""
        with self._model.forward(), replaced(self._mlp_out, stop_at_first):
            return stopped(lambda: self._mlp(mlp_input[None])).seen

    def mlp_output(self, context: Tensor) -> Tensor:
        """Return what the feed-forward half adds, [T, hidden]."""
        with self._model.forward():
            out: Tensor = self._mlp_out(context)
            return out

    def output(self, x: Tensor, attention: Tensor, mlp: Tensor) -> Tensor:
        """Return the layer's output [T, hidden], given what its halves added."""
        with (
            self._model.forward(),
            replaced(self._attention, lambda *_, **__: (attention[None], None)),
            replaced(self._mlp, lambda *_, **__: mlp[None]),
        ):
            out: Tensor = self._forward(x)
            return out[0]

    def release(self) -> None:
        """Take the weights away."""
        self._place({name: torch.empty(tensor.shape, device="meta") for name, tensor in self._tensors.items()})
        self._tensors, self._original = {}, {}

    def _forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(x[None], **self._model.layer_arguments(self.index, len(x)))
        return out

    def _place(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            put_parameter(self.module, name.removeprefix(self.prefix), tensor)

    @property
    def _attention(self) -> nn.Module:
        return self.module.get_submodule(ATTENTION)

    @property
    def _attention_out(self) -> nn.Module:
        return self._attention.get_submodule(ATTENTION_OUT)

    @property
    def _mlp(self) -> nn.Module:
        return self.module.get_submodule(MLP)

    @property
    def _mlp_out(self) -> nn.Module:
        return self._mlp.get_submodule(MLP_OUT)


def _batch(x: NDArray[np.float32]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))[None]
