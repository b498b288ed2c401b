"""What rounding one set of layers, or one layer's cache, does to a model's predictions; one decoder layer at a time.

The model's own stream of activations is taken to the end once, for its predictions. Then, for each layer, every change
under measurement there is a stream of activations of its own: it leaves the model's own stream at that layer, goes
through the layers behind, which are loaded once for all streams, and what it predicts is held against the model's own
predictions. Memory holds the streams of one layer; and what was measured of a layer is kept, so that a build that was
killed goes on behind it.

Letters: W windows of T tokens, C input features, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from optimc.errors import CalibrationError
from optimc.plan import KvDtype
from optimc_passes.artifact import Artifact
from optimc_passes.base import PassContext
from optimc_passes.choices import Scheme
from optimc_passes.memory import return_free_memory
from optimc_passes.quantize.kv_ranges import round_by_token
from optimc_passes.quantize.predictions import Predictions
from optimc_passes.quantize.rounding import nearest, output_error
from optimc_passes.quantize.unit_options import Unit
from optimc_passes.walk.activations import Activations, second_moment
from optimc_passes.walk.budget import Budget
from optimc_passes.walk.host_bytes import walk_host_bytes
from optimc_passes.walk.layered_model import LayeredModel
from optimc_passes.walk.loaded_layer import LoadedLayer
from optimc_passes.walk.partial import Finished, PartialWork, Resumed
from optimc_passes.weights import Dense, Weight

_PREDICTIONS = 256
"""Predictions that divergences are means over, spread over the windows: each costs a row of logits per stream."""
_OWN, _END = "own", "end"
"""Names of the streams that are kept: what enters the next layer, and the last layer's output."""


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
    resumed_at: int | None
    """Decoder layers that an earlier build had measured; None if this one started at the first."""

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
        self._measured: dict[str, float] = {}
        """By what `_divergence_of`, `_cache_of`, `_error_of` and `_whole_of` return."""
        by_layer: dict[str, list[Unit]] = {}
        for unit in request.units:
            by_layer.setdefault(unit.linears[0].layer.rpartition(".")[0].rpartition(".")[0], []).append(unit)
        self._units = by_layer

    def run(self) -> Sensitivity:
        model, context = self._model, self._context
        steps = model.num_layers + 1
        with ExitStack() as stack:
            partial = stack.enter_context(PartialWork(context.partial)) if context.partial is not None else None
            resumed = partial.load() if partial is not None else None
            context.progress(0, steps, "predictions")
            own, end = self._started() if resumed is None else self._loaded(resumed)
            predictions = Predictions(
                model, self._weights, end, _PREDICTIONS, budget=self._budget, folder=context.scratch
            )
            start = 0 if resumed is None else resumed.done
            for index in range(start, model.num_layers):
                context.progress(index, steps, model.layer_prefix(index).rstrip("."))
                measured = self._measure_layer(index, own, predictions)
                self._measured.update(measured)
                if partial is not None:
                    partial.save(index + 1, Finished(measured=measured), {_OWN: own, _END: end})
                return_free_memory()
            context.progress(model.num_layers, steps, model.head_name.rpartition(".")[0])
            self._measured.update(self._measure_head(end, predictions))
        return self._found(predictions.count, start or None)

    def _started(self) -> tuple[Activations, Activations]:
        """Return what enters the first layer, and what the last one makes of it."""
        own, end = self._empty(self._model.hidden_size), self._empty(self._model.hidden_size)
        self._model.embed(self._weights, list(self._rows), own)
        source = own
        for index in range(self._model.num_layers):
            with self._model.loaded(index, self._weights) as layer:
                self._through(layer, source, end)
            source = end
        return own, end

    def _loaded(self, resumed: Resumed) -> tuple[Activations, Activations]:
        """Return what an earlier build left, and take over what it had measured."""
        self._measured.update(resumed.measured)
        lengths, width = [len(row) for row in self._rows], self._model.hidden_size
        folder, budget = self._context.scratch, self._budget
        own, end = (
            Activations.load(resumed.streams[name], lengths, width, budget=budget, folder=folder)
            for name in (_OWN, _END)
        )
        return own, end

    def _measure_layer(self, index: int, own: Activations, predictions: Predictions) -> dict[str, float]:
        """Measure all changes of a layer; `own` enters it, and afterwards the next one."""
        model = self._model
        units = self._units.get(model.layer_prefix(index).rstrip("."), [])
        with model.loaded(index, self._weights) as layer:
            measured = self._errors(layer, own, units)
            streams = {_divergence_of(unit): self._with_unit(layer, own, unit) for unit in units}
            streams |= {_cache_of(index, dtype): self._with_cache(layer, own, dtype) for dtype in self._request.kv}
            self._through(layer, own, own)
        for later in range(index + 1, model.num_layers if streams else 0):
            with model.loaded(later, self._weights) as layer:
                for stream in streams.values():
                    self._through(layer, stream, stream)
        for name, stream in streams.items():
            measured[name] = _finite(predictions.divergence(stream), name)
        return measured

    def _errors(self, layer: LoadedLayer, own: Activations, units: Sequence[Unit]) -> dict[str, float]:
        """Return what each format does to the outputs of the units of a layer, from what they read."""
        by_linear = {linear.name: unit for unit in units for linear in unit.linears}
        reads = {
            stage.name: next((by_linear[linear.name] for linear in stage.linears if linear.name in by_linear), None)
            for stage in self._model.stages(layer.index)
        }
        errors: dict[str, float] = {}
        read = self._each(layer.attention_input, own)
        errors |= self._errors_of(reads["attention_in"], layer.weight, read)
        read = self._each(layer.attention_context, read)
        errors |= self._errors_of(reads["attention_out"], layer.weight, read)
        attention = self._each(layer.attention_output, read)
        read = self._each(layer.mlp_input, own, attention)
        errors |= self._errors_of(reads["mlp_in"], layer.weight, read)
        read = self._each(layer.mlp_context, read)
        return errors | self._errors_of(reads["mlp_out"], layer.weight, read)

    def _errors_of(
        self, unit: Unit | None, weight: Callable[[str], NDArray[np.float32]], read: Activations
    ) -> dict[str, float]:
        if unit is None:
            return {}
        moment = second_moment(read)
        weights = [weight(linear.name) for linear in unit.linears]
        errors = {_whole_of(unit): sum(output_error(values, moment) for values in weights)}
        for scheme in self._request.schemes[unit.name]:
            if scheme.bits is not None:
                errors[_error_of(unit, scheme)] = sum(
                    output_error(_rounded(values, scheme) - values, moment) for values in weights
                )
        return {name: _finite(error, name) for name, error in errors.items()}

    def _with_unit(self, layer: LoadedLayer, own: Activations, unit: Unit) -> Activations:
        """Return what a layer makes of the model's own stream with one unit rounded."""
        scheme = reference_scheme(self._request.schemes[unit.name])
        before = {linear.name: np.array(layer.weight(linear.name)) for linear in unit.linears}
        for name, values in before.items():
            layer.set_weight(name, _rounded(values, scheme))
        stream = self._empty(own.width)
        self._through(layer, own, stream)
        for name, values in before.items():
            layer.set_weight(name, values)
        return stream

    def _with_cache(self, layer: LoadedLayer, own: Activations, dtype: KvDtype) -> Activations:
        """Return what a layer makes of the model's own stream with its keys and values rounded."""
        stream = self._empty(own.width)
        self._model.attention_hook = _kv_rounding(dtype)
        try:
            self._through(layer, own, stream)
        finally:
            self._model.attention_hook = None
        return stream

    def _measure_head(self, end: Activations, predictions: Predictions) -> dict[str, float]:
        """Measure the head rounded, if it is asked for: its stream is the model's own."""
        unit = next((unit for unit in self._request.units if unit.linears[0].is_head), None)
        if unit is None:
            return {}
        read = self._empty(end.width)
        self._model.normed(self._weights, end, read)
        current = self._model.head_weight(self._weights)
        assert isinstance(current, Dense), "requires refuses what is quantized already"
        values = current.read().astype(np.float32)
        measured = self._errors_of(unit, lambda _name: values, read)
        rounded = Dense.of(_rounded(values, reference_scheme(self._request.schemes[unit.name])))
        overlaid: dict[str, Weight] = {**self._weights, self._model.head_name: rounded}
        name = _divergence_of(unit)
        return measured | {name: _finite(predictions.divergence(end, self._model.head(overlaid)), name)}

    def _found(self, predictions: int, resumed_at: int | None) -> Sensitivity:
        request, measured = self._request, self._measured
        return Sensitivity(
            {unit.name: measured[_divergence_of(unit)] for unit in request.units},
            {unit.name: reference_scheme(request.schemes[unit.name]) for unit in request.units},
            {
                (unit.name, scheme): measured[_error_of(unit, scheme)]
                for unit in request.units
                for scheme in request.schemes[unit.name]
                if scheme.bits is not None
            },
            {unit.name: measured[_whole_of(unit)] for unit in request.units},
            [
                {dtype: measured[_cache_of(layer, dtype)] for dtype in request.kv}
                for layer in range(self._model.num_layers if request.kv else 0)
            ],
            predictions,
            resumed_at,
        )

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


def _divergence_of(unit: Unit) -> str:
    return f"divergence of {unit.name}"


def _cache_of(layer: int, dtype: KvDtype) -> str:
    return f"divergence of layer {layer}'s cache in {dtype}"


def _error_of(unit: Unit, scheme: Scheme) -> str:
    kind = "symmetric" if scheme.symmetric else "asymmetric"
    return f"error of {unit.name} in {scheme.bits} bits, {kind}, group {scheme.group}"


def _whole_of(unit: Unit) -> str:
    return f"outputs of {unit.name}"


def _finite(value: float, name: str) -> float:
    if not math.isfinite(value):
        raise CalibrationError(f"{name}: not finite on the calibration tokens")
    return value


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
