"""What is sent: the prompts of a load in their order, with the length of the answer and, in a trace, the moment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from optimc.errors import ConfigError, Fault, OptimcError
from optimc.measure.load.traffic import MAX_FAULTS, TrafficLine
from optimc.measure.prompts import ChatPrompt, LengthOnly, Prompt, PromptSource, output_length
from optimc.measure.workload import Workload

THINK_S = 10.0
"""Seconds between the turns of a conversation in an open loop: as many conversations take turns as that needs."""

CHARACTERS_PER_TOKEN = 4
"""Where only text is known, and no tokenizer: usual for English. Used for warm-up lengths, never for figures."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request to be sent."""

    prompt: Prompt
    """The whole prompt; of a later turn, what the user adds."""
    output_tokens: int
    at_s: float | None = None
    """When, in a trace."""
    conversation: str | None = None
    turn: int = 0
    """0, or the place in the conversation: what was said and answered before comes first."""


class Dataset(Protocol):
    """A list of calls, with or without an end."""

    def __call__(self, index: int) -> Call:
        """Return request number `index` of the run, warm-up included."""
        ...

    @property
    def size(self) -> int | None:
        """How many there are before they repeat; None without end."""
        ...

    @property
    def is_scheduled(self) -> bool:
        """Whether it says when each is sent."""
        ...

    @property
    def longest_tokens(self) -> int | None:
        """Most tokens that prompt and answer together can have; None where only text is known."""
        ...


class RandomDataset:
    """A new prompt for every request."""

    size = None
    is_scheduled = False

    def __init__(self, prompts: PromptSource, workload: Workload) -> None:
        self._prompts = prompts
        self._workload = workload

    def __call__(self, index: int) -> Call:
        """Return request number `index`."""
        return Call(self._prompts(index), output_length(self._workload, index))

    @property
    def longest_tokens(self) -> int:
        """Most tokens by the spreads."""
        return longest_tokens(self._workload)


class TurnsDataset:
    """Conversations of several turns, side by side. Each has a lane; the lanes take turns in sending.

    The first conversation of lane k starts as if k turns were over. Otherwise all conversations would stand at the same
    turn, and prompts of the whole load would grow together.
    """

    size = None
    is_scheduled = False

    def __init__(self, prompts: PromptSource, workload: Workload, *, is_chat: bool = False) -> None:
        """With `is_chat` the first turn is a message, not plain text."""
        self._prompts = prompts
        self._workload = workload
        self._is_chat = is_chat
        rate = workload.rate_per_s or 0.0
        self.lanes = math.ceil(rate * THINK_S) if workload.is_open else workload.concurrency

    def __call__(self, index: int) -> Call:
        """Return the next turn of lane index % lanes."""
        workload = self._workload
        step, lane = divmod(index, self.lanes)
        number, place = divmod(step + lane, workload.turns)
        turn = min(step, place)
        conversation = number * self.lanes + lane
        prompt: Prompt
        if turn:
            prompt = self._prompts.later_turn(conversation, turn, workload.turn_tokens)
        else:
            prompt = self._prompts(conversation)
            if self._is_chat and isinstance(prompt, str):
                prompt = ChatPrompt(({"role": "user", "content": prompt},))
        return Call(prompt, output_length(workload, index), conversation=str(conversation), turn=turn)

    @property
    def longest_tokens(self) -> int:
        """Most tokens at the end of a conversation."""
        return longest_tokens(self._workload)


