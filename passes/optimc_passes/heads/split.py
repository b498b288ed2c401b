"""Which samples are trained on, and which are kept to measure with: whole conversations, never parts of one."""

from __future__ import annotations

from typing import NamedTuple

from optimc_passes.heads.samples import Samples

_KEY_TOKENS = 16
"""A sample that begins like one trained on says nothing about others."""


class Split(NamedTuple):
    """Numbers of samples."""

    training: tuple[int, ...]
    heldout: tuple[int, ...]


def split_samples(samples: Samples, share: float) -> Split:
    """Set apart every so many-th sample of each kind, at least one where there are two.

    Those that begin with the same tokens as one that stays are used for nothing.
    """
    every = max(2, round(1 / share))
    training: list[int] = []
    apart: list[int] = []
    for kind in dict.fromkeys(samples.kinds):
        numbers = [index for index, other in enumerate(samples.kinds) if other == kind]
        taken = set(numbers[every // 2 :: every]) or set(numbers[1::2][:1])
        apart += [index for index in numbers if index in taken]
        training += [index for index in numbers if index not in taken]
    known = {_opening(samples, index) for index in training}
    return Split(tuple(training), tuple(index for index in apart if _opening(samples, index) not in known))


def _opening(samples: Samples, index: int) -> tuple[int, ...]:
    rows = samples.rows(index)
    return tuple(samples.tokens[rows.start : min(rows.stop, rows.start + _KEY_TOKENS)].tolist())
