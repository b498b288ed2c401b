"""Leaves a graph in a folder after each phase, as text to read and as ONNX without weights to look at."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from optimc.storage import storing
from optimc_passes.graph.listing import list_graph
from optimc_passes.graph.serialize import to_bytes


class GraphDump:
    """Numbers the phases: 00-exported.txt, 00-exported.onnx, 01-cleaned.txt, … Without a folder it does nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._num_phases = 0

    def add(self, phase: str, model: ir.Model) -> None:
        """Write the graph as it is after `phase`. Raises StorageError if the folder does not take it."""
        if self._folder is not None:
            self._write(phase, "\n".join([*list_graph(model), ""]), to_bytes(model))

    def skip(self, phase: str, why: str) -> None:
        """Write why there is no graph of `phase`."""
        if self._folder is not None:
            self._write(phase, f"{why}\n")

    def _write(self, phase: str, text: str, onnx_bytes: bytes | None = None) -> None:
        assert self._folder is not None
        stem = f"{self._num_phases:02d}-{phase}"
        self._num_phases += 1
        with storing("the graph", self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"{stem}.txt").write_text(text, "utf-8")
            if onnx_bytes is not None:
                (self._folder / f"{stem}.onnx").write_bytes(onnx_bytes)
