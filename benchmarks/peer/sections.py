"""The sections of the report: which engines do what, how often. Each leaves nothing running."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from peer.burst import Workload
from peer.engines import REPEATS, WorkerEngine, optimc_engine
from peer.llama_cpp import LlamaServer
from peer.machine_probe import MachineState
from peer.names import (
    CONCURRENT,
    CONTEXT_LONG,
    CONTEXT_SHORT,
    DECODE,
    EXCESS,
    KL,
    LARGE_DECODE,
    LARGE_PREFILL,
    LLAMA_SERVER,
    LOADED,
    OPTIMC,
    OPTIMC_BF16,
    OPTIMC_SERVE,
    OUTSIDE,
    PREFILL,
    READY,
    RESIDENT,
)
from peer.optimc_server import OptimcServer
from peer.places import LARGE, SMOLLM2, Peers, Plans
from peer.quality import WINDOW_TOKENS, WINDOWS, added_kl
from peer.resident import highest_resident_bytes
from peer.samples import Measurable, Samples, alternate
from peer.starters import for_one_request, for_sixteen_requests, llama_server, set_up

ONE_DECODE, ONE_PREFILL = Workload("decode", 32, 96), Workload("prefill", 512, 1)
SHORT, LONG = Workload("decode", 48, 32), Workload("decode", 1984, 32)
SIXTEEN = Workload("throughput", 128, 128, requests=16)
FIRST = Workload("throughput", 8, 1)
SERVE_KV = 256 << 20
"""Bytes of our KV pool where memory is measured; sixteen requests of 256 tokens fill a part of it."""
STARTS = 5


@dataclass(frozen=True)
class Bench:
    """What sections need."""

    peers: Peers
    plans: Plans
    probe: Callable[[], MachineState]
    rounds: int | None
    """For all sections; None lets each choose."""


class _Stoppable(Protocol):
    command: tuple[str, ...]

    def close(self) -> None: ...


class _Timed(_Stoppable, Measurable, Protocol):
    """A section's engine whose speed is measured."""


class _Alone(_Stoppable, Protocol):
    """An engine in one process, whose memory is measured."""

    pid: int

    def burst(self, workload: Workload, seed: int, /) -> Any: ...


Engine = TypeVar("Engine", bound=_Stoppable)
Process = TypeVar("Process", bound=_Alone)


class _Running(ExitStack):
    """Engines that are stopped when the section ends."""

    def __init__(self, samples: Samples) -> None:
        super().__init__()
        self._samples = samples

    def start(self, name: str, engine: Engine) -> Engine:
        self._samples.commands[name] = " ".join(
            Path(part).name if part.startswith("/") else part for part in engine.command
        )
        self._samples.versions |= getattr(engine, "versions", {})
        return self.enter_context(closing(engine))

    def start_all(self, starters: Mapping[str, Callable[[], _Timed]]) -> dict[str, Measurable]:
        return {name: self.start(name, start()) for name, start in starters.items()}


def decode(bench: Bench) -> Samples:
    """One request, short contexts."""
    return _one_request(bench, SMOLLM2, {DECODE: ONE_DECODE}, rounds=5)


def prefill(bench: Bench) -> Samples:
    """One request, a prompt of 512."""
    return _one_request(bench, SMOLLM2, {PREFILL: ONE_PREFILL}, rounds=5)


def large(bench: Bench) -> Samples:
    """Both, of the 587M shape."""
    metrics = {LARGE_DECODE: ONE_DECODE, LARGE_PREFILL: ONE_PREFILL}
    return _one_request(bench, LARGE, metrics, rounds=3)


def context(bench: Bench) -> Samples:
    """What a long context costs, with an int8 pool; the peers keep theirs as they do by default."""
    metrics = {CONTEXT_SHORT: SHORT, CONTEXT_LONG: LONG}
    return _one_request(bench, SMOLLM2, metrics, rounds=3, plan="smollm2-kv8")


def _one_request(
    bench: Bench, model: str, metrics: Mapping[str, Workload], *, rounds: int, plan: str | None = None
) -> Samples:
    samples = Samples()
    samples.notes.append(f"each value is the median of {REPEATS} runs")
    starters: dict[str, Callable[[], _Timed]] = {
        OPTIMC: partial(optimc_engine, bench.plans(plan or model)),
        **set_up(for_one_request(bench.peers, model), bench.peers, samples),
    }
    with _Running(samples) as running:
        alternate(samples, metrics, running.start_all(starters), bench.rounds or rounds, bench.probe)
    return samples


def concurrent(bench: Bench) -> Samples:
    """Sixteen requests at once, keys and values in 8 bits as OpenVINO has them. Servers run behind HTTP, all others in
    process."""
    samples = Samples()
    plan = bench.plans("smollm2-kv8")
    starters: dict[str, Callable[[], _Timed]] = {
        OPTIMC: partial(optimc_engine, plan),
        **set_up(for_sixteen_requests(bench.peers), bench.peers, samples),
        OPTIMC_SERVE: partial(OptimcServer, plan, kv_memory="1GiB"),
        OPTIMC_BF16: partial(optimc_engine, bench.plans(SMOLLM2)),
    }
    with _Running(samples) as running:
        alternate(samples, {CONCURRENT: SIXTEEN}, running.start_all(starters), bench.rounds or 3, bench.probe)
    return samples


