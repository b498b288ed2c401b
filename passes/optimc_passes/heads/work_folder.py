"""Where a pass that trains heads works: its partial folder, which a later build finds, or one that goes with it."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from optimc.storage import storing
from optimc_passes.base import PassContext
from optimc_passes.cache_entry import PARTIAL_LOCK


class WorkFolder(NamedTuple):
    """A folder nobody else writes to."""

    path: Path
    survives: bool
    """Whether a later build will look into it."""


@contextmanager
def work_folder(context: PassContext) -> Iterator[WorkFolder]:
    """Yield the partial folder if there is one and nobody else is at it, else a temporary one."""
    with ExitStack() as stack:
        if context.partial is not None:
            with storing("unfinished work", context.partial):
                context.partial.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context((context.partial / PARTIAL_LOCK).open("ab"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                pass  # another build makes the same heads; this one makes them for itself
            else:
                yield WorkFolder(context.partial, survives=True)
                return
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=context.scratch))
        yield WorkFolder(Path(folder), survives=False)
