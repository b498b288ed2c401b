"""The body of `POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator, WithJsonSchema

from optimc.errors import RequestError
from optimc_runtime.request import MAX_LOGPROBS
from optimc_runtime.server.protocol.generation import GenerationFields
from optimc_runtime.server.protocol.parse import Unsupported

DEFAULT_MAX_TOKENS = 16
"""What this endpoint's specification says, short as it is."""

MAX_PROMPTS = 10_000
"""Each is checked while the streams of others stand still; a server gives far fewer answers per request."""

Prompt = str | list[int]

_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"type": "string"}},
        _IDS,
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _IDS},
    ]
}


def _prompts(value: object) -> list[Prompt]:
    """Normalize the four forms of `prompt` to a list of prompts.

    Written out because a generic union check reports one error per element and form, and a body may hold millions.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        kinds = set(map(type, value))
        if kinds == {int}:
            return [value]
        if kinds in ({str}, {list}) and len(value) > MAX_PROMPTS:
            raise ValueError(f"holds {len(value):,} prompts; at most {MAX_PROMPTS:,} are taken")
        if kinds == {str} or (kinds == {list} and all(prompt and set(map(type, prompt)) == {int} for prompt in value)):
            return value
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")


class CompletionRequest(GenerationFields):
    """One or more prompts to continue."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **GenerationFields.unsupported,
        "suffix": Unsupported("insertion is not implemented", ("",)),
    }

    prompt: Annotated[list[Any], PlainValidator(_prompts), WithJsonSchema(PROMPT_SCHEMA)]
    """A prompt or a list of prompts, each text or token ids."""
    max_tokens: int | None = Field(default=None, ge=0)
    """0 is for `echo`: it asks for the prompt alone."""
    echo: bool = False
    """Begin every choice with its prompt, and with `logprobs` report the prompt's tokens too."""
    best_of: int | None = None
    """The same as `n`, or absent: all choices are returned."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    def token_limit(self) -> int | None:
        """Return the most output tokens."""
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens must be at least 1; 0 is for echo=true", param="max_tokens")
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def logprob_count(self) -> int | None:
        """Return `logprobs`."""
        if self.best_of is not None and self.best_of != self.n:
            raise RequestError(
                f"best_of {self.best_of} is not supported: all n={self.n} choices are returned", param="best_of"
            )
        return self.logprobs

    def reports_prompt(self) -> bool:
        """Return whether `echo` comes with `logprobs`."""
        return self.echo and self.logprobs is not None
