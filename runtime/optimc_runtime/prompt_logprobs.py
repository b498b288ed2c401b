"""Log-probabilities of a prompt's own tokens, gathered while the prompt is computed."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from optimc.errors import EngineError, RequestError
from optimc_runtime import _native
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
        end = min(start + len(logits), len(self._prompt) - 1)
        if first < end:
            rows = np.ascontiguousarray(logits[first - start : end - start])
            self._scored += _score(rows, self._prompt[first + 1 : end + 1].tolist(), self._count, first)

    def finished(self) -> tuple[TokenLogprob | None, ...] | None:
        """Return one per prompt token, None for the first, once all are known; and only once."""
        if self._is_taken or len(self._scored) < len(self._prompt) - 1:
            return None
        self._is_taken = True
        return (None, *self._scored)


def _score(logits: NDArray[np.float32], token_ids: list[int], count: int, first_position: int) -> list[TokenLogprob]:
    """Return the log-probability of each of `token_ids` under its row of `logits` [m, V], and the `count` likeliest.

    The sampler reports what it chooses, so it is made to choose what stands in the prompt: figures of prompts and of
    outputs are the same to the last bit.
    """
    vocab_size = logits.shape[1]
    states = [_forced(token_id, min(count, vocab_size), vocab_size) for token_id in token_ids]
    chosen, reports, failure = _native.sample_rows(logits, states)
    if failure is not None:
        position = first_position + failure[0]
        raise EngineError(f"prompt position {position}: the logits contain NaN, or no token is possible")
    scored: list[TokenLogprob] = []
    for token_id, choice, report in zip(token_ids, chosen, reports, strict=True):
        assert report is not None, "every row reports"
        logprob, top = report
        # What is impossible cannot be forced.
        scored.append(TokenLogprob(token_id, logprob if choice == token_id else -math.inf, tuple(top)))
    return scored


def _forced(token_id: int, count: int, vocab_size: int) -> _native.RowState:
    return _native.RowState(
        vocab_size,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        seed=0,
        num_logprobs=count,
        bias_ids=np.array([token_id], np.int32),
        bias_values=np.array([1e30], np.float32),
        stop_ids=np.array([], np.int32),
        min_tokens=0,
    )
