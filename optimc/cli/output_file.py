"""Files that results go to: looked at before the work that may take hours, and written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from optimc.errors import ConfigError, Fault
from optimc.storage import storing, why_not_writable, write_whole


def output_fault(path: Path | None, option: str) -> Fault | None:
    """Return why a result could not be written there, or None. A folder that does not exist yet is made later."""
    if path is None:
        return None
    reason = f"{path} is a folder; name a file" if path.is_dir() else why_not_writable(path.parent)
    if reason is None and path.exists() and not os.access(path, os.W_OK):
        reason = f"no permission to write {path}"
    return None if reason is None else Fault(option, reason)


def check_output(path: Path | None, option: str) -> None:
    """Raise ConfigError, before any long work, if a result could not be written."""
    fault = output_fault(path, option)
    if fault is not None:
        raise ConfigError("options", [fault])


def write_output(what: str, path: Path, text: str) -> None:
    """Write a file and the folders it lies in. A file there is replaced once all is written, or stays as it was; what
    is no plain file, /dev/stdout for one, is written to. Raises StorageError."""
    if path.exists() and not path.is_file():
        with storing(what, path):
            path.write_text(text, "utf-8")
    else:
        write_whole(what, path, text)
