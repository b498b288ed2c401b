"""Fields that `/v1/chat/completions` and `/v1/completions` share, and how they become SamplingParams."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, FailFast, Field, WithJsonSchema

from optimc.errors import RequestError
from optimc_runtime.request import (
    MAX_PRIORITY,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MIN_FACTOR,
    MIN_PRIORITY,
    SPECULATIONS,
    SamplingParams,
)
from optimc_runtime.server.protocol.parse import Body, Unsupported
from optimc_runtime.server.protocol.structured import StructuredFields

MAX_STOP_TOKEN_IDS = 256
MAX_SALT_CHARS = 256
MAX_BIASES = 10_000

DEFAULTABLE = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Fields a model may set defaults for. Limits, seeds and stops belong to the request alone."""

_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
STOP_SCHEMA = {"anyOf": [_STOP, {"type": "array", "maxItems": MAX_STOP_STRINGS, "items": _STOP}]}
BIAS_SCHEMA = {
    "type": "object",
    "maxProperties": MAX_BIASES,
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}
SPECULATION_SCHEMA = {"enum": [*SPECULATIONS, False]}


def _between(least: float, most: float) -> Any:
    """Say in the schema what SamplingParams checks, whose words the client gets."""
    return WithJsonSchema({"type": "number", "minimum": least, "maximum": most})


def _stop_strings(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _token_biases(value: object) -> object:
    """Turn JSON's string keys into token ids."""
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids to numbers")
    if len(value) > MAX_BIASES:
        raise ValueError(f"has {len(value):,} entries; at most {MAX_BIASES:,} are taken")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise ValueError(f"key {key[:20]!r} is not a token id")
        if type(bias) not in (int, float):
            raise ValueError(f"the bias of token {key} is not a number")
        biases[int(key)] = bias
    return biases


def _speculation(value: object) -> object:
    """False is the short way to say "off"."""
    return "off" if value is False else value


class StreamOptions(Body):
    """Options of a streamed answer."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "include_obfuscation": Unsupported("streams are not padded", (False,)),
    }

    include_usage: bool = False
    """Send token counts in one more chunk, whose `choices` is empty, before `[DONE]`."""


class GenerationFields(StructuredFields):
    """What to sample, how often, and how to send it."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "service_tier": Unsupported("there is one tier", ("auto", "default")),
        "use_beam_search": Unsupported("beam search is not implemented", (False,)),
        "length_penalty": Unsupported("beam search is not implemented", (1, 1.0)),
        "skip_special_tokens": Unsupported("special tokens never appear in text", (True,)),
        "include_stop_str_in_output": Unsupported("text ends before the stop string", (False,)),
        "prompt_logprobs": Unsupported("send echo=true with logprobs to /v1/completions"),
    }
    without_effect: ClassVar[frozenset[str]] = frozenset(
        {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    )

    model: str | None = None
    """Absent means the model that is served."""
    n: int = Field(default=1, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0})] = 0
    """No EOS, stop token or stop string before so many tokens."""
    temperature: Annotated[float, _between(0, 100)] = 1.0
    """0 takes the likeliest token every time."""
    top_p: Annotated[float, _between(MIN_FACTOR, 1)] = 1.0
    top_k: Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0})] = 0
    min_p: Annotated[float, _between(0, 1)] = 0.0
    repetition_penalty: Annotated[float, _between(MIN_FACTOR, 100)] = 1.0
    presence_penalty: Annotated[float, _between(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, _between(-2, 2)] = 0.0
    logit_bias: Annotated[dict[int, float], BeforeValidator(_token_biases), WithJsonSchema(BIAS_SCHEMA)] = Field(
        default_factory=dict
    )
    """Token ids to values added to their logits."""
    seed: int | None = None
    """64 bits. The same seed gives the same answer; of `n` choices the first, the others have seeds made from it."""
    stop: Annotated[list[str], FailFast(), BeforeValidator(_stop_strings), WithJsonSchema(STOP_SCHEMA)] = Field(
        default_factory=list
    )
    """The answer ends before the first of these; a special token, such as `<|im_end|>`, may be one."""
    stop_token_ids: Annotated[list[int], FailFast()] = Field(default_factory=list, max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool = False
    cache_salt: str = Field(default="", max_length=MAX_SALT_CHARS)
    """Requests share prefix-cache entries only with requests of the same salt."""
    return_token_ids: bool = False
    """Add `token_ids` to every choice."""
    priority: int = Field(default=0, ge=MIN_PRIORITY, le=MAX_PRIORITY)
    """Lower is sooner, among the requests of one API key; only where the server runs with `--policy priority`."""
    speculation: Annotated[str | None, BeforeValidator(_speculation), WithJsonSchema(SPECULATION_SCHEMA)] = None
    """Who guesses tokens ahead, if the server is not to choose; "off" or false: nobody. Answers stay the same."""

    @property
    def include_usage(self) -> bool:
        """Whether a streamed answer ends with token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @abstractmethod
    def token_limit(self) -> int | None:
        """Return the most output tokens; None means as many as the sequence limit leaves room for."""

    @abstractmethod
    def logprob_count(self) -> int | None:
        """Return how many alternatives per token are wanted; None means no log-probabilities at all."""

    def reports_prompt(self) -> bool:
        """Return whether log-probabilities of the prompt's tokens are wanted too."""
        return False

    def sampling(self, defaults: Mapping[str, Any], *, vocab_size: int) -> tuple[SamplingParams, ...]:
        """Return the parameters of each of the `n` choices. Raises RequestError naming the field at fault."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only for requests with stream=true", param="stream_options")
        limit = self.token_limit()
        if limit is not None and self.min_tokens > limit:
            raise RequestError(f"min_tokens {self.min_tokens} is above the token limit {limit}", param="min_tokens")
        for name in ("logit_bias", "stop_token_ids"):
            check_token_ids(getattr(self, name), vocab_size, name)
        chosen = {name: getattr(self, name) for name in DEFAULTABLE if name in self.model_fields_set}
        params = SamplingParams(
            **{**defaults, **chosen},
            max_tokens=limit,
            min_tokens=self.min_tokens,
            logit_bias=self.logit_bias,
            logprobs=self.logprob_count(),
            prompt_logprobs=self.reports_prompt(),
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            speculation=self.speculation,
        )
        return tuple(replace(params, seed=choice_seed(self.seed, choice)) for choice in range(self.n))


def choice_seed(seed: int | None, choice: int) -> int | None:
    """Return the seed of choice 0..n-1: the first has the request's own, so n=1 repeats it; the others are hashed."""
    if seed is None or choice == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest(), "little")


def check_token_ids(ids: Collection[int], vocab_size: int, param: str) -> None:
    """Raise RequestError unless every id is in 0..vocab_size-1."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        worst = min(ids) if min(ids) < 0 else max(ids)
        raise RequestError(f"{param}: token id {worst} is outside the vocabulary of {vocab_size}", param=param)
