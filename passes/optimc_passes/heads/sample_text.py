"""Let the model write the text its heads are trained on: both sides of conversations, and continuations of prose.

A user's turn is what the model writes where a user's text would stand in its chat template (2406.08464); what it
answers to that is trained on, and nothing else. Everything follows from the seed and what is finished already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from optimc.progress import Progress
from optimc_passes.heads.config import HeadsData
from optimc_passes.heads.samples import Sample, SampleStore
from optimc_passes.heads.target_model import ChatFrame, TargetModel

CHAT, PROSE = "chat", "prose"
OPENING_TOKENS = 32
"""Tokens of calibration text that a continuation follows."""
LONGEST_TURN = 128
SHORTEST_TURN = 3
SHORTEST_SAMPLE = 8
"""Tokens below which an answer is not kept: heads look several tokens ahead."""
_ROUND = 8
"""Prompts of a round, per sequence that the model runs at once: what is lost when a build is killed."""
_BARREN = 3
"""Rounds without a single sample after which no more are tried."""
_KEY_TOKENS = 12
"""Turns that begin with the same tokens count as the same."""
_TURN_TEMPERATURE = _TURN_TOP_P = 0.9
"""Hotter, turns are gibberish in part, which nobody asks."""

_Round = Callable[[int, int], bool]
"""Runs round `number` with at most `count` prompts; False if there is nothing left to ask."""


class TextSampler:
    """Fills a store up to what was asked for."""

    def __init__(self, model: TargetModel, store: SampleStore, data: HeadsData, seed: int, progress: Progress) -> None:
        self._model, self._store, self._data, self._seed, self._progress = model, store, data, seed, progress
        self._total = 0

    def run(self, chat_tokens: int, openings: Sequence[NDArray[np.int32]], prose_tokens: int) -> None:
        """Sample conversations, then continuations of `openings`; fewer tokens where there is no more to be had."""
        frame = self._model.chat
        self._total = (chat_tokens if frame is not None else 0) + (prose_tokens if openings else 0)
        if frame is not None:
            self._fill(CHAT, chat_tokens, lambda number, count: self._chat_round(frame, number, count))
        if openings:
            self._fill(PROSE, prose_tokens, lambda number, count: self._prose_round(openings, number, count))
        self._tell()

    def _fill(self, kind: str, wanted: int, do_round: _Round) -> None:
        while (have := self._store.tokens_of(kind)) < wanted:
            pieces = self._store.pieces_of(kind)
            if len(pieces) >= _BARREN and not any(piece.lengths for piece in pieces[-_BARREN:]):
                return
            self._tell()
            kept = sum(len(piece.lengths) for piece in pieces)
            mean = have / kept if kept else self._data.max_tokens / 2
            most = _ROUND * self._model.max_seqs
            if not do_round(len(pieces), min(most, max(self._model.max_seqs, math.ceil((wanted - have) / mean)))):
                return

    def _tell(self) -> None:
        done = min(self._store.tokens_of(CHAT) + self._store.tokens_of(PROSE), self._total)
        self._progress(done, self._total, "sample")

    def _chat_round(self, frame: ChatFrame, number: int, count: int) -> bool:
        seen = {turn[:_KEY_TOKENS] for piece in self._store.pieces_of(CHAT) for turn in piece.openings}
        turns: list[tuple[int, ...]] = []
        ended = self._generate(
            [frame.before_user] * count,
            max_tokens=LONGEST_TURN,
            temperature=_TURN_TEMPERATURE,
            top_p=_TURN_TOP_P,
            seed=self._seed_of(CHAT, number, 0),
            stop_ids=frame.user_stop_ids,
        )
        for sample in ended:
            turn = tuple(int(token) for token in sample.tokens[:-1])
            stopped = len(sample.tokens) > 0 and int(sample.tokens[-1]) in frame.user_stop_ids
            if stopped and len(turn) >= SHORTEST_TURN and turn[:_KEY_TOKENS] not in seen:
                seen.add(turn[:_KEY_TOKENS])
                turns.append(turn)
        prompts = [[*frame.before_user, *turn, *frame.after_user] for turn in turns]
        self._write(CHAT, prompts, self._seed_of(CHAT, number, 1), turns)
        return True

    def _prose_round(self, openings: Sequence[NDArray[np.int32]], number: int, count: int) -> bool:
        before = sum(len(piece.openings) for piece in self._store.pieces_of(PROSE))
        order = np.random.default_rng([self._seed, 2]).permutation(len(openings))[before : before + count]
        if len(order) == 0:
            return False
        chosen = [[int(token) for token in openings[place]] for place in order]
        self._write(PROSE, chosen, self._seed_of(PROSE, number, 0), chosen)
        return True

    def _write(self, kind: str, prompts: Sequence[Sequence[int]], seed: int, openings: Sequence[Sequence[int]]) -> None:
        greedy = round(self._data.greedy * len(prompts))
        samples = []
        for some, temperature in ((prompts[:greedy], 0.0), (prompts[greedy:], self._data.temperature)):
            samples += self._generate(
                some,
                max_tokens=self._data.max_tokens,
                temperature=temperature,
                top_p=self._data.top_p,
                seed=seed,
                stop_ids=self._model.eos,
            )
        kept = [sample for sample in samples if len(sample.tokens) >= SHORTEST_SAMPLE]
        self._store.append(kind, kept, openings)

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        stop_ids: frozenset[int],
    ) -> list[Sample]:
        """Return what was generated, in the prompts' order."""
        found: dict[int, Sample] = {}

        def keep(index: int, tokens: NDArray[np.int64], hidden: NDArray[np.float32]) -> None:
            found[index] = Sample(tokens, hidden)

        self._model.generate(
            prompts,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop_ids=stop_ids,
            on_tokens=keep,
        )
        return [found[index] for index in range(len(prompts))]

    def _seed_of(self, kind: str, number: int, phase: int) -> int:
        entropy = [self._seed, (CHAT, PROSE).index(kind), number, phase]
        return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def openings_of(rows: Sequence[NDArray[np.int32]]) -> list[NDArray[np.int32]]:
    """Return the calibration text in pieces that continuations can follow."""
    starts = [(row, start) for row in rows for start in range(0, len(row) - OPENING_TOKENS + 1, OPENING_TOKENS)]
    return [row[start : start + OPENING_TOKENS] for row, start in starts]
