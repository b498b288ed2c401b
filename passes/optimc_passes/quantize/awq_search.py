"""Channel scales and clipped ranges that make rounding cheap where activations are large; pure arithmetic.

Activation-aware weight quantization (arXiv 2306.00978): the input channels of a linear layer are multiplied by s before
rounding and the activations divided by s, so that channels with large activations get finer steps. The product is the
same but for rounding, and s is chosen to make the layer's own output error

    err(s) = sum over its weights W of tr(D H D^T),   D = Q(W diag(s)) diag(1/s) - W,   H = X^T X

smallest. H, the second moment of the calibration activations, stands in for the tokens: no candidate needs a forward
pass. Not scaling at all is always among the candidates.

Letters: N output features, C input features, P channels of the operation before (P < C where several input features
come from one channel: values of a key/value head that a group of query heads shares), G group size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimc_passes.quantize.affine import asymmetric_grid, group_range, symmetric_grid

SMALLEST, LARGEST = 1e-4, 1e4
"""Bounds of a scale, around a middle of 1."""

_FLOOR = 1e-4
"""Of a channel's statistic, relative to the median of those that are not 0: a channel that calibration never saw
active says nothing about how small its scale should be."""

_ROWS = 256
"""Rows of the weights by which candidates are compared: they rank them as all rows would, but for near ties."""
_FINALISTS = 4
"""Candidates that are compared once more, by all rows."""

Round = Callable[[NDArray[np.float32]], NDArray[np.float32]]
"""A weight [N, C] to the weight that its codes stand for."""


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


def output_error(difference: NDArray[np.float32], moment: NDArray[np.float32]) -> float:
    """Return tr(D H D^T) for D [N, C]: the squared error of the layer's output, summed over the tokens of H."""
    return float(np.einsum("nc,nc->n", difference @ moment, difference).sum(dtype=np.float64))


def nearest(bits: int, group: int, *, symmetric: bool) -> Round:
    """Return what rounds a weight [N, C] to the nearest numbers of its groups' grids, and gives those numbers."""

    def rounded(weight: NDArray[np.float32]) -> NDArray[np.float32]:
        low, high = group_range(weight, group)
        scales, zeros = symmetric_grid(low, high, bits) if symmetric else asymmetric_grid(low, high, bits)
        return _on_grid(weight, scales, zeros, bits, group)

    return rounded


def best_clip(
    weight: NDArray[np.float32],
    blocks: Sequence[NDArray[np.float32]],
    bits: int,
    group: int,
    *,
    symmetric: bool,
    steps: int = 10,
    smallest: float = 0.5,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the range (low, high), [N, g] each, within which each group of `weight` [N, C] is best rounded.

    A range that leaves out the outermost elements has finer steps for the others. Ranges from all of the group's down
    to `smallest` of it are tried, each judged by d H_g d^T for the group's rounding error d and the block H_g [G, G] of
    the second moment; where none is better the whole range stays.
    """
    assert len(blocks) == -(-weight.shape[1] // group)
    low, high = group_range(weight, group)
    best = np.full(low.shape, np.inf, np.float32)
    best_low, best_high = low.copy(), high.copy()
    for factor in np.linspace(1, smallest, steps, dtype=np.float32):
        tried_low, tried_high = low * factor, high * factor
        scales, zeros = (
            symmetric_grid(tried_low, tried_high, bits) if symmetric else asymmetric_grid(tried_low, tried_high, bits)
        )
        difference = _on_grid(weight, scales, zeros, bits, group)
        difference -= weight
        errors = np.stack(
            [
                np.einsum("ng,ng->n", part @ block, part)
                for part, block in zip(_groups(difference, group), blocks, strict=True)
            ],
            axis=1,
        )
        better = errors < best
        best = np.where(better, errors, best)
        best_low, best_high = np.where(better, tried_low, best_low), np.where(better, tried_high, best_high)
    return best_low, best_high


def group_blocks(moment: NDArray[np.float32], group: int) -> list[NDArray[np.float32]]:
    """Return the blocks [G, G] of a second moment [C, C] along its diagonal; the last one may be smaller."""
    return [moment[at : at + group, at : at + group] for at in range(0, len(moment), group)]


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


def _on_grid(
    weight: NDArray[np.float32], scales: NDArray[np.float32], zeros: NDArray[np.uint8] | None, bits: int, group: int
) -> NDArray[np.float32]:
    """Return the nearest number of its group's grid for each element."""
    rows, columns = weight.shape
    offsets = np.full_like(scales, 2 ** (bits - 1)) if zeros is None else zeros.astype(np.float32)
    if columns % group:
        groups = np.arange(columns) // group
        scales, offsets = scales[:, groups], offsets[:, groups]
        parts = weight
    else:
        # Views of the groups: nothing of the weight's size is made for scales and zero points.
        scales, offsets = scales[:, :, None], offsets[:, :, None]
        parts = weight.reshape(rows, columns // group, group)
    codes: NDArray[np.float32] = np.rint(parts / scales)
    codes += offsets
    np.clip(codes, 0, 2**bits - 1, out=codes)
    codes -= offsets
    codes *= scales
    return codes.reshape(rows, columns)


def _groups(array: NDArray[np.float32], group: int) -> list[NDArray[np.float32]]:
    return [array[:, at : at + group] for at in range(0, array.shape[1], group)]
