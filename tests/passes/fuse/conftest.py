from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from optimc_passes.artifact import Artifact
from optimc_passes.base import Pass, PassOutcome
from optimc_passes.graph.attach import attach_weights
from optimc_passes.verify.evaluate import evaluate
from optimc_passes.verify.probe import Probe

PROBE = Probe.of_vocabulary(48, 13)


class Fused:
    """A pass applied to a decoder: the outcome, and how far the logits moved."""

    def __init__(self, pass_: Pass[Any], decoder: Any, changed: dict[str, Any]) -> None:
        checkpoint = decoder.checkpoint()
        store = decoder.store.replace(changed)
        self.before = before = attach_weights(decoder.model, store)
        artifact = Artifact.start(checkpoint).evolve(weights=store, graph=before)
        self.outcome: PassOutcome = pass_(artifact)
        self.graph = self.outcome.artifact.graph.graph
        self.metrics = self.outcome.report.metrics
        self.decisions = self.outcome.report.decisions
        expected = evaluate(before, PROBE)
        self.error = float(
            np.abs(evaluate(self.outcome.artifact.graph, PROBE) - expected).max() / np.abs(expected).max()
        )

    def count(self, op_type: str) -> int:
        return sum(node.op_type == op_type for node in self.graph)


@pytest.fixture(scope="session")
def fused() -> Callable[..., Fused]:
    """Apply a pass to a decoder whose weights named in `changed` are replaced."""

    def apply(pass_: Pass[Any], decoder: Any, changed: dict[str, Any] | None = None) -> Fused:
        return Fused(pass_, decoder, changed or {})

    return apply
