"""A streamed completion of the OpenAI protocol, event by event, as an exchange."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeVar

from optimc.measure.exchange import Chunk, Exchange

NORMAL_FINISH = ("stop", "length")

T = TypeVar("T")


class CompletionStream:
    """Fills in an exchange from the data of stream events: tokens, times, and what is wrong with it."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._finish: str | None = None
        self._end_s: float | None = None
        self._usage: _Usage | None = None

    def read(self, data: str, now: float) -> None:
        """Take one event."""
        exchange = self._exchange
        if data == "[DONE]" or exchange.failure is not None:
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            exchange.fail(f"an event is not JSON: {data[:80]!r}", now)
            return
        if not isinstance(event, dict) or event.get("error"):
            exchange.fail(f"error event: {error_text(data.encode())}", now)
            return
        try:
            self._take(event, now)
        except ValueError as error:
            exchange.fail(f"an event is none of a completion ({error}): {data[:80]!r}", now)

    def _take(self, event: dict[str, Any], now: float) -> None:
        """Take an event's usage and texts. Raises ValueError for anything that the protocol does not have there."""
        exchange = self._exchange
        usage = event.get("usage")
        if usage:
            self._usage = _Usage.of(usage)
        for choice in _of_type(list, event.get("choices"), "choices") or ():
            fields = _of_type(dict, choice, "choice") or {}
            delta = _of_type(dict, fields.get("delta"), "delta") or {}
            text = _of_type(str, fields.get("text"), "text") or _of_type(str, delta.get("content"), "content")
            if text:
                exchange.answer_texts.append(text)
            # Tokens all the same, and waited for: what a model thinks, and the tools it calls.
            if text or any(delta.get(name) for name in ("reasoning_content", "reasoning", "tool_calls")):
                exchange.chunks.append(Chunk(now, None))
                self._end_s = now
            if fields.get("finish_reason") is not None:
                self._finish = str(fields["finish_reason"])
                self._end_s = now

    def close(self, now: float) -> None:
        """Judge the whole stream."""
        exchange = self._exchange
        if exchange.failure is None:
            exchange.end_s = self._end_s
        if self._usage is None:
            exchange.source = "estimate"
            exchange.output_tokens = len(exchange.chunks)
        else:
            exchange.source = "usage"
            exchange.output_tokens = self._usage.output_tokens
            exchange.prompt_tokens = self._usage.prompt_tokens
            exchange.cached_tokens = self._usage.cached_tokens
        if self._finish is None:
            exchange.fail("the stream ended without a finish reason", now)
        elif self._finish not in NORMAL_FINISH:
            exchange.fail(f"finish reason {self._finish}", now)
        elif exchange.output_tokens and not exchange.chunks:
            exchange.fail(f"claims {exchange.output_tokens} tokens, delivered no content", now)


@dataclass(frozen=True, slots=True)
class _Usage:
    """What the server counted. Raises ValueError for what is no count."""

    output_tokens: int
    prompt_tokens: int | None
    cached_tokens: int | None

    @classmethod
    def of(cls, usage: Any) -> _Usage:
        fields = _of_type(dict, usage, "usage") or {}
        details = _of_type(dict, fields.get("prompt_tokens_details"), "prompt_tokens_details") or {}
        return cls(
            _count(fields, "completion_tokens") or 0,
            _count(fields, "prompt_tokens"),
            _count(details, "cached_tokens"),
        )


def _of_type(kind: type[T], value: Any, name: str) -> T | None:
    """Return the value; None where the server has none."""
    if value is None:
        return None
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {type(value).__name__}, not {kind.__name__}")
    return value


def _count(fields: dict[str, Any], name: str) -> int | None:
    count = _of_type(int, fields.get(name), name)
    if isinstance(count, bool) or (count is not None and count < 0):
        raise ValueError(f"{name} is {count}")
    return count


def error_text(body: bytes) -> str:
    """Return the message of an OpenAI error object, else the start of the body."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:200]
    except (ValueError, LookupError, TypeError, RecursionError):
        return body[:200].decode("utf-8", errors="replace").strip() or "no message"
