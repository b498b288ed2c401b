"""What kind of thing keeps a family of requests from sharing its text, and what to change so that it no longer does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any, Literal

from optimc.measure.prefix.alignment import Alignment, Gap
from optimc.measure.prefix.patterns import changing_at
from optimc.measure.prefix.rendered import Rendered
from optimc.measure.prefix.span import TEMPLATE

Kind = Literal["whitespace", "tool_order", "key_order", "timestamp", "id", "user_before_shared", "template_drift"]

EDITS: Mapping[Kind, str] = {
    "whitespace": "write {path} the same each time: one form of whitespace, quotes and accents (NFC)",
    "tool_order": "send the tools in one order: sort them by name",
    "key_order": "write the JSON in {path} with its keys in one order (sort_keys)",
    "timestamp": "move the time in {path} behind the shared text, or round it to the day",
    "id": "move the id in {path} behind the shared text, or leave it out",
    "user_before_shared": "move what differs in {path} behind the shared text",
    "template_drift": "render all requests with one chat template: what it adds around the messages differs (a date, "
    "a second BOS, another opening)",
}
"""One sentence per kind; {path} is the field."""

MAJORITY = 0.6
EXAMPLE_CHARS = 40
_LEAD_CHARS = 12
_CLASSIFIED = 64
"""Differences of one place that are looked at: their kind is a matter of majority."""
_PLACE_SLACK = 40
_AGAIN_CHARS = 8
"""Characters in common within a difference that end one part of it and begin the next."""
_SHORT_CHARS = 600


@dataclass(frozen=True, slots=True)
class Killer:
    """One reason, over all requests of the traffic. Tokens are those that would have been cached without it."""

    kind: Kind
    path: str
    first_index: int
    """Token at which the example differs."""
    example_a: str
    example_b: str
    requests: int
    """Requests that differ there."""
    tokens_lost: float
    seconds_lost: float | None
    edit: str

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON; tokens are whole numbers."""
        seconds = None if self.seconds_lost is None else round(self.seconds_lost, 3)
        return {
            "kind": self.kind,
            "path": self.path,
            "first_token": self.first_index,
            "examples": [self.example_a, self.example_b],
            "requests": self.requests,
            "tokens_lost": round(self.tokens_lost),
            "seconds_lost": seconds,
            "edit": self.edit,
        }


@dataclass(slots=True)
class Place:
    """Where members of one family differ from its text: characters `start` to `end` of that."""

    path: str
    reordered: bool
    start: int
    end: int
    gaps: list[tuple[int, Gap]] = field(default_factory=list)
    """With the member's index."""
    kinds: tuple[tuple[Kind, str], ...] = ()
    """What is to be fixed there, with its path; nothing if no kind has a majority."""


