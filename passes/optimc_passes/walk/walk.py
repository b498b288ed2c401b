"""The walk itself: what a pass does at each layer, and the loop that takes it there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from optimc.plan import LayerReport
from optimc_passes.artifact import Artifact
from optimc_passes.base import PassContext
from optimc_passes.memory import return_free_memory
from optimc_passes.quantize.linears import LinearWeight
from optimc_passes.walk.activations import Activations
from optimc_passes.walk.budget import Budget
from optimc_passes.walk.layered_model import LayeredModel, Stage
from optimc_passes.walk.loaded_layer import LoadedLayer
from optimc_passes.walk.partial import Finished, PartialWork, Resumed
from optimc_passes.weights import Dense, Weight

__all__ = ["Finished", "LayerWork", "Walked", "walk_layers"]

Streams = Literal["quantized", "original", "both"]


@dataclass(frozen=True)
class Walked:
    """What a walk made of the model."""

    weights: dict[str, Weight]
    rows: tuple[LayerReport, ...]
    resumed_at: int | None
    """Decoder layers that an earlier build had finished; None if this one started at the first."""


class LayerWork(ABC):
    """What a pass does at each layer: `begin`, `stage` four times in order, `end`."""

    stream: ClassVar[Streams]
    """What a stage sees: outputs of the layers as `set_weight` left them ("quantized"), of the layers as the artifact
    has them ("original"), or both."""
    working_bytes: int = 0
    """Memory a stage needs beside the layer's weights and the activations; those make room for it."""

    def begin(self, layer: LoadedLayer) -> None:  # noqa: B027 - not everybody has something to do here
        """Called before the layer runs."""

    @abstractmethod
    def stage(self, layer: LoadedLayer, stage: Stage, inputs: Activations, original: Activations | None) -> None:
        """Look at what the stage's linears read; `original` is there in stream "both" alone."""

    @abstractmethod
    def end(self, layer: LoadedLayer) -> Finished:
        """Return what became of the layer: weights by full parameter name."""

    def head(
        self,
        linear: LinearWeight,  # noqa: ARG002 - for those who override it
        weight: NDArray[np.float32],  # noqa: ARG002
        inputs: Activations,  # noqa: ARG002
    ) -> Finished | None:
        """Return what became of the head [V, hidden]; called only if the walk was asked for it."""
        return None


def walk_layers(artifact: Artifact, work: LayerWork, context: PassContext, *, wants_head: bool = False) -> Walked:
    """Take `work` through all layers on the artifact's calibration tokens, one layer's weights in memory at a time.

    Each finished layer goes to `context.keep`, and to `context.partial` if there is one: a walk that finds what an
    earlier one left there goes on behind it and ends with the same bytes. Windows keep their order, and sums over
    tokens are formed window by window, so results do not depend on memory limits either; they do depend on the number
    of threads, as products of matrices do.
    """
    assert artifact.calibration is not None, "the base class refuses passes that lack it"
    with ExitStack() as stack:
        partial = stack.enter_context(PartialWork(context.partial)) if context.partial is not None else None
        resumed = partial.load() if partial is not None else None
        walk = _Walk(artifact, work, context, resumed)
        start = resumed.done if resumed is not None else 0
        steps = walk.model.num_layers + wants_head
        for layer in range(start, walk.model.num_layers):
            context.progress(layer, steps, walk.model.layer_prefix(layer).rstrip("."))
            finished = walk.layer(layer)
            if partial is not None:
                partial.save(layer + 1, finished, walk.streams)
        if wants_head:
            context.progress(steps - 1, steps, walk.model.head_name.rpartition(".")[0])
            walk.head()
        context.progress(steps, steps, "")
    return Walked(walk.weights, tuple(walk.rows), start or None)


