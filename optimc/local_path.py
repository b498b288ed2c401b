"""What a user's name for a file or folder stands for on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def local_path(name: str | Path, *folders: Path) -> Path | None:
    """Return the file or folder `name` means, looked up as it is and then below each of `folders`; None if absent.

    `~` is expanded. A name that can be no path (a `~user` nobody knows, longer than the file system allows, with a NUL)
    is absent, where pathlib would raise.
    """
    path = Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser raises
    return next((place for place in (path, *(folder / path for folder in folders)) if _exists(place)), None)


def _exists(path: Path) -> bool:
    return os.path.exists(path)  # noqa: PTH110 - Path.exists raises
