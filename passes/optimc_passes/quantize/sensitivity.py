"""What rounding one set of layers, or one layer's cache, does to a model's predictions; all of them in one walk.

Every change under measurement is a stream of activations of its own: it leaves the model's own stream at the layer it
changes and then goes through the layers behind, which are loaded once for all streams. At the end the predictions of
each stream are held against the model's own.

Letters: W windows of T tokens, C input features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from optimc.plan import KvDtype
from optimc_passes.artifact import Artifact
from optimc_passes.base import PassContext
from optimc_passes.choices import Scheme
from optimc_passes.quantize.kv_ranges import round_by_token
from optimc_passes.quantize.rounding import nearest, output_error
from optimc_passes.quantize.unit_options import Unit
from optimc_passes.walk.activations import Activations, second_moment
from optimc_passes.walk.budget import Budget
from optimc_passes.walk.host_bytes import walk_host_bytes
from optimc_passes.walk.layered_model import Head, LayeredModel
from optimc_passes.walk.loaded_layer import LoadedLayer
from optimc_passes.weights import Dense, Weight

_PREDICTIONS = 256
"""Predictions that divergences are means over, spread over the windows: each costs a row of logits per stream."""
_ROWS = 64
"""Rows of logits in memory at a time."""


@dataclass(frozen=True)
class Request:
    """What is to be measured."""

    units: Sequence[Unit]
    schemes: Mapping[str, Sequence[Scheme]]
    """By name of the unit: the formats whose errors are wanted."""
    kv: Sequence[KvDtype]
    """Formats of each layer's cache; none: the cache is not measured."""


@dataclass(frozen=True)
class Sensitivity:
    """What was measured."""

    divergences: Mapping[str, float]
    """By name of the unit: KL divergence with it rounded as in `references`, nats per token."""
    references: Mapping[str, Scheme]
    errors: Mapping[tuple[str, Scheme], float]
    """By unit and format: squared error of its outputs, summed over the tokens."""
    wholes: Mapping[str, float]
    """By unit: squares of its outputs, summed over the tokens."""
    kv: Sequence[Mapping[KvDtype, float]]
    """By decoder layer: KL divergence with its cache in a format."""
    predictions: int

    def divergence(self, unit: str, scheme: Scheme) -> float:
        """Return the KL divergence a unit's format costs, as predicted from the one that was measured."""
        if scheme.bits is None:
            return 0.0
        reference = self.errors[unit, self.references[unit]]
        return self.divergences[unit] * self.errors[unit, scheme] / reference if reference > 0 else 0.0


def measure(
    artifact: Artifact, request: Request, rows: Sequence[NDArray[np.int32]], context: PassContext
) -> Sensitivity:
    """Measure on token rows. What does not fit into `context.max_host_bytes` is kept in files."""
    return _Measurement(artifact, request, rows, context).run()


def reference_scheme(schemes: Sequence[Scheme]) -> Scheme:
    """Return the format to measure: 3 bits or what is nearest, in the smallest groups. Large enough an error to be
    seen above float32's rounding, small enough for its square to stand for the others."""
    rounded = [scheme for scheme in schemes if scheme.bits is not None]
    return min(rounded, key=lambda scheme: (abs((scheme.bits or 0) - 3), scheme.bits, scheme.group % (1 << 31)))


