"""Looking at keys and values on calibration tokens, one decoder layer at a time.

A layer is run on all windows for the ranges of its keys, then on a few of them again with keys and values as each cache
would give them back. The error is that of what attention adds to the hidden state: keys matter through the softmax
alone, which forgives some errors and blows up others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from optimc.errors import CalibrationError
from optimc.plan import KvDtype, KvKeys, LayerReport
from optimc_passes.artifact import Artifact
from optimc_passes.base import PassContext
from optimc_passes.memory import return_free_memory
from optimc_passes.quantize.kv_ranges import (
    KeyRange,
    KeyScales,
    KvCode,
    Turning,
    round_by_channel,
    round_by_token,
)
from optimc_passes.walk.activations import Activations
from optimc_passes.walk.budget import Budget
from optimc_passes.walk.layered_model import LayeredModel
from optimc_passes.walk.loaded_layer import LoadedLayer
from optimc_passes.walk.partial import Finished, PartialWork
from optimc_passes.walk.structure import ATTENTION
from optimc_passes.walk.walk import Walked
from optimc_passes.weights import Weight

SCORED_WINDOWS = 4
"""Windows on which the two ways are compared, half of all at most. They are compared with scales that the other windows
give, so that keys beyond them cost what they will cost on text nobody has seen; the scales that are kept hold all."""
_STREAM = "original"
"""Of the walk's unfinished work: outputs of layers as the store has them."""


@dataclass(frozen=True)
class SeenKeys:
    """What calibration says of one layer's cache."""

    scales: KeyScales
    """Of channels."""
    errors: Mapping[KvKeys, float]
    """Relative error of what attention adds, with keys and values rounded; only the ways that were asked for."""


Finish = Callable[[int, SeenKeys | None], tuple[dict[str, Weight], LayerReport]]
"""Called with a layer and what was seen of it, None where its dtype has no scales; returns what is kept of it."""


def walk_keys(
    artifact: Artifact,
    dtypes: Sequence[KvDtype],
    ways: Sequence[KvKeys],
    positions: int,
    finish: Finish,
    context: PassContext,
) -> Walked:
    """Look at each layer in turn and keep what `finish` makes of it; scales hold keys of the first `positions`.

    The model runs on the weights as they are in the store and on exact keys and values, so that no layer's choice
    depends on another's. A walk that finds what an earlier one left in `context.partial` goes on behind it. Raises
    CalibrationError naming the layer whose keys, or what they lead to, are not finite.
    """
    assert artifact.calibration is not None, "the base class refuses passes that lack it"
    rows = artifact.calibration.tokens
    lengths = [len(row) for row in rows]
    model = LayeredModel(artifact.checkpoint.config)
    budget = Budget.of_process(context.max_host_bytes, needed=_layer_bytes(model))
    with ExitStack() as stack:
        partial = stack.enter_context(PartialWork(context.partial)) if context.partial is not None else None
        resumed = partial.load() if partial is not None else None
        folder, hidden = context.scratch, model.hidden_size
        if resumed is None:
            stream = Activations(lengths, hidden, budget=budget, folder=folder)
            model.embed(artifact.weights, rows, stream)
        else:
            stream = Activations.load(resumed.streams[_STREAM], lengths, hidden, budget=budget, folder=folder)
        weights: dict[str, Weight] = {}
        reports: list[LayerReport] = []

        def keep(finished: Finished) -> Finished:
            kept = {name: context.keep(name, weight) for name, weight in finished.weights.items()}
            weights.update(kept)
            reports.extend(finished.rows)
            return Finished(kept, finished.rows)

        if resumed is not None:
            keep(Finished(resumed.weights, resumed.rows))
        start = 0 if resumed is None else resumed.done
        for layer in range(start, len(dtypes)):
            context.progress(layer, len(dtypes), f"layer {layer}")
            began = time.perf_counter()
            with model.loaded(layer, artifact.weights) as loaded:
                turning = _turning(model, loaded, max(lengths), positions)
                added, report = finish(layer, _look(model, loaded, stream, dtypes[layer], ways, turning))
            timed = report.model_copy(update={"seconds": time.perf_counter() - began})
            finished = keep(Finished(added, (timed,)))
            if partial is not None:
                partial.save(layer + 1, finished, {_STREAM: stream})
            return_free_memory()
    return Walked(weights, tuple(reports), start or None)


def _layer_bytes(model: LayeredModel) -> int:
    """Return the size of the largest decoder layer in float32."""
    layers = (model.layer_parameters(layer).values() for layer in range(model.num_layers))
    return max(sum(4 * int(np.prod(shape)) for shape in shapes) for shapes in layers)


def _turning(model: LayeredModel, loaded: LoadedLayer, seen: int, served: int) -> Turning | None:
    """Return how a layer's RoPE goes on beyond windows of `seen` positions, from the factors the model hands it.

    Layers without positions are handed them too, and leave them.
    """
    with model.forward():  # what it makes is kept for every run of this length, masks included
        factors = model.layer_arguments(loaded.index, seen).get("position_embeddings")
    turns = bool(getattr(loaded.module.get_submodule(ATTENTION), "use_rope", True))
    if factors is None or not turns or seen < 2 or served <= seen:
        return None
    cosine, sine = (factor[0, :2].double().numpy() for factor in factors)
    pairs = cosine.shape[1] // 2
    angle = np.arctan2(sine, cosine)[:, :pairs]
    return Turning(angle[1] - angle[0], seen, served)


def _look(
    model: LayeredModel,
    loaded: LoadedLayer,
    stream: Activations,
    held: KvDtype,
    ways: Sequence[KvKeys],
    turning: Turning | None,
) -> SeenKeys | None:
    """Move `stream` past the layer; return what was seen of its keys, if what it holds has scales."""
    dtype: KvCode | None = held if held == "int8" or held == "int4" else None
    windows = range(len(stream.lengths))
    # A single window is compared with its own scales: there are no others.
    num_scored = min(SCORED_WINDOWS, len(windows) // 2)
    scored = [stream.window(index).copy() for index in windows[: max(num_scored, 1)]] if dtype is not None else []
    others, seen = KeyRange(turning), KeyRange(turning)
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
    """Return the relative error of what attention adds by way; 0 where it adds nothing."""
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
    if not all(map(math.isfinite, (size, *wrong.values()))):
        raise CalibrationError(f"layer {loaded.index}: what attention adds is not finite on the calibration tokens")
    return {way: (error / size) ** 0.5 if size else 0.0 for way, error in wrong.items()}
