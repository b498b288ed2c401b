"""Results of passes, kept under the hash of everything they were computed from.

A weight pass is stored as the weights it changed (one safetensors file each, read lazily from the mapped file) and its
report; a graph as ONNX without weights and its report. Recipes that share a prefix therefore share its work, and a
result that is found is the very bytes that were stored. Entries are verified when looked up; damaged ones count as
absent.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.numpy import save_file

from optimc.errors import CheckpointError
from optimc.plan import FusionReport, HeadsInfo, PassReport
from optimc.storage import storing
from optimc_passes.cache_entry import PARTIAL, EntryWriter, read_entry, remove_abandoned
from optimc_passes.choices import Choices
from optimc_passes.graph.exported import Exported
from optimc_passes.graph.serialize import from_bytes, to_bytes
from optimc_passes.graph.weight_expression import Store
from optimc_passes.load.safetensors_file import read_header
from optimc_passes.weights import Dense, Quantized, Weight

_GRAPH_FILE = "graph.onnx"
_WEIGHTS, _GRAPHS = "weights", "graphs"


class StoredWeights(NamedTuple):
    """What the cache has of a weight pass."""

    weights: dict[str, Weight]
    """Those it changed."""
    report: PassReport
    """Marked as cached."""
    choices: Choices | None
    """None: as before the pass."""
    heads: HeadsInfo | None = None
    """What the weights are, if they are those of Medusa heads."""


class WeightWriter:
    """Takes the weights of one pass as they are finished, so that memory need not hold them all."""

    def __init__(self, entry: EntryWriter) -> None:
        self._entry = entry
        self._kept: dict[str, tuple[Weight, dict[str, Any]]] = {}
        self._numbers = itertools.count()

    def keep(self, name: str, weight: Weight) -> Weight:
        """Write a weight and return it as it reads from the file."""
        file = f"{next(self._numbers):05d}.safetensors"
        with storing("the cache", self._entry.folder, SafetensorError):
            facts = write_weight(self._entry.folder / file, weight)
        stored = read_weight(self._entry.folder, facts)
        self._kept[name] = (stored, facts)
        return stored

    def commit(
        self,
        changed: Mapping[str, Weight],
        report: PassReport,
        choices: Choices | None = None,
        heads: HeadsInfo | None = None,
    ) -> None:
        """Complete the entry: `changed` is what the pass put into the store, kept already or not.

        `choices` are the artifact's after the pass, None if they are those before it. With `heads`, the weights are
        theirs and not the store's.
        """
        described = {}
        for name, weight in changed.items():
            if name not in self._kept or self._kept[name][0] is not weight:
                self.keep(name, weight)
            described[name] = self._kept[name][1]
        payload: dict[str, Any] = {"weights": described, "report": report.model_dump(mode="json")}
        if choices is not None:
            payload["choices"] = choices.to_json()
        if heads is not None:
            payload["heads"] = heads.model_dump(mode="json")
        self._entry.commit(payload)


class ArtifactCache:
    """The cache below one folder. Several builds may use it at once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        remove_abandoned(root)

    def load_weights(self, key: str) -> StoredWeights | None:
        """Return what a pass changed, and its report marked as cached; None if the entry is absent or harmed."""
        folder = self.root / _WEIGHTS / key
        payload = read_entry(folder)
        if payload is None:
            return None
        try:
            weights = {name: read_weight(folder, facts) for name, facts in payload["weights"].items()}
            choices = Choices.from_json(payload["choices"]) if "choices" in payload else None
            heads = HeadsInfo.model_validate(payload["heads"]) if "heads" in payload else None
            return StoredWeights(weights, _cached(payload["report"]), choices, heads)
        except (KeyError, TypeError, AttributeError, ValidationError, CheckpointError):
            return None  # written by another version of this code

    @contextmanager
    def write_weights(self, key: str) -> Iterator[WeightWriter]:
        """Open an entry for a weight pass; it comes to be with `WeightWriter.commit`."""
        with EntryWriter(self.root, _WEIGHTS, key) as entry:
            yield WeightWriter(entry)

    def partial(self, key: str) -> Path:
        """Return the folder for unfinished work on a weight pass's result; it need not exist."""
        return self.root / PARTIAL / key

    def load_graph(self, key: str, store: Store) -> tuple[ir.Model, PassReport] | None:
        """Return a graph bound to `store`, and the report of the pass that made it; None if absent or harmed."""
        found = self._load_model(key, store)
        try:
            return None if found is None else (found[0], _cached(found[1]["report"]))
        except (KeyError, TypeError, ValidationError):
            return None

    def save_graph(self, key: str, model: ir.Model, report: PassReport) -> None:
        """Store a graph without its weights, with what the pass that made it says."""
        self._save_model(key, model, {"report": report.model_dump(mode="json")})

    def load_export(self, key: str) -> tuple[Exported, float] | None:
        """Return a graph as it was exported, and the seconds that took; None if absent or harmed."""
        found = self._load_model(key, {})
        try:
            if found is None:
                return None
            model, facts = found
            rewrites = {name: FusionReport.model_validate(report) for name, report in facts["rewrites"].items()}
            return Exported(model, int(facts["raw_nodes"]), rewrites), float(facts["seconds"])
        except (KeyError, TypeError, ValueError, AttributeError):
            return None

    def save_export(self, key: str, exported: Exported, seconds: float) -> None:
        """Store an exported graph; its raw form is not kept."""
        rewrites = {name: report.model_dump(mode="json") for name, report in exported.rewrites.items()}
        facts = {"raw_nodes": exported.raw_nodes, "seconds": seconds, "rewrites": rewrites}
        self._save_model(key, exported.model, facts)

    def _load_model(self, key: str, store: Store) -> tuple[ir.Model, Any] | None:
        folder = self.root / _GRAPHS / key
        payload = read_entry(folder)
        if payload is None:
            return None
        try:
            return from_bytes((folder / _GRAPH_FILE).read_bytes(), store), payload
        except (KeyError, TypeError, ValueError, OSError):
            return None

    def _save_model(self, key: str, model: ir.Model, payload: dict[str, Any]) -> None:
        with EntryWriter(self.root, _GRAPHS, key) as entry:
            with storing("the cache", entry.folder):
                (entry.folder / _GRAPH_FILE).write_bytes(to_bytes(model))
            entry.commit(payload)

    def clear(self) -> None:
        """Remove every finished entry; builds under way are let alone."""
        for kind in (_WEIGHTS, _GRAPHS):
            shutil.rmtree(self.root / kind, ignore_errors=True)


