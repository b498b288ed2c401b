"""A graph as it comes from an exporter, with what was done to it on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from optimc.plan import FusionReport


@dataclass(frozen=True)
class Exported:
    """A graph without weights and its history."""

    model: ir.Model
    raw_nodes: int
    """Nodes as exported, before any optimizer."""
    rewrites: Mapping[str, FusionReport] = field(default_factory=dict)
    """The frontend's own rewrites by name, in order."""
    raw: ir.Model | None = None
    """The graph as exported; None where it comes from the cache."""

    @classmethod
    def of(cls, model: ir.Model) -> Exported:
        """Wrap a graph that nobody has rewritten."""
        return cls(model, model.graph.num_nodes())
