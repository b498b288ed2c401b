"""A request's token ids as text: decoded in increments, cut at a stop string."""

from __future__ import annotations

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
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
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
