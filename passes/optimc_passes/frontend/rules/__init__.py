"""Rewrite rules that tidy what our exporter leaves: axes moved about, reshapes. Fusions have their home in `fuse`."""

from optimc_passes.frontend.rules.gather_rows import GatherRows
from optimc_passes.frontend.rules.merge_reshapes import MergeReshapes
from optimc_passes.frontend.rules.normalize_before_transpose import NormalizeBeforeTranspose

__all__ = ["GatherRows", "MergeReshapes", "NormalizeBeforeTranspose"]
