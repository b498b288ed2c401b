"""The load generator: a closed loop at constant concurrency, so that no figure holds a ramp.

1. One request alone: the cold start, reported apart.
2. Each client sends its warm-up requests; the last one is cut short by a different share for each client, so that the
   clients do not march in step afterwards (a simultaneous start makes every prefill wait for all others).
3. Clients take the measured requests in turn.
4. A client that finds none left goes on with filler requests until the last measured one has ended; fillers are then
   cancelled. Thus the last measured request still meets the full load.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from optimc.measure.driver import Clock, Driver
from optimc.measure.exchange import Exchange
from optimc.measure.prompts import PromptSource
from optimc.measure.workload import Workload


@dataclass(slots=True)
class LoadRun:
    """All requests of one run, each in the order of its end."""

    cold: Exchange | None = None
    warmup: list[Exchange] = field(default_factory=list)
    """Without the cold one."""
    measured: list[Exchange] = field(default_factory=list)
    fillers: list[Exchange] = field(default_factory=list)
    """Ended or cancelled."""
    steady_start_s: float = 0.0
    """When the last client sent its first measured request."""


async def run_closed_loop(
    driver: Driver, prompts: PromptSource, config: Workload, clock: Clock, on_measured: Callable[[int], None]
) -> LoadRun:
    """Run the load. `on_measured(done)` is called after each measured request."""
    return await _ClosedLoop(driver, prompts, config, clock, on_measured).run()


class _ClosedLoop:
    def __init__(
        self,
        driver: Driver,
        prompts: PromptSource,
        config: Workload,
        clock: Clock,
        on_measured: Callable[[int], None],
    ) -> None:
        self._driver = driver
        self._prompts = prompts
        self._config = config
        self._clock = clock
        self._on_measured = on_measured
        self._result = LoadRun()
        self._sent = 0
        self._measured_sent = 0
        self._all_done = asyncio.Event()

    async def run(self) -> LoadRun:
        config = self._config
        warmup = config.num_warmup_requests
        if warmup > 0:
            self._result.cold = await self._send(config.output_tokens)
        shares = [
            (max(0, warmup - 1) + config.concurrency - 1 - client) // config.concurrency
            for client in range(config.concurrency)
        ]
        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(self._client(number, share)) for number, share in enumerate(shares)]
            await self._all_done.wait()
            for client in clients:
                client.cancel()
        return self._result

    async def _client(self, number: int, warmup: int) -> None:
        config, result = self._config, self._result
        for turn in range(warmup):
            share = (number + 1) / config.concurrency if turn == warmup - 1 else 1.0
            result.warmup.append(await self._send(math.ceil(config.output_tokens * share)))
        first = True
        while self._measured_sent < config.num_requests:
            self._measured_sent += 1
            if first:
                result.steady_start_s = max(result.steady_start_s, self._clock())
                first = False
            result.measured.append(await self._send(config.output_tokens))
            self._on_measured(len(result.measured))
            if len(result.measured) == config.num_requests:
                self._all_done.set()
        while not self._all_done.is_set():
            filler = Exchange(self._clock())
            result.fillers.append(filler)
            await self._send_into(filler, config.output_tokens)
            if filler.failure is not None:
                return  # a target that refuses must not be hammered for the sake of load

    async def _send(self, output_tokens: int) -> Exchange:
        exchange = Exchange(self._clock())
        await self._send_into(exchange, output_tokens)
        return exchange

    async def _send_into(self, exchange: Exchange, output_tokens: int) -> None:
        prompt = self._prompts(self._sent)
        self._sent += 1
        try:
            async with asyncio.timeout(self._config.timeout_s):
                await self._driver.send(prompt, output_tokens, exchange)
        except TimeoutError:
            exchange.fail(f"timed out after {self._config.timeout_s:g} s", self._clock())
            return
        if exchange.failure is None and exchange.output_tokens == 0:
            exchange.fail("empty output", self._clock())
