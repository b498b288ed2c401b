"""Whose work a step is, and who gets a token of it."""

from __future__ import annotations

from typing import NamedTuple

from optimc_runtime.active_request import ActiveRequest
from optimc_runtime.sampler import SamplingState
from optimc_runtime.step import Work
from optimc_runtime.structured.grammar import GrammarState


class StepBatch(NamedTuple):
    """A step's requests and how they are sampled: kept while the scheduler hands out the same work."""

    work: tuple[Work, ...]
    requests: tuple[ActiveRequest, ...]
    """Of `work`, in its order."""
    num_rows: int
    """Rows of logits the step is asked for."""
    rows: list[int]
    """Those of them to sample from: the last of each sequence that wants a token."""
    places: list[int]
    """Whose they are: index into `requests`."""
    states: list[SamplingState]
    """How they are to be sampled."""
    num_decodes: int
    """Sequences that compute one token, or a tree behind it, and get one or more; also if it is the end of a prompt."""
    wants_hidden: bool
    """Whether one of the requests does."""
    grammars: list[GrammarState | None]
    """What those at `places` follow."""
    has_grammars: bool
    """Whether one of them follows any."""


NO_BATCH = StepBatch((), (), 0, [], [], [], 0, False, [], False)


def make_batch(work: tuple[Work, ...], requests: tuple[ActiveRequest, ...]) -> StepBatch:
    """Return the batch of a step's work, which is that of `requests`."""
    rows: list[int] = []
    places: list[int] = []
    states: list[SamplingState] = []
    grammars: list[GrammarState | None] = []
    num_rows = num_decodes = 0
    wants_hidden = False
    for place, (item, request) in enumerate(zip(work, requests, strict=True)):
        num_rows += item.num_logits
        wants_hidden = wants_hidden or request.on_hidden is not None
        if request.sampling is not None and _gives_token(item):
            rows.append(num_rows - 1)
            places.append(place)
            states.append(request.sampling)
            grammars.append(request.grammar)
            num_decodes += item.num_tokens == 1 or item.tree is not None
    has_grammars = any(grammar is not None for grammar in grammars)
    return StepBatch(work, requests, num_rows, rows, places, states, num_decodes, wants_hidden, grammars, has_grammars)


def _gives_token(item: Work) -> bool:
    """Return whether a token follows what is computed: a sequence whose every position is asked for has rows of logits
    before its prompt is complete, and one that only scores its prompt wants none at all."""
    sequence = item.sequence
    if item.num_logits == 0 or not sequence.wants_token:
        return False
    return item.tree is not None or sequence.num_computed + item.num_tokens == sequence.num_tokens
