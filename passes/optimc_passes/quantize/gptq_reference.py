"""Roughly what GPTQ will make of some weights, for measuring what their rounding costs; pure arithmetic.

Letters: N output features, C input features.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from optimc_passes.choices import Scheme
from optimc_passes.quantize.gptq_solver import decode, factorize, solve

_ROWS = 8192
"""Rows solved at a time: a head has as many as the vocabulary."""
_DAMPING = 0.01


def rounded_by_gptq(
    weights: Sequence[NDArray[np.float32]], moment: NDArray[np.float32], scheme: Scheme
) -> list[NDArray[np.float32]]:
    """Return weights [N, C] that read one value, of second moment [C, C], rounded column by column.

    Without sweeps and fitted scales: those take as much off every set of layers' error, and most of the time.
    """
    assert scheme.bits is not None
    known = torch.from_numpy(moment)
    factor = factorize(known, damping=_DAMPING, act_order=True)
    stacked = np.concatenate(weights)
    group = stacked.shape[1] if scheme.group == -1 else scheme.group
    rounded = np.empty_like(stacked)
    for begin in range(0, len(stacked), _ROWS):
        rows = slice(begin, begin + _ROWS)
        solved = solve(
            torch.tensor(stacked[rows]), known, factor, bits=scheme.bits, group=group, symmetric=scheme.symmetric
        )
        rounded[rows] = decode(solved.codes, solved.scales, solved.zeros, scheme.bits, group).numpy()
    return np.split(rounded, np.cumsum([len(values) for values in weights])[:-1])
