"""Prompts nobody has seen before: a prefix cache, ours or the server's, must not answer for prefill.

A prompt is the shared part (usually empty), then one block that is unique to run and request, then content that only
the seed and the request's number determine. Two runs therefore do the same work and share nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from optimc.errors import MeasureError
from optimc.measure.workload import Workload


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation to be answered, as the API takes it."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()


Prompt = list[int] | str | ChatPrompt


@dataclass(frozen=True, slots=True)
class LengthOnly:
    """A request of which a trace says how long its prompt was and what it shared, not what it said."""

    tokens: int
    hash_ids: tuple[int, ...] = ()
    """Equal numbers stand for equal blocks of HASH_TOKENS tokens, from the front."""


class PromptSource(Protocol):
    """Makes prompts of whichever form the target takes. `index` is a request's number within the run."""

    def __call__(self, index: int) -> Prompt:
        """Return the prompt of a request."""
        ...

    def later_turn(self, conversation: int, turn: int, tokens: int) -> Prompt:
        """Return what the user says in a later turn: never seen before either, but not at the front."""
        ...

    def of_length(self, index: int, length: LengthOnly) -> Prompt:
        """Return a prompt of so many tokens; equal blocks for equal hashes, and nothing else in common."""
        ...


HASH_TOKENS = 512
"""Tokens that one hash of a trace stands for (Mooncake's)."""

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
        tokens = prompt_length(config, index)
        content = self._draw("content", f"{config.seed}/{index}", tokens)
        ids = [*shared.tolist(), *self._own_start(index), *content.tolist()]
        return ids[:tokens]

    def later_turn(self, conversation: int, turn: int, tokens: int) -> list[int]:
        """Return ids that only seed, conversation and turn determine."""
        return [int(token) for token in self._draw("turn", f"{self._config.seed}/{conversation}/{turn}", tokens)]

    def of_length(self, index: int, length: LengthOnly) -> list[int]:
        """Return one block of HASH_TOKENS per hash, then ids of the request's own; all new in every run."""
        ids: list[int] = []
        for number in length.hash_ids:
            ids += self._draw("hash", f"{self._run_id}/{number}", HASH_TOKENS).tolist()
        ids = ids[: length.tokens]
        if len(ids) < length.tokens:
            ids += self._own_start(index)
            ids += self._draw("content", f"{self._config.seed}/{index}", max(0, length.tokens - len(ids))).tolist()
        return ids[: length.tokens]

    def _own_start(self, index: int) -> list[int]:
        """Return the block that no other request has."""
        start = seed_of("start", self._run_id) % len(self._allowed)
        first = self._allowed[(start + index) % len(self._allowed)]
        return [int(first), *self._draw("unique", f"{self._run_id}/{index}", UNIQUE_TOKENS - 1).tolist()]

    def _draw(self, part: str, key: str, count: int) -> NDArray[np.int64]:
        return np.random.default_rng(seed_of(part, key)).choice(self._allowed, count)


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
        own_words = max(1, self._words_for(prompt_length(config, index)) - shared_words)
        shared = _text_of_words("shared", self._run_id, shared_words)
        return shared + self._own_start(index) + _text_of_words("content", f"{config.seed}/{index}", own_words)

    def later_turn(self, conversation: int, turn: int, tokens: int) -> str:
        """Return words that only seed, conversation and turn determine; a word counts as `words_for` says."""
        return " " + _text_of_words("turn", f"{self._config.seed}/{conversation}/{turn}", self._words_of(tokens))

    def of_length(self, index: int, length: LengthOnly) -> str:
        """Return equal words for equal hashes, the last of which may stand for less than a block, then the request's
        own words."""
        count = max(1, self._words_for(length.tokens))
        per_hash = self._words_of(HASH_TOKENS)
        words = [word for number in length.hash_ids for word in _words("hash", f"{self._run_id}/{number}", per_hash)]
        shared = _spaced(words[:count])
        if len(words) >= count:
            return shared
        own = _text_of_words("content", f"{self._config.seed}/{index}", count - len(words))
        return shared + self._own_start(index) + own

    def _words_of(self, tokens: int) -> int:
        """Return the words that make so many tokens inside a prompt, whatever its length: no template's share."""
        return max(1, self._words_for(2 * tokens) - self._words_for(tokens))

    def _own_start(self, index: int) -> str:
        return f"{hashlib.sha256(f'{self._run_id}/{index}'.encode()).hexdigest()[:8]} "


def prompt_length(workload: Workload, index: int) -> int:
    """Return the prompt tokens of a request: `prompt_tokens`, or evenly spread around it."""
    shortest = workload.shared_prefix_tokens + 1
    return max(shortest, _length("prompt", workload.seed, index, workload.prompt_tokens, workload.prompt_spread))


def output_length(workload: Workload, index: int) -> int:
    """Return the output tokens of a request: `output_tokens`, or evenly spread around it."""
    return _length("output", workload.seed, index, workload.output_tokens, workload.output_spread)


def _length(part: str, seed: int, index: int, mean: int, spread: float) -> int:
    low, high = max(1, round(mean * (1 - spread))), round(mean * (1 + spread))
    if low >= high:
        return mean
    return int(np.random.default_rng(seed_of(f"{part} length", f"{seed}/{index}")).integers(low, high + 1))


def _text_of_words(part: str, key: str, count: int) -> str:
    """Return `count` words determined by `part` and `key`, each followed by a space."""
    return _spaced(_words(part, key, count))


def _words(part: str, key: str, count: int) -> list[str]:
    return [WORDS[i] for i in np.random.default_rng(seed_of(part, key)).integers(0, len(WORDS), count)]


def _spaced(words: Sequence[str]) -> str:
    return "".join(f"{word} " for word in words)


def usable_ids(vocab_size: int, special: Collection[int]) -> NDArray[np.int64]:
    """Return the ids 0 .. vocab_size - 1 without the special ones."""
    return np.setdiff1d(np.arange(vocab_size, dtype=np.int64), np.asarray(sorted(special), np.int64))


def seed_of(part: str, key: str) -> int:
    """Return a random generator's seed: different for different parts and keys, the same everywhere and always."""
    return int.from_bytes(hashlib.sha256(f"{part}:{key}".encode()).digest()[:16], "little")
