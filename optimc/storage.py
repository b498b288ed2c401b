"""Writing files of ours: whole or not at all, what keeps a place from being written, and how a refusal is said."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from optimc.errors import StorageError
from optimc.wording import one_line

CACHE_VARIABLE = "OPTIMC_CACHE"
DEFAULT_CACHE = Path(".optimc-cache")

_SUFFIX = ".tmp"
_PREFIX_CHARACTERS = 40
"""Of the file's name in the temporary one's, which must not be too long for the file system where the file's fits."""
_RANDOM = "[a-z0-9_]{8}"
"""What mkstemp puts between prefix and suffix."""


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


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of `path` when the block ends well, and is gone when it does not.

    The folder is made if it is not there, a link stays one and its target is replaced, and permissions are those that
    `open` would have left. What a killed process left beside `path` is removed by the next write to it. `durable`: the
    bytes are on the disk before the file has its name, so that not even a power cut leaves half of it; that may take
    seconds, and is for what cannot be made again in less. Raises OSError.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name[:_PREFIX_CHARACTERS]}."
    _remove_abandoned(target.parent, prefix)
    handle, name = tempfile.mkstemp(prefix=prefix, suffix=_SUFFIX, dir=target.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            with suppress(OSError):  # a file system without locks: what a killed process leaves there, stays
                fcntl.flock(file, fcntl.LOCK_EX)
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            temporary.chmod(_mode_of(target))
            temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(what: str, path: Path, text: str) -> None:
    """Write a text in UTF-8: afterwards it is there whole, or what was there still is. Raises StorageError."""
    with storing(what, path), replacing(path) as file:
        file.write(text.encode())


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


def _remove_abandoned(folder: Path, prefix: str) -> None:
    """Delete temporary files whose writer died; one at work holds a lock, or has only just begun."""
    temporary = re.compile(re.escape(prefix) + _RANDOM + re.escape(_SUFFIX))
    found: list[Path] = []
    with suppress(OSError):  # a folder that may be written and not listed
        found += [path for path in folder.iterdir() if temporary.fullmatch(path.name)]
    for path in found:
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.stat().st_size:
                    path.unlink()
        except OSError:
            continue  # locked by a living writer, or gone meanwhile


def _mode_of(path: Path) -> int:
    """Return the permissions of the file at `path`, or those a new one would have: mkstemp makes its files private."""
    with suppress(FileNotFoundError):
        return path.stat().st_mode & 0o777
    # The mask can be read only by setting it; what another thread makes meanwhile is too private, never too open.
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o666 & ~mask
