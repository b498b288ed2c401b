"""Calibration and evaluation text as tokens."""

from optimc.recipe import CalibrationSpec
from optimc_passes.calibrate.evaluation_windows import evaluation_windows
from optimc_passes.calibrate.load_tokens import Calibration, load_tokens

__all__ = ["Calibration", "CalibrationSpec", "evaluation_windows", "load_tokens"]
