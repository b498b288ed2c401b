"""Files that results go to: looked at before the work that may take hours, and written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from optimc.errors import ConfigError, Fault
from optimc.storage import storing, why_not_writable


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
    with storing(what, path):
        if path.exists() and not path.is_file():
            path.write_text(text, "utf-8")
            return
        target = path.resolve()  # a link stays one
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name[:80]}-", suffix=".tmp", dir=target.parent)
        temporary = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            temporary.chmod(target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask())
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _umask() -> int:
    """Return the process's mask, which can be read only by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
