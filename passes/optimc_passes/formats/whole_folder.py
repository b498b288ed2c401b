"""A folder that appears complete or not at all: it is filled under another name beside its place, then renamed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from optimc.storage import storing, why_not_writable

_SUFFIX = ".tmp"
_PREFIX_CHARACTERS = 40
"""Of the folder's name in the temporary one's, which must not be too long for the file system where the other fits."""


def why_not_replaceable(folder: Path) -> str | None:
    """Return what keeps a new folder from taking the place of `folder`, or None. Writes nothing."""
    place = _place(folder)
    if os.path.lexists(place) and (not place.is_dir() or any(place.iterdir())):
        return f"{folder} exists and is not an empty folder; name another or remove it"
    if os.path.ismount(place):
        return f"{folder} is a mount point, which nothing can replace; name a folder in it"
    if place == Path.cwd():
        return f"{folder} is the working directory, which cannot be replaced; name a folder in it"
    return why_not_writable(place.parent)


@contextmanager
def whole_folder(what: str, folder: Path) -> Iterator[Path]:
    """Yield a folder to fill, which takes the place of `folder` when the block ends well and is gone when it does not.

    `folder` must not exist or be empty; if it is a link, what it points at is replaced. What a killed process left is
    removed by the next one that writes the same place. Raises StorageError, naming `what`, if the system refuses.
    """
    place = _place(folder)
    with storing(what, folder):
        place.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{place.name[:_PREFIX_CHARACTERS]}-"
        _remove_abandoned(place.parent, prefix)
        partial = Path(tempfile.mkdtemp(prefix=prefix, suffix=_SUFFIX, dir=place.parent))
        handle = os.open(partial, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: what a killed process leaves there, stays
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield partial
        with storing(what, folder):
            partial.chmod(0o777 & ~_umask())
            partial.rename(place)
    finally:
        os.close(handle)
        shutil.rmtree(partial, ignore_errors=True)


def _place(folder: Path) -> Path:
    """Return where `folder` lies in fact. A rename takes neither a link nor a name that ends in dots."""
    return Path(os.path.realpath(folder))


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Delete temporary folders whose writer died; one at work holds a lock, or has only just begun."""
    for path in parent.glob(f"*{_SUFFIX}"):
        if not path.name.startswith(prefix):
            continue
        try:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue  # gone meanwhile, or no folder
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if any(path.iterdir()):
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # locked by a living writer, or gone meanwhile
        finally:
            os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
