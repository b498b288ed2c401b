"""The bridge between one HTTP request on the event loop and its requests in the engine's thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial

from optimc.errors import EngineError
from optimc_runtime.request import RequestId, RequestOutput, SamplingParams
from optimc_runtime.server.client import EngineClient
from optimc_runtime.server.errors import AbortedError
from optimc_runtime.server.metrics import ServerMetrics


class Submission:
    """The engine requests of one HTTP request: prompts times choices, indexed prompt-major.

    Lives on the event loop. The engine's thread only ever posts to the loop. Whoever creates one calls `abort` in the
    end, whatever happened: it stops what is still running, and nothing if all is done.
    """

    def __init__(self, engine: EngineClient, metrics: ServerMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[tuple[int, RequestOutput]] = asyncio.Queue()
        self._running: dict[int, RequestId] = {}
        self._unread: set[int] = set()

    def start(
        self, name: str, prompts: Sequence[Sequence[int]], choices: Sequence[SamplingParams], cache_salt: str
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
                )

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yield (choice index, increment) until every choice has finished. Raises the error of the first that fails."""
        # Not `_running`: a choice may have finished before anyone asked for its outputs.
        while self._unread:
            index, output = await self._arrived.get()
            if output.finish_reason == "error":
                raise output.error or EngineError("the engine failed without saying why")
            if output.finish_reason == "abort":
                raise AbortedError("the request was aborted before it finished; the server may be shutting down")
            if output.finish_reason is not None:
                self._unread.remove(index)
            yield index, output

    def abort(self) -> None:
        """End every choice that has not finished. Idempotent."""
        while self._running:
            _, request_id = self._running.popitem()
            self._metrics.count_outcome("abort")
            self._engine.abort(request_id)

    def _post(self, index: int, output: RequestOutput) -> None:
        """Take an output in the engine's thread."""
        with suppress(RuntimeError):  # the loop is closed: the server is gone, and so is the client
            self._loop.call_soon_threadsafe(self._deliver, index, output)

    def _deliver(self, index: int, output: RequestOutput) -> None:
        self._arrived.put_nowait((index, output))
        if output.finish_reason is not None and self._running.pop(index, None) is not None:
            self._metrics.finish(output)
