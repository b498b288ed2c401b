"""A whole optimc engine (scheduler, executor, sampler, detokenizer) behind worker.py's protocol.

python optimc_worker.py PLAN THREADS [KV-BYTES]
"""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from optimc_runtime.config import EngineConfig
from optimc_runtime.engine import Engine
from optimc_runtime.request import RequestOutput, SamplingParams
from optimc_runtime.stats import EngineStats
from peer.worker import answer_questions


@dataclass
class _Answer:
    """One request as its receiver sees it, seconds since the burst began."""

    first_s: float | None = None
    end_s: float | None = None
    tokens: int = 0
    text: list[str] = field(default_factory=list)


class OptimcEngine:
    """Answers bursts, and says how a decode step's time was spent."""

    def __init__(self, plan: str, threads: int, kv_bytes: int | None = None) -> None:
        config = EngineConfig(threads=threads, prefix_cache=False, kv_memory_bytes=kv_bytes)
        self._engine = Engine.load(plan, config, trust=True)
        self._engine.start()
        self._engine.warm_up()

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if question["ask"] == "versions":
            return {"optimc": version("optimc")}
        answers, steps = self._burst(question["prompts"], question["output_tokens"])
        requests = [{"first_s": each.first_s, "end_s": each.end_s, "tokens": each.tokens} for each in answers]
        return {"requests": requests, "decode_steps": steps}

    def _burst(
        self, prompts: Sequence[Sequence[int]], output_tokens: int
    ) -> tuple[list[_Answer], dict[str, float] | None]:
        """Submit all prompts, receive their text as it comes, as `Engine.stream` does."""
        arrived: queue.SimpleQueue[tuple[int, RequestOutput, float]] = queue.SimpleQueue()
        answers = [_Answer() for _ in prompts]
        steps = _DecodeSteps(self._engine, len(prompts), output_tokens)
        params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        started_s = time.perf_counter()
        for number, prompt in enumerate(prompts):

            def on_output(output: RequestOutput, number: int = number) -> None:
                now_s = time.perf_counter()
                steps.count(number, len(output.token_ids), now_s)
                arrived.put((number, output, now_s - started_s))

            self._engine.submit(prompt, params, on_output=on_output)
        unfinished = len(prompts)
        while unfinished:
            number, output, at_s = arrived.get()
            if output.error is not None:
                raise output.error
            answer = answers[number]
            answer.first_s = at_s if answer.first_s is None else answer.first_s
            answer.end_s = at_s
            answer.tokens += len(output.token_ids)
            answer.text.append(output.text)
            unfinished -= output.finish_reason is not None
        return answers, steps.figures()


class _DecodeSteps:
    """The engine's own account of the steps in which every request of a burst decodes, and nothing else happens. Both
    ends are taken when the same request gets a token, so at the same place within a step: first when all have two
    tokens, then before one is complete. Called from the engine's thread."""

    def __init__(self, engine: Engine, requests: int, output_tokens: int) -> None:
        self._engine = engine
        self._tokens = [0] * requests
        self._output_tokens = output_tokens
        self._marker: int | None = None
        self._marker_end = 0
        self._first: tuple[EngineStats, float] | None = None
        self._last: tuple[EngineStats, float] | None = None

    def count(self, number: int, tokens: int, now_s: float) -> None:
        counts = self._tokens
        counts[number] += tokens
        if self._marker is None:
            if min(counts) >= 2:
                self._marker, self._first = number, (self._engine.stats(), now_s)
                self._marker_end = counts[number] + self._output_tokens - 1 - max(counts)
        elif number == self._marker and counts[number] == self._marker_end:
            self._last = self._engine.stats(), now_s

    def figures(self) -> dict[str, float] | None:
        """Seconds by kind and number of steps; None if requests never decoded side by side long enough."""
        if self._first is None or self._last is None:
            return None
        (first, first_s), (last, last_s) = self._first, self._last
        steps = last.steps - first.steps
        if steps < 1:
            return None
        return {
            "steps": steps,
            "wall_s": last_s - first_s,
            "execute_s": last.execute_s - first.execute_s,
            "sample_s": last.sample_s - first.sample_s,
        }


if __name__ == "__main__":
    answer_questions(OptimcEngine(sys.argv[1], *map(int, sys.argv[2:])).answer)
