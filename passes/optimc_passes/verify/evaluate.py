"""The logits a dialect graph computes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from optimc_passes.verify.probe import Probe
from optimc_passes.verify.session import WeightPool, run_probe


def evaluate(model: ir.Model, probe: Probe, pool: WeightPool | None = None) -> NDArray[np.float32]:
    """Return the logits of the probe's rows, [R, V].

    Weights are taken from `pool`; without one they are computed for this run and let go. Raises RuntimeError with
    onnxruntime's words if it cannot run the graph.
    """
    logits = run_probe(model, probe, ["logits"], pool or WeightPool())["logits"]
    return np.asarray(logits, np.float32)
