"""The same requests after the edits: what a family shares comes first, what killed the prefix after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from optimc.measure.prefix.alignment import Alignment, Gap
from optimc.measure.prefix.killers import Place
from optimc.measure.prefix.rendered import Rendered
from optimc.measure.prefix.trie import Units


@dataclass(frozen=True, slots=True)
class Edited:
    """One request after the edits. `gains` says how many units each place kept out of reach."""

    units: Units
    gains: tuple[tuple[Place, Gap, float], ...]


def edit_family(
    requests: Sequence[Rendered], reference: Rendered, alignments: Mapping[int, Alignment], places: Sequence[Place]
) -> dict[int, Edited]:
    """Return every member of a family after the edits of `places`, those with kinds; the others stay in the way."""
    place_of = {(index, gap): place for place in places for index, gap in place.gaps}
    removed = _merged(
        (reference.unit_at(place.start), reference.unit_at(place.end))
        for place in places
        if place.kinds and not place.reordered
    )
    edited: dict[int, Edited] = {}
    for index, alignment in alignments.items():
        own = requests[index]
        ref_reach, own_reach = alignment.ref_reach, alignment.own_reach
        fixed: list[tuple[Place, Gap]] = []
        for gap in alignment.gaps:
            place = place_of[index, gap]
            if not place.kinds:
                ref_reach, own_reach = gap.ref_start, gap.own_start
                break
            fixed.append((place, gap))
        if not alignment.gaps:
            # The family's text itself: it loses what the others lose, by the same places.
            whole = [Gap(place.start, place.end, place.start, place.end) for place in places]
            fixed = [(place, gap) for place, gap in zip(places, whole, strict=True) if place.kinds]
        kept = _kept(removed, reference.unit_at(ref_reach))
        moved = [
            own.units[own.unit_at(gap.own_start) : own.unit_at(gap.own_end)]
            for place, gap in fixed
            if not place.reordered and alignment.gaps
        ]
        pieces = [reference.units[start:end] for start, end in kept]
        units = np.concatenate([*pieces, own.units[own.unit_at(own_reach) :], *moved])
        edited[index] = Edited(units, tuple(_gains(reference, removed, fixed, ref_reach)))
    return edited


def _gains(
    reference: Rendered, removed: Sequence[tuple[int, int]], fixed: Sequence[tuple[Place, Gap]], ref_reach: int
) -> Iterator[tuple[Place, Gap, float]]:
    """Yield what each place kept out of reach: text behind several of them is divided among these, as none alone would
    bring it back."""
    starts = [gap.ref_start if place.reordered else gap.ref_end for place, gap in fixed]
    before = [_length(_kept(removed, reference.unit_at(char))) for char in [*starts, ref_reach]]
    shares = [max(0, before[at + 1] - before[at]) / (at + 1) for at in range(len(fixed))]
    for at, (place, gap) in enumerate(fixed):
        yield place, gap, sum(shares[at:])


def _kept(removed: Sequence[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """Return the stretches of units before `end` that are not removed."""
    kept, at = [], 0
    for start, stop in removed:
        if start >= end:
            break
        kept.append((at, start))
        at = stop
    if at < end:
        kept.append((at, end))
    return kept


def _length(stretches: Sequence[tuple[int, int]]) -> int:
    return sum(end - start for start, end in stretches)


def _merged(stretches: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(stretches):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged
