"""`optimc serve` as its users run it, over HTTP."""

from __future__ import annotations

import sys
from pathlib import Path

from peer.burst import Burst, Workload
from peer.engines import THREADS
from peer.http_burst import free_port, http_burst
from peer.server_process import ServerProcess


class OptimcServer:
    """Starts the server and waits until it is ready. The plan's checksums are verified, as is the default.

    Nobody guesses tokens ahead: answers to random prompts loop, and guesses of a loop would flatter us.
    """

    def __init__(self, plan: Path, *, kv_memory: str) -> None:
        port = free_port()
        options = ["--port", str(port), "--threads", str(THREADS), "--kv-memory", kv_memory, "--no-speculation"]
        self.command = (sys.executable, "-m", "optimc", "serve", str(plan), *options)
        self.server = ServerProcess(self.command, url=f"http://127.0.0.1:{port}")
        self.pid = self.server.pid

    def measure(self, workload: Workload, seed: int) -> float:
        """Return the workload's figure."""
        return self.burst(workload, seed).tokens_per_s(workload)

    def burst(self, workload: Workload, seed: int) -> Burst:
        """Return the answers. Raises PeerError, and ValueError for missing tokens."""
        bodies = [
            {"prompt": prompt, "max_tokens": workload.output_tokens, "ignore_eos": True, "temperature": 0.0}
            for prompt in workload.prompts(seed)
        ]
        burst = http_burst(
            self.server.url, "/v1/completions", bodies, lambda answer: int(answer["usage"]["completion_tokens"])
        )
        burst.check(workload)
        return burst

    def close(self) -> None:
        self.server.close()
