"""Engines in worker processes: ours and those of the peers that are Python packages, asked the same token ids."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peer.burst import Burst, Workload
from peer.worker import Worker

THREADS = os.cpu_count() or 1
REPEATS = 3
"""Runs of one request within a turn; the median counts."""


class WorkerEngine:
    """An engine behind worker.py's protocol, its model loaded. A seed stands for prompts nobody has seen before."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = tuple(command)
        self._worker = Worker(command)
        self.versions: dict[str, str] = self._worker.ask(ask="versions")
        self.pid = self._worker.pid

    def burst(self, workload: Workload, seed: int) -> tuple[Burst, dict[str, Any]]:
        """Return the answers, and all the engine said. Raises PeerError, and ValueError for missing tokens."""
        prompts = workload.prompts(seed)
        said = self._worker.ask(ask="burst", prompts=prompts, output_tokens=workload.output_tokens)
        burst = Burst.from_json(said["requests"])
        burst.check(workload)
        return burst, said

    def measure(self, workload: Workload, seed: int) -> float:
        """Return the workload's figure: of one request the median of REPEATS."""
        repeats = REPEATS if workload.requests == 1 else 1
        bursts = [self.burst(workload, repeats * seed + i)[0] for i in range(repeats)]
        return statistics.median(burst.tokens_per_s(workload) for burst in bursts)

    def close(self) -> None:
        self._worker.close()


def optimc_engine(plan: Path, *, kv_bytes: int | None = None) -> WorkerEngine:
    """Start our engine in a process of this environment, with a KV pool of `kv_bytes` or as the plan says."""
    pool = () if kv_bytes is None else (str(kv_bytes),)
    return WorkerEngine([sys.executable, "-m", "peer.optimc_worker", str(plan.resolve()), str(THREADS), *pool])


def openvino_engine(python: Path, model: Path) -> WorkerEngine:
    """Start OpenVINO GenAI in a process of the peers' environment."""
    return WorkerEngine([str(python), "-m", "peer.openvino_worker", str(model.resolve()), str(THREADS)])


def ort_genai_engine(python: Path, model: Path) -> WorkerEngine:
    """Start onnxruntime-genai in a process of the peers' environment."""
    return WorkerEngine([str(python), "-m", "peer.ort_genai_worker", str(model.resolve()), str(THREADS)])
