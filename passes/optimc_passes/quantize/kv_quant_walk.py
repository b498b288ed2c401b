"""Looking at keys and values on calibration tokens, one decoder layer at a time.

A layer is run on all windows for the ranges of its keys, then on a few of them again with keys and values as each cache
would give them back. The error is that of what attention adds to the hidden state: keys matter through the softmax
alone, which forgives some errors and blows up others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from optimc.errors import CalibrationError
from optimc.plan import KvDtype, KvKeys
from optimc_passes.base import PassContext
from optimc_passes.quantize.kv_ranges import KeyRange, KeyScales, KvCode, round_by_channel, round_by_token
from optimc_passes.walk.activations import Activations
from optimc_passes.walk.budget import Budget
from optimc_passes.walk.layered_model import LayeredModel, LoadedLayer
from optimc_passes.weights import Weight

SCORED_WINDOWS = 4
"""Windows on which the two ways are compared, half of all at most. They are compared with scales that the other windows
give, so that keys beyond them cost what they will cost on text nobody has seen; the scales that are kept hold all."""


@dataclass(frozen=True)
class SeenKeys:
    """What calibration says of one layer's cache."""

    scales: KeyScales
    """Of channels."""
    errors: Mapping[KvKeys, float]
    """Relative error of what attention adds, with keys and values rounded; only the ways that were asked for."""


def walk_keys(
    config: Any,
    weights: Mapping[str, Weight],
    rows: Sequence[NDArray[np.int32]],
    dtypes: Sequence[KvDtype],
    ways: Sequence[KvKeys],
    context: PassContext,
) -> Iterator[SeenKeys | None]:
    """Yield what was seen of each layer in turn; None for layers whose dtype has no scales.

    The model runs on the weights as they are in the store and on exact keys and values, so that no layer's choice
    depends on another's. Raises CalibrationError naming the layer whose keys are not finite.
    """
    model = LayeredModel(config)
    budget = Budget.of_process(context.max_host_bytes)
    stream = Activations([len(row) for row in rows], model.hidden_size, budget=budget, folder=context.scratch)
    model.embed(weights, rows, stream)
    for layer, dtype in enumerate(dtypes):
        with model.loaded(layer, weights) as loaded:
            coded: KvCode | None = dtype if dtype == "int8" or dtype == "int4" else None
            yield _look(model, loaded, stream, coded, ways)


def _look(
    model: LayeredModel, loaded: LoadedLayer, stream: Activations, dtype: KvCode | None, ways: Sequence[KvKeys]
) -> SeenKeys | None:
    """Move `stream` past the layer; return what was seen of its keys, if its dtype has scales."""
    windows = range(len(stream.lengths))
    # A single window is compared with its own scales: there are no others.
    num_scored = min(SCORED_WINDOWS, len(windows) // 2)
    scored = [stream.window(index).copy() for index in windows[: max(num_scored, 1)]] if dtype is not None else []
    others, seen = KeyRange(), KeyRange()
    ranges: list[KeyRange] = []

    def collect(_layer: int, _query: Tensor, keys: Tensor, _values: Tensor) -> None:
        for each in ranges:
            each.see(keys[0].numpy())

    model.attention_hook = collect if dtype is not None else None
    try:
        for index in windows:
            ranges[:] = [seen] if index < num_scored else [seen, others]
            stream.put(index, loaded.run(stream.window(index)))
    except ValueError as error:
        raise CalibrationError(f"layer {loaded.index}: {error} on the calibration tokens") from error
    finally:
        model.attention_hook = None
    if dtype is None:
        return None
    return SeenKeys(seen.scales(dtype), _errors(model, loaded, scored, dtype, others.scales(dtype), ways))


def _errors(
    model: LayeredModel,
    loaded: LoadedLayer,
    scored: Sequence[NDArray[np.float32]],
    dtype: KvCode,
    scales: KeyScales,
    ways: Sequence[KvKeys],
) -> dict[KvKeys, float]:
    size, wrong = 0.0, dict.fromkeys(ways, 0.0)
    for x in scored:
        read = loaded.attention_input(torch.from_numpy(x))
        exact = loaded.attention_output(loaded.attention_context(read))
        size += float(exact.double().square().sum())
        for way in ways:

            def rounded(
                _layer: int, _query: Tensor, keys: Tensor, values: Tensor, way: KvKeys = way
            ) -> tuple[Tensor, Tensor]:
                held = keys[0].numpy()
                held = round_by_channel(held, scales, dtype) if way == "channel" else round_by_token(held, dtype)
                return torch.from_numpy(held)[None], torch.from_numpy(round_by_token(values[0].numpy(), dtype))[None]

            model.attention_hook = rounded
            try:
                got = loaded.attention_output(loaded.attention_context(read))
            finally:
                model.attention_hook = None
            wrong[way] += float((got - exact).double().square().sum())
    return {way: (error / size) ** 0.5 if size else 0.0 for way, error in wrong.items()}