class _Measurement:
    def __init__(
        self, artifact: Artifact, request: Request, rows: Sequence[NDArray[np.int32]], context: PassContext
    ) -> None:
        self._weights, self._request, self._context = artifact.weights, request, context
        self._rows = rows
        self._model = LayeredModel(artifact.checkpoint.config)
        self._budget = Budget.of_process(context.max_host_bytes, needed=walk_host_bytes(artifact).total)
        self._streams: dict[tuple[str, ...], Activations] = {}
        """Changes under way; ("unit", name) or ("kv", layer, format)."""
        self._errors: dict[tuple[str, Scheme], float] = {}
        self._wholes: dict[str, float] = {}
        self._heads: dict[str, Dense] = {}
        by_layer: dict[str, list[Unit]] = {}
        for unit in request.units:
            by_layer.setdefault(unit.linears[0].layer.rpartition(".")[0].rpartition(".")[0], []).append(unit)
        self._units = by_layer

    def run(self) -> Sensitivity:
        model = self._model
        own = self._empty(model.hidden_size)
        model.embed(self._weights, list(self._rows), own)
        for index in range(model.num_layers):
            prefix = model.layer_prefix(index)
            self._context.progress(index, model.num_layers + 1, prefix.rstrip("."))
            with model.loaded(index, self._weights) as layer:
                self._measure_errors(layer, own, self._units.get(prefix.rstrip("."), []))
                for stream in self._streams.values():
                    self._through(layer, stream, stream)
                for unit in self._units.get(prefix.rstrip("."), []):
                    self._start(layer, own, unit)
                for dtype in self._request.kv:
                    self._start_kv(layer, own, dtype)
                self._through(layer, own, own)
        self._context.progress(model.num_layers, model.num_layers + 1, "predictions")
        self._measure_head(own)
        divergences, predictions = self._compare(own)
        return Sensitivity(
            {unit.name: divergences["unit", unit.name] for unit in self._request.units},
            {unit.name: reference_scheme(self._request.schemes[unit.name]) for unit in self._request.units},
            self._errors,
            self._wholes,
            [
                {dtype: divergences["kv", str(layer), dtype] for dtype in self._request.kv}
                for layer in range(model.num_layers if self._request.kv else 0)
            ],
            predictions,
        )

    def _measure_errors(self, layer: LoadedLayer, own: Activations, units: Sequence[Unit]) -> None:
        """Compute what each format does to the outputs of the units of a layer, from what they read."""
        by_linear = {linear.name: unit for unit in units for linear in unit.linears}
        reads = {
            stage.name: next((by_linear[linear.name] for linear in stage.linears if linear.name in by_linear), None)
            for stage in self._model.stages(layer.index)
        }
        read = self._each(layer.attention_input, own)
        self._errors_of(reads["attention_in"], layer.weight, read)
        read = self._each(layer.attention_context, read)
        self._errors_of(reads["attention_out"], layer.weight, read)
        attention = self._each(layer.attention_output, read)
        read = self._each(layer.mlp_input, own, attention)
        self._errors_of(reads["mlp_in"], layer.weight, read)
        read = self._each(layer.mlp_context, read)
        self._errors_of(reads["mlp_out"], layer.weight, read)

    def _errors_of(self, unit: Unit | None, weight: Callable[[str], NDArray[np.float32]], read: Activations) -> None:
        if unit is None:
            return
        moment = second_moment(read)
        weights = [weight(linear.name) for linear in unit.linears]
        self._wholes[unit.name] = sum(output_error(values, moment) for values in weights)
        for scheme in self._request.schemes[unit.name]:
            if scheme.bits is not None:
                self._errors[unit.name, scheme] = sum(
                    output_error(_rounded(values, scheme) - values, moment) for values in weights
                )

    def _start(self, layer: LoadedLayer, own: Activations, unit: Unit) -> None:
        """Let a stream leave the model's own with one unit rounded."""
        scheme = reference_scheme(self._request.schemes[unit.name])
        before = {linear.name: np.array(layer.weight(linear.name)) for linear in unit.linears}
        for name, values in before.items():
            layer.set_weight(name, _rounded(values, scheme))
        stream = self._empty(own.width)
        self._through(layer, own, stream)
        self._streams["unit", unit.name] = stream
        for name, values in before.items():
            layer.set_weight(name, values)

    def _start_kv(self, layer: LoadedLayer, own: Activations, dtype: KvDtype) -> None:
        """Let a stream leave the model's own with one layer's keys and values rounded."""
        stream = self._empty(own.width)
        self._model.attention_hook = _kv_rounding(dtype)
        try:
            self._through(layer, own, stream)
        finally:
            self._model.attention_hook = None
        self._streams["kv", str(layer.index), dtype] = stream

    def _measure_head(self, own: Activations) -> None:
        """Round the head, if it is asked for: its stream is the model's own."""
        unit = next((unit for unit in self._request.units if unit.linears[0].is_head), None)
        if unit is None:
            return
        read = self._empty(own.width)
        self._model.normed(self._weights, own, read)
        current = self._model.head_weight(self._weights)
        assert isinstance(current, Dense), "requires refuses what is quantized already"
        values = current.read().astype(np.float32)
        self._errors_of(unit, lambda _name: values, read)
        rounded = _rounded(values, reference_scheme(self._request.schemes[unit.name]))
        self._heads[unit.name] = Dense.of(rounded)
        self._streams["unit", unit.name] = own

    def _compare(self, own: Activations) -> tuple[dict[tuple[str, ...], float], int]:
        """Return every stream's KL divergence from the model's own predictions, and how many they are means over."""
        head = self._model.head(self._weights)
        heads: dict[str, Head] = {}
        for name, weight in self._heads.items():
            overlaid: dict[str, Weight] = {**self._weights, self._model.head_name: weight}
            heads[name] = self._model.head(overlaid)
        total = dict.fromkeys(self._streams, 0.0)
        predictions = 0
        for window, picked in self._picked():
            log_p = _log_softmax(head, own.window(window)[picked])
            p = log_p.exp()
            predictions += len(picked)
            for key, stream in self._streams.items():
                log_q = _log_softmax(heads.get(key[-1], head), stream.window(window)[picked])
                total[key] += max(float((p * (log_p - log_q)).sum(dtype=torch.float64)), 0.0)
        return {key: kl / max(predictions, 1) for key, kl in total.items()}, predictions

    def _picked(self) -> Iterator[tuple[int, NDArray[np.intp]]]:
        """Yield windows and places in them whose predictions are compared, evenly spread."""
        places = sum(len(row) for row in self._rows)
        step = max(places // _PREDICTIONS, 1)
        for window, row in enumerate(self._rows):
            picked = np.arange(step - 1, len(row), step)
            for start in range(0, len(picked), _ROWS):
                yield window, picked[start : start + _ROWS]

    def _through(self, layer: LoadedLayer, source: Activations, out: Activations) -> None:
        for window in range(len(self._rows)):
            out.put(window, layer.run(source.window(window)))

    def _each(self, step: Callable[..., torch.Tensor], *sources: Activations) -> Activations:
        result: Activations | None = None
        for window in range(len(self._rows)):
            rows = step(*(source.tensor(window) for source in sources))
            result = result or self._empty(rows.shape[1])
            result.put(window, rows)
        assert result is not None
        return result

    def _empty(self, width: int) -> Activations:
        lengths = [len(row) for row in self._rows]
        return Activations(lengths, width, budget=self._budget, folder=self._context.scratch)


def _rounded(weight: NDArray[np.float32], scheme: Scheme) -> NDArray[np.float32]:
    assert scheme.bits is not None
    group = weight.shape[1] if scheme.group == -1 else scheme.group
    return nearest(scheme.bits, group, symmetric=scheme.symmetric)(weight)


def _kv_rounding(dtype: KvDtype) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return an attention hook that gives keys and values as a cache in this format would."""

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        if dtype == "float32":
            return tensor
        if dtype == "bfloat16":
            return tensor.to(torch.bfloat16).to(torch.float32)
        assert dtype in ("int8", "int4"), dtype
        return torch.from_numpy(round_by_token(tensor.numpy(), dtype))

    return lambda _layer, _q, k, v: (rounded(k), rounded(v))


def _log_softmax(head: Head, hidden: NDArray[np.float32]) -> torch.Tensor:
    return torch.from_numpy(head.logits(np.ascontiguousarray(hidden))).log_softmax(dim=1)
