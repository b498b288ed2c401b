"""Which tokens heads can guess."""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from optimc_passes.checkpoint import Checkpoint


def draft_vocabulary(
    tokens: NDArray[np.int32], size: int, vocab_size: int, always: Iterable[int]
) -> NDArray[np.int32] | None:
    """Return the `size` ids that occur most often, ascending, those of `always` among them; None: all of them.

    Of ids that occur equally often the lower ones are taken, which in most tokenizers are those of the commoner pieces.
    """
    if size >= vocab_size:
        return None
    counts = np.bincount(tokens, minlength=vocab_size).astype(np.int64)[:vocab_size]
    kept = sorted({token for token in always if 0 <= token < vocab_size})[:size]
    counts[kept] = np.iinfo(np.int64).max
    likeliest = np.argsort(-counts, kind="stable")[:size]
    return np.sort(likeliest).astype(np.int32)


def special_ids(checkpoint: Checkpoint) -> list[int]:
    """Return the ids of tokens that stand for no text, those that end an answer first."""
    found = list(checkpoint.eos)
    if checkpoint.tokenizer.tokenizer_json is not None:
        added = json.loads(checkpoint.tokenizer.tokenizer_json).get("added_tokens") or []
        found += [int(entry["id"]) for entry in added if entry.get("special")]
    return list(dict.fromkeys(found))
