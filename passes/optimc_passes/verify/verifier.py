"""The judge of graph passes: each graph must be sound, and compute what the graph before it computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from optimc.errors import VerifyError
from optimc_passes.dialect.rules import verify_graph
from optimc_passes.verify.evaluate import Probe, evaluate

VerifyLevel = Literal["off", "shapes", "numeric"]
"""`shapes` checks rules and shapes; `numeric` also compares logits on probe tokens."""

TOLERANCE = 1e-4
"""Largest difference of two logits over the largest logit of their row. Fusions reorder float32 sums: each of some
hundred products in sequence may be off by a few units of 6e-8, and 1e-4 is what we promise against the source model.
A wrong weight, bias or permutation shows at 1e-2 and above."""


class GraphVerifier:
    """Remembers the logits of the last accepted graph, so that each graph is run once."""

    def __init__(self, level: VerifyLevel, probe: Probe) -> None:
        self.level = level
        self._probe = probe
        self._accepted: tuple[ir.Model, NDArray[np.float32]] | None = None

    def check_rules(self, name: str, done: Sequence[str], model: ir.Model) -> None:
        """Raise VerifyError if the graph that `name` returned breaks a rule."""
        if self.level == "off":
            return
        problems = verify_graph(model)
        if problems:
            raise VerifyError(name, done, "the graph breaks rules: " + "; ".join(problems))

    def check_finite(self, name: str, done: Sequence[str], model: ir.Model) -> None:
        """Raise VerifyError if the graph that `name` returned computes something else than numbers, or nothing."""
        if self.level == "numeric":
            self._accepted = model, self._evaluate(name, done, model)

    def check(self, name: str, done: Sequence[str], before: ir.Model, after: ir.Model) -> float | None:
        """Accept what `name` made of `before`, or raise VerifyError naming it.

        Returns the largest relative error of the logits; None where the level does not ask for it.
        """
        self.check_rules(name, done, after)
        if self.level != "numeric":
            return None
        if self._accepted is not None and self._accepted[0] is before:
            expected = self._accepted[1]
        else:
            expected = self._evaluate(done[-1] if done else "attach", done[:-1], before)
        actual = self._evaluate(name, done, after)
        error = relative_error(expected, actual)
        if not error <= TOLERANCE:
            raise VerifyError(
                name, done, f"logits changed by {error:.3g} relative, over the tolerance of {TOLERANCE:g}"
            )
        self._accepted = after, actual
        return error

    def _evaluate(self, name: str, done: Sequence[str], model: ir.Model) -> NDArray[np.float32]:
        try:
            logits = evaluate(model, self._probe)
        except RuntimeError as error:  # onnxruntime's errors derive from it
            raise VerifyError(name, done, f"onnxruntime cannot run the graph: {error}") from error
        if not np.isfinite(logits).all():
            raise VerifyError(name, done, "logits on probe tokens are not finite")
        return logits


def relative_error(before: NDArray[np.float32], after: NDArray[np.float32]) -> float:
    """Return the largest difference over the largest magnitude in its row of `before`; both [T, V]."""
    assert before.shape == after.shape, (before.shape, after.shape)
    scale = np.maximum(np.abs(before).max(axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return float((np.abs(after - before) / scale).max())
