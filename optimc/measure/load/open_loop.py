"""The load generator's open loop: requests are sent when they are due, however many are still running.

1. One request alone: the cold start, reported apart.
2. Warm-up requests at the same rate, not counted.
3. The measured requests: those due in the window count, wherever they end. Latencies start at the moment when a request
   was due. If a server that stalls made the generator wait, the requests that it should have met would never be sent,
   and the stall would show in one of them only (coordinated omission).
4. Fillers at the same rate until the last measured request has ended; then they are cancelled.

Turns of a conversation are due like all others; one whose predecessor has not ended waits for it, as a person would,
and its latency starts there.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from optimc.measure.driver import Clock, Driver
from optimc.measure.exchange import Exchange
from optimc.measure.load.arrivals import arrival_times
from optimc.measure.load.conversations import Conversations
from optimc.measure.load.dataset import Call, Dataset, LinesDataset
from optimc.measure.load.load_run import LoadRun
from optimc.measure.load.sending import send
from optimc.measure.workload import Workload


@dataclass(frozen=True, slots=True)
class Schedule:
    """When requests are due, in seconds from the first."""

    warmup: list[float]
    measured: list[float]
    fillers: Iterator[float]
    """Without end, after all others."""

    @classmethod
    def of(cls, workload: Workload, dataset: Dataset) -> Schedule:
        """Lay out all three at one rate. The measured moments depend on the workload alone."""
        if isinstance(dataset, LinesDataset) and workload.arrival == "trace":
            return cls._of_trace(workload, dataset.moments)
        num_warmup = max(0, workload.num_warmup_requests - 1)
        total = num_warmup + workload.num_requests
        times = arrival_times(workload, total).tolist()
        return cls(times[:num_warmup], times[num_warmup:], _endless(workload, total))

    @classmethod
    def _of_trace(cls, workload: Workload, moments: list[float]) -> Schedule:
        """Lay the trace out as it was; what stands before and after it comes at its mean rate."""
        measured = arrival_times(workload, workload.num_requests, moments)
        span = float(measured[-1])
        gap = span / (len(measured) - 1) if span > 0 else 0.1  # all at once: any rate is as good as another
        num_warmup = max(10, math.ceil(2 / gap))
        if workload.warmup_requests is not None:
            num_warmup = max(0, workload.warmup_requests - 1)
        start = num_warmup * gap
        fillers = (start + span + gap * number for number in count(1))
        return cls([gap * number for number in range(num_warmup)], [start + float(at) for at in measured], fillers)


def _endless(workload: Workload, skipped: int) -> Iterator[float]:
    """Yield the moments after the first `skipped`: arrival_times of more requests begins with the same ones."""
    while True:
        more = arrival_times(workload, 2 * skipped)
        yield from more[skipped:].tolist()
        skipped *= 2


async def run_open_loop(
    driver: Driver, dataset: Dataset, workload: Workload, clock: Clock, on_measured: Callable[[int], None]
) -> LoadRun:
    """Run the load. `on_measured(done)` is called after each measured request."""
    return await _OpenLoop(driver, dataset, workload, clock, on_measured).run()


class _OpenLoop:
    def __init__(
        self,
        driver: Driver,
        dataset: Dataset,
        workload: Workload,
        clock: Clock,
        on_measured: Callable[[int], None],
    ) -> None:
        self._driver = driver
        self._dataset = dataset
        self._workload = workload
        self._clock = clock
        self._on_measured = on_measured
        self._result = LoadRun()
        self._conversations = Conversations()
        self._running: set[asyncio.Task[None]] = set()
        self._all_done = asyncio.Event()
        self._sent = 0
        self._start_s = 0.0

    async def run(self) -> LoadRun:
        if self._workload.num_warmup_requests > 0:
            cold = Exchange(self._clock())
            self._result.cold = cold
            call = self._next_call()
            self._conversations.open(call)
            await self._send(call, cold)
        schedule = Schedule.of(self._workload, self._dataset)
        self._start_s = self._clock()
        async with asyncio.TaskGroup() as group:
            feeder = group.create_task(self._feed(group, schedule))
            await self._all_done.wait()
            feeder.cancel()
            for task in self._running:
                task.cancel()
        return self._result

    async def _feed(self, group: asyncio.TaskGroup, schedule: Schedule) -> None:
        """Start every request when it is due."""
        result = self._result
        for offset_s in schedule.warmup:
            await self._start(group, self._next_call(), offset_s, self._warm_up)
        result.steady_start_s = self._start_s + schedule.measured[0]
        for number, offset_s in enumerate(schedule.measured):
            await self._start(group, self._next_call(number), offset_s, self._measure)
        for number, offset_s in enumerate(schedule.fillers):
            if number == 0:
                result.window_end_s = self._start_s + offset_s
            if any(filler.failure is not None for filler in result.fillers[-1:]):
                return  # a target that refuses must not be hammered for the sake of load
            await self._start(group, self._next_call(), offset_s, self._fill)

    async def _start(
        self,
        group: asyncio.TaskGroup,
        call: Call,
        offset_s: float,
        phase: Callable[[Call, Exchange], Coroutine[Any, Any, None]],
    ) -> None:
        """Wait until a call is due, and start it. It was made before: drawing a prompt takes time."""
        due_s = self._start_s + offset_s
        await asyncio.sleep(max(0.0, due_s - self._clock()))
        self._conversations.open(call)
        task = group.create_task(phase(call, Exchange(self._clock(), scheduled_s=due_s)))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _warm_up(self, call: Call, exchange: Exchange) -> None:
        self._result.warmup.append(exchange)
        await self._send(call, exchange)

    async def _measure(self, call: Call, exchange: Exchange) -> None:
        result = self._result
        if await self._send(call, exchange):
            result.measured.append(exchange)
        else:
            result.not_sent += 1
        done = len(result.measured) + result.not_sent
        self._on_measured(done)
        if done == self._workload.num_requests:
            self._all_done.set()

    async def _fill(self, call: Call, exchange: Exchange) -> None:
        self._result.fillers.append(exchange)
        await self._send(call, exchange)

    async def _send(self, call: Call, exchange: Exchange) -> bool:
        """Send a call. False if its conversation had failed before."""
        asked_s = self._clock()
        prompt = await self._conversations.prompt_of(call)
        if prompt is not None:
            if exchange.scheduled_s is not None and self._clock() > asked_s:
                exchange.scheduled_s = self._clock()  # it waited for an answer: that time is thought, not latency
            exchange.sent_s = self._clock()
            await send(self._driver, prompt, call.output_tokens, exchange, self._clock, self._workload.timeout_s)
        self._conversations.end(call, prompt, exchange)
        return prompt is not None

    def _next_call(self, measured: int | None = None) -> Call:
        """Return the next request. A trace's own lines are for the measured ones only, which must not find them in the
        prefix cache."""
        index = self._sent
        self._sent += 1
        if isinstance(self._dataset, LinesDataset) and self._dataset.is_scheduled:
            return self._dataset.warm_up(index) if measured is None else self._dataset(measured)
        return self._dataset(index)
