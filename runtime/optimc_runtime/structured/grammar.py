"""A compiled grammar, and where one answer stands in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from optimc.errors import RequestError
from optimc_runtime.request import SamplingParams
from optimc_runtime.speculate.tree import TreeShape

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_REASON_CHARS = 400
"""Of llguidance's words in our errors; it may quote the grammar."""

ALL_TOKENS = np.uint32(0xFFFF_FFFF)
"""A word of a mask that leaves every token."""


def mask_words(vocab_size: int) -> int:
    """Return how many 32-bit words a mask of the vocabulary has."""
    return (vocab_size + 31) // 32


def check_with_grammar(params: SamplingParams) -> None:
    """Raise RequestError if `params` contradict a grammar, which alone decides when an answer may end."""
    if params.ignore_eos:
        raise RequestError("ignore_eos contradicts a grammar, which says where the answer ends", param="ignore_eos")
    if params.min_tokens > 0:
        raise RequestError(
            f"min_tokens {params.min_tokens} contradicts a grammar, which says where the answer ends",
            param="min_tokens",
        )


class Grammar:
    """A grammar ready for use. Immutable: `matcher` is never advanced, only copied; any thread may start answers."""

    __slots__ = ("_matcher", "_num_words", "param")

    def __init__(self, matcher: LLMatcher, vocab_size: int, param: str) -> None:
        self._matcher = matcher
        self._num_words = mask_words(vocab_size)
        self.param = param

    def start(self) -> GrammarState:
        """Return the state of an answer that has not begun."""
        return GrammarState(self._matcher.deep_copy(), self._num_words, self.param)


class GrammarState:
    """Where one answer stands. For one thread.

    A mask is [ceil(V/32)] uint32; bit i % 32 of word i // 32 says whether token i may follow. EOS may where the answer
    may end. Methods raise RequestError (code "grammar_too_complex") if what may follow cannot be told within limits.
    """

    __slots__ = ("_matcher", "_num_words", "_param")

    def __init__(self, matcher: LLMatcher, num_words: int, param: str) -> None:
        self._matcher = matcher
        self._num_words = num_words
        self._param = param

    @property
    def is_complete(self) -> bool:
        """Whether nothing but EOS can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def accept(self, token_id: int) -> None:
        """Go on by an emitted token that the mask left. EOS is not for the grammar to see."""
        if not self._matcher.consume_token(token_id):
            raise self._failure()

    def mask(self, into: NDArray[np.uint32]) -> None:
        """Write which tokens may follow."""
        into[:] = self._allowed()

    def tree_masks(self, shape: TreeShape, tokens: Sequence[int], into: NDArray[np.uint32]) -> None:
        """Write, into [n+1, W], which tokens may follow the root and each of the n guesses below it; state unchanged.

        A guess that its parent's mask forbids, and whatever hangs below it, gets an empty mask: nobody goes there.
        """
        into[0] = self._allowed()
        path: list[int] = []  # queries whose tokens are consumed, from the root down
        parents = shape.query_parents.tolist()
        try:
            for query in range(1, shape.num_nodes + 1):
                parent, token_id = parents[query], tokens[query - 1]
                if not into[parent][token_id >> 5] >> np.uint32(token_id & 31) & np.uint32(1):
                    into[query] = 0
                    continue
                # What the path has beyond the parent is given back; its ancestors are consumed already, for a parent
                # that is not on the path is below one that is.
                missing: list[int] = []
                while parent and parent not in path:
                    missing.append(parent)
                    parent = parents[parent]
                keep = path.index(parent) + 1 if parent else 0
                self._take_back(len(path) - keep)
                del path[keep:]
                for step in [*reversed(missing), query]:
                    self.accept(tokens[step - 1])
                    path.append(step)
                # After the last token of all the row is looked at, and what it gives is dropped.
                into[query] = ALL_TOKENS if self._matcher.is_stopped() else self._allowed()
        finally:
            self._take_back(len(path))

    def _allowed(self) -> NDArray[np.uint32]:
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        if self._matcher.is_error():
            raise self._failure()
        return words[: self._num_words]

    def _take_back(self, count: int) -> None:
        if count and not self._matcher.is_error() and not self._matcher.rollback(count):
            raise self._failure()

    def _failure(self) -> RequestError:
        return RequestError(
            f"{self._param}: the grammar became too complex to follow: {reason_of(self._matcher)}",
            param=self._param,
            code="grammar_too_complex",
        )


def reason_of(matcher: LLMatcher) -> str:
    """Return llguidance's words for what went wrong."""
    reason = matcher.get_error().replace("<non-verbose/>", "").strip() or "no reason is given"
    return reason if len(reason) <= MAX_REASON_CHARS else reason[:MAX_REASON_CHARS] + " ..."
