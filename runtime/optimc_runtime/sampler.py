"""Logits to tokens: one call per step for all its rows, in native code.

The order per row is fixed: repetition penalty, presence and frequency penalties, logit bias, min_tokens masking, what
a grammar rules out; then argmax if greedy, else temperature, top_k, top_p (of what top_k left), min_p, and one draw.
Equal logits are ordered by token id, lowest first, everywhere. Log-probabilities are those of the raw logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimc.errors import EngineError, OptimcError, RequestError
from optimc_runtime import _native
from optimc_runtime.request import SamplingParams, TokenLogprob

_UINT64 = 2**64 - 1


class Sampled(NamedTuple):
    """One row's choice."""

    token_id: int
    logprob: TokenLogprob | None
    """Present if the request asked for logprobs."""


class RowMasks(NamedTuple):
    """Which tokens rows of logits may give."""

    words: NDArray[np.uint32]
    """[M, ceil(V/32)] bit i % 32 of word i // 32 is token i's."""
    of_row: NDArray[np.int32]
    """[R] the row's mask, an index into `words`; -1: every token."""

    def at(self, row: int) -> RowMasks:
        """Return the masks of one row alone."""
        return RowMasks(self.words, self.of_row[row : row + 1])


class NothingToChooseError(EngineError):
    """A row of logits leaves no token."""


class SamplingState:
    """What sampling remembers of one sequence: parameters, output position and the tokens penalties look at.

    `stop_ids` are the ids that may not be chosen before `min_tokens`; `seed` is any 64-bit integer. Draws are a
    function of (seed, output position) alone: batch mates, preemption and threads do not change them, provided the
    state is kept across preemption and `accept` is called once per emitted token.

    All of it lives in `row`, in native code, so that a step hands over one object per row.

    Raises RequestError if logit_bias, or the prompt of a penalized request, names a token outside the vocabulary.
    """

    __slots__ = ("params", "row")

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] | NDArray[np.integer],
        stop_ids: frozenset[int],
        vocab_size: int,
        seed: int,
    ) -> None:
        self.params = params
        bias_ids = _checked_ids(tuple(params.logit_bias), vocab_size, "logit_bias")
        self.row = _native.RowState(
            vocab_size,
            temperature=params.temperature,
            top_k=min(params.top_k, vocab_size),
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            seed=seed & _UINT64,
            num_logprobs=-1 if params.logprobs is None else min(params.logprobs, vocab_size),
            bias_ids=bias_ids,
            bias_values=np.fromiter(params.logit_bias.values(), np.float32, len(bias_ids)),
            stop_ids=np.array(sorted(i for i in stop_ids if 0 <= i < vocab_size), np.int32),
            min_tokens=params.min_tokens,
        )
        if params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0:
            self.row.remember(_checked_ids(prompt_ids, vocab_size, "prompt"))

    def accept(self, token_id: int) -> None:
        """Record that `token_id` was emitted at the current output position."""
        self.row.accept(token_id)

    @property
    def position(self) -> int:
        """Output tokens accepted so far."""
        return int(self.row.position)

    @property
    def seen_ids(self) -> NDArray[np.int32]:
        """Distinct tokens of prompt and output, empty when no penalty needs them."""
        return np.asarray(self.row.seen_ids)

    @property
    def seen_counts(self) -> NDArray[np.int32]:
        """How often each of `seen_ids` stands in the output; 0 for tokens of the prompt only."""
        return np.asarray(self.row.seen_counts)


def sample(
    logits: NDArray[np.float32], states: Sequence[SamplingState], masks: RowMasks | None = None
) -> list[Sampled]:
    """Choose one token per row of `logits` [R, V] float32 for the R `states`, which are not changed.

    `logits` is only read. Raises EngineError naming the row if one holds a NaN or leaves no token to choose (then it
    is a NothingToChooseError).
    """
    token_ids, logprobs, failure = _native.sample_rows(
        np.ascontiguousarray(logits), [state.row for state in states], *(masks or ())
    )
    if failure is not None:
        raise _failure(*failure, states)
    if not logprobs:  # nobody asked for any
        return [Sampled(token_id, None) for token_id in token_ids]
    return [
        Sampled(token_id, None if report is None else TokenLogprob(token_id, report[0], tuple(report[1])))
        for token_id, report in zip(token_ids, logprobs, strict=True)
    ]


