"""Log-probabilities of a prompt's own tokens, gathered while the prompt is computed."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from optimc.errors import EngineError, RequestError
from optimc_runtime.request import TokenLogprob

MAX_SCORED_TOKENS = 4096
"""Longest prompt that is scored: every one of its positions costs a row of logits."""


class PromptLogprobs:
    """Row t of the logits gives token t+1 of `prompt` [n] int64, with the `count` likeliest alternatives.

    Raises RequestError if the prompt has more than MAX_SCORED_TOKENS tokens.
    """

    def __init__(self, prompt: NDArray[np.int64], count: int) -> None:
        if len(prompt) > MAX_SCORED_TOKENS:
            raise RequestError(
                f"the prompt has {len(prompt):,} tokens; log-probabilities are reported for prompts of at most "
                f"{MAX_SCORED_TOKENS:,}",
                param="echo",
            )
        self._prompt = prompt
        self._count = count
        self._scored: list[TokenLogprob] = []
        self._is_taken = False

    def take(self, start: int, logits: NDArray[np.float32]) -> None:
        """Score from `logits` [m, V], the rows at positions `start` and after, which come in order.

        Rows of positions scored already, as after a preemption, and of the output's are passed over.
        Raises EngineError naming the position if a row holds a NaN.
        """
        first = len(self._scored)
        assert start <= first or first == len(self._prompt) - 1, "rows come in order"
        for position in range(first, min(start + len(logits), len(self._prompt) - 1)):
            scored = _score(logits[position - start], int(self._prompt[position + 1]), self._count)
            if math.isnan(scored.logprob):
                raise EngineError(f"prompt position {position}: the logits contain NaN")
            self._scored.append(scored)

    def finished(self) -> tuple[TokenLogprob | None, ...] | None:
        """Return one per prompt token, None for the first, once all are known; and only once."""
        if self._is_taken or len(self._scored) < len(self._prompt) - 1:
            return None
        self._is_taken = True
        return (None, *self._scored)


def _score(row: NDArray[np.float32], token_id: int, count: int) -> TokenLogprob:
    """Return the log-probability of `token_id` under `row` [V], and the `count` likeliest; lower ids first if equal."""
    highest = row.max()
    total = float(highest) + float(np.log(np.exp(row - highest).sum(dtype=np.float64)))
    if count == 0:
        return TokenLogprob(token_id, float(row[token_id]) - total, ())
    count = min(count, len(row))
    threshold = np.partition(row, len(row) - count)[len(row) - count]
    likely = np.flatnonzero(row >= threshold)
    best = likely[np.argsort(-row[likely], kind="stable")][:count].tolist()
    return TokenLogprob(token_id, float(row[token_id]) - total, tuple((i, float(row[i]) - total) for i in best))
