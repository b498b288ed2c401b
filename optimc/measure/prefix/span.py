"""Which field of a request a stretch of its prompt comes from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

TEMPLATE = "template"
"""Path of what no field says: roles, marks between turns, a BOS, a date that the template writes."""


@dataclass(frozen=True, slots=True)
class Span:
    """Characters `start` to `end` of a prompt, and the path of their field, such as `messages[0].content`."""

    start: int
    end: int
    path: str


def covering(spans: Iterable[Span], length: int) -> tuple[Span, ...]:
    """Return spans that cover 0 to `length` without gap or overlap: what lies between is the template's, and of two
    that overlap the first stays. Neighbours of one path become one."""
    result: list[Span] = []

    def add(start: int, end: int, path: str) -> None:
        if result and result[-1].path == path and result[-1].end == start:
            result[-1] = Span(result[-1].start, end, path)
        elif end > start:
            result.append(Span(start, end, path))

    at = 0
    for span in sorted(spans, key=lambda span: span.start):
        if span.start < at:
            continue
        add(at, span.start, TEMPLATE)
        add(span.start, span.end, span.path)
        at = span.end
    add(at, length, TEMPLATE)
    return tuple(result)


def json_spans(value: Any, text: str, start: int, end: int, path: str) -> list[Span]:
    """Return the spans of JSON that `text` holds from `start` to `end`, written in any style: a scalar has its own
    path, a key that of its object, what stands between them `path`."""
    spans: list[Span] = []
    at = start
    for words, inner in _words(value, path):
        found = next((place for word in words if (place := text.find(word, at, end)) >= 0), None)
        if found is None:
            continue
        word = next(word for word in words if text.startswith(word, found))
        if found > at:
            spans.append(Span(at, found, path))
        at = found + len(word)
        spans.append(Span(found, at, inner))
    if end > at:
        spans.append(Span(at, end, path))
    return spans


def _words(value: Any, path: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield keys and scalars in order, each as JSON may spell it, with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield _spellings(key), path
            yield from _words(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _words(item, f"{path}[{index}]")
    else:
        yield _spellings(value), path


def _spellings(value: Any) -> tuple[str, ...]:
    plain = json.dumps(value, ensure_ascii=False)
    escaped = json.dumps(value)
    return (plain,) if plain == escaped else (plain, escaped)
