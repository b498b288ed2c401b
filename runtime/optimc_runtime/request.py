"""A request's life, as seen from outside the engine: what is asked, what comes back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, NewType

from optimc.errors import OptimcError, RequestError

RequestId = NewType("RequestId", str)

FinishReason = Literal["stop", "length", "abort", "error"]

SPECULATIONS = ("off", "auto", "medusa", "ngram", "draft")
"""What a request may ask of speculation."""

MAX_STOP_STRINGS = 4
MAX_LOGPROBS = 20
MAX_STOP_LENGTH = 256
MIN_PRIORITY, MAX_PRIORITY = -100, 100
MIN_FACTOR = 1e-6
"""Smallest top_p and repetition_penalty: the sampler computes in float32, where far smaller ones are 0."""


def _check(ok: bool, param: str, value: object, rule: str) -> None:
    if not ok:
        raise RequestError(f"{param} must be {rule}, got {value!r}", param=param)


@dataclass(frozen=True, slots=True)
class Terms:
    """On whose behalf a request runs, and how soon it should."""

    tenant: str = ""
    """The name of the API key; empty where there are no keys."""
    priority: int = 0
    """Lower is sooner, MIN_PRIORITY to MAX_PRIORITY; looked at by the policy "priority" only."""
    is_follower: bool = False
    """Whether it belongs to a question whose first token another request brings: how long it waits is held against no
    limit."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. Raises RequestError naming the field that is out of range."""

    max_tokens: int | None = None
    """Most output tokens; None means as many as the sequence limit leaves room for. 0 scores the prompt only."""
    min_tokens: int = 0
    """No stop token (EOS or stop_token_ids) before this many output tokens; stop strings are looked for only in the
    text after them."""
    temperature: float = 1.0
    """0 means greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches top_p (Holtzman et al., 1904.09751)."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as likely as the likeliest (2407.01082)."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output (CTRL, 1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted once from logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence from logits of tokens in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id to a value added to its logit."""
    seed: int | None = None
    """Draws are a function of (seed, output position); None takes a fresh one."""
    logprobs: int | None = None
    """Number of most likely alternatives reported per token; None reports none at all."""
    stop: tuple[str, ...] = ()
    """Generation ends before the first of these appears in the text."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends at any of these, in addition to EOS."""
    ignore_eos: bool = False
    """Treat EOS as an ordinary token."""
    speculation: str | None = None
    """Who guesses tokens ahead: one of SPECULATIONS that the engine has; None leaves it to the engine. Answers are the
    same whoever guesses, unless the engine was told to accept what is merely likely."""
    prompt_logprobs: bool = False
    """Report the prompt's tokens too, with as many alternatives as `logprobs` says, which must be given."""
    special_tokens_in_text: bool = False
    """Show special tokens in the text, for tool formats that are spelled in them; stop tokens stay out of it."""

    def __post_init__(self) -> None:
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            _check(math.isfinite(getattr(self, name)), name, getattr(self, name), "a finite number")
        _check(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", self.max_tokens, "at least 0")
        _check(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        _check(0 <= self.temperature <= 100, "temperature", self.temperature, "between 0 and 100")
        _check(self.top_k >= 0, "top_k", self.top_k, "at least 0 (0 keeps all)")
        _check(MIN_FACTOR <= self.top_p <= 1, "top_p", self.top_p, f"at least {MIN_FACTOR:g} and at most 1")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        _check(
            MIN_FACTOR <= self.repetition_penalty <= 100,
            "repetition_penalty",
            self.repetition_penalty,
            f"at least {MIN_FACTOR:g} and at most 100",
        )
        _check(-2 <= self.presence_penalty <= 2, "presence_penalty", self.presence_penalty, "between -2 and 2")
        _check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", self.frequency_penalty, "between -2 and 2")
        for token, bias in self.logit_bias.items():
            _check(token >= 0, "logit_bias", token, "keyed by token ids")
            _check(-100 <= bias <= 100, "logit_bias", bias, "between -100 and 100")
        _check(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", self.seed, "a 64-bit integer")
        _check(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            self.logprobs,
            f"0 to {MAX_LOGPROBS}",
        )
        _check(
            self.speculation is None or self.speculation in SPECULATIONS,
            "speculation",
            self.speculation,
            f"one of {', '.join(SPECULATIONS)}",
        )
        _check(len(self.stop) <= MAX_STOP_STRINGS, "stop", list(self.stop), f"at most {MAX_STOP_STRINGS} strings")
        if self.prompt_logprobs and self.logprobs is None:
            raise RequestError("log-probabilities of the prompt are reported only with logprobs", param="echo")
        for text in self.stop:
            _check(
                0 < len(text) <= MAX_STOP_LENGTH,
                "stop",
                text,
                f"strings of 1 to {MAX_STOP_LENGTH} characters",
            )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one emitted token under the distribution it was chosen from before temperature and filters
    (raw model log-softmax), with the likeliest alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), likeliest first."""


class Usage(NamedTuple):
    """Token counts of one request."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    """Prompt tokens whose K/V came from the prefix cache; tokens recomputed after preemption do not count."""


@dataclass(frozen=True, slots=True)
class Timings:
    """When things happened, seconds of `time.monotonic()`; None if not yet."""

    arrival_s: float
    scheduled_s: float | None = None
    """First step that worked on the request: the end of queueing."""
    first_token_s: float | None = None
    finished_s: float | None = None


class RequestOutput(NamedTuple):
    """One increment of a request's answer. Concatenated `text` is the whole answer."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    """Tokens of this increment, the stop token included if one ended the request."""
    text: str
    """Text that is safe to show: no half characters, nothing that may turn out to begin a stop string."""
    logprobs: tuple[TokenLogprob, ...] | None
    """One per token id when asked for."""
    finish_reason: FinishReason | None
    usage: Usage
    timings: Timings
    error: OptimcError | None = None
    """Why, when finish_reason is "error"."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One per prompt token when asked for, in the first output only; nothing predicts the first token: None."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole answer."""

    token_ids: tuple[int, ...]
    """The stop token included if one ended the request."""
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None
    """One per token id when asked for."""
    usage: Usage
    timings: Timings
