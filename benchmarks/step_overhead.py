"""What a step costs outside the executor: scheduling, arrays, sampling, bookkeeping, text, callbacks, the server.

    python benchmarks/step_overhead.py PLAN

Everything is real except the model: the plan's tokenizer and limits, engine, scheduler, sampler, HTTP server. README.md
says how to read the table.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
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
from stand_in_executor import StandInExecutor, make_logits

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
"""What a cold step reads first: about the weights of SmolLM2-135M in 4 bits."""
PROMPT_TOKENS = 40
SAMPLINGS = {"greedy": {"temperature": 0.0}, "top-p": {"temperature": 0.8, "top_p": 0.95, "seed": 1}}
COLUMNS = ("schedule", "build", "sample", "native", "commit", "rest", "total", "loop cpu")


class Stopwatch:
    """Time spent in one function, wherever it is called through `owner.name`."""

    def __init__(self, owner: object, name: str) -> None:
        self.total_s = 0.0
        function = getattr(owner, name)

        def timed(*args: object, **options: object) -> object:
            started_s = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.total_s += time.perf_counter() - started_s

        setattr(owner, name, timed)


@dataclass
class Case:
    """One row of the table."""

    name: str
    batch: int
    sampling: str
    prefix_cache: bool = False
    sweep: bool = False


class Bench:
    """Runs cases on one plan's tokenizer and limits."""

    def __init__(self, plan: Plan, steps: int) -> None:
        self._manifest = plan.manifest
        self._tokenizer = Tokenizer.from_plan(plan)
        self._steps = steps
        self._logits = make_logits(max(BATCHES), plan.manifest.model.vocab_size)
        self._build = Stopwatch(scheduler, "build_step")
        self._native = Stopwatch(sampler._native, "sample_rows")
        self._prompts = np.random.default_rng(1).integers(100, 20_000, (max(BATCHES), PROMPT_TOKENS)).tolist()

    def run(self, case: Case) -> dict[str, float]:
        """Return the microseconds per step of each phase, without a thread and without a server."""
        engine, executor = self._engine(case)
        params = SamplingParams(max_tokens=self._steps + 2, ignore_eos=True, **SAMPLINGS[case.sampling])
        received: list[RequestOutput] = []
        for prompt in self._prompts[: case.batch]:
            engine.submit(prompt, params, on_output=received.append)
        engine.step()
        before = self._snapshot(engine, executor)
        started_s = time.perf_counter()
        for _ in range(self._steps):
            received.clear()
            engine.step()
        wall_s = time.perf_counter() - started_s
        after = self._snapshot(engine, executor)
        engine.close()
        return self._phases(before, after, wall_s)

    def serve(self, case: Case) -> dict[str, float]:
        """The same with the engine's own thread and streams read by another process over HTTP."""
        engine, executor = self._engine(case)
        with engine, _served(engine) as (url, loop_thread):
            body = {
                "model": "stand-in", "prompt": "", "max_tokens": self._steps, "stream": True, "ignore_eos": True,
                **SAMPLINGS[case.sampling],
            }  # fmt: skip
            bodies = [json.dumps({**body, "prompt": prompt}) for prompt in self._prompts[: case.batch]]
            before = self._snapshot(engine, executor)
            cpu_s = -_cpu_s(loop_thread)
            started_s = time.perf_counter()
            subprocess.run(
                [sys.executable, str(Path(__file__).resolve()), "--client", url],
                input="\n".join(bodies),
                text=True,
                check=True,
            )
            wall_s = time.perf_counter() - started_s
            cpu_s += _cpu_s(loop_thread)
            after = self._snapshot(engine, executor)
        figures = self._phases(before, after, wall_s)
        figures["loop cpu"] = cpu_s / (after["steps"] - before["steps"]) * 1e6
        # The process that reads the streams takes a while to start: wall time says nothing here.
        figures["total"] = sum(figures[name] for name in ("schedule", "sample", "commit"))
        del figures["rest"]
        return figures

    def _engine(self, case: Case) -> tuple[Engine, StandInExecutor]:
        limits, block_size = self._manifest.limits, self._manifest.kv.block_size
        num_blocks = max(BATCHES) * -(-limits.max_seq_len // block_size)
        executor = StandInExecutor(
            KvPoolInfo(num_blocks, block_size, 1), self._logits, SWEEP_BYTES if case.sweep else 0
        )
        config = EngineConfig(prefix_cache=case.prefix_cache)
        return Engine(executor, self._manifest, self._tokenizer, config), executor

    def _snapshot(self, engine: Engine, executor: StandInExecutor) -> dict[str, float]:
        stats = engine.stats()
        return {
            "steps": stats.steps, "schedule": stats.schedule_s, "sample": stats.sample_s, "commit": stats.commit_s,
            "execute": executor.execute_s, "build": self._build.total_s, "native": self._native.total_s,
        }  # fmt: skip

    @staticmethod
    def _phases(before: dict[str, float], after: dict[str, float], wall_s: float) -> dict[str, float]:
        steps = after["steps"] - before["steps"]
        spent = {name: (after[name] - before[name]) / steps * 1e6 for name in before}
        total = wall_s / steps * 1e6 - spent["execute"]
        rest = total - spent["schedule"] - spent["sample"] - spent["commit"]
        return {**spent, "rest": rest, "total": total}


@contextmanager
def _served(engine: Engine) -> Iterator[tuple[str, threading.Thread]]:
    ready = threading.Event()
    server = HttpServer(build_app(engine, model_name="stand-in"), port=0, on_ready=lambda _url: ready.set())
    thread = threading.Thread(target=server.run, name="event-loop")
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


def read_streams(url: str, bodies: list[str]) -> None:
    """Send every body on a connection of its own and read all replies to their ends, as cheaply as can be."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    tails: dict[socket.socket, bytes] = {}
    with selectors.DefaultSelector() as selector:
        for body in bodies:
            connection = socket.create_connection((host, int(port)))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall((head + body).encode())
            tails[connection] = b""
            selector.register(connection, selectors.EVENT_READ)
        while tails:
            for key, _ in selector.select():
                connection = key.fileobj
                received = connection.recv(1 << 16)
                assert received, "the server hung up"
                tails[connection] = (tails[connection] + received)[-32:]
                if tails[connection].endswith(b"0\r\n\r\n"):
                    assert b"[DONE]" in tails.pop(connection)
                    selector.unregister(connection)
                    connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--steps", type=int, default=300, help="decode steps per measurement")
    parser.add_argument("--repeat", type=int, default=5, help="measurements per row, of which the median is shown")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    options = parser.parse_args()
    cases = [
        Case(f"{where} batch {batch} {sampling}{', prefix cache' if cache else ''}", batch, sampling, cache, sweep)
        for where, sweep in (("warm", False), ("cold", True), ("http", True))
        for batch in BATCHES
        for sampling in SAMPLINGS
        for cache in (False, True)
        if sampling == "greedy" or not cache
    ]
    cases = [case for case in cases if options.only in case.name]
    with Plan.open(options.plan) as plan:
        bench = Bench(plan, options.steps)
    results: dict[str, list[dict[str, float]]] = {case.name: [] for case in cases}
    for _ in range(options.repeat):  # all rows once, then all again: a slow minute of the machine hits every row
        for case in cases:
            measure = bench.serve if case.name.startswith("http") else bench.run
            results[case.name].append(measure(case))
    print(f"{'us per step':36}" + "".join(f"{column:>10}" for column in COLUMNS))
    for name, runs in results.items():
        medians = [statistics.median(run[column] for run in runs) if column in runs[0] else None for column in COLUMNS]
        print(f"{name:36}" + "".join(f"{'' if value is None else f'{value:.1f}':>10}" for value in medians))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        read_streams(sys.argv[2], sys.stdin.read().split("\n"))
    else:
        main()
