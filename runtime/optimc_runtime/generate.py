"""Many prompts, whole answers: submits as fast as the queue takes them and joins the increments."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from optimc.errors import OverloadedError
from optimc_runtime.request import Generation, RequestId, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from optimc_runtime.engine import Engine

MAX_RETRY_S = 0.05
"""How long to wait before asking again when other clients fill the queue."""


class Batch:
    """Prompts being answered. `run` once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._arrived: queue.SimpleQueue[tuple[int, RequestOutput]] = queue.SimpleQueue()
        self._outputs: list[list[RequestOutput]] = []
        self._request_ids: list[RequestId] = []
        self._unfinished = 0

    def run(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Generation]:
        """Return the answers in the prompts' order. If one fails, abort the others and raise its error."""
        try:
            for prompt, each in zip(prompts, params, strict=True):
                self._submit(prompt, each)
            while self._unfinished:
                self._collect()
        finally:
            for request_id in self._request_ids:
                self._engine.abort(request_id)
        return [_joined(outputs) for outputs in self._outputs]

    def _submit(self, prompt: Sequence[int], params: SamplingParams) -> None:
        index = len(self._outputs)
        self._outputs.append([])

        def on_output(output: RequestOutput) -> None:
            self._arrived.put((index, output))

        while True:
            try:
                self._request_ids.append(self._engine.submit(prompt, params, on_output=on_output))
            except OverloadedError as error:
                if self._unfinished:
                    self._collect()
                else:  # others fill the queue
                    time.sleep(min(error.retry_after_s, MAX_RETRY_S))
            else:
                self._unfinished += 1
                return

    def _collect(self) -> None:
        index, output = self._arrived.get()
        if output.error is not None:
            raise output.error
        self._outputs[index].append(output)
        self._unfinished -= output.finish_reason is not None


def _joined(outputs: Sequence[RequestOutput]) -> Generation:
    last = outputs[-1]
    assert last.finish_reason is not None
    return Generation(
        token_ids=tuple(chain.from_iterable(output.token_ids for output in outputs)),
        text="".join(output.text for output in outputs),
        finish_reason=last.finish_reason,
        logprobs=(
            None if last.logprobs is None else tuple(chain.from_iterable(output.logprobs or () for output in outputs))
        ),
        usage=last.usage,
        timings=last.timings,
    )
