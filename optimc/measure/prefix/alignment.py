"""Where a request leaves the text that its family shares, and where it comes back to it.

Both texts are walked along side by side, folded. At a difference, what is known to be the same in another order
(tools, keys of JSON) is stepped over; otherwise the walk goes on at the next two blocks that both have. It ends where
there are none, and at a request's own last message: what differs from there on is nobody's fault.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from optimc.measure.prefix.folded import Folded, fold, window_hashes
from optimc.measure.prefix.rendered import CHARS_PER_TOKEN, Rendered
from optimc.measure.prefix.trie import common_prefix

Reordered = Literal["whitespace", "tool_order", "key_order"]
"""What two texts may differ in and still say the same."""

LETTERS_PER_CHAR = 0.8
"""Of ordinary text about a sixth is whitespace."""
_MOST_GAPS = 64
_MOST_TRIES = 32
_JSON_CHARS = 20_000


@dataclass(frozen=True, slots=True)
class Gap:
    """A difference: characters `ref_start` to `ref_end` of the family's text, `own_start` to `own_end` of the
    request's.

    With `reordered` both sides say the same, and would be alike if they were written alike; else the text has to go
    elsewhere.
    """

    ref_start: int
    ref_end: int
    own_start: int
    own_end: int
    reordered: tuple[Reordered, ...] = ()
    crosses_turns: bool = False
    """It begins in one turn of a conversation and ends in another: so do two conversations that happen to meet
    again."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """Of one request with its family's text: gaps in order, and the characters at which they part for good."""

    gaps: tuple[Gap, ...]
    ref_reach: int
    own_reach: int


class Reference:
    """The member of a family that the others are held against."""

    def __init__(self, rendered: Rendered, block_tokens: int) -> None:
        self.rendered = rendered
        per_token = 1 if rendered.starts is None and not rendered.is_estimated else CHARS_PER_TOKEN
        self.run = max(8, int(2 * block_tokens * per_token * (LETTERS_PER_CHAR if per_token > 1 else 1)))
        """Letters of two blocks: less in common is chance."""
        self._folded = fold(rendered.text)
        hashes = window_hashes(self._folded.codes, self.run)
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._places = hashes[order], order

    def align(self, own: Rendered) -> Alignment:
        """Return how `own` goes along with this text."""
        mine, theirs = self._folded, fold(own.text)
        hashes: NDArray[np.uint64] | None = None
        gaps: list[Gap] = []
        i = j = 0
        while len(gaps) < _MOST_GAPS:
            length = common_prefix(mine.codes[i:], theirs.codes[j:])
            gaps += self._rewritten(own, mine, theirs, i, j, length)
            i, j = i + length, j + length
            if i >= len(mine.codes) or j >= len(theirs.codes):
                break
            at, place = mine.place(i), theirs.place(j)
            if _is_last_turn(self.rendered, at) or _is_last_turn(own, place):
                break
            gap = self._same_otherwise(own, at, place)
            if gap is None:
                hashes = window_hashes(theirs.codes, self.run) if hashes is None else hashes
                meeting = self._meeting(hashes, i, j)
                if meeting is None or _tools_differ(self.rendered, own, at, place):
                    break
                ends = mine.place(meeting[0]), theirs.place(meeting[1])
                crosses = _crosses_turns(self.rendered, at, ends[0]) or _crosses_turns(own, place, ends[1])
                gap = Gap(at, ends[0], place, ends[1], crosses_turns=crosses)
                i, j = meeting
            else:
                i, j = mine.index(gap.ref_end), theirs.index(gap.own_end)
            gaps.append(gap)
        return Alignment(tuple(gaps), mine.place(i), theirs.place(j))

    def _rewritten(self, own: Rendered, mine: Folded, theirs: Folded, i: int, j: int, length: int) -> list[Gap]:
        """Return the stretch of a run of equal letters that is not equal as text, if it is long enough to matter."""
        ref_start, own_start = mine.place(i), theirs.place(j)
        ref_end, own_end = mine.place(i + length), theirs.place(j + length)
        ref_text, own_text = self.rendered.text[ref_start:ref_end], own.text[own_start:own_end]
        if ref_text == own_text:
            return []
        same = next((k for k, (a, b) in enumerate(zip(ref_text, own_text, strict=False)) if a != b), None)
        if same is None or length - (mine.index(ref_start + same) - i) < self.run:
            return []
        if _is_last_turn(self.rendered, ref_start + same) or _is_last_turn(own, own_start + same):
            return []
        return [Gap(ref_start + same, ref_end, own_start + same, own_end, ("whitespace",))]

    def _meeting(self, hashes: NDArray[np.uint64], i: int, j: int) -> tuple[int, int] | None:
        """Return the letters at which both have two blocks in common again: the next of the request's that the family's
        text has behind `i`."""
        ahead = hashes[j:]
        if not len(ahead) or not len(self._hashes):
            return None
        low = np.searchsorted(self._hashes, ahead)
        known = self._hashes[np.minimum(low, len(self._hashes) - 1)] == ahead
        for step in np.flatnonzero(known)[:_MOST_TRIES].tolist():
            high = np.searchsorted(self._hashes, ahead[step], side="right")
            places = self._places[low[step] : high]
            behind = places[places >= i]
            if len(behind):
                return int(behind.min()), j + step
        return None

    def _same_otherwise(self, own: Rendered, at: int, place: int) -> Gap | None:
        ref_path, own_path = self.rendered.span_at(at).path, own.span_at(place).path
        if ref_path.startswith("tools[") or own_path.startswith("tools["):
            kinds = tool_differences(self.rendered.line.tools, own.line.tools)
            if not kinds:
                return None
            return Gap(at, _end_of_tools(self.rendered), place, _end_of_tools(own), kinds)
        mine, theirs = _json_around(self.rendered, at), _json_around(own, place)
        for start, end, value in mine:
            for own_start, own_end, own_value in theirs:
                if value == own_value and at - start == place - own_start:
                    return Gap(at, end, place, own_end, ("key_order",))
        return None


