"""Measuring an engine in this process: no HTTP, no text, tokens counted by id."""

from __future__ import annotations

import asyncio
import threading

from optimc.errors import MeasureError, OptimcError
from optimc.measure.driver import Clock
from optimc.measure.exchange import Chunk, Exchange
from optimc.measure.load.dataset import Dataset, LinesDataset, RandomDataset, TurnsDataset
from optimc.measure.prompts import IdPrompts, Prompt, usable_ids
from optimc.measure.served_engine import ServedEngine
from optimc.measure.workload import Workload
from optimc_runtime.request import RequestOutput, SamplingParams


class EngineDriver:
    """Sends requests to a started engine. Times are taken in the engine's thread, when a token is handed over."""

    def __init__(
        self,
        engine: ServedEngine,
        clock: Clock,
        *,
        speculation: str | None = None,
    ) -> None:
        """`speculation`: what requests ask of it."""
        self._engine = engine
        self._clock = clock
        self._speculation = speculation
        self._sent = 0
        self._config = Workload()

    @property
    def description(self) -> str:
        """Plan and target."""
        manifest = self._engine.manifest
        return f"{manifest.name} ({manifest.target.backend}), in process"

    async def prepare(self, config: Workload, run_id: str, dataset: Dataset | None = None) -> Dataset:
        """Check lengths against the engine's limit and empty the prefix cache. Raises MeasureError."""
        engine = self._engine
        tokens = engine.manifest.tokens
        special = {*tokens.eos, *(token for token in (tokens.bos, tokens.pad) if token is not None)}
        prompts = IdPrompts(config, run_id, usable_ids(engine.vocab_size, special))
        if dataset is None:
            dataset = TurnsDataset(prompts, config) if config.dataset == "turns" else RandomDataset(prompts, config)
        elif isinstance(dataset, LinesDataset):
            dataset = dataset.with_prompts(prompts)
        longest = dataset.longest_tokens
        if longest is not None and longest > engine.max_seq_len:
            shape = f"{config.prompt_tokens} prompt + {config.output_tokens} output tokens"
            if longest != config.prompt_tokens + config.output_tokens:
                shape = "the longest prompt with its answer"
            raise MeasureError(
                f"{shape} = {longest}, the plan takes {engine.max_seq_len}; ask for fewer, or rebuild with a larger "
                "limits.max_seq_len"
            )
        self._config = config
        engine.reset_prefix_cache()
        return dataset

    async def send(self, prompt: Prompt, output_tokens: int, exchange: Exchange) -> None:
        """Submit one request and wait for its last output."""
        assert isinstance(prompt, list), "an engine takes ids"
        loop = asyncio.get_running_loop()
        finished = asyncio.Event()
        lock = threading.Lock()
        abandoned = False

        def on_output(output: RequestOutput) -> None:
            now = self._clock()
            with lock:
                # Once abandoned, the exchange is being read and the loop may be gone.
                if abandoned:
                    return
                if output.token_ids:
                    exchange.chunks.append(Chunk(now, len(output.token_ids)))
                    exchange.answer_ids.extend(output.token_ids)
                if output.finish_reason is not None:
                    _finish(exchange, output, now)
                    loop.call_soon_threadsafe(finished.set)

        params = SamplingParams(
            max_tokens=output_tokens,
            temperature=self._config.temperature,
            seed=self._sent,
            ignore_eos=self._config.ignore_eos,
            speculation=self._speculation,
        )
        self._sent += 1
        exchange.sent_s = self._clock()
        try:
            request_id = self._engine.submit(prompt, params, on_output=on_output)
        except OptimcError as error:
            exchange.fail(f"{type(error).__name__}: {error}", self._clock())
            return
        try:
            await finished.wait()
        except asyncio.CancelledError:
            with lock:
                abandoned = True
            self._engine.abort(request_id)
            raise

    def notes(self) -> list[str]:
        """Say when the engine cannot run all clients at once."""
        # An open loop has no clients; how many were running at once stands in the report.
        clients, max_seqs = self._config.concurrency, self._engine.max_seqs
        if clients <= max_seqs:
            return []
        return [f"concurrency {clients} exceeds the {max_seqs} requests that run at once: TTFT includes queueing"]

    async def close(self) -> None:
        """Do nothing: the engine belongs to the caller."""


def _finish(exchange: Exchange, output: RequestOutput, now: float) -> None:
    exchange.end_s = now
    exchange.prompt_tokens = output.usage.prompt_tokens
    exchange.cached_tokens = output.usage.cached_tokens
    exchange.output_tokens = sum(chunk.tokens or 0 for chunk in exchange.chunks)
    if output.timings.scheduled_s is not None:
        exchange.queue_s = output.timings.scheduled_s - output.timings.arrival_s
    if output.finish_reason == "error":
        exchange.fail(f"error: {output.error}", now)
    elif output.finish_reason == "abort":
        exchange.fail("aborted", now)
    elif exchange.output_tokens != output.usage.output_tokens:
        exchange.fail(f"claims {output.usage.output_tokens} tokens, delivered {exchange.output_tokens}", now)
