"""Logits to tokens: one call per step for all its rows, in native code.

The order per row is fixed: repetition penalty, presence and frequency penalties, logit bias, min_tokens masking; then
argmax if greedy, else temperature, top_k, top_p (of what top_k left), min_p, and one draw. Equal logits are ordered
by token id, lowest first, everywhere. Log-probabilities are those of the raw logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from optimc.errors import EngineError, RequestError
from optimc_runtime import _native
from optimc_runtime.request import SamplingParams, TokenLogprob

_UINT64 = 2**64 - 1
_NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)
_NO_VALUES: NDArray[np.float32] = np.empty(0, np.float32)

_Number = TypeVar("_Number", np.int32, np.float32)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's choice."""

    token_id: int
    logprob: TokenLogprob | None
    """Present if the request asked for logprobs."""


class SamplingState:
    """What sampling remembers of one sequence: parameters, output position and the tokens penalties look at.

    `stop_ids` are the ids that may not be chosen before `min_tokens`; `seed` is any 64-bit integer. Draws are a
    function of (seed, output position) alone: batch mates, preemption and threads do not change them, provided the
    state is kept across preemption and `accept` is called once per emitted token.

    Raises RequestError if logit_bias, or the prompt of a penalized request, names a token outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] | NDArray[np.integer],
        stop_ids: frozenset[int],
        vocab_size: int,
        seed: int,
    ) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.seed = seed & _UINT64
        self.position = 0
        """Output tokens accepted so far."""
        _check_ids(params.logit_bias, vocab_size, "logit_bias")
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.int32, len(params.logit_bias))
        self._bias_values = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        self._stop_ids = np.array(sorted(i for i in stop_ids if 0 <= i < vocab_size), np.int32)
        self._seen: _SeenTokens | None = None
        if params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0:
            _check_ids(prompt_ids, vocab_size, "prompt")
            self._seen = _SeenTokens(prompt_ids)

    def accept(self, token_id: int) -> None:
        """Record that `token_id` was emitted at the current output position."""
        self.position += 1
        if self._seen is not None:
            self._seen.add(token_id)

    @property
    def seen_ids(self) -> NDArray[np.int32]:
        """Distinct tokens of prompt and output, empty when no penalty needs them."""
        return _NO_IDS if self._seen is None else self._seen.ids

    @property
    def seen_counts(self) -> NDArray[np.int32]:
        """How often each of `seen_ids` stands in the output; 0 for tokens of the prompt only."""
        return _NO_IDS if self._seen is None else self._seen.counts

    @property
    def bias_ids(self) -> NDArray[np.int32]:
        """Tokens with a logit bias."""
        return self._bias_ids

    @property
    def bias_values(self) -> NDArray[np.float32]:
        """The bias of each of `bias_ids`."""
        return self._bias_values

    @property
    def banned_ids(self) -> NDArray[np.int32]:
        """Tokens that may not be chosen at the current position: the stop tokens, until min_tokens is reached."""
        return self._stop_ids if self.position < self.params.min_tokens else _NO_IDS


class _SeenTokens:
    """Distinct token ids with their output counts, as growing arrays: an accepted token costs O(1)."""

    def __init__(self, prompt_ids: Sequence[int] | NDArray[np.integer]) -> None:
        distinct = np.unique(np.asarray(prompt_ids, np.int32))
        self._size = len(distinct)
        self._ids = np.concatenate([distinct, np.empty(64, np.int32)])
        self._counts = np.zeros(len(self._ids), np.int32)
        self._slots = {int(token): slot for slot, token in enumerate(distinct)}

    def add(self, token_id: int) -> None:
        slot = self._slots.setdefault(token_id, self._size)
        if slot == self._size:
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token_id
            self._size += 1
        self._counts[slot] += 1

    @property
    def ids(self) -> NDArray[np.int32]:
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.int32]:
        return self._counts[: self._size]


def sample(logits: NDArray[np.float32], states: Sequence[SamplingState]) -> list[Sampled]:
    """Choose one token per row of `logits` [R, V] float32 for the R `states`, which are not changed.

    `logits` is only read. Raises EngineError naming the row if one holds a NaN or leaves no token to choose.
    """
    rows, vocab = logits.shape
    assert rows == len(states), f"{rows} rows of logits for {len(states)} states"
    assert all(state.vocab_size == vocab for state in states), f"logits have {vocab} columns"
    if not states:
        return []
    params = [state.params for state in states]
    seen_start, seen_ids = _ragged([state.seen_ids for state in states])
    bias_start, bias_ids = _ragged([state.bias_ids for state in states])
    banned_start, banned_ids = _ragged([state.banned_ids for state in states])
    status, token_ids, logprobs, top_ids, top_logprobs = _native.sample_rows(
        np.ascontiguousarray(logits),
        temperature=np.array([p.temperature for p in params], np.float32),
        top_k=np.array([min(p.top_k, vocab) for p in params], np.int32),
        top_p=np.array([p.top_p for p in params], np.float32),
        min_p=np.array([p.min_p for p in params], np.float32),
        repetition_penalty=np.array([p.repetition_penalty for p in params], np.float32),
        presence_penalty=np.array([p.presence_penalty for p in params], np.float32),
        frequency_penalty=np.array([p.frequency_penalty for p in params], np.float32),
        seed=np.array([state.seed for state in states], np.uint64),
        position=np.array([state.position for state in states], np.uint64),
        num_logprobs=np.array([-1 if p.logprobs is None else min(p.logprobs, vocab) for p in params], np.int32),
        seen_start=seen_start,
        seen_ids=seen_ids,
        seen_counts=_joined([state.seen_counts for state in states], _NO_IDS),
        bias_start=bias_start,
        bias_ids=bias_ids,
        bias_values=_joined([state.bias_values for state in states], _NO_VALUES),
        banned_start=banned_start,
        banned_ids=banned_ids,
    )
    _check_status(status, states)
    chosen = token_ids.tolist()
    return [
        Sampled(
            chosen[row],
            None
            if p.logprobs is None
            else TokenLogprob(
                chosen[row],
                float(logprobs[row]),
                tuple(zip(top_ids[row, : p.logprobs].tolist(), top_logprobs[row, : p.logprobs].tolist(), strict=True)),
            ),
        )
        for row, p in enumerate(params)
    ]


def _joined(parts: Sequence[NDArray[_Number]], empty: NDArray[_Number]) -> NDArray[_Number]:
    filled = [part for part in parts if len(part)]
    return np.concatenate(filled) if filled else empty


def _ragged(parts: Sequence[NDArray[np.int32]]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return (start [R+1], joined ids): row r owns `ids[start[r]:start[r + 1]]`."""
    start: NDArray[np.int64] = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=start[1:])
    return start, _joined(parts, _NO_IDS)


def _check_ids(ids: Iterable[int] | NDArray[np.integer], vocab_size: int, param: str) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(f"{param}: token id {token} is outside the vocabulary of {vocab_size}", param=param)


def _check_status(status: NDArray[np.uint8], states: Sequence[SamplingState]) -> None:
    if not status.any():
        return
    row = int(np.flatnonzero(status)[0])
    what = {
        _native.STATUS_NAN: "the logits contain NaN",
        _native.STATUS_EMPTY: "every token is masked out",
    }[int(status[row])]
    raise EngineError(f"row {row} of {len(states)} (output position {states[row].position}): {what}")