def tool_differences(tools: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> tuple[Reordered, ...]:
    """Return in what the same tools are written differently; nothing if they are not the same tools."""
    canonical = [[json.dumps(tool, sort_keys=True) for tool in each] for each in (tools, others)]
    if sorted(canonical[0]) != sorted(canonical[1]):
        return ()
    kinds: list[Reordered] = ["tool_order"] if canonical[0] != canonical[1] else []
    written = [dict(zip(canonical[k], map(json.dumps, each), strict=True)) for k, each in enumerate((tools, others))]
    if written[0] != written[1]:
        kinds.append("key_order")
    return tuple(kinds)


def _tools_differ(ref: Rendered, own: Rendered, at: int, place: int) -> bool:
    """Whether the difference is that the two offer different tools: another application, as it were."""
    if not (ref.span_at(at).path.startswith("tools[") or own.span_at(place).path.startswith("tools[")):
        return False
    return _tool_names(ref) != _tool_names(own)


def _tool_names(rendered: Rendered) -> list[Any]:
    return [(tool.get("function") or {}).get("name") for tool in rendered.line.tools]


def _end_of_tools(rendered: Rendered) -> int:
    return max((span.end for span in rendered.spans if span.path.startswith("tools[")), default=0)


def _turn(path: str) -> int | None:
    """Return the index of the message a path lies in, None if it lies in none."""
    return int(path[9 : path.index("]")]) if path.startswith("messages[") else None


def _is_last_turn(rendered: Rendered, char: int) -> bool:
    """Whether the character belongs to the last of several messages, which is the user's own, or comes after it."""
    count = len(rendered.line.messages)
    if count < 2:
        return False
    if _turn(rendered.span_at(char).path) == count - 1:
        return True
    last = next((span for span in reversed(rendered.spans) if _turn(span.path) is not None), None)
    return last is not None and _turn(last.path) == count - 1 and char >= last.end


def _crosses_turns(rendered: Rendered, start: int, end: int) -> bool:
    first, last = _turn(rendered.span_at(start).path), _turn(rendered.span_at(end).path)
    if first is None or last is None or first == last:
        return False
    roles = {rendered.line.messages[turn].get("role") for turn in (first, last)}
    return not roles & {"system", "developer"}


def _json_around(rendered: Rendered, char: int) -> list[tuple[int, int, Any]]:
    """Return the JSON objects, innermost first, that hold the character within one field: (start, end, value)."""
    span = rendered.span_at(char)
    text = rendered.text
    found: list[tuple[int, int, Any]] = []
    decoder = json.JSONDecoder()
    start = char
    for _ in range(8):
        start = text.rfind("{", max(span.start, char - _JSON_CHARS), start)
        if start < 0:
            break
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if end > char and end <= span.end:
            found.append((start, end, value))
    return found
