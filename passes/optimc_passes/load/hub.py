"""Fetching a checkpoint from the hub: the small files first, so that a refusal costs no download."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import httpx
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from optimc.errors import CheckpointError
from optimc_passes.load.shards import INDEX_NAME, SINGLE_NAME, read_index
from optimc_passes.load.source import HubSource

SIDE_FILES = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
CODE_FILES = ("*.py",)


def fetch_side_files(source: HubSource, *, with_code: bool) -> Path:
    """Fetch configuration and tokenizer (and Python code, if it is trusted); return the local folder.

    Raises CheckpointError if the repository, the revision or the network is missing. With HF_HUB_OFFLINE set only
    what is in the local hub cache counts.
    """
    return _snapshot(source, SIDE_FILES + (CODE_FILES if with_code else ()))


def fetch_weights(source: HubSource, folder: Path) -> Path:
    """Fetch the weight files that `folder`'s index names (or the single one); return the local folder."""
    index = folder / INDEX_NAME
    names = sorted(set(read_index(index).values())) if index.is_file() else [SINGLE_NAME]
    local = _snapshot(source, [*SIDE_FILES, *names])
    if not index.is_file() and not (local / SINGLE_NAME).is_file():
        local = _snapshot(source, [*SIDE_FILES, "*.safetensors"])
    return local


def _snapshot(source: HubSource, patterns: Sequence[str]) -> Path:
    name = source.repo if source.revision is None else f"{source.repo}@{source.revision}"
    try:
        return Path(snapshot_download(source.repo, revision=source.revision, allow_patterns=list(patterns)))
    except GatedRepoError as error:
        raise CheckpointError(f"{name}: access must be granted on the hub; then log in with `hf auth login`") from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{name}: the repository has no such revision") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"{name}: neither a folder here nor a repository on the hub") from error
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise CheckpointError(f"{name}: no such folder here, not in the local hub cache, and {why}") from error
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{name}: cannot be fetched from the hub ({reason})") from error
