"""The frontend: a transformers decoder becomes a graph of the optimc dialect, without loading its weights.

`check_supported` answers from the configuration alone and imports neither torch nor the model's code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optimc_passes.frontend.architectures import TESTED
from optimc_passes.frontend.support import check_supported

if TYPE_CHECKING:
    from optimc_passes.graph.exported import Exported

FRONTEND_VERSION = 2
"""Part of every cache key: raise it when the same config exports to another graph."""

__all__ = ["FRONTEND_VERSION", "TESTED", "check_supported", "export_graph"]


def export_graph(config: Any, *, max_seq_len: int, allow_untested: bool = False) -> Exported:
    """Export the causal language model of a transformers config to the optimc dialect.

    The graph maps input_ids [T], position_ids [T] and logits_rows [R] to logits [R, V]. Every parameter is a further
    graph input under its transformers name, [N, C] for linear layers; a tied parameter appears once, under the
    embedding's name. Weights are never allocated, whatever the checkpoint's size. Takes about a second per layer. What
    was rewritten on the way stands beside the graph.

    `max_seq_len` is the longest sequence the engine will serve: some RoPE variants depend on it. Raises
    UnsupportedModelError for what `check_supported` refuses and for what only shows while the model runs.
    """
    check_supported(config, max_seq_len=max_seq_len, allow_untested=allow_untested)
    from optimc_passes.frontend.export import export_checked  # torch and transformers: seconds to import

    return export_checked(config)
