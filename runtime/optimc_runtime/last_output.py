"""Waiting for a request that only computes: it has one output, its last."""

from __future__ import annotations

import queue

import numpy as np
from numpy.typing import NDArray

from optimc.errors import EngineError
from optimc_runtime.active_request import OnLogits
from optimc_runtime.request import RequestOutput


class LastOutput:
    """Gives the engine the callbacks `put` and `take`, and `wait` to whoever waits. What `on_logits` raises ends the
    request, and is handed back to its owner."""

    def __init__(self, on_logits: OnLogits | None = None) -> None:
        self._on_logits = on_logits
        self._outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        self._failure: Exception | None = None

    def put(self, output: RequestOutput) -> None:
        """Take the request's output."""
        self._outputs.put(output)

    def take(self, start: int, logits: NDArray[np.float32]) -> None:
        """Pass on rows of logits."""
        assert self._on_logits is not None
        try:
            self._on_logits(start, logits)
        except Exception as error:  # the caller's own code
            self._failure = error
            raise

    def wait(self) -> None:
        """Return once all is computed. Raises what `on_logits` raised, the request's error, or EngineError if it was
        aborted."""
        output = self._outputs.get()
        if self._failure is not None:
            raise self._failure
        if output.finish_reason != "length":
            raise output.error or EngineError("the engine was closed before the tokens were computed")
