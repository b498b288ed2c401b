"""How many tokens of prompts a step may compute while others wait for their next token.

A step with a chunk takes longer than a plain one, and everybody who is being answered waits for it. So chunks are cut
to what a step has time for: `gap_factor` times what a plain step of as many sequences takes. Both that and what a token
of a chunk costs are measured, all the time.
"""

from __future__ import annotations

FLOOR_S = 0.015
"""Shared among those who decode: a single one does not mind a step this long, and its steps are so short that twice
their time would mean prompts computed by the token."""
LEAST_TOKENS = 8
"""Prompts always get on by this much."""
MOST_UNMEASURED = 64
"""After so many answers without a plain step of as many sequences, one is asked for."""
SMOOTHING = 0.25
"""Share of the newest value in running means."""
LITTLE, MUCH = 1.5, 2.0
"""Times what is believed, up or down, that a single measurement can count for: more where that makes chunks smaller.
On a machine that does other things too, means without such bounds would be of its hiccups."""
FIRST_SHARE = 4
"""Tokens believed to take as long as a plain step before any chunk was measured: too few, so that chunks grow."""


class ChunkBudget:
    """Learns from steps without guesses; never asked while nobody decodes."""

    def __init__(self, gap_factor: float, *, floor_s: float = FLOOR_S, least_tokens: int = LEAST_TOKENS) -> None:
        assert gap_factor > 1
        self._gap_factor = gap_factor
        self._floor_s = floor_s
        self._least_tokens = least_tokens
        self._plain_s: dict[int, float] = {}
        """By number of sequences that decode, in powers of two."""
        self._unmeasured: dict[int, int] = {}
        """Answers since the last plain step, by the same."""
        self._token_s: float | None = None
        """What one more token of a chunk costs."""

    def tokens(self, num_decodes: int) -> int:
        """Return how many tokens of prompts to compute beside `num_decodes` decoding sequences; 0 when a plain step is
        to be measured."""
        assert num_decodes > 0
        bucket = num_decodes.bit_length()
        unmeasured = self._unmeasured.get(bucket, MOST_UNMEASURED)
        self._unmeasured[bucket] = unmeasured + 1
        if unmeasured >= MOST_UNMEASURED:
            self._unmeasured[bucket] = 0
            return 0
        plain_s = self._plain_s.get(bucket)
        if plain_s is None:  # the step asked for has failed
            return self._least_tokens
        token_s = plain_s / FIRST_SHARE if self._token_s is None else self._token_s
        limit_s = max(self._gap_factor * plain_s, self._floor_s / num_decodes)
        return max(self._least_tokens, int((limit_s - plain_s) / token_s))

    def learn(self, num_decodes: int, chunk_tokens: int, execute_s: float) -> None:
        """A step of `num_decodes` decoding sequences and `chunk_tokens` of prompts has taken `execute_s`."""
        bucket = num_decodes.bit_length()
        if chunk_tokens == 0:
            self._unmeasured[bucket] = 0
            self._plain_s[bucket] = _mean(self._plain_s.get(bucket), execute_s, down=MUCH, up=LITTLE)
        elif num_decodes == 0:
            if self._token_s is None:
                self._token_s = execute_s / chunk_tokens
        elif (plain_s := self._plain_s.get(bucket)) is not None:
            believed_s = plain_s / FIRST_SHARE if self._token_s is None else self._token_s
            self._token_s = _mean(believed_s, (execute_s - plain_s) / chunk_tokens, down=LITTLE, up=MUCH)


def _mean(believed: float | None, measured: float, *, down: float, up: float) -> float:
    """Return the running mean of positive values, each taken for at least `believed / down` and at most `believed *
    up`."""
    if believed is None:
        return measured
    measured = min(max(measured, believed / down), believed * up)
    return believed + SMOOTHING * (measured - believed)
