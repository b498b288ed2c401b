"""Rows of tokens out of padded batches, as other tools hand them over."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from optimc.errors import CalibrationError


def rows_of_padded(ids: NDArray[np.integer], mask: NDArray[np.integer] | NDArray[np.bool_]) -> list[NDArray[np.int32]]:
    """Return the tokens of each row of `ids` [B, T] that `mask` [B, T] marks, int32; rows without any are left out.

    The mask alone decides: the id that fills up may be a token of the text as well, the end of a sequence for one.
    Padding may stand on either side. Raises CalibrationError if the shapes differ, or if a row is interrupted by
    padding, since tokens on both sides of a gap did not follow each other.
    """
    ids, marked = np.asarray(ids), np.asarray(mask) != 0
    if ids.ndim != 2 or ids.shape != marked.shape:
        raise CalibrationError(f"ids {list(ids.shape)} and mask {list(marked.shape)} must be the same two dimensions")
    rows = []
    for index, (row, present) in enumerate(zip(ids, marked, strict=True)):
        places = np.flatnonzero(present)
        if len(places) == 0:
            continue
        if places[-1] - places[0] + 1 != len(places):
            raise CalibrationError(
                f"row {index} is interrupted by padding at {int(places[0] + np.argmin(present[places[0] :]))}"
            )
        rows.append(row[present].astype(np.int32))
    return rows
