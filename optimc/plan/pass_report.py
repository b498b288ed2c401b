"""What a pass says about its work: figures for `optimc inspect`, kept in the plan and beside cached results."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from optimc.plan.fusion_report import FusionReport
from optimc.plan.heads import HeadsReport


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LayerReport(_Section):
    """One linear layer of a weight pass, or the cache of one attention layer ("layers.3.kv")."""

    layer: str
    bits: int | None = None
    """Bits per code; None: left dense."""
    group: int | None = None
    """Columns that share a scale."""
    error: float | None = None
    """Relative error of the layer's output over the calibration tokens, sqrt(tr(dW H dW^T) / tr(W H W^T)); for passes
    without calibration the weight's own, the Frobenius norm of the difference over that of the weight."""
    damping: float | None = None
    """What was added to the second moment's diagonal, as a fraction of its mean: the first that worked."""
    fallback: str | None = None
    """Why the layer was rounded to nearest instead."""
    seconds: float = Field(default=0.0, ge=0)
    bytes_before: int = Field(default=0, ge=0)
    bytes_after: int = Field(default=0, ge=0)
    """As packed at the nominal number of bits."""
    note: str | None = None


class PassQuality(_Section):
    """What a weight pass did to the model's predictions, against the checkpoint, in nats per token."""

    perplexity_before: float
    perplexity_after: float
    kl_before: float
    kl_after: float
    tokens: int
    """Predictions the figures are means over."""


class FrontierPoint(_Section):
    """One choice of widths that no other beats."""

    bits: float
    """Payload bits per weight: codes alone, without scales and zero points."""
    nbytes: int
    """As stored, scales and zero points included."""
    kl: float
    """Predicted KL divergence in nats per token: a sum over layers measured one at a time."""
    chosen: bool = False


class PassReport(_Section):
    """What one pass did, for `optimc inspect`."""

    name: str
    version: int
    config: dict[str, Any]
    seconds: float = Field(ge=0)
    peak_bytes: int = Field(ge=0)
    cached: bool = False
    metrics: dict[str, float | int | str] = Field(default_factory=dict)
    decisions: tuple[str, ...] = ()
    """Choices with their reasons, one sentence each."""
    fusion: FusionReport | None = None
    """What a graph pass did to the graph; None for a weight pass, and in plans built before it was recorded."""
    layers: tuple[LayerReport, ...] = ()
    quality: PassQuality | None = None
    """None for graph passes, and where it was not measured."""
    frontier: tuple[FrontierPoint, ...] = ()
    calibration_tokens: int | None = None
    """Tokens the pass looked at; None if it needs none."""
    resumed_at: int | None = None
    """Decoder layers an earlier build that was cut short had finished; None if this one started at the first."""
    heads: HeadsReport | None = None
    """How heads were trained or imported; None for every other pass."""
