"""Text on which a build measures what its weight passes did to the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimc.build.inputs import BuildInputs
from optimc.errors import CalibrationError

if TYPE_CHECKING:
    from optimc_passes.checkpoint import Checkpoint


class QualityWindows(NamedTuple):
    """Windows of text, or why there are none though the recipe asks for them."""

    windows: NDArray[np.int32] | None
    """int32 [W, T]."""
    unmeasured: str | None = None


def quality_windows(inputs: BuildInputs, checkpoint: Checkpoint, max_seq_len: int) -> QualityWindows:
    """Return the recipe's windows of evaluation text; neither windows nor a reason where nothing changes weights.

    A checkpoint without a tokenizer is built all the same.
    """
    from optimc_passes.calibrate import evaluation_windows

    spec = inputs.recipe.report
    if spec.windows == 0 or not any(pass_.stage == "weights" for pass_ in inputs.passes):
        return QualityWindows(None)
    tokenizer = checkpoint.tokenizer.tokenizer_json
    try:
        windows = evaluation_windows(tokenizer, windows=spec.windows, length=min(spec.length, max_seq_len))
    except CalibrationError as error:
        return QualityWindows(None, str(error))
    return QualityWindows(windows)