class _Walk:
    """The state of a walk: activations that enter the next layer, and what is finished."""

    def __init__(self, artifact: Artifact, work: LayerWork, context: PassContext, resumed: Resumed | None) -> None:
        assert artifact.calibration is not None
        self.model = LayeredModel(artifact.checkpoint.config)
        self.weights: dict[str, Weight] = {}
        self.rows: list[LayerReport] = []
        self._artifact, self._work, self._context = artifact, work, context
        tokens = artifact.calibration.tokens
        self._lengths = [len(row) for row in tokens]
        largest = max(
            sum(4 * int(np.prod(shape)) for shape in self.model.layer_parameters(layer).values())
            for layer in range(self.model.num_layers)
        )
        self._budget = Budget.of_process(context.max_host_bytes, needed=2 * largest + work.working_bytes)
        names = ["quantized", "original"] if work.stream == "both" else [work.stream]
        if resumed is not None:
            self.streams = {name: self._load(resumed, name) for name in names}
            self._keep(Finished(resumed.weights, resumed.rows))
            return
        self.streams = {}
        for name in names:
            self.streams[name] = self._empty(self.model.hidden_size)
            self.model.embed(artifact.weights, tokens, self.streams[name])

    def layer(self, index: int) -> Finished:
        """Take the work through a layer; afterwards the streams are what enters the next."""
        with self.model.loaded(index, self._artifact.weights) as layer:
            self._work.begin(layer)
            attention_in, attention_out, mlp_in, mlp_out = self.model.stages(index)
            x = self.streams
            read = self._each(layer, layer.attention_input, x)
            self._show(layer, attention_in, read)
            read = self._each(layer, layer.attention_context, read)
            self._show(layer, attention_out, read)
            attention = self._each(layer, layer.attention_output, read)
            read = self._each(layer, layer.mlp_input, x, attention)
            self._show(layer, mlp_in, read)
            read = self._each(layer, layer.mlp_context, read)
            self._show(layer, mlp_out, read)
            mlp = self._each(layer, layer.mlp_output, read)
            del read
            self._each(layer, layer.output, x, attention, mlp, into=x)
            finished = self._work.end(layer)
        kept = self._keep(finished)
        return_free_memory()
        return kept

    def head(self) -> None:
        """Show the head what it reads."""
        model, weights = self.model, self._artifact.weights
        stream = next(iter(self.streams.values()))
        inputs = self._empty(model.hidden_size)
        model.normed(weights, stream, inputs)
        current = model.head_weight(weights)
        tied_to = None if model.head_name in self._artifact.checkpoint.weights else model.embedding_name
        rows, columns = current.shape
        linear = LinearWeight(model.head_name, (rows, columns), is_head=True, tied_to=tied_to)
        values = current.read().astype(np.float32) if isinstance(current, Dense) else current.dequantize()
        finished = self._work.head(linear, values, inputs)
        if finished is not None:
            self._keep(finished)

    def _show(self, layer: LoadedLayer, stage: Stage, read: dict[str, Activations]) -> None:
        inputs, *original = read.values()
        self._work.stage(layer, stage, inputs, original[0] if original else None)

    def _each(
        self,
        layer: LoadedLayer,
        step: Callable[..., Tensor],
        *sources: dict[str, Activations],
        into: dict[str, Activations] | None = None,
    ) -> dict[str, Activations]:
        """Run a step on every window of every stream, each with its weights."""
        results = dict(into or {})
        for name in self.streams:
            with layer.original_weights() if name == "original" else nullcontext():
                for index in range(len(self._lengths)):
                    rows = step(*(source[name].tensor(index) for source in sources))
                    if name not in results:
                        results[name] = self._empty(rows.shape[1])
                    results[name].put(index, rows)
        return results

    def _keep(self, finished: Finished) -> Finished:
        kept = {name: self._context.keep(name, weight) for name, weight in finished.weights.items()}
        self.weights.update(kept)
        self.rows.extend(finished.rows)
        return Finished(kept, finished.rows)

    def _empty(self, width: int) -> Activations:
        return Activations(self._lengths, width, budget=self._budget, folder=self._context.scratch)

    def _load(self, resumed: Resumed, name: str) -> Activations:
        hidden = self.model.hidden_size
        return Activations.load(
            resumed.streams[name], self._lengths, hidden, budget=self._budget, folder=self._context.scratch
        )
