"""The sections of the report: which engines do what, how often. Each leaves nothing running."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from peer.burst import Workload
from peer.engines import REPEATS, WorkerEngine, openvino_engine, optimc_engine
from peer.llama_cpp import LlamaBench, LlamaServer
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
    LLAMA,
    LLAMA_SERVER,
    OPENVINO,
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
from peer.samples import Measurable, Samples, alternate

ONE_DECODE, ONE_PREFILL = Workload("decode", 32, 96), Workload("prefill", 512, 1)
SHORT, LONG = Workload("decode", 48, 32), Workload("decode", 1984, 32)
SIXTEEN = Workload("throughput", 128, 128, requests=16)
SERVE_KV = 256 << 20
"""Bytes of KV pool for the server whose memory is measured: what sixteen requests of 256 tokens fill."""
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


Engine = TypeVar("Engine", bound=_Stoppable)


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
    plan_path, peers = bench.plans(plan or model), bench.peers
    with _Running(samples) as running:
        optimc = running.start(OPTIMC, optimc_engine(plan_path))
        llama = running.start(LLAMA, LlamaBench(peers.llama_tools, peers.gguf(model)))
        openvino = running.start(OPENVINO, openvino_engine(peers.openvino_python, peers.openvino_model(model)))
        engines: dict[str, Measurable] = {OPTIMC: optimc, LLAMA: llama, OPENVINO: openvino}
        alternate(samples, metrics, engines, bench.rounds or rounds, bench.probe)
    return samples


def concurrent(bench: Bench) -> Samples:
    """Sixteen requests at once, keys and values in 8 bits as OpenVINO has them. OpenVINO and ours run in process, the
    servers behind HTTP."""
    samples = Samples()
    with _Running(samples) as running:
        plan, peers = bench.plans("smollm2-kv8"), bench.peers
        optimc = running.start(OPTIMC, optimc_engine(plan))
        recipe = running.start(OPTIMC_BF16, optimc_engine(bench.plans(SMOLLM2)))
        served = running.start(OPTIMC_SERVE, OptimcServer(plan, kv_memory="1GiB"))
        llama = running.start(
            LLAMA_SERVER, LlamaServer(peers.llama_tools, peers.gguf(SMOLLM2), slots=16, context_tokens=512)
        )
        openvino = running.start(OPENVINO, openvino_engine(peers.openvino_python, peers.openvino_model(SMOLLM2)))
        engines: dict[str, Measurable] = {
            OPTIMC: optimc,
            LLAMA_SERVER: llama,
            OPENVINO: openvino,
            OPTIMC_SERVE: served,
            OPTIMC_BF16: recipe,
        }
        alternate(samples, {CONCURRENT: SIXTEEN}, engines, bench.rounds or 3, bench.probe)
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
    plan, peers = bench.plans(SMOLLM2), bench.peers
    allowed = plan.stat().st_size + SERVE_KV
    samples.notes.append(f"plan {plan.stat().st_size / 1e6:.1f} MB, pool {SERVE_KV / 1e6:.1f} MB")
    for number in range((bench.rounds or STARTS) + 1):
        if number:
            samples.states.append(bench.probe())
        ours = OptimcServer(plan, kv_memory=str(SERVE_KV))
        with _closing(ours, OPTIMC, samples):
            ours.burst(SIXTEEN, number)
            resident = ours.server.memory_bytes()["highest"]
        theirs = LlamaServer(peers.llama_tools, peers.gguf(SMOLLM2), slots=16, context_tokens=512)
        with _closing(theirs, LLAMA_SERVER, samples):
            theirs.burst(SIXTEEN, number)
            their_resident = theirs.server.memory_bytes()["highest"]
        if number:
            samples.add(READY, OPTIMC, ours.server.ready_s)
            samples.add(READY, LLAMA_SERVER, theirs.server.ready_s)
            samples.add(RESIDENT, OPTIMC, resident / 1e6)
            samples.add(RESIDENT, LLAMA_SERVER, their_resident / 1e6)
            samples.add(EXCESS, OPTIMC, (resident - allowed) / 1e6)
    return samples


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
    section.__name__: section for section in (decode, prefill, large, concurrent, context, overhead, serve, quality)
}
"""By name, in the order they run."""
