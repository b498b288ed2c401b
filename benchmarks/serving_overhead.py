"""What HTTP costs, how soon a server is ready, and how steady its streams stay while a long prompt arrives.

    python benchmarks/serving_overhead.py PLAN [--sections ready,throughput,gap] [--quick]

Exits with 1 if a target that was measured is missed. README.md says how each figure is taken.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving_load import HERE, Reply, Server, ask, chat_prompts, mark, request, serving, write_report

from optimc.measure.percentile import percentile
from optimc.plan import Plan
from optimc_runtime.chat_template import ChatTemplate
from optimc_runtime.config import EngineConfig, SpeculationOptions
from optimc_runtime.engine import Engine
from optimc_runtime.request import RequestOutput, SamplingParams

STREAMS = 16
READY_WITHIN_S = 3.0
THROUGHPUT_AT_LEAST = 0.9
GAP_BELOW = 3.0
MODES = ("off", "auto")


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    starts: int = 5
    rounds: int = 7
    output_tokens: int = 128
    repeats: int = 5
    long_prompt: int = 2000
    settled_events: int = 48
    """Events of every stream before the long prompt is sent."""
    most_chars: int | None = None
    """Of a question; None leaves it as it is."""


QUICK = Sizes(starts=1, rounds=1, output_tokens=16, repeats=1, long_prompt=100, settled_events=8, most_chars=60)


@dataclass(frozen=True)
class Line:
    """One row of the result."""

    what: str
    figure: str
    wanted: str
    reached: bool


def measure_ready(plan: Path, folder: Path, sizes: Sizes) -> Iterator[Line]:
    """Start a server again and again: seconds to its ready line."""
    times_s = []
    for _ in range(sizes.starts):
        with serving(plan, folder) as server:
            times_s.append(server.ready_s)
            server.stop()
    shown = ", ".join(f"{seconds:.2f}" for seconds in times_s)
    worst_s = max(times_s)
    what = f"seconds to ready, each of {shown}"
    yield Line(what, f"{worst_s:.2f}", f"< {READY_WITHIN_S:g}", worst_s < READY_WITHIN_S)


def measure_throughput(plan: Path, folder: Path, sizes: Sizes) -> Iterator[Line]:
    """Serve the same prompts through HTTP and in process, in turns: the median ratio of output tokens per second."""
    for mode in MODES:
        yield _compare_throughput(plan, folder, sizes, mode)


def _compare_throughput(plan: Path, folder: Path, sizes: Sizes, mode: str) -> Line:
    rates: list[tuple[float, float]] = []
    with Plan.open(plan) as opened:
        template = ChatTemplate.from_plan(opened)
    assert template is not None, "the prompts are conversations"
    with serving(plan, folder, "--speculation", mode) as server, _engine(plan, mode) as engine:
        for number in range(sizes.rounds + 1):  # the first does not count
            prompts = chat_prompts(STREAMS, number * STREAMS, sizes.most_chars)
            assert engine.tokenizer is not None, "a plan with a chat template has a tokenizer"
            ids = [template.encode(engine.tokenizer, prompt) for prompt in prompts]
            salt = f"round {number}"  # no round finds what an earlier one has cached
            http = direct = 0.0
            for side in ("http", "direct") if number % 2 else ("direct", "http"):
                if side == "http":
                    http = _rate_over_http(server, prompts, sizes.output_tokens, salt)
                else:
                    direct = _rate_in_process(engine, ids, sizes.output_tokens, salt)
            rates.append((http, direct))
    ratios = [http / direct for http, direct in rates[1:]]
    ratio = statistics.median(ratios)
    http, direct = (statistics.median(side) for side in zip(*rates[1:], strict=True))
    what = f"{STREAMS} streams, speculation {mode}: {http:.0f} tokens/s over HTTP, {direct:.0f} in process; ratio"
    spread = f"{ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f}, n={len(ratios)})"
    return Line(what, spread, f"≥ {THROUGHPUT_AT_LEAST:g}", ratio >= THROUGHPUT_AT_LEAST)


def _engine(plan: Path, mode: str) -> Engine:
    """Return a started engine as `optimc serve` would start it."""
    engine = Engine.load(plan, EngineConfig(speculation=SpeculationOptions.parse(mode)))
    engine.start()
    if mode != "off":
        engine.profile_steps()
    engine.warm_up(max_tokens=16)
    return engine


def _rate_over_http(server: Server, prompts: Sequence[list[dict[str, str]]], tokens: int, salt: str) -> float:
    fields = {
        "stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "max_tokens": tokens,
        "ignore_eos": True, "cache_salt": salt,
    }  # fmt: skip
    bodies = "\n".join(json.dumps({**fields, "messages": prompt}) for prompt in prompts)
    host, port = server.address
    client = [sys.executable, str(HERE / "serving_client.py"), host, str(port), "/v1/chat/completions"]
    answer = subprocess.run(client, input=bodies, text=True, check=True, stdout=subprocess.PIPE)
    figures = json.loads(answer.stdout)
    assert figures["tokens"] == tokens * len(prompts), f"{figures['tokens']} tokens for {len(prompts)} times {tokens}"
    return float(figures["tokens"] / figures["seconds"])


def _rate_in_process(engine: Engine, prompts: Sequence[list[int]], tokens: int, salt: str) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    left = threading.Semaphore(0)

    def take(output: RequestOutput) -> None:
        if output.finish_reason is not None:
            assert output.finish_reason == "length", output
            left.release()

    started_s = time.perf_counter()
    for prompt in prompts:
        engine.submit(prompt, params, on_output=take, cache_salt=salt)
    for _ in prompts:
        left.acquire()
    return tokens * len(prompts) / (time.perf_counter() - started_s)


@dataclass
class Gaps:
    """Seconds between events with text of the streams that were running."""

    before: list[float]
    """While nothing else happened."""
    during: list[float]
    """While the long prompt was being computed."""
    prefill_s: list[float]
    """How long that took."""


def measure_gap(plan: Path, folder: Path, sizes: Sizes) -> Iterator[Line]:
    """Send one long prompt among running streams: the p99 of their gaps meanwhile, over the median of gaps."""
    for mode in MODES:
        gaps = Gaps([], [], [])
        with serving(plan, folder, "--speculation", mode) as server:
            for number in range(sizes.repeats):
                asyncio.run(_interrupt(server, sizes, number, gaps))
        for name, median_s in (
            ("undisturbed median", statistics.median(gaps.before)),
            ("median meanwhile", statistics.median(gaps.during)),
        ):
            p99_s = percentile(gaps.during, 99)
            what = (
                f"{STREAMS - 1} streams, speculation {mode}, {sizes.long_prompt} prompt tokens "
                f"(TTFT {statistics.median(gaps.prefill_s):.1f} s): p99 {p99_s * 1e3:.1f} ms (n={len(gaps.during)}) "
                f"over the {name}, {median_s * 1e3:.1f} ms"
            )
            yield Line(what, f"{p99_s / median_s:.2f}", f"< {GAP_BELOW:g}", p99_s < GAP_BELOW * median_s)


async def _interrupt(server: Server, sizes: Sizes, number: int, gaps: Gaps) -> None:
    """Run the streams, send the long prompt when they have settled, and add what they felt."""
    fields = {"stream": True, "temperature": 0, "ignore_eos": True, "cache_salt": f"repeat {number}"}
    streams = [Reply(0) for _ in range(STREAMS - 1)]
    tasks = []
    prompts = chat_prompts(len(streams), number * STREAMS, sizes.most_chars)
    for prompt, reply in zip(prompts, streams, strict=True):
        body: dict[str, Any] = {**fields, "messages": prompt}
        tasks.append(asyncio.create_task(ask(server.address, request("/v1/chat/completions", body), reply=reply)))
    while min(len(reply.events) for reply in streams) < sizes.settled_events:
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in tasks), "a stream ended before it was interrupted"
    ids = random.Random(number).choices(range(100, 300), k=sizes.long_prompt)
    body = {**fields, "prompt": ids, "max_tokens": 8}
    sent_s = time.perf_counter()
    long = await ask(server.address, request("/v1/completions", body))
    assert long.is_finished, long
    first_s = next(arrived_s for arrived_s, data in long.events if data != "[DONE]")
    for task in tasks:
        assert not task.done(), "a stream ended while the long prompt was computed"
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    gaps.prefill_s.append(first_s - sent_s)
    for reply in streams:
        times_s = [arrived_s for arrived_s, data in reply.events if has_text(data)]
        settled_s = times_s[sizes.settled_events // 3]
        for earlier_s, later_s in itertools.pairwise(times_s):
            if settled_s <= earlier_s and later_s <= sent_s:
                gaps.before.append(later_s - earlier_s)
            elif later_s > sent_s and earlier_s < first_s:
                gaps.during.append(later_s - earlier_s)


def has_text(data: str) -> bool:
    """Return whether an event of a chat stream brings text."""
    return data != "[DONE]" and any(choice["delta"].get("content") for choice in json.loads(data)["choices"])


SECTIONS = {"ready": measure_ready, "throughput": measure_throughput, "gap": measure_gap}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="what to measure")
    parser.add_argument("--quick", action="store_true", help="little of each, to see that it works")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "serving-overhead.md")
    options = parser.parse_args()
    with Plan.open(options.plan) as plan:
        assert plan.manifest.limits.max_seqs >= STREAMS, f"the plan takes {plan.manifest.limits.max_seqs} sequences"
    sizes = QUICK if options.quick else Sizes()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.sections.split(","):
            for line in SECTIONS[name](options.plan, Path(folder), sizes):
                print(f"{line.what}: {line.figure} (wanted {line.wanted}: {mark(line.reached)})", flush=True)
                lines.append(line)
    rows = [f"| {line.what} | {line.figure} | {line.wanted} | {mark(line.reached)} |" for line in lines]
    write_report(options.output, "Serving: overhead", options.plan, ["| | | wanted | |", "|---|---|---|---|", *rows])
    return 0 if all(line.reached for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
