"""The identity of a checkpoint: a hash of every byte that shapes what is built from it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

SIDE_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "quantize_config.json",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


def digest_checkpoint(folder: Path, weight_files: Iterable[Path], *, with_code: bool) -> str:
    """Return the SHA-256 over configuration, tokenizer and weight files of `folder`, in hexadecimal.

    With `with_code` also over its Python files, which then decide what is computed. File names count, so a checkpoint
    sharded differently is a different one; where the folder lies does not.
    """
    files = [folder / name for name in SIDE_FILES if (folder / name).is_file()]
    files += sorted(weight_files)
    if with_code:
        files += sorted(folder.glob("*.py"))
    total = hashlib.sha256()
    for path in files:
        total.update(f"{path.name}\0{file_sha256(path)}\n".encode())
    return total.hexdigest()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
