"""Leaves a graph in a folder after each phase, as text to read and as ONNX without weights to look at."""

from __future__ import annotations

import re
from pathlib import Path

import onnx_ir as ir

from optimc.storage import storing
from optimc_passes.graph.listing import list_graph
from optimc_passes.graph.serialize import to_bytes

_PHASE = re.compile(r"\d\d+-[a-z][a-z0-9_]*\Z")
_FROM_CACHE = "The export was taken from the cache; build with --fresh to see it."
_FIRST_LINE = re.compile(rf".*: \d+ nodes, |{re.escape(_FROM_CACHE)}$")


class GraphDump:
    """Numbers the phases: 00-exported.txt, 00-exported.onnx, 01-cleaned.txt, … Without a folder it does nothing.

    Phases that an earlier build left in the folder go, so that those of two builds never lie there side by side.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._num_phases = 0

    def add(self, phase: str, model: ir.Model) -> None:
        """Write the graph as it is after `phase`. Raises StorageError if the folder does not take it."""
        if self._folder is not None:
            self._write(phase, "\n".join([*list_graph(model), ""]), to_bytes(model))

    def skip_export(self, phase: str) -> None:
        """Write why there is no graph of the export."""
        if self._folder is not None:
            self._write(phase, f"{_FROM_CACHE}\n")

    def _write(self, phase: str, text: str, onnx_bytes: bytes | None = None) -> None:
        assert self._folder is not None
        number, self._num_phases = self._num_phases, self._num_phases + 1
        stem = f"{number:02d}-{phase}"
        with storing("the graph", self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            if number == 0:
                _remove_earlier(self._folder)
            (self._folder / f"{stem}.txt").write_text(text, "utf-8")
            if onnx_bytes is not None:
                (self._folder / f"{stem}.onnx").write_bytes(onnx_bytes)


def _remove_earlier(folder: Path) -> None:
    """Remove the phases of an earlier dump, known by name and first line, and the program that `optimc build` adds.

    Other files are somebody's.
    """
    for text in tuple(folder.glob("*.txt")):
        if _PHASE.match(text.stem) and text.is_file():
            with text.open(encoding="utf-8", errors="replace") as lines:
                is_ours = _FIRST_LINE.match(lines.readline())
            if is_ours:
                text.with_suffix(".onnx").unlink(missing_ok=True)
                text.unlink()
                (folder / "program.txt").unlink(missing_ok=True)
