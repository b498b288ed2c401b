"""Calibration text of a build, read only if a pass will look at it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optimc.build.inputs import BuildInputs

if TYPE_CHECKING:
    from optimc_passes.calibrate import Calibration
    from optimc_passes.checkpoint import Checkpoint


def load_calibration(inputs: BuildInputs, checkpoint: Checkpoint) -> Calibration | None:
    """Return the recipe's calibration rows; None if it names none or no pass uses them.

    Raises CalibrationError if there is too little text, or none can be read.
    """
    from optimc_passes.calibrate import load_tokens

    spec = inputs.recipe.calibration
    if spec is None or not any(pass_.uses_calibration for pass_ in inputs.passes):
        return None
    return load_tokens(spec, checkpoint.tokenizer.tokenizer_json, base_dir=inputs.recipe_path.parent)
