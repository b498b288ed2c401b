"""llama.cpp by its own tools: llama-bench for one request, llama-server for many."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
from pathlib import Path
from typing import Any

from peer.burst import Burst, Workload
from peer.engines import REPEATS, THREADS
from peer.http_burst import free_port, http_burst
from peer.server_process import ServerProcess
from peer.worker import PeerError


class LlamaBench:
    """Times the model alone: the next token is made up, so neither a sampler nor text is in its figures."""

    def __init__(self, program: Path, model: Path) -> None:
        self._command = [str(program), "-m", str(model), "-t", str(THREADS), "-r", str(REPEATS)]
        self.command = (*self._command, "-p PROMPT -n 0 | -p 0 -n OUTPUT -d PROMPT", "-o", "json")
        self.versions = {"llama.cpp": version_in(program.parents[2])}

    def measure(self, workload: Workload, _seed: int) -> float:
        """Return the workload's figure, decode after a context as long as the prompt. Raises PeerError."""
        assert workload.requests == 1
        prompt, output = str(workload.prompt_tokens), str(workload.output_tokens)
        options = ["-p", prompt, "-n", "0"] if workload.figure == "prefill" else ["-p", "0", "-n", output, "-d", prompt]
        command = [*self._command, *options, "-o", "json"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise PeerError(f"{' '.join(command)}: ended with {done.returncode}\n{done.stderr.strip()[-2000:]}")
        return bench_tokens_per_s(json.loads(done.stdout))

    def close(self) -> None:
        """Nothing runs between calls."""


class LlamaServer:
    """llama-server with a slot for each client, over HTTP. Answers come whole, which costs it least."""

    def __init__(self, program: Path, model: Path, *, slots: int, context_tokens: int) -> None:
        """`context_tokens` is what each slot may hold."""
        port = free_port()
        options = ["-np", str(slots), "-c", str(slots * context_tokens), "-t", str(THREADS), "-tb", str(THREADS)]
        options += ["--cache-ram", "0", "--no-cache-prompt", "--no-ui", "--port", str(port)]
        self.command = (str(program), "-m", str(model), *options)
        self.server = ServerProcess(self.command, url=f"http://127.0.0.1:{port}")
        self.pid = self.server.pid
        self.versions = {"llama.cpp": version_in(program.parents[2])}

    def measure(self, workload: Workload, seed: int) -> float:
        """Return the workload's figure."""
        return self.burst(workload, seed).tokens_per_s(workload)

    def burst(self, workload: Workload, seed: int) -> Burst:
        """Return the answers. Raises PeerError, and ValueError for missing tokens."""
        bodies = [
            {"prompt": prompt, "n_predict": workload.output_tokens, "ignore_eos": True, "temperature": 0.0}
            for prompt in workload.prompts(seed)
        ]
        burst = http_burst(self.server.url, "/completion", bodies, lambda answer: int(answer["tokens_predicted"]))
        burst.check(workload)
        return burst

    def close(self) -> None:
        self.server.close()


def bench_tokens_per_s(report: list[dict[str, Any]]) -> float:
    """Return the median of the runs in llama-bench's JSON. Raises ValueError unless it holds exactly one test."""
    if len(report) != 1:
        raise ValueError(f"{len(report)} tests in llama-bench's report, want 1")
    return float(statistics.median(report[0]["samples_ts"]))


def version_in(sources: Path) -> str:
    """Return the version of the sources and the package they came in; they are no git checkout that could tell."""
    text = (sources / "CMakeLists.txt").read_text("utf-8")
    parts = [re.search(rf"LLAMA_VERSION_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    version = ".".join(part.group(1) for part in parts if part)
    package = sources / "PACKAGE"
    return f"{version} ({package.read_text('utf-8').strip()})" if package.exists() else version
