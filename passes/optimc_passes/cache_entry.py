"""A directory that is either complete and unharmed or treated as absent.

Layout under the cache's root:

    <kind>/<key>/entry.json      {"files": {name: {"bytes": n, "sha256": hex}}, "payload": any JSON}
    <kind>/<key>/<name>          the files
    tmp/<random>/                an entry being written; locked by its writer, moved into place when complete
    partial/<key>/               what a weight pass has finished of its layers; locked while somebody is at it
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from optimc.storage import storing
from optimc_passes.load.digest import file_sha256

_INDEX = "entry.json"
_LOCK = ".lock"
_YOUNG_S = 60.0
"""A temporary directory this young may not have been locked by its writer yet."""
_FORGOTTEN_S = 30 * 24 * 3600.0
"""Unfinished work this old belongs to a build nobody goes on with."""
PARTIAL, PARTIAL_LOCK = "partial", ".lock"
"""Where a weight pass keeps unfinished work, under its key; and the file that whoever is at it holds locked."""


def read_entry(folder: Path) -> Any | None:
    """Return the payload of an entry after checking size and SHA-256 of its files; None if anything is wrong."""
    try:
        index = json.loads((folder / _INDEX).read_bytes())
        for name, facts in index["files"].items():
            path = folder / name
            if path.stat().st_size != facts["bytes"] or file_sha256(path) != facts["sha256"]:
                return None
        return index["payload"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None


def remove_abandoned(root: Path) -> None:
    """Delete what writers that died left under `root`; those at work hold a lock and are let alone."""
    now = time.time()
    for folder in (root / "tmp").glob("*"):
        try:
            if now - folder.stat().st_mtime < _YOUNG_S:
                continue
            with (folder / _LOCK).open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # locked by a living writer, or gone meanwhile
    for folder in (root / PARTIAL).glob("*"):
        try:
            forgotten = now - max(path.stat().st_mtime for path in (folder, *folder.iterdir())) > _FORGOTTEN_S
        except OSError:
            continue
        if forgotten:
            remove_partial(folder)


def remove_partial(folder: Path) -> None:
    """Delete unfinished work, unless another process is at it or there is none."""
    try:
        with (folder / PARTIAL_LOCK).open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return


@contextlib.contextmanager
def scratch_folder(root: Path) -> Iterator[Path]:
    """Yield an empty folder below `root` that is gone afterwards; if this process dies, a later build removes it."""
    remove_abandoned(root)
    with EntryWriter(root, "tmp", "scratch") as entry:
        yield entry.folder


class EntryWriter:
    """Context manager that builds an entry aside. Without `commit`, leaving it leaves no trace."""

    def __init__(self, root: Path, kind: str, key: str) -> None:
        self._final = root / kind / key
        self._tmp = root / "tmp"
        with storing("the cache", root):
            self._tmp.mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(dir=self._tmp))
            """Where to write the entry's files."""
            self._lock = (self.folder / _LOCK).open("ab")
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def __enter__(self) -> EntryWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def commit(self, payload: Any) -> Path:
        """Move the entry into place and return its folder.

        A sound entry that another build put there meanwhile is kept, since equal keys mean equal contents; a damaged
        one is replaced.
        """
        with storing("the cache", self._final):
            return self._commit(payload)

    def _commit(self, payload: Any) -> Path:
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
            for path in sorted(self.folder.iterdir())
            if path.name != _LOCK
        }
        # Nothing is flushed to the disk: after a power cut the hashes tell what is missing.
        (self.folder / _INDEX).write_text(json.dumps({"files": files, "payload": payload}))
        self._final.parent.mkdir(parents=True, exist_ok=True)
        (self.folder / _LOCK).unlink()
        while True:
            try:
                # Fails on a folder that is not empty: whoever comes first wins.
                self.folder.rename(self._final)
            except OSError:
                if not self._final.is_dir():
                    raise
                if read_entry(self._final) is not None:
                    break
                self._set_aside()
            else:
                break
        return self._final

    def _set_aside(self) -> None:
        """Take a damaged entry out of the way, so that no reader sees it half removed."""
        aside = Path(tempfile.mkdtemp(dir=self._tmp))
        with contextlib.suppress(FileNotFoundError):  # another build did the same first
            self._final.rename(aside / "damaged")
        shutil.rmtree(aside, ignore_errors=True)
