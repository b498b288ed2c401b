"""From texts to one stream of tokens, and from the stream to rows without padding."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

TEXT_SEPARATOR = "\n\n"
"""Stands between texts that share the stream: a blank line."""


def opening_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return what the tokenizer itself puts before a text: BOS for most models, nothing for some."""
    with_special = tokenizer.encode("a").ids
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    for length in range(len(with_special) - len(bare) + 1):
        if with_special[length : length + len(bare)] == bare:
            return with_special[:length]
    return []


def encode_texts(tokenizer: Tokenizer, texts: Iterable[str], enough_tokens: int | None = None) -> NDArray[np.int32]:
    """Encode each text whole, without special tokens, and join them with blank lines; int32 [tokens].

    Empty texts are left out. Reading stops after the text that reaches `enough_tokens`, so an endless source will do.
    """
    separator = tokenizer.encode(TEXT_SEPARATOR, add_special_tokens=False).ids
    stream: list[int] = []
    for text in texts:
        if not text.strip():
            continue
        if stream:
            stream += separator
        stream += tokenizer.encode(text, add_special_tokens=False).ids
        if enough_tokens is not None and len(stream) >= enough_tokens:
            break
    return np.array(stream, np.int32)


def cut_rows(stream: NDArray[np.int32], seq_len: int, opening: list[int]) -> list[NDArray[np.int32]]:
    """Cut a stream into rows of `seq_len` tokens, each beginning with `opening`; the last row may be shorter.

    Every token of the stream is in exactly one row and nothing is padded.
    """
    step = seq_len - len(opening)
    assert step > 0
    head = np.array(opening, np.int32)
    return [np.concatenate([head, stream[start : start + step]]) for start in range(0, len(stream), step)]
