"""Work on a model's layers that survives the process: a build that was killed goes on at the layer it was in.

progress.json                what is finished, with size and SHA-256 of every file; replaced as a whole
                             and what was measured on the way
<number>.safetensors         finished weights
stream-<done>-<name>.f32     activations that enter the next layer
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from safetensors import SafetensorError

from optimc.errors import CheckpointError
from optimc.plan import LayerReport
from optimc.storage import storing, write_whole
from optimc_passes.artifact import derive_key
from optimc_passes.cache import read_weight, write_weight
from optimc_passes.cache_entry import PARTIAL_LOCK
from optimc_passes.load.digest import file_sha256
from optimc_passes.walk.activations import Activations
from optimc_passes.weights import Weight

_PROGRESS = "progress.json"


@dataclass(frozen=True)
class Finished:
    """What a pass made of one decoder layer, or of the head."""

    weights: dict[str, Weight] = field(default_factory=dict)
    rows: tuple[LayerReport, ...] = ()
    measured: dict[str, float] = field(default_factory=dict)
    """Finite numbers by names of the pass's own."""


@dataclass(frozen=True)
class Resumed:
    """What an earlier build had finished."""

    done: int
    """Decoder layers."""
    weights: dict[str, Weight]
    rows: tuple[LayerReport, ...]
    measured: dict[str, float]
    streams: dict[str, Path]
    """Files that `Activations.load` reads."""


class PartialWork:
    """Context manager over the folder of one pass's unfinished work.

    While one process works in it, another that wants the same result works without.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: BinaryIO | None = None
        self._files: dict[str, dict[str, Any]] = {}
        self._weights: dict[str, dict[str, Any]] = {}
        self._rows: list[LayerReport] = []
        self._measured: dict[str, float] = {}
        self._streams: dict[str, str] = {}

    def __enter__(self) -> PartialWork:
        with storing("unfinished work", self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = (self._folder / PARTIAL_LOCK).open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()  # somebody else is at it
        else:
            self._lock = lock
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def load(self) -> Resumed | None:
        """Return what is finished, after checking size and SHA-256 of every file; None if nothing is, or one is harmed.

        What is of no use is removed.
        """
        if self._lock is None:
            return None
        try:
            resumed = self._read()
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError, CheckpointError):
            # ValueError covers damaged JSON and, as pydantic's errors are, reports of another version of this code.
            resumed = None
        self._remove_all_but(self._files if resumed is not None else {})
        if resumed is None:
            self._files, self._weights, self._rows, self._measured, self._streams = {}, {}, [], {}, {}
        return resumed

    def save(self, done: int, finished: Finished, streams: Mapping[str, Activations]) -> None:
        """Add a finished layer, the `done`th. A process killed at any moment leaves this state or the one before."""
        if self._lock is None:
            return
        with storing("unfinished work", self._folder, SafetensorError):
            for name, weight in finished.weights.items():
                path = self._folder / f"{len(self._weights):05d}.safetensors"
                self._weights[name] = write_weight(path, weight)
                self._note(path)
            self._rows.extend(finished.rows)
            self._measured.update(finished.measured)
            before = list(self._streams.values())
            for name, stream in streams.items():
                path = self._folder / f"stream-{done}-{name}.f32"
                stream.save(path)
                self._note(path)
                self._streams[name] = path.name
            for file in before:
                del self._files[file]
            self._write_progress(done)
            for file in before:
                (self._folder / file).unlink()

    def _note(self, path: Path) -> None:
        self._files[path.name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}

    def _write_progress(self, done: int) -> None:
        progress = {
            "done": done,
            "files": self._files,
            "weights": self._weights,
            "rows": [row.model_dump(mode="json") for row in self._rows],
            "measured": self._measured,
            "streams": self._streams,
        }
        text = json.dumps({"sha256": derive_key(progress), "progress": progress})
        write_whole("unfinished work", self._folder / _PROGRESS, text)

    def _read(self) -> Resumed:
        written = json.loads((self._folder / _PROGRESS).read_bytes())
        progress = written["progress"]
        if written["sha256"] != derive_key(progress):
            raise ValueError(f"{self._folder / _PROGRESS} is not what was written")
        for name, facts in progress["files"].items():
            path = self._folder / name
            if path.stat().st_size != facts["bytes"] or file_sha256(path) != facts["sha256"]:
                raise ValueError(f"{path} is not what was written")
        self._files, self._weights, self._streams = progress["files"], progress["weights"], progress["streams"]
        self._rows = [LayerReport.model_validate(row) for row in progress["rows"]]
        self._measured = {str(name): float(value) for name, value in progress["measured"].items()}
        weights = {name: read_weight(self._folder, facts) for name, facts in self._weights.items()}
        streams = {name: self._folder / file for name, file in self._streams.items()}
        return Resumed(int(progress["done"]), weights, tuple(self._rows), dict(self._measured), streams)

    def _remove_all_but(self, files: Mapping[str, Any]) -> None:
        keep = {*files, PARTIAL_LOCK, *([_PROGRESS] if files else [])}
        for path in self._folder.iterdir():
            if path.name not in keep:
                path.unlink()
