"""All that is asked of one plan, in the order in which it pays to know."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gpu.check import Outcome, Report
from gpu.invariance import check_calls, check_chunks, check_graphs, check_mates, check_trees
from gpu.memory import check_lost, check_shapes
from gpu.parity import check_drafts, check_greedy, check_parity
from gpu.plans import Subject
from gpu.rows import check_row_bandwidth, check_rows
from gpu.timing import check_decode, check_prefill
from optimc.plan import Plan
from optimc_runtime.executor.base import Executor
from optimc_runtime.executor.load import load_executor
from optimc_runtime.executor.tensorrt.contexts import GRAPHS_VARIABLE
from optimc_runtime.executor.tensorrt.cuda import CudaDevice
from optimc_runtime.executor.tensorrt.engine import KERNELS_VARIABLE
from optimc_runtime.executor.tensorrt.requirements import check_plan
from optimc_runtime.tokenizer import Tokenizer

PROMPTS = Path(__file__).parents[1] / "prompts" / "prose.jsonl"
KV_BYTES = 1 << 30
DRAFT_TOLERANCE = 0.05
"""Nats: half numbers in the heads' products, over log-probabilities down to about -10."""


class SubjectCheck:
    """Checks one plan on one GPU. What fails is a finding; only what does not load leaves the rest undone."""

    def __init__(self, report: Report, subject: Subject, device: CudaDevice, bytes_per_s: float | None) -> None:
        self._report, self._subject, self._device, self._bytes_per_s = report, subject, device, bytes_per_s
        self._plan = Plan.open(subject.plan)
        limits = self._plan.manifest.limits
        self._most, self._seqs = limits.max_step_tokens, limits.max_seqs
        self._context = max(1, min(limits.max_seq_len - 64, 512))
        self._prompts = prompts_of(self._plan, limits.max_seq_len - 40)
        self._text = np.concatenate(self._prompts)[: min(self._most, limits.max_seq_len, 120)]

    def run(self) -> None:
        """Run everything."""
        plan, device = self._plan, self._device
        before, _ = device.memory()
        program = check_plan(plan)
        self._run("commit and move", check_rows(plan, program, device))
        self._run("bandwidth of commits", check_row_bandwidth(plan, program, device, self._bytes_per_s))
        loaded: list[Executor] = []
        if not self._run("load", self._loading(loaded)):
            return
        (executor,) = loaded
        free, _ = device.memory()
        vocab, same = plan.manifest.model.vocab_size, self._subject.limits.same
        self._run("chunks", check_chunks(executor, self._text, self._most, same))
        self._run("mates", check_mates(executor, self._text, min(8, self._seqs), vocab, same))
        self._run("calls", check_calls(executor, self._text, same))
        self._run("trees", check_trees(executor, self._text, same))
        batches = [batch for batch in (1, 8, 32) if batch <= self._seqs]
        self._run("decode", check_decode(plan, program, executor, self._bytes_per_s, batches, self._context))
        lengths = [length for length in (128, 512) if length <= plan.manifest.limits.max_seq_len]
        self._run("prefill", check_prefill(plan, executor, lengths))
        self._run("memory of shapes", check_shapes(executor, free, device.memory()[0]))
        self._beside_reference(executor)
        executor.close()
        closed, _ = device.memory()
        self._run("graphs", check_graphs(lambda graphs: self._load(graphs=graphs), self._text))
        for name, changes in (("without graphs", {"graphs": False}), ("kernels per shape", {"eager": True})):
            self._run(name, self._timed_again(name, **changes))
        self._run("memory", check_lost(before, closed, device.memory()[0]))

    def _beside_reference(self, executor: Executor) -> None:
        if self._subject.reference is None:
            return
        reference = load_executor(Plan.open(self._subject.reference), kv_memory_bytes=KV_BYTES // 2)
        limits = self._subject.limits
        self._run("parity", check_parity(executor, reference, self._prompts, limits, min(self._most, 64)))
        if executor.heads is not None and reference.heads is not None:
            self._run("drafts", check_drafts(executor, reference, self._prompts, DRAFT_TOLERANCE))
        self._run("greedy", check_greedy(self._plan, executor, reference, self._prompts[:6], limits, 32))
        reference.close()

    def _loading(self, loaded: list[Executor]) -> Iterator[Outcome]:
        loaded.append(self._load())
        free, _ = self._device.memory()
        yield Outcome("load", True, f"{loaded[0].pool.num_blocks:,} blocks, {free / 1e9:.1f} GB left free")

    def _timed_again(self, name: str, **changes: bool) -> Iterator[Outcome]:
        """Time decode steps of an executor that is loaded otherwise."""
        program = check_plan(self._plan)
        with closing(self._load(**changes)) as executor:
            for outcome in check_decode(self._plan, program, executor, None, [1], self._context):
                yield Outcome(f"{name}: {outcome.name}", None, outcome.found.partition(", the")[0], "", outcome.figures)

    def _load(self, *, graphs: bool = True, eager: bool = False) -> Executor:
        kv_bytes = min(KV_BYTES, self._plan.manifest.limits.kv_memory_bytes)
        with _environment({GRAPHS_VARIABLE: str(int(graphs)), KERNELS_VARIABLE: "eager" if eager else ""}):
            return load_executor(self._plan, kv_memory_bytes=kv_bytes)

    def _run(self, name: str, check: Iterator[Outcome]) -> bool:
        return self._report.run(self._subject.name, name, lambda: check)


def prompts_of(plan: Plan, most: int) -> list[NDArray[np.int64]]:
    """Return prompts in the plan's tokens, cut to `most`; random ones for a plan without a tokenizer."""
    tokenizer = Tokenizer.from_plan(plan)
    if tokenizer is None:
        rng = np.random.default_rng(7)
        return [rng.integers(0, plan.manifest.model.vocab_size, min(most, 20 + 3 * index)) for index in range(8)]
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    return [np.array(tokenizer.encode(text), np.int64)[:most] for text in texts]


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables for the time of loading, which is when they are looked at."""
    before = {name: os.environ.get(name) for name in values}
    os.environ |= values
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