class TreeSamples(NamedTuple):
    """What was chosen in trees of guesses, per sequence."""

    token_ids: list[list[int]]
    """Emitted, the first from the root's row; accepted by the sequence's state already."""
    paths: list[list[int]]
    """Queries entered below the root: token_ids[s][n] was guessed by query paths[s][n]."""
    last_rows: list[int]
    """Rows of logits that gave the last tokens."""
    logprobs: list[tuple[TokenLogprob, ...]]
    """One per token if the sequence asked for them, else none."""
    failures: dict[int, OptimcError]
    """By index of a sequence: a row of its path leaves nothing to choose; what it emitted before means nothing."""

    def sampled(self, index: int) -> Sampled | None:
        """Return the choice for a sequence without a tree; None if it failed."""
        if index in self.failures:
            return None
        return Sampled(self.token_ids[index][0], self.logprobs[index][0] if self.logprobs[index] else None)


def sample_trees(
    logits: NDArray[np.float32],
    states: Sequence[SamplingState],
    first_rows: list[int],
    counts: list[int],
    parents: NDArray[np.int32],
    tokens: NDArray[np.int64],
    typical: tuple[float, float] = (0.0, 0.0),
    masks: RowMasks | None = None,
) -> TreeSamples:
    """Walk every sequence's tree: choose a token from the root's row of `logits` [R, V], go on at the child that
    guessed it, until none did or the token is a stop.

    Sequence s owns `counts[s]` rows from `first_rows[s]` on, the root's first. `parents` [R] are in rows counted from
    the sequence's first (the root's: -1), `tokens` [R] what each row's query guessed. Every emitted token is accepted
    by its sequence's state before the next one is chosen, so that all is as if `sample` had chosen them one by one: a
    guess decides how many tokens come of a step, never which. `typical` = (epsilon, delta) with epsilon > 0 instead
    takes guesses of sampled (not greedy) sequences that are likely enough (typical acceptance, 2401.10774): lossy.
    """
    token_ids, paths, last_rows, reports, statuses = _native.sample_trees(
        np.ascontiguousarray(logits),
        [state.row for state in states],
        first_rows,
        counts,
        parents,
        tokens,
        *typical,
        *(masks or ()),
    )
    failures: dict[int, OptimcError] = {
        index: _failure(0, status, states[index : index + 1]) for index, status in enumerate(statuses) if status
    }
    return TreeSamples(
        token_ids,
        paths,
        last_rows,
        [
            tuple(
                TokenLogprob(token_id, report[0], tuple(report[1]))
                for token_id, report in zip(mine, of_mine, strict=True)
                if report is not None
            )
            for mine, of_mine in zip(token_ids, reports, strict=True)
        ]
        if reports
        else [()] * len(token_ids),
        failures,
    )


def _checked_ids(ids: Sequence[int] | NDArray[np.integer], vocab_size: int, param: str) -> NDArray[np.int32]:
    given = np.asarray(ids)
    outside = given[(given < 0) | (given >= vocab_size)]
    if len(outside):
        raise RequestError(f"{param}: token id {outside[0]} is outside the vocabulary of {vocab_size}", param=param)
    return given.astype(np.int32)


def _failure(row: int, status: int, states: Sequence[SamplingState]) -> EngineError:
    where = f"row {row} of {len(states)} (output position {states[row].position})"
    if status == _native.STATUS_EMPTY:
        return NothingToChooseError(f"{where}: every token is masked out")
    assert status == _native.STATUS_NAN
    return EngineError(f"{where}: the logits contain NaN")