def overhead(bench: Bench) -> Samples:
    """The part of a decode step that our engine spends outside its executor, by its own clock."""
    samples = Samples()
    samples.notes.append(
        "from the engine's counters over the steps in which all requests decode; "
        "`without sampling` leaves out the time of the sampler too, which is native code but for its call"
    )
    for model, batches in ((SMOLLM2, (1, 16)), (LARGE, (1,))):
        with _Running(samples) as running:
            engine = running.start(OPTIMC, optimc_engine(bench.plans(model)))
            for batch in batches:
                _measure_share(engine, Workload("throughput", 32, 96, batch), OUTSIDE[model, batch], bench, samples)
    samples.states.append(bench.probe())
    return samples


def _measure_share(engine: WorkerEngine, workload: Workload, metric: str, bench: Bench, samples: Samples) -> None:
    for number in range((bench.rounds or 5) + 1):
        if number == 1:
            samples.states.append(bench.probe())
        spent = engine.burst(workload, number)[1]["decode_steps"]
        if number:
            wall_s, steps = spent["wall_s"], spent["steps"]
            samples.add(metric, OPTIMC, 100 * (1 - spent["execute_s"] / wall_s))
            without_sampling = 1 - (spent["execute_s"] + spent["sample_s"]) / wall_s
            samples.add(f"{metric}, without sampling", OPTIMC, 100 * without_sampling)
            samples.add(f"{metric}: step, ms", OPTIMC, 1e3 * wall_s / steps)


def serve(bench: Bench) -> Samples:
    """How soon a server is ready, and what it holds after sixteen requests at once."""
    samples = Samples()
    plan = bench.plans(SMOLLM2)
    allowed = plan.stat().st_size + SERVE_KV
    samples.notes.append(f"plan {plan.stat().st_size / 1e6:.1f} MB, pool {SERVE_KV / 1e6:.1f} MB")
    starters: dict[str, Callable[[], OptimcServer | LlamaServer]] = {
        OPTIMC: partial(OptimcServer, plan, kv_memory=str(SERVE_KV)),
        **set_up({LLAMA_SERVER: llama_server(bench.peers)}, bench.peers, samples),
    }
    for number in range((bench.rounds or STARTS) + 1):
        if number:
            samples.states.append(bench.probe())
        for name, start in starters.items():
            engine, resident = _fill(name, start, number, samples)
            if number:
                samples.add(READY, name, engine.server.ready_s)
                samples.add(RESIDENT, name, resident / 1e6)
                if name == OPTIMC:
                    samples.add(EXCESS, name, (resident - allowed) / 1e6)
    return samples


def footprint(bench: Bench) -> Samples:
    """How soon each engine has answered, and what it holds after sixteen requests at once: two processes, so that what
    answers one request does not count beside what answers sixteen. No two processes live at the same time."""
    samples = Samples()
    samples.notes.append(f"optimc's pool is {SERVE_KV / 1e6:.1f} MB, all of it resident")
    starters: dict[str, Callable[[], _Alone]] = {
        OPTIMC: partial(optimc_engine, bench.plans(SMOLLM2), kv_bytes=SERVE_KV),
        **set_up(for_sixteen_requests(bench.peers), bench.peers, samples),
    }
    for number in range((bench.rounds or 3) + 1):
        if number:
            samples.states.append(bench.probe())
        for name, start in starters.items():
            started_s = time.perf_counter()
            engine = start()
            with _closing(engine, name, samples):
                engine.burst(FIRST, number)
                answered_s = time.perf_counter()
            _, resident = _fill(name, start, number, samples)
            if number:
                samples.add(LOADED, name, answered_s - started_s)
                samples.add(RESIDENT, name, resident / 1e6)
    samples.states.append(bench.probe())
    return samples


def _fill(name: str, start: Callable[[], Process], seed: int, samples: Samples) -> tuple[Process, int]:
    """Start an engine and let it answer sixteen requests. Return it, ended, and the most bytes it held."""
    engine = start()
    with _closing(engine, name, samples):
        engine.burst(SIXTEEN, seed)
        return engine, highest_resident_bytes(engine.pid)


@contextmanager
def _closing(engine: _Stoppable, name: str, samples: Samples) -> Iterator[None]:
    with _Running(samples) as running:
        running.start(name, engine)
        yield


def quality(bench: Bench) -> Samples:
    """What int8 activations and the engine's other arithmetic add to the quantized graph's divergence."""
    samples = Samples()
    samples.notes.append(f"over {WINDOWS} windows of {WINDOW_TOKENS} tokens, against the onnxruntime target in fp32")
    samples.add(KL, OPTIMC, added_kl(bench.plans("smollm2"), bench.plans("smollm2-oracle")))
    return samples


SECTIONS: Mapping[str, Callable[[Bench], Samples]] = {
    section.__name__: section
    for section in (decode, prefill, large, concurrent, context, overhead, serve, footprint, quality)
}
"""By name, in the order they run."""
