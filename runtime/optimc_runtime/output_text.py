"""A request's token ids as text: decoded in increments, cut at a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from optimc_runtime.detokenize import Detokenizer
from optimc_runtime.request import SamplingParams
from optimc_runtime.stop_strings import StopMatcher
from optimc_runtime.tokenizer import Tokenizer


class OutputText:
    """Text of one answer. Without a tokenizer it is always empty.

    The text of the first min_tokens tokens is shown as it is; stop strings are looked for in what follows.
    """

    __slots__ = ("_detokenizer", "_matcher", "_unmatched_tokens", "stopped")

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        self._detokenizer = (
            None if tokenizer is None else Detokenizer(tokenizer, skip_special_tokens=not params.special_tokens_in_text)
        )
        self._matcher = StopMatcher(params.stop)
        self._unmatched_tokens = params.min_tokens
        self.stopped = False
        """Whether a stop string was found: the text is complete."""

    def push(self, token_id: int) -> str:
        """Add a token; return the text now safe to show."""
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.push_token(token_id)
        if self._unmatched_tokens > 0:
            self._unmatched_tokens -= 1
            return text
        return self._match(text)

    def finish(self) -> str:
        """Return what is left once no more tokens come; nothing after a stop string."""
        if self._detokenizer is None or self.stopped:
            return ""
        text = self._match(self._detokenizer.flush())
        return text if self.stopped else text + self._matcher.flush()

    def _match(self, text: str) -> str:
        safe, matched = self._matcher.push(text)
        self.stopped = matched is not None
        return safe


def special_stop_ids(tokenizer: Tokenizer | None, stop: Sequence[str]) -> frozenset[int]:
    """Return the ids of those `stop` strings that spell one special token exactly.

    Special tokens have no text, so no stop string is ever found in them: they end a request as stop ids do.
    """
    if tokenizer is None:
        return frozenset()
    ids = (tokenizer.token_id(text) for text in stop)
    return frozenset(token_id for token_id in ids if token_id in tokenizer.special_ids)