class LinesDataset:
    """The requests of a file, in turn and again from the start; in a trace, at their moments."""

    def __init__(self, calls: Sequence[tuple[Prompt | LengthOnly, int, float | None]], *, is_scheduled: bool) -> None:
        """`calls`: prompt, output tokens, moment; of a trace each has one. Raises ConfigError if there are none."""
        if not calls:
            raise ConfigError("options", [Fault("--dataset", "holds no request")])
        self._prompts: PromptSource | None = None
        self._calls = sorted(calls, key=lambda call: call[2] or 0.0) if is_scheduled else list(calls)
        self.is_scheduled = is_scheduled

    @property
    def size(self) -> int:
        """Lines of the file."""
        return len(self._calls)

    @property
    def moments(self) -> list[float]:
        """When each was sent, ascending; of a trace only."""
        return [at_s for _, _, at_s in self._calls if at_s is not None]

    @property
    def needs_prompts(self) -> bool:
        """Whether prompts have to be made up: for lines that only say how long theirs was, and before a trace."""
        return self.is_scheduled or any(isinstance(prompt, LengthOnly) for prompt, _, _ in self._calls)

    @property
    def has_ids(self) -> bool:
        """Whether any prompt is token ids, which only an engine or /v1/completions takes."""
        return any(isinstance(prompt, list) for prompt, _, _ in self._calls)

    def with_prompts(self, prompts: PromptSource) -> LinesDataset:
        """Return the same requests, those without text made up by `prompts`."""
        filled = LinesDataset(self._calls, is_scheduled=self.is_scheduled)
        filled._prompts = prompts
        return filled

    def __call__(self, index: int) -> Call:
        """Return line `index`, from 0."""
        prompt, output_tokens, at_s = self._calls[index % self.size]
        if isinstance(prompt, LengthOnly):
            assert self._prompts is not None, "needs_prompts says so"
            prompt = self._prompts.of_length(index, prompt)
        return Call(prompt, output_tokens, at_s)

    def warm_up(self, index: int) -> Call:
        """Return a request as long as line `index` with nothing of its text, which the server has yet to meet."""
        assert self._prompts is not None, "needs_prompts says so"
        prompt, output_tokens, _ = self._calls[index % self.size]
        # Behind the last line: numbers that no request of the trace itself has.
        return Call(self._prompts.of_length(self.size + index, LengthOnly(_tokens(prompt))), output_tokens)

    @property
    def longest_tokens(self) -> int | None:
        """Most tokens of a line and its answer."""
        if any(isinstance(prompt, str | ChatPrompt) for prompt, _, _ in self._calls):
            return None
        return max(_tokens(prompt) + output_tokens for prompt, output_tokens, _ in self._calls)


def lines_dataset(
    lines: Iterable[TrafficLine],
    workload: Workload,
    encode: Callable[[TrafficLine], Prompt] | None = None,
    *,
    max_tokens: int | None = None,
) -> LinesDataset:
    """Return what a file asks for. A line's own number of output tokens goes before the workload's.

    `encode` turns text into ids, for engines; None leaves it as it is, for servers. `max_tokens`: most that prompt and
    answer may have together. Raises ConfigError with the faults of all lines, at most 20.
    """
    calls: list[tuple[Prompt | LengthOnly, int, float | None]] = []
    faults: list[Fault] = []
    is_trace = workload.dataset == "trace"
    for line in lines:
        if is_trace and line.at_s is None:
            faults.append(Fault(f"line {line.number}", 'has no moment: a trace needs "at_s" or "timestamp"'))
            continue
        output = line.output_tokens or line.max_tokens or workload.output_tokens
        prompt: Prompt | LengthOnly
        if not line.has_text:
            prompt = LengthOnly(line.prompt_tokens or 1, line.hash_ids)
        else:
            try:
                prompt = line.as_prompt() if encode is None else encode(line)
            except ConfigError:
                raise  # it is about the plan, not this line
            except OptimcError as error:
                faults.append(Fault(f"line {line.number}", str(error)))
                continue
        if max_tokens is not None and _tokens(prompt) + output > max_tokens:
            longest = f"{_tokens(prompt)} prompt + {output} output tokens, the plan takes {max_tokens}"
            faults.append(Fault(f"line {line.number}", longest))
            continue
        calls.append((prompt, output, line.at_s))
    if faults:
        raise ConfigError("dataset", faults[:MAX_FAULTS])
    return LinesDataset(calls, is_scheduled=is_trace and workload.arrival == "trace")


def longest_tokens(workload: Workload) -> int:
    """Return the most tokens a random prompt, or a whole conversation, can have with its answers."""
    prompt = round(workload.prompt_tokens * (1 + workload.prompt_spread))
    output = round(workload.output_tokens * (1 + workload.output_spread))
    return prompt + (workload.turns - 1) * workload.turn_tokens + workload.turns * output


def sized_by(workload: Workload, dataset: Dataset | None) -> Workload:
    """Return the workload with a trace's number of requests, if it names none.

    Raises ConfigError if it asks for more than the trace has.
    """
    if dataset is None or not dataset.is_scheduled or dataset.size is None:
        return workload
    if workload.requests is not None and workload.requests > dataset.size:
        raise ConfigError("options", [Fault("--requests", f"{workload.requests}, and the trace has {dataset.size}")])
    return replace(workload, requests=workload.requests or dataset.size)


def _tokens(prompt: Prompt | LengthOnly) -> int:
    """Return the number of tokens, estimated where only text is known."""
    if isinstance(prompt, LengthOnly):
        return prompt.tokens
    if isinstance(prompt, list):
        return len(prompt)
    text = prompt if isinstance(prompt, str) else "".join(str(message.get("content")) for message in prompt.messages)
    return max(1, len(text) // CHARACTERS_PER_TOKEN)
