"""Rewrite rules that turn the exporter's output into the dialect's operators; one concept per file."""

from optimc_passes.frontend.rules.gather_rows import GatherRows
from optimc_passes.frontend.rules.merge_reshapes import MergeReshapes
from optimc_passes.frontend.rules.normalize_before_transpose import NormalizeBeforeTranspose
from optimc_passes.frontend.rules.rms_normalization import RmsNormalization
from optimc_passes.frontend.rules.rotary_embedding import PackedRotary, PartialRotary, Rotary

__all__ = [
    "GatherRows",
    "MergeReshapes",
    "NormalizeBeforeTranspose",
    "PackedRotary",
    "PartialRotary",
    "RmsNormalization",
    "Rotary",
]
