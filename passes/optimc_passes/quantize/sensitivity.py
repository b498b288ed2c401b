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
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from optimc.errors import CalibrationError
from optimc.plan import KvDtype
from optimc_passes.artifact import Artifact
from optimc_passes.base import PassContext
from optimc_passes.choices import Scheme
from optimc_passes.memory import return_free_memory
from optimc_passes.quantize.gptq_reference import rounded_by_gptq
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
_OWN, _TEXT, _END = "own", "text", "end"
"""Names of the streams that are kept: what enters the next layer, for predictions and for second moments, and the last
layer's output."""

Rounding = Literal["nearest", "gptq"]


@dataclass(frozen=True)
class Request:
    """What is to be measured."""

    units: Sequence[Unit]
    schemes: Mapping[str, Sequence[Scheme]]
    """By name of the unit: the formats whose errors are wanted."""
    kv: Sequence[KvDtype]
    """Formats of each layer's cache; none: the cache is not measured."""
    rounding: Rounding = "nearest"
    """How units are rounded for the measurement."""


@dataclass(frozen=True)
class Sensitivity:
    """What was measured."""

    divergences: Mapping[str, float]
    """By name of the unit: KL divergence with it rounded as in `references`, nats per token."""
    references: Mapping[str, Scheme]
    errors: Mapping[tuple[str, Scheme], float]
    """By unit and format: squared error of its outputs, summed over the tokens: rounded to nearest, times what the
    request's rounding makes of that in `references`."""
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
    artifact: Artifact,
    request: Request,
    rows: Sequence[NDArray[np.int32]],
    context: PassContext,
    text: Sequence[NDArray[np.int32]] = (),
) -> Sensitivity:
    """Measure on token rows. What does not fit into `context.max_host_bytes` is kept in files.

    Second moments, by which errors are weighed and GPTQ rounds, are those of `text` if there is any: weights that were
    fitted to the rows they are measured on would look better than they are.
    """
    return _Measurement(artifact, request, rows, text, context).run()


def reference_scheme(schemes: Sequence[Scheme]) -> Scheme:
    """Return the format to measure: 3 bits or what is nearest, in the smallest groups. Large enough an error to be
    seen above float32's rounding, small enough for its square to stand for the others."""
    rounded = [scheme for scheme in schemes if scheme.bits is not None]
    return min(rounded, key=lambda scheme: (abs((scheme.bits or 0) - 3), scheme.bits, scheme.group % (1 << 31)))


_Rounded = Mapping[str, NDArray[np.float32]]
"""A unit's weights by parameter name, rounded."""


