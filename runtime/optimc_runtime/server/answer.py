"""What has come back for one choice, and the token counts of a whole reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from optimc_runtime.request import FinishReason, RequestOutput, TokenLogprob, Usage


@dataclass(slots=True)
class Answer:
    """One choice, growing as outputs arrive."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None

    def add(self, output: RequestOutput) -> None:
        """Append one increment."""
        self.texts.append(output.text)
        self.token_ids.extend(output.token_ids)
        if output.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.extend(output.logprobs)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.finish_reason = output.finish_reason
        self.usage = output.usage

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self.texts)


def usage_object(usages: Sequence[Usage], choices_per_prompt: int) -> dict[str, Any]:
    """Return the API's `usage` of a finished reply; `usages` are in choice order, prompt-major.

    A prompt counts once however many choices it has, as the API bills it; so do its cached tokens (of choice 0: the
    later choices find in the cache what the first one has just put there).
    """
    firsts = usages[::choices_per_prompt]
    prompt_tokens = sum(usage.prompt_tokens for usage in firsts)
    output_tokens = sum(usage.output_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in firsts)},
    }
