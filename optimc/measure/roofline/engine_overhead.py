"""What a step takes beside the executor: scheduling, arrays, sampling, answers, and the client that receives them.

The engine, its thread and `optimc bench` are real; the executor does the same work in every step, whatever the engine
asks for, on all its threads: a client that wants a core while they compute makes them wait for each other.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimc.errors import EngineError
from optimc.measure.bench import run_bench
from optimc.measure.roofline.synthetic import (
    BLOCK_SIZE,
    RandomFile,
    attention_layout,
    linear_draft,
    synthetic_manifest,
    weight_bytes,
)
from optimc.measure.roofline.timed_steps import step_of, time_steps
from optimc.measure.workload import Workload
from optimc_runtime.config import EngineConfig
from optimc_runtime.engine import Engine
from optimc_runtime.executor.base import DraftCandidates, KvPoolInfo, StepPlan, StepResult
from optimc_runtime.executor.cpu import CpuExecutor
from optimc_runtime.request import SamplingParams

CLIENTS = 16
NARROW_VOCAB, WIDE_VOCAB = 512, 32_768
WORK_BYTES = 64 << 20
"""Weights that a step reads, so that the engine finds the caches as a model leaves them."""
WIDTH = 1024
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64
STEPS = 60
"""Decode steps that are timed."""
ALONE_S = 0.1
"""Spent on a step's work by itself."""
MAX_SEQ_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class EngineSeconds:
    """See MachineRates."""

    step_s: float
    sequence_s: float
    logits_row_s_per_element: float


class SteadyExecutor:
    """Multiplies by the same weights in every step and answers logits made beforehand."""

    def __init__(self, file: RandomFile, threads: int, vocab_size: int) -> None:
        draft, _ = linear_draft("int4", 64, WIDTH, WORK_BYTES // weight_bytes("int4", 64, WIDTH))
        self.pool = KvPoolInfo(2 * CLIENTS * MAX_SEQ_TOKENS // BLOCK_SIZE, BLOCK_SIZE, 1)
        self.heads = None
        self.taken_s: list[float] = []
        """Of every step."""
        self._model = CpuExecutor(file.plan(draft), kv_memory_bytes=1 << 20, threads=threads)
        self._work = step_of([0], [4])
        self._source = np.random.default_rng(0).standard_normal((2 * CLIENTS, vocab_size), np.float32)
        self._logits: NDArray[np.float32] = np.empty((CLIENTS, vocab_size), np.float32)

    def execute(self, plan: StepPlan) -> StepResult:
        """Return R rows of logits, others than in the step before."""
        started_s = time.perf_counter()
        self._model.execute(self._work)
        rows = len(plan.logits_rows)
        first = len(self.taken_s) % CLIENTS
        np.copyto(self._logits[:rows], self._source[first : first + rows])  # as fresh in the caches as a real one's
        self.taken_s.append(time.perf_counter() - started_s)
        return StepResult(self._logits[:rows])

    def alone_s(self) -> float:
        """Return the median seconds of the work when nothing happens between two steps."""
        return time_steps(self._model, [self._work], ALONE_S)[0].median

    def move(self, src_slots: NDArray[np.int64], dst_slots: NDArray[np.int64]) -> None:
        """Do nothing: there is no pool."""

    def draft(self, hidden: NDArray[np.float32], tokens: NDArray[np.int64], top: int) -> DraftCandidates:  # noqa: ARG002
        """Raise EngineError: there are no heads."""
        raise EngineError("an executor without a model has no heads")

    def close(self) -> None:
        """Release threads and weights."""
        self._model.close()


def measure_engine(file: RandomFile, threads: int) -> EngineSeconds:
    """Serve one client and several, then sample from few logits and from many."""
    one_s, work_s = _served_s(file, threads, 1)
    all_s, _ = _served_s(file, threads, CLIENTS)
    narrow_s, wide_s = (_sampled_s(file, threads, vocab) for vocab in (NARROW_VOCAB, WIDE_VOCAB))
    return EngineSeconds(
        step_s=max(0.0, one_s - work_s),
        sequence_s=max(0.0, (all_s - one_s) / (CLIENTS - 1)),
        logits_row_s_per_element=max(0.0, (wide_s - narrow_s) / (CLIENTS * (WIDE_VOCAB - NARROW_VOCAB))),
    )


def _served_s(file: RandomFile, threads: int, clients: int) -> tuple[float, float]:
    """Return the seconds per token of a closed loop, and of a step's work by itself.

    What is between them is the engine and its clients, and that the work starts with caches they have used.
    """
    executor = SteadyExecutor(file, threads, NARROW_VOCAB)
    workload = Workload(
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
        concurrency=clients,
        requests=max(4, 2 * clients),
        warmup_requests=1 + clients,
    )
    with _engine(executor, NARROW_VOCAB) as engine:
        alone_s = executor.alone_s()
        tpot_ms = run_bench(engine, workload).tpot_ms.p50
    assert tpot_ms is not None, "outputs of several tokens"
    return tpot_ms / 1e3, alone_s


def _sampled_s(file: RandomFile, threads: int, vocab_size: int) -> float:
    """Return the median seconds of a decode step outside the executor, with nobody to receive what it answers."""
    executor = SteadyExecutor(file, threads, vocab_size)
    engine = _engine(executor, vocab_size)
    answers: list[object] = []
    params = SamplingParams(max_tokens=STEPS + 8, ignore_eos=True, temperature=0.0)
    for sequence in range(CLIENTS):
        engine.submit([sequence] * 4, params, on_output=answers.append)
    while engine.stats().output_tokens < CLIENTS:
        engine.step()
    taken_s = []
    for _ in range(STEPS):
        answers.clear()
        started_s = time.perf_counter()
        engine.step()
        taken_s.append(time.perf_counter() - started_s - executor.taken_s[-1])
    engine.close()
    return statistics.median(taken_s)


def _engine(executor: SteadyExecutor, vocab_size: int) -> Engine:
    layout = attention_layout("float32", 1, 16, 1)
    manifest = synthetic_manifest({}, layout, vocab_size, max_seqs=CLIENTS, max_seq_len=MAX_SEQ_TOKENS)
    return Engine(executor, manifest, None, EngineConfig())
