"""How long steps take, beside the least that reading weights and context takes at the memory's bandwidth.

The floor counts the engine's bytes, less one table of half numbers that a step reads a row of, and the context's rows.
It leaves out everything else, so nothing should beat it. On a model as small as SmolLM2 launches cost more than memory,
which makes up for what an rtx engine holds beside weights: some 50 MB of its kernels' source.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np

from gpu.check import Outcome
from gpu.sequences import Sequences
from optimc.measure.roofline.gpu_table import GPUS
from optimc.plan import Plan
from optimc.plan.tensorrt_program import TensorRtProgram
from optimc_runtime.executor.base import Executor
from optimc_runtime.executor.tensorrt.pool import cache_tensors

SLOWEST = 25.0
"""Times the floor that a decode step may take before something is wrong: a graph of small kernels is far from it."""


def bandwidth_of(name: str) -> tuple[str, float] | None:
    """Return the datasheet's entry for what the driver calls the GPU, and its bytes per second; None if unknown."""
    words = name.lower().replace("-", " ").split()
    if "laptop" in words:  # less memory, slower, under the same name
        return None
    known = [gpu for gpu in GPUS if all(word in words for word in gpu.name.lower().split())]
    best = max(known, key=lambda gpu: len(gpu.name), default=None)
    return None if best is None else (best.name, best.bytes_per_s)


def check_decode(
    plan: Plan,
    program: TensorRtProgram,
    executor: Executor,
    bytes_per_s: float | None,
    batches: Sequence[int],
    context: int,
    steps: int = 40,
) -> Iterator[Outcome]:
    """Time decode steps of each batch after so much context: the first of its shape, and the median."""
    manifest = plan.manifest
    rng = np.random.default_rng(0)
    row_bytes = sum(tensor.row_bytes for tensor in cache_tensors(manifest.kv, program.attention))
    table = manifest.model.vocab_size * manifest.model.hidden_size * 2
    weights = max(0, plan.spec(program.model.tensor).nbytes - table)
    for batch in batches:
        sequences = Sequences(executor.pool)
        most = manifest.limits.max_step_tokens
        for index in range(batch):
            prompt = rng.integers(0, manifest.model.vocab_size, context)
            for start in range(0, context, most):
                executor.execute(sequences.step([(str(index), prompt[start : start + most])], rows=[]))
        seconds = []
        for _ in range(steps):
            work = [(str(index), rng.integers(0, manifest.model.vocab_size, 1)) for index in range(batch)]
            step = sequences.step(work)
            started_s = time.perf_counter()
            executor.execute(step)
            seconds.append(time.perf_counter() - started_s)
        tpot = statistics.median(seconds[5:])
        name = f"TPOT, batch {batch}, context {context}"
        figures = {"tpot_s": tpot, "first_s": seconds[0], "steps_s": seconds}
        yield Outcome(f"first step, batch {batch}", None, f"{seconds[0] * 1e3:.1f} ms", figures={"value": seconds[0]})
        if bytes_per_s is None:
            yield Outcome(name, None, f"{tpot * 1e3:.2f} ms, the GPU's bandwidth is unknown", figures=figures)
            continue
        floor = (weights + batch * context * row_bytes) / bytes_per_s
        figures["floor_s"] = floor
        yield Outcome(
            name, bool(floor <= tpot <= SLOWEST * floor), f"{tpot * 1e3:.2f} ms, {tpot / floor:.1f} times the floor",
            f"1 to {SLOWEST:.0f} times {floor * 1e3:.3f} ms", figures,
        )  # fmt: skip


def check_prefill(plan: Plan, executor: Executor, lengths: Sequence[int], repeats: int = 5) -> Iterator[Outcome]:
    """Time prompts to their first logits."""
    manifest = plan.manifest
    rng = np.random.default_rng(0)
    for length in lengths:
        seconds = []
        for repeat in range(repeats + 1):
            sequences, most = Sequences(executor.pool, repeat), manifest.limits.max_step_tokens
            prompt = rng.integers(0, manifest.model.vocab_size, length)
            started_s = time.perf_counter()
            for start in range(0, length, most):
                part = prompt[start : start + most]
                last = [len(part) - 1] if start + most >= length else []
                executor.execute(sequences.step([("a", part)], rows=last))
            seconds.append(time.perf_counter() - started_s)
        ttft = statistics.median(seconds[1:])
        yield Outcome(
            f"TTFT of {length} tokens", None, f"{ttft * 1e3:.2f} ms, {length / ttft:,.0f} tokens/s, the first "
            f"{seconds[0] * 1e3:.1f} ms", figures={"ttft_s": ttft, "first_s": seconds[0]},
        )  # fmt: skip
