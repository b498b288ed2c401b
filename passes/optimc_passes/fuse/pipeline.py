"""The graph passes in their order; `- fuse` in a recipe stands for all of them.

Factors fold while each layer is its own. Rows are gathered before sums and norms are joined, or the Gather between the
last sum and the final norm would keep them apart. The batch axis goes before RotaryQkv, which then takes in no Reshape
of three axes.
"""

from __future__ import annotations

from optimc_passes.base import Pass
from optimc_passes.fuse.add_rms_norm import AddRmsNorm
from optimc_passes.fuse.clean_casts import CleanCasts
from optimc_passes.fuse.drop_batch_axis import DropBatchAxis
from optimc_passes.fuse.fold_constants import FoldConstants
from optimc_passes.fuse.fold_scale_into_weights import FoldScaleIntoWeights
from optimc_passes.fuse.gather_rows_early import GatherRowsEarly
from optimc_passes.fuse.geglu import Geglu
from optimc_passes.fuse.merge_gate_up import MergeGateUp
from optimc_passes.fuse.merge_qkv import MergeQkv
from optimc_passes.fuse.qk_norm import QkNorm
from optimc_passes.fuse.remove_dead_nodes import RemoveDeadNodes
from optimc_passes.fuse.rms_norm import RmsNorm
from optimc_passes.fuse.rope import Rope
from optimc_passes.fuse.rotary_qkv import RotaryQkv
from optimc_passes.fuse.rule import NoOptions
from optimc_passes.fuse.share_rotary_tables import ShareRotaryTables
from optimc_passes.fuse.swiglu import Swiglu

GRAPH_PASSES: tuple[type[Pass[NoOptions]], ...] = (
    FoldConstants,
    CleanCasts,
    RmsNorm,
    Rope,
    ShareRotaryTables,
    FoldScaleIntoWeights,
    MergeQkv,
    MergeGateUp,
    Swiglu,
    Geglu,
    GatherRowsEarly,
    DropBatchAxis,
    QkNorm,
    RotaryQkv,
    AddRmsNorm,
    RemoveDeadNodes,
)
