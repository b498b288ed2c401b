"""Channel scales that make rounding cheap where activations are large; pure arithmetic.

Activation-aware weight quantization (arXiv 2306.00978): the input channels of a linear layer are multiplied by s before
rounding and the activations divided by s, so that channels with large activations get finer steps. The product is the
same but for rounding, and s is chosen to make the layer's own output error

    err(s) = sum over its weights W of tr(D H D^T),   D = Q(W diag(s)) diag(1/s) - W,   H = X^T X

smallest. H, the second moment of the calibration activations, stands in for the tokens: no candidate needs a forward
pass. Not scaling at all is always among the candidates.

Letters: N output features, C input features, P channels of the operation before (P < C where several input features
come from one channel: values of a key/value head that a group of query heads shares).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimc_passes.quantize.rounding import Round, output_error

SMALLEST, LARGEST = 1e-4, 1e4
"""Bounds of a scale, around a middle of 1."""

_FLOOR = 1e-4
"""Of a channel's statistic, relative to the median of those that are not 0: a channel that calibration never saw
active says nothing about how small its scale should be."""

_ROWS = 256
"""Rows of the weights by which candidates are compared: they rank them as all rows would, but for near ties."""
_FINALISTS = 4
"""Candidates that are compared once more, by all rows."""


@dataclass(frozen=True)
class Scaling:
    """What a search found."""

    scales: NDArray[np.float32]
    """[C], finite and positive; all 1 if nothing was better."""
    error: float
    """err(scales)."""
    error_unscaled: float
    """err(1)."""


def best_scales(
    weights: Sequence[NDArray[np.float32]],
    moment: NDArray[np.float32],
    magnitude: NDArray[np.float32],
    rounders: Sequence[Round],
    *,
    channels: NDArray[np.intp] | None = None,
    grid: int = 20,
    duo: bool = True,
) -> Scaling:
    """Search the scales under which rounding weights [N_i, C] that read one value costs their outputs least.

    `moment` is H [C, C], `magnitude` the mean of |x| of each input feature [C], both over the same tokens. `rounders`
    say how each weight is rounded. `channels` [C] names the channel each input feature comes from, by default its own;
    features of one channel get one scale. Candidates are m ** r for r = 0 .. 1 in `grid` steps, m being the magnitude,
    and with `duo` also m ** r / w ** (1 - r), w being the mean size of a channel's weights within their rows.

    Raises ValueError if H, a magnitude or a weight is not finite.
    """
    columns = len(magnitude)
    assert moment.shape == (columns, columns), (moment.shape, columns)
    assert len(weights) == len(rounders)
    assert all(weight.shape[1] == columns for weight in weights)
    for what, array in (("second moments", moment), ("magnitudes", magnitude), *(("a weight", w) for w in weights)):
        if not np.isfinite(array).all():
            raise ValueError(f"{what} of its inputs are not finite" if what != "a weight" else "a weight is not finite")
    channels = np.arange(columns) if channels is None else channels
    ones = np.ones(columns, np.float32)
    unscaled = best = _error(weights, moment, rounders, ones)
    found = ones
    candidates = _candidates(weights, magnitude, channels, grid, duo=duo)
    if sum(map(len, weights)) > _ROWS:
        samples = _sampled(weights)
        estimates = [_error(samples, moment, rounders, candidate) for candidate in candidates]
        candidates = [candidates[place] for place in np.argsort(estimates, kind="stable")[:_FINALISTS]]
    for candidate in candidates:
        error = _error(weights, moment, rounders, candidate)
        if error < best:
            best, found = error, candidate
    return Scaling(found, best, unscaled)


def scales_of(
    magnitude: NDArray[np.float32], sizes: NDArray[np.float32] | None, ratio: float, channels: NDArray[np.intp]
) -> NDArray[np.float32]:
    """Return the scales [C] of one candidate: magnitude ** ratio, over sizes ** (1 - ratio) where sizes are given.

    Statistics are reduced over the features of a channel by their maximum and floored; scales lie around 1, between
    `SMALLEST` and `LARGEST`.
    """
    logs = ratio * np.log(_floored(_per_channel(magnitude, channels)))
    if sizes is not None:
        logs = logs - (1 - ratio) * np.log(_floored(_per_channel(sizes, channels)))
    # sqrt(max * min) in logarithms: the middle of the scales' range becomes 1.
    logs = logs - (logs.max() + logs.min()) / 2
    scales = np.exp(np.clip(logs, np.log(SMALLEST), np.log(LARGEST))).astype(np.float32)
    spread: NDArray[np.float32] = scales[channels]
    return spread


def _error(
    weights: Sequence[NDArray[np.float32]],
    moment: NDArray[np.float32],
    rounders: Sequence[Round],
    scales: NDArray[np.float32],
) -> float:
    return sum(
        output_error(rounded(weight * scales) / scales - weight, moment)
        for weight, rounded in zip(weights, rounders, strict=True)
    )


def _sampled(weights: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
    """Return evenly spread rows of each weight, about `_ROWS` of all together."""
    total = sum(map(len, weights))
    counts = [min(max(_ROWS * len(weight) // total, 1), len(weight)) for weight in weights]
    places = [np.arange(count) * len(weight) // count for count, weight in zip(counts, weights, strict=True)]
    return [weight[rows] for rows, weight in zip(places, weights, strict=True)]


def _candidates(
    weights: Sequence[NDArray[np.float32]],
    magnitude: NDArray[np.float32],
    channels: NDArray[np.intp],
    grid: int,
    *,
    duo: bool,
) -> list[NDArray[np.float32]]:
    ratios = [step / grid for step in range(1, grid + 1)]
    found = [scales_of(magnitude, None, ratio, channels) for ratio in ratios]
    if duo:
        sizes = _sizes(weights)
        found += [scales_of(magnitude, sizes, ratio, channels) for ratio in (0.0, *ratios[:-1])]
    return found


def _sizes(weights: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return how large each channel's weights are, relative to the largest of their rows, on average over rows."""
    total = np.zeros(weights[0].shape[1], np.float64)
    for weight in weights:
        magnitude = np.abs(weight)
        largest = magnitude.max(axis=1, keepdims=True)
        total += (magnitude / np.where(largest == 0, 1, largest)).sum(axis=0, dtype=np.float64)
    return (total / sum(len(weight) for weight in weights)).astype(np.float32)


def _per_channel(statistic: NDArray[np.float32], channels: NDArray[np.intp]) -> NDArray[np.float64]:
    reduced = np.zeros(channels.max() + 1)
    np.maximum.at(reduced, channels, statistic.astype(np.float64))
    return reduced


def _floored(statistic: NDArray[np.float64]) -> NDArray[np.float64]:
    positive = statistic[statistic > 0]
    return np.maximum(statistic, _FLOOR * np.median(positive)) if len(positive) else np.ones_like(statistic)
