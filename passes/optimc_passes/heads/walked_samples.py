"""Samples where the target cannot run here: calibration text, and what transformers' model makes of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from optimc.progress import Progress
from optimc_passes.artifact import Artifact
from optimc_passes.heads.sample_text import PROSE
from optimc_passes.heads.samples import Sample, SampleStore
from optimc_passes.walk.activations import Activations
from optimc_passes.walk.budget import Budget
from optimc_passes.walk.layered_model import LayeredModel


def walk_samples(
    artifact: Artifact, store: SampleStore, *, max_host_bytes: int | None, scratch: Path | None, progress: Progress
) -> None:
    """Fill the store with the calibration text; a token counts as sampled from the state before it.

    Weights are those of the artifact, activations float32: a target that rounds activations or keys and values computes
    other states.
    """
    assert artifact.calibration is not None
    if store.pieces:
        return
    rows = artifact.calibration.tokens
    model, weights = LayeredModel(artifact.checkpoint.config), artifact.weights
    budget = Budget.of_process(max_host_bytes)
    lengths = [len(row) for row in rows]
    stream = Activations(lengths, model.hidden_size, budget=budget, folder=scratch)
    model.embed(weights, rows, stream)
    for layer in range(model.num_layers):
        progress(layer, model.num_layers + 1, "sample")
        with model.loaded(layer, weights) as loaded:
            for index in range(len(rows)):
                stream.put(index, loaded.run(stream.window(index)))
    hidden = Activations(lengths, model.hidden_size, budget=budget, folder=scratch)
    model.normed(weights, stream, hidden)
    samples = [Sample(row[1:].astype(np.int64), hidden.window(index)[:-1]) for index, row in enumerate(rows)]
    store.append(PROSE, samples)
    progress(model.num_layers + 1, model.num_layers + 1, "sample")
