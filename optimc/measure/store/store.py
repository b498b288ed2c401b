"""The folder where measurements are kept between runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from optimc.errors import ConfigError, MeasureError
from optimc.storage import write_whole

MEASUREMENT_VERSION = 2
"""Raise it when a figure's meaning changes; older measurements are then taken again."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """One measurement as it lies on disk."""

    what: str
    data: Mapping[str, Any]
    measured_at: str
    """UTC, ISO 8601."""


class MeasurementStore:
    """Measurements by their keys (`measurement_key`), one JSON file each.

    Files are replaced whole, never changed, so several processes may write at once: the last one stays.
    """

    def __init__(self, folder: Path) -> None:
        """Keep them in `folder`, by convention <cache>/measurements; it is made with the first one."""
        self._folder = folder

    def load(self, key: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return what was saved under `key`, or None. Raises MeasureError if its file is damaged."""
        entry = self.entry(key)
        return None if entry is None else entry.data

    def entry(self, key: Mapping[str, Any]) -> Entry | None:
        """Return the same with the time it was measured."""
        path = self.path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise MeasureError(f"{path}: {error.strerror or error}") from error
        try:
            found = json.loads(data)
            if found["format"] != MEASUREMENT_VERSION or found["key"] != json.loads(json.dumps(key)):
                raise ValueError("it holds the measurement of something else")
            entry = Entry(str(found["what"]), dict(found["data"]), str(found["measured_at"]))
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise _damaged(path, error) from error
        return entry

    def load_as(self, key: Mapping[str, Any], parse: Callable[[Mapping[str, Any]], T]) -> tuple[T, str] | None:
        """Return `parse` of what was saved, and when it was measured. A `parse` that fails is a damaged file."""
        entry = self.entry(key)
        if entry is None:
            return None
        try:
            return parse(entry.data), entry.measured_at
        except (ValueError, LookupError, TypeError, AttributeError, ConfigError) as error:
            raise _damaged(self.path(key), error) from error

    def save(self, key: Mapping[str, Any], data: Mapping[str, Any]) -> str:
        """Keep JSON values under `key`, in place of earlier ones; return the time that is noted. Raises StorageError,
        and leaves nothing, if there is no room for them."""
        path = self.path(key)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        found = {"format": MEASUREMENT_VERSION, "what": key["what"], "measured_at": now, "key": key, "data": data}
        write_whole("the measurement", path, json.dumps(found, indent=2))
        return now

    def path(self, key: Mapping[str, Any]) -> Path:
        """Return the file of a key, whether it is there or not."""
        versioned = json.dumps([MEASUREMENT_VERSION, key], sort_keys=True)
        return self._folder / f"{hashlib.sha256(versioned.encode()).hexdigest()}.json"


def _damaged(path: Path, error: Exception) -> MeasureError:
    reason = f"no {error}" if isinstance(error, KeyError) else str(error)
    return MeasureError(f"{path}: not a measurement ({reason}); delete it, or measure with --fresh")
