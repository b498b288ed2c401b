"""Prompts nobody has seen before: a prefix cache, ours or the server's, must not answer for prefill.

A prompt is the shared part (usually empty), then one block that is unique to run and request, then content that only
the seed and the request's number determine. Two runs therefore do the same work and share nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from optimc.errors import MeasureError
from optimc.measure.workload import Workload

Prompt = list[int] | str
PromptSource = Callable[[int], Prompt]
"""From a request's number within the run to its prompt."""

UNIQUE_TOKENS = 16
"""Length of the unique block: a KV block of the usual size, so that no full block is ever shared."""

_TEXT = """
the of and to in is that for it was on are as with his they at be this from have or by one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these would
other into has more her two like him see time could no make than first been its who now people my made over did down
only way find use may water long little very after words called just where most know
"""
WORDS = tuple(_TEXT.split())
"""Common English words: one token each, with the space before, in most vocabularies."""


class IdPrompts:
    """Prompts of exactly `prompt_tokens` ids, drawn evenly from the vocabulary without its special tokens."""

    def __init__(self, config: Workload, run_id: str, allowed: Sequence[int] | NDArray[np.int64]) -> None:
        self._config = config
        self._run_id = run_id
        self._allowed = np.asarray(allowed, np.int64)
        if len(self._allowed) < 2:
            raise MeasureError(f"{len(self._allowed)} usable token ids; unique prompts need at least 2")

    def __call__(self, index: int) -> list[int]:
        """Return the ids of request number `index`."""
        config = self._config
        if config.same_prompts:
            index = 0
        shared = self._draw("shared", self._run_id, config.shared_prefix_tokens)
        # The first own token differs between any two requests closer than V, so the common part is exact.
        start = _seed("start", self._run_id) % len(self._allowed)
        first = self._allowed[(start + index) % len(self._allowed)]
        unique = self._draw("unique", f"{self._run_id}/{index}", UNIQUE_TOKENS - 1)
        content = self._draw("content", f"{config.seed}/{index}", config.prompt_tokens)
        ids = [*shared.tolist(), int(first), *unique.tolist(), *content.tolist()]
        return ids[: config.prompt_tokens]

    def _draw(self, part: str, key: str, count: int) -> NDArray[np.int64]:
        return np.random.default_rng(_seed(part, key)).choice(self._allowed, count)


class TextPrompts:
    """Prompts in words, for servers that take no ids. `words_for` turns a length in tokens into one in words."""

    def __init__(self, config: Workload, run_id: str, words_for: Callable[[int], int]) -> None:
        self._config = config
        self._run_id = run_id
        self._words_for = words_for

    def __call__(self, index: int) -> str:
        """Return the text of request number `index`."""
        config = self._config
        if config.same_prompts:
            index = 0
        shared_words = self._words_for(config.shared_prefix_tokens) if config.shared_prefix_tokens else 0
        own_words = max(1, self._words_for(config.prompt_tokens) - shared_words)
        shared = _text_of_words("shared", self._run_id, shared_words)
        unique = f"{hashlib.sha256(f'{self._run_id}/{index}'.encode()).hexdigest()[:8]} "
        return shared + unique + _text_of_words("content", f"{config.seed}/{index}", own_words)


def _text_of_words(part: str, key: str, count: int) -> str:
    """Return `count` words determined by `part` and `key`, each followed by a space."""
    choice = np.random.default_rng(_seed(part, key)).integers(0, len(WORDS), count)
    return "".join(f"{WORDS[i]} " for i in choice)


def usable_ids(vocab_size: int, special: Collection[int]) -> NDArray[np.int64]:
    """Return the ids 0 .. vocab_size - 1 without the special ones."""
    return np.setdiff1d(np.arange(vocab_size, dtype=np.int64), np.asarray(sorted(special), np.int64))


def _seed(part: str, key: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{part}:{key}".encode()).digest()[:16], "little")
