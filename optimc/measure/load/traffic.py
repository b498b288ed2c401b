"""Traffic that was recorded, or written by hand: one request per line of JSON. The only reader of such files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class TrafficLine:
    """One request. What the line does not say is None or empty."""

    number: int = 0
    """Line of the file, from 1."""
    at_s: float | None = None
    """When it arrived, seconds from the start of the server or trace."""
    request_id: str | None = None
    tenant: str | None = None
    endpoint: Literal["chat", "completions"] | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    """The conversation, as in the API."""
    tools: tuple[Mapping[str, Any], ...] = ()
    prompt: str | tuple[int, ...] | None = None
    """Text to be continued, or its token ids."""
    prompt_ids: tuple[int, ...] | None = None
    """Token ids of the whole rendered prompt."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    ttft_s: float | None = None
    max_tokens: int | None = None
    kind: str = ""
    """What sort of text it asks for."""
    hash_ids: tuple[int, ...] = ()
    """Mooncake: equal numbers stand for equal blocks of 512 tokens."""