def find_places(
    requests: Sequence[Rendered], reference: Rendered, alignments: Mapping[int, Alignment], *, now_s: float
) -> list[Place]:
    """Return the places of a family at which its members differ, with the kinds that most of them have there."""
    places = _places(requests, reference, alignments)
    for place in places:
        if any(gap.crosses_turns for _, gap in place.gaps) and len(place.gaps) < MAJORITY * len(alignments):
            continue
        step = max(1, len(place.gaps) // _CLASSIFIED)
        looked_at = place.gaps[::step]
        found: Counter[tuple[Kind, str]] = Counter()
        for index, gap in looked_at:
            found.update(set(classify(reference, requests[index], gap, now_s=now_s)))
        by_kind: Counter[Kind] = Counter()
        for (kind, _), count in found.items():
            by_kind[kind] += count
        place.kinds = tuple(
            (kind, max((key for key in found if key[0] == kind), key=lambda key: found[key])[1])
            for kind, count in by_kind.items()
            if count >= MAJORITY * len(looked_at)
        )
    return places


def _places(requests: Sequence[Rendered], reference: Rendered, alignments: Mapping[int, Alignment]) -> list[Place]:
    gaps = [
        (_path_of(reference, requests[index], gap), gap, index)
        for index, alignment in alignments.items()
        for gap in alignment.gaps
    ]
    places: list[Place] = []
    last: dict[tuple[str, bool], Place] = {}
    for path, gap, index in sorted(gaps, key=lambda item: (item[1].ref_start, item[1].ref_end, item[2])):
        # What is written in another order begins to differ anywhere: all tools are one place, as is each other field.
        in_tools = bool(gap.reordered) and path.startswith("tools")
        key = ("tools" if in_tools else "/".join(gap.reordered) + path, bool(gap.reordered))
        place = last.get(key)
        if place is None or not (gap.reordered or gap.ref_start <= place.end + _PLACE_SLACK):
            place = last[key] = Place(path, bool(gap.reordered), gap.ref_start, gap.ref_end)
            places.append(place)
        place.end = max(place.end, gap.ref_end)
        place.gaps.append((index, gap))
    return places


def classify(reference: Rendered, own: Rendered, gap: Gap, *, now_s: float) -> list[tuple[Kind, str]]:
    """Return what the two sides of a difference are, in order: a time beside an id are two things."""
    if gap.reordered:
        path = _path_of(reference, own, gap)
        return [(kind, path) for kind in gap.reordered]
    kinds: list[tuple[Kind, str]] = []
    a, b = reference.text, own.text
    at, place = gap.ref_start, gap.own_start
    while at < gap.ref_end or place < gap.own_end:
        if at < gap.ref_end and place < gap.own_end and a[at] == b[place]:
            at, place = at + 1, place + 1
            continue
        ends = [_behind_space(a, at, gap.ref_end), _behind_space(b, place, gap.own_end)]
        if ends != [at, place]:
            at, place = ends
            continue
        sides = [(reference, at)] * (at < gap.ref_end) + [(own, place)] * (place < gap.own_end)
        spans = [rendered.span_at(char) for rendered, char in sides]
        if all(span.path == TEMPLATE for span in spans):
            kinds.append(("template_drift", TEMPLATE))
            ends = [reference.span_at(at).end, own.span_at(place).end]
            at = ends[0] if at < gap.ref_end else at
            place = ends[1] if place < gap.own_end else place
            continue
        path = next(span.path for span in spans if span.path != TEMPLATE)
        for kind in ("timestamp", "id"):
            ours, theirs = (changing_at(text, char, kind, now_s=now_s) for text, char in ((a, at), (b, place)))
            if ours is not None and theirs is not None and max(ours[1] - at, theirs[1] - place) > 0:
                kinds.append((kind, path))
                at, place = ours[1], theirs[1]
                break
        else:
            kinds.append(("user_before_shared", path))
            mine, yours = a[at : min(gap.ref_end, at + _SHORT_CHARS)], b[place : min(gap.own_end, place + _SHORT_CHARS)]
            blocks = SequenceMatcher(None, mine, yours, autojunk=False).get_matching_blocks()
            again = next((block for block in blocks if block.size >= _AGAIN_CHARS), None)
            if again is None:
                break
            at, place = at + again.a, place + again.b
    return kinds


def _behind_space(text: str, char: int, end: int) -> int:
    while char < end and text[char].isspace():
        char += 1
    return char


def examples(reference: Rendered, own: Rendered, gap: Gap) -> tuple[str, str]:
    """Return what both have at a difference, 40 characters each, from a little before it."""
    return _excerpt(reference, gap.ref_start), _excerpt(own, gap.own_start)


def _excerpt(rendered: Rendered, char: int) -> str:
    if rendered.starts is None and not rendered.is_estimated:
        return " ".join(map(str, rendered.units[char : char + 8].tolist()))[:EXAMPLE_CHARS]
    start = max(rendered.span_at(char).start, char - _LEAD_CHARS)
    return rendered.text[start : start + EXAMPLE_CHARS]


def _path_of(reference: Rendered, own: Rendered, gap: Gap) -> str:
    """Return the field a difference lies in: the template only if both sides are the template's."""
    if "tool_order" in gap.reordered:
        return "tools"
    sides = [(reference, gap.ref_start)] * (gap.ref_start < gap.ref_end) + [(own, gap.own_start)]
    paths = [rendered.span_at(char).path for rendered, char in sides]
    return next((path for path in paths if path != TEMPLATE), TEMPLATE)
