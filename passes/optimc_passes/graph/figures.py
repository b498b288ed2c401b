"""What a graph pass changed, in figures: operators, and bytes of activations moved for a token."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import onnx_ir as ir

from optimc.plan import FusionReport
from optimc_passes.graph.traffic import activation_bytes_per_token


@dataclass(frozen=True)
class GraphFigures:
    """A graph in figures."""

    ops: dict[str, int]
    """Operator to number of nodes, the most frequent first."""
    traffic_bytes: int

    @classmethod
    def of(cls, model: ir.Model) -> GraphFigures:
        """Count. Shapes must be known as far as they can be."""
        counts = Counter(node.op_type for node in model.graph)
        return cls(
            dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))), activation_bytes_per_token(model)
        )


def with_figures(
    report: FusionReport | None, before: GraphFigures, after: GraphFigures, error: float | None
) -> FusionReport:
    """Return what the pass says of itself, or an empty report, with the figures put in."""
    figures = {
        "ops_before": before.ops,
        "ops_after": after.ops,
        "traffic_before_bytes": before.traffic_bytes,
        "traffic_after_bytes": after.traffic_bytes,
        "relative_error": error,
    }
    return (report or FusionReport()).model_copy(update=figures)
