"""A request inside the engine: its sequence, how it samples, what was delivered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from optimc.errors import OptimcError
from optimc_runtime.output_text import OutputText
from optimc_runtime.request import FinishReason, RequestOutput, Timings, TokenLogprob, Usage
from optimc_runtime.sampler import SamplingState
from optimc_runtime.sequence import Sequence
from optimc_runtime.structured.grammar import GrammarState

if TYPE_CHECKING:
    from optimc_runtime.prompt_logprobs import PromptLogprobs

OnOutput = Callable[[RequestOutput], None]
OnLogits = Callable[[int, NDArray[np.float32]], None]
"""(first position, logits [n, V]); the array is valid during the call only."""
OnHidden = Callable[[NDArray[np.float32]], None]
"""(hidden [m, d]) of the rows the next output's m tokens were sampled from; valid during the call only."""


class ActiveRequest:
    """A request between submission and its last output. `sampling` is None for one that only scores its prompt."""

    __slots__ = (
        "grammar",
        "on_hidden",
        "on_logits",
        "on_output",
        "prompt_logprobs",
        "sampling",
        "sequence",
        "stop_ids",
        "text",
        "timings",
    )

    def __init__(
        self,
        sequence: Sequence,
        on_output: OnOutput,
        arrival_s: float,
        *,
        sampling: SamplingState | None = None,
        stop_ids: frozenset[int] = frozenset(),
        text: OutputText | None = None,
        on_logits: OnLogits | None = None,
        on_hidden: OnHidden | None = None,
        grammar: GrammarState | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        self.sequence = sequence
        self.sampling = sampling
        self.stop_ids = stop_ids
        self.text = text
        self.on_output = on_output
        self.on_logits = on_logits
        self.on_hidden = on_hidden
        self.grammar = grammar
        self.prompt_logprobs = prompt_logprobs
        self.timings = Timings(arrival_s)

    def mark(self, **times_s: float) -> None:
        """Note when something happened: `scheduled_s`, `first_token_s` or `finished_s`."""
        self.timings = replace(self.timings, **times_s)

    def take(self, token_id: int) -> tuple[str, FinishReason | None]:
        """Add a sampled token; return the text that is now safe to show, and why the request is complete, if it is."""
        sequence, output_text = self.sequence, self.text
        assert output_text is not None
        sequence.append(token_id)
        if token_id in self.stop_ids:
            return output_text.finish(), "stop"
        if self.grammar is not None:
            self.grammar.accept(token_id)
        text = output_text.push(token_id)
        if output_text.stopped:
            return text, "stop"
        if self.grammar is not None and self.grammar.is_complete:
            return text + output_text.finish(), "stop"
        if sequence.wants_token:
            return text, None
        text += output_text.finish()
        return text, "stop" if output_text.stopped else "length"

    def output(
        self,
        token_ids: tuple[int, ...] = (),
        text: str = "",
        *,
        logprobs: tuple[TokenLogprob, ...] = (),
        finish_reason: FinishReason | None = None,
        error: OptimcError | None = None,
    ) -> RequestOutput:
        """Return the increment to deliver."""
        sequence = self.sequence
        asked = self.sampling is not None and self.sampling.params.logprobs is not None
        return RequestOutput(
            sequence.request_id,
            token_ids,
            text,
            logprobs if asked else None,
            finish_reason,
            Usage(sequence.num_prompt, sequence.num_tokens - sequence.num_prompt, sequence.num_cached),
            self.timings,
            error,
            None if self.prompt_logprobs is None else self.prompt_logprobs.finished(),
        )
