"""What a step costs outside the executor: scheduling, arrays, sampling, bookkeeping, text, callbacks, the server.

    python benchmarks/step_overhead.py PLAN

Everything is real except the model: the plan's tokenizer and limits, engine, scheduler, sampler, HTTP server. README.md
says how to read the table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from stand_in_executor import StandInExecutor, StandInSpeculator, make_logits

from optimc.plan import Plan
from optimc_runtime import sampler, scheduler
from optimc_runtime.config import EngineConfig
from optimc_runtime.engine import Engine
from optimc_runtime.executor.base import KvPoolInfo
from optimc_runtime.request import RequestOutput, SamplingParams
from optimc_runtime.server import HttpServer, build_app
from optimc_runtime.tokenizer import Tokenizer

BATCHES = (1, 16)
SWEEP_BYTES = 64 << 20
"""What a step reads first unless it is warm: about the weights of SmolLM2-135M in 4 bits."""
PROMPT_TOKENS = 40
SAMPLINGS = {"greedy": {"temperature": 0.0}, "top-p": {"temperature": 0.8, "top_p": 0.95, "seed": 1}}
PLACES = ("warm", "cold", "http")
COLUMNS = ("schedule", "arrays", "sample", "native", "commit", "rest", "total", "loop cpu")


class Stopwatch:
    """Time spent in functions, each called through `owner.name`."""

    def __init__(self, *places: tuple[object, str]) -> None:
        self.total_s = 0.0
        for owner, name in places:
            self._time(owner, name)

    def _time(self, owner: object, name: str) -> None:
        function = getattr(owner, name)

        def timed(*args: object, **options: object) -> object:
            started_s = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.total_s += time.perf_counter() - started_s

        setattr(owner, name, timed)


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    place: str
    batch: int
    sampling: str
    prefix_cache: bool
    speculation: bool = False
    """Every step verifies a tree of three nodes per sequence and accepts two; what guessing takes is not counted."""

    @property
    def name(self) -> str:
        options = f"{', prefix cache' if self.prefix_cache else ''}{', trees' if self.speculation else ''}"
        return f"{self.place} batch {self.batch} {self.sampling}{options}"


class Bench:
    """Measures cases on one plan's tokenizer and limits, `steps` decode steps each."""

    def __init__(self, plan: Plan, steps: int) -> None:
        self._manifest = plan.manifest
        self._tokenizer = Tokenizer.from_plan(plan)
        self._steps = steps
        self._logits = make_logits(4 * max(BATCHES), plan.manifest.model.vocab_size)
        self._arrays = Stopwatch(
            (scheduler, "build_step"), (scheduler.DecodeSteps, "build"), (scheduler.SpeculativeSteps, "build")
        )
        self._native = Stopwatch((sampler._native, "sample_rows"), (sampler._native, "sample_trees"))
        self._prompts = np.random.default_rng(1).integers(100, 20_000, (max(BATCHES), PROMPT_TOKENS)).tolist()

    def measure(self, case: Case) -> dict[str, float]:
        """Return the microseconds per step of each phase."""
        return self._serve(case) if case.place == "http" else self._run(case)

    def _run(self, case: Case) -> dict[str, float]:
        """Neither threads nor server."""
        engine, executor = self._engine(case)
        tokens = 3 * self._steps if case.speculation else self._steps
        params = SamplingParams(max_tokens=tokens + 4, ignore_eos=True, **SAMPLINGS[case.sampling])
        received: list[RequestOutput] = []
        for prompt in self._prompts[: case.batch]:
            engine.submit(prompt, params, on_output=received.append)
        while engine.stats().output_tokens < case.batch:  # prefill
            engine.step()
        before = self._snapshot(engine, executor)
        started_s = time.perf_counter()
        for _ in range(self._steps):
            received.clear()
            engine.step()
        wall_s = time.perf_counter() - started_s
        after = self._snapshot(engine, executor)
        engine.close()
        return _phases(before, after, wall_s)

    def _serve(self, case: Case) -> dict[str, float]:
        """The engine's own thread, and streams that another process reads over HTTP."""
        engine, executor = self._engine(case)
        fields = {
            "max_tokens": self._steps, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}
        }  # fmt: skip
        bodies = [
            json.dumps({**fields, **SAMPLINGS[case.sampling], "prompt": prompt})
            for prompt in self._prompts[: case.batch]
        ]
        with engine, _served(engine) as (url, event_loop):
            before, cpu_before_s = self._snapshot(engine, executor), _cpu_s(event_loop)
            address = url.removeprefix("http://").rsplit(":", 1)
            client = [sys.executable, str(Path(__file__).parent / "serving_client.py"), *address, "/v1/completions"]
            subprocess.run(client, input="\n".join(bodies), text=True, check=True, stdout=subprocess.DEVNULL)
            after, cpu_after_s = self._snapshot(engine, executor), _cpu_s(event_loop)
        figures = _phases(before, after, None)
        return {**figures, "loop cpu": (cpu_after_s - cpu_before_s) / (after["steps"] - before["steps"]) * 1e6}

    def _engine(self, case: Case) -> tuple[Engine, StandInExecutor]:
        limits, block_size = self._manifest.limits, self._manifest.kv.block_size
        num_blocks = max(BATCHES) * -(-limits.max_seq_len // block_size)
        sweep_bytes = 0 if case.place == "warm" else SWEEP_BYTES
        executor = StandInExecutor(KvPoolInfo(num_blocks, block_size, 1), self._logits, sweep_bytes)
        config = EngineConfig(prefix_cache=case.prefix_cache)
        speculator = StandInSpeculator(executor) if case.speculation else None
        return Engine(executor, self._manifest, self._tokenizer, config, speculator=speculator), executor

    def _snapshot(self, engine: Engine, executor: StandInExecutor) -> dict[str, float]:
        stats = engine.stats()
        return {
            "steps": stats.steps, "draft": stats.draft_s,
            "schedule": stats.schedule_s, "sample": stats.sample_s, "commit": stats.commit_s,
            "execute": executor.execute_s, "arrays": self._arrays.total_s, "native": self._native.total_s,
        }  # fmt: skip


def _phases(before: dict[str, float], after: dict[str, float], wall_s: float | None) -> dict[str, float]:
    """Microseconds per step between two snapshots; with `wall_s`, also what no counter of the engine covers."""
    steps = after["steps"] - before["steps"]
    spent = {name: (after[name] - before[name]) / steps * 1e6 for name in before}
    counted = spent["schedule"] + spent["sample"] + spent["commit"]
    if wall_s is None:
        return {**spent, "total": counted}
    total = wall_s / steps * 1e6 - spent["execute"] - spent["draft"]
    return {**spent, "rest": total - counted, "total": total}


@contextmanager
def _served(engine: Engine) -> Iterator[tuple[str, threading.Thread]]:
    """Yield the address of a server, and the thread of its event loop."""
    ready = threading.Event()
    server = HttpServer(build_app(engine, model_name="stand-in"), port=0, on_ready=lambda _url: ready.set())
    thread = threading.Thread(target=server.run)
    thread.start()
    ready.wait()
    try:
        yield server.url, thread
    finally:
        server.stop()
        thread.join()


def _cpu_s(thread: threading.Thread) -> float:
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--steps", type=int, default=300, help="decode steps per measurement")
    parser.add_argument("--repeat", type=int, default=5, help="measurements per row, of which the median is shown")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    options = parser.parse_args()
    with Plan.open(options.plan) as plan:
        bench = Bench(plan, options.steps)
    cases = [
        Case(place, batch, sampling, prefix_cache)
        for place in PLACES
        for batch in BATCHES
        for sampling, prefix_cache in (("greedy", False), ("greedy", True), ("top-p", False))
    ]
    cases += [Case(place, batch, "greedy", False, True) for place in ("warm", "cold") for batch in BATCHES]
    runs: dict[Case, list[dict[str, float]]] = {case: [] for case in cases if options.only in case.name}
    for _ in range(options.repeat):  # all rows, then all again: a slow minute of the machine hits every row
        for case, figures in runs.items():
            figures.append(bench.measure(case))
    print(f"{'us per step':36}" + "".join(f"{column:>10}" for column in COLUMNS))
    for case, figures in runs.items():
        medians = [
            f"{statistics.median(run[column] for run in figures):.1f}" if column in figures[0] else ""
            for column in COLUMNS
        ]
        print(f"{case.name:36}" + "".join(f"{median:>10}" for median in medians))


if __name__ == "__main__":
    main()
