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

from optimc.measure.driver import Clock, Driver
from optimc.measure.exchange import Exchange
from optimc.measure.load.conversations import Conversations
from optimc.measure.load.dataset import Dataset
from optimc.measure.load.load_run import LoadRun
from optimc.measure.load.sending import send
from optimc.measure.workload import Workload


async def run_closed_loop(
    driver: Driver, dataset: Dataset, config: Workload, clock: Clock, on_measured: Callable[[int], None]
) -> LoadRun:
    """Run the load. `on_measured(done)` is called after each measured request."""
    return await _ClosedLoop(driver, dataset, config, clock, on_measured).run()


class _ClosedLoop:
    def __init__(
        self,
        driver: Driver,
        dataset: Dataset,
        config: Workload,
        clock: Clock,
        on_measured: Callable[[int], None],
    ) -> None:
        self._driver = driver
        self._dataset = dataset
        self._config = config
        self._clock = clock
        self._on_measured = on_measured
        self._result = LoadRun()
        self._conversations = Conversations()
        self._sent = 0
        self._sent_by = [0] * config.concurrency
        self._measured_sent = 0
        self._all_done = asyncio.Event()

    async def run(self) -> LoadRun:
        config = self._config
        warmup = config.num_warmup_requests
        if warmup > 0:
            self._result.cold = await self._send(0, 1.0)
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
            exchange = await self._send(number, share)
            if exchange is not None:
                result.warmup.append(exchange)
        first = True
        while self._measured_sent < config.num_requests:
            self._measured_sent += 1
            if first:
                result.steady_start_s = max(result.steady_start_s, self._clock())
                first = False
            exchange = await self._send(number, 1.0)
            if exchange is None:
                result.not_sent += 1
            else:
                result.measured.append(exchange)
            done = len(result.measured) + result.not_sent
            self._on_measured(done)
            if done == config.num_requests:
                self._all_done.set()
        while not self._all_done.is_set():
            filler = Exchange(self._clock())
            result.fillers.append(filler)
            sent = await self._send_into(filler, number, 1.0)
            if not sent or filler.failure is not None:
                return  # a target that refuses must not be hammered for the sake of load

    async def _send(self, client: int, share: float) -> Exchange | None:
        exchange = Exchange(self._clock())
        return exchange if await self._send_into(exchange, client, share) else None

    async def _send_into(self, exchange: Exchange, client: int, share: float) -> bool:
        """Send the client's next call, with `share` of its output. False if its conversation had failed before."""
        call = self._dataset(self._next_index(client))
        self._conversations.open(call)
        prompt = await self._conversations.prompt_of(call)
        if prompt is not None:
            output_tokens = math.ceil(call.output_tokens * share)
            await send(self._driver, prompt, output_tokens, exchange, self._clock, self._config.timeout_s)
        self._conversations.end(call, prompt, exchange)
        return prompt is not None

    def _next_index(self, client: int) -> int:
        """Requests are numbered as they are sent; but a conversation is one client's, which waits for its answers."""
        if self._config.dataset == "turns":
            self._sent_by[client] += 1
            return client + self._config.concurrency * (self._sent_by[client] - 1)
        self._sent += 1
        return self._sent - 1
