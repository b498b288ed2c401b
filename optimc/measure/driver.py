"""What the load generator needs of a way to send requests. There are two: in process and over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from optimc.measure.exchange import Exchange
from optimc.measure.load.dataset import Dataset
from optimc.measure.prompts import Prompt
from optimc.measure.workload import Workload

Clock = Callable[[], float]
"""Seconds from an arbitrary start, never going back."""


class Driver(Protocol):
    """Sends requests and writes down what comes back."""

    @property
    def description(self) -> str:
        """What is being measured, for the report."""
        ...

    async def prepare(self, config: Workload, run_id: str, dataset: Dataset | None = None) -> Dataset:
        """Check that the target can serve such requests. Raises MeasureError if it cannot.

        Returns what to send: the given requests, those that only have a length made up; or, without any, random ones.
        """
        ...

    async def send(self, prompt: Prompt, output_tokens: int, exchange: Exchange) -> None:
        """Send one request and fill in `exchange` until it ends. What goes wrong with it becomes its failure.

        Cancelling ends the request on the server's side too; the chunks so far stay.
        """
        ...

    def notes(self) -> list[str]:
        """What a reader of the figures must know about this target under this load; known after `prepare`."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...
