"""Where a checkpoint comes from: a folder, a .gguf file, or a repository on the hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from optimc.errors import CheckpointError
from optimc.local_path import local_path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class FolderSource:
    """A folder with config.json and safetensors files."""

    path: Path


@dataclass(frozen=True)
class GgufSource:
    """A .gguf file."""

    path: Path


@dataclass(frozen=True)
class HubSource:
    """A repository on the hub."""

    repo: str
    revision: str | None
    """Branch, tag or commit; None is the default branch."""


Source = FolderSource | GgufSource | HubSource


def find_source(model: str | Path, revision: str | None) -> Source:
    """Decide what `model` names; what exists on disk wins over a hub id. Touches no network.

    Raises CheckpointError if it can be none of the three, or if a revision is asked of something on disk.
    """
    found = local_path(model)
    path = found or Path(model)
    source: Source | None = None
    if found is not None and found.is_dir():
        source = FolderSource(path)
    elif found is not None and found.is_file():
        if path.suffix.lower() != ".gguf":
            raise CheckpointError(f"{path}: a model is a folder, a .gguf file or a hub id, not this kind of file")
        source = GgufSource(path)
    if source is not None:
        if revision is not None:
            raise CheckpointError(f"{path}: on disk, so there is no revision '{revision}' to pick; leave it out")
        return source
    if isinstance(model, Path) or path.suffix.lower() == ".gguf" or not _HUB_ID.fullmatch(str(model)):
        raise CheckpointError(f"{model}: no such file or folder, and not a hub id (organisation/name)")
    return HubSource(str(model), revision)
