"""The report: what was cached of the traffic's prompts, what could have been, and what stood in between.

A request counts as cached what its log says, or else what a cache would have answered had each request been done
before the next one came. What could be is that same cache over the prompts after the edits.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from optimc.errors import ConfigError, Fault, RequestError
from optimc.measure.load.traffic import TrafficLine
from optimc.measure.prefix.alignment import Alignment, Gap, Reference
from optimc.measure.prefix.cache_model import simulate
from optimc.measure.prefix.edited import Edited, edit_family
from optimc.measure.prefix.families import Family, find_families
from optimc.measure.prefix.killers import EDITS, Killer, Kind, Place, examples, find_places
from optimc.measure.prefix.rendered import Rendered, render
from optimc.measure.prefix.shape import check_shapes
from optimc.measure.prefix.trie import Units, longest_earlier_prefixes

FORMAT = 1
MIN_REQUESTS = 3
MIN_SHARE, MIN_TOKENS = 0.01, 1000
"""A killer costs at least this share of all prompt tokens, or so many tokens."""
_RATE_TOKENS, _RATE_REQUESTS = 64, 10
"""Computed prompt tokens of a request, and such requests, that it takes to tell the speed of prefill from times."""

Source = Literal["logged", "simulated", "partly logged"]
RateSource = Literal["given", "from the log's times to the first token, waiting included"]


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """Figures over all requests; tokens are estimates where `is_estimated`."""

    requests: int
    prompt_tokens: int
    is_estimated: bool
    block_tokens: int
    was_tokens: float
    was_source: Source
    could_be_tokens: float
    """With room for everything."""
    kv_tokens: int | None
    could_be_pool_tokens: float | None
    """With `kv_tokens` of room."""
    prefill_tokens_per_s: float | None
    rate_source: RateSource | None
    killers: tuple[Killer, ...]
    """The most expensive first."""
    notes: tuple[str, ...] = ()

    def share(self, tokens: float) -> float:
        """Return tokens as a share of all prompt tokens, 0..1."""
        return tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def redacted(self) -> PrefixReport:
        """Return the report without a word of anybody's prompt."""
        return replace(self, killers=tuple(replace(each, example_a="", example_b="") for each in self.killers))

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON, all killers with it; shares lie in 0..1."""
        pool = self.could_be_pool_tokens
        return {
            "format": FORMAT,
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "is_estimated": self.is_estimated,
            "block_tokens": self.block_tokens,
            "was": {
                "tokens": round(self.was_tokens),
                "share": round(self.share(self.was_tokens), 4),
                "source": self.was_source,
            },
            "could_be": {"tokens": round(self.could_be_tokens), "share": round(self.share(self.could_be_tokens), 4)},
            "could_be_with_pool": None
            if pool is None
            else {"tokens": round(pool), "share": round(self.share(pool), 4), "kv_tokens": self.kv_tokens},
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "prefill_source": self.rate_source,
            "killers": [killer.to_json() for killer in self.killers],
            "notes": list(self.notes),
        }

    def table(self, top: int = 10) -> str:
        """Return the report as text."""
        about = "about " if self.is_estimated else ""
        lines = [
            f"{self.requests:,} requests, {about}{self.prompt_tokens:,} prompt tokens, blocks of {self.block_tokens}",
            f"cached: {self.share(self.was_tokens):.1%} was ({self.was_source}), "
            f"{self.share(self.could_be_tokens):.1%} could be{self._pool_words()}",
        ]
        if not self.killers:
            lines.append("nothing found that keeps requests from sharing their prefix")
        for number, killer in enumerate(self.killers[:top], 1):
            seconds = "" if killer.seconds_lost is None else f", {killer.seconds_lost:,.1f} s of prefill"
            lines += [
                "",
                f"{number}. {killer.kind} in {killer.path}, from token {killer.first_index:,}: "
                f"{killer.requests:,} requests, {about}{killer.tokens_lost:,.0f} tokens lost{seconds}",
            ]
            if killer.example_a or killer.example_b:
                lines += [f"   {killer.example_a!r}", f"   {killer.example_b!r}"]
            lines.append(f"   edit: {killer.edit}")
        if len(self.killers) > top:
            lines += ["", f"{len(self.killers) - top} more; --top shows them"]
        lines += ["", *(f"note: {note}" for note in self._notes())]
        return "\n".join(lines).rstrip()

    def _pool_words(self) -> str:
        if self.could_be_pool_tokens is None:
            return ""
        return f" ({self.share(self.could_be_pool_tokens):.1%} with a pool of {self.kv_tokens:,} tokens)"

    def _notes(self) -> Iterable[str]:
        if self.is_estimated:
            yield "tokens are estimated, four characters each where the log does not count them; --plan counts them"
        if self.prefill_tokens_per_s is not None and self.killers:
            yield f"prefill at {self.prefill_tokens_per_s:,.0f} tokens/s ({self.rate_source})"
        yield from self.notes


def prefix_report(
    lines: Iterable[TrafficLine],
    *,
    rendering: Callable[[TrafficLine], Rendered | None] = render,
    block_tokens: int = 16,
    kv_tokens: int | None = None,
    prefill_tokens_per_s: float | None = None,
    now_s: float | None = None,
) -> PrefixReport:
    """Return what became of the prefixes of these requests, in order of arrival. Raises ConfigError if none of them
    says what was asked, or for messages and tools of a shape that no API has.

    `kv_tokens` is what the KV pool holds; `now_s`, seconds since the epoch, tells times from other numbers.
    """
    lines = list(lines)
    check_shapes(lines)
    requests, notes = _rendered(lines, rendering)
    traffic = _Traffic(requests, block_tokens, kv_tokens)
    rate, rate_source = _rate(requests, prefill_tokens_per_s)
    found = _find(traffic, time.time() if now_s is None else now_s)
    killers, after = _judged(traffic, found, rate)
    pool = None if kv_tokens is None else traffic.cached(after, kv_tokens)
    return PrefixReport(
        requests=len(requests),
        prompt_tokens=traffic.prompt_tokens,
        is_estimated=any(request.is_estimated for request in requests),
        block_tokens=block_tokens,
        was_tokens=sum(traffic.was),
        was_source=traffic.source,
        could_be_tokens=sum(map(max, traffic.was, traffic.cached(after, None))),
        kv_tokens=kv_tokens,
        could_be_pool_tokens=None if pool is None else sum(map(max, traffic.was, pool)),
        prefill_tokens_per_s=rate,
        rate_source=rate_source,
        killers=tuple(killers),
        notes=tuple(notes),
    )


class _Traffic:
    """All requests, with what was cached of each, in tokens."""

    def __init__(self, requests: Sequence[Rendered], block_tokens: int, kv_tokens: int | None) -> None:
        self.requests = requests
        self.block_tokens = block_tokens
        self.prompt_tokens = sum(request.prompt_tokens for request in requests)
        self.units = [request.units for request in requests]
        self.unlimited = self.cached(self.units, None)
        simulated = self.unlimited if kv_tokens is None else self.cached(self.units, kv_tokens)
        logged = [request.line.cached_tokens for request in requests]
        self.was = [float(said) if said is not None else model for said, model in zip(logged, simulated, strict=True)]
        counts = sum(said is not None for said in logged)
        self.source: Source = "logged" if counts == len(logged) else "partly logged" if counts else "simulated"

    def cached(self, units: Sequence[Units], kv_tokens: int | None) -> list[float]:
        """Return the tokens of each prompt that a cache would have held."""
        scales = [request.units_per_token for request in self.requests]
        hits = simulate(units, self.block_tokens, capacity_tokens=kv_tokens, units_per_token=scales)
        return [hit * request.tokens_per_unit for hit, request in zip(hits, self.requests, strict=True)]


@dataclass(frozen=True, slots=True)
class _Found:
    """A family with its places."""

    reference: int
    alignments: dict[int, Alignment]
    places: list[Place]


def _find(traffic: _Traffic, now_s: float) -> list[_Found]:
    requests = traffic.requests
    lengths, _ = longest_earlier_prefixes(traffic.units)
    shared = [request.char_at(length) for request, length in zip(requests, lengths, strict=True)]
    found = []
    for family in find_families(requests, shared):
        at = _reference(requests, family)
        reference = Reference(requests[at], traffic.block_tokens)
        alignments = {index: reference.align(requests[index]) for index in family.members}
        found.append(_Found(at, alignments, find_places(requests, requests[at], alignments, now_s=now_s)))
    return found


def _reference(requests: Sequence[Rendered], family: Family) -> int:
    """Return the member of median length, earliest of these: neither cut short nor with another's long history."""
    ordered = sorted(family.members, key=lambda index: (len(requests[index].text), index))
    return ordered[(len(ordered) - 1) // 2]


@dataclass(slots=True)
class _Tally:
    """What one kind in one field costs, over all families."""

    tokens: float = 0.0
    members: set[int] = field(default_factory=set)
    example: tuple[int, Rendered, Rendered, Gap] | None = None


def _judged(traffic: _Traffic, found: Sequence[_Found], rate: float | None) -> tuple[list[Killer], list[Units]]:
    """Return the killers that cost enough, and all prompts without them."""
    while True:
        after, edited = list(traffic.units), dict[int, Edited]()
        for each in found:
            reference = traffic.requests[each.reference]
            edited |= edit_family(traffic.requests, reference, each.alignments, each.places)
        for index, member in edited.items():
            after[index] = member.units
        could_be = traffic.cached(after, None)
        tallies: dict[tuple[Kind, str], _Tally] = {}
        for each in found:
            _count(traffic, each, edited, could_be, tallies)
        least = min(MIN_TOKENS, MIN_SHARE * traffic.prompt_tokens)
        dear = {
            key
            for key, tally in tallies.items()
            if tally.tokens >= least and len(tally.members) >= MIN_REQUESTS and tally.example is not None
        }
        kinds = {kind for each in found for place in each.places for kind in place.kinds}
        if kinds <= dear:
            break
        # What is not worth an edit stays in the way of what comes behind it.
        for each in found:
            for place in each.places:
                place.kinds = tuple(kind for kind in place.kinds if kind in dear) if _all(place, dear) else ()
    killers = [_killer(kind, path, tallies[kind, path], rate) for kind, path in dear]
    return sorted(killers, key=lambda killer: (-killer.tokens_lost, killer.kind, killer.path)), after


def _all(place: Place, dear: set[tuple[Kind, str]]) -> bool:
    return all(kind in dear for kind in place.kinds)


def _count(
    traffic: _Traffic,
    found: _Found,
    edited: dict[int, Edited],
    could_be: Sequence[float],
    tallies: dict[tuple[Kind, str], _Tally],
) -> None:
    for index in found.alignments:
        lost = could_be[index] - max(traffic.was[index], traffic.unlimited[index])
        gains = edited[index].gains
        whole = sum(gain for _, _, gain in gains)
        for place, gap, gain in gains:
            for kind in place.kinds:
                tally = tallies.setdefault(kind, _Tally())
                tally.members |= {index, found.reference}
                if lost > 0 and whole:
                    tally.tokens += lost * gain / whole / len(place.kinds)
                has_gap = bool(found.alignments[index].gaps)
                if has_gap and (tally.example is None or index < tally.example[0]):
                    tally.example = index, traffic.requests[found.reference], traffic.requests[index], gap


def _killer(kind: Kind, path: str, tally: _Tally, rate: float | None) -> Killer:
    assert tally.example is not None
    _, reference, own, gap = tally.example
    first = own.unit_at(gap.own_start) // own.units_per_token
    seconds = None if rate is None else tally.tokens / rate
    edit = EDITS[kind].format(path=path)
    return Killer(kind, path, first, *examples(reference, own, gap), len(tally.members), tally.tokens, seconds, edit)


def _rendered(
    lines: Iterable[TrafficLine], rendering: Callable[[TrafficLine], Rendered | None]
) -> tuple[list[Rendered], list[str]]:
    requests: list[Rendered] = []
    without = refused = 0
    for line in lines:
        try:
            rendered = rendering(line)
        except RequestError:
            refused += 1
            continue
        if rendered is None or not len(rendered.units):
            without += 1
        else:
            requests.append(rendered)
    if not requests:
        why = "no line says what was asked, only lengths"
        if refused:
            why = "the plan's chat template refuses all requests"
        raise ConfigError("traffic", [Fault("", why)])
    # A log is written as requests end; those without a time stay where they stand.
    requests.sort(key=lambda request: request.line.at_s or 0.0)
    notes = []
    if without:
        notes.append(f"{without:,} lines say nothing of what was asked and are left out")
    if refused:
        notes.append(f"{refused:,} requests are refused by the plan's chat template and are left out")
    return requests, notes


def _rate(requests: Sequence[Rendered], given: float | None) -> tuple[float | None, RateSource | None]:
    """Return how fast prompts are computed, tokens per second, and how it is known."""
    if given is not None:
        return given, "given"
    rates = [
        (line.prompt_tokens - line.cached_tokens) / line.ttft_s
        for line in (request.line for request in requests)
        if line.prompt_tokens is not None and line.cached_tokens is not None and line.ttft_s
        and line.prompt_tokens - line.cached_tokens >= _RATE_TOKENS
    ]  # fmt: skip
    if len(rates) < _RATE_REQUESTS:
        return None, None
    return statistics.median(rates), "from the log's times to the first token, waiting included"
