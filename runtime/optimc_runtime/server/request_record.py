"""What becomes known of one HTTP request on its way, for its line in the log. No text of a prompt or an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from optimc_runtime.request import FinishReason, RequestOutput, Usage
from optimc_runtime.server.errors import as_api_error

if TYPE_CHECKING:
    from optimc_runtime.server.traffic_log import Asked


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request. Lives on the event loop."""

    request_id: str
    method: str
    path: str
    tenant: str
    """Name of its API key; "" where there are no keys."""
    arrived_s: float
    """Seconds of `time.monotonic()`."""
    error_code: str | None = None
    """Code of the error object the client got."""
    asked: Asked | None = None
    """What it asked for, text included: for the traffic log alone, and None where there is none."""
    _answer_id: str | None = None
    _prompts: int = 0
    _choices: int = 0
    """Per prompt."""
    _prompt_tokens: int = 0
    _streams: bool = False
    _latest: dict[int, RequestOutput] = field(default_factory=dict)
    _has_left: bool = False

    def accepted(self, answer_id: str, *, prompts: int, choices: int, stream: bool, prompt_tokens: int) -> None:
        """Note what is to be answered: `choices` per prompt, `prompt_tokens` of all prompts together."""
        self._answer_id, self._prompts, self._choices, self._streams = answer_id, prompts, choices, stream
        self._prompt_tokens = prompt_tokens

    @property
    def is_accepted(self) -> bool:
        """Whether it went as far as to be worked on."""
        return self._answer_id is not None

    def add(self, index: int, output: RequestOutput) -> None:
        """Note an output of choice `index`, prompt-major; the latest of each choice holds its counts and times."""
        self._latest[index] = output

    def left(self) -> None:
        """Note that whatever runs still is given up."""
        self._has_left = True

    def failed(self, code: str | None) -> None:
        """Note an error that no output carries."""
        self.error_code = code

    def fields(self) -> dict[str, Any]:
        """Return what there is to tell so far: counts in tokens, times in seconds."""
        known: dict[str, Any] = {"request_id": self.request_id, "method": self.method, "path": self.path}
        if self.tenant:
            known["key"] = self.tenant
        if self._answer_id is not None:
            known |= {"answer_id": self._answer_id, "stream": self._streams}
            known |= self._counts() | self._times()
            known["finish_reason"] = self._reasons()
        code = self.error_code or self._output_error()
        if code is not None:
            known["error"] = code
        return known

    def prompt_figures(self, prompt: int) -> dict[str, Any]:
        """Return what is known of one prompt's choices: cached_tokens of its first one, output_tokens of all, ttft_s
        from the request's arrival. What never came about is left out."""
        first = prompt * self._choices
        outputs = [self._latest[index] for index in range(first, first + self._choices) if index in self._latest]
        figures: dict[str, Any] = {"output_tokens": sum(output.usage.output_tokens for output in outputs)}
        if first in self._latest:
            figures["cached_tokens"] = self._latest[first].usage.cached_tokens
        first_tokens = [output.timings.first_token_s for output in outputs if output.timings.first_token_s is not None]
        if first_tokens:
            figures["ttft_s"] = round(min(first_tokens) - self.arrived_s, 6)
        return figures

    def _counts(self) -> dict[str, int]:
        # As in the reply's `usage`: a prompt counts once, with what its first choice found cached.
        usages: dict[int, Usage] = {index: output.usage for index, output in self._latest.items()}
        return {
            "prompt_tokens": self._prompt_tokens,
            "output_tokens": sum(usage.output_tokens for usage in usages.values()),
            "cached_tokens": sum(usage.cached_tokens for index, usage in usages.items() if index % self._choices == 0),
        }

    def _times(self) -> dict[str, float]:
        """Return queue, prefill and decode time of the request as a whole: until its first choice is worked on, until
        its first token, until its last."""
        timings = [output.timings for output in self._latest.values()]
        arrival_s = min((times.arrival_s for times in timings), default=self.arrived_s)
        ends = (
            ("queue_s", min((times.scheduled_s for times in timings if times.scheduled_s is not None), default=None)),
            ("prefill_s", min((times.first_token_s for times in timings if times.first_token_s), default=None)),
            ("decode_s", max((times.finished_s for times in timings if times.finished_s), default=None)),
        )
        spans: dict[str, float] = {}
        before_s = arrival_s
        for name, end_s in ends:
            if end_s is None:
                break
            spans[name] = round(end_s - before_s, 6)
            before_s = end_s
        return spans

    def _reasons(self) -> list[FinishReason | None] | FinishReason | None:
        reasons = [self._reason(index) for index in range(self._prompts * self._choices)]
        return reasons[0] if len(reasons) == 1 else reasons

    def _reason(self, index: int) -> FinishReason | None:
        output = self._latest.get(index)
        if output is not None and output.finish_reason is not None:
            return output.finish_reason
        return "abort" if self._has_left else None

    def _output_error(self) -> str | None:
        for output in self._latest.values():
            if output.error is not None:
                return as_api_error(output.error).code
        return None
