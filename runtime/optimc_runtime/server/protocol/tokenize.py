"""The bodies of `POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Annotated

from pydantic import FailFast, Field

from optimc_runtime.server.protocol.chat import Messages
from optimc_runtime.server.protocol.parse import Body

MAX_TOKENS = 1 << 17
"""Turning more into text holds up everybody: whoever decodes keeps the interpreter meanwhile."""


class TokenizeRequest(Body):
    """A text, or a conversation as the model's template writes it."""

    model: str | None = None
    """Absent means the model that is served."""
    prompt: str | None = None
    messages: Messages = Field(default_factory=list)
    add_special_tokens: bool | None = None
    """Whether `prompt` gets what the tokenizer adds, such as a BOS; it does unless this is false."""


class DetokenizeRequest(Body):
    """Token ids."""

    model: str | None = None
    """Absent means the model that is served."""
    tokens: Annotated[list[int], FailFast()] = Field(max_length=MAX_TOKENS)
