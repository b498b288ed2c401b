"""Rewrite rules that tidy what the exporter left: moved axes and reshapes. Fusions have their home in `fuse`."""

from optimc_passes.frontend.rules.merge_reshapes import MergeReshapes
from optimc_passes.frontend.rules.normalize_before_transpose import NormalizeBeforeTranspose

__all__ = ["MergeReshapes", "NormalizeBeforeTranspose"]