class _Measurement:
    def __init__(
        self,
        artifact: Artifact,
        request: Request,
        rows: Sequence[NDArray[np.int32]],
        text: Sequence[NDArray[np.int32]],
        context: PassContext,
    ) -> None:
        self._weights, self._request, self._context = artifact.weights, request, context
        self._rows = {_OWN: rows, **({_TEXT: text} if text else {})}
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
            streams, end = self._started() if resumed is None else self._loaded(resumed)
            predictions = Predictions(
                model, self._weights, end, _PREDICTIONS, budget=self._budget, folder=context.scratch
            )
            start = 0 if resumed is None else resumed.done
            for index in range(start, model.num_layers):
                context.progress(index, steps, model.layer_prefix(index).rstrip("."))
                measured = self._measure_layer(index, streams, predictions)
                self._measured.update(measured)
                if partial is not None:
                    partial.save(index + 1, Finished(measured=measured), {**streams, _END: end})
                return_free_memory()
            context.progress(model.num_layers, steps, model.head_name.rpartition(".")[0])
            self._measured.update(self._measure_head(streams, predictions))
        return self._found(predictions.count, start or None)

    def _started(self) -> tuple[dict[str, Activations], Activations]:
        """Return what enters the first layer, and what the last one makes of it."""
        model = self._model
        streams = {name: self._empty(name, model.hidden_size) for name in self._rows}
        for name, rows in self._rows.items():
            model.embed(self._weights, list(rows), streams[name])
        source, end = streams[_OWN], self._empty(_OWN, model.hidden_size)
        for index in range(model.num_layers):
            with model.loaded(index, self._weights) as layer:
                _through(layer, source, end)
            source = end
        return streams, end

    def _loaded(self, resumed: Resumed) -> tuple[dict[str, Activations], Activations]:
        """Return what an earlier build left, and take over what it had measured."""
        self._measured.update(resumed.measured)

        def load(name: str, rows: str) -> Activations:
            lengths, width = [len(row) for row in self._rows[rows]], self._model.hidden_size
            file, folder = resumed.streams[name], self._context.scratch
            return Activations.load(file, lengths, width, budget=self._budget, folder=folder)

        return {name: load(name, name) for name in self._rows}, load(_END, _OWN)

    def _measure_layer(self, index: int, streams: dict[str, Activations], predictions: Predictions) -> dict[str, float]:
        """Measure all changes of a layer; `streams` enter it, and afterwards the next one."""
        model, own = self._model, streams[_OWN]
        units = self._units.get(model.layer_prefix(index).rstrip("."), [])
        with model.loaded(index, self._weights) as layer:
            measured, rounded = self._look(layer, streams, units)
            changed = {_divergence_of(unit): self._with_unit(layer, own, rounded[unit.name]) for unit in units}
            changed |= {_cache_of(index, dtype): self._with_cache(layer, own, dtype) for dtype in self._request.kv}
            _through(layer, own, own)
        for later in range(index + 1, model.num_layers if changed else 0):
            with model.loaded(later, self._weights) as layer:
                for stream in changed.values():
                    _through(layer, stream, stream)
        for name, stream in changed.items():
            measured[name] = _finite(predictions.divergence(stream), name)
        return measured

    def _look(
        self, layer: LoadedLayer, streams: dict[str, Activations], units: Sequence[Unit]
    ) -> tuple[dict[str, float], dict[str, _Rounded]]:
        """Return what each format does to the outputs of the units of a layer, and the units rounded for measuring.

        The stream that is looked at for nothing else is taken through the layer.
        """
        text = streams.get(_TEXT, streams[_OWN])
        by_linear = {linear.name: unit for unit in units for linear in unit.linears}
        reads = {
            stage.name: next((by_linear[linear.name] for linear in stage.linears if linear.name in by_linear), None)
            for stage in self._model.stages(layer.index)
        }
        measured: dict[str, float] = {}
        rounded: dict[str, _Rounded] = {}

        def look(stage: str, read: Activations) -> Activations:
            unit = reads[stage]
            if unit is not None:
                weights = {linear.name: layer.weight(linear.name) for linear in unit.linears}
                errors, rounded[unit.name] = self._rounded(unit, weights, read)
                measured.update(errors)
            return read

        read = look("attention_in", self._each(layer.attention_input, text))
        read = look("attention_out", self._each(layer.attention_context, read))
        attention = self._each(layer.attention_output, read)
        read = look("mlp_in", self._each(layer.mlp_input, text, attention))
        read = look("mlp_out", self._each(layer.mlp_context, read))
        if _TEXT in streams:
            streams[_TEXT] = self._each(layer.output, text, attention, self._each(layer.mlp_output, read))
        return measured, rounded

    def _rounded(
        self, unit: Unit, weights: Mapping[str, NDArray[np.float32]], read: Activations
    ) -> tuple[dict[str, float], _Rounded]:
        """Return errors of a unit's formats, and the unit in the format that is measured."""
        moment = second_moment(read)
        schemes = self._request.schemes[unit.name]
        reference = reference_scheme(schemes)
        errors: dict[Scheme, float] = {}
        rounded: list[NDArray[np.float32]] = []
        for scheme in schemes:
            if scheme.bits is not None:
                tried = [_nearest(values, scheme) for values in weights.values()]
                errors[scheme] = _error(tried, weights, moment)
                rounded = tried if scheme == reference else rounded
        share = 1.0
        if self._request.rounding == "gptq":
            rounded = rounded_by_gptq(list(weights.values()), moment, reference)
            if errors[reference] > 0:
                share = _error(rounded, weights, moment) / errors[reference]
        measured = {_error_of(unit, scheme): error * share for scheme, error in errors.items()}
        measured[_whole_of(unit)] = sum(output_error(values, moment) for values in weights.values())
        return (
            {name: _finite(value, name) for name, value in measured.items()},
            dict(zip(weights, rounded, strict=True)),
        )

    def _with_unit(self, layer: LoadedLayer, own: Activations, rounded: _Rounded) -> Activations:
        """Return what a layer makes of the model's own stream with one unit rounded."""
        before = {name: np.array(layer.weight(name)) for name in rounded}
        for name, values in rounded.items():
            layer.set_weight(name, values)
        stream = self._empty(_OWN, own.width)
        _through(layer, own, stream)
        for name, values in before.items():
            layer.set_weight(name, values)
        return stream

    def _with_cache(self, layer: LoadedLayer, own: Activations, dtype: KvDtype) -> Activations:
        """Return what a layer makes of the model's own stream with its keys and values rounded."""
        stream = self._empty(_OWN, own.width)
        self._model.attention_hook = _kv_rounding(dtype)
        try:
            _through(layer, own, stream)
        finally:
            self._model.attention_hook = None
        return stream

    def _measure_head(self, streams: Mapping[str, Activations], predictions: Predictions) -> dict[str, float]:
        """Measure the head rounded, if it is asked for: its stream is the model's own."""
        unit = next((unit for unit in self._request.units if unit.linears[0].is_head), None)
        if unit is None:
            return {}
        name = _TEXT if _TEXT in streams else _OWN
        read = self._empty(name, self._model.hidden_size)
        self._model.normed(self._weights, streams[name], read)
        current = self._model.head_weight(self._weights)
        assert isinstance(current, Dense), "requires refuses what is quantized already"
        values = current.read().astype(np.float32)
        measured, rounded = self._rounded(unit, {self._model.head_name: values}, read)
        changed = Dense.of(rounded[self._model.head_name])
        overlaid: dict[str, Weight] = {**self._weights, self._model.head_name: changed}
        name = _divergence_of(unit)
        divergence = predictions.divergence(streams[_OWN], self._model.head(overlaid))
        return measured | {name: _finite(divergence, name)}

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

    def _each(self, step: Callable[..., torch.Tensor], *sources: Activations) -> Activations:
        result: Activations | None = None
        lengths = sources[0].lengths
        for window in range(len(lengths)):
            rows = step(*(source.tensor(window) for source in sources))
            if result is None:
                folder = self._context.scratch
                result = Activations(lengths, rows.shape[1], budget=self._budget, folder=folder)
            result.put(window, rows)
        assert result is not None
        return result

    def _empty(self, name: str, width: int) -> Activations:
        lengths = [len(row) for row in self._rows[name]]
        return Activations(lengths, width, budget=self._budget, folder=self._context.scratch)


def _through(layer: LoadedLayer, source: Activations, out: Activations) -> None:
    for window in range(len(source.lengths)):
        out.put(window, layer.run(source.window(window)))


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


def _error(
    rounded: Sequence[NDArray[np.float32]], weights: Mapping[str, NDArray[np.float32]], moment: NDArray[np.float32]
) -> float:
    return sum(output_error(new - values, moment) for new, values in zip(rounded, weights.values(), strict=True))


def _nearest(weight: NDArray[np.float32], scheme: Scheme) -> NDArray[np.float32]:
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
