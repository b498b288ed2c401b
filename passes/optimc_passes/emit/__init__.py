"""Lowering: from a dialect graph to what one target runs."""

from optimc_passes.emit.lowered import Lowered, LoweringOptions
from optimc_passes.emit.targets import TARGETS, Target

__all__ = ["TARGETS", "Lowered", "LoweringOptions", "Target"]
