"""A compiled grammar, and where one answer stands in it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from optimc.errors import RequestError
from optimc_runtime.speculate.tree import TreeShape

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_REASON_CHARS = 400
"""Of llguidance's words in our errors; it may quote the grammar."""

NOTHING_FOLLOWS = "NoExtensionBias"
"""llguidance's word for a grammar that no token continues."""

MAX_MASK_S = 0.05
"""Processor time that one mask may take, for others' tokens wait for it. Usual ones take tens of microseconds; the
limits llguidance has itself count steps of its own, whatever they take."""

ALL_TOKENS = np.uint32(0xFFFF_FFFF)
"""A word of a mask that leaves every token."""


def mask_words(vocab_size: int) -> int:
    """Return how many 32-bit words a mask of the vocabulary has."""
    return (vocab_size + 31) // 32


class Grammar:
    """A grammar ready for use. Immutable: its matcher is never advanced, only copied; any thread may start answers."""

    __slots__ = ("_matcher", "num_words", "param")

    def __init__(self, matcher: LLMatcher, vocab_size: int, param: str) -> None:
        self._matcher = matcher
        self.num_words = mask_words(vocab_size)
        self.param = param
        """The request field it came by."""

    def start(self) -> GrammarState:
        """Return the state of an answer that has not begun."""
        return GrammarState(self)

    def matcher(self) -> LLMatcher:
        """Return a matcher at the beginning, the caller's own."""
        return self._matcher.deep_copy()


class GrammarState:
    """Where one answer stands. For one thread.

    A mask is [ceil(V/32)] uint32; bit i % 32 of word i // 32 says whether token i may follow. EOS may where the answer
    may end. Methods raise RequestError (code "grammar_too_complex") if what may follow cannot be told within limits.
    """

    __slots__ = ("_grammar", "_matcher", "_reason", "_tokens")

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher()
        self._tokens: list[int] = []
        self._reason = ""

    @property
    def param(self) -> str:
        """The request field that the grammar came by."""
        return self._grammar.param

    @property
    def is_complete(self) -> bool:
        """Whether nothing but EOS can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def accept(self, token_id: int) -> None:
        """Go on by an emitted token that the mask left. EOS is not for the grammar to see."""
        self._tokens.append(token_id)
        if not self._matcher.consume_token(token_id):
            raise self._failure()

    def mask(self, into: NDArray[np.uint32]) -> None:
        """Write which tokens may follow."""
        if not self._write_mask(into):
            raise self._failure()

    def tree_masks(self, shape: TreeShape, tokens: Sequence[int], into: NDArray[np.uint32]) -> None:
        """Write, into [n+1, W], which tokens may follow the root and each of the n guesses below it; state unchanged.

        A guess that its parent's mask forbids, and whatever hangs below it, gets an empty mask: nobody goes there. So
        does one behind which the grammar cannot be followed: only going there is an error.
        """
        self.mask(into[0])
        into[1:] = 0
        parents = shape.query_parents.tolist()
        complete: set[int] = set()
        path: list[int] = []  # queries whose tokens the matcher has consumed, from the root down
        for query in range(1, shape.num_nodes + 1):
            parent, token_id = parents[query], tokens[query - 1]
            if parent in complete:
                complete.add(query)
                into[query] = ALL_TOKENS
                continue
            if not _has(into[parent], token_id):
                continue
            branch = [query]  # up to where it leaves the path
            while parent and parent not in path:
                branch.append(parent)
                parent = parents[parent]
            kept = path.index(parent) + 1 if parent else 0
            self._take_back(len(path) - kept)
            path[kept:] = reversed(branch)
            if not self._matcher.consume_tokens([tokens[step - 1] for step in path[kept:]]):
                self._start_over()
                path.clear()
            elif self._matcher.is_stopped():
                # The answer is complete: rows from here on are looked at, and what they give is dropped.
                complete.add(query)
                into[query] = ALL_TOKENS
            elif not self._write_mask(into[query]):
                into[query] = 0
                self._start_over()
                path.clear()
        self._take_back(len(path))

    def _write_mask(self, into: NDArray[np.uint32]) -> bool:
        words, self._reason = next_mask(self._matcher)
        into[:] = words[: self._grammar.num_words]
        return not self._reason

    def _take_back(self, count: int) -> None:
        if count and not self._matcher.rollback(count):
            self._start_over()

    def _start_over(self) -> None:
        """Return to the emitted tokens with a matcher that has not failed."""
        self._matcher = self._grammar.matcher()
        if not self._matcher.consume_tokens(self._tokens):
            raise self._failure()

    def _failure(self) -> RequestError:
        return RequestError(
            f"{self.param}: the grammar cannot be followed any further: {self._reason or reason_of(self._matcher)}",
            param=self.param,
            code="grammar_too_complex",
        )


def _has(mask: NDArray[np.uint32], token_id: int) -> bool:
    return bool(int(mask[token_id >> 5]) >> (token_id & 31) & 1)


def next_mask(matcher: LLMatcher) -> tuple[NDArray[np.uint32], str]:
    """Return which tokens may follow, and why it cannot be used, "" if it can."""
    started_s = time.thread_time()
    words = np.frombuffer(matcher.compute_bitmask(), np.uint32)
    took_s = time.thread_time() - started_s
    if matcher.is_error():
        return words, reason_of(matcher)
    if took_s > MAX_MASK_S:
        return words, f"to tell what may follow took {1000 * took_s:.0f} ms; at most {1000 * MAX_MASK_S:.0f} are given"
    return words, ""


def reason_of(matcher: LLMatcher) -> str:
    """Return llguidance's words for what went wrong."""
    reason = matcher.get_error().replace("<non-verbose/>", "").strip() or "no reason is given"
    if reason == NOTHING_FOLLOWS:
        return "nothing can be said; a rule or reference may lead back to itself, with no way out"
    return reason if len(reason) <= MAX_REASON_CHARS else reason[:MAX_REASON_CHARS] + " ..."
