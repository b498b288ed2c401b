"""The judge of graph passes: each graph must be sound, and compute what the graph before it computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from optimc.errors import VerifyError
from optimc_passes.dialect.rules import verify_and_infer
from optimc_passes.graph.same_graph import same_graph
from optimc_passes.graph.shapes import annotate
from optimc_passes.verify.bisect import Divergence, first_divergence
from optimc_passes.verify.evaluate import evaluate
from optimc_passes.verify.numeric import TOLERANCE, relative_error
from optimc_passes.verify.probe import Probe
from optimc_passes.verify.session import WeightPool, run_probe
from optimc_passes.verify.shape_faults import shape_faults

VerifyLevel = Literal["off", "shapes", "numeric"]
"""`shapes` checks rules and shapes; `numeric` also compares logits on probe tokens."""

_NOT_FINITE = "logits on probe tokens are not finite"


class GraphVerifier:
    """Remembers the logits of the last accepted graph, so that each graph is run once, and the weights it was run with.

    A pass that changed nothing is accepted without a look.
    """

    def __init__(self, level: VerifyLevel, probe: Probe) -> None:
        self.level = level
        self._probe = probe
        self._pool = WeightPool()
        self._accepted: tuple[ir.Model, NDArray[np.float32]] | None = None

    def check_rules(self, name: str, done: Sequence[str], model: ir.Model) -> None:
        """Raise VerifyError if the graph that `name` returned breaks a rule or declares a shape it has not.

        Shapes that nodes leave open are filled in, in place.
        """
        if self.level == "off":
            return
        problems, shapes = verify_and_infer(model)
        if problems:
            raise VerifyError(name, done, "the graph breaks rules: " + "; ".join(problems))
        faults = list(shape_faults(model, shapes))
        if faults:
            sentences = "; ".join(fault.sentence for fault in faults)
            raise VerifyError(name, done, f"shapes that are not so: {sentences}", node=faults[0].node)
        annotate(model, shapes)

    def check_finite(self, name: str, done: Sequence[str], model: ir.Model) -> None:
        """Raise VerifyError if the graph that `name` returned computes something else than numbers, or nothing."""
        if self.level == "numeric":
            self._accepted = model, self._evaluate(name, done, model)

    def check(self, name: str, done: Sequence[str], before: ir.Model, after: ir.Model) -> float | None:
        """Accept what `name` made of `before`, or raise VerifyError naming it and, where it is known, the node.

        Returns the largest relative error of the logits; None where the level does not ask for it.
        """
        unchanged = self.level != "off" and same_graph(before, after)
        if not unchanged:
            self.check_rules(name, done, after)
        if self.level != "numeric":
            return None
        if self._accepted is not None and self._accepted[0] is before:
            expected = self._accepted[1]
        else:
            expected = self._evaluate(done[-1] if done else "attach", done[:-1], before)
        actual = expected if unchanged else self._run(name, done, after)
        error = relative_error(expected, actual)
        if not error <= TOLERANCE:
            divergence = self._first_divergence(name, done, before, after)
            what = f"logits changed by {error:.3g} relative, over the tolerance of {TOLERANCE:g}"
            if not np.isfinite(actual).all():
                what = _NOT_FINITE
            raise VerifyError(name, done, f"{what}; {divergence}", node=divergence.node)
        self._accepted = after, actual
        return error

    def _first_divergence(self, name: str, done: Sequence[str], before: ir.Model, after: ir.Model) -> Divergence:
        def run(model: ir.Model, names: Sequence[str]) -> dict[str, NDArray[Any]]:
            return run_probe(model, self._probe, names, self._pool)

        try:
            return first_divergence(before, after, run, TOLERANCE)
        except RuntimeError as error:
            raise VerifyError(name, done, f"onnxruntime cannot run the graph up to a value: {error}") from error

    def _evaluate(self, name: str, done: Sequence[str], model: ir.Model) -> NDArray[np.float32]:
        """Return the logits of a graph that others are compared with."""
        logits = self._run(name, done, model)
        if not np.isfinite(logits).all():
            raise VerifyError(name, done, _NOT_FINITE)
        return logits

    def _run(self, name: str, done: Sequence[str], model: ir.Model) -> NDArray[np.float32]:
        try:
            return evaluate(model, self._probe, self._pool)
        except RuntimeError as error:
            raise VerifyError(name, done, f"onnxruntime cannot run the graph: {error}") from error
