"""The walk itself: what a pass does at each layer, and the loop that takes it there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from optimc.plan import LayerReport
from optimc_passes.artifact import Artifact
from optimc_passes.base import PassContext
from optimc_passes.quantize.linears import LinearWeight
from optimc_passes.walk.activations import Activations
from optimc_passes.walk.layered_model import LoadedLayer, Stage
from optimc_passes.weights import Weight


@dataclass(frozen=True)
class Finished:
    """What a pass made of one decoder layer, or of the head."""

    weights: dict[str, Weight] = field(default_factory=dict)
    rows: tuple[LayerReport, ...] = ()


@dataclass(frozen=True)
class Walked:
    """What a walk made of the model."""

    weights: dict[str, Weight]
    rows: tuple[LayerReport, ...]
    resumed_at: int | None


class LayerWork(ABC):
    """What a pass does at each layer: `begin`, `stage` four times in order, `end`."""

    stream: ClassVar[Literal["quantized", "original", "both"]]
    """What a stage sees: outputs of the layers as `set_weight` left them, of the layers as they were, or both."""

    def begin(self, layer: LoadedLayer) -> None:
        """Called before the layer runs."""

    @abstractmethod
    def stage(self, layer: LoadedLayer, stage: Stage, inputs: Activations, original: Activations | None) -> None:
        """Look at what the stage's linears read; `original` is there in stream "both" alone."""

    @abstractmethod
    def end(self, layer: LoadedLayer) -> Finished:
        """Return what became of the layer."""

    def head(self, linear: LinearWeight, weight: NDArray[np.float32], inputs: Activations) -> Finished | None:
        """Return what became of the head [V, hidden]; called only if the walk was asked for it."""
        return None


def walk_layers(artifact: Artifact, work: LayerWork, context: PassContext, *, wants_head: bool = False) -> Walked:
    """Take `work` through all layers on the artifact's calibration tokens."""
    raise NotImplementedError
