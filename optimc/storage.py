"""Writing files of ours: what keeps a place from being written, and how it is said when the system refuses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optimc.errors import StorageError
from optimc.wording import one_line

CACHE_VARIABLE = "OPTIMC_CACHE"
DEFAULT_CACHE = Path(".optimc-cache")


def cache_folder(chosen: Path | None) -> Path:
    """Return the cache folder in force: the chosen one, else $OPTIMC_CACHE, else .optimc-cache where we are."""
    return chosen or Path(os.environ.get(CACHE_VARIABLE) or DEFAULT_CACHE)


@contextmanager
def storing(what: str, path: Path, *also: type[Exception]) -> Iterator[None]:
    """Run a block that writes `path`; an OSError in it, or one of `also`, becomes a StorageError that names both."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (OSError, *also)):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        raise StorageError(f"{what} cannot be written to {path}: {reason}") from error


def why_not_writable(folder: Path) -> str | None:
    """Return what keeps files from being made in `folder`, which need not exist yet, or None. Writes nothing."""
    try:
        nearest = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
        if not nearest.is_dir():
            return f"{nearest} is not a folder"
        if not os.access(nearest, os.W_OK | os.X_OK):
            return f"no permission to write in {nearest}"
    except OSError as error:
        return error.strerror or str(error)
    return None
