"""What graph rewrites did to a graph, as a plan keeps it for `optimc inspect --fusions`. Needs no ONNX package."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DeclinedSites(_Section):
    """Places where a rule's pattern matched and its check said no, for one reason."""

    reason: str
    sites: int = Field(gt=0)
    first: str
    """Name of the first such node."""


class NearestMiss(_Section):
    """The place that came closest to being rewritten and was not."""

    node: str
    op: str
    reason: str
    matched_nodes: int = Field(ge=0)
    """Nodes of the pattern that were found there."""
    surroundings: tuple[str, ...] = ()
    """The nodes around it, one line each."""


class FusionReport(_Section):
    """What one graph rewrite did."""

    matched: int = Field(default=0, ge=0)
    """Sites rewritten."""
    already: int = Field(default=0, ge=0)
    """Sites that had the wanted form before."""
    declined: tuple[DeclinedSites, ...] = ()
    nearest: NearestMiss | None = None
    ops_before: dict[str, int] = Field(default_factory=dict)
    """Operator to number of nodes."""
    ops_after: dict[str, int] = Field(default_factory=dict)
    traffic_before_bytes: int = Field(default=0, ge=0)
    """Activations read and written for one token."""
    traffic_after_bytes: int = Field(default=0, ge=0)
    relative_error: float | None = None
    """Largest difference of two logits on probe tokens over the largest logit of their row; None if it was not run."""


class GraphReport(_Section):
    """The graph's way from the exporter to the end of the graph passes: nodes and seconds."""

    exported_nodes: int = Field(ge=0)
    """As torch exported it, before any optimizer."""
    cleaned_nodes: int = Field(ge=0)
    """After the frontend's own rewrites."""
    attached_nodes: int = Field(ge=0)
    """With the weights bound: what the first graph pass is given."""
    fused_nodes: int = Field(ge=0)
    """After the last graph pass."""
    export_seconds: float = Field(ge=0)
    """What the export cost when it was made; later builds take it from the cache."""
    graph_seconds: float = Field(ge=0)
    """Attaching weights, graph passes and their verification, without the export."""
    frontend: dict[str, FusionReport] = Field(default_factory=dict)
    """The frontend's rewrites, by rule."""
