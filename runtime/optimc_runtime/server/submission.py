"""The bridge between one HTTP request on the event loop and its requests in the engine's thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from optimc.errors import EngineError, OptimcError
from optimc_runtime.request import RequestId, RequestOutput, SamplingParams, Terms
from optimc_runtime.server.client import EngineClient
from optimc_runtime.server.errors import AbortedError, ApiError
from optimc_runtime.server.mailbox import Mailbox
from optimc_runtime.server.metrics import ServerMetrics
from optimc_runtime.server.request_record import RequestRecord

if TYPE_CHECKING:
    from optimc_runtime.structured.grammar import Grammar


class Submission:
    """The engine requests of one HTTP request: prompts times choices, indexed prompt-major.

    Lives on the event loop. The engine's thread only ever posts to the loop: every output at once if the reply
    `streams`, else the last ones. Whoever creates one calls `abort` in the end, whatever happened: it stops what is
    still running, and nothing if all is done.
    """

    def __init__(
        self, engine: EngineClient, metrics: ServerMetrics, mailbox: Mailbox, *, streams: bool, record: RequestRecord
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._mailbox = mailbox
        self._streams = streams
        self._record = record
        self._arrived: deque[tuple[int, RequestOutput]] = deque()
        self._arrival: asyncio.Future[None] | None = None
        """Somebody waits for the next output."""
        self._running: dict[int, RequestId] = {}
        self._unread: set[int] = set()
        self._given_up: ApiError | None = None
        self._timer: asyncio.TimerHandle | None = None
        mailbox.open()

    def start(
        self,
        name: str,
        prompts: Sequence[Sequence[int]],
        choices: Sequence[SamplingParams],
        cache_salt: str,
        terms: Terms,
        grammar: Grammar | None = None,
    ) -> None:
        """Submit every choice of every prompt. Raises RequestError or OverloadedError; then `abort` what was taken."""
        for prompt_index, prompt in enumerate(prompts):
            for choice, params in enumerate(choices):
                index = prompt_index * len(choices) + choice
                self._unread.add(index)
                self._running[index] = self._engine.submit(
                    prompt,
                    params,
                    on_output=partial(self._post, index),
                    request_id=f"{name}-{index}",
                    cache_salt=cache_salt,
                    terms=terms if index == 0 else replace(terms, is_follower=True),
                    grammar=grammar,
                )

    async def take(self) -> list[tuple[int, RequestOutput]]:
        """Return all (choice index, increment) that have come, waiting for the first; none once every choice has
        finished. Raises the error of the first choice that fails, when all that came before it was taken; or the
        error of `give_up_at`, at once."""
        # Not `_running`: a choice may have finished before anyone asked for its outputs.
        if not self._unread:
            return []
        if not self._arrived and self._given_up is None:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        if self._given_up is not None:
            raise self._given_up
        taken: list[tuple[int, RequestOutput]] = []
        while self._arrived:
            index, output = self._arrived[0]
            if output.finish_reason in ("error", "abort"):
                if taken:
                    break
                raise _failure(output)
            if output.finish_reason is not None:
                self._unread.remove(index)
            taken.append(self._arrived.popleft())
        return taken

    def give_up_at(self, deadline_s: float, error: ApiError) -> None:
        """At `deadline_s`, the loop's time, end what is still running and let `take` raise `error`."""
        self._timer = asyncio.get_running_loop().call_at(deadline_s, self._give_up, error)

    def abort(self) -> None:
        """End every choice that has not finished. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._running:
            # What a whole reply's choices have so far: it belongs to the record of a request that ends here.
            self._mailbox.deliver_posted()
        if self._running:
            self._record.left()
        while self._running:
            _, request_id = self._running.popitem()
            self._metrics.count_outcome("abort")
            self._engine.abort(request_id)

    def _post(self, index: int, output: RequestOutput) -> None:
        """Take an output in the engine's thread."""
        self._mailbox.post(self._deliver, index, output, wake=self._streams or output.finish_reason is not None)

    def _give_up(self, error: ApiError) -> None:
        self._given_up = error
        self.abort()
        self._wake()

    def _deliver(self, index: int, output: RequestOutput) -> None:
        self._record.add(index, output)
        self._arrived.append((index, output))
        self._wake()
        if output.finish_reason is not None and self._running.pop(index, None) is not None:
            self._metrics.finish(output)

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


def _failure(output: RequestOutput) -> OptimcError:
    if output.finish_reason == "abort":
        return AbortedError("the request was aborted before it finished; the server may be shutting down")
    return output.error or EngineError("the engine failed without saying why")
