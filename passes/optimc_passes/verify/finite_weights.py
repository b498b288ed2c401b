"""Are all weights numbers? One that is not makes every logit something else, and no later message would name it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from optimc.errors import CheckpointError
from optimc_passes.weights import Dense, Weight

_PIECE_ELEMENTS = 1 << 22
"""Elements looked at together, so that memory holds a piece of a weight and not all of it."""


def check_finite_weights(weights: Mapping[str, Weight]) -> None:
    """Raise CheckpointError naming every dense weight with an element that is not finite once it is float32."""
    faults = [f"  {name}: {fault}" for name, weight in weights.items() if (fault := _fault(weight)) is not None]
    if faults:
        raise CheckpointError("\n".join(["weights that are not finite; the checkpoint is damaged:", *faults]))


def _fault(weight: Weight) -> str | None:
    if not isinstance(weight, Dense):
        return None
    array = weight.read()
    flat = array.reshape(-1)
    first, count = None, 0
    with np.errstate(over="ignore"):
        for start in range(0, flat.size, _PIECE_ELEMENTS):
            bad = np.flatnonzero(~np.isfinite(flat[start : start + _PIECE_ELEMENTS].astype(np.float32, copy=False)))
            count += bad.size
            if first is None and bad.size:
                first = start + int(bad[0])
    if first is None:
        return None
    where = [int(index) for index in np.unravel_index(first, array.shape)]
    return f"{count} of {flat.size} elements, the first is {flat[first]} at {where}"
