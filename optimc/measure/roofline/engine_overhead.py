"""What the engine takes per step beside its executor: scheduling, arrays, sampling, answers."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimc.errors import EngineError
from optimc.measure.roofline.synthetic import BLOCK_SIZE, synthetic_manifest
from optimc.plan import KvLayer, KvLayout
from optimc_runtime.config import EngineConfig
from optimc_runtime.engine import Engine
from optimc_runtime.executor.base import DraftCandidates, KvPoolInfo, StepPlan, StepResult
from optimc_runtime.request import SamplingParams

BATCH = 16
NARROW_VOCAB, WIDE_VOCAB = 64, 32_768
SWEEP_BYTES = 32 << 20
"""What a step reads first, so that the engine finds the caches as a model's weights leave them."""
STEPS = 80


@dataclass(frozen=True, slots=True)
class EngineSeconds:
    """Of the engine, per step; see MachineRates."""

    step_s: float
    sequence_s: float
    logits_row_s_per_element: float


class IdleExecutor:
    """Sweeps the caches and answers logits made beforehand; `taken_s` is what that took."""

    def __init__(self, vocab_size: int, sequences: int) -> None:
        self.pool = KvPoolInfo(sequences * 64, BLOCK_SIZE, 1)
        self.heads = None
        self.taken_s = 0.0
        self._source = np.random.default_rng(0).standard_normal((2 * sequences, vocab_size), np.float32)
        self._logits: NDArray[np.float32] = np.empty((sequences, vocab_size), np.float32)
        self._sweep = np.ones(SWEEP_BYTES // 8)
        self._step = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Return R rows of logits, others than in the step before."""
        started_s = time.perf_counter()
        np.add.reduce(self._sweep)
        rows = len(plan.logits_rows)
        first = self._step % len(self._logits)
        self._step += 1
        np.copyto(self._logits[:rows], self._source[first : first + rows])  # as fresh in the caches as a real one's
        result = StepResult(self._logits[:rows])
        self.taken_s += time.perf_counter() - started_s
        return result

    def move(self, src_slots: NDArray[np.int64], dst_slots: NDArray[np.int64]) -> None:
        """Do nothing: there is no pool."""

    def draft(self, hidden: NDArray[np.float32], tokens: NDArray[np.int64], top: int) -> DraftCandidates:
        """Raise EngineError: there are no heads."""
        raise EngineError("an executor without a model has no heads")

    def close(self) -> None:
        """Do nothing."""


def measure_engine() -> EngineSeconds:
    """Run decode steps of one sequence and of several, with few and many logits."""
    one_s = _step_s(1, NARROW_VOCAB)
    all_s = _step_s(BATCH, NARROW_VOCAB)
    wide_s = _step_s(BATCH, WIDE_VOCAB)
    return EngineSeconds(
        step_s=one_s,
        sequence_s=max(0.0, (all_s - one_s) / (BATCH - 1)),
        logits_row_s_per_element=max(0.0, (wide_s - all_s) / (BATCH * (WIDE_VOCAB - NARROW_VOCAB))),
    )


def _step_s(sequences: int, vocab_size: int) -> float:
    """Return the median seconds of a decode step outside the executor."""
    executor = IdleExecutor(vocab_size, sequences)
    layout = KvLayout(block_size=BLOCK_SIZE, dtype="float32", layers=(KvLayer(num_kv_heads=1, head_dim=16, window=0),))
    manifest = synthetic_manifest({}, layout, vocab_size, max_seqs=sequences, max_seq_len=64 * BLOCK_SIZE)
    engine = Engine(executor, manifest, None, EngineConfig())
    answers: list[object] = []
    params = SamplingParams(max_tokens=STEPS + 8, ignore_eos=True, temperature=0.0)
    for sequence in range(sequences):
        engine.submit([sequence % vocab_size] * 4, params, on_output=answers.append)
    while engine.stats().output_tokens < sequences:
        engine.step()
    taken = []
    for _ in range(STEPS):
        answers.clear()
        executor.taken_s = 0.0
        started_s = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - started_s - executor.taken_s)
    engine.close()
    return statistics.median(taken)