def _cached(report: Any) -> PassReport:
    return PassReport.model_validate(report).model_copy(update={"cached": True})


def write_weight(path: Path, weight: Weight) -> dict[str, Any]:
    """Write a weight to a safetensors file; return what `read_weight` needs beside it, as JSON values."""
    # safetensors writes an array's buffer as it lies in memory, whatever its order.
    save_file({part: np.ascontiguousarray(dense.read()) for part, dense in _parts(weight).items()}, path)
    return {"file": path.name, **_describe(weight)}


def _parts(weight: Weight) -> dict[str, Dense]:
    if isinstance(weight, Dense):
        return {"dense": weight}
    parts = {"codes": weight.codes, "scales": weight.scales, "zeros": weight.zeros, "permutation": weight.permutation}
    return {name: part for name, part in parts.items() if part is not None}


def _describe(weight: Weight) -> dict[str, Any]:
    if isinstance(weight, Dense):
        return {}
    facts = {"bits": weight.bits, "group": weight.group, "method": weight.method}
    if weight.activation_scale is not None:
        facts["activation_scale"] = weight.activation_scale
    return facts


def read_weight(folder: Path, facts: Mapping[str, Any]) -> Weight:
    """Return a weight as `write_weight` put it into a file of `folder`; its arrays are mapped, not read.

    Raises KeyError if `facts` are not its own, CheckpointError if the file is no safetensors file.
    """
    parts = {name: entry.as_weight() for name, entry in read_header(folder / facts["file"]).items()}
    if "dense" in parts:
        return parts["dense"]
    return Quantized(
        codes=parts["codes"],
        scales=parts["scales"],
        zeros=parts.get("zeros"),
        permutation=parts.get("permutation"),
        bits=facts["bits"],
        group=facts["group"],
        method=facts["method"],
        activation_scale=facts.get("activation_scale"),
    )
